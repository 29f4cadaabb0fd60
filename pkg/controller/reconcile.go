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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// retryDelay is the time until the next decision on a request if no watch event will show that the
// obstacle is gone. It also bounds the back-off after failures.
const retryDelay = time.Second

// Reconcile decides on one request, if there is something to decide, and reports a write that the
// API server refused. The queue has already applied the rate limits (R1).
func (c *Controller) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	object := &certificatesv1.CertificateSigningRequest{}
	if err := c.client.Get(ctx, request.NamespacedName, object); err != nil {
		c.forget(request.Name)
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if stateOf(object) == finished { // the cache shows that a hello is closed
		c.actor.lastWrites.forget(object)
	}
	if !c.intake.isOurs(object) {
		c.forget(request.Name)
		return c.issuedWatch.noticeIssued(ctx, object)
	}
	result, err := c.proceed(ctx, object)
	if isWriteRefused(err) {
		c.reporter.reportWriteRefused(ctx, object, err)
		if attestation.IsRehearsalSigner(object.Spec.SignerName) {
			return ctrl.Result{RequeueAfter: refusedVerdictDelay}, nil
		}
	}
	return result, err
}

// refusedVerdictDelay is the time between two attempts to write on a rehearsal. A cluster whose
// RBAC is older than this release refuses each one, and a rehearsal stays for a day.
const refusedVerdictDelay = 10 * time.Minute

