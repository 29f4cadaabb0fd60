// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// maxAttempts bounds the attempts of one enrolment. startOver lists why another one is needed.
const maxAttempts = 3

var (
	// errRejected says that the API server answered the node's own certificate with 401.
	errRejected = errors.New("the API server rejects the node's certificate")
	// errGone says that the request was deleted.
	errGone = errors.New("the request is gone")
)

// enrol resumes the pending request, or prepares one, and follows it until it is decided.
func (w *worker) enrol(ctx context.Context, status nodestate.Status, to nodeaccess.Access) error {
	client, err := csr.NewClient(to.Config)
	if err != nil {
		return reason.Configuration.Failure("check the kubeconfig", err)
	}
	e := &enrolment{worker: w, status: status, to: to, client: client}
	var again *reason.Failure
	for range maxAttempts {
		if err := e.resume(); err != nil {
			return err
		}
		if e.pending == nil {
			if err := e.prepare(ctx); err != nil {
				return err
			}
		}
		decision, err := e.pursue(ctx)
		if again = e.startOver(decision, err); again == nil {
			if err != nil {
				return err
			}
			return e.conclude(decision)
		}
		w.result.Wasted = true
		w.log.Info("the attempt failed, and another one may help", "request", w.result.Request, "cause", again.Error())
		if err := w.lock.ForgetPending(); err != nil {
			return err
		}
	}
	return again
}

// resume continues the pending request if it still matches the settings. Otherwise it forgets the
// request.
func (e *enrolment) resume() error {
	e.pending = nil
	pending, err := e.worker.enroller.Node.Dir().Pending()
	if cache.MustBeSetAside(err) {
		return e.worker.setAside(cache.PendingFile, err)
	}
	if err != nil || pending == nil {
		return err
	}
	if !e.wants(pending) {
		return e.worker.lock.ForgetPending()
	}
	e.worker.log.Info("resuming the pending request", "request", pending.Last().Name)
	e.pending = pending
	return nil
}

// wants reports whether a pending request matches the operator's settings now, and can be
// continued.
func (e *enrolment) wants(pending *cache.Pending) bool {
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return false
	}
	if e.status.Pair != nil && cache.SameKey(e.status.Pair.Leaf, key.Public()) {
		// its certificate is already installed: a crash came before the request was forgotten
		return false
	}
	return pending.Provider == e.worker.enroller.Provider.Name() && pending.NodeName == e.status.NodeName &&
		(e.worker.enroller.ProviderID == "" || pending.ProviderID == e.worker.enroller.ProviderID) &&
		pending.SignerName == e.worker.enroller.SignerName && equal(pending.ExpirationSeconds, e.worker.enroller.ExpirationSeconds) &&
		pending.Cluster.SameCluster(e.to.Cluster) && e.canFollow(pending) && allows(e.worker.enroller.Provider, pending.Remember)
}

// canFollow reports whether the next request can follow those that are filed: a proof needs the
// credential and the version of its hello.
func (e *enrolment) canFollow(pending *cache.Pending) bool {
	last := pending.Last()
	if !last.Hello && (len(pending.Requests) == 1 || last.UID != "") {
		return true // all requests are filed, or the provider has one round
	}
	challenger, ok := e.worker.enroller.Provider.(provider.Challenger)
	return ok && pending.Requester == e.to.Requester() && slices.Contains(challenger.Versions(), attestation.Version(pending.AttestationVersion))
}

func equal(a, b *int32) bool { return a == b || a != nil && b != nil && *a == *b }

// prepare makes a key and the first request. It writes both to disk before it files anything.
func (e *enrolment) prepare(ctx context.Context) error {
	e.worker.enter(StepPrepare)
	pending, _, err := e.worker.enroller.requestBuilder().first(ctx, e.status.NodeName, e.to.Cluster, e.worker.version, nodestate.ReadState(e.worker.enroller.Node.Dir()).Remembered[e.worker.enroller.Provider.Name()])
	if err != nil {
		return err
	}
	if pending.Last().Hello {
		pending.Requester = e.to.Requester()
	}
	e.worker.enter(StepSave)
	e.pending = pending
	return e.worker.lock.SetPending(pending)
}

