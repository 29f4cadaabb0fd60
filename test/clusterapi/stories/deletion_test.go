// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// preTerminateHook is a hook that delays the deletion of a Machine, as an operator's own clean-up
// does. So the host stays on, and its requests still reach the controller.
const preTerminateHook = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/story"

// Machines are deleted while they enrol: one before its first request, one after its hello, and one
// after its proof. The host stays on for a while, and retries. The request is denied with
// MachineDeleting. The Machine gets no certificate and no record, and its deletion completes. The
// last replacement joins.
func TestDeletedWhileEnrolling(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "short", func(d *machineDeployment) {
		d.object.Spec.Template.Annotations = map[string]string{preTerminateHook: "story"}
	})
	t.Cleanup(func() { d.removeHooks(context.WithoutCancel(t.Context()), t) })
	d.scale(t, 1)

	// Before the first request: the host has just been switched on.
	name := d.awaitOne(t, "")
	c.awaitHost(t, name)
	c.deleteMachine(t, name)
	if hellos, _ := harness.Requests(t, c.workload, name); len(hellos) > 0 {
		t.Fatalf("%s sent a request before its Machine was deleted", name)
	}
	c.awaitDenied(t, name, verifier.ReasonMachineDeleting)
	harness.Must(t, s.controller.Kill()) // so that the next Machine's hello stays unanswered
	c.awaitDeleted(t, name)

	// After the hello is filed.
	name = d.awaitOne(t, name)
	c.awaitRequest(t, name, func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	c.deleteMachine(t, name)
	harness.Must(t, s.restart(t.Context()))
	c.awaitDenied(t, name, verifier.ReasonMachineDeleting)
	harness.Must(t, s.controller.Kill())
	c.awaitDeleted(t, name)

	// After the proof is filed. The plugin is stopped (SIGSTOP) after the hello. The controller
	// runs until it has written the challenge. Then the controller is killed, and the plugin files
	// the proof.
	name = d.awaitOne(t, name)
	c.awaitRequest(t, name, func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	host, err := c.hosts.Machine(t.Context(), c.hosts.IDs(name)[0])
	harness.Must(t, err)
	_, err = host.Run(t.Context(), "pkill", "-STOP", "-f", "kube")
	harness.Must(t, err)
	harness.Must(t, s.restart(t.Context()))
	c.awaitRequest(t, name, func(hellos, proofs []certificatesv1.CertificateSigningRequest) bool {
		return hellos[len(hellos)-1].Annotations[attestation.AnnotationChallenge] != "" && len(proofs) == 0
	})
	harness.Must(t, s.controller.Kill())
	_, err = host.Run(t.Context(), "pkill", "-CONT", "-f", "kube")
	harness.Must(t, err)
	c.awaitRequest(t, name, func(_, proofs []certificatesv1.CertificateSigningRequest) bool { return len(proofs) > 0 })
	c.deleteMachine(t, name)
	harness.Must(t, s.restart(t.Context()))
	c.awaitRequest(t, name, func(_, proofs []certificatesv1.CertificateSigningRequest) bool {
		return isDenied(&proofs[0], verifier.ReasonMachineDeleting)
	})
	c.awaitDeleted(t, name)

	d.removeHooks(t.Context(), t)
	d.awaitRunning(t, 1)
}

// awaitDeleted removes the hook of a Machine that is being deleted, and waits until the Machine is
// gone. Before and after that, the Machine must have neither certificate nor record.
func (c *cluster) awaitDeleted(t *testing.T, name string) {
	t.Helper()
	c.mustNotHaveJoined(t, name)
	began := time.Now()
	m := &clusterv1.Machine{}
	key := client.ObjectKey{Namespace: c.namespace, Name: name}
	harness.Must(t, c.client.Get(t.Context(), key, m))
	before := m.DeepCopy()
	delete(m.Annotations, preTerminateHook)
	harness.Must(t, c.client.Patch(t.Context(), m, client.MergeFrom(before)))
	harness.Eventually(t, goneLimit, "Machine "+name+" is gone", func() bool { return apierrors.IsNotFound(c.client.Get(t.Context(), key, m)) })
	t.Logf("Machine %s is gone after %s", name, since(began))
	if ids := c.hosts.IDs(name); len(ids) > 0 {
		t.Errorf("the hosts %v of Machine %s are still on", ids, name)
	}
	c.mustNotHaveJoined(t, name)
}

// removeHooks removes the hook from all Machines, and from the template of later ones.
func (d *machineDeployment) removeHooks(ctx context.Context, t *testing.T) {
	t.Helper()
	before := d.object.DeepCopy()
	d.object.Spec.Template.Annotations = nil
	harness.Must(t, d.client.Patch(ctx, d.object, client.MergeFrom(before)))
	list := &clusterv1.MachineList{}
	harness.Must(t, d.client.List(ctx, list, client.InNamespace(d.namespace)))
	for i := range list.Items {
		m := &list.Items[i]
		before := m.DeepCopy()
		delete(m.Annotations, preTerminateHook)
		harness.Must(t, client.IgnoreNotFound(d.client.Patch(ctx, m, client.MergeFrom(before))))
	}
}
