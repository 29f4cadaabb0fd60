// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// lookAgain is how soon a request that waits is looked at again: inventories and machines appear without telling.
const lookAgain = time.Second

// Reconcile decides on one request, as far as there is something to decide, and reports a write
// that the API server refused.
func (c *Controller) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	object := &certificatesv1.CertificateSigningRequest{}
	if err := c.client.Get(ctx, request.NamespacedName, object); err != nil {
		c.forget(request.Name)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !c.Rules.Matches(object) {
		c.forget(request.Name)
		return c.noticeIssued(ctx, object)
	}
	result, err := c.proceed(ctx, request, object)
	if isWriteRefused(err) {
		c.reportRefused(object, err)
	}
	return result, err
}

// proceed takes a request of ours on from its state. What costs more than a glance comes after the
// request's turn.
func (c *Controller) proceed(ctx context.Context, request ctrl.Request, object *certificatesv1.CertificateSigningRequest) (ctrl.Result, error) {
	now := c.Now()
	switch stateOf(object) {
	case done:
		c.forget(request.Name)
		if err := c.finish(ctx, object); err != nil {
			return ctrl.Result{}, err
		}
		return c.noticeIssued(ctx, object)
	case approved: // it may have been issued since
		c.turns.forget(request.Name)
		if err := c.live.Get(ctx, request.NamespacedName, object); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	case undecided:
		expires, challenged := c.challengedUntil(object, now)
		if wait := expires.Add(time.Minute).Sub(now); challenged && (wait > 0 || c.Audit) {
			return ctrl.Result{RequeueAfter: max(wait, time.Minute)}, nil
		}
		if lent, err := c.sharedMachines(ctx, now); err == nil && c.waits.early(object, lent, now) {
			c.turns.forget(object.Name) // nobody stands in line behind it
			return ctrl.Result{RequeueAfter: lookAgain}, nil
		}
		if wait := c.turns.wait(object.Name, object.Spec.Username, c.Now()); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
		if challenged { // so that none is left open
			return ctrl.Result{}, c.deny(ctx, object, string(verifier.ReasonHelloExpired), "no proof came before the challenge ran out")
		}
	}
	return c.decide(ctx, object, now)
}

// forget drops what is remembered of a request that is decided or gone.
func (c *Controller) forget(name string) {
	c.turns.forget(name)
	c.waits.forget(name)
}

// decide judges a request, carries out what became of it, and says so.
func (c *Controller) decide(ctx context.Context, object *certificatesv1.CertificateSigningRequest, now time.Time) (ctrl.Result, error) {
	claim, ours := c.Rules.ParseClaim(object)
	if !ours { // it is another one of that name
		return ctrl.Result{}, nil
	}
	began, known := time.Now(), &known{evidence: map[judgement]verifier.Evidence{}}
	for _, from := range c.readings(object, claim, now) {
		found, err := c.gather(ctx, object, claim, now, from, known)
		if err != nil {
			return ctrl.Result{}, err
		}
		if err := found.input.Evidence.Err; err != nil && !isVerdict(err) && from == fromAPIServer {
			log.FromContext(ctx).Info("the evidence could not be judged", "request", object.Name, "cause", err.Error()) // the node is not told why
		}
		decision := c.judge(object, found)
		if decision.Outcome == verifier.Approve && !c.turns.machineMay(decision.Grant.Record.Machine.Name, c.Now()) {
			found.input.RateLimited = true
			decision = c.judge(object, found)
		}
		if !found.settles(decision) {
			continue
		}
		result, err := c.carryOut(ctx, object, found, decision, time.Since(began))
		if isOutdated(err) && from != fromAPIServer {
			continue
		}
		if decision.Outcome == verifier.Deny {
			c.turns.denied(object.Spec.Username, time.Since(began), c.Now())
		}
		if held := found.input.Request; err == nil && c.CA != nil && stateOf(object) == undecided && stateOf(held) == approved {
			// It is signed by what was just read and written, and under its versions. Otherwise the approval, which is watched, brings it here again.
			began := time.Now()
			result, err = c.carryOut(ctx, held, found, c.judge(held, found), time.Since(began))
		}
		return c.afterwards(ctx, object, now, result, err)
	}
	return ctrl.Result{}, fmt.Errorf("request %s: nothing settles it", object.Name) // what is from the API server does
}