// pursue files the pending request and waits for its decision. It answers a challenge with the
// proof, and pursues that.
func (e *enrolment) pursue(ctx context.Context) (csr.Decision, error) {
	for {
		request, err := e.file(ctx)
		if errors.Is(err, errGone) {
			return csr.Decision{Outcome: csr.Deleted}, nil
		}
		var decision csr.Decision
		if err == nil {
			decision, err = e.wait(ctx, request)
		}
		if err != nil {
			return decision, e.handleRequestError(ctx, request, err)
		}
		if decision.Outcome != csr.Answered {
			return decision, nil
		}
		if err := e.prove(ctx, decision.Challenge, csr.ClassifyHello(request).Outcome != csr.Answered); err != nil {
			return decision, err
		}
	}
}

// file creates the request, or finds it if it was created before.
func (e *enrolment) file(ctx context.Context) (*certificatesv1.CertificateSigningRequest, error) {
	e.worker.enter(StepFile)
	last := e.pending.Last()
	e.worker.result.Request = last.Name
	key, err := csr.ParseKey(e.pending.Key)
	if err != nil {
		return nil, err
	}
	var request *certificatesv1.CertificateSigningRequest
	if last.UID == "" {
		object := csr.Object(last.Name, nodestate.SignerOf(e.pending), last.Request, key.Public(), e.pending.ExpirationSeconds)
		e.showOrigin(ctx, object)
		request, err = e.client.File(ctx, object)
	} else {
		request, err = e.client.Get(ctx, last.Name, last.Request)
	}
	switch {
	case apierrors.IsNotFound(err) && last.UID != "", errors.Is(err, csr.ErrNotOurs):
		return nil, errGone
	case err != nil:
		return nil, err
	case last.UID == string(request.UID):
		return request, nil
	}
	e.worker.enter(StepSaveUID)
	last.UID = string(request.UID)
	e.worker.log.Info("filed", "request", last.Name, "signer", nodestate.SignerOf(e.pending), "server", e.pending.Cluster.Server)
	return request, e.worker.lock.SetPending(e.pending)
}

// originTimeout bounds the time for the origin annotation, which is optional.
const originTimeout = 10 * time.Second

// showOrigin adds an annotation by which the device proves that a request is from this machine. It
// helps if somebody else files requests with the node's certificate. Before the first certificate
// the controller does not know the device.
func (e *enrolment) showOrigin(ctx context.Context, object *certificatesv1.CertificateSigningRequest) {
	p, ok := e.worker.enroller.Provider.(provider.Originator)
	if !ok || !e.to.Own {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, originTimeout)
	defer cancel()
	origin, err := p.Origin(ctx, object.Name, object.Spec.Request)
	if err != nil {
		e.worker.log.Info("the request is filed without the annotation that shows its origin", "request", object.Name, "cause", err.Error())
		return
	}
	object.Annotations = map[string]string{attestation.AnnotationOrigin: origin}
}

