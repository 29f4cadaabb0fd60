// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const fleetSize = 1000

// fleet has the records of all nodes. Node n has the certificate n+1. Each of the first renewed has
// a second certificate, n+10,001.
func fleet(renewed int) (records []client.Object) {
	for n := range fleetSize {
		certificates := []int{n + 1}
		if n < renewed {
			certificates = append(certificates, n+10_001)
		}
		records = append(records, record(nodeName(n), certificates...))
	}
	return records
}

func nodeName(n int) string { return fmt.Sprintf("node-%d", n) }

func strict(c *Config) { c.Strict = StrictOn }

// denied returns how many of the nodes are denied with their newest certificates.
func denied(t *testing.T, a *Authorizer, renewed int) (count int) {
	t.Helper()
	for n := range fleetSize {
		certificate := n + 1
		if n < renewed {
			certificate = n + 10_001
		}
		if denies(t, a, nodeName(n), certificate) {
			count++
		}
	}
	return count
}

// saved waits until the state file has a text.
func saved(t *testing.T, a *Authorizer, text string) {
	t.Helper()
	eventually(t, "the state file has "+text, func() bool {
		content, err := os.ReadFile(a.StateFile)
		return err == nil && strings.Contains(string(content), text)
	})
}

// A lost record, and the loss of all records, stop no node: not while the process runs, and not
// after a restart. A certificate that no record ever named is useless all the time.
func TestStrictOutlivesLostRecords(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWorld(t, fleet(0)...)
	a, stop := w.start(dir, strict)
	awaitLive(t, a)
	stolenCA := func(a *Authorizer, when string) {
		t.Helper()
		if !denies(t, a, nodeName(1), 99_999) || !denies(t, a, "invented", 99_999) {
			t.Errorf("%s: a certificate of a stolen CA key passes", when)
		}
		if n := denied(t, a, 0); n != 0 {
			t.Errorf("%s: %d nodes are denied", when, n)
		}
	}
	stolenCA(a, "at first")
	if n := a.lists.Load().unrecorded(); n != 0 {
		t.Errorf("at first: %d certificates are in no record", n)
	}
	if err := w.Delete(t.Context(), record(nodeName(0))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the record is gone", func() bool { return len(a.lists.Load().recorded) == fleetSize-1 })
	if n := a.lists.Load().unrecorded(); n != 1 {
		t.Errorf("one record lost: %d certificates are in no record", n)
	}
	stolenCA(a, "one record lost")
	for n := 1; n < fleetSize; n++ {
		if err := w.Delete(t.Context(), record(nodeName(n))); err != nil {
			t.Fatal(err)
		}
		if left := fleetSize - 1 - n; left%50 == 0 { // a fake watch has room for 100 events
			eventually(t, "records are gone", func() bool { return len(a.lists.Load().recorded) == left })
		}
	}
	stolenCA(a, "all records lost")
	saved(t, a, id(fleetSize))
	stop()
	a, _ = w.start(dir, strict)
	awaitLive(t, a)
	stolenCA(a, "after a restart")
}

// etcd is restored to a time before 100 nodes renewed. An authorizer with its state file, or with
// the file of another control plane node, stops none. Without a file, these nodes may attest, and
// work with their next certificates.
func TestStrictAfterARestore(t *testing.T) {
	t.Parallel()
	const renewed = 100
	dir := t.TempDir()
	before := newWorld(t, fleet(renewed)...)
	a, stop := before.start(dir, strict)
	awaitLive(t, a)
	saved(t, a, id(10_000+renewed))
	stop()

	restored := newWorld(t, fleet(0)...)
	kept, stopKept := restored.start(dir, strict)
	awaitLive(t, kept)
	if n := denied(t, kept, renewed); n != 0 {
		t.Errorf("with its file: %d nodes are denied", n)
	}
	stopKept()
	content, err := os.ReadFile(kept.StateFile)
	if err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	writeFile(t, filepath.Join(other, "state.json"), content)
	copied, _ := restored.start(other, strict)
	awaitLive(t, copied)
	if n := denied(t, copied, renewed); n != 0 {
		t.Errorf("with a copied file: %d nodes are denied", n)
	}

	fresh, _ := restored.start(t.TempDir(), strict)
	awaitLive(t, fresh)
	if n := denied(t, fresh, renewed); n != renewed {
		t.Errorf("without a file: %d nodes are denied", n)
	}
	for _, what := range []string{"get /configmaps kube-public/node-attestation-renewal", "create certificates.k8s.io/certificatesigningrequests", "watch certificates.k8s.io/certificatesigningrequests /r"} {
		if deniesRequest(t, fresh, asks(nodeName(0), what, 10_001)) {
			t.Errorf("a node cannot attest again: %s", what)
		}
	}
	again := record(nodeName(0))
	if err := restored.Get(t.Context(), client.ObjectKeyFromObject(again), again); err != nil {
		t.Fatal(err)
	}
	again.Status.Certificates = append(again.Status.Certificates, record("", 20_001).Status.Certificates...)
	if err := restored.Update(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node works", func() bool { return !denies(t, fresh, nodeName(0), 20_001) })
}

// A new certificate may be used before the watch shows its record.
func TestStrictReadsANewRecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1))
	a, _ := w.start(t.TempDir(), strict)
	awaitLive(t, a)
	w.silent.Store(true)
	// A thief of the CA's key asks first. Its read does not count for the node's certificate.
	if !denies(t, a, "new", 3) {
		t.Error("there is no record")
	}
	w.create(record("new", 2))
	if denies(t, a, "new", 2) || !denies(t, a, "new", 3) {
		t.Error("the record of a new node decides")
	}
	if reads := w.reads.Load(); reads != 2 {
		t.Errorf("%d live reads", reads)
	}
}