// again has a request that waits come back.
func (c *Controller) again(object *certificatesv1.CertificateSigningRequest, found *found) ctrl.Result {
	var lent []verifier.Machine
	if _, ok := c.Machines.(SharedSource); ok { // others' are a copy for each decision, which is not to be kept
		lent = found.input.Machines
	}
	c.waits.looked(object, lent, c.Rules.Deadline(object), found.input.Now)
	c.waits.keep(found.question(), found.input.Evidence)
	return ctrl.Result{RequeueAfter: lookAgain}
}

// carryOut carries out a decision, and says so.
func (c *Controller) carryOut(ctx context.Context, object *certificatesv1.CertificateSigningRequest, found *found, decision verifier.Decision, took time.Duration) (result ctrl.Result, err error) {
	switch {
	case decision.Outcome == verifier.Wait:
		result = c.again(object, found)
	case decision.Outcome == verifier.Ignore && c.CA == nil && found.names(object): // another signs, or nobody ever does
		result.RequeueAfter = max(c.Rules.Deadline(object).Sub(found.input.Now), time.Second)
	case !c.Audit:
		result, err = c.act(ctx, object, found, decision)
	}
	if err == nil {
		c.report(ctx, object, found, decision, took)
	}
	return result, err
}

// isOutdated reports whether something was written meanwhile.
func isOutdated(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// afterwards returns when a request is looked at again that was just decided on, or was to be.
func (c *Controller) afterwards(ctx context.Context, object *certificatesv1.CertificateSigningRequest, now time.Time, result ctrl.Result, err error) (ctrl.Result, error) {
	switch {
	case apierrors.IsAlreadyExists(err):
		// Another replica made the record, or it is one that is not this cluster's to see, and stays.
		if !now.Before(c.Rules.Deadline(object)) {
			return ctrl.Result{}, c.deny(ctx, object, string(verifier.ReasonIdentityBound), "record: there is one of that name, which is not this cluster's")
		}
		log.FromContext(ctx).Info("there is a record of that name already", "request", object.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: lookAgain}, nil
	case apierrors.IsConflict(err):
		// Somebody wrote first. What he wrote is read before anything is decided again.
		log.FromContext(ctx).V(1).Info("somebody was faster", "request", object.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: lookAgain / 10}, nil
	}
	return result, err
}

// state is how far a request has come.
type state int

const (
	undecided state = iota + 1
	approved
	// done: nothing is left to decide or to sign.
	done
)

func stateOf(object *certificatesv1.CertificateSigningRequest) state {
	switch csrstate.Of(object) {
	case csrstate.Pending:
		return undecided
	case csrstate.Approved:
		return approved
	}
	return done
}

func (c *Controller) judge(object *certificatesv1.CertificateSigningRequest, found *found) verifier.Decision {
	switch {
	case stateOf(object) != approved:
		return c.Rules.Judge(found.input)
	case c.CA == nil && found.names(object):
		return c.Rules.JudgeUnsigned(found.input)
	}
	return c.Rules.JudgeSigning(found.input)
}

// challengedUntil returns the end of the challenge in a hello, if there is one that may be ours: a node can only fool itself with another.
func (c *Controller) challengedUntil(object *certificatesv1.CertificateSigningRequest, now time.Time) (time.Time, bool) {
	value := object.Annotations[attestation.AnnotationChallenge]
	if object.Spec.SignerName != attestation.HelloSignerName || value == "" || stateOf(object) != undecided {
		return time.Time{}, false
	}
	challenge, err := attestation.ParseChallenge([]byte(value))
	if err != nil {
		return time.Time{}, false
	}
	expires := time.Unix(challenge.Expires, 0)
	return expires, expires.Before(now.Add(maxChallenge))
}

// maxChallenge is more than any challenge of ours lasts.
const maxChallenge = time.Hour
