// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// These rates bound, for each requester, the records of denials, and those that contain the whole
// request. Without them a flood would fill the disk, and later approvals would have no record.
var (
	deniedRecordRate  = fairqueue.Rate{Every: time.Second, Burst: 500}
	deniedArchiveRate = fairqueue.Rate{Every: time.Minute, Burst: 50}
)

// maxUnrecorded bounds the number of requesters whose denials without a record are counted.
const maxUnrecorded = 20_000

// Bounds of a record's fields about the requester and the refusals.
const (
	maxGroups, maxFindings = 16, 32
	maxCredentialID        = 256
	maxRecordedProviderID  = 1024
)

// recorder makes the records of final decisions.
type recorder struct {
	rules     *verifier.Rules
	decisions decisionlog.Config
	// source is the source of the machines, as in records.
	source        string
	audit         bool
	now           func() time.Time
	issuer        signing.Issuer
	deniedRecords *fairqueue.Limiters
	deniedArchive *fairqueue.Limiters
	// recorded has the IDs of the last records, so that none is made twice. Audit mode decides on a
	// request repeatedly, and finish sees requests that this replica has just issued.
	recorded telemetry.Once

	mu sync.Mutex
	// unrecorded counts, by requester, the denials without a record since its last record.
	unrecorded *lru.Cache
}

func newRecorder(config Config) *recorder {
	return &recorder{
		rules: config.Rules, decisions: config.Decisions, source: config.Source, audit: config.Audit, now: config.Now, issuer: config.Issuer,
		deniedRecords: fairqueue.NewLimiters(deniedRecordRate), deniedArchive: fairqueue.NewLimiters(deniedArchiveRate),
		unrecorded: lru.New(maxUnrecorded),
	}
}

// outcomeOf returns the outcome of a final decision, "" if another decision follows, or if it is a
// rehearsal.
func (r *recorder) outcomeOf(object *certificatesv1.CertificateSigningRequest, d verifier.Decision) decisionlog.Outcome {
	if attestation.IsRehearsalSigner(object.Spec.SignerName) {
		return ""
	}
	switch d.Outcome {
	case verifier.Deny:
		return decisionlog.Denied
	case verifier.Fail:
		return decisionlog.Failed
	case verifier.Sign, verifier.SignServing:
		return decisionlog.Issued
	case verifier.ApproveUnattested:
		return decisionlog.Approved
	case verifier.Approve:
		if !r.issuer.Issues() || r.audit {
			return decisionlog.Approved
		}
	case verifier.ApproveServing:
		if !r.rules.SignsServing(object.Spec.SignerName) || r.audit {
			return decisionlog.Approved
		}
	}
	return ""
}

// record records a decision, if it is final. If Config.Decisions has no log, it returns the record
// for the process log.
func (r *recorder) record(in *collect.Inputs, d verifier.Decision, done act.Written, about collect.Subject, reason string) *decisionlog.Record {
	outcome := r.outcomeOf(in.Request, d)
	if outcome == "" {
		return nil
	}
	record := r.newRecord(in.Request, in.Hello, outcome, in.Now)
	record.Audit, record.Class, record.Reason = r.audit, d.Class.String(), reason
	if len(d.Refusals) > 0 {
		record.Message = telemetry.Message(d.Refusals.Error())
	}
	record.Refusals, record.Warnings = findings(d.Refusals), findings(merged(done.Warnings, d.Warnings))
	record.Node = recordedNode(about.Node, in.Claim.ProviderID)
	granted := verifier.Record{}
	if d.Grant != nil {
		granted = d.Grant.Record
	}
	record.Machine = r.recordedMachine(in.MachineRef(granted))
	if record.Evidence != nil {
		e := in.Evidence
		record.Evidence.Proven = !in.Claim.Hello && e.Err == nil && e.Provider != "" && e.Provider != verifier.InsecureProvider
		if about.EK != "" {
			record.Evidence.EK = &decisionlog.EK{Fingerprint: about.EK, Template: about.EKTemplate, Source: string(granted.EKSource)}
		}
		if record.Evidence.Proven {
			record.Evidence.AKName, record.Evidence.PCRs = about.AK, PCRsOf(e)
		}
	}
	return r.keep(in.Request, in.Hello, done.Certificate, record)
}

