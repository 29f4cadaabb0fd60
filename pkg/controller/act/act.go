// SPDX-License-Identifier: Apache-2.0

// Package act carries out decisions: it writes records, conditions, annotations and certificates.
// It returns what it has Written.
package act

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
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/statuspatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
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

// ConflictDelay is the time until the next decision if another writer was faster.
const ConflictDelay = 100 * time.Millisecond

// EventRate bounds what explains decisions to one requester: the Events about denied and waiting
// requests, and the annotations of waiting ones. Each costs the API server as much as a denial.
var EventRate = fairqueue.Rate{Every: time.Second, Burst: 50}

// Revocations knows which certificates are revoked: a *revocation.Enforcer, which may be nil.
type Revocations interface {
	// Revoked reports whether an issued certificate is revoked.
	Revoked(fingerprint string) bool
	// RevokedSince reports whether the node may have been revoked since one of the requests.
	RevokedSince(node string, requests ...types.UID) bool
	// LastBefore returns the number of the last revocation that is older than each of the requests.
	LastBefore(requests ...types.UID) int64
	// UntilAccepted returns how long to wait until API servers accept writes with a certificate
	// that is in the node's record, 0 if they do.
	UntilAccepted(node, fingerprint string) time.Duration
}

// Actor writes the outcomes of decisions to the API server.
type Actor struct {
	Rules *verifier.Rules
	// Client patches requests.
	Client        client.Client
	Records       *records.Store
	Issuer        signing.Issuer
	Operator      signing.Limits
	Revocations   Revocations
	Challenged    func(name string)
	Now           func() time.Time
	MachineLimits *fairqueue.Limiters
	LastWrites    collect.LastWrites
	Retries       *fairqueue.Retries[collect.WaitingEvidence]
	Queue         *fairqueue.Queue
	// WaitingLimits bounds the writes of PublishWaiting for each requester.
	WaitingLimits *fairqueue.Limiters
	unpublished   unpublished
}

// Written is what carrying out a decision has written.
type Written struct {
	// Request is the request as the API server stored it, nil if no condition or annotation was
	// written.
	Request *certificatesv1.CertificateSigningRequest
	// Record is the record of the approved or signed certificate, else nil.
	Record *v1alpha1.NodeAttestation
	// Certificate is the published chain, and Warnings are those of its approval. Both go into the
	// decision record.
	Certificate []byte
	Warnings    verifier.Refusals
	// RequeueAfter is the time until the next decision, 0 if an event starts it.
	RequeueAfter time.Duration
}

// CarryOut carries out a decision that writes nothing but the request itself. Reconcile approves
// proofs and signs. Three denials are elsewhere: of an expired hello (Reconcile), of a request
// whose record belongs to another cluster (resolveConflict), and of a hello whose proof has its
// certificate (CloseHello).
func (a *Actor) CarryOut(ctx context.Context, in *collect.Inputs, d verifier.Decision) (done Written, err error) {
	if in.Claim.Rehearsal {
		return a.rehearse(ctx, in, d)
	}
	switch d.Outcome {
	case verifier.Ignore:
	case verifier.Deny:
		done.Request, err = a.refuse(ctx, in, d)
	case verifier.Fail:
		done.Request, err = a.fail(ctx, in.Request, d)
	case verifier.Challenge:
		return a.challenge(ctx, in)
	case verifier.SignServing:
		done.Certificate, err = a.signServing(ctx, in, d)
	case verifier.ApproveServing:
		done.Request, err = a.addApproval(ctx, in.Request, ReasonServing, "the machine that has attested has these addresses, as was verified by "+telemetry.Component)
	case verifier.ApproveUnattested:
		done.Request, err = a.addApproval(ctx, in.Request, ReasonUnattested, "the node is in unattestedNodes: nothing was verified by "+telemetry.Component)
	default:
		err = fmt.Errorf("the outcome %v cannot be carried out", d.Outcome)
	}
	return done, err
}

