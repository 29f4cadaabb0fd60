// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A Machine that is being deleted drains for a while, and its node renews for an hour at most.
// After the Machine, the garbage collector deletes its record. Then the hardware can serve another
// Machine.
func TestMachineDeleted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	w.start(t, nil)
	held := func(m *machine) { m.object.Finalizers = []string{clusterv1.MachineFinalizer} }
	m, unborn := c.newMachine(t, "old", held), c.newMachine(t, "unborn", held)
	m.attests(t)
	if left := m.left(t); left < 2*time.Hour {
		t.Fatalf("a certificate that is no proof of anything: it lives for %s", left)
	}
	m.remembered(t)
	for _, d := range []*machine{m, unborn} {
		if err := c.client.Delete(t.Context(), d.object); err != nil {
			t.Fatal(err)
		}
	}
	// the controller has seen the deletion
	harness.Eventually(t, harness.Soon, "a renewal is for an hour at most", func() bool {
		m.attests(t)
		return m.left(t) <= time.Hour
	})
	if reason := c.refusesTry(t, unborn.peer(t)); reason != string(verifier.ReasonMachineDeleting) {
		t.Errorf("a first certificate was refused for %s", reason)
	}
	if m.record(t, "old") == nil {
		t.Error("the record was gone before the Machine")
	}

	for _, d := range []*machine{m, unborn} {
		update(t, c.client, d.object, func(object *clusterv1.Machine) { object.Finalizers = nil })
	}
	harness.Eventually(t, 30*time.Second, "the record is collected", func() bool { return m.record(t, "old") == nil })
	// Its certificate is still valid, and can no longer be renewed.
	p := m.peer(t)
	after := p.hello(t)
	time.Sleep(3 * time.Second) // no challenge may come
	if got := c.get(t, after.Name); isAnswered(got) {
		t.Errorf("a machine that is gone was challenged: %v", got.Annotations)
	}
	next := c.newMachineOf(t, m.computer, "new", nil)
	next.attests(t)
	next.remembered(t)
}

// left returns the remaining validity of the machine's certificate.
func (m *machine) left(t *testing.T) time.Duration {
	t.Helper()
	_, leaf, err := csr.ParseCertificates(m.certificate)
	if err != nil {
		t.Fatal(err)
	}
	return time.Until(leaf.NotAfter)
}
