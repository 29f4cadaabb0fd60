// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// denied runs a plugin that must not get a certificate.
func (m *machine) denied(t *testing.T, reason verifier.Reason) {
	t.Helper()
	if r := m.run(t); r.Code != 21 || !strings.Contains(r.Stderr, string(reason)) {
		t.Errorf("exit code %d, want %s: %s", r.Code, reason, r.Stderr)
	}
}

// A thief has a stolen token and another genuine TPM of the same maker. It does not matter who is
// first. Each decision has one record. It proves the admissions when the requests are gone.
func TestStolenToken(t *testing.T) {
	var records *decisions
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) { records = f.recordDecisions(t) })
	victim, thief := f.newMachine(t, "victim-first"), f.newMachine(t, "victim-first")
	f.inventoried(t, victim)
	thief.bootstrap = victim.bootstrap
	thief.denied(t, verifier.ReasonNodeNameMismatch)
	if n := f.records(t); n != 0 {
		t.Errorf("%d records", n)
	}
	first := victim.enrols(t)
	before := f.record(t, victim.name).ResourceVersion
	thief.removeState(t)
	thief.denied(t, verifier.ReasonIdentityBound)
	if after := f.record(t, victim.name).ResourceVersion; after != before {
		t.Error("the record was written")
	}
	victim.removeState(t)
	again := victim.enrols(t)
	f.onlyFor(t, first.Leaf, again.Leaf)
	all := records.stopped(t)
	if len(all) != 4 {
		t.Fatalf("%d records", len(all))
	}
	for i, reason := range []verifier.Reason{verifier.ReasonNodeNameMismatch, act.ReasonApproved, verifier.ReasonNodeNameMismatch, act.ReasonApproved} {
		records.agrees(t, all[i], victim, string(reason))
	}
	records.provesItself(t, 2)
}

// A machine of the fleet, with its own TPM and certificate, requests a certificate for another
// node.
func TestClaimsOfAnotherMachine(t *testing.T) {
	f := newFleet(t, nil)
	a, b := f.newMachine(t, "claimer-a"), f.newMachine(t, "claimed-b")
	f.inventoried(t, a, b)
	token := f.asToken(b.token)
	t.Run("node name", func(t *testing.T) {
		f.refused(t, f.newPeer(t, a.chip, token, b.name, a.name).hello(t), string(verifier.ReasonNodeNameMismatch))
	})
	t.Run("provider ID", func(t *testing.T) {
		f.refused(t, f.newPeer(t, a.chip, token, a.name, b.name).hello(t), string(verifier.ReasonProviderIDMismatch))
	})
	t.Run("node name and provider ID", func(t *testing.T) {
		f.refused(t, f.newPeer(t, a.chip, token, b.name, b.name).hello(t), string(verifier.ReasonProviderIDMismatch))
	})
	first := a.enrols(t)
	t.Run("renewal", func(t *testing.T) {
		credential := a.credential(t)
		f.refused(t, f.newPeer(t, a.chip, credential, b.name, b.name).hello(t), string(verifier.ReasonRequesterNotAllowed))
		f.refused(t, f.newPeer(t, b.chip, credential, b.name, b.name).hello(t), string(verifier.ReasonRequesterNotAllowed))
	})
	// the hello says what any node can read in a hello: B's EK, and B's AK or A's
	t.Run("EK", func(t *testing.T) {
		for name, ak := range map[string]*machine{"and AK": b, "with own AK": a} {
			theirs, own := f.newPeer(t, b.chip, token, b.name, b.name), f.newPeer(t, ak.chip, token, b.name, b.name)
			document := hello(t, theirs)
			document.AKPublic = hello(t, own).AKPublic
			data, err := document.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			attacker := f.newPeer(t, a.chip, token, b.name, b.name)
			challenged := attacker.challenged(t, attacker.file(t, attacker.object(t, attestation.HelloSignerName, data)))
			// A's TPM cannot open the challenge. It answers one of its own, and says that it was
			// this.
			answer, err := attestation.ParseProof(documentOf(t, proofOf(t, f.newPeer(t, a.chip, f.asToken(a.token), a.name, a.name))))
			if err != nil {
				t.Fatal(err)
			}
			answer.HelloName, answer.HelloUID = challenged.Name, string(challenged.UID)
			if data, err = answer.Marshal(); err != nil {
				t.Fatal(err)
			}
			proof := attacker.file(t, attacker.object(t, tpm.SignerName, data))
			harness.Eventually(t, harness.Soon, "the proof is denied", func() bool { return reasonOf(f.get(t, proof.Name)) != "" })
			if got := f.get(t, proof.Name); !strings.HasPrefix(reasonOf(got), "Attestation") {
				t.Errorf("%s: %+v", name, got.Status.Conditions)
			}
			if reason := reasonOf(f.get(t, challenged.Name)); reason != "" {
				t.Errorf("%s: the hello was touched: %s", name, reason)
			}
		}
	})
	t.Run("its own EK with a malformed certificate", func(t *testing.T) {
		p := f.newPeer(t, b.chip, token, b.name, b.name)
		document := hello(t, p)
		document.EKCertificates[0] = append(document.EKCertificates[0], 0)
		data, err := document.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		f.refused(t, p.file(t, p.object(t, attestation.HelloSignerName, data)), "AttestationEKCertificateMalformed")
	})
	second := b.enrols(t)
	f.onlyFor(t, first.Leaf, second.Leaf)
}

