// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A MachineDeployment scales up from 0, while an impostor boots with the user data of one of its
// Machines. The Machines join, and the impostor is denied. The commands and their output are the
// transcript in docs/integration/cluster-api.md. make test-all scales to 2. make test-clusterapi
// scales to 3, and down to 1: the hosts, records and Nodes of the deleted Machines are deleted,
// too.
func TestMachineDeployment(t *testing.T) {
	t.Parallel()
	all := testbed.IsFull()
	replicas := 2
	if all {
		replicas = 3
	}
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "one-workers", nil)
	u := newTerminal(t, c)

	began, ready := time.Now(), c.whenReady(t)
	u.types(t, "kubectl scale machinedeployment one-workers --replicas="+strconv.Itoa(replicas))
	i := c.newImpostor(t, &d.awaitProvisioned(t, replicas)[0])
	i.boot(t)
	u.types(t, "kubectl wait machines --all --for=condition=Available --timeout=5m")
	before := d.awaitRunning(t, replicas)
	for _, m := range before {
		t.Logf("%s: Node Ready %s after scaling up; of that, the kubelet waited %s for attestation",
			m.Name, ready()[m.Name].Sub(began).Round(100*time.Millisecond), c.attestedWithin(t, &m).Round(10*time.Millisecond))
	}
	i.awaitRefused(t, verifier.ReasonNodeNameMismatch)
	d.mustBeOwnHosts(t)
	// The impostor would send more requests, and the transcript must not show one that is
	// undecided.
	harness.Must(t, s.hosts.Release(t.Context(), i.id))
	c.awaitDecided(t)
	u.types(t, "kubectl get machines")
	u.types(t, "kubectl get nodes --kubeconfig=one.kubeconfig")
	u.types(t, "kubectl get csr --kubeconfig=one.kubeconfig")
	u.types(t, "kubectl get nodeattestations")
	u.types(t, "kubectl attest status --workload-cluster=one")
	u.isDocumented(t)
	if !all {
		return
	}
	d.scale(t, 1)
	after := d.awaitRunning(t, 1)
	d.mustBeOwnHosts(t)
	for _, m := range before {
		if m.Name == after[0].Name {
			continue
		}
		if len(s.hosts.IDs(m.Name)) != 0 {
			t.Errorf("the host of Machine %s is still on", m.Name)
		}
		harness.Eventually(t, goneLimit, "Node "+m.Name+" is gone", func() bool {
			nodes, err := c.workload.Client().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
			harness.Must(t, err)
			return !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == m.Name })
		})
	}
}

// whenReady polls the Nodes every 100 ms from now on, and notes when each becomes Ready.
func (c *cluster) whenReady(t *testing.T) func() map[string]time.Time {
	t.Helper()
	var mu sync.Mutex
	ready := map[string]time.Time{}
	go func() {
		for t.Context().Err() == nil {
			nodes, err := c.workload.Client().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
			if err == nil {
				mu.Lock()
				for _, n := range nodes.Items {
					if _, known := ready[n.Name]; !known && isReady(&n) {
						ready[n.Name] = time.Now()
					}
				}
				mu.Unlock()
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	return func() map[string]time.Time {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(ready)
	}
}

// attestedWithin returns the part of a join that attestation takes: from the start of the kubelet's
// unit until the kubelet itself runs. In that time prepare gets the certificate.
func (c *cluster) attestedWithin(t *testing.T, m *clusterv1.Machine) time.Duration {
	t.Helper()
	host, err := c.hosts.Machine(t.Context(), c.hosts.IDs(m.Name)[0])
	harness.Must(t, err)
	out, err := host.Run(t.Context(), "systemctl", "show", "kubelet", "--property=InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic")
	harness.Must(t, err)
	var at [2]time.Duration
	for line := range strings.Lines(out) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		us, err := strconv.ParseInt(value, 10, 64)
		harness.Must(t, err)
		at[slices.Index([]string{"InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"}, name)] = time.Duration(us) * time.Microsecond
	}
	if at[1] <= at[0] {
		t.Errorf("the kubelet of %s: %s", m.Name, out)
	}
	return at[1] - at[0]
}

// awaitDecided waits until each request in the Cluster is denied or has a certificate.
func (c *cluster) awaitDecided(t *testing.T) {
	t.Helper()
	harness.Eventually(t, goneLimit, "all requests are decided", func() bool {
		list, err := c.workload.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
		harness.Must(t, err)
		return !slices.ContainsFunc(list.Items, func(r certificatesv1.CertificateSigningRequest) bool {
			denied := condition(&r, certificatesv1.CertificateDenied) != nil
			return !denied && len(r.Status.Certificate) == 0
		})
	})
}
