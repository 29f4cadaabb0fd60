// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"math/big"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/decisionlog"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/report"
)

// recordOf returns the record of an admission, as a controller makes it.
func (a admission) recordOf(t *testing.T, decided time.Time) *decisionlog.Record {
	t.Helper()
	archived := func(object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
		return &certificatesv1.CertificateSigningRequest{
			TypeMeta:   object.TypeMeta,
			ObjectMeta: metav1.ObjectMeta{Name: object.Name, UID: object.UID, CreationTimestamp: metav1.NewTime(decided.Add(-time.Second).Truncate(time.Second))},
			Spec:       object.Spec,
		}
	}
	proof, hello := archived(a.proof), archived(a.hello)
	request := func(object *certificatesv1.CertificateSigningRequest) decisionlog.Request {
		return decisionlog.Request{
			Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName, Created: decisionlog.Time{Time: object.CreationTimestamp.Time},
			SHA256: decisionlog.DigestOf(object.Spec.Request),
		}
	}
	evidence := a.judge.Verify(t.Context(), evidence.Question{Request: proof, Hello: hello, Now: decided})
	if evidence.Err != nil {
		t.Fatal(evidence.Err)
	}
	of := request(hello)
	record := &decisionlog.Record{
		APIVersion: decisionlog.APIVersion, Kind: decisionlog.Kind, ID: string(proof.UID) + "/Issued", Time: decisionlog.Time{Time: decided},
		Outcome: decisionlog.Issued, Reason: "Attested", Class: "first", Request: request(proof), Hello: &of, Requester: report.RequesterOf(proof.Spec),
		Node: &decisionlog.Node{Name: "worker-1"}, Machine: &decisionlog.Machine{Source: "inventory", Name: "worker-1"},
		Evidence: &decisionlog.Evidence{
			Provider: "tpm", Version: string(attestation.VersionTPM), Proven: true, EK: &decisionlog.EK{Fingerprint: evidence.EK}, AKName: evidence.AK, PCRs: report.PCRsOf(evidence),
		},
		Archive: &decisionlog.Archive{Request: proof, Hello: hello},
	}
	certify(t, record, proofKey(t, record), "system:node:worker-1")
	return record
}

// certify has the record and its archive have a certificate for a key and a name.
func certify(t *testing.T, record *decisionlog.Record, key any, name string) {
	t.Helper()
	ca, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(255), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Truncate(time.Second), NotAfter: time.Now().Add(time.Hour).Truncate(time.Second)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key, ca)
	if err != nil {
		t.Fatal(err)
	}
	record.Archive.Certificate = der
	record.Certificate = &decisionlog.Certificate{
		SHA256: decisionlog.DigestOf(der), Serial: "ff", NotBefore: decisionlog.Time{Time: template.NotBefore}, NotAfter: decisionlog.Time{Time: template.NotAfter},
	}
}

