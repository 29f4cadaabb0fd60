// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

const (
	// pendingWarn is how old a pending request may be before it is a warning.
	pendingWarn = 2 * time.Minute
	// signerSample is how many requests of a signer are read.
	signerSample = "20"
)

func checkSigner(ctx context.Context, e *examination) checkup.Result {
	signers := e.signers()
	if len(signers) == 0 {
		return skipped("no provider: see configuration")
	}
	name := signers[len(signers)-1]
	if state, err := e.dir.State(); err == nil && !state.Issued.IsZero() {
		return ok("a certificate was issued to this node at %s", state.Issued.UTC().Format(time.RFC3339))
	}
	a, f := e.asRequester()
	if f != nil {
		return *f
	}
	answer, err := a.call(ctx, http.MethodGet, csrPath, url.Values{"fieldSelector": {"spec.signerName=" + name}, "limit": {signerSample}}, nil)
	if f := unanswered(answer, err); f != nil {
		return *f
	}
	if answer.Status != http.StatusOK {
		return skipped("this node has had no certificate yet, and %s may not list the requests of others (%d)", a.credential, answer.Status)
	}
	var list certificatesv1.CertificateSigningRequestList
	if err := json.Unmarshal(answer.Body, &list); err != nil {
		return skipped("list of requests: %v", err)
	}
	return assessSigner(name, list.Items)
}

func assessSigner(name string, requests []certificatesv1.CertificateSigningRequest) checkup.Result {
	var last time.Time
	var which string
	for i := range requests {
		r := &requests[i]
		for _, condition := range r.Status.Conditions {
			if at := condition.LastUpdateTime.Time; !at.Before(last) {
				last, which = at, fmt.Sprintf("%s (%s)", r.Name, condition.Type)
			}
		}
	}
	const remedy = "check signerName, and that node-attestation-controller runs and is configured for this signer"
	switch {
	case which != "":
		return ok("%s decided %s at %s", name, which, last.UTC().Format(time.RFC3339))
	case len(requests) > 0:
		return warning(remedy, "%s has decided none of its requests (%d)", name, len(requests))
	}
	return warning(remedy, "this node sees no request for signer %s, so it cannot tell whether the signer works", name)
}

func checkLastResult(ctx context.Context, e *examination) checkup.Result {
	state, err := e.dir.State()
	if errors.Is(err, fs.ErrPermission) {
		return skipped("%s: %v", e.dir.File(cache.StateFile), errNeedsRoot)
	}
	if err != nil {
		return warning("the next worker sets it aside", "%v", err)
	}
	pending, err := e.dir.Pending()
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		return warning("the next worker sets it aside", "%v", err)
	}
	last := state.Last
	// A failure of the worker with this request counts more than the age of the request.
	stuck := last != nil && last.Reason != "" && last.Reason != string(reason.WaitingForSigner) && pending != nil && last.Finished.After(pending.Last().FiledAt)
	if pending != nil && !stuck {
		return e.assessPending(ctx, pending, state)
	}
	switch {
	case last == nil:
		return skipped("no worker has ended yet, and no request is pending")
	case last.Reason == "" && last.Message != "":
		// certificates were issued again and again in a short time
		return warning(last.Hint, "%s: %s", since(last.Finished), last.Message)
	case last.Reason == "":
		return ok("%s: a certificate was issued, CertificateSigningRequest %s%s", since(last.Finished), last.Request, challengeTook(last.Phases))
	}
	return e.whileServed(failure(last.Hint, "%s: %s, %d in a row: %s", since(last.Finished), last.Reason, state.Failures, last.Message))
}

func since(at time.Time) string { return at.UTC().Format(time.RFC3339) }

// challengeTook returns how long the controller took to answer the hello, "" without a hello.
func challengeTook(phases []cache.Phase) string {
	for _, phase := range phases {
		if phase.Name == string(enrol.StepChallenge) {
			return fmt.Sprintf(", its challenge answered within %s", time.Duration(phase.Milliseconds*float64(time.Millisecond)).Round(time.Millisecond))
		}
	}
	return ""
}

// waitsFor returns the controller's reason for which the pending request waits: from the API
// server, else from the last worker.
func (e *examination) waitsFor(ctx context.Context, pending *cache.Pending, state *cache.State) (attestation.Statement, bool) {
	last := pending.Last()
	a, f := e.asRequester()
	if f != nil {
		return nodestate.WaitsFor(pending, state)
	}
	answer, err := a.call(ctx, http.MethodGet, csrPath+"/"+last.Name, nil, nil)
	var object certificatesv1.CertificateSigningRequest
	if err != nil || answer.Status != http.StatusOK || json.Unmarshal(answer.Body, &object) != nil || !bytes.Equal(object.Spec.Request, last.Request) {
		return nodestate.WaitsFor(pending, state)
	}
	classify := csr.Classify
	if last.Hello {
		classify = csr.ClassifyHello
	}
	waiting, err := attestation.ParseStatement(object.Annotations[attestation.AnnotationWaiting])
	return waiting, err == nil && classify(&object).Outcome == csr.Pending
}

// assessPending assesses a pending request by its age.
func (e *examination) assessPending(ctx context.Context, pending *cache.Pending, state *cache.State) checkup.Result {
	request := pending.Last()
	waits := "its certificate"
	if request.Hello {
		waits = "its challenge"
	}
	age := max(e.Now().Sub(request.FiledAt), 0).Round(time.Second)
	message := fmt.Sprintf("CertificateSigningRequest %s, signer %s, waits for %s since %s (%s)", request.Name, nodestate.SignerOf(pending), waits, since(request.FiledAt), age)
	if request.UID == "" {
		message = fmt.Sprintf("CertificateSigningRequest %s of %s (%s ago) has not been filed yet", request.Name, since(request.FiledAt), age)
	}
	remedy := fmt.Sprintf("kubectl describe csr %s; check that node-attestation-controller runs", request.Name)
	waiting, explained := e.waitsFor(ctx, pending, state)
	if explained {
		message, remedy = message+": "+waiting.Reason, waiting.Text
	}
	switch {
	case age >= nodestate.PendingFails:
		return e.whileServed(failure(remedy, "%s", message))
	case age >= pendingWarn, explained:
		return warning(remedy, "%s", message)
	}
	return ok("%s", message)
}
