// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// maxFilings is how often one worker begins: once, unless requests are deleted under it, or their challenges run out.
const maxFilings = 3

var (
	// errRejected says that the API server does not know the node's own certificate.
	errRejected = errors.New("the API server rejects the node's certificate")
	// errGone says that the API server had the request once and has it no more.
	errGone = errors.New("the request is gone")
)

// enrol takes up the pending request, or prepares one, and sees it through until it comes to something.
func (w *worker) enrol(ctx context.Context, s standing, to nodeaccess.Access) error {
	client, err := csr.NewClient(to.Config)
	if err != nil {
		return &Failure{Configuration, "check the kubeconfig", err}
	}
	var again *Failure
	for range maxFilings {
		pending, err := w.resume(s, to)
		if err == nil && pending == nil {
			pending, err = w.prepare(ctx, s, to)
		}
		if err != nil {
			return err
		}
		decision, err := w.pursue(ctx, client, pending, to)
		if again = w.startOver(decision, err, pending); again == nil {
			if err != nil {
				return err
			}
			return w.conclude(decision, pending)
		}
		w.result.Wasted = true
		w.log.Info("starting over", "request", w.result.Request, "cause", again.Error())
		if err := w.lock.ForgetPending(); err != nil {
			return err
		}
	}
	return again
}

// resume returns the pending request if it still is what is wanted, else nil.
func (w *worker) resume(s standing, to nodeaccess.Access) (*cache.Pending, error) {
	pending, err := w.dir.Pending()
	if cache.IsUnusable(err) {
		return nil, w.setAside(cache.PendingFile, err)
	}
	if err != nil || pending == nil {
		return nil, err
	}
	key, err := csr.ParseKey(pending.Key)
	if err == nil && s.pair != nil && cache.SameKey(s.pair.Leaf, key.Public()) {
		// A crash between installing and forgetting leaves a request behind that has been served.
		return nil, w.lock.ForgetPending()
	}
	wanted := err == nil && pending.Provider == w.provider.Name() && pending.NodeName == s.node &&
		(w.providerID == "" || pending.ProviderID == w.providerID) &&
		pending.SignerName == w.signerName && equal(pending.ExpirationSeconds, w.expirationSeconds) &&
		pending.Cluster.SameCluster(to.Cluster) && w.canFollow(pending, to)
	if wanted {
		w.log.Info("taking up the pending request", "request", pending.Last().Name)
		return pending, nil
	}
	return nil, w.lock.ForgetPending()
}

// canFollow reports whether what is still to be filed can follow what has been: a proof goes with the hello's credential, in the
// hello's version.
func (w *worker) canFollow(pending *cache.Pending, to nodeaccess.Access) bool {
	last := pending.Last()
	if !last.Hello && (len(pending.Requests) == 1 || last.UID != "") {
		return true // all is filed, or there is one round
	}
	challenger, ok := w.provider.(provider.Challenger)
	return ok && pending.Requester == to.Requester() && slices.Contains(challenger.Versions(), attestation.Version(pending.AttestationVersion))
}

func equal(a, b *int32) bool { return a == b || a != nil && b != nil && *a == *b }

// pursue files what is pending and waits for what becomes of it; a hello that is answered is followed by the proof.
func (w *worker) pursue(ctx context.Context, client *csr.Client, pending *cache.Pending, to nodeaccess.Access) (csr.Decision, error) {
	for {
		request, err := w.file(ctx, client, pending)
		if errors.Is(err, errGone) {
			return csr.Decision{Outcome: csr.Deleted}, nil
		}
		var decision csr.Decision
		if err == nil {
			decision, err = w.wait(ctx, client, request, pending)
		}
		if err != nil {
			return decision, w.failureOf(ctx, client, request, pending, to, err)
		}
		if decision.Outcome != csr.Answered {
			return decision, nil
		}
		if err := w.prove(ctx, pending, decision.Challenge, csr.ClassifyHello(request).Outcome != csr.Answered); err != nil {
			return decision, err
		}
	}
}

// file posts the request, or finds it where it was posted before.
func (w *worker) file(ctx context.Context, client *csr.Client, pending *cache.Pending) (*certificatesv1.CertificateSigningRequest, error) {
	w.enter(StepFile)
	last := pending.Last()
	w.result.Request = last.Name
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return nil, err
	}
	var request *certificatesv1.CertificateSigningRequest
	if last.UID == "" {
		request, err = client.File(ctx, csr.Object(last.Name, signerOf(pending), last.Request, key.Public(), pending.ExpirationSeconds))
	} else {
		request, err = client.Get(ctx, last.Name, last.Request)
	}
	switch {
	case apierrors.IsNotFound(err) && last.UID != "", errors.Is(err, csr.ErrNotOurs):
		return nil, errGone
	case err != nil:
		return nil, err
	case last.UID == string(request.UID):
		return request, nil
	}
	w.enter(StepNote)
	last.UID = string(request.UID)
	w.log.Info("filed", "request", last.Name, "signer", signerOf(pending), "server", pending.Cluster.Server)
	return request, w.lock.SetPending(pending)
}

