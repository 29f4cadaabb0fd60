// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
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

// heldOn is a hook that delays the deletion of a Machine, as an operator's own clean-up does. So
// the host stays on, and the controller still has its requests to refuse.
const heldOn = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/story"

// A Machine is deleted while it enrols: before its first request, after its hello, and after its
// proof. Its host stays on for a while, and tries again. Each request is denied. The Machine gets
// no certificate and no record, and nothing of ours blocks its deletion. The replacement joins.
func TestDeletedWhileEnrolling(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "short", func(d *machineDeployment) {
		d.object.Spec.Template.Annotations = map[string]string{heldOn: "story"}
	})
	t.Cleanup(func() { d.letGo(context.WithoutCancel(t.Context()), t) })
	d.scale(t, 1)

	// Before it asks: the host has just been switched on.
	name := d.awaitOne(t, "")
	c.awaitHost(t, name)
	c.deleteMachine(t, name)
	if hellos, _ := harness.Requests(t, c.workload, name); len(hellos) > 0 {
		t.Fatalf("%s had asked before", name)
	}
	c.awaitDenied(t, name, verifier.ReasonMachineDeleting)
	harness.Must(t, s.controller.Kill()) // the next one's hello is to wait
	c.goes(t, name)

	// Its hello is filed.
	name = d.awaitOne(t, name)
	c.awaitRequest(t, name, func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	c.deleteMachine(t, name)
	harness.Must(t, errors.Join(s.controller.Start(t.Context()), s.controller.Ready(t.Context())))
	c.awaitDenied(t, name, verifier.ReasonMachineDeleting)
	harness.Must(t, s.controller.Kill())
	c.goes(t, name)

	// Its proof is filed: all of it stands still from the hello until there is a challenge and no
	// controller.
	name = d.awaitOne(t, name)
	c.awaitRequest(t, name, func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	host, err := c.hosts.Machine(t.Context(), c.hosts.IDs(name)[0])
	harness.Must(t, err)
	_, err = host.Run(t.Context(), "pkill", "-STOP", "-f", "kube")
	harness.Must(t, err)
	harness.Must(t, errors.Join(s.controller.Start(t.Context()), s.controller.Ready(t.Context())))
	c.awaitRequest(t, name, func(hellos, proofs []certificatesv1.CertificateSigningRequest) bool {
		return hellos[len(hellos)-1].Annotations[attestation.AnnotationChallenge] != "" && len(proofs) == 0
	})
	harness.Must(t, s.controller.Kill())
	_, err = host.Run(t.Context(), "pkill", "-CONT", "-f", "kube")
	harness.Must(t, err)
	c.awaitRequest(t, name, func(_, proofs []certificatesv1.CertificateSigningRequest) bool { return len(proofs) > 0 })
	c.deleteMachine(t, name)
	harness.Must(t, errors.Join(s.controller.Start(t.Context()), s.controller.Ready(t.Context())))
	c.awaitRequest(t, name, func(_, proofs []certificatesv1.CertificateSigningRequest) bool {
		return isDenied(&proofs[0], verifier.ReasonMachineDeleting)
	})
	c.goes(t, name)

	d.letGo(t.Context(), t)
	d.awaitRunning(t, 1)
}

// goes lets the host of a Machine go that is being deleted, and checks that nothing of it is in the
// cluster, then and afterwards.
func (c *cluster) goes(t *testing.T, name string) {
	t.Helper()
	c.mustNotBeIn(t, name)
	began := time.Now()
	m := &clusterv1.Machine{}
	key := client.ObjectKey{Namespace: c.namespace, Name: name}
	harness.Must(t, c.client.Get(t.Context(), key, m))
	before := m.DeepCopy()
	delete(m.Annotations, heldOn)
	harness.Must(t, c.client.Patch(t.Context(), m, client.MergeFrom(before)))
	harness.Eventually(t, goneLimit, "Machine "+name+" is gone", func() bool { return apierrors.IsNotFound(c.client.Get(t.Context(), key, m)) })
	t.Logf("Machine %s is gone after %s", name, since(began))
	if ids := c.hosts.IDs(name); len(ids) > 0 {
		t.Errorf("the hosts %v of Machine %s are still on", ids, name)
	}
	c.mustNotBeIn(t, name)
}

// letGo lets all hosts go, also those of Machines that are yet to come.
func (d *machineDeployment) letGo(ctx context.Context, t *testing.T) {
	t.Helper()
	before := d.object.DeepCopy()
	d.object.Spec.Template.Annotations = nil
	harness.Must(t, d.client.Patch(ctx, d.object, client.MergeFrom(before)))
	list := &clusterv1.MachineList{}
	harness.Must(t, d.client.List(ctx, list, client.InNamespace(d.namespace)))
	for i := range list.Items {
		m := &list.Items[i]
		before := m.DeepCopy()
		delete(m.Annotations, heldOn)
		harness.Must(t, client.IgnoreNotFound(d.client.Patch(ctx, m, client.MergeFrom(before))))
	}
}