// proceed takes the next step for a request of ours, by its state.
func (c *Controller) proceed(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (ctrl.Result, error) {
	now, began, restored := c.Now(), time.Now(), false
	switch stateOf(object) {
	case finished:
		c.forget(object.Name)
		if err := c.actor.finish(ctx, object); err != nil {
			return ctrl.Result{}, err
		}
		return c.issuedWatch.noticeIssued(ctx, object)
	case approved:
		if issued := c.actor.unpublished.get(object); issued != nil {
			if wait := c.actor.untilAccepted(issued); wait > 0 {
				return ctrl.Result{RequeueAfter: wait}, nil
			}
		}
		// another signer may have issued the certificate since
		if err := c.live.Get(ctx, client.ObjectKeyFromObject(object), object); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	case pending:
		expires, challenged := c.intake.challengeExpiry(object, now)
		if c.intake.rehearsalIsDone(object, challenged, now) {
			return ctrl.Result{}, nil
		}
		if challenged && (mayGetProof(expires, now) || c.Audit) {
			c.intake.limit(object)
			// In audit mode the challenge may have ended already: then wait for closeDelay.
			return ctrl.Result{RequeueAfter: max(expires.Add(closeDelay).Sub(now), closeDelay)}, nil
		}
		if restored = c.intake.isDropped(object); restored {
			if same, err := c.restore(ctx, object); err != nil {
				return ctrl.Result{}, err
			} else if !same {
				return ctrl.Result{RequeueAfter: retryDelay}, nil
			}
		}
		if challenged { // no proof followed: close the hello
			err := c.denyUnjudged(ctx, object, verifier.ReasonHelloExpired, "no proof came before the challenge ran out", now)
			c.queue.Charge(object.Spec.Username, time.Since(began))
			return ctrl.Result{}, err
		}
	}
	outcome, result, err := c.decide(ctx, object, now)
	if restored || outcome == verifier.Deny {
		c.queue.Charge(object.Spec.Username, time.Since(began))
	}
	return result, err
}

// restore reads a request live whose content the cache dropped. It reports false if that request is
// gone, or has changed. onlyAnnotated may drop the event of that change, so the request is requeued
// anyway.
func (c *Controller) restore(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (bool, error) {
	whole, err := getRequest(ctx, c.live, object.Name)
	if whole == nil || err != nil {
		return false, err
	}
	if whole.UID != object.UID || whole.ResourceVersion != object.ResourceVersion || !c.Rules.Matches(whole) {
		return false, nil
	}
	*object = *whole
	return true, nil
}

// forget drops the state that is kept for a request that is decided or gone.
func (c *Controller) forget(name string) {
	c.queue.Forget(name)
	c.retries.Forget(name)
	c.actor.unpublished.forget(name)
}

// decide tries the passes in order until one is sufficient. It carries the decision out, reports
// it, and returns the outcome. After an approval it also signs, and still returns Approve.
func (c *Controller) decide(ctx context.Context, object *certificatesv1.CertificateSigningRequest, now time.Time) (verifier.Outcome, ctrl.Result, error) {
	claim, ours := c.Rules.ParseClaim(object)
	if !ours { // another request of the same name replaced it
		return verifier.Ignore, ctrl.Result{}, nil
	}
	began, situation, m := time.Now(), c.situationOf(object, claim, now), &memo{evidence: map[evidenceKey]verifier.Evidence{}}
	for _, p := range passes {
		if !p.applies(situation) {
			continue
		}
		s, err := c.collector.collect(ctx, object, claim, now, p, m)
		if err != nil {
			return 0, ctrl.Result{}, err
		}
		decision := c.judge(object, s)
		if decision.Outcome == verifier.Approve && !c.actor.machineLimits.Ready(decision.Grant.Record.Machine.Name, c.Now()) {
			decision = decision.RateLimited()
		}
		if !p.sufficientFor(situation, decision.Outcome) {
			continue
		}
		if err := s.input.Evidence.Err; err != nil && !isVerdict(err) && p.evidence == judged {
			// the node gets the reason without the cause, so log the cause here
			log.FromContext(ctx).Info("the evidence could not be judged", "request", object.Name, "cause", err.Error())
		}
		result, err := c.carryOut(ctx, object, s, decision, time.Since(began))
		if isStale(err) && p.consistency == Cached {
			continue
		}
		if current := s.input.Request; err == nil && c.CA != nil && stateOf(object) == pending && stateOf(current) == approved {
			// This call wrote the record and the approval, so it can sign without reading them
			// again. If that fails, the watch event of the approval queues the request again.
			began := time.Now()
			s.approvalWarnings = decision.Warnings
			result, err = c.carryOut(ctx, current, s, c.judge(current, s), time.Since(began))
		}
		result, err = c.retryConflicts(ctx, object, now, result, err)
		return decision.Outcome, result, err
	}
	// not reached: the last pass is sufficient for every outcome
	return 0, ctrl.Result{}, fmt.Errorf("request %s: no consistency level produced a decision", object.Name)
}

// judge asks the rules for a decision that fits the request's state. It refuses a proof that the
// rules would approve or sign if the node was revoked since the hello: a thief may have the key.
// The node may start over at once, with a new key.
func (c *Controller) judge(object *certificatesv1.CertificateSigningRequest, s *snapshot) verifier.Decision {
	var d verifier.Decision
	switch {
	case stateOf(object) != approved:
		d = c.Rules.Judge(s.input)
	case c.CA == nil && s.isRecorded(object):
		return c.Rules.JudgeUnsigned(s.input)
	default:
		d = c.Rules.JudgeSigning(s.input)
	}
	if d.Outcome != verifier.Approve && d.Outcome != verifier.Sign || !c.Revocation.revokedSince(d.Grant.NodeName, s.input.Request, s.input.Hello) {
		return d
	}
	refused := verifier.Decision{Class: d.Class, Outcome: verifier.Deny, Refusals: verifier.Refusals{{
		Reason: attestation.ReasonExpired, Message: "the node was revoked since the hello, whose key is older: a new one may follow at once",
	}}}
	if d.Outcome == verifier.Sign {
		refused.Outcome = verifier.Fail
	}
	return refused
}

// carryOut carries a decision out, and reports it. In audit mode it writes on rehearsals only.
func (c *Controller) carryOut(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, decision verifier.Decision, took time.Duration) (result ctrl.Result, err error) {
	switch {
	case decision.Outcome == verifier.Wait:
		result = c.requeueWaiting(object, s, decision.Refusals.Reason())
		c.publishWaiting(ctx, object, s, decision)
	case decision.Outcome == verifier.Ignore && c.CA == nil && s.isRecorded(object):
		// another signer issues it; JudgeUnsigned fails it at the deadline
		result.RequeueAfter = max(c.Rules.Deadline(object).Sub(s.input.Now), time.Second)
	case s.claim.Rehearsal:
		result, err = c.actor.rehearse(ctx, object, s, decision)
	case !c.Audit:
		result, err = c.actor.act(ctx, object, s, decision)
	}
	// a published certificate is final, even if closing the hello failed
	if err == nil && !s.publishLater || s.issued != nil {
		c.reporter.report(ctx, object, s, decision, took)
	}
	return result, err
}

// denyUnjudged denies a request for a reason that did not come from the rules.
func (c *Controller) denyUnjudged(ctx context.Context, object *certificatesv1.CertificateSigningRequest, reason verifier.Reason, message string, now time.Time) error {
	if err := c.actor.deny(ctx, object, string(reason), message); err != nil {
		return err
	}
	claim, _ := c.Rules.ParseClaim(object)
	s := &snapshot{claim: claim, provider: c.providers[claim.Provider], input: verifier.Input{Now: now, Request: object}}
	d := verifier.Decision{Outcome: verifier.Deny, Refusals: verifier.Refusals{{Reason: reason, Message: message}}}
	c.reporter.log(ctx, object, s, d, string(reason), message)
	return nil
}

// waitingEvidence is the remembered evidence of a waiting request. It is valid only for the same
// key.
type waitingEvidence struct {
	by       evidenceKey
	evidence verifier.Evidence
}

// requeueWaiting requeues a waiting request for later. It remembers the evidence, unless that could
// not be judged.
func (c *Controller) requeueWaiting(object *certificatesv1.CertificateSigningRequest, s *snapshot, cause verifier.Reason) ctrl.Result {
	now, q := s.input.Now, s.question()
	if s.claim.Rehearsal {
		cause = "" // the gauge of waiting requests counts real ones only
	}
	after := c.retries.Remember(fairqueue.Waiting{
		Name: object.Name, UID: object.UID, Claim: s.queueClaim(), Cause: string(cause),
		Created: object.CreationTimestamp.Time, Deadline: c.Rules.Deadline(object),
	}, now)
	fresh := waitingEvidence{evidenceKeyOf(q), s.input.Evidence}
	last, known := c.retries.Memo(object.Name, object.UID, now)
	if err := s.input.Evidence.Err; (!known || last.by != fresh.by) && (err == nil || isVerdict(err)) {
		c.retries.Keep(object.Name, object.UID, fresh, now)
	}
	return ctrl.Result{RequeueAfter: after}
}

// isStale reports whether a write failed because of another write since the read.
func isStale(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// retryConflicts requeues a request whose write lost to another writer. The next decision reads
// that write first. Other errors are retried with the queue's back-off.
func (c *Controller) retryConflicts(ctx context.Context, object *certificatesv1.CertificateSigningRequest, now time.Time, result ctrl.Result, err error) (ctrl.Result, error) {
	switch {
	case apierrors.IsAlreadyExists(err):
		// Either another replica created the record: then the next decision reads it. Or the record
		// belongs to another cluster: it will not go away, so the request is denied at the
		// deadline.
		if !now.Before(c.Rules.Deadline(object)) {
			return ctrl.Result{}, c.denyUnjudged(ctx, object, verifier.ReasonIdentityBound, "record: there is one of that name, and it belongs to another cluster", now)
		}
		log.FromContext(ctx).Info("there is a record of that name already", "request", object.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: retryDelay}, nil
	case apierrors.IsConflict(err):
		log.FromContext(ctx).V(1).Info("another writer was faster", "request", object.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: conflictDelay}, nil
	}
	return result, err
}

const conflictDelay = retryDelay / 10

// state is a request's progress, as far as decisions depend on it.
type state int

const (
	pending state = iota + 1
	approved
	// finished: nothing is left to decide or to sign.
	finished
)

func stateOf(object *certificatesv1.CertificateSigningRequest) state {
	switch csrstate.Of(object) {
	case csrstate.Pending:
		return pending
	case csrstate.Approved:
		return approved
	}
	return finished
}