// challenge answers a hello whose evidence was accepted.
func (a *Actor) challenge(ctx context.Context, in *collect.Inputs) (Written, error) {
	if in.Challenger == nil {
		return Written{}, fmt.Errorf("provider %s has one round, and no challenge", in.Provider.Name())
	}
	value, expires, err := in.Challenger.Challenge(in.Request, in.EKNamed, in.Now)
	if err != nil {
		return Written{}, err
	}
	challenged, err := a.Annotate(ctx, in.Request, map[string]any{
		attestation.AnnotationChallenge: value, attestation.AnnotationEK: "sha256:" + in.Evidence.EK, attestation.AnnotationWaiting: nil,
	})
	if err != nil {
		return Written{}, err
	}
	a.LastWrites.SetChallenge(challenged)
	if in.Claim.Rehearsal {
		return Written{Request: challenged}, nil // nobody closes this hello
	}
	a.Challenged(in.Request.Name) // the policy watch tries to approve a real hello
	return Written{Request: challenged, RequeueAfter: expires.Sub(in.Now) + intake.CloseDelay}, nil
}

// Annotate sets annotations on the version of the object that was judged, and returns the object as
// the API server stored it. An annotation whose value is nil is removed.
func (a *Actor) Annotate(ctx context.Context, object *certificatesv1.CertificateSigningRequest, values map[string]any) (*certificatesv1.CertificateSigningRequest, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": values, "resourceVersion": object.ResourceVersion}})
	if err != nil {
		return nil, err
	}
	result := &certificatesv1.CertificateSigningRequest{}
	result.Name = object.Name
	return result, asWriteError(a.Client.Patch(ctx, result, client.RawPatch(types.MergePatchType, patch)))
}

// writeStatus writes fields of the status through a subresource, on the version of the object that
// was judged. It returns the object as the API server stored it. It must patch: the cached copy
// lacks labels, finalizers and other fields that no decision reads, and an update would remove
// them.
func (a *Actor) writeStatus(ctx context.Context, object *certificatesv1.CertificateSigningRequest, subresource string, fields map[string]any) (*certificatesv1.CertificateSigningRequest, error) {
	patch, err := statuspatch.New(object, fields)
	if err != nil {
		return nil, err
	}
	result := &certificatesv1.CertificateSigningRequest{}
	result.Name = object.Name
	return result, asWriteError(a.Client.SubResource(subresource).Patch(ctx, result, patch))
}

// addCondition adds a condition. A merge patch replaces the whole list. So if the request has
// conditions, object must be the API server's answer, not the cached copy.
func (a *Actor) addCondition(ctx context.Context, object *certificatesv1.CertificateSigningRequest, added certificatesv1.CertificateSigningRequestCondition) (*certificatesv1.CertificateSigningRequest, error) {
	return a.writeStatus(ctx, object, "approval", map[string]any{"conditions": append(slices.Clone(object.Status.Conditions), added)})
}

// refuse denies. If the hello's version is not supported, refuse first annotates the supported
// versions.
func (a *Actor) refuse(ctx context.Context, in *collect.Inputs, d verifier.Decision) (*certificatesv1.CertificateSigningRequest, error) {
	request := in.Request
	if in.Challenger != nil && string(d.Refusals.Reason()) == attestation.ReasonVersion {
		annotated, err := a.Annotate(ctx, request, map[string]any{attestation.AnnotationVersions: in.Challenger.Versions().String()})
		if err != nil {
			return nil, err
		}
		request = annotated
	}
	return a.Deny(ctx, request, string(d.Refusals.Reason()), d.Refusals.Error())
}

// Deny denies a request. It returns the request as the API server stored it.
func (a *Actor) Deny(ctx context.Context, request *certificatesv1.CertificateSigningRequest, reason, message string) (*certificatesv1.CertificateSigningRequest, error) {
	return a.addCondition(ctx, request, statuspatch.Condition(certificatesv1.CertificateDenied, reason, message))
}

// fail marks an approved request that must not be signed as failed. It writes through /approval,
// since /status would need the right to sign.
func (a *Actor) fail(ctx context.Context, request *certificatesv1.CertificateSigningRequest, d verifier.Decision) (*certificatesv1.CertificateSigningRequest, error) {
	return a.addCondition(ctx, request, statuspatch.Condition(certificatesv1.CertificateFailed, string(d.Refusals.Reason()), d.Refusals.Error()))
}

