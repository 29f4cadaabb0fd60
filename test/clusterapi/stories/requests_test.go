// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"fmt"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// since returns the time since began, for log messages.
func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }

// awaitOne waits until exactly one Machine other than not is not being deleted, and returns its
// name.
func (d *machineDeployment) awaitOne(t *testing.T, not string) string {
	t.Helper()
	return d.awaitOthers(t, 1, not)[0]
}

// awaitOthers waits until exactly count Machines are neither in not nor being deleted, and returns
// their names.
func (d *machineDeployment) awaitOthers(t *testing.T, count int, not ...string) (names []string) {
	t.Helper()
	harness.Eventually(t, 2*joinLimit, fmt.Sprintf("%d Machines of %s other than %v", count, d.object.Name, not), func() bool {
		names = nil
		for _, m := range d.machines(t) {
			if m.DeletionTimestamp.IsZero() && !slices.Contains(not, m.Name) {
				names = append(names, m.Name)
			}
		}
		return len(names) == count
	})
	return names
}

// deleteMachine deletes a Machine. It does not wait for the end of the deletion.
func (c *cluster) deleteMachine(t *testing.T, name string) {
	t.Helper()
	m := &clusterv1.Machine{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, m))
	harness.Must(t, c.client.Delete(t.Context(), m))
}

// awaitRequest waits until the condition holds for a node's requests.
func (c *cluster) awaitRequest(t *testing.T, node string, condition func(hellos, proofs []certificatesv1.CertificateSigningRequest) bool) {
	t.Helper()
	harness.Eventually(t, joinLimit, "the requests of "+node+" meet the condition", func() bool { return condition(harness.Requests(t, c.workload, node)) })
}

// awaitHost waits until a host is allocated for a Machine, and returns the MetalMachine.
func (c *cluster) awaitHost(t *testing.T, machine string) *infrav1.MetalMachine {
	t.Helper()
	m := &infrav1.MetalMachine{}
	harness.Eventually(t, joinLimit, "a host for Machine "+machine, func() bool {
		err := c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: machine}, m)
		return err == nil && m.Annotations[attestation.AnnotationEK] != "" && len(c.hosts.IDs(machine)) == 1
	})
	return m
}

// awaitWaiting waits until a request of a node has the annotation with that waiting reason, and
// returns the annotation.
func (c *cluster) awaitWaiting(t *testing.T, node string, reason verifier.Reason) (text string) {
	t.Helper()
	var last string
	harness.Eventually(t, joinLimit, fmt.Sprintf("a request of %s waits with %s", node, reason), func() bool {
		hellos, others := harness.Requests(t, c.workload, node)
		for _, r := range append(hellos, others...) {
			waiting, err := attestation.ParseStatement(r.Annotations[attestation.AnnotationWaiting])
			if err != nil {
				continue
			}
			if text = r.Annotations[attestation.AnnotationWaiting]; text != last {
				last = text
				t.Log(text)
			}
			if waiting.Reason == string(reason) {
				return true
			}
		}
		return false
	})
	return text
}

// awaitDenied waits until a request of a node is denied with that reason.
func (c *cluster) awaitDenied(t *testing.T, node string, reason verifier.Reason) {
	t.Helper()
	harness.Eventually(t, joinLimit, fmt.Sprintf("a request of %s is denied with %s", node, reason), func() bool {
		hellos, others := harness.Requests(t, c.workload, node)
		for _, r := range append(hellos, others...) {
			if isDenied(&r, reason) {
				return true
			}
		}
		return false
	})
}

func isDenied(r *certificatesv1.CertificateSigningRequest, reason verifier.Reason) bool {
	denied := condition(r, certificatesv1.CertificateDenied)
	return denied != nil && denied.Reason == string(reason)
}

// mustNotHaveJoined checks that no request for a node has a certificate, and that the node has no
// record.
func (c *cluster) mustNotHaveJoined(t *testing.T, node string) {
	t.Helper()
	hellos, others := harness.Requests(t, c.workload, node)
	for _, r := range append(hellos, others...) {
		if len(r.Status.Certificate) > 0 {
			t.Errorf("request %s of %s has a certificate", r.Name, node)
		}
	}
	for _, record := range c.records(t) {
		if record.Spec.NodeName == node {
			t.Errorf("%s has a record: %+v", node, record)
		}
	}
}
