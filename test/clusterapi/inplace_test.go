// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"maps"
	"testing"

	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// An in-place update of Cluster API keeps the Machine object and changes its version. The record
// stays the same during the update and after it, whether the certificate directory is kept or the
// disk is written anew.
func TestUpdatedInPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	w.start(t, shortLived)
	c := w.newCluster(t, "workload", nil)
	for name, rewritten := range map[string]bool{"keeps-its-directory": false, "disk-is-rewritten": true} {
		t.Run(name, func(t *testing.T) {
			m := c.newMachine(t, name, func(m *machine) { m.object.Spec.Version = "v1.36.3" })
			m.enrols(t)
			before := m.remembered(t)
			m.registered(t)

			// As Cluster API 1.14 does it: the annotation on all three objects, and new specs.
			objects := []client.Object{m.infra, m.config, m.object}
			for _, o := range objects {
				update(t, c.client, o, func(o client.Object) {
					marked := map[string]string{clusterv1.UpdateInProgressAnnotation: ""}
					maps.Copy(marked, o.GetAnnotations())
					o.SetAnnotations(marked)
				})
			}
			update(t, c.client, m.config, func(o *bootstrapv1.KubeadmConfig) {
				o.Spec.JoinConfiguration.NodeRegistration.KubeletExtraArgs = []bootstrapv1.Arg{{Name: "v", Value: new("3")}}
			})
			update(t, c.client, m.object, func(o *clusterv1.Machine) { o.Spec.Version = "v1.37.2" })
			if rewritten {
				m.removeState(t)
			}
			m.enrols(t)
			for _, o := range objects {
				update(t, c.client, o, func(o client.Object) {
					left := maps.Clone(o.GetAnnotations())
					delete(left, clusterv1.UpdateInProgressAnnotation)
					o.SetAnnotations(left)
				})
			}
			m.removeState(t) // after the update, a first certificate is for the same record, too
			m.enrols(t)
			if after := m.remembered(t); after.UID != before.UID {
				t.Errorf("%s has another record", m.name)
			}
		})
	}
}