// RecordGrant writes the record of a grant, and returns it as the API server stored it. The record
// is the lock: it names one of two requests that might both pass. So a write on another version, or
// a rival, is a conflict.
func (a *Actor) RecordGrant(ctx context.Context, in *collect.Inputs, d verifier.Decision) (*v1alpha1.NodeAttestation, error) {
	record := in.RecordFor(d.Grant.Record.Machine)
	if record == nil {
		var err error
		if record, err = a.Records.New(d.Grant.Record); err != nil {
			return nil, err
		}
	}
	records.SetGrant(record, d.Grant.Record, in.Request, in.Hello, in.Now)
	if err := a.WriteRecord(ctx, record); err != nil {
		return nil, err
	}
	return record, a.checkSole(ctx, in, record)
}

// WriteRecord writes a record under the version that was read.
func (a *Actor) WriteRecord(ctx context.Context, record *v1alpha1.NodeAttestation) error {
	return asWriteError(a.Records.Write(ctx, record, a.Now()))
}

// checkSole runs after the record was written. It looks for rivals: records with the same node name
// or EK. A rival that is not among the inputs was not judged, so the error is a conflict. Of two
// writers that contradict each other, the second one sees the first one's record.
func (a *Actor) checkSole(ctx context.Context, in *collect.Inputs, record *v1alpha1.NodeAttestation) error {
	items, err := a.Records.FindRivals(ctx, record)
	if err != nil {
		return err
	}
	for i := range items {
		if rival := &items[i]; !records.IsSameVersion(rival, record) && (rival.UID == record.UID || !in.Has(rival)) {
			return apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("nodeattestations").GroupResource(), record.Name,
				fmt.Errorf("the record %s was written meanwhile", rival.Name))
		}
	}
	return nil
}

// Approve approves a proof, and returns it as the API server stored it. Only a written approval
// counts towards the machine's limit.
func (a *Actor) Approve(ctx context.Context, in *collect.Inputs, d verifier.Decision) (*certificatesv1.CertificateSigningRequest, error) {
	request, err := a.addApproval(ctx, in.Request, ReasonApproved, "the evidence was verified by "+telemetry.Component)
	if err == nil {
		a.MachineLimits.Take(d.Grant.Record.Machine.Name, a.Now())
	}
	return request, err
}

// addApproval approves. No other function does. It returns the request as the API server stored it.
func (a *Actor) addApproval(ctx context.Context, object *certificatesv1.CertificateSigningRequest, reason verifier.Reason, message string) (*certificatesv1.CertificateSigningRequest, error) {
	return a.addCondition(ctx, object, statuspatch.Condition(certificatesv1.CertificateApproved, string(reason), message))
}

