// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A host reboots. Its kubelet goes on with the same certificate. kubeadm does not join again,
// no request is created, and the record does not change.
func TestReboot(t *testing.T) {
	full(t)
	t.Parallel()
	const joined = "/run/cluster-api/bootstrap-success.complete" // /run is empty after a boot
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "rebooting", nil)
	d.scale(t, 1)
	m := d.awaitRunning(t, 1)[0]
	id := s.hosts.IDs(m.Name)[0]
	host, err := s.hosts.Machine(t.Context(), id)
	harness.Must(t, err)
	harness.Eventually(t, joinLimit, "cloud-init ends", func() bool { return cloudInitEnded(t, host) })
	_, err = host.Run(t.Context(), "test", "-e", joined)
	harness.Must(t, err) // kubeadm has run
	record, requests := d.record(t, m.Name), c.requests(t)

	began := metav1.Now().Rfc3339Copy()
	harness.Must(t, s.hosts.Reboot(t.Context(), id))
	host, err = s.hosts.Machine(t.Context(), id)
	harness.Must(t, err)
	harness.Eventually(t, joinLimit, "the Node is Ready again", func() bool {
		node, err := c.workload.Client().CoreV1().Nodes().Get(t.Context(), m.Name, metav1.GetOptions{})
		harness.Must(t, err)
		return isReady(node) && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && began.Before(&c.LastHeartbeatTime)
		})
	})
	harness.Eventually(t, joinLimit, "cloud-init ends", func() bool { return cloudInitEnded(t, host) })
	harness.Must(t, isAbsent(t.Context(), host, joined)) // kubeadm has not run again
	if again := d.record(t, m.Name); again.ResourceVersion != record.ResourceVersion {
		t.Errorf("the record was changed from %+v to %+v", record, again)
	}
	if again := c.requests(t); !slices.Equal(again, requests) {
		t.Errorf("the requests were %v, and are now %v", requests, again)
	}
	if again := d.awaitRunning(t, 1)[0]; again.Name != m.Name {
		t.Errorf("Machine %s has replaced %s", again.Name, m.Name)
	}
	d.mustBeOwnHosts(t)
}

func cloudInitEnded(t *testing.T, m *testbed.Machine) bool {
	t.Helper()
	_, err := m.Run(t.Context(), "test", "-e", "/run/cloud-init/result.json")
	return err == nil
}

// requests returns the names of all certificate requests in the workload cluster.
func (c *cluster) requests(t *testing.T) (names []string) {
	t.Helper()
	list, err := c.workload.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	for _, r := range list.Items {
		names = append(names, r.Name)
	}
	return names
}
