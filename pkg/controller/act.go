// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/statuspatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Reasons that pkg/verifier does not define. ReasonChallenged is used in logs and metrics only. The
// others are also written into conditions.
const (
	ReasonApproved   verifier.Reason = "Attested"
	ReasonChallenged verifier.Reason = "Challenged"
	ReasonServing    verifier.Reason = "AddressesVerified"
	ReasonUnattested verifier.Reason = "UnattestedNode"
	ReasonCompleted  verifier.Reason = attestation.ReasonCompleted
)

// actor writes the outcomes of decisions to the API server.
type actor struct {
	*Config
	providers map[string]Provider
	// client reads requests from the cache, and writes.
	client        client.Client
	records       *records.Store
	recorder      *recorder
	machineLimits *fairqueue.Limiters
	lastWrites    lastWrites
	unpublished   unpublished
}

// act carries out a decision of the rules. Three denials are elsewhere: of an expired hello
// (proceed), of a request whose record belongs to another cluster (retryConflicts), and of a hello
// whose proof has its certificate (closeHello).
func (a *actor) act(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) (ctrl.Result, error) {
	switch d.Outcome {
	case verifier.Ignore:
		return ctrl.Result{}, nil
	case verifier.Deny:
		return ctrl.Result{}, a.refuse(ctx, object, s, d)
	case verifier.Fail:
		return ctrl.Result{}, a.fail(ctx, object, d)
	case verifier.Challenge:
		return a.challenge(ctx, object, s)
	case verifier.Approve:
		return ctrl.Result{}, a.approve(ctx, object, s, d)
	case verifier.Sign:
		return a.sign(ctx, object, s, d)
	case verifier.SignServing:
		return ctrl.Result{}, a.signServing(ctx, object, s, d)
	case verifier.ApproveServing:
		_, err := a.addApproval(ctx, object, ReasonServing, "the machine that has attested has these addresses, as was verified by "+Name)
		return ctrl.Result{}, err
	case verifier.ApproveUnattested:
		_, err := a.addApproval(ctx, object, ReasonUnattested, "the node is in unattestedNodes: nothing was verified by "+Name)
		return ctrl.Result{}, err
	}
	return ctrl.Result{}, fmt.Errorf("no such outcome: %v", d.Outcome)
}

// challenge answers a hello whose evidence was accepted.
func (a *actor) challenge(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot) (ctrl.Result, error) {
	if s.challenger == nil {
		return ctrl.Result{}, fmt.Errorf("provider %s has one round, and no challenge", s.provider.Name())
	}
	value, expires, err := s.challenger.Challenge(object, s.ekNamed, s.input.Now)
	if err != nil {
		return ctrl.Result{}, err
	}
	challenged, err := a.annotate(ctx, object, map[string]any{
		attestation.AnnotationChallenge: value, attestation.AnnotationEK: "sha256:" + s.input.Evidence.EK, attestation.AnnotationWaiting: nil,
	})
	if err != nil {
		return ctrl.Result{}, err
	}
	a.lastWrites.set(challenged)
	if !s.claim.Rehearsal { // the policy watch tries to approve a real hello
		a.Challenged(object.Name)
	}
	return ctrl.Result{RequeueAfter: expires.Sub(s.input.Now) + closeDelay}, nil
}

// annotate sets annotations on the version of the object that was judged, and returns the object as
// the API server stored it. An annotation whose value is nil is removed.
func (a *actor) annotate(ctx context.Context, object *certificatesv1.CertificateSigningRequest, values map[string]any) (*certificatesv1.CertificateSigningRequest, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": values, "resourceVersion": object.ResourceVersion}})
	if err != nil {
		return nil, err
	}
	result := &certificatesv1.CertificateSigningRequest{}
	result.Name = object.Name
	return result, asWriteError(a.client.Patch(ctx, result, client.RawPatch(types.MergePatchType, patch)))
}