// signerOf returns the signer that the request filed last is for.
func signerOf(pending *cache.Pending) string {
	if pending.Last().Hello {
		return attestation.HelloSignerName
	}
	return pending.SignerName
}

// answerTo says what is waited for.
func answerTo(request *cache.PendingRequest) string {
	if request.Hello {
		return "sent a challenge"
	}
	return "issued a certificate"
}

// wait watches the request until it is answered or decided.
func (w *worker) wait(ctx context.Context, client *csr.Client, request *certificatesv1.CertificateSigningRequest, pending *cache.Pending) (csr.Decision, error) {
	if pending.Last().Hello {
		w.enter(StepChallenge)
		return client.Wait(ctx, request, csr.ClassifyHello)
	}
	w.enter(StepWait)
	return client.Wait(ctx, request, csr.Classify)
}

// failureOf finds the class of what went wrong while the request was filed or watched.
func (w *worker) failureOf(ctx context.Context, client *csr.Client, request *certificatesv1.CertificateSigningRequest, pending *cache.Pending, to nodeaccess.Access, err error) error {
	var write *cache.WriteError
	switch {
	case errors.As(err, &write):
		return err
	case request != nil && ctx.Err() != nil:
		return &Failure{WaitingForSigner, "see: kubectl describe csr " + request.Name,
			fmt.Errorf("CertificateSigningRequest %s: signer %s has not %s yet", request.Name, signerOf(pending), answerTo(pending.Last()))}
	case to.Own && apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: %w", errRejected, err)
	}
	failure := apiFailure(err, to.Credential)
	if failure.Reason != APIRefused || pending.Last().UID != "" || !w.neverCreated(ctx, client, pending) {
		return failure
	}
	if len(pending.Requests) == 1 {
		w.spent = true
		return failure
	}
	// The hello is as good as before: another proof may follow it.
	pending.Requests = pending.Requests[:1]
	if err := w.lock.SetPending(pending); err != nil {
		return err
	}
	return failure
}

// neverCreated reports whether a request that was refused does not exist: it would be refused again as it is, and may be
// forgotten. It could exist all the same, from a post whose answer was lost.
func (w *worker) neverCreated(ctx context.Context, client *csr.Client, pending *cache.Pending) bool {
	last := pending.Last()
	_, err := client.Get(ctx, last.Name, last.Request)
	return apierrors.IsNotFound(err) || errors.Is(err, csr.ErrNotOurs)
}

// startOver says why another request, or another hello, is worth filing at once; nil if it is not. It is the Failure to end with once
// there have been enough of them.
func (w *worker) startOver(decision csr.Decision, err error, pending *cache.Pending) *Failure {
	var stale *provider.Error
	last := pending.Last()
	switch {
	case errors.As(err, &stale) && stale.Class == provider.Stale:
		return &Failure{ChallengeUnanswered, stale.Hint, fmt.Errorf("CertificateSigningRequest %s: %w", last.Name, err)}
	case err != nil:
		return nil //nolint:nilerr // another would fail likewise; the caller has the error
	case decision.Outcome == csr.Deleted:
		return &Failure{RequestFailed, "find who deletes CertificateSigningRequests",
			fmt.Errorf("CertificateSigningRequest %s: deleted, like those before it", last.Name)}
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonExpired && !last.Hello && len(pending.Requests) > 1:
		return &Failure{ChallengeUnanswered, "see which phase takes how long in the state file; the controller sets how long a challenge is good",
			fmt.Errorf("CertificateSigningRequest %s: the challenge had expired, like those before it", last.Name)}
	case decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonVersion && last.Hello:
		return w.negotiate(decision, pending)
	}
	return nil
}

// negotiate picks the version of the next hello: the newest that both sides have and that was not tried before. The list that the
// controller gave decides nothing by itself: a hello says what the node accepts, and the controller refuses an older version than
// it could have had.
func (w *worker) negotiate(decision csr.Decision, pending *cache.Pending) *Failure {
	challenger, ok := w.provider.(provider.Challenger)
	served, err := attestation.ParseVersions(decision.Versions)
	if !ok || err != nil {
		return nil //nolint:nilerr // check says that there is no common version
	}
	w.tried = append(w.tried, attestation.Version(pending.AttestationVersion))
	next := challenger.Versions().Common(served, w.tried...)
	if next == "" {
		return nil
	}
	w.version = next
	return &Failure{RequestDenied, versionHint,
		fmt.Errorf("CertificateSigningRequest %s: the evidence was to be %s: this plugin accepts %s, the controller serves %s",
			pending.Last().Name, pending.AttestationVersion, challenger.Versions(), served)}
}
