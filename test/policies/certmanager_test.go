// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// certManagerModule is the folder with the module that has cert-manager's version.
	certManagerModule = "../components/cert-manager"
	certManagerGroup  = "cert-manager.io"
	issuersPolicy     = "node-attestation-cert-manager-issuers"
	tenantNamespace   = "tenant"
	tenantUser        = "tenant"
)

var (
	optionalCertManager = filepath.Join(manifests, "optional", "cert-manager.yaml")

	certificates        = schema.GroupVersionResource{Group: certManagerGroup, Version: "v1", Resource: "certificates"}
	certificateRequests = schema.GroupVersionResource{Group: certManagerGroup, Version: "v1", Resource: "certificaterequests"}
)

// object is a JSON object.
type object = map[string]any

// installCertManager installs cert-manager's CustomResourceDefinitions, and makes a tenant with the
// rights that its chart adds to the role "edit". It starts no controllers.
func installCertManager(t *testing.T, cp *testbed.ControlPlane) {
	t.Helper()
	ctx := t.Context()
	source, err := compile.ModuleDir(ctx, certManagerModule, "github.com/cert-manager/cert-manager")
	harness.Must(t, err)
	crds, err := testbed.ReadCRDs(filepath.Join(source, "deploy/crds/cert-manager.io_*.yaml"))
	harness.Must(t, err)
	harness.Must(t, cp.InstallCRDs(ctx, crds...))

	admin := cp.Client()
	_, err = admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenantNamespace}}, metav1.CreateOptions{})
	harness.Must(t, err)
	const role = "cert-manager-edit"
	_, err = admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: role}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{certManagerGroup}, Resources: []string{"certificates", "certificaterequests", "issuers"}, Verbs: strings.Fields("get list watch create delete patch update")},
		{APIGroups: []string{certManagerGroup}, Resources: []string{"certificates/status"}, Verbs: []string{"update"}},
		{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: strings.Fields("get list watch create delete update")},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = admin.RbacV1().RoleBindings(tenantNamespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role}, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "ClusterRole", Name: role},
		Subjects: []rbacv1.Subject{{APIGroup: rbac, Kind: rbacv1.UserKind, Name: tenantUser}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
}

// dynamicAs returns a client of somebody else for objects of any kind.
func dynamicAs(t *testing.T, cp *testbed.ControlPlane, user string, groups ...string) dynamic.Interface {
	t.Helper()
	config := cp.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	client, err := dynamic.NewForConfig(config)
	harness.Must(t, err)
	return client
}

// newCertManagerObject returns a Certificate or a CertificateRequest.
func newCertManagerObject(resource schema.GroupVersionResource, name string, issuer object) *unstructured.Unstructured {
	kind, spec := "Certificate", object{"commonName": "anybody", "secretName": name}
	if resource == certificateRequests {
		kind, spec = "CertificateRequest", object{"request": base64.StdEncoding.EncodeToString(newRequest(certManagerSigner).Spec.Request)}
	}
	spec["issuerRef"] = issuer
	u := &unstructured.Unstructured{Object: object{"spec": spec}}
	u.SetAPIVersion(resource.GroupVersion().String())
	u.SetKind(kind)
	u.SetName(name)
	return u
}