// writeStatus writes fields of the status through a subresource, on the version of the object that
// was judged. It returns the object as the API server stored it. It must patch: the cached copy
// lacks labels, finalizers and other fields that no decision reads, and an update would remove
// them.
func (a *actor) writeStatus(ctx context.Context, object *certificatesv1.CertificateSigningRequest, subresource string, fields map[string]any) (*certificatesv1.CertificateSigningRequest, error) {
	patch, err := statuspatch.New(object, fields)
	if err != nil {
		return nil, err
	}
	result := &certificatesv1.CertificateSigningRequest{}
	result.Name = object.Name
	return result, asWriteError(a.client.SubResource(subresource).Patch(ctx, result, patch))
}

// addCondition adds a condition. A merge patch replaces the whole list. So if the request has
// conditions, object must be the API server's answer, not the cached copy.
func (a *actor) addCondition(ctx context.Context, object *certificatesv1.CertificateSigningRequest, added certificatesv1.CertificateSigningRequestCondition) (*certificatesv1.CertificateSigningRequest, error) {
	return a.writeStatus(ctx, object, "approval", map[string]any{"conditions": append(slices.Clone(object.Status.Conditions), added)})
}

// refuse denies. If the hello's version is not supported, refuse first annotates the supported
// versions.
func (a *actor) refuse(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) error {
	if s.challenger != nil && string(d.Refusals.Reason()) == attestation.ReasonVersion {
		annotated, err := a.annotate(ctx, object, map[string]any{attestation.AnnotationVersions: s.challenger.Versions().String()})
		if err != nil {
			return err
		}
		object = annotated
	}
	return a.deny(ctx, object, string(d.Refusals.Reason()), d.Refusals.Error())
}

func (a *actor) deny(ctx context.Context, object *certificatesv1.CertificateSigningRequest, reason, message string) error {
	_, err := a.addCondition(ctx, object, statuspatch.Condition(certificatesv1.CertificateDenied, reason, message))
	return err
}

// fail marks an approved request that must not be signed as failed. It writes through /approval,
// since /status would need the right to sign.
func (a *actor) fail(ctx context.Context, object *certificatesv1.CertificateSigningRequest, d verifier.Decision) error {
	_, err := a.addCondition(ctx, object, statuspatch.Condition(certificatesv1.CertificateFailed, string(d.Refusals.Reason()), d.Refusals.Error()))
	return err
}

// approve writes the record, then approves. The record is the lock: it names one of two requests
// that might both pass. If another record was written meanwhile that contradicts this one, approve
// returns a conflict. Afterwards the snapshot has the versions that the API server stored.
func (a *actor) approve(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) error {
	record := s.recordFor(d.Grant.Record.Machine)
	if record == nil {
		var err error
		if record, err = a.records.New(d.Grant.Record); err != nil {
			return err
		}
	}
	records.SetGrant(record, d.Grant.Record, object, s.input.Hello, s.input.Now)
	if err := a.writeRecord(ctx, record); err != nil {
		return err
	}
	s.set(record, a.records.Record(record))
	if err := a.checkSole(ctx, s, record); err != nil {
		return err
	}
	withApproval, err := a.addApproval(ctx, object, ReasonApproved, "the evidence was verified by "+Name)
	if err != nil {
		return err
	}
	// only a written approval counts towards the limit
	a.machineLimits.Take(d.Grant.Record.Machine.Name, a.Now())
	s.input.Request = withApproval
	return nil
}

// checkSole runs after the record was written. It looks for rivals: records with the same node name
// or EK. A rival that is not in the snapshot was not judged, so the error is a conflict. Of two
// writers that contradict each other, the second one sees the first one's record.
func (a *actor) checkSole(ctx context.Context, s *snapshot, record *v1alpha1.NodeAttestation) error {
	items, err := a.records.FindRivals(ctx, record)
	if err != nil {
		return err
	}
	for i := range items {
		if !s.has(&items[i]) {
			return apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("nodeattestations").GroupResource(), record.Name,
				fmt.Errorf("the record %s was written meanwhile", items[i].Name))
		}
	}
	return nil
}

