// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os/exec"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// First, renewal and again: one record, one machine, one node name. The controller's clock is
// behind at first, so that its certificate is due when it comes.
func TestFirstRenewalAgain(t *testing.T) {
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) { f.config.Limits.Default = time.Hour })
	m := f.newMachine(t, "first-node")
	f.inventoried(t, m)
	// of 65 minutes, backdated five, it has the last tenth left
	f.ahead.Store(int64(-56 * time.Minute))
	first := m.enrols(t)
	f.ahead.Store(0)
	record := f.record(t, m.name)
	if record.Spec.NodeName != m.name || record.Spec.ProviderID != "test://"+m.name || record.Spec.EK == nil || len(record.Status.Certificates) != 1 {
		t.Errorf("%+v", record)
	}
	hellos, _ := f.requests(t, m.name)
	if len(hellos) != 1 {
		t.Fatalf("%d hellos", len(hellos))
	}
	f.closed(t, &hellos[0])

	// Renewal is due: the plugin prints the certificate, and renews with it.
	renewed := m.enrols(t)
	harness.Eventually(t, harness.Soon, "the renewed certificate is printed", func() bool {
		renewed = m.enrols(t)
		return !bytes.Equal(first.Leaf.Raw, renewed.Leaf.Raw)
	})
	_, proofs := f.requests(t, m.name)
	renewals := 0
	for i := range proofs {
		if proofs[i].Spec.Username == "system:node:"+m.name {
			renewals++
		}
	}
	if len(proofs) != 2 || renewals != 1 {
		t.Errorf("%d proofs, %d with the node's own certificate", len(proofs), renewals)
	}
	if record = f.record(t, m.name); len(record.Status.Certificates) != 2 {
		t.Errorf("%d certificates are noted", len(record.Status.Certificates))
	}

	// Another request by the same machine with its bootstrap credential: its certificate was lost.
	m.removeState(t)
	again := m.enrols(t)
	if bytes.Equal(renewed.Leaf.Raw, again.Leaf.Raw) {
		t.Error("the same certificate")
	}
	if record := f.record(t, m.name); len(record.Status.Certificates) != 3 {
		t.Errorf("%d certificates are noted", len(record.Status.Certificates))
	}
}

// A certificate of the cluster's CA that is in no record comes from somebody with the CA's key, or
// from the wrong approver. It renews nothing while the record has a valid one, although the TPM is
// the right one. The machine is the right one, too: with a bootstrap credential at hand it gets
// another certificate.
func TestRenewalWithACertificateInNoRecord(t *testing.T) {
	for name, mode := range map[string]verifier.Mode{"required": verifier.Required, "recover": verifier.Recover} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Credential = mode })
			m := f.newMachine(t, "unknown-credential-"+name)
			f.inventoried(t, m)
			m.enrols(t)
			m.removeState(t)
			m.installUnrecorded(t)
			bootstrap := m.bootstrap
			m.bootstrap += ".gone"
			unrecorded := m.enrols(t) // prints what is there, and starts a worker
			harness.Eventually(t, harness.Soon, "the renewal is refused", func() bool { return f.renewalRefused(t, m.name, verifier.ReasonUnknownCredential) })
			if n := len(f.record(t, m.name).Status.Certificates); n != 1 {
				t.Errorf("%d certificates are noted", n)
			}
			harness.WorkerEnds(t, m.certs())
			if r := m.enrols(t); !strings.Contains(r.Stderr, string(verifier.ReasonUnknownCredential)) || !strings.Contains(r.Stderr, "becomes NotReady at "+unrecorded.Leaf.NotAfter.UTC().Format(time.RFC3339)) {
				t.Errorf("it does not say what that means for the node: %s", r.Stderr)
			}

			m.bootstrap = bootstrap
			m.removeState(t)
			m.installUnrecorded(t)
			unrecorded = m.enrols(t)
			harness.Eventually(t, harness.Soon, "another certificate is printed", func() bool {
				return !bytes.Equal(m.enrols(t).Leaf.Raw, unrecorded.Leaf.Raw)
			})
			if n := len(f.record(t, m.name).Status.Certificates); n != 2 {
				t.Errorf("%d certificates are noted", n)
			}
		})
	}
}