// The tenant of one namespace asks cert-manager for a certificate of the CA that issues for nodes.
// It could be an administrator's. Without the policy cert-manager issues it: TestRealCertManager.
func TestNodesCAIssuesForNobodyElse(t *testing.T) {
	ctx := t.Context()
	installCertManager(t, shared.ControlPlane)
	tenant := dynamicAs(t, shared.ControlPlane, tenantUser)
	admin := dynamicAs(t, shared.ControlPlane, "admin", "system:masters")
	issuing := dynamicAs(t, shared.ControlPlane, "system:serviceaccount:cert-manager:cert-manager", "system:masters")
	in := func(client dynamic.Interface, resource schema.GroupVersionResource) dynamic.ResourceInterface {
		return client.Resource(resource).Namespace(tenantNamespace)
	}
	resources := []schema.GroupVersionResource{certificates, certificateRequests}
	nodes := object{"kind": "ClusterIssuer", "name": "node-ca"}
	asTenant := func(resource schema.GroupVersionResource, name string, issuer object) error {
		_, err := in(tenant, resource).Create(ctx, newCertManagerObject(resource, name, issuer), metav1.CreateOptions{})
		return err
	}
	// update changes an object as a user, optionally through a subresource.
	update := func(client dynamic.Interface, resource schema.GroupVersionResource, name string, change func(*unstructured.Unstructured) error, subresources ...string) error {
		for {
			u, err := in(client, resource).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if err := change(u); err != nil {
				return err
			}
			if len(subresources) > 0 {
				_, err = in(client, resource).UpdateStatus(ctx, u, metav1.UpdateOptions{})
			} else {
				_, err = in(client, resource).Update(ctx, u, metav1.UpdateOptions{})
			}
			if !apierrors.IsConflict(err) {
				return err
			}
		}
	}
	condition := func(kind string) func(*unstructured.Unstructured) error {
		return func(u *unstructured.Unstructured) error {
			all, _, err := unstructured.NestedSlice(u.Object, "status", "conditions")
			if err != nil {
				return err
			}
			all = append(all, object{"type": kind, "status": "True", "reason": "test"})
			return unstructured.SetNestedSlice(u.Object, all, "status", "conditions")
		}
	}
	certified := func(u *unstructured.Unstructured) error {
		return unstructured.SetNestedField(u.Object, base64.StdEncoding.EncodeToString([]byte("certificate")), "status", "certificate")
	}
	labelled := func(u *unstructured.Unstructured) error { u.SetLabels(map[string]string{"a": "b"}); return nil }
	toNodesCA := func(u *unstructured.Unstructured) error {
		return unstructured.SetNestedMap(u.Object, nodes, "spec", "issuerRef")
	}

	for _, name := range []string{"early", "early-approved", "early-denied"} {
		harness.Must(t, asTenant(certificateRequests, name, nodes))
	}
	harness.Must(t, asTenant(certificates, "early", nodes))
	harness.Must(t, update(issuing, certificateRequests, "early-approved", condition("Approved"), "status"))
	want(t, shared.apply(ctx, "-f", optionalCertManager))
	t.Cleanup(func() {
		if _, err := shared.RunKubectl(context.WithoutCancel(ctx), shared.adminKubeconfig, "delete", "-f", optionalCertManager); err != nil {
			t.Error(err)
		}
	})
	harness.Eventually(t, patience, "the policy is in effect", func() bool {
		_, err := in(tenant, certificateRequests).Create(ctx, newCertManagerObject(certificateRequests, "probe", nodes), metav1.CreateOptions{DryRun: dryRun})
		return refusedBy(err, issuersPolicy)
	})

	for _, resource := range resources {
		for what, issuer := range map[string]object{
			"by kind": nodes, "by kind and group": {"kind": "ClusterIssuer", "name": "node-ca", "group": certManagerGroup},
			"by kind and empty group":                   {"kind": "ClusterIssuer", "name": "node-ca", "group": ""},
			"of a kind that may be another name for it": {"kind": "clusterissuer", "name": "node-ca"},
		} {
			for who, client := range map[string]dynamic.Interface{"tenant": tenant, "administrator": admin, "cert-manager": issuing} {
				_, err := in(client, resource).Create(ctx, newCertManagerObject(resource, "refused", issuer), metav1.CreateOptions{})
				if !refusedBy(err, issuersPolicy) {
					t.Errorf("%s of the %s, %s: %v", resource.Resource, who, what, err)
				}
			}
		}
		for name, issuer := range map[string]object{
			"issuer": {"kind": "Issuer", "name": "node-ca"}, "issuer-by-default": {"name": "node-ca"}, "issuer-of-empty-kind": {"kind": "", "name": "node-ca"},
			"another": {"kind": "ClusterIssuer", "name": "another"}, "another-group": {"kind": "ClusterIssuer", "name": "node-ca", "group": "example.com"},
		} {
			want(t, asTenant(resource, name, issuer))
			want(t, update(tenant, resource, name, labelled))
			wantRefusedBy(t, update(tenant, resource, name, toNodesCA), issuersPolicy)
			wantRefusedBy(t, update(admin, resource, name, toNodesCA), issuersPolicy)
		}
	}
	for _, change := range []func(*unstructured.Unstructured) error{condition("Approved"), condition("Ready"), certified} {
		want(t, update(issuing, certificateRequests, "another", change, "status"))
	}

	harness.Eventually(t, patience, issuersPolicy+" is type-checked", func() bool {
		policy, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, issuersPolicy, metav1.GetOptions{})
		harness.Must(t, err)
		if policy.Status.TypeChecking == nil {
			return false
		}
		for _, warning := range policy.Status.TypeChecking.ExpressionWarnings {
			t.Errorf("%s: %s", warning.FieldRef, warning.Warning)
		}
		return true
	})

	// This request was filed before the policy.
	wantRefusedBy(t, update(issuing, certificateRequests, "early", condition("Approved"), "status"), issuersPolicy)
	wantRefusedBy(t, update(issuing, certificateRequests, "early-approved", certified, "status"), issuersPolicy)
	want(t, update(issuing, certificateRequests, "early-approved", condition("Ready"), "status"))
	want(t, update(issuing, certificateRequests, "early-denied", condition("Denied"), "status"))
	wantRefusedBy(t, update(tenant, certificateRequests, "early", func(u *unstructured.Unstructured) error {
		return unstructured.SetNestedField(u.Object, true, "spec", "isCA")
	}), issuersPolicy)
	wantRefusedBy(t, update(tenant, certificates, "early", func(u *unstructured.Unstructured) error {
		return unstructured.SetNestedField(u.Object, "somebody else", "spec", "commonName")
	}), issuersPolicy)
	want(t, update(issuing, certificates, "early", condition("Ready"), "status"))
	for _, resource := range resources {
		want(t, update(tenant, resource, "early", func(u *unstructured.Unstructured) error { u.SetFinalizers([]string{"example.com/x"}); return nil }))
		want(t, in(tenant, resource).Delete(ctx, "early", metav1.DeleteOptions{}))
		want(t, update(tenant, resource, "early", func(u *unstructured.Unstructured) error { u.SetFinalizers(nil); return nil }))
		if _, err := in(tenant, resource).Get(ctx, "early", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: not deleted: %v", resource.Resource, err)
		}
	}
}

