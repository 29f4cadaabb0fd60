// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// finish completes the steps of a finished request that are missing after a crash, or because
// another signer issued. It writes the certificate into the record, closes the hello, and makes the
// decision record. A request that no record names was issued by somebody else. It may refer to a
// hello that is not its own, so finish leaves it alone.
func (c *Controller) finish(ctx context.Context, request *certificatesv1.CertificateSigningRequest) error {
	if c.Audit || len(request.Status.Certificate) == 0 {
		return nil
	}
	claim, _ := c.Rules.ParseClaim(request)
	p := c.providers[claim.Provider]
	if claim.Hello || p == nil {
		return nil
	}
	var hello *certificatesv1.CertificateSigningRequest
	if challenger, ok := p.(evidence.Challenger); ok {
		var err error
		// the cache suffices: a stale hello causes a conflict
		if hello, err = evidence.FindHello(ctx, c.client, challenger, request); err != nil {
			return err
		}
	}
	if c.issuer.Issues() && (hello == nil || csrstate.Of(hello) != csrstate.Pending || c.actor.LastWrites.Closed(hello)) {
		return nil
	}
	record, err := c.recordNaming(ctx, request)
	if record == nil || err != nil {
		return err
	}
	if !c.issuer.Issues() && !records.HasCertificateFor(record, request.UID) {
		fingerprint, err := records.AddCertificate(record, request, request.Status.Certificate, c.actor.Revocations.LastBefore(records.Requests(record)...), c.Now())
		if err != nil {
			return err
		}
		if err := c.actor.WriteRecord(ctx, record); err != nil {
			return err
		}
		// this wakes a round that puts the certificate into the policies; the node has it already
		c.actor.Revocations.UntilAccepted(record.Spec.NodeName, fingerprint)
		c.reporter.RecordIssued(ctx, request, hello, c.records.Record(record))
	}
	if hello == nil || record.Status.Hello == nil || record.Status.Hello.UID != hello.UID {
		return nil
	}
	if records.HasCertificateFor(record, request.UID) {
		c.reporter.RecordIssued(ctx, request, hello, c.records.Record(record))
	}
	return c.actor.CloseHello(ctx, hello, request.Name)
}

// recordNaming returns the record whose status.request is this request, nil if there is none.
func (c *Controller) recordNaming(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (*v1alpha1.NodeAttestation, error) {
	items, err := c.records.Find(ctx, v1alpha1.FieldRequestUID, string(request.UID))
	if err != nil || len(items) == 0 {
		return nil, err
	}
	return &items[0], nil
}
