// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const (
	// startupLimit is the MachineHealthCheck's nodeStartupTimeoutSeconds. It covers a slow boot,
	// and then a request that waits for healthDeadline.
	startupLimit = 150 * time.Second
	// healthDeadline is the shortest waitDeadline that the configuration allows.
	healthDeadline = time.Minute
)

// A MachineHealthCheck replaces two Machines whose hosts are denied, and one whose kubelet stops.
//
// The first MetalMachine names another TPM than its host has: the request is denied at once. The
// second MetalMachine names none: the request waits, and is denied at the waitDeadline. The
// waitDeadline is shorter than the MachineHealthCheck's nodeStartupTimeoutSeconds. So a user can
// read both reasons before the Machines are replaced. The replacements join. Then a kubelet stops,
// its Node becomes Unknown, and another replacement joins, with a record of its own.
func TestMachineHealthCheck(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, func(file map[string]any) { file["waitDeadline"] = healthDeadline.String() })
	c := s.newCluster(t, "one")
	c.watchNodes(t)
	d := c.newMachineDeployment(t, "healthy", nil)
	d.newHealthCheck(t)
	d.scale(t, 2)

	began := time.Now()
	strangers := d.awaitOthers(t, 2)
	wrong, unnamed := strangers[0], strangers[1]
	c.nameEK(t, wrong, "sha256:"+strings.Repeat("0123456789abcdef", 4))
	c.nameEK(t, unnamed, "")
	c.awaitDenied(t, wrong, verifier.ReasonNodeNameMismatch)
	t.Logf("after %s the machine with another TPM is denied", since(began))
	reason := c.awaitWaiting(t, unnamed, verifier.ReasonMachineNotFound)
	t.Logf("after %s the request of the machine without a named TPM waits: %s", since(began), reason)
	c.awaitDenied(t, unnamed, verifier.ReasonMachineNotFound)
	t.Logf("after %s that request is denied", since(began))
	for _, m := range d.machines(t) {
		if !m.DeletionTimestamp.IsZero() || !slices.Contains(strangers, m.Name) {
			t.Fatalf("Machine %s was replaced before its request was denied", m.Name)
		}
	}

	joined := d.awaitOthers(t, 2, strangers...)
	t.Logf("after %s the Machines %v are replaced by %v", since(began), strangers, joined)
	d.awaitRunning(t, 2)
	for _, stranger := range strangers {
		c.mustNotHaveJoined(t, stranger)
	}

	dead := joined[0]
	before := c.record(t, dead)
	died := time.Now()
	host, err := c.hosts.Machine(t.Context(), c.hosts.IDs(dead)[0])
	harness.Must(t, err)
	_, err = host.Run(t.Context(), "systemctl", "stop", "kubelet")
	harness.Must(t, err)
	next := d.awaitOthers(t, 1, append(strangers, joined...)...)[0]
	t.Logf("%s after its kubelet stopped, Machine %s is replaced by %s", since(died), dead, next)
	d.awaitRunning(t, 2)
	if after := c.record(t, next); after.UID == before.UID || after.Spec.EK.Fingerprint == before.Spec.EK.Fingerprint {
		t.Errorf("the record of %s has the UID or the EK of the record of %s: %+v", next, dead, after)
	}
	if _, err := c.workload.Client().CoreV1().Nodes().Get(t.Context(), dead, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("Node %s is still there: %v", dead, err)
	}
}

// watchNodes starts the controller that sets a Node to Unknown when its kubelet stops reporting.
func (c *cluster) watchNodes(t *testing.T) {
	t.Helper()
	harness.Must(t, c.workload.StopControllerManager())
	harness.Must(t, c.workload.StartControllerManager(t.Context(), "--node-monitor-grace-period=20s", "--controllers="+strings.Join([]string{
		"certificatesigningrequest-approving-controller", "certificatesigningrequest-signing-controller",
		"bootstrap-signer-controller", "token-cleaner-controller", "node-lifecycle-controller",
	}, ",")))
}

// newHealthCheck makes a MachineHealthCheck for all Machines of the MachineDeployment.
func (d *machineDeployment) newHealthCheck(t *testing.T) {
	t.Helper()
	check := &clusterv1.MachineHealthCheck{ObjectMeta: d.meta(d.object.Name), Spec: clusterv1.MachineHealthCheckSpec{
		ClusterName: d.name, Selector: d.object.Spec.Selector,
		Checks: clusterv1.MachineHealthCheckChecks{
			NodeStartupTimeoutSeconds: ptr.To(int32(startupLimit.Seconds())),
			UnhealthyNodeConditions:   []clusterv1.UnhealthyNodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, TimeoutSeconds: ptr.To[int32](2)}},
		},
	}}
	harness.Must(t, d.client.Create(t.Context(), check))
}

// nameEK changes the EK that a MetalMachine names before its host sends a request. An empty ek
// removes it.
func (c *cluster) nameEK(t *testing.T, machine, ek string) {
	t.Helper()
	m := c.awaitHost(t, machine)
	before := m.DeepCopy()
	if m.Annotations[attestation.AnnotationEK] = ek; ek == "" {
		delete(m.Annotations, attestation.AnnotationEK)
	}
	harness.Must(t, c.client.Patch(t.Context(), m, client.MergeFrom(before)))
	if hellos, _ := harness.Requests(t, c.workload, machine); len(hellos) > 0 {
		t.Fatalf("the host of %s sent a request before its EK was changed", machine)
	}
}