// hello returns the document of a peer's hello.
func hello(t *testing.T, p *peer) *attestation.Hello {
	t.Helper()
	data, _, err := p.provider.Hello(t.Context(), p.ask("hello"))
	if err != nil {
		t.Fatal(err)
	}
	document, err := attestation.ParseHello(data)
	if err != nil {
		t.Fatal(err)
	}
	return document
}

// proofOf returns a good proof that is not filed.
func proofOf(t *testing.T, p *peer) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	return p.proof(t, p.challenged(t, p.hello(t)))
}

func documentOf(t *testing.T, object *certificatesv1.CertificateSigningRequest) []byte {
	t.Helper()
	content, err := attestation.Parse(object.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	return content.Data
}

// A bootstrapper copies every request as soon as it sees it, with the victim's own token, under
// other names.
func TestEveryRequestIsCopied(t *testing.T) {
	f := newFleet(t, nil)
	var machines []*machine
	for i := range 4 {
		machines = append(machines, f.newMachine(t, fmt.Sprintf("copied-%d", i)))
		machines[i].bootstrap = machines[0].bootstrap // so that the copier is the same user
	}
	f.inventoried(t, machines...)
	thief, err := client.NewWithWatch(f.asToken(machines[0].token), client.Options{Scheme: newScheme()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	watch, err := thief.Watch(ctx, &certificatesv1.CertificateSigningRequestList{})
	if err != nil {
		t.Fatal(err)
	}
	copies := map[string]string{}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for event := range watch.ResultChan() {
			original, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
			if !ok || copies[original.Name] != "" || strings.HasPrefix(original.Name, "copy-") {
				continue
			}
			name := "copy-" + original.Name
			object := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: original.Spec}
			// The copies are complete when all exist, even if the last answer is still missing.
			if err := thief.Create(ctx, object); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
			copies[original.Name] = name
		}
	}()
	var leaves []*x509.Certificate
	for _, m := range machines {
		leaves = append(leaves, m.enrols(t).Leaf)
	}
	var proofs int
	harness.Eventually(t, harness.Soon, "all are copied", func() bool { return len(f.all(t)) == 4*len(machines) })
	cancel()
	watch.Stop()
	<-ended
	for original, name := range copies {
		object := f.get(t, original)
		if object.Spec.SignerName == tpm.SignerName {
			proofs++
			f.refused(t, f.get(t, name), string(verifiertpm.ReasonQuoteMAC))
		} else {
			f.closed(t, object)
		}
		if len(f.get(t, name).Status.Certificate) > 0 {
			t.Errorf("%s has a certificate", name)
		}
	}
	if proofs != len(machines) || f.records(t) != len(machines) {
		t.Errorf("%d proofs were copied, %d records", proofs, f.records(t))
	}
	f.onlyFor(t, leaves...)
}

// floodLimit is how long an enrolment may take beside a flood.
const floodLimit = time.Minute

// There are 200 hellos in the victim's name, with the victim's token: half of them by another TPM,
// half are copies of the victim's hello.
func TestFloodOfHellos(t *testing.T) {
	f := newFleet(t, nil)
	victim, thief := f.newMachine(t, "flooded"), f.newMachine(t, "flooded")
	f.inventoried(t, victim)
	attacker := f.newPeer(t, thief.chip, f.asToken(victim.token), victim.name, victim.name)
	one, err := hello(t, attacker).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	other, err := hello(t, f.newPeer(t, victim.chip, f.asToken(victim.token), victim.name, victim.name)).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for i := range 10 {
		wait.Go(func() {
			for range 20 {
				document := one
				if i%2 == 0 {
					document = other
				}
				if _, err := attacker.api.Create(t.Context(), attacker.object(t, attestation.HelloSignerName, document), false); err != nil {
					t.Error(err)
				}
			}
		})
	}
	victim.args = []string{"--wait-timeout=2m"} // it does not give up before the test
	began := time.Now()
	first := victim.enrols(t)
	took := time.Since(began)
	wait.Wait()
	t.Logf("enrolled within %s", took)
	if took > floodLimit {
		t.Errorf("it took %s", took)
	}
	f.onlyFor(t, first.Leaf)
}

// Requests of unknown TPMs, which wait for a machine to appear, do not delay other machines.
func TestFloodOfWaitingHellos(t *testing.T) {
	f := newFleet(t, nil)
	honest, stranger := f.newMachine(t, "beside-a-flood"), f.newMachine(t, "stranger")
	f.inventoried(t, honest)
	attacker := f.newPeer(t, stranger.chip, f.asToken(stranger.token), stranger.name, stranger.name)
	document, err := hello(t, attacker).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		attacker.file(t, attacker.object(t, attestation.HelloSignerName, document))
	}
	honest.args = []string{"--wait-timeout=2m"} // it does not give up before the test
	began := time.Now()
	first := honest.enrols(t)
	took := time.Since(began)
	t.Logf("enrolled within %s", took)
	if took > floodLimit {
		t.Errorf("it took %s", took)
	}
	f.onlyFor(t, first.Leaf)
}