// An admission in a decision record passes at the time of its decision. One that was tampered with
// does not: neither if its archive and its fields differ, nor if the evidence does not show what
// both say.
func TestVerifyRecord(t *testing.T) {
	a := newAdmission(t)
	decided := time.Now()
	right, other := inventoryOf(t, a.judge.EK(a.hello, nil)), inventoryOf(t, strings.Repeat("ab", 32))
	configFile, secretFile := write(t, a.config), write(t, manifest(t, a.secret))
	otherKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := []string{"--inventory", right, "--challenge-keys", secretFile}
	// bend changes a byte in the middle of a request, and the digest beside it.
	bend := func(request *certificatesv1.CertificateSigningRequest, digest *decisionlog.Digest) {
		request.Spec.Request = bytes.Clone(request.Spec.Request)
		request.Spec.Request[len(request.Spec.Request)/2] ^= 1
		*digest = decisionlog.DigestOf(request.Spec.Request)
	}
	for name, c := range map[string]struct {
		args   []string
		change func(*decisionlog.Record)
		code   int
		says   []string
	}{
		"as it is": {good, nil, 0, []string{"outcome Approve", "the decision record agrees with its archive"}},
		"of another signer": {good, func(r *decisionlog.Record) {
			r.Outcome, r.ID, r.Certificate, r.Archive.Certificate = decisionlog.Approved, r.Request.UID+"/Approved", nil, nil
		}, 0, []string{"the decision record agrees"}},
		"made from the NodeAttestation": {good, func(r *decisionlog.Record) { r.Recovered, r.Evidence.PCRs = true, nil }, 0, []string{"the decision record agrees"}},
		// the proof came in time
		"a day later":                 {append([]string{"--time", decided.Add(24 * time.Hour).Format(time.RFC3339)}, good...), nil, 0, []string{"the decision record agrees"}},
		"a day before":                {append([]string{"--time", decided.Add(-24 * time.Hour).Format(time.RFC3339)}, good...), nil, codeRefused, []string{"FAIL  evidence", "does not show"}},
		"without keys":                {good[:2], nil, codeRefused, []string{"AttestationChallengeKeyUnknown", "without --challenge-keys"}},
		"another inventory":           {append([]string{"--inventory", other}, good[2:]...), nil, codeRefused, []string{"NodeNameMismatch"}},
		"without an archive":          {good, func(r *decisionlog.Record) { r.Archive = nil }, codeRefused, []string{"not judged: the decision record has no archive"}},
		"a denial without an archive": {good, func(r *decisionlog.Record) { r.Outcome, r.Archive = decisionlog.Denied, nil }, 0, []string{"not judged"}},
		"a denial":                    {good, func(r *decisionlog.Record) { r.Outcome, r.ID = decisionlog.Denied, r.Request.UID+"/Denied" }, 0, []string{"the decision record agrees"}},
		"another signer's": {good, func(r *decisionlog.Record) {
			r.Archive.Request.Spec.SignerName, r.Request.SignerName = "example.com/x", "example.com/x"
		}, codeRefused, []string{"not judged: signer"}},

		"proof":                    {good, func(r *decisionlog.Record) { bend(r.Archive.Request, &r.Request.SHA256) }, codeRefused, []string{"FAIL", "does not pass"}},
		"hello":                    {good, func(r *decisionlog.Record) { bend(r.Archive.Hello, &r.Hello.SHA256) }, codeRefused, []string{"FAIL", "does not pass"}},
		"digest of the proof":      {good, func(r *decisionlog.Record) { r.Request.SHA256 = decisionlog.DigestOf(nil) }, codeRefused, []string{"request.sha256 is not that of the archived request"}},
		"digest of the hello":      {good, func(r *decisionlog.Record) { r.Hello.SHA256 = decisionlog.DigestOf(nil) }, codeRefused, []string{"hello.sha256"}},
		"no hello":                 {good, func(r *decisionlog.Record) { r.Hello, r.Archive.Hello = nil, nil }, codeRefused, []string{"HelloNotFound"}},
		"hello of the record":      {good, func(r *decisionlog.Record) { r.Hello = nil }, codeRefused, []string{"hello is in only one of"}},
		"name":                     {good, func(r *decisionlog.Record) { r.Request.Name = "other" }, codeRefused, []string{"request.name"}},
		"both names":               {good, func(r *decisionlog.Record) { r.Request.Name, r.Archive.Request.Name = "other", "other" }, codeRefused, []string{"AttestationQuoteMAC"}},
		"UID":                      {good, func(r *decisionlog.Record) { r.Request.UID = "other" }, codeRefused, []string{"request.uid"}},
		"age":                      {good, func(r *decisionlog.Record) { r.Request.Created.Time = r.Request.Created.Add(-time.Hour) }, codeRefused, []string{"request.created"}},
		"ID":                       {good, func(r *decisionlog.Record) { r.ID = "other/Issued" }, codeRefused, []string{"id is not that"}},
		"requester":                {good, func(r *decisionlog.Record) { r.Requester.Username = "system:bootstrap:other0" }, codeRefused, []string{"requester is not"}},
		"credential":               {good, func(r *decisionlog.Record) { r.Requester.CredentialID = "X509SHA256=00" }, codeRefused, []string{"requester is not"}},
		"node":                     {good, func(r *decisionlog.Record) { r.Node.Name = "worker-2" }, codeRefused, []string{"node.name is not what the evidence shows"}},
		"no node":                  {good, func(r *decisionlog.Record) { r.Node = nil }, codeRefused, []string{"node.name"}},
		"machine":                  {good, func(r *decisionlog.Record) { r.Machine.Name = "worker-2" }, codeRefused, []string{"machine is not"}},
		"EK":                       {good, func(r *decisionlog.Record) { r.Evidence.EK.Fingerprint = strings.Repeat("ab", 32) }, codeRefused, []string{"evidence.ek.fingerprint"}},
		"AK":                       {good, func(r *decisionlog.Record) { r.Evidence.AKName = "000b" }, codeRefused, []string{"evidence.akName"}},
		"PCR":                      {good, func(r *decisionlog.Record) { r.Evidence.PCRs.Values[0].Value = strings.Repeat("12", 32) }, codeRefused, []string{"evidence.pcrs"}},
		"no PCRs":                  {good, func(r *decisionlog.Record) { r.Evidence.PCRs = nil }, codeRefused, []string{"evidence.pcrs"}},
		"provider":                 {good, func(r *decisionlog.Record) { r.Evidence.Provider = "other" }, codeRefused, []string{"evidence.provider"}},
		"time":                     {good, func(r *decisionlog.Record) { r.Time.Time = r.Time.Add(-24 * time.Hour) }, codeRefused, []string{"FAIL  evidence", "does not show"}},
		"no evidence":              {good, func(r *decisionlog.Record) { r.Evidence = nil }, codeRefused, []string{"evidence.proven"}},
		"certificate":              {good, func(r *decisionlog.Record) { r.Certificate.SHA256 = decisionlog.DigestOf(nil) }, codeRefused, []string{"certificate is not that of the archive"}},
		"no certificate":           {good, func(r *decisionlog.Record) { r.Archive.Certificate = nil }, codeRefused, []string{"the certificate is missing"}},
		"certificate of a key":     {good, func(r *decisionlog.Record) { certify(t, r, otherKey.Public(), "system:node:worker-1") }, codeRefused, []string{"another key"}},
		"certificate of a node":    {good, func(r *decisionlog.Record) { certify(t, r, proofKey(t, r), "system:node:worker-2") }, codeRefused, []string{"another node"}},
		"an admission of a denial": {append([]string{"--inventory", other}, good[2:]...), nil, codeRefused, []string{"does not show"}},
	} {
		t.Run(name, func(t *testing.T) {
			record := a.recordOf(t, decided)
			if c.change != nil {
				c.change(record)
			}
			line, err := json.Marshal(record)
			if err != nil {
				t.Fatal(err)
			}
			var stdout, stderr bytes.Buffer
			args := append(append([]string{"verify", "--config", configFile}, c.args...), write(t, string(line)+"\n"))
			code := Program{}.Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr})
			all := stdout.String() + stderr.String()
			if code != c.code {
				t.Errorf("exit code %d, not %d:\n%s", code, c.code, all)
			}
			for _, says := range c.says {
				if !strings.Contains(all, says) {
					t.Errorf("does not say %q:\n%s", says, all)
				}
			}
			if code == 0 && strings.Contains(all, "FAIL") {
				t.Errorf("%s", all)
			}
		})
	}
}