// A record was deleted, as in an operator's reset, or came back from a backup without the latest
// certificates. It is made again when the node renews, since a source names its EK.
func TestRecordIsRecovered(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Credential = verifier.Recover })
	m := f.newMachine(t, "recovered")
	f.inventoried(t, m)
	first := m.enrols(t)
	backup := f.record(t, m.name)
	for _, lost := range []struct {
		what   string
		change func()
	}{
		{"deleted", func() { remove(t, f, f.record(t, m.name)) }},
		{"restored from a backup", func() {
			old := f.record(t, m.name)
			old.Spec, old.Status = backup.Spec, backup.Status
			// as in a backup of last month
			last := &old.Status.Certificates[0]
			last.SHA256, last.NotAfter = strings.Repeat("0", 64), metav1.NewTime(time.Now().Add(-time.Second))
			if err := f.client.Update(t.Context(), old); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		lost.change()
		p := f.newPeer(t, m.chip, m.credential(t), m.name, m.name)
		hello, proof := p.attests(t)
		certificate := f.issued(t, proof, m.name)
		f.says(t, proof.Name, string(verifier.ReasonRecordRecovered))
		f.closed(t, hello)
		record := f.record(t, m.name)
		if record.Spec.NodeName != m.name || record.Spec.EK.Fingerprint != backup.Spec.EK.Fingerprint || record.Spec.EK.Source != string(verifier.EKInventory) ||
			record.Status.LastAttested.Time.Before(backup.Status.LastAttested.Time) {
			t.Errorf("%s: %+v", lost.what, record)
		}
		if bytes.Equal(leaf(t, certificate).Raw, first.Leaf.Raw) {
			t.Errorf("%s: the same certificate", lost.what)
		}
		all, old := record.Status.Certificates, sha256.Sum256(first.Leaf.Raw)
		if len(all) != 2 || all[0].SHA256 != hex.EncodeToString(old[:]) || !all[0].Recovered() || all[1].Recovered() || !record.Status.Expires.Equal(&all[1].NotAfter) {
			t.Errorf("%s: the record has the certificates %+v", lost.what, all)
		}
		// The machine may never get that certificate.
		_, proof = p.attests(t)
		f.issued(t, proof, m.name)
		if all := f.record(t, m.name).Status.Certificates; len(all) != 3 {
			t.Errorf("%s: then the record has the certificates %+v", lost.what, all)
		}
	}
}

// If the Node exists, a first enrolment needs the operator: the Node must be deleted.
func TestNodeIsDeletedForANewEnrolment(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Credential = verifier.Recover })
	m := f.newMachine(t, "record-and-certificate-lost")
	f.inventoried(t, m)
	m.enrols(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name}}
	if err := f.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.client.Delete(context.WithoutCancel(t.Context()), node) })
	remove(t, f, f.record(t, m.name))
	m.removeState(t)
	r := m.run(t)
	act := "kubectl delete node " + m.name
	if r.Code == 0 || !strings.Contains(r.Stderr, string(verifier.ReasonNodeAlreadyRegistered)) || !strings.Contains(r.Stderr, act) {
		t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
	}
	if out, err := exec.CommandContext(t.Context(), m.plugin, append([]string{"doctor"}, m.flags()...)...).Output(); err == nil || !strings.Contains(string(out), act) {
		t.Errorf("doctor does not name the act: %v, %s", err, out)
	}
	if err := f.client.Delete(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	_, proof := p.attests(t)
	f.issued(t, proof, m.name)
}

// renewalRefused reports whether a hello of the node's own was denied for this reason.
func (f *fleet) renewalRefused(t *testing.T, name string, reason verifier.Reason) bool {
	t.Helper()
	hellos, _ := f.requests(t, name)
	for i := range hellos {
		if hellos[i].Spec.Username == "system:node:"+name && reasonOf(&hellos[i]) == string(reason) {
			return true
		}
	}
	return false
}

// installUnrecorded installs a certificate of the cluster's CA that the controller did not issue
// and whose renewal is due.
func (m *machine) installUnrecorded(t *testing.T) {
	t.Helper()
	f := m.fleet
	issued, err := f.ClientCA().IssueClient("system:node:"+m.name, []string{"system:nodes"}, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := cache.ParsePair(append(bytes.Clone(issued.CertPEM), issued.KeyPEM...))
	if err != nil {
		t.Fatal(err)
	}
	pair.Origin = &cache.Origin{Server: f.ServerURL(), CertificateAuthorityData: f.ServerCA()}
	if err := m.certs().Create(); err != nil {
		t.Fatal(err)
	}
	lock, err := m.certs().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	err = lock.Install(pair)
	lock.Unlock()
	if err != nil {
		t.Fatal(err)
	}
}

// sharedSigner is the one of kube-controller-manager.
const sharedSigner = certificatesv1.KubeAPIServerClientKubeletSignerName

func approveOnly(f *fleet, p *verifier.Policy) {
	f.config.CA = nil
	p.Signers = []verifier.Signer{{Name: sharedSigner, Providers: []string{tpm.Name}, Shared: true}}
}

// With kube-controller-manager as the signer: what is approved here is issued there, and noted.
func TestApproveOnly(t *testing.T) {
	f := newFleet(t, approveOnly)
	for _, name := range []string{"kubeadm:node-autoapprove-bootstrap", "kubeadm:node-autoapprove-certificate-rotation"} {
		binding := &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := f.client.Delete(t.Context(), binding); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := f.StopControllerManager(); err != nil {
			t.Error(err)
		}
	}()
	m := f.newMachine(t, "approved-only")
	m.args = []string{"--signer-name=" + sharedSigner}
	f.inventoried(t, m)
	first := m.enrols(t)
	harness.Eventually(t, harness.Soon, "the certificate is noted", func() bool { return len(f.record(t, m.name).Status.Certificates) == 1 })
	hellos, _ := f.requests(t, m.name)
	f.closed(t, &hellos[0])

	p := f.newPeer(t, m.chip, m.credential(t), m.name, m.name)
	p.signer = sharedSigner
	hello, proof := p.attests(t)
	f.issued(t, proof, m.name)
	f.closed(t, hello)
	if class := f.get(t, proof.Name).Spec.Username; class != "system:node:"+m.name {
		t.Errorf("it was asked for by %s", class)
	}

	m.removeState(t)
	if again := m.enrols(t); bytes.Equal(first.Leaf.Raw, again.Leaf.Raw) {
		t.Error("the same certificate")
	}
	harness.Eventually(t, harness.Soon, "three certificates are noted", func() bool { return len(f.record(t, m.name).Status.Certificates) == 3 })
	if records := f.records(t); records != 1 {
		t.Errorf("%d records", records)
	}
}