// recordIssued records a published certificate for which this process made no record: another
// signer issued it, or the controller was killed too early. It takes the facts from the
// NodeAttestation. If Config.Decisions has no log, the record goes into the process log.
func (r *recorder) recordIssued(ctx context.Context, object, hello *certificatesv1.CertificateSigningRequest, attested verifier.Record) {
	record := r.newRecord(object, hello, decisionlog.Issued, r.now())
	record.Recovered, record.Reason = true, string(act.ReasonApproved)
	record.Node, record.Machine = recordedNode(attested.NodeName, attested.ProviderID), r.recordedMachine(attested.Machine)
	if record.Evidence != nil {
		record.Evidence.Proven, record.Evidence.AKName = attested.Provider != verifier.InsecureProvider, attested.AK
		if attested.EK != "" {
			record.Evidence.EK = &decisionlog.EK{Fingerprint: attested.EK, Source: string(attested.EKSource)}
		}
	}
	if record := r.keep(object, hello, object.Status.Certificate, record); record != nil {
		log.FromContext(ctx).Info("recorded", "request", object.Name, "signer", object.Spec.SignerName, "requester", object.Spec.Username,
			"message", "the certificate was issued by another signer, or before this process could record it", "record", record)
	}
}

// newRecord returns a record with the fields that depend on the requests alone.
func (r *recorder) newRecord(object, hello *certificatesv1.CertificateSigningRequest, outcome decisionlog.Outcome, now time.Time) *decisionlog.Record {
	record := &decisionlog.Record{
		APIVersion: decisionlog.APIVersion, Kind: decisionlog.Kind,
		ID:   string(object.UID) + "/" + string(outcome),
		Time: decisionlog.Time{Time: now}, Outcome: outcome,
		Controller: r.decisions.Controller, Cluster: r.decisions.Cluster,
		Request: recordedRequest(object), Requester: RequesterOf(object.Spec),
	}
	if hello != nil {
		of := recordedRequest(hello)
		record.Hello = &of
	}
	if content, err := attestation.Parse(object.Spec.Request); err == nil {
		version, _ := attestation.Head(content.Data)
		record.Evidence = &decisionlog.Evidence{Provider: text.Line(content.Provider, collect.MaxName), Version: string(version)}
	}
	return record
}

// recordApplied records a revocation, suspension or resumption by an operator. If Config.Decisions
// has no log, it returns the document for the process log.
func (r *recorder) recordApplied(a revocation.Application) *decisionlog.Revocation {
	spec := a.Record.Spec
	document := &decisionlog.Revocation{
		APIVersion: decisionlog.APIVersion, Kind: decisionlog.KindRevocation,
		ID:   fmt.Sprintf("%s/%s/%s", a.Record.UID, a.Record.ResourceVersion, a.Action),
		Time: decisionlog.Time{Time: r.now()}, Action: decisionlog.Action(a.Action), Reason: a.Reason, Object: a.Object,
		Controller: r.decisions.Controller, Cluster: r.decisions.Cluster,
		Node:    decisionlog.Node{Name: spec.NodeName, ProviderID: text.Line(spec.ProviderID, maxRecordedProviderID)},
		Machine: decisionlog.Machine{Source: spec.Machine.Source, Name: spec.Machine.Name, UID: string(spec.Machine.UID)},
	}
	if owner := ownerReference(a.Record); owner != nil {
		document.Machine.UID = string(owner.UID)
	}
	if spec.EK != nil {
		document.EK = spec.EK.Fingerprint
	}
	for _, c := range a.Certificates {
		document.Certificates = append(document.Certificates, decisionlog.RevokedCertificate{
			SHA256: decisionlog.Digest(c.SHA256), Serial: c.Serial, NotAfter: decisionlog.Time{Time: c.NotAfter.Time},
		})
	}
	if r.decisions.Log == nil {
		return document
	}
	r.decisions.Log.AddRevocation(document)
	return nil
}

// keep adds the certificate, if there is one, and logs a record, each ID once. If Config.Decisions
// has no log, it returns the record.
func (r *recorder) keep(object, hello *certificatesv1.CertificateSigningRequest, chain []byte, record *decisionlog.Record) *decisionlog.Record {
	denied, requester, now := record.Outcome == decisionlog.Denied, object.Spec.Username, r.now()
	if !r.recorded.MarkReported(record.ID, "", now, 0) {
		return nil
	}
	if denied && !r.deniedRecords.Take(requester, now) {
		r.countUnrecorded(requester)
		return nil
	}
	record.Unrecorded = r.takeUnrecorded(requester)
	var der []byte
	if leaf, err := signing.Leaf(chain); err == nil {
		der, record.Certificate = leaf.Raw, certificateOfRecord(leaf)
	}
	if r.decisions.Log == nil {
		return record
	}
	if r.decisions.Archive && isWhole(object) && (!denied || r.deniedArchive.Take(requester, now)) {
		record.Archive = &decisionlog.Archive{Request: archived(object), Certificate: der}
		if hello != nil && isWhole(hello) {
			record.Archive.Hello = archived(hello)
		}
	}
	r.decisions.Log.Add(record)
	return nil
}

