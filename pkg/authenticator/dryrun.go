// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Report is the result of a dry run. It holds no key and no token.
type Report struct {
	// Certificate describes the content of the certificate directory, Pending the request under
	// way, and Next what a run would do.
	Certificate, Pending, Next string
	// NodeName and ProviderID are those of the request. Provider made its evidence.
	NodeName, ProviderID, Provider string
	// Request is the object that would be filed. Its key is discarded.
	Request *certificatesv1.CertificateSigningRequest
	// Evidence describes the evidence if the provider can do so.
	Evidence []provider.Fact
	// Server and Credential describe where the request would go, and with which credential.
	// They are empty if there is no credential.
	Server, Credential string
	// Check is the API server's answer with dryRun=All: accepted, refused, or skipped and why.
	Check string
	// Failure is set if the API server refused it.
	Failure *Failure
}

// DryRun builds a request and has the API server check it if one can be reached. It writes no file
// but the provider's lock, and creates no object. The error is a *Failure for what a run could not
// do either, whatever the API server says.
func (a *Authenticator) DryRun(ctx context.Context) (*Report, error) {
	if a.invalid != nil {
		return nil, a.invalid
	}
	status := a.loadStatus()
	if status.nameErr != nil {
		return nil, &Failure{Configuration, "set --node-name", status.nameErr}
	}
	report := &Report{NodeName: status.nodeName, Provider: a.provider.Name()}
	report.describe(a, status)

	pending, key, err := a.requestBuilder().first(ctx, status.nodeName, cache.Origin{}, "", readState(a.dir).Remembered[a.provider.Name()])
	if err != nil {
		return nil, AsFailure(err)
	}
	report.ProviderID = pending.ProviderID
	first := pending.Last()
	report.Request = csr.Object(first.Name, signerOf(pending), first.Request, key, pending.ExpirationSeconds)
	if inspector, ok := a.provider.(provider.Inspector); ok {
		content, err := attestation.Parse(first.Request)
		if err != nil {
			return nil, AsFailure(err)
		}
		report.Evidence = inspector.Explain(content.Data)
	}
	report.check(ctx, a, status)
	return report, nil
}

// describe says what the directory holds, and what a run would do.
func (r *Report) describe(a *Authenticator, status certificateStatus) {
	file := a.dir.File(cache.CurrentFile)
	switch {
	case status.permanent:
		r.Certificate, r.Next = "none to print", "fail: "+status.problem.Error()
	case status.pair == nil:
		r.Certificate = fmt.Sprintf("none to print: %v", status.problem)
		r.Next = fmt.Sprintf("have a worker request a certificate, and wait for it at most %s", a.waitTimeout)
	default:
		leaf := status.pair.Leaf
		r.Certificate = fmt.Sprintf("%s: node %s, valid from %s to %s", file, status.pair.NodeName(),
			leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339))
		switch {
		case status.due != "":
			r.Next = fmt.Sprintf("print it, and have a worker request another, since %s", status.due)
		case a.renews():
			r.Next = "print it; a new one is due at " + RenewAt(leaf).UTC().Format(time.RFC3339)
		default:
			r.Next = fmt.Sprintf("print it to its end: provider %s does not renew", a.provider.Name())
		}
	}
	r.Pending = "none"
	if pending, err := a.dir.Pending(); err == nil && pending != nil {
		last := pending.Last()
		r.Pending = fmt.Sprintf("%s of %s, signer %s", last.Name, last.Filed.Format(time.RFC3339), signerOf(pending))
	}
}

// check shows the request to the API server if one is known.
func (r *Report) check(ctx context.Context, a *Authenticator, status certificateStatus) {
	to, _, err := a.access(status)
	if err != nil {
		r.Check = "skipped: " + err.Error()
		return
	}
	r.Server, r.Credential = to.Config.Host, to.Credential
	client, err := csr.NewClient(to.Config)
	if err == nil {
		_, err = client.Create(ctx, r.Request, true)
	}
	if err == nil {
		r.Check = "accepted"
		return
	}
	failure := a.blameClock(classifyAPIError(err, to.Credential))
	if failure.Reason == APIUnreachable {
		r.Check = "skipped: " + failure.Error()
		return
	}
	r.Check = "refused: " + failure.Error()
	r.Failure = failure
}