// A revoked certificate is forgotten, and an ended one, too.
func TestStrictForgets(t *testing.T) {
	t.Parallel()
	var later atomic.Int64
	w := newWorld(t, record("a", 1, 2), record("b", 3))
	a, _ := w.start(t.TempDir(), func(c *Config) {
		c.Strict, c.Now = StrictOn, func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	})
	awaitLive(t, a)
	w.create(slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}, currentCertificate("a", 2)))
	eventually(t, "the revoked certificate is forgotten", func() bool { return len(a.lists.Load().remembered) == 2 })
	if err := w.DeleteAllOf(t.Context(), &v1alpha1.RevocationSlice{}, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	if !denies(t, a, "a", 99) || denies(t, a, "a", 2) {
		t.Error("the other certificates")
	}
	later.Store(int64(8 * 24 * time.Hour))
	w.create(record("c", 4))
	eventually(t, "ended certificates are forgotten", func() bool { _, found := a.lists.Load().remembered[id(3)]; return !found })
}

// Without any record, the namespace is wrong. Strict mode says so, and denies nothing.
func TestStrictWithoutRecords(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1))
	a, _ := w.start(t.TempDir(), func(c *Config) { c.Strict, c.Namespace = StrictOn, "wrong" })
	awaitLive(t, a)
	if denies(t, a, "a", 1) || denies(t, a, "a", 2) || w.logged("there is no record") != 1 {
		t.Error(w.log)
	}
}

// A rehearsal denies nothing, and logs each node once. Revoked certificates are denied meanwhile.
func TestStrictRehearsal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1), record("r", 5), slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("r", 5)}))
	a, _ := w.start(t.TempDir(), func(c *Config) {
		c.Strict, c.Unattested = StrictRehearse, func(node string) bool { return node == "control-plane" }
	})
	awaitLive(t, a)
	for range 3 {
		for node, certificate := range map[string]int{"a": 1, "stranger": 2, "control-plane": 3} {
			if denies(t, a, node, certificate) {
				t.Errorf("%s is denied", node)
			}
		}
		if !denies(t, a, "r", 5) {
			t.Error("the revoked certificate passes")
		}
	}
	if w.logged("strict mode would deny") != 1 || w.logged("system:node:stranger") != 1 {
		t.Error(w.log)
	}
}

// BenchmarkLists makes the lists of 5,000 nodes with three certificates each.
func BenchmarkLists(b *testing.B) {
	var o objects
	for n := range 5000 {
		o.records = append(o.records, *record(nodeName(n), 10*n, 10*n+1, 10*n+2))
	}
	o.slices = []v1alpha1.RevocationSlice{*slice(1, []v1alpha1.RevokedCertificate{{NodeName: "a", SHA256: sum(1), NotAfter: metav1.Now()}})}
	lists := &Lists{}
	for b.Loop() {
		lists = newLists(o, lists, time.Now())
	}
}