// decoded returns the objects in YAML documents.
func decoded(t *testing.T, content []byte) (all []unstructured.Unstructured) {
	t.Helper()
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), len(content))
	for {
		u := unstructured.Unstructured{}
		err := decoder.Decode(&u.Object)
		if errors.Is(err, io.EOF) {
			return all
		}
		harness.Must(t, err)
		all = append(all, u)
	}
}

// policiesIn returns the policies among objects.
func policiesIn(t *testing.T, objects []unstructured.Unstructured) map[string]admissionv1.ValidatingAdmissionPolicySpec {
	t.Helper()
	found := map[string]admissionv1.ValidatingAdmissionPolicySpec{}
	for _, u := range objects {
		if u.GetKind() == "ValidatingAdmissionPolicy" {
			policy := admissionv1.ValidatingAdmissionPolicy{}
			harness.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &policy))
			found[policy.Name] = policy.Spec
		}
	}
	return found
}

// The issuer's name is in several places. Each policy of optional/cert-manager.yaml guards the
// signer that the controller gets the right to approve for. The documented overlay adds that signer
// to each list with the signers of nodes.
func TestCertManagersSignerIsListedEverywhere(t *testing.T) {
	content, err := os.ReadFile(optionalCertManager)
	harness.Must(t, err)
	objects := decoded(t, content)
	optional := policiesIn(t, objects)
	if names := slices.Sorted(maps.Keys(optional)); !slices.Equal(names, []string{certManagerPolicy, issuersPolicy}) {
		t.Fatalf("policies %v", names)
	}
	for name, spec := range optional {
		if v := spec.Variables[0]; v.Name != "signers" || v.Expression != "['"+certManagerSigner+"']" {
			t.Errorf("%s: variable 0 is %+v", name, v)
		}
	}
	for _, u := range objects {
		role := rbacv1.ClusterRole{}
		if u.GetKind() == "ClusterRole" {
			harness.Must(t, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &role))
			if !slices.Equal(role.Rules[0].ResourceNames, []string{certManagerSigner}) {
				t.Errorf("the controller may approve for %v", role.Rules[0].ResourceNames)
			}
		}
	}

	rendered, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "kustomize", documentedOverlay(t, "cert-manager"))
	harness.Must(t, err)
	base, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "kustomize", manifests)
	harness.Must(t, err)
	before := policiesIn(t, decoded(t, []byte(base)))
	lists := 0
	for name, spec := range policiesIn(t, decoded(t, []byte(rendered))) {
		for i, v := range spec.Variables {
			now, then := quoted.FindAllString(v.Expression, -1), quoted.FindAllString(before[name].Variables[i].Expression, -1)
			// Under cert-manager's signer cert-manager writes the certificate.
			if name != certificatesPolicy && slices.Contains(then, "'"+tpmSigner+"'") {
				then = append(then, "'"+certManagerSigner+"'")
				lists++
			}
			slices.Sort(now)
			if slices.Sort(then); !slices.Equal(now, then) {
				t.Errorf("%s: %s is %v in the overlay, not %v", name, v.Name, now, then)
			}
		}
	}
	if lists < 2 {
		t.Errorf("the overlay adds to %d lists", lists)
	}
}