// A proof is accepted for one request only: not under another name, not for another hello, and not
// in another cluster that knows the same TPM.
func TestProofIsReplayed(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "replayed")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	greeting := p.challenged(t, p.hello(t))
	proof := p.proof(t, greeting)
	early := proof.DeepCopy() // before the real one is there
	early.Name = csr.NewName()
	f.refused(t, p.file(t, early), string(verifiertpm.ReasonQuoteMAC))
	if reason := reasonOf(f.get(t, greeting.Name)); reason != "" || f.records(t) != 0 {
		t.Errorf("a denied proof touched its hello (%s) or the record", reason)
	}
	f.issued(t, p.file(t, proof), m.name)
	f.closed(t, greeting)
	version := f.record(t, m.name).ResourceVersion

	late := proof.DeepCopy()
	late.Name = csr.NewName()
	f.refused(t, p.file(t, late), string(verifiertpm.ReasonQuoteMAC))
	again := p.challenged(t, p.hello(t)) // a second hello, with the first one's proof
	moved := proof.DeepCopy()
	moved.Name = csr.NewName()
	f.refused(t, p.file(t, moved), string(verifiertpm.ReasonQuoteMAC))
	if got := f.record(t, m.name).ResourceVersion; got != version {
		t.Error("a replay wrote the record")
	}
	if reason := reasonOf(f.get(t, again.Name)); reason != "" {
		t.Errorf("a replay closed another hello: %s", reason)
	}
	first := m.enrols(t)
	f.onlyFor(t, first.Leaf, leaf(t, f.get(t, proof.Name).Status.Certificate))
	f.stop()
	f.forget(t)

	// The other cluster: same maker, same machine in its inventory, another UID and key. The
	// attacker has both clusters' tokens and can give its requests the names of the first
	// cluster's.
	second := newFleet(t, func(g *fleet, _ *verifier.Policy) { g.maker, g.cluster = f.maker, "another-cluster-uid" })
	n := *m
	n.fleet = second
	n.dir = t.TempDir()
	second.inventoried(t, &n)
	copied := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: greeting.Name}, Spec: greeting.Spec}
	p.challenged(t, p.file(t, copied))
	replay := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: proof.Name}, Spec: proof.Spec}
	p.file(t, replay)
	harness.Eventually(t, harness.Soon, "the proof is denied", func() bool { return reasonOf(f.get(t, replay.Name)) != "" })
	if got := f.get(t, replay.Name); !strings.HasPrefix(reasonOf(got), "Attestation") || len(got.Status.Certificate) > 0 {
		t.Errorf("%+v", got.Status)
	}
	if reason := reasonOf(f.get(t, copied.Name)); reason != "" || second.records(t) != 0 {
		t.Errorf("the replay touched its hello (%s) or the record", reason)
	}
	f.onlyFor(t, n.enrols(t).Leaf)
}

