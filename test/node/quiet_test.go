// SPDX-License-Identifier: Apache-2.0

package node

import (
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A kubelet without a certificate asks its plugin very often. The plugin does not pass that on to
// the API server and the TPM. After a denial it pauses, and it waits for a request that nobody
// answers.
func TestEnrolmentFailsQuietly(t *testing.T) {
	t.Parallel()
	const (
		observed = 100 * time.Second
		pause    = 30 * time.Second // after a denial, at least
		sequence = 25               // TPM commands for a hello and its proof, at most
	)
	c := newCluster(t, nil)
	denied, unknown := c.newTokenMachine(t, "denied"), c.newTokenMachine(t, "unknown")
	// The inventory knows the one's TPM under another name, and the other's not at all.
	c.admit(t, denied.identity(t, "--node-name=another"))
	began := time.Now()
	for _, m := range []*machine{denied, unknown} {
		m.startKubelet(t, "")
	}
	time.Sleep(time.Until(began.Add(observed))) // what happens in that time is counted

	for _, m := range []*machine{denied, unknown} {
		hellos, proofs := m.requests(t)
		calls, failed := m.calls(t)
		t.Logf("%s: %d hellos, %d TPM commands, %d calls of the plugin in %s", m.name, len(hellos), m.tpm.Count(), calls, observed)
		if len(proofs) > 0 || m.leaf(t) != nil {
			t.Errorf("%s: %d proofs, certificate %v", m.name, len(proofs), m.leaf(t))
		}
		if m.tpm.Count() == 0 || m.tpm.Count() > sequence*len(hellos) {
			t.Errorf("%s: %d TPM commands for %d hellos", m.name, m.tpm.Count(), len(hellos))
		}
		if failed != calls {
			t.Errorf("%s: %d calls of %d failed", m.name, failed, calls)
		}
		if calls <= len(hellos) {
			t.Errorf("%s: the kubelet called its plugin %d times only, so this shows nothing", m.name, calls)
		}
	}
	if hellos, _ := unknown.requests(t); len(hellos) != 1 {
		t.Errorf("%d hellos while the first one is pending", len(hellos))
	}
	// A hello may have been filed just now.
	var hellos []certificatesv1.CertificateSigningRequest
	harness.Eventually(t, harness.Soon, "each hello is decided", func() bool {
		hellos, _ = denied.requests(t)
		return !slices.ContainsFunc(hellos, func(h certificatesv1.CertificateSigningRequest) bool { return len(h.Status.Conditions) == 0 })
	})
	if len(hellos) < 2 {
		t.Errorf("%d hellos: nothing followed the denial", len(hellos))
	}
	for i, hello := range hellos {
		for _, other := range hellos[:i] {
			// The API server's times have whole seconds.
			if apart := hello.CreationTimestamp.Sub(other.CreationTimestamp.Time).Abs(); apart < pause-time.Second {
				t.Errorf("two hellos %s apart", apart)
			}
		}
	}
}

// calls returns how often the kubelet has called its plugin, and how many calls failed.
func (m *machine) calls(t *testing.T) (total, failed int) {
	t.Helper()
	total, failed, err := m.kubelet.PluginCalls(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return total, failed
}