// addApproval approves. No other function does. It returns the request as the API server stored it.
func (a *actor) addApproval(ctx context.Context, object *certificatesv1.CertificateSigningRequest, reason verifier.Reason, message string) (*certificatesv1.CertificateSigningRequest, error) {
	return a.addCondition(ctx, object, statuspatch.Condition(certificatesv1.CertificateApproved, string(reason), message))
}

// sign issues the certificate. It writes the certificate into the record first, so that each
// published certificate is in a record. If the node has a revoked certificate, a later call
// publishes the new one: API servers refuse it until the policies have it.
func (a *actor) sign(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) (ctrl.Result, error) {
	record := s.recordFor(d.Grant.Record.Machine)
	if record == nil {
		return ctrl.Result{}, errors.New("no record to write the certificate into")
	}
	c := a.unpublished.get(object)
	// There is no certificate yet, it was revoked before it was published, or somebody replaced the
	// record.
	if c == nil || !records.HasCertificate(record, c.fingerprint) || a.Revocation.isRevoked(c.fingerprint) {
		var err error
		if c, err = a.issue(ctx, object, s, d, record); err != nil {
			return ctrl.Result{}, err
		}
	}
	if wait := a.untilAccepted(c); wait > 0 {
		a.unpublished.keep(object, c)
		s.publishLater = true
		log.FromContext(ctx).Info("the certificate is published once policies have it, since another one of the node is revoked", "node", c.node, "sha256", c.fingerprint)
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	if err := a.publish(ctx, object, c.chain); err != nil {
		return ctrl.Result{}, err
	}
	a.unpublished.forget(object.Name)
	s.issued, s.approvalWarnings = c.chain, c.warnings
	return ctrl.Result{}, a.closeHello(ctx, s.input.Hello, object.Name)
}

// issue issues a certificate and writes it into the record.
func (a *actor) issue(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision, record *v1alpha1.NodeAttestation) (*issuedCertificate, error) {
	ca, err := a.CA.CA(ctx, a.Now())
	if err != nil {
		return nil, err // the CA was available when the snapshot was made
	}
	chain, err := signing.Issue(ca, grantOf(object, d), a.limits(d), s.input.Now, rand.Reader)
	if err != nil {
		return nil, err
	}
	fingerprint, err := records.AddCertificate(record, object, chain, a.Revocation.lastBefore(record), s.input.Now)
	if err != nil {
		return nil, err
	}
	if err := a.writeRecord(ctx, record); err != nil {
		return nil, err
	}
	s.set(record, a.records.Record(record))
	return &issuedCertificate{object.UID, d.Grant.NodeName, fingerprint, chain, s.approvalWarnings}, nil
}

// untilAccepted returns how long to wait until API servers accept writes with the certificate.
func (a *actor) untilAccepted(c *issuedCertificate) time.Duration {
	return a.Revocation.untilAccepted(c.node, c.fingerprint)
}

// signServing issues a serving certificate. It is in no record, since it authenticates no request
// to the API server.
func (a *actor) signServing(ctx context.Context, object *certificatesv1.CertificateSigningRequest, s *snapshot, d verifier.Decision) error {
	ca, err := a.CA.CA(ctx, a.Now())
	if err != nil {
		return err // the CA was available when the snapshot was made
	}
	addresses := d.Grant.Addresses
	chain, err := signing.IssueServing(ca, signing.ServingGrant{
		Grant: grantOf(object, d), DNSNames: addresses.DNSNames, IPs: addresses.IPs,
	}, a.limits(d), s.input.Now, rand.Reader)
	if err != nil {
		return err
	}
	s.issued = chain
	return a.publish(ctx, object, chain)
}

func grantOf(object *certificatesv1.CertificateSigningRequest, d verifier.Decision) signing.Grant {
	return signing.Grant{NodeName: d.Grant.NodeName, PublicKey: d.Grant.PublicKey, ExpirationSeconds: object.Spec.ExpirationSeconds}
}

// limits returns the operator's limits, shortened to the lifetime that the grant allows.
func (a *actor) limits(d verifier.Decision) signing.Limits {
	limits := a.Limits
	if most := d.Grant.MaxLifetime; most > 0 {
		limits.Max, limits.Default = min(limits.Max, most), min(limits.Default, most)
	}
	return limits
}

func (a *actor) publish(ctx context.Context, object *certificatesv1.CertificateSigningRequest, chain []byte) error {
	_, err := a.writeStatus(ctx, object, "status", map[string]any{"certificate": chain})
	return err
}

// finish completes the steps of a finished request that are missing after a crash, or because
// another signer issued. It writes the certificate into the record, closes the hello, and makes the
// decision record. A request that no record names was issued by somebody else. It may refer to a
// hello that is not its own, so finish leaves it alone.
func (a *actor) finish(ctx context.Context, object *certificatesv1.CertificateSigningRequest) error {
	if a.Audit || len(object.Status.Certificate) == 0 {
		return nil
	}
	claim, _ := a.Rules.ParseClaim(object)
	provider := a.providers[claim.Provider]
	if claim.Hello || provider == nil {
		return nil
	}
	var hello *certificatesv1.CertificateSigningRequest
	if challenger, ok := provider.(Challenger); ok {
		var err error
		// the cache suffices: a stale hello causes a conflict
		if hello, err = FindHello(ctx, a.client, challenger, object); err != nil {
			return err
		}
	}
	if a.CA != nil && (hello == nil || stateOf(hello) != pending || a.lastWrites.closed(hello)) {
		return nil
	}
	record, err := a.recordNaming(ctx, object)
	if record == nil || err != nil {
		return err
	}
	if a.CA == nil && !records.HasCertificateFor(record, object.UID) {
		fingerprint, err := records.AddCertificate(record, object, object.Status.Certificate, a.Revocation.lastBefore(record), a.Now())
		if err != nil {
			return err
		}
		if err := a.writeRecord(ctx, record); err != nil {
			return err
		}
		// this wakes a round that puts the certificate into the policies; the node has it already
		a.Revocation.untilAccepted(record.Spec.NodeName, fingerprint)
		a.recorder.recordIssued(ctx, object, hello, a.records.Record(record))
	}
	if hello == nil || record.Status.Hello == nil || record.Status.Hello.UID != hello.UID {
		return nil
	}
	if records.HasCertificateFor(record, object.UID) {
		a.recorder.recordIssued(ctx, object, hello, a.records.Record(record))
	}
	return a.closeHello(ctx, hello, object.Name)
}

// recordNaming returns the record whose status.request is this request, nil if there is none.
func (a *actor) recordNaming(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (*v1alpha1.NodeAttestation, error) {
	items, err := a.records.Find(ctx, v1alpha1.FieldRequestUID, string(object.UID))
	if err != nil || len(items) == 0 {
		return nil, err
	}
	return &items[0], nil
}

// closeHello denies a hello whose proof got its certificate. Denial is the only way to end a hello,
// since no signer serves its signer name. The denial is no decision of the rules, so neither a
// counter nor an Event reports it. After a crash the hello may already be gone or closed.
func (a *actor) closeHello(ctx context.Context, hello *certificatesv1.CertificateSigningRequest, proof string) error {
	if hello == nil || stateOf(hello) != pending {
		return nil
	}
	a.lastWrites.setClosed(hello) // before the cache can show the denial
	err := a.deny(ctx, hello, string(ReasonCompleted), completedMessage(proof))
	if err == nil {
		return nil
	}
	a.lastWrites.forget(hello)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// completedMessage explains the denial of the hello to people who read it.
func completedMessage(proof string) string {
	return "this is the normal end of a hello: its proof, the CertificateSigningRequest " + proof + ", got the certificate"
}
