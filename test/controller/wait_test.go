// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/x509"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// lateWait is for how long something is missing: the pauses of an ordinary queue, which double,
	// would be 10 s long by then.
	lateWait = 12 * time.Second
	// followed is how soon what has waited goes on: it is looked at each second, and a busy machine
	// may add to that.
	followed = 6500 * time.Millisecond
)

// waitsFor returns the reason in the annotation of a request that waits, "" if there is none.
func waitsFor(request *certificatesv1.CertificateSigningRequest) verifier.Reason {
	waiting, err := attestation.ParseStatement(request.Annotations[attestation.AnnotationWaiting])
	if err != nil {
		return ""
	}
	return verifier.Reason(waiting.Reason)
}

// An inventory, and an entry in it, may come long after the request.
func TestInventoryIsLate(t *testing.T) {
	f := newFleet(t, nil)
	early, late := f.newMachine(t, "early"), f.newMachine(t, "late")
	f.inventoried(t, early, late)
	both, err := os.ReadFile(f.inventory)
	if err != nil {
		t.Fatal(err)
	}
	f.inventoried(t, early)
	one, err := os.ReadFile(f.inventory)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(f.inventory); err != nil {
		t.Fatal(err)
	}
	f.stop() // it has read it
	f.config.Machines = sources.NewInventory(f.inventory, 0)
	f.start(t)

	challenged := func(m *machine, want bool, p *peer, name string) time.Duration {
		began := time.Now()
		for time.Since(began) < 10*time.Second {
			got := f.get(t, name)
			if reason := reasonOf(got); reason != "" {
				t.Fatalf("%s: %s", m.name, reason)
			}
			if (got.Annotations[attestation.AnnotationChallenge] != "") == want {
				return time.Since(began)
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatalf("%s: not challenged: %v", m.name, p.signer)
		return 0
	}
	p := f.newPeer(t, early.chip, f.asToken(early.token), early.name, early.name)
	greeting := p.hello(t)
	q := f.newPeer(t, late.chip, f.asToken(late.token), late.name, late.name)
	second := q.hello(t)
	time.Sleep(lateWait) // nothing may happen without an inventory
	if f.get(t, greeting.Name).ResourceVersion != greeting.ResourceVersion {
		t.Error("something was done without an inventory")
	}
	harness.WriteFile(t, f.inventory, one)
	if took := challenged(early, true, p, greeting.Name); took > followed {
		t.Errorf("the inventory counted after %s", took)
	}
	harness.Eventually(t, followed, "the unknown machine's request says what it waits for", func() bool {
		return waitsFor(f.get(t, second.Name)) == verifier.ReasonMachineNotFound
	})
	if got := f.get(t, second.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("something was done with a machine unknown: %+v", got.Status)
	}
	harness.WriteFile(t, f.inventory, both)
	if took := challenged(late, true, q, second.Name); took > followed {
		t.Errorf("the entry counted after %s", took)
	}
	// A broken file changes nothing.
	harness.WriteFile(t, f.inventory, []byte("machines: [{"))
	p.file(t, p.proof(t, f.get(t, greeting.Name)))
	late.enrols(t)
	if err := os.Remove(f.inventory); err != nil {
		t.Fatal(err)
	}
	late.removeState(t)
	late.enrols(t)
}

// Without the CA's files not even a hello is answered: its proof would wait, too.
func TestCAIsLate(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "ca-late")
	f.inventoried(t, m)
	key := f.takeCA(t)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	hello := p.hello(t)
	harness.Eventually(t, harness.Soon, "it is said that it waits", func() bool { return f.said(t, hello, string(verifier.ReasonSignerUnavailable)) })
	if got := f.get(t, hello.Name); len(got.Status.Conditions) > 0 || len(got.Annotations) != 1 || waitsFor(got) != verifier.ReasonSignerUnavailable {
		t.Errorf("%+v %v", got.Status, got.Annotations)
	}
	harness.WriteFile(t, f.caKey, key)
	began := time.Now()
	hello = p.challenged(t, hello)
	if took := time.Since(began); took > followed {
		t.Errorf("challenged after %s", took)
	}
	f.issued(t, p.file(t, p.proof(t, hello)), m.name)
}

// The record's CRD comes after the controller and the request: nothing is decided without it, and
// all soon after.
func TestCRDIsLate(t *testing.T) {
	crd := func(verb string) {
		t.Helper()
		if out, err := shared.RunKubectl(context.WithoutCancel(t.Context()), shared.adminConfig, verb, "-f", "../../packaging/kubernetes/crd.yaml"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	established := func() {
		t.Helper()
		if out, err := shared.RunKubectl(context.WithoutCancel(t.Context()), shared.adminConfig, "wait", "--for=condition=Established", crdName); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	crd("delete")
	t.Cleanup(func() { crd("apply"); established() })
	f := newFleet(t, nil)
	m := f.newMachine(t, "crd-late")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	hello := p.hello(t)
	time.Sleep(lateWait) // nothing may happen without the CRD
	if got := f.get(t, hello.Name); len(got.Status.Conditions) > 0 || len(got.Annotations) > 0 {
		t.Errorf("%+v %v", got.Status, got.Annotations)
	}
	crd("apply")
	established()
	began := time.Now()
	hello = p.challenged(t, hello)
	if took := time.Since(began); took > followed {
		t.Errorf("challenged after %s", took)
	}
	f.issued(t, p.file(t, p.proof(t, hello)), m.name)
}

// Eight machines enrol again and again while the CA is replaced, first the certificate and then the
// key. Each certificate is of a CA pair that existed, and soon all are of the new one.
func TestCAIsRotatedUnderLoad(t *testing.T) {
	f := newFleet(t, nil)
	next, err := testbed.NewCA("next")
	if err != nil {
		t.Fatal(err)
	}
	nextKey, err := next.KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	var machines []*machine
	for _, letter := range "abcdefgh" {
		machines = append(machines, f.newMachine(t, "rotated-"+string(letter)))
	}
	f.inventoried(t, machines...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	type issued struct {
		at   time.Time
		leaf *x509.Certificate
	}
	var mu sync.Mutex
	var all []issued
	var wait sync.WaitGroup
	for _, m := range machines {
		wait.Go(func() {
			p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
			for ctx.Err() == nil {
				_, proof := p.attests(t)
				parsed := leaf(t, f.issued(t, proof, m.name))
				mu.Lock()
				all = append(all, issued{time.Now(), parsed})
				mu.Unlock()
			}
		})
	}
	signs := func(ca *x509.Certificate) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.ContainsFunc(all, func(one issued) bool { return one.leaf.CheckSignatureFrom(ca) == nil })
		}
	}
	harness.Eventually(t, time.Minute, "the old CA signs", signs(f.ClientCA().Certificate()))
	harness.WriteFile(t, f.caCertificate, next.CertPEM())
	time.Sleep(time.Second) // meanwhile the pair does not match
	harness.WriteFile(t, f.caKey, nextKey)
	rotated := time.Now()
	harness.Eventually(t, time.Minute, "the new CA signs", signs(next.Certificate()))
	time.Sleep(2 * time.Second) // the old CA must not sign again
	cancel()
	wait.Wait()
	var before, after int
	var last time.Duration
	for _, one := range all {
		old, now := one.leaf.CheckSignatureFrom(f.ClientCA().Certificate()), one.leaf.CheckSignatureFrom(next.Certificate())
		switch {
		case old == nil:
			before++
			last = max(last, one.at.Sub(rotated))
		case now == nil:
			after++
		default:
			t.Errorf("signed by neither: %v, %v", old, now)
		}
	}
	t.Logf("%d by the old CA, the last %s after the rotation, %d by the new one", before, last, after)
	if before == 0 || after == 0 || last > 5*time.Second {
		t.Error("the new CA came too late, or at once")
	}
}

// In audit mode everything is judged, and nothing is done.
func TestAudit(t *testing.T) {
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) { f.config.Audit = true })
	m := f.newMachine(t, "audited")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	objects := []string{p.hello(t).Name, p.file(t, p.object(t, tpm.SignerName, []byte("{}"))).Name, p.file(t, p.object(t, tpm.SignerName, f.lonelyProof(t, "node-csr-nowhere"))).Name}
	approved := p.file(t, p.object(t, tpm.SignerName, f.lonelyProof(t, "node-csr-nowhere")))
	if err := f.Approve(t.Context(), approved.Name); err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for _, name := range append(objects, approved.Name) {
		versions[name] = f.get(t, name).ResourceVersion
	}
	time.Sleep(2 * time.Second) // nothing may happen to them
	for name, version := range versions {
		if got := f.get(t, name); got.ResourceVersion != version {
			t.Errorf("%s was touched: %+v %v", name, got.Status, got.Annotations)
		}
	}
	if n := f.records(t); n != 0 {
		t.Errorf("%d records", n)
	}
}