func (r *recorder) countUnrecorded(requester string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	if counted, ok := r.unrecorded.Get(requester); ok {
		n = counted.(int)
	}
	r.unrecorded.Add(requester, n+1)
}

// takeUnrecorded returns the number of a requester's denials without a record, and resets it.
func (r *recorder) takeUnrecorded(requester string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	counted, ok := r.unrecorded.Get(requester)
	if !ok {
		return 0
	}
	r.unrecorded.Remove(requester)
	return counted.(int)
}

func (r *recorder) recordedMachine(ref verifier.MachineRef) *decisionlog.Machine {
	if ref.Name == "" {
		return nil
	}
	return &decisionlog.Machine{Source: r.source, Name: text.Line(ref.Name, collect.MaxName), UID: text.Line(ref.UID, collect.MaxName)}
}

func recordedNode(name, providerID string) *decisionlog.Node {
	if name == "" && providerID == "" {
		return nil
	}
	return &decisionlog.Node{Name: name, ProviderID: text.Line(providerID, maxRecordedProviderID)}
}

func recordedRequest(object *certificatesv1.CertificateSigningRequest) decisionlog.Request {
	of := decisionlog.Request{
		Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName, Created: decisionlog.Time{Time: object.CreationTimestamp.Time},
	}
	if isWhole(object) {
		of.SHA256 = decisionlog.DigestOf(object.Spec.Request)
	}
	return of
}

// isWhole reports whether the cache kept the whole spec.request.
func isWhole(object *certificatesv1.CertificateSigningRequest) bool {
	return len(object.Spec.Request) > 0 && len(object.Spec.Request) <= attestation.MaxRequestSize
}

// RequesterOf returns the requester in a spec in the format of records.
func RequesterOf(spec certificatesv1.CertificateSigningRequestSpec) decisionlog.Requester {
	requester := decisionlog.Requester{Username: text.Line(spec.Username, collect.MaxName)}
	for _, group := range spec.Groups[:min(len(spec.Groups), maxGroups)] {
		requester.Groups = append(requester.Groups, text.Line(group, collect.MaxName))
	}
	if id := spec.Extra[verifier.ExtraCredentialID]; len(id) == 1 {
		requester.CredentialID = text.Line(id[0], maxCredentialID)
	}
	return requester
}

// archived returns the fields of a request that `verify` needs: identity, age and spec.
func archived(object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	kept := &certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{APIVersion: certificatesv1.SchemeGroupVersion.String(), Kind: "CertificateSigningRequest"},
		ObjectMeta: metav1.ObjectMeta{Name: object.Name, UID: object.UID, CreationTimestamp: object.CreationTimestamp},
	}
	object.Spec.DeepCopyInto(&kept.Spec)
	return kept
}

func findings(refusals verifier.Refusals) (all []decisionlog.Finding) {
	for _, refusal := range refusals[:min(len(refusals), maxFindings)] {
		all = append(all, decisionlog.Finding{Reason: string(refusal.Reason), Message: telemetry.Message(refusal.Message)})
	}
	return all
}

// merged returns the warnings of both, each once.
func merged(before, after verifier.Refusals) verifier.Refusals {
	all := slices.Clone(before)
	for _, warning := range after {
		if !slices.Contains(all, warning) {
			all = append(all, warning)
		}
	}
	return all
}

// PCRsOf returns the proven PCRs in the format of records, nil if there are none.
func PCRsOf(e verifier.Evidence) *decisionlog.PCRs {
	if len(e.PCRs) == 0 {
		return nil
	}
	pcrs := &decisionlog.PCRs{Bank: e.PCRBank, EventLog: e.EventLogPCRs}
	for _, pcr := range e.PCRs {
		pcrs.Values = append(pcrs.Values, decisionlog.PCR{Index: pcr.Index, Value: hex.EncodeToString(pcr.Value)})
	}
	return pcrs
}

func certificateOfRecord(leaf *x509.Certificate) *decisionlog.Certificate {
	return &decisionlog.Certificate{
		SHA256: decisionlog.DigestOf(leaf.Raw), Serial: leaf.SerialNumber.Text(16),
		NotBefore: decisionlog.Time{Time: leaf.NotBefore}, NotAfter: decisionlog.Time{Time: leaf.NotAfter},
	}
}
