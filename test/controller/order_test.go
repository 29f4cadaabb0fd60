// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/pem"
	"os"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A proof that came in time is not too late if the CA comes long after its challenge has expired.
// That holds while the proof waits for its approval, and between approval and signature.
func TestCAComesAfterTheChallengeHasRunOut(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "late-ca")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	hello := p.challenged(t, p.hello(t))
	key := f.takeCA(t)
	time.Sleep(time.Second) // the controller notices
	proof := p.file(t, p.proof(t, hello))
	f.ahead.Store(int64(15 * time.Minute))
	// what was to be looked at in a quarter of an hour is looked at now: the hello's time is over
	f.stop()
	f.start(t)
	f.refused(t, hello, string(verifier.ReasonHelloExpired))
	time.Sleep(time.Second) // nothing may be decided without a CA
	if got := f.get(t, proof.Name); len(got.Status.Conditions) > 0 {
		t.Fatalf("without a CA: %+v", got.Status)
	}
	harness.WriteFile(t, f.caKey, key)
	f.issued(t, proof, m.name)
	f.ahead.Store(0)

	// The same with a request that was approved before the CA went, as by a controller that was
	// killed there.
	q := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	hello = q.challenged(t, q.hello(t))
	f.stop()
	f.config.CA = nil // approves, and does not sign
	f.start(t)
	proof = q.file(t, q.proof(t, hello))
	harness.Eventually(t, harness.Soon, "it is approved", func() bool { return len(f.get(t, proof.Name).Status.Conditions) > 0 })
	f.stop()
	f.ahead.Store(int64(15 * time.Minute))
	f.config.CA = signing.NewFiles(f.caCertificate, f.caKey)
	f.start(t)
	f.issued(t, proof, m.name)
	f.ahead.Store(0)
}

// takeCA removes the CA's key and returns it.
func (f *fleet) takeCA(t *testing.T) []byte {
	t.Helper()
	key, err := os.ReadFile(f.caKey)
	if err != nil {
		t.Fatal(err)
	}
	harness.WriteFile(t, f.caKey, nil)
	f.stop() // the last good pair would stay in use
	f.config.CA = signing.NewFiles(f.caCertificate, f.caKey)
	f.start(t)
	return key
}

// Another signer never issues: the proof fails after the deadline. It does not block the machine's
// next proof.
func TestApprovedRequestThatNobodyIssuesFails(t *testing.T) {
	f := newFleet(t, approveOnly)
	m := f.newMachine(t, "never-issued")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	p.signer = sharedSigner
	_, proof := p.attests(t)
	approved := func(object *certificatesv1.CertificateSigningRequest) {
		t.Helper()
		harness.Eventually(t, harness.Soon, "it is approved", func() bool { return len(f.get(t, object.Name).Status.Conditions) > 0 })
	}
	approved(proof)
	q := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	q.signer = sharedSigner
	_, next := q.attests(t)
	harness.Eventually(t, harness.Soon, "it is said that it waits", func() bool { return f.said(t, next, string(verifier.ReasonRequestPending)) })
	f.stop()
	f.ahead.Store(int64(verifier.DefaultWaitDeadline - time.Second))
	f.start(t)
	f.refused(t, proof, string(verifier.ReasonSignerUnavailable))
	approved(next)
	f.ahead.Store(0)
}

// There is no CA until the deadline: approved requests fail, so that no request stays open.
func TestApprovedRequestThatNobodyCanSignFails(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "no-ca")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	hello := p.challenged(t, p.hello(t))
	f.stop()
	f.config.CA = nil
	f.start(t)
	proof := p.file(t, p.proof(t, hello))
	harness.Eventually(t, harness.Soon, "it is approved", func() bool { return len(f.get(t, proof.Name).Status.Conditions) > 0 })
	f.stop()
	harness.WriteFile(t, f.caKey, nil)
	f.ahead.Store(int64(verifier.DefaultWaitDeadline + time.Minute))
	f.config.CA = signing.NewFiles(f.caCertificate, f.caKey)
	f.start(t)
	f.refused(t, proof, string(verifier.ReasonSignerUnavailable))
	f.ahead.Store(0)
}

// Several proofs of one machine at once, each with a hello of its own: one after the other is
// issued, none fails.
func TestProofsOfOneMachineAtOnce(t *testing.T) {
	f := newFleet(t, nil)
	f.startWith(t, f.AdminConfig()) // and two controllers
	m := f.newMachine(t, "many-proofs")
	f.inventoried(t, m)
	var proofs []*certificatesv1.CertificateSigningRequest
	var peers []*peer
	for range 5 {
		p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
		peers = append(peers, p)
		proofs = append(proofs, p.proof(t, p.challenged(t, p.hello(t))))
	}
	var wait sync.WaitGroup
	for i, proof := range proofs {
		wait.Go(func() { peers[i].file(t, proof) })
	}
	wait.Wait()
	for _, proof := range proofs {
		f.issued(t, proof, m.name)
	}
	// If both controllers were about to issue, the record has one certificate too many, which is
	// never published.
	if n := len(f.record(t, m.name).Status.Certificates); n < len(proofs) || n > 2*len(proofs) {
		t.Errorf("%d certificates are noted", n)
	}
}