func leaf(t *testing.T, certificate []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(certificate)
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// An approval that the controller has not made gives no certificate.
func TestApprovedByAnAdministrator(t *testing.T) {
	f := newFleet(t, nil)
	harness.WriteFile(t, f.inventory, []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines: []\n"))
	m, other := f.newMachine(t, "admin-approved"), f.newMachine(t, "admin-approved")
	p := f.newPeer(t, other.chip, f.asToken(m.token), m.name, m.name)
	// It waits, since no machine is known yet.
	greeting := p.hello(t)
	if err := f.Approve(t.Context(), greeting.Name); err != nil {
		t.Fatal(err)
	}
	f.refused(t, greeting, string(verifier.ReasonApprovedWithoutAttestation))
	// It waits for a hello that is not there.
	proof := p.object(t, tpm.SignerName, f.lonelyProof(t, "node-csr-nowhere"))
	p.file(t, proof)
	if err := f.Approve(t.Context(), proof.Name); err != nil {
		t.Fatal(err)
	}
	f.refused(t, proof, string(verifier.ReasonApprovedWithoutAttestation))

	// The honest node's hello is approved, too.
	started := make(chan harness.Result, 1)
	go func() { started <- m.run(t) }()
	var hellos []certificatesv1.CertificateSigningRequest
	harness.Eventually(t, harness.Soon, "the node's hello", func() bool {
		hellos, _ = f.requests(t, m.name)
		return len(hellos) == 2
	})
	for i := range hellos {
		if hellos[i].Name != greeting.Name {
			if err := f.Approve(t.Context(), hellos[i].Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if r := <-started; r.Code == 0 {
		t.Error("a certificate")
	} else {
		t.Logf("exit code %d: %s", r.Code, r.Stderr)
	}
	if n := f.records(t); n != 0 {
		t.Errorf("%d records", n)
	}
	f.inventoried(t, m)
	// the plugin backs off
	if err := os.Remove(filepath.Join(m.dir, "certs", "kubelet-authenticator-state.json")); err != nil {
		t.Fatal(err)
	}
	f.onlyFor(t, m.enrols(t).Leaf)
}

// lonelyProof is a proof's document that is well-formed and proves nothing.
func (f *fleet) lonelyProof(t *testing.T, helloName string) []byte {
	t.Helper()
	data, err := oddrequest.Proof(helloName)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// The controller does not touch requests of other signers. Naming one as a hello does not change
// that, not even in a request under our signer that somebody else issued.
func TestRequestsOfOthersAreLeftAlone(t *testing.T) {
	f := newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.Signers = append(p.Signers, verifier.Signer{Name: sharedSigner, Providers: []string{tpm.Name}, Shared: true})
	})
	m := f.newMachine(t, "left-alone")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	plain := pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: p.pkcs10})
	foreign, err := attestation.Request{PKCS10: p.pkcs10, Provider: "aws", Data: []byte("{}")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	var untouched []*certificatesv1.CertificateSigningRequest
	for _, o := range []*certificatesv1.CertificateSigningRequest{
		csr.Object(csr.NewName(), sharedSigner, plain, p.key.Public(), nil),
		csr.Object(csr.NewName(), sharedSigner, foreign, p.key.Public(), nil),
		csr.Object(csr.NewName(), "example.com/other", plain, p.key.Public(), nil),
		p.object(t, "example.com/other", f.lonelyProof(t, "node-csr-nowhere")),
	} {
		untouched = append(untouched, p.file(t, o))
	}
	greeting := p.challenged(t, p.hello(t))
	f.stop()
	for _, target := range append([]*certificatesv1.CertificateSigningRequest{greeting}, untouched...) {
		for _, signer := range []string{tpm.SignerName, sharedSigner} {
			object := p.file(t, p.object(t, signer, f.lonelyProof(t, target.Name)))
			der := p.pkcs10
			certificate, err := f.ClientCA().SignCSR(der, time.Now().Add(-time.Minute), time.Now().Add(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			if err := f.SetCertificate(t.Context(), object.Name, certificate); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.start(t)
	first := m.enrols(t)
	time.Sleep(time.Second) // nothing may happen to the others, and nothing says so
	for _, object := range append(untouched, greeting) {
		if got := f.get(t, object.Name); got.ResourceVersion != object.ResourceVersion {
			t.Errorf("%s of %s was touched: %+v", got.Name, got.Spec.SignerName, got.Status.Conditions)
		}
	}
	if record := f.record(t, m.name); len(record.Status.Certificates) != 1 || !f.notes(t, m.name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: first.Leaf.Raw})) {
		t.Errorf("%+v", record.Status.Certificates)
	}
}

// Two proofs for one hello at once: exactly one certificate, which is noted; the record names one
// request.
func TestTwoProofsForOneHello(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "two-proofs")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	for range 5 {
		greeting := p.challenged(t, p.hello(t))
		proofs := []*certificatesv1.CertificateSigningRequest{p.proof(t, greeting), p.proof(t, greeting)}
		var wait sync.WaitGroup
		for _, proof := range proofs {
			wait.Go(func() {
				if _, err := p.api.Create(t.Context(), proof, false); err != nil && !apierrors.IsAlreadyExists(err) {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		issued := 0
		for _, proof := range proofs {
			var got *certificatesv1.CertificateSigningRequest
			harness.Eventually(t, harness.Soon, "each is done", func() bool {
				got = f.get(t, proof.Name)
				return reasonOf(got) != "" || len(got.Status.Certificate) > 0
			})
			if len(got.Status.Certificate) > 0 {
				issued++
				if !f.notes(t, m.name, got.Status.Certificate) {
					t.Error("a certificate is out that is not noted")
				}
			}
		}
		if issued != 1 {
			t.Errorf("%d certificates were issued", issued)
		}
		f.closed(t, greeting)
	}
}
