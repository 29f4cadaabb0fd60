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

// Report is what a dry run found. It holds no key and no token.
type Report struct {
	// Certificate says in words what the certificate directory holds, Pending which request is under way, and Next what a run would do.
	Certificate, Pending, Next string
	// NodeName and ProviderID are what the request claims, Provider whose evidence it carries.
	NodeName, ProviderID, Provider string
	// Request is the object that would be filed. Its key is forgotten again.
	Request *certificatesv1.CertificateSigningRequest
	// Evidence says in words what evidence the request carries, where the provider can tell.
	Evidence []provider.Fact
	// Server and Credential are where it would go, and in words with whose credential; empty if there is no such.
	Server, Credential string
	// Check says what the API server made of the request with dryRun=All: accepted, refused, or skipped and why.
	Check string
	// Failure is set when the API server refused it.
	Failure *Failure
}

// DryRun builds a request and has the API server check it, where one can be reached. It writes no file but the
// provider's lock, and creates no object. The error is a *Failure for what a run could not do either, whatever the API server says.
func DryRun(ctx context.Context, o Options) (*Report, error) {
	if o.invalid != nil {
		return nil, o.invalid
	}
	s := o.look()
	if s.nameErr != nil {
		return nil, &Failure{Configuration, "set --node-name", s.nameErr}
	}
	report := &Report{NodeName: s.node, Provider: o.provider.Name()}
	o.describe(s, report)

	pending, key, err := o.build(ctx, s.node, cache.Origin{}, "", o.readState().Remembered[o.provider.Name()])
	if err != nil {
		return nil, AsFailure(err)
	}
	report.ProviderID = pending.ProviderID
	first := pending.Last()
	report.Request = csr.Object(first.Name, signerOf(pending), first.Request, key, pending.ExpirationSeconds)
	if inspector, ok := o.provider.(provider.Inspector); ok {
		content, err := attestation.Parse(first.Request)
		if err != nil {
			return nil, AsFailure(err)
		}
		report.Evidence = inspector.Explain(content.Data)
	}
	o.haveChecked(ctx, s, report)
	return report, nil
}

// describe says what the directory holds, and what a run would make of it.
func (o *Options) describe(s standing, report *Report) {
	file := o.dir.File(cache.CurrentFile)
	switch {
	case s.final:
		report.Certificate, report.Next = "none to print", "fail: "+s.lack.Error()
	case s.pair == nil:
		report.Certificate = fmt.Sprintf("none to print: %v", s.lack)
		report.Next = fmt.Sprintf("have a worker request a certificate, and wait for it at most %s", o.waitTimeout)
	default:
		leaf := s.pair.Leaf
		report.Certificate = fmt.Sprintf("%s: node %s, valid from %s to %s", file, s.pair.NodeName(),
			leaf.NotBefore.UTC().Format(time.RFC3339), leaf.NotAfter.UTC().Format(time.RFC3339))
		switch {
		case s.due != "":
			report.Next = fmt.Sprintf("print it, and have a worker request another, since %s", s.due)
		case o.renews():
			report.Next = "print it; a new one is due at " + RenewAt(leaf).UTC().Format(time.RFC3339)
		default:
			report.Next = fmt.Sprintf("print it to its end: provider %s does not renew", o.provider.Name())
		}
	}
	report.Pending = "none"
	if pending, err := o.dir.Pending(); err == nil && pending != nil {
		last := pending.Last()
		report.Pending = fmt.Sprintf("%s of %s, signer %s", last.Name, last.Filed.Format(time.RFC3339), signerOf(pending))
	}
}

// haveChecked shows the request to the API server, where there is one to show it to.
func (o *Options) haveChecked(ctx context.Context, s standing, report *Report) {
	to, err := o.access(s)
	if err != nil {
		report.Check = "skipped: " + err.Error()
		return
	}
	report.Server, report.Credential = to.Config.Host, to.Credential
	client, err := csr.NewClient(to.Config)
	if err == nil {
		_, err = client.Create(ctx, report.Request, true)
	}
	if err == nil {
		report.Check = "accepted"
		return
	}
	failure := apiFailure(err, to.Credential)
	if failure.Reason == APIUnreachable {
		report.Check = "skipped: " + failure.Error()
		return
	}
	report.Check = "refused: " + failure.Error()
	report.Failure = failure
}