// A machine or a requester over its rate waits. No request is denied for that.
func TestRates(t *testing.T) {
	const every = 30 * time.Second
	rate := fairqueue.Rate{Every: 250 * time.Millisecond, Burst: 8}
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) {
		f.config.Rates = fairqueue.DefaultRates()
		f.config.Rates.Machine = fairqueue.Rate{Every: every, Burst: 1}
		f.config.Rates.Requester = rate
	})
	m, other := f.newMachine(t, "often"), f.newMachine(t, "seldom")
	f.inventoried(t, m, other)
	_, first := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name).attests(t)
	f.issued(t, first, m.name)
	_, second := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name).attests(t)
	harness.Eventually(t, harness.Soon, "it is said that it waits", func() bool { return f.said(t, second, string(verifier.ReasonRateLimited)) })
	time.Sleep(2 * time.Second) // it is looked at again meanwhile
	if got := f.get(t, second.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("over the rate: %+v", got.Status)
	}
	f.ahead.Store(int64(every))
	f.issued(t, second, m.name)

	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	var flood []*certificatesv1.CertificateSigningRequest
	flooded := time.Now()
	for range 100 { // long enough for the other to enrol meanwhile, on a busy machine, too
		flood = append(flood, p.file(t, p.object(t, attestation.HelloSignerName, []byte("{}"))))
	}
	began := time.Now()
	other.enrols(t)
	t.Logf("another requester enrolled within %s", time.Since(began))
	decided := 0
	for _, object := range flood {
		if reasonOf(f.get(t, object.Name)) != "" {
			decided++
		}
	}
	if took := time.Since(flooded); decided > rate.Burst+1+int(took/rate.Every) {
		t.Errorf("%d of %d were judged within %s", decided, len(flood), took)
	}
	if decided == len(flood) {
		t.Error("another requester waited for the flood's end")
	}
	for _, object := range flood {
		f.refused(t, object, string(verifiertpm.ReasonMalformed))
	}
}

// said reports whether there is an Event of a reason about a request.
func (f *fleet) said(t *testing.T, object *certificatesv1.CertificateSigningRequest, reason string) bool {
	t.Helper()
	return f.saidOf(t, object.Name, reason)
}

func (f *fleet) saidOf(t *testing.T, name, reason string) bool {
	t.Helper()
	return len(f.eventsOf(t, name, reason)) > 0
}

// A node that is exempt from attestation renews by the cluster's own signer, with an Event on it
// each time. None of its other requests pass, and no other client's.
func TestUnattestedNodes(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.UnattestedNodes = []string{"control-plane-0"} })
	if err := f.client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "control-plane-0"}}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = f.client.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "control-plane-0"}})
	}()
	stock := func(user, name string) *certificatesv1.CertificateSigningRequest {
		t.Helper()
		issued, err := f.ClientCA().IssueClient("system:node:"+user, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
		if err != nil {
			t.Fatal(err)
		}
		api, err := csr.NewClient(f.asNode(issued.CertPEM, issued.KeyPEM))
		if err != nil {
			t.Fatal(err)
		}
		return f.stock(t, api, name)
	}
	good := stock("control-plane-0", "control-plane-0")
	harness.Eventually(t, harness.Soon, "it is approved", func() bool {
		got := f.get(t, good.Name)
		return len(got.Status.Conditions) == 1 && got.Status.Conditions[0].Type == certificatesv1.CertificateApproved &&
			got.Status.Conditions[0].Reason == string(act.ReasonUnattested)
	})
	harness.Eventually(t, harness.Soon, "it is said of the node", func() bool { return f.saidOf(t, "control-plane-0", string(act.ReasonUnattested)) })
	// That a node asks for another the API server refuses by itself, under this signer; the rules
	// do, too.
	open := []*certificatesv1.CertificateSigningRequest{
		stock("control-plane-1", "control-plane-1"), f.stock(t, f.clientOf(t, f.newToken(t)), "control-plane-0"),
	}
	time.Sleep(2 * time.Second) // nothing may be decided on them
	for _, object := range open {
		if got := f.get(t, object.Name); len(got.Status.Conditions) > 0 {
			t.Errorf("%s is not ours to decide: %+v", got.Spec.Username, got.Status)
		}
	}
	if n := f.records(t); n != 0 {
		t.Errorf("%d records", n)
	}
}

// stock files the request of a kubelet without the plugin.
func (f *fleet) stock(t *testing.T, api *csr.Client, name string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: name}, key)
	if err != nil {
		t.Fatal(err)
	}
	content := pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: pkcs10})
	object := csr.Object(csr.NewName(), sharedSigner, content, key.Public(), nil)
	filed, err := api.Create(t.Context(), object, false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}