// A log has what operators did, too. It is printed, and counts for nothing.
func TestVerifyRevocationRecord(t *testing.T) {
	a := newAdmission(t)
	line, err := json.Marshal(a.recordOf(t, time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	stolen, err := json.Marshal(&decisionlog.Revocation{
		APIVersion: decisionlog.APIVersion, Kind: decisionlog.KindRevocation, ID: "u/1/Suspended", Time: decisionlog.Time{Time: time.Now()},
		Action: decisionlog.Suspended, Reason: "machine \x1b[31mstolen", Node: decisionlog.Node{Name: "worker-1"}, Machine: decisionlog.Machine{Source: "inventory", Name: "m-1"},
		Certificates: []decisionlog.RevokedCertificate{{SHA256: decisionlog.DigestOf(nil)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal(a.proof)
	if err != nil {
		t.Fatal(err)
	}
	printed := `node "worker-1" of machine "m-1": Suspended, 1 certificate, at `
	for name, c := range map[string]struct {
		text string
		code int
		says string
	}{
		"alone":                 {string(stolen), 0, printed},
		"before a decision":     {string(stolen) + "\n" + string(line), codeRefused, "1 of 1 requests do not pass"},
		"after a decision":      {string(line) + "\n" + string(stolen), codeRefused, "1 of 1 requests do not pass"},
		"before a manifest":     {string(stolen) + "\n" + string(manifest), codeRefused, "HelloNotFound"},
		"with an unknown field": {strings.Replace(string(stolen), `{"apiVersion"`, `{"x":1,"apiVersion"`, 1), cli.CodeUsage, "a revocation record: "},
	} {
		var stdout, stderr bytes.Buffer
		args := []string{"verify", "--config", write(t, a.config), "--inventory", inventoryOf(t, a.judge.EK(a.hello, nil)), write(t, c.text+"\n")}
		code := Program{}.Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr})
		all := stdout.String() + stderr.String()
		if code != c.code || !strings.Contains(all, c.says) || strings.Contains(all, printed) != (code != cli.CodeUsage) || strings.Contains(all, "\x1b") {
			t.Errorf("%s: exit code %d: %s", name, code, all)
		}
	}
}

// A broken record is no record: verify names the file, and judges nothing.
func TestVerifyBrokenRecord(t *testing.T) {
	a := newAdmission(t)
	line, err := json.Marshal(a.recordOf(t, time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"an unknown field": strings.Replace(string(line), `{"apiVersion"`, `{"x":1,"apiVersion"`, 1),
		"another version":  strings.Replace(string(line), "v1alpha1", "v2", 1),
		"half a line":      string(line[:len(line)/2]),
	} {
		var stdout, stderr bytes.Buffer
		args := []string{"verify", "--config", write(t, a.config), "--inventory", inventoryOf(t, a.judge.EK(a.hello, nil)), write(t, text)}
		if code := (Program{}).Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr}); code != cli.CodeUsage || stdout.Len() > 0 {
			t.Errorf("%s: exit code %d: %s%s", name, code, stdout.String(), stderr.String())
		}
	}
}

// proofKey returns the key that the archived proof asks for.
func proofKey(t *testing.T, record *decisionlog.Record) any {
	t.Helper()
	content, err := attestation.Parse(record.Archive.Request.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	asks, err := x509.ParseCertificateRequest(content.PKCS10)
	if err != nil {
		t.Fatal(err)
	}
	return asks.PublicKey
}
