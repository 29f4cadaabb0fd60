// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Report is the result of a dry run. It holds no key and no token.
type Report struct {
	// Verdict says whether a run would succeed, and why: "a run would succeed: ..." or "a run
	// would fail: ...".
	Verdict string
	// Certificate describes the content of the certificate directory, Pending the request under
	// way, and Next what a run would do.
	Certificate, Pending, Next string
	// NodeName and ProviderID are those of the request. Provider made its evidence.
	NodeName, ProviderID, Provider string
	// Request is the object that would be filed. Its key is discarded. It is nil if there is
	// none: then Failure says why.
	Request *certificatesv1.CertificateSigningRequest
	// Evidence describes the evidence if the provider can do so.
	Evidence []provider.Fact
	// Server and Credential describe where the request would go, and with which credential.
	// They are empty if there is no credential or no request.
	Server, Credential string
	// Check is the API server's answer with dryRun=All: accepted, refused, or skipped and why.
	// It is empty if there is no request.
	Check string
	// Failure is set if a run would fail, or if the request for the next certificate cannot be
	// made or would be refused. It is nil if a certificate is served and the API server cannot
	// be asked.
	Failure *reason.Failure

	// skipped is set if no API server has seen the request.
	skipped bool
}

// DryRun builds a request and has the API server check it if one can be reached. It writes no file
// but the provider's lock, and creates no object. waitTimeout is how long a run would wait.
func (e *Enroller) DryRun(ctx context.Context, waitTimeout time.Duration) *Report {
	report := &Report{}
	status := e.Node.Load()
	if e.Node.Invalid == nil {
		if decided, _, err := e.Decided(ctx); err == nil { // else try reports the error
			e = decided
		}
	}
	report.NodeName = status.NodeName
	report.describe(e, status, waitTimeout)
	failure := report.try(ctx, e, status)
	report.conclude(e, status, failure)
	return report
}

// try builds the request and has the API server check it.
func (r *Report) try(ctx context.Context, e *Enroller, status nodestate.Status) *reason.Failure {
	if failure := e.cannotRequest(status); failure != nil {
		return failure
	}
	e, _, err := e.Decided(ctx)
	if err != nil {
		return reason.AsFailure(err)
	}
	r.Provider = e.Provider.Name()
	pending, key, err := e.requestBuilder().first(ctx, status.NodeName, cache.Origin{}, "", nodestate.ReadState(e.Node.Dir()).Remembered[e.Provider.Name()])
	if err != nil {
		return reason.AsFailure(err)
	}
	r.ProviderID = pending.ProviderID
	first := pending.Last()
	if inspector, ok := e.Provider.(provider.Inspector); ok {
		content, err := attestation.Parse(first.Request)
		if err != nil {
			return reason.AsFailure(err)
		}
		r.Evidence = inspector.Explain(content.Data)
	}
	r.Request = csr.Object(first.Name, nodestate.SignerOf(pending), first.Request, key, pending.ExpirationSeconds)
	return r.check(ctx, e, status)
}

// cannotRequest returns why no request can be built, nil if one can.
func (e *Enroller) cannotRequest(status nodestate.Status) *reason.Failure {
	switch {
	case e.Node.Invalid != nil:
		return reason.AsFailure(e.Node.Invalid)
	case status.Permanent:
		return reason.AsFailure(status.Problem)
	case status.NameErr != nil:
		return reason.Configuration.Failure("set --node-name", status.NameErr)
	}
	return nil
}

// conclude sets the verdict, given what keeps the node from the next certificate.
func (r *Report) conclude(e *Enroller, status nodestate.Status, failure *reason.Failure) {
	const succeeds, fails = "a run would succeed: ", "a run would fail: "
	switch {
	case status.Permanent, status.Pair == nil && failure != nil:
		r.Verdict, r.Failure = fails+failure.Error(), failure
	case status.Pair == nil:
		r.Verdict = succeeds + "the API server accepts the request, which signer " + e.SignerName + " then decides"
		if next := status.NextAttempt(); !next.IsZero() {
			r.Verdict += fmt.Sprintf("; the back-off after the last failure ends in %s", next.Sub(e.Node.Now()).Round(time.Second))
		}
	default:
		r.Verdict = succeeds + "it prints the certificate on disk, valid to " + status.Pair.Leaf.NotAfter.UTC().Format(time.RFC3339)
		switch {
		case failure == nil:
			r.Verdict += "; the API server accepts the request for the next one"
		case r.skipped:
			r.Verdict += "; whether the next one can be requested is not known: " + failure.Error()
		default:
			r.Verdict, r.Failure = r.Verdict+"; the next one cannot be requested: "+failure.Error(), failure
		}
	}
}

// describe says what the directory holds, and what a run would do.
func (r *Report) describe(e *Enroller, status nodestate.Status, waitTimeout time.Duration) {
	file := e.Node.Dir().File(cache.CurrentFile)
	switch {
	case status.Permanent:
		r.Certificate, r.Next = "none to print", "fail: "+status.Problem.Error()
	case status.Pair == nil && e.Node.Invalid != nil:
		r.Certificate, r.Next = fmt.Sprintf("none to print: %v", status.Problem), "fail: "+e.Node.Invalid.Error()
	case status.Pair == nil:
		r.Certificate = fmt.Sprintf("none to print: %v", status.Problem)
		r.Next = fmt.Sprintf("have a worker request a certificate, and wait for it at most %s", waitTimeout)
	default:
		leaf := status.Pair.Leaf
		r.Certificate = fmt.Sprintf("%s: node %s, valid from %s to %s", file, status.Pair.NodeName(),
			leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339))
		switch {
		case e.Node.Invalid != nil:
			r.Next = "print it, and request no other: " + e.Node.Invalid.Error()
		case status.Due != "":
			r.Next = fmt.Sprintf("print it, and have a worker request another, since %s", status.Due)
		case e.Node.Access.Renews:
			r.Next = "print it; a new one is due at " + nodestate.RenewAt(leaf).UTC().Format(time.RFC3339)
		default:
			r.Next = fmt.Sprintf("print it to its end: provider %s does not renew", e.Provider.Name())
		}
	}
	r.Pending = "none"
	if pending, err := e.Node.Dir().Pending(); err == nil && pending != nil {
		last := pending.Last()
		r.Pending = fmt.Sprintf("%s of %s, signer %s", last.Name, last.FiledAt.Format(time.RFC3339), nodestate.SignerOf(pending))
	}
}

// check shows the request to the API server if one is known.
func (r *Report) check(ctx context.Context, e *Enroller, status nodestate.Status) *reason.Failure {
	to, _, err := status.Access()
	if err != nil {
		r.skip(err)
		return reason.AsFailure(err)
	}
	r.Server, r.Credential = to.Config.Host, to.Credential
	client, err := csr.NewClient(to.Config)
	if err == nil {
		_, err = client.Create(ctx, r.Request, true)
	}
	if err == nil {
		r.Check = "accepted"
		return nil
	}
	failure := reason.BlameClock(reason.ClassifyAPIError(err, to.Credential), e.Node.Now(), e.Built)
	if failure.Reason == reason.APIUnreachable || failure.Reason == reason.APIOverloaded {
		r.skip(failure)
	} else {
		r.Check = "refused: " + failure.Error()
	}
	return failure
}

// skip records why no API server has seen the request.
func (r *Report) skip(cause error) { r.Check, r.skipped = "skipped: "+cause.Error(), true }