// Sign returns a certificate for a granted request, and the record that has it. So each certificate
// is in a record before it is published. warnings are those of the approval. It returns the
// certificate that an earlier call issued and did not publish, unless that was revoked since, or
// somebody replaced the record.
func (a *Actor) Sign(ctx context.Context, in *collect.Inputs, d verifier.Decision, warnings verifier.Refusals) (*IssuedCertificate, *v1alpha1.NodeAttestation, error) {
	record := in.RecordFor(d.Grant.Record.Machine)
	if record == nil {
		return nil, nil, errors.New("no record to write the certificate into")
	}
	if c := a.unpublished.get(in.Request); c != nil && records.HasCertificate(record, c.fingerprint) && !a.Revocations.Revoked(c.fingerprint) {
		return c, record, nil
	}
	ca, err := a.Issuer.CA(ctx, a.Now())
	if err != nil {
		return nil, nil, err // the CA was available when the inputs were collected
	}
	chain, err := signing.Issue(ca, grantOf(in, d), a.limits(d), in.Now, rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	fingerprint, err := records.AddCertificate(record, in.Request, chain, a.Revocations.LastBefore(records.Requests(record)...), in.Now)
	if err != nil {
		return nil, nil, err
	}
	if err := a.WriteRecord(ctx, record); err != nil {
		return nil, nil, err
	}
	return &IssuedCertificate{in.Request.UID, d.Grant.NodeName, fingerprint, chain, warnings}, record, nil
}

// UntilAccepted returns how long to wait until API servers accept writes with the certificate.
func (a *Actor) UntilAccepted(c *IssuedCertificate) time.Duration {
	return a.Revocations.UntilAccepted(c.node, c.fingerprint)
}

// UntilPublished returns how long to wait until an issued certificate of a request can be
// published, 0 if there is none.
func (a *Actor) UntilPublished(request *certificatesv1.CertificateSigningRequest) time.Duration {
	if c := a.unpublished.get(request); c != nil {
		return a.UntilAccepted(c)
	}
	return 0
}

// KeepUnpublished keeps a certificate that is in a record, until UntilAccepted lets a later call
// publish it.
func (a *Actor) KeepUnpublished(ctx context.Context, request *certificatesv1.CertificateSigningRequest, c *IssuedCertificate) {
	a.unpublished.keep(request, c)
	log.FromContext(ctx).Info("the certificate is published once the policies have it", "node", c.node, "sha256", c.fingerprint)
}

// signServing issues a serving certificate. It is in no record, since it authenticates no request
// to the API server.
func (a *Actor) signServing(ctx context.Context, in *collect.Inputs, d verifier.Decision) ([]byte, error) {
	ca, err := a.Issuer.CA(ctx, a.Now())
	if err != nil {
		return nil, err // the CA was available when the inputs were collected
	}
	addresses := d.Grant.Addresses
	chain, err := signing.IssueServing(ca, signing.ServingGrant{
		Grant: grantOf(in, d), DNSNames: addresses.DNSNames, IPs: addresses.IPs,
	}, a.limits(d), in.Now, rand.Reader)
	if err != nil {
		return nil, err
	}
	return chain, a.publish(ctx, in.Request, chain)
}

func grantOf(in *collect.Inputs, d verifier.Decision) signing.Grant {
	return signing.Grant{NodeName: d.Grant.NodeName, PublicKey: d.Grant.PublicKey, ExpirationSeconds: in.Request.Spec.ExpirationSeconds}
}

// limits returns the operator's limits, shortened to the lifetime that the grant allows.
func (a *Actor) limits(d verifier.Decision) signing.Limits {
	limits := a.Operator
	if most := d.Grant.MaxLifetime; most > 0 {
		limits.Max, limits.Default = min(limits.Max, most), min(limits.Default, most)
	}
	return limits
}

// Forget drops the state that is kept for a request that is decided or gone.
func (a *Actor) Forget(request string) { a.unpublished.forget(request) }

// PublishIssued publishes a certificate that is in a record.
func (a *Actor) PublishIssued(ctx context.Context, request *certificatesv1.CertificateSigningRequest, c *IssuedCertificate) error {
	err := a.publish(ctx, request, c.Chain)
	if err == nil {
		a.unpublished.forget(request.Name)
	}
	return err
}

func (a *Actor) publish(ctx context.Context, request *certificatesv1.CertificateSigningRequest, chain []byte) error {
	_, err := a.writeStatus(ctx, request, "status", map[string]any{"certificate": chain})
	if err == nil {
		a.LastWrites.SetPublished(request)
	}
	return err
}

// CloseHello denies a hello whose proof got its certificate. Denial is the only way to end a hello,
// since no signer serves its signer name. The denial is no decision of the rules, so neither a
// counter nor an Event reports it. After a crash the hello may already be gone or closed.
func (a *Actor) CloseHello(ctx context.Context, hello *certificatesv1.CertificateSigningRequest, proof string) error {
	if hello == nil || csrstate.Of(hello) != csrstate.Pending {
		return nil
	}
	a.LastWrites.SetClosed(hello) // before the cache can show the denial
	_, err := a.Deny(ctx, hello, string(ReasonCompleted), completedMessage(proof))
	if err == nil {
		return nil
	}
	a.LastWrites.Forget(hello)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// completedMessage explains the denial of the hello to people who read it.
func completedMessage(proof string) string {
	return "this is the normal end of a hello: its proof, the CertificateSigningRequest " + proof + ", got the certificate"
}
