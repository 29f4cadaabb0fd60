// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const collector = "system:serviceaccount:kube-system:generic-garbage-collector"

func recordsPath(namespace string) string {
	return "/apis/" + v1alpha1.GroupVersion.String() + "/namespaces/" + namespace + "/nodeattestations"
}

func fullRecordJSON(t *testing.T) ([]byte, error) {
	t.Helper()
	return json.Marshal(toUnstructured(t, fullRecord("overlay")).Object)
}

// writer returns a client for the records of a namespace, of a user with these groups.
func writer(t *testing.T, namespace, user string, groups ...string) dynamic.ResourceInterface {
	t.Helper()
	config := shared.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client.Resource(v1alpha1.Resource).Namespace(namespace)
}

// tenant makes a namespace whose tenant may do everything in it, and returns who that is.
func tenant(t *testing.T, namespace string) (user string) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: "tenant", Namespace: namespace}
	_, err := shared.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = shared.admin.RbacV1().Roles(namespace).Create(t.Context(), &rbacv1.Role{
		ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = shared.admin.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "Role", Name: "tenant"},
		Subjects: []rbacv1.Subject{{APIGroup: rbac, Kind: rbacv1.UserKind, Name: "tenant-of-" + namespace}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	return "tenant-of-" + namespace
}

// A record that a tenant planted gave a node's certificate to another TPM. A user who may do
// everything in a namespace cannot write a record there in any way, and neither can an
// administrator. Both may delete one, and change the fields that the controller does not use.
func TestOnlyTheControllerWritesRecords(t *testing.T) {
	const place = "tenants"
	user := tenant(t, place)
	// its own rights are tested elsewhere
	controller := writer(t, place, controllerUser, "system:masters")
	record := func(name string) *unstructured.Unstructured {
		r := fullRecord(name)
		r.Namespace = place
		r.OwnerReferences = owners(1, "machine")
		return toUnstructured(t, r)
	}
	stored, err := controller.Create(t.Context(), record("machine"), metav1.CreateOptions{})
	harness.Must(t, err)
	changes := map[string]string{
		"EK":               `{"spec":{"ek":{"fingerprint":"` + strings.Repeat("0", 64) + `"}}}`,
		"EK away":          `{"spec":{"ek":null}}`,
		"AK":               `{"spec":{"akName":null}}`,
		"provider ID":      `{"spec":{"providerID":"other://x"}}`,
		"status, a field":  `{"status":{"firstRequestUID":"x"}}`,
		"status, a number": `{"status":{"boot":{"resets":1,"restarts":1,"clock":1}}}`,
		"status away":      `{"status":null}`,
		"certificates":     `{"status":{"certificates":[]}}`,
		"owner":            `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"machine","uid":"other"}]}}`,
		"second owner":     `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"machine","uid":"00000"},{"apiVersion":"v1","kind":"Pod","name":"x","uid":"x"}]}}`,
		"owner away":       `{"metadata":{"ownerReferences":null}}`,
		"label and AK":     `{"metadata":{"labels":{"a":"b"}},"spec":{"akName":null}}`,
	}
	// in this order: a finalizer that stays would keep the record
	harmless := []struct{ what, content string }{
		{"nothing", `{}`},
		{"label", `{"metadata":{"labels":{"a":"b"}}}`},
		{"annotation", `{"metadata":{"annotations":{"a":"b"}}}`},
		{"finalizer", `{"metadata":{"finalizers":["example.com/x"]}}`},
		{"no finalizer", `{"metadata":{"finalizers":null}}`},
	}
	edit := func(as dynamic.ResourceInterface, kind types.PatchType, content []byte) error {
		_, err := as.Patch(t.Context(), "machine", kind, content, metav1.PatchOptions{})
		return err
	}
	for who, as := range map[string]dynamic.ResourceInterface{
		"tenant":                       writer(t, place, user),
		"administrator":                writer(t, place, "admin", "system:masters"),
		"another's controller":         writer(t, place, "system:serviceaccount:"+place+":"+account, "system:masters"),
		"group named as it":            writer(t, place, "x", "system:masters", controllerUser),
		"namespace controller":         writer(t, place, "system:serviceaccount:kube-system:namespace-controller", "system:masters"),
		"workload's garbage collector": writer(t, place, "system:serviceaccount:"+place+":generic-garbage-collector", "system:masters"),
	} {
		t.Run(who, func(t *testing.T) {
			planted := record("planted")
			_, err := as.Create(t.Context(), planted, metav1.CreateOptions{})
			wantRefusedBy(t, err, recordsPolicy)
			_, err = as.Create(t.Context(), planted, metav1.CreateOptions{DryRun: dryRun})
			wantRefusedBy(t, err, recordsPolicy)
			planted.SetName("")
			planted.SetGenerateName("planted-")
			_, err = as.Create(t.Context(), planted, metav1.CreateOptions{})
			wantRefusedBy(t, err, recordsPolicy)
			_, err = as.Apply(t.Context(), "planted", record("planted"), metav1.ApplyOptions{FieldManager: "tenant", Force: true})
			wantRefusedBy(t, err, recordsPolicy)

			for what, content := range changes {
				if err := edit(as, types.MergePatchType, []byte(content)); !refusedBy(err, recordsPolicy) {
					t.Errorf("%s: %v", what, err)
				}
			}
			wantRefusedBy(t, edit(as, types.JSONPatchType, []byte(`[{"op":"remove","path":"/spec/akName"}]`)), recordsPolicy)
			whole, err := as.Get(t.Context(), "machine", metav1.GetOptions{})
			harness.Must(t, err)
			harness.Must(t, unstructured.SetNestedField(whole.Object, "other://x", "spec", "providerID"))
			_, err = as.Update(t.Context(), whole, metav1.UpdateOptions{})
			wantRefusedBy(t, err, recordsPolicy)
			whole.SetManagedFields(nil)
			_, err = as.Apply(t.Context(), "machine", whole, metav1.ApplyOptions{FieldManager: "tenant", Force: true})
			wantRefusedBy(t, err, recordsPolicy)

			for _, c := range harmless {
				if err := edit(as, types.MergePatchType, []byte(c.content)); err != nil {
					t.Errorf("%s: %v", c.what, err)
				}
			}
			// As a storage version migration does it.
			current, err := as.Get(t.Context(), "machine", metav1.GetOptions{})
			harness.Must(t, err)
			_, err = as.Update(t.Context(), current, metav1.UpdateOptions{})
			want(t, err)
		})
	}
	if got, err := controller.Get(t.Context(), "machine", metav1.GetOptions{}); err != nil || !sameContent(t, got, stored) {
		t.Errorf("the record was\n%v\nand is\n%v, %v", stored, got, err)
	}

	// The garbage collector changes owners and nothing else.
	gc := writer(t, place, collector, "system:masters")
	for what, content := range changes {
		if what == "owner" || what == "second owner" || what == "owner away" {
			continue
		}
		if err := edit(gc, types.MergePatchType, []byte(content)); !refusedBy(err, recordsPolicy) {
			t.Errorf("garbage collector, %s: %v", what, err)
		}
	}
	want(t, edit(gc, types.MergePatchType, []byte(changes["owner away"])))

	// A deletion is the reset. Only the controller may create the record again.
	tenants := writer(t, place, user)
	want(t, tenants.Delete(t.Context(), "machine", metav1.DeleteOptions{}))
	again := record("")
	again.SetGenerateName("machine")
	_, err = tenants.Create(t.Context(), again, metav1.CreateOptions{})
	wantRefusedBy(t, err, recordsPolicy)
	_, err = tenants.Create(t.Context(), record("machine"), metav1.CreateOptions{})
	wantRefusedBy(t, err, recordsPolicy)
	_, err = controller.Create(t.Context(), record("machine"), metav1.CreateOptions{})
	want(t, err)
	for _, content := range changes {
		want(t, edit(controller, types.MergePatchType, []byte(content)))
	}
	want(t, tenants.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}))
}

// sameContent reports whether two records agree in what the policy guards.
func sameContent(t *testing.T, a, b *unstructured.Unstructured) bool {
	t.Helper()
	content := func(u *unstructured.Unstructured) string {
		data, err := json.Marshal([]any{u.Object["spec"], u.Object["status"], u.GetOwnerReferences()})
		harness.Must(t, err)
		return string(data)
	}
	return content(a) == content(b)
}
