// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const recordsPolicy = "node-attestation-records"

// isPlanted reports whether the policy about records has refused.
func isPlanted(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+recordsPolicy+"'")
}

// clientAs returns a client of somebody else in the management cluster.
func (m *management) clientAs(t *testing.T, user string, groups ...string) client.Client {
	t.Helper()
	config := m.AdminConfig()
	config.Impersonate.UserName, config.Impersonate.Groups = user, append(groups, "system:authenticated")
	c, err := client.New(config, client.Options{Scheme: m.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// asController writes records as the controller does.
func (m *management) asController(t *testing.T) client.Client {
	t.Helper()
	return m.clientAs(t, controllerUser, "system:masters")
}

// A tenant who may do everything in a Cluster's namespace plants a record that ties the victim's
// Machine and node name to his own TPM. With it the controller would have given him the node's
// certificate, over the annotated EK. The machine gets its certificate, and he does not. Nor does
// he change a record that is there.
func TestTenantPlantsARecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	w.start(t, nil)
	first := c.newMachine(t, "first", nil)
	first.attests(t) // once the cluster is served it has its identity

	meta := metav1.ObjectMeta{Namespace: w.namespace, Name: "tenant"}
	w.create(t, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}}})
	w.create(t, &rbacv1.RoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: meta.Name}},
	})
	tenant := w.clientAs(t, meta.Name)
	victim := c.newMachine(t, "victim", nil)
	thief := victim.impostor(t)
	planted := &v1alpha1.NodeAttestation{
		ObjectMeta: c.meta(victim.name),
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster: c.identity(t), Machine: v1alpha1.MachineReference{Source: "cluster-api", Name: victim.name}, Provider: tpm.Name,
			ProviderID: victim.providerID, NodeName: victim.name, EK: &v1alpha1.EndorsementKey{Fingerprint: thief.ek},
		},
	}
	planted.OwnerReferences = []metav1.OwnerReference{victim.owner()}
	harness.Eventually(t, harness.Soon, "the tenant has his rights", func() bool {
		return tenant.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: meta}) == nil
	})
	if err := tenant.Create(t.Context(), planted.DeepCopy()); !isPlanted(err) {
		t.Errorf("planted: %v", err)
	}
	stored := w.record(t, first.remembered(t).Name)
	stored.Spec.EK.Fingerprint = strings.Repeat("0", 64)
	if err := tenant.Update(t.Context(), stored); !isPlanted(err) {
		t.Errorf("altered: %v", err)
	}
	thief.denied(t, verifier.ReasonNodeNameMismatch)
	victim.attests(t)
	victim.remembered(t)
	first.attests(t)
}

// The garbage collector does its work: it takes away an owner that leaves its dependents behind,
// and deletes a record with its machine.
func TestGarbageCollectorAndRecords(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	record := func(name string) (*corev1.ConfigMap, *v1alpha1.NodeAttestation) {
		owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
		w.create(t, owner)
		r := &v1alpha1.NodeAttestation{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: []metav1.OwnerReference{
				{APIVersion: "v1", Kind: "ConfigMap", Name: name, UID: owner.UID, BlockOwnerDeletion: new(true)},
			}},
			Spec: v1alpha1.NodeAttestationSpec{Cluster: "c", Machine: v1alpha1.MachineReference{Source: "cluster-api", Name: name}, Provider: "tpm", NodeName: name},
		}
		if err := w.asController(t).Create(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		return owner, r
	}
	for name, policy := range map[string]metav1.DeletionPropagation{
		"orphaned": metav1.DeletePropagationOrphan, "foreground": metav1.DeletePropagationForeground, "background": metav1.DeletePropagationBackground,
	} {
		owner, r := record(name)
		if err := w.client.Delete(t.Context(), owner, client.PropagationPolicy(policy)); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, 30*time.Second, name+": the owner is gone, and the record as it should be", func() bool {
			if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(owner), &corev1.ConfigMap{}); !apierrors.IsNotFound(err) {
				return false
			}
			err := w.client.Get(t.Context(), client.ObjectKeyFromObject(r), r)
			if policy == metav1.DeletePropagationOrphan {
				return err == nil && len(r.OwnerReferences) == 0
			}
			return apierrors.IsNotFound(err)
		})
	}
}
