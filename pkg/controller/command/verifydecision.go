// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"crypto/x509"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// fromDecisionRecord returns the request of a decision record, to be judged at the time of its
// decision.
func (j *offlineJudge) fromDecisionRecord(document []byte) (requestFile, error) {
	record, err := decisionlog.Parse(document)
	if err != nil {
		return requestFile{}, fmt.Errorf("a decision record: %w", err)
	}
	r := requestFile{object: &certificatesv1.CertificateSigningRequest{}, decided: record, at: j.now}
	if !j.fixedTime {
		r.at = record.Time.Time
	}
	if record.Archive != nil && record.Archive.Request != nil {
		r.object, r.hello = record.Archive.Request, record.Archive.Hello
		r.created = r.object.CreationTimestamp.Time
	}
	return r, nil
}

// admitted reports whether the decision record says that the request passed.
func (r requestFile) admitted() bool {
	return r.decided.Outcome == decisionlog.Issued || r.decided.Outcome == decisionlog.Approved
}

// contradictions returns the fields in which a decision record differs from the requests in its
// archive.
func (r requestFile) contradictions() (found []string) {
	record, archive := r.decided, r.decided.Archive
	differ := func(field string, is bool) {
		if is {
			found = append(found, field+" is not that of the archived request")
		}
	}
	same := func(field string, of decisionlog.Request, object *certificatesv1.CertificateSigningRequest) {
		differ(field+".name", of.Name != object.Name)
		differ(field+".uid", of.UID != string(object.UID))
		differ(field+".signerName", of.SignerName != object.Spec.SignerName)
		differ(field+".created", !of.Created.Equal(object.CreationTimestamp.Time))
		differ(field+".sha256", of.SHA256 != decisionlog.DigestOf(object.Spec.Request))
	}
	same("request", record.Request, archive.Request)
	differ("id", record.ID != string(archive.Request.UID)+"/"+string(record.Outcome))
	differ("requester", !record.Requester.Equal(report.RequesterOf(archive.Request.Spec)))
	switch {
	case record.Hello == nil && archive.Hello == nil:
	case record.Hello == nil || archive.Hello == nil:
		found = append(found, "hello is in only one of decision record and archive")
	default:
		same("hello", *record.Hello, archive.Hello)
	}
	return found
}

// contradictionsTo returns the fields in which the decision record of a request that passed differs
// from the verified evidence.
func (r requestFile) contradictionsTo(d verifier.Decision, e verifier.Evidence, about collect.Subject) (found []string) {
	differ := func(field string, is bool) {
		if is {
			found = append(found, field+" is not what the evidence shows")
		}
	}
	record := r.decided
	evidence, node := decisionlog.Evidence{}, decisionlog.Node{}
	if record.Evidence != nil {
		evidence = *record.Evidence
	}
	if record.Node != nil {
		node = *record.Node
	}
	fingerprint := ""
	if evidence.EK != nil {
		fingerprint = evidence.EK.Fingerprint
	}
	differ("evidence.proven", !evidence.Proven)
	differ("evidence.provider", evidence.Provider != e.Provider)
	differ("evidence.ek.fingerprint", fingerprint != e.EK)
	differ("evidence.akName", evidence.AKName != e.AK)
	if !record.Recovered { // a recovered decision record has no PCRs
		differ("evidence.pcrs", !evidence.PCRs.Equal(report.PCRsOf(e)))
	}
	differ("node.name", node.Name != about.Node)
	if machine := record.Machine; machine == nil || machine.Source == "inventory" && machine.Name != d.Grant.Record.Machine.Name {
		found = append(found, "machine is not the one that the inventory names")
	}
	return append(found, r.certificateContradictions(d)...)
}

// certificateContradictions returns how the certificate differs from the decision record and from
// the grant. If another signer issues, the decision record has no certificate.
func (r requestFile) certificateContradictions(d verifier.Decision) (found []string) {
	record := r.decided
	if record.Outcome != decisionlog.Issued || record.Audit {
		return nil
	}
	der := record.Archive.Certificate
	leaf, err := x509.ParseCertificate(der)
	if err != nil || record.Certificate == nil {
		return []string{"the certificate is missing, or does not parse"}
	}
	if record.Certificate.SHA256 != decisionlog.DigestOf(der) || record.Certificate.Serial != leaf.SerialNumber.Text(16) ||
		!record.Certificate.NotBefore.Equal(leaf.NotBefore) || !record.Certificate.NotAfter.Equal(leaf.NotAfter) {
		found = append(found, "certificate is not that of the archive")
	}
	granted, err := x509.MarshalPKIXPublicKey(d.Grant.PublicKey)
	if err != nil || !bytes.Equal(leaf.RawSubjectPublicKeyInfo, granted) {
		found = append(found, "the certificate has another key than the request")
	}
	if leaf.Subject.CommonName != "system:node:"+d.Grant.NodeName {
		found = append(found, "the certificate is for another node than the request")
	}
	return found
}

// showDecisionRecord judges a decision record, prints the result, and reports whether it passes.
func (j *offlineJudge) showDecisionRecord(r requestFile, judge func() (verifier.Decision, verifier.Evidence, collect.Subject)) bool {
	record := r.decided
	j.print("%s: decision record of request %.253q: %s, %s, at %s", r.file, record.Request.Name, record.Outcome, record.Reason, record.Time.UTC().Format(timeFormat))
	if record.Archive == nil || record.Archive.Request == nil {
		j.print("  not judged: the decision record has no archive (decisionLog.archive)")
		return !r.admitted()
	}
	found := r.contradictions()
	claim, ours := j.settings.Rules().ParseClaim(r.object)
	switch {
	case !ours:
		j.print("  not judged: signer %.571q, or its evidence, is not this controller's", r.object.Spec.SignerName)
		return false
	case claim.Provider == "" && record.Evidence != nil:
		found = append(found, "evidence is not that of the archived request")
	case claim.Provider == "":
		j.print("  not judged: the request is approved without evidence of its own, class %s", record.Class)
	default:
		d, evidence, about := judge()
		if r.admitted() && d.Outcome == verifier.Approve {
			found = append(found, r.contradictionsTo(d, evidence, about)...)
		}
		if r.admitted() && d.Outcome != verifier.Approve {
			found = append(found, "the evidence does not show what the decision record says")
		}
	}
	for _, contradiction := range found {
		j.print("  FAIL  %-9s  %s", "archive", contradiction)
	}
	j.print("  %s", map[bool]string{true: "the decision record agrees with its archive", false: "the decision record does not pass"}[len(found) == 0])
	return len(found) == 0
}

// showRevocation prints an operator's action, which is not judged.
func (j *offlineJudge) showRevocation(r requestFile) {
	done := r.revocation
	j.print("%s: node %.253q of machine %.253q: %s, %s, at %s: %.256q", r.file, done.Node.Name, done.Machine.Name, done.Action,
		text.Count(len(done.Certificates), "certificate"), done.Time.UTC().Format(timeFormat), done.Reason)
}

const timeFormat = "2006-01-02T15:04:05.000Z"
