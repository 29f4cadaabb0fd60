// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	// retryDelay is the time until the next decision on a request if no watch event will show that
	// the obstacle is gone. It also bounds the back-off after failures.
	retryDelay = time.Second
	// refusedVerdictDelay is the time between two attempts to write on a rehearsal. A cluster whose
	// RBAC is older than this release refuses each one, and a rehearsal stays for a day.
	refusedVerdictDelay = 10 * time.Minute
)

// Reconcile takes a request from its event to its certificate. The queue has already applied the
// rate limits of the requester and the cluster (R1), and judge applies the machine's. Each write
// names the version that was read, so a lost race is a conflict, and the next decision reads what
// the other writer wrote. After a crash, the next call starts at step 1, and reaches the missing
// step from what is stored.
func (c *Controller) Reconcile(ctx context.Context, key ctrl.Request) (result ctrl.Result, err error) {
	now, arrived := c.Now(), time.Now()

	// 1. Load the request from the cache.
	request := &certificatesv1.CertificateSigningRequest{}
	if err := c.client.Get(ctx, key.NamespacedName, request); err != nil {
		if apierrors.IsNotFound(err) {
			c.forget(key.Name)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}

	// 2. Classify it. Most events leave nothing to decide.
	if csrstate.Of(request).Finished() { // the cache shows the last write
		c.actor.LastWrites.Forget(request)
	}
	if !c.intake.IsOurs(request) {
		c.forget(request.Name)
		return c.issuedWatch.Notice(ctx, request)
	}
	defer func() { result, err = c.retryRefusedWrite(ctx, request, result, err) }()
	restored := false
	switch state := csrstate.Of(request); {
	case state.Finished():
		c.forget(request.Name)
		if err := c.finish(ctx, request); err != nil {
			return ctrl.Result{}, err
		}
		return c.issuedWatch.Notice(ctx, request)
	case state == csrstate.Approved:
		if wait := c.actor.UntilPublished(request); wait > 0 {
			return ctrl.Result{RequeueAfter: wait}, nil
		}
		// The cache may not show yet that the certificate is published. If this replica did that,
		// nothing is left to do. If another one did, the rules ignore the request.
		if c.actor.LastWrites.TakePublished(request) {
			return ctrl.Result{RequeueAfter: retryDelay}, nil
		}
		if err := c.live.Get(ctx, key.NamespacedName, request); err != nil {
			return ctrl.Result{}, client.IgnoreNotFound(err)
		}
	case state == csrstate.Pending:
		expires, challenged := c.intake.ChallengeExpiry(request, now)
		if c.intake.RehearsalIsDone(request, challenged, now) {
			return ctrl.Result{}, nil
		}
		if challenged && (intake.MayGetProof(expires, now) || c.Audit) {
			c.intake.Limit(request)
			// In audit mode the challenge may have ended already: then wait for CloseDelay.
			return ctrl.Result{RequeueAfter: max(expires.Add(intake.CloseDelay).Sub(now), intake.CloseDelay)}, nil
		}
		if restored = c.intake.IsDropped(request); restored {
			whole, retry, err := c.restore(ctx, request)
			if whole == nil {
				return ctrl.Result{RequeueAfter: retry}, err
			}
			request = whole
		}
		if challenged { // no proof followed: close the hello
			err := c.denyUnjudged(ctx, request, verifier.ReasonHelloExpired, "no proof was accepted before the challenge ran out", now)
			c.queue.Charge(request.Spec.Username, time.Since(arrived))
			return ctrl.Result{}, err
		}
	}
	claim, ours := c.Rules.ParseClaim(request)
	if !ours { // another request of the same name replaced it
		return ctrl.Result{}, nil
	}
	var d verifier.Decision
	defer func() {
		if restored || d.Outcome == verifier.Deny {
			c.queue.Charge(request.Spec.Username, time.Since(arrived))
		}
	}()
	began, situation, known := time.Now(), c.collector.SituationOf(request, claim, now, c.mayWrite(claim)), collect.NewMemo()
	for _, p := range collect.Passes {
		if !p.Applies(situation) {
			continue
		}

		// 3. Collect the inputs, as fresh as the pass defines.
		in, err := c.collector.Collect(ctx, request, claim, now, p, known)
		if err != nil {
			return ctrl.Result{}, err
		}

		// 4. Judge them. If they do not suffice for the outcome, nothing is written.
		d = c.judge(in)
		if !p.SufficientFor(situation, d.Outcome) {
			continue
		}
		p.LogUnjudged(ctx, in)
		// a rehearsal is neither approved nor signed: rehearse refuses these outcomes
		took, mayGrant := time.Since(began), !c.Audit && !claim.Rehearsal
		var warnings verifier.Refusals // of an approval in this call
		if d.Outcome == verifier.Approve && mayGrant {
			var approval act.Written
			// 5. Write the record. It is the lock: it names one of two requests that might both
			// pass. A record that contradicts it and was written meanwhile is a conflict.
			if approval.Record, err = c.actor.RecordGrant(ctx, in, d); err == nil {
				// 6. Approve. The record now proves that this Controller did.
				approval.Request, err = c.actor.Approve(ctx, in, d)
			}
			if isStale(err) && p.Consistency == collect.Cached {
				continue
			}
			if err == nil { // the approval is a decision of its own
				c.reporter.Report(ctx, in, d, approval, took)
			}
			if err != nil || !c.issuer.Issues() {
				return c.resolveConflict(ctx, request, now, ctrl.Result{}, err)
			}
			// Sign now, without reading again what this call wrote. The rules judge all of it
			// again. If a step fails, the event of the approval queues the request again.
			began, warnings = time.Now(), d.Warnings
			in = in.Approved(approval.Request, approval.Record, c.records.Record(approval.Record))
			d = c.judge(in)
			took = time.Since(began)
		}

		if d.Outcome != verifier.Sign || !mayGrant {
			done, err := c.carryOut(ctx, in, d, warnings)
			if isStale(err) && p.Consistency == collect.Cached && in.Request == request {
				continue
			}
			if err == nil {
				c.reporter.Report(ctx, in, d, done, took)
			}
			return c.resolveConflict(ctx, request, now, ctrl.Result{RequeueAfter: done.RequeueAfter}, err)
		}

		// 7. Sign. The certificate goes into the record before anybody can have it.
		issued, record, err := c.actor.Sign(ctx, in, d, warnings)
		if err != nil {
			return c.resolveConflict(ctx, request, now, ctrl.Result{}, err)
		}
		// If the node has a revoked certificate, API servers refuse the new one until the policies
		// have it. A later call publishes it then.
		if wait := c.actor.UntilAccepted(issued); wait > 0 {
			c.actor.KeepUnpublished(ctx, in.Request, issued)
			return ctrl.Result{RequeueAfter: wait}, nil
		}

		// 8. Publish the certificate.
		if err := c.actor.PublishIssued(ctx, in.Request, issued); err != nil {
			return c.resolveConflict(ctx, request, now, ctrl.Result{}, err)
		}

		// 9. Close the hello. A published certificate is final, even if this fails.
		err = c.actor.CloseHello(ctx, in.Hello, request.Name)

		// 10. Report.
		c.reporter.Report(ctx, in, d, act.Written{Record: record, Certificate: issued.Chain, Warnings: issued.Warnings}, took)
		return c.resolveConflict(ctx, request, now, ctrl.Result{}, err)
	}
	// not reached: the last pass is sufficient for every outcome
	return ctrl.Result{}, fmt.Errorf("request %s: no pass produced a decision", request.Name)
}

// mayWrite reports whether decisions on a request are carried out. In audit mode they are only
// reported. Rehearsals are answered even then, since they lead to no certificate.
func (c *Controller) mayWrite(claim verifier.Claim) bool { return !c.Audit || claim.Rehearsal }

// carryOut carries out each decision but the approval and the signing of a client certificate. In
// audit mode it writes nothing.
// warnings are those of an approval in the same call.
func (c *Controller) carryOut(ctx context.Context, in *collect.Inputs, d verifier.Decision, warnings verifier.Refusals) (done act.Written, err error) {
	switch {
	case d.Outcome == verifier.Wait:
		done.RequeueAfter = c.actor.Wait(in, d)
		if c.mayWrite(in.Claim) {
			c.reporter.Unpublished(ctx, in.Request, c.actor.PublishWaiting(ctx, in, d.Refusals.Reason()))
		}
	case d.Outcome == verifier.Ignore && !c.issuer.Issues() && in.IsRecorded():
		// another signer issues it; JudgeUnsigned fails it at the deadline
		done.RequeueAfter = max(c.Rules.Deadline(in.Request).Sub(in.Now), time.Second)
	case c.mayWrite(in.Claim):
		done, err = c.actor.CarryOut(ctx, in, d)
	}
	done.Warnings = warnings
	return done, err
}

// restore reads a request live whose content the cache dropped. It returns nil if that request is
// gone, or has changed, and the time until the next decision. It is needed, since intake may
// drop the event of that change.
func (c *Controller) restore(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, time.Duration, error) {
	whole, err := evidence.GetRequest(ctx, c.live, object.Name)
	if err != nil {
		return nil, 0, err
	}
	if whole == nil || whole.UID != object.UID || whole.ResourceVersion != object.ResourceVersion || !c.Rules.Matches(whole) {
		return nil, retryDelay, nil
	}
	return whole, 0, nil
}

// forget drops the state that is kept for a request that is decided or gone.
func (c *Controller) forget(name string) {
	c.queue.Forget(name)
	c.retries.Forget(name)
	c.actor.Forget(name)
}

// judge asks the rules for a decision that fits the request's state. What the rules let pass may
// still wait for the machine's rate limit, or be refused since the node was revoked.
func (c *Controller) judge(in *collect.Inputs) verifier.Decision {
	if csrstate.Of(in.Request) == csrstate.Approved {
		if !c.issuer.Issues() && in.IsRecorded() { // another signer has time until the deadline
			return c.refuseRevoked(in, c.Rules.JudgeUnsigned(in.Input))
		}
		return c.refuseRevoked(in, c.Rules.JudgeSigning(in.Input))
	}
	d := c.refuseRevoked(in, c.Rules.Judge(in.Input))
	if d.Outcome == verifier.Approve && !c.actor.MachineLimits.Ready(d.Grant.Record.Machine.Name, c.Now()) {
		return d.RateLimited()
	}
	return d
}

// refuseRevoked refuses a proof that the rules would approve or sign if the node was revoked since
// the hello: a thief may have the key. The node may start over at once, with a new key.
func (c *Controller) refuseRevoked(in *collect.Inputs, d verifier.Decision) verifier.Decision {
	if d.Outcome != verifier.Approve && d.Outcome != verifier.Sign {
		return d
	}
	requests := []types.UID{in.Request.UID}
	if in.Hello != nil {
		requests = append(requests, in.Hello.UID)
	}
	if !c.actor.Revocations.RevokedSince(d.Grant.NodeName, requests...) {
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

// denyUnjudged denies a request for a reason that did not come from the rules.
func (c *Controller) denyUnjudged(ctx context.Context, request *certificatesv1.CertificateSigningRequest, reason verifier.Reason, message string, now time.Time) error {
	if _, err := c.actor.Deny(ctx, request, string(reason), message); err != nil {
		return err
	}
	claim, _ := c.Rules.ParseClaim(request)
	in := (&collect.Inputs{Claim: claim, Provider: c.providers[claim.Provider], Input: verifier.Input{Now: now, Request: request}}).Complete()
	d := verifier.Decision{Outcome: verifier.Deny, Refusals: verifier.Refusals{{Reason: reason, Message: message}}}
	c.reporter.Log(ctx, in, d, act.Written{}, collect.SubjectOf(in, d), string(reason), message)
	return nil
}

// isStale reports whether a write failed because of another write since the read.
func isStale(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// resolveConflict requeues a request whose write lost to another writer. The next decision reads
// that write first. Other errors are retried with the queue's back-off.
func (c *Controller) resolveConflict(ctx context.Context, request *certificatesv1.CertificateSigningRequest, now time.Time, result ctrl.Result, err error) (ctrl.Result, error) {
	switch {
	case apierrors.IsAlreadyExists(err):
		// Either another replica created the record: then the next decision reads it. Or the record
		// belongs to another cluster: it will not go away, so the request is denied at the
		// deadline.
		if !now.Before(c.Rules.Deadline(request)) {
			return ctrl.Result{}, c.denyUnjudged(ctx, request, verifier.ReasonIdentityBound, "record: there is one of that name, and it belongs to another cluster", now)
		}
		log.FromContext(ctx).Info("there is a record of that name already", "request", request.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: retryDelay}, nil
	case apierrors.IsConflict(err):
		log.FromContext(ctx).V(1).Info("another writer was faster", "request", request.Name, "cause", err.Error())
		return ctrl.Result{RequeueAfter: act.ConflictDelay}, nil
	}
	return result, err
}

// retryRefusedWrite reports a write that the API server refused. On a rehearsal it is retried later
// than by the queue's back-off.
func (c *Controller) retryRefusedWrite(ctx context.Context, request *certificatesv1.CertificateSigningRequest, result ctrl.Result, err error) (ctrl.Result, error) {
	if !act.IsWriteRefused(err) {
		return result, err
	}
	c.reporter.WriteRefused(ctx, request, err)
	if attestation.IsRehearsalSigner(request.Spec.SignerName) {
		return ctrl.Result{RequeueAfter: refusedVerdictDelay}, nil
	}
	return result, err
}