// wait watches the request until it is answered or decided.
func (e *enrolment) wait(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (csr.Decision, error) {
	classify := csr.Classify
	if e.pending.Last().Hello {
		classify = csr.ClassifyHello
		e.worker.enter(StepChallenge)
	} else {
		e.worker.enter(StepWait)
	}
	return e.client.Wait(ctx, request, func(object *certificatesv1.CertificateSigningRequest) csr.Decision {
		decision := classify(object)
		if decision.Outcome == csr.Pending {
			e.noteWaiting(object)
		}
		return decision
	})
}

// prove makes the proof that answers the challenge, and writes it to disk with the hello. The
// secret in the challenge does not outlive the provider's call.
func (e *enrolment) prove(ctx context.Context, answer string, fresh bool) error {
	e.worker.enter(StepProve)
	if err := e.worker.enroller.requestBuilder().proof(ctx, e.pending, answer, fresh); err != nil {
		return err
	}
	e.worker.enter(StepSave)
	return e.worker.lock.SetPending(e.pending)
}

// handleRequestError returns the Failure for an error of filing or watching the request. request
// is nil if it could not be filed.
func (e *enrolment) handleRequestError(ctx context.Context, request *certificatesv1.CertificateSigningRequest, err error) error {
	var write *cache.WriteError
	switch {
	case errors.As(err, &write):
		return err
	case request != nil && ctx.Err() != nil:
		return StillWaiting(e.pending, nodestate.ReadState(e.worker.enroller.Node.Dir()))
	case e.to.Own && apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: %w", errRejected, err)
	}
	failure := reason.BlameClock(reason.ClassifyAPIError(err, e.to.Credential), e.worker.enroller.Node.Now(), e.worker.enroller.Built)
	if failure.Reason == reason.BootstrapRefused && e.worker.enroller.Node.Access.WhyBootstrap(e.status.Pair, e.status.Rejected) == "" {
		e.worker.result.Wasted = e.worker.result.Wasted || e.pending.Last().UID != ""
		e.worker.spent = true // the next request is a new one, with the node's own certificate
		return failure
	}
	refused := failure.Reason == reason.APIRefused || failure.Reason == reason.CertificateRevoked || failure.Reason == reason.MachineSuspended
	if !refused || e.pending.Last().UID != "" || !e.neverCreated(ctx) {
		return failure
	}
	if len(e.pending.Requests) == 1 {
		e.worker.spent = true
		return failure
	}
	// The hello is still valid: another proof may follow it.
	e.pending.Requests = e.pending.Requests[:1]
	if err := e.worker.lock.SetPending(e.pending); err != nil {
		return err
	}
	return failure
}

// neverCreated reports whether a refused request does not exist. Such a request would be refused
// again, so it may be forgotten. It may exist if the answer to an earlier create was lost.
func (e *enrolment) neverCreated(ctx context.Context) bool {
	last := e.pending.Last()
	_, err := e.client.Get(ctx, last.Name, last.Request)
	return apierrors.IsNotFound(err) || errors.Is(err, csr.ErrNotOurs)
}

// startOver returns the reason to file another request or another hello at once, nil if there is
// none. After the last attempt, enrol returns that reason as its Failure.
func (e *enrolment) startOver(decision csr.Decision, err error) *reason.Failure {
	var stale *provider.Error
	last := e.pending.Last()
	switch {
	case errors.As(err, &stale) && stale.Class == provider.Stale:
		return reason.ChallengeUnanswered.Failure(stale.Hint, fmt.Errorf("CertificateSigningRequest %s: %w", last.Name, err))
	case err != nil:
		return nil //nolint:nilerr // another request would fail, too; the caller has the error
	case decision.Outcome == csr.Deleted:
		return reason.RequestFailed.Failure("find who deletes CertificateSigningRequests",
			fmt.Errorf("CertificateSigningRequest %s: deleted, like those before it", last.Name))
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonExpired && !last.Hello && len(e.pending.Requests) > 1:
		return reason.ChallengeUnanswered.Failure("the state file shows how long each phase took; the controller sets how long a challenge is valid",
			fmt.Errorf("CertificateSigningRequest %s: the challenge had expired, like those before it", last.Name))
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonCompleted && last.Hello:
		// The node was not denied: a proof followed that is not in this state directory.
		return reason.RequestDenied.Failure("see whether two machines use this state directory",
			fmt.Errorf("CertificateSigningRequest %s: another proof has completed the hello: %q", last.Name, decision.Message))
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonVersion && last.Hello:
		return e.negotiate(decision)
	}
	return nil
}

// negotiate picks the version of the next hello: the newest that both sides have and that was not
// tried before. Nothing vouches for the controller's list, but a forged list cannot force an old
// version. Each hello lists the versions that the node accepts. The controller refuses a hello in
// an older version than necessary.
func (e *enrolment) negotiate(decision csr.Decision) *reason.Failure {
	challenger, ok := e.worker.enroller.Provider.(provider.Challenger)
	served, err := attestation.ParseVersions(decision.Versions)
	if !ok || err != nil {
		return nil //nolint:nilerr // check reports that there is no common version
	}
	e.worker.tried = append(e.worker.tried, attestation.Version(e.pending.AttestationVersion))
	next := challenger.Versions().Common(served, e.worker.tried...)
	if next == "" {
		return nil
	}
	e.worker.version = next
	return reason.RequestDenied.Failure(versionHint,
		fmt.Errorf("CertificateSigningRequest %s: the controller does not accept evidence of version %s: this plugin accepts %s, the controller serves %s",
			e.pending.Last().Name, e.pending.AttestationVersion, challenger.Versions(), served))
}
