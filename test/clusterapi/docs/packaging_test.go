// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/contract"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// listed returns what a kustomization has, as kind/name.
func listed(t *testing.T, folder string) []string {
	t.Helper()
	var all []string
	for _, text := range objects(management.mustKubectl(t, "kustomize", folder)) {
		object := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &object.Object); err != nil {
			t.Fatal(err)
		}
		all = append(all, object.GetKind()+"/"+object.GetName())
	}
	slices.Sort(all)
	return all
}

// What packaging/kubernetes has is in one of the two, or is named here: who adds something says
// where it goes. So it is with what revocation adds.
func TestKustomizations(t *testing.T) {
	alone := []string{"Role/node-attestation-controller", "RoleBinding/node-attestation-controller", "Secret/node-attestation-controller-key"}
	own := []string{
		"ClusterRole/node-attestation-controller-management", "ClusterRoleBinding/node-attestation-controller-management",
		"ClusterRole/node-attestation-controller-workload", "ClusterRoleBinding/node-attestation-controller-workload",
		"ValidatingAdmissionPolicy/node-attestation-secrets", "ValidatingAdmissionPolicyBinding/node-attestation-secrets",
	}
	t.Run("as shipped", func(t *testing.T) { partsAreComplete(t, "", alone, own) })
	// The Role for one namespace becomes a ClusterRole of the management cluster.
	t.Run("revocation", func(t *testing.T) {
		partsAreComplete(t, "-revocation",
			append(alone, "Role/node-attestation-controller-revocation", "RoleBinding/node-attestation-controller-revocation"),
			append(own, "ClusterRole/node-attestation-controller-management-revocation", "ClusterRoleBinding/node-attestation-controller-management-revocation"))
	})
}

// partsAreComplete compares both parts with the set for a cluster of its own.
func partsAreComplete(t *testing.T, suffix string, alone, own []string) {
	t.Helper()
	both := []string{
		"ClusterRole/node-attestation-controller-policies", "ClusterRoleBinding/node-attestation-controller-policies", "Namespace/node-attestation-system",
	}
	packaging := module + "/packaging/"
	here, there := listed(t, packaging+"cluster-api/management"+suffix), listed(t, packaging+"cluster-api/workload"+suffix)
	want := slices.Concat(listed(t, packaging+"kubernetes"+suffix), both, own)
	got := slices.Concat(here, there, alone)
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("both parts have\n%s\nnot\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, kind := range []string{"Deployment", "CustomResourceDefinition", "ServiceAccount"} {
		if !slices.ContainsFunc(here, func(s string) bool { return strings.HasPrefix(s, kind+"/") }) ||
			slices.ContainsFunc(there, func(s string) bool { return strings.HasPrefix(s, kind+"/") }) {
			t.Errorf("%s is not in the management cluster, or in the other", kind)
		}
	}
	for _, name := range []string{"node-attestation-approval", "node-attestation-revoked-01"} {
		if slices.Contains(here, "ValidatingAdmissionPolicy/"+name) {
			t.Errorf("%s, for clusters that are served, is in the management cluster", name)
		}
	}
	// A cluster may be both.
	for _, name := range here {
		if slices.Contains(there, name) && !slices.Contains(both, name) {
			t.Errorf("%s is in both, and one would overwrite the other", name)
		}
	}
}

// A management cluster takes its part, by the command in the guide, with an image and the
// configuration.
func TestManagement(t *testing.T) {
	apply := command(t, "kubectl apply --server-side -k ")
	t.Chdir(module)
	for range 2 { // again, as an upgrade does
		management.mustKubectl(t, append(strings.Fields(apply)[1:], "--validate=strict")...)
	}
	deployment := management.mustKubectl(t, "get", "deployment", "node-attestation-controller", "--namespace="+namespace, "--output=yaml")
	if !strings.Contains(deployment, "name: node-attestation-controller\n        name: config\n") || !strings.Contains(deployment, "image: registry.example.com/node-attestation-controller:devel\n") {
		t.Errorf("another configuration, or another image:\n%s", deployment)
	}
	if !strings.Contains(deployment, "mountPath: /etc/node-attestation-inventory\n") || !strings.Contains(deployment, "name: node-attestation-inventory\n          optional: true\n") {
		t.Errorf("no inventory:\n%s", deployment)
	}
	held := management.mustKubectl(t, "get", "configmap", "node-attestation-controller", "--namespace="+namespace, `--output=jsonpath={.data.config\.yaml}`)
	if held != read(t, "docs/examples/cluster-api/management/config.yaml") {
		t.Errorf("mounted is\n%s", held)
	}
	t.Run("rights", managementRights)
	t.Run("secrets", onlyItsOwnSecrets)
}

// as returns a client of the user as whom the controller acts, with the groups that it says.
func (s *server) as(t *testing.T, user string, groups ...string) kubernetes.Interface {
	t.Helper()
	c := s.AdminConfig()
	c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	clients, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return clients
}

// controller is the one of both clusters: in the management cluster by its token, in the other by
// impersonation.
func (s *server) controller(t *testing.T) kubernetes.Interface {
	t.Helper()
	return s.as(t, controllerUser)
}

// right is something to be allowed: verbs, a resource[/subresource] of a group, in a namespace, of
// a name.
type right struct{ verbs, group, resource, namespace, name string }

const (
	clusterGroup = "cluster.x-k8s.io"
	infraGroup   = "infrastructure.cluster.x-k8s.io"
	configGroup  = "bootstrap.cluster.x-k8s.io"
	recordGroup  = "attestation.cluster.x-k8s.io"
	csrGroup     = "certificates.k8s.io"
	rbacGroup    = "rbac.authorization.k8s.io"
	leaseGroup   = "coordination.k8s.io"
	policyGroup  = "admissionregistration.k8s.io"
	requests     = "certificatesigningrequests"
)

// wantRights asks the API server what the controller may do.
func (s *server) wantRights(t *testing.T, allowed bool, rights ...right) {
	t.Helper()
	reviews := s.controller(t).AuthorizationV1().SelfSubjectAccessReviews()
	for _, r := range rights {
		for verb := range strings.FieldsSeq(r.verbs) {
			resource, subresource, _ := strings.Cut(r.resource, "/")
			answer, err := reviews.Create(t.Context(), &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: verb, Group: r.group, Resource: resource, Subresource: subresource, Namespace: r.namespace, Name: r.name,
				},
			}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if answer.Status.Allowed != allowed {
				t.Errorf("%s %+v: %t", verb, r, answer.Status.Allowed)
			}
		}
	}
}

func managementRights(t *testing.T) {
	management.wantRights(t, true,
		right{"list watch", clusterGroup, "clusters", "", ""},
		right{"list watch", clusterGroup, "machines", "fleet", ""},
		right{"list watch", clusterGroup, "machinepools", "fleet", ""},
		right{"list watch", configGroup, "kubeadmconfigs", "", ""},
		right{"list", infraGroup, "metalmachines", "fleet", ""},
		right{"get create update", "", "secrets", "fleet", ""},
		right{"list watch create update delete", recordGroup, "nodeattestations", "fleet", ""},
		right{"create", "events.k8s.io", "events", "fleet", ""},
		right{"get update", leaseGroup, "leases", namespace, "node-attestation-controller"},
		right{"list watch", policyGroup, "validatingadmissionpolicies", "", ""},
		right{"list watch", policyGroup, "validatingadmissionpolicybindings", "", ""},
		right{"get patch", "", "namespaces/status", "", namespace},
	)
	management.wantRights(t, false,
		right{"list watch patch delete", "", "secrets", "fleet", ""},
		right{"create update patch delete", clusterGroup, "machines", "fleet", ""},
		right{"update patch", clusterGroup, "clusters/status", "fleet", ""},
		right{"create update patch delete", infraGroup, "metalmachines", "fleet", ""},
		right{"patch deletecollection", recordGroup, "nodeattestations", "fleet", ""},
		right{"update", leaseGroup, "leases", namespace, "another"},
		right{"get", "", "configmaps", namespace, "node-attestation-inventory"}, // it is mounted
		right{"list update", csrGroup, requests, "", ""},
		right{"update patch", csrGroup, requests + "/approval", "", ""},
		right{"create update patch delete", policyGroup, "validatingadmissionpolicies", "", ""},
		right{"get patch", "", "namespaces/status", "", "fleet"},
		right{"update patch", "", "namespaces", "", namespace},
		right{"impersonate", "", "users", "", ""},
		right{"create", "", "pods", namespace, ""},
		right{"create", "", "serviceaccounts/token", namespace, ""},
		right{"escalate bind", rbacGroup, "clusterroles", "", ""},
	)
}

// The file for Metal3 alone grants all that the platform metal3 needs, and nothing else.
func TestMetal3Rights(t *testing.T) {
	s := startWorkload(t) // an empty one: these are rights alone
	s.mustKubectl(t, "create", "namespace", namespace)
	s.mustKubectl(t, "apply", "--server-side", "--validate=strict", "--filename="+module+"/packaging/cluster-api/optional/metal3.yaml")
	s.wantRights(t, true,
		right{"list", "metal3.io", "baremetalhosts", "fleet", ""},
		right{"list", infraGroup, "metal3machines", "fleet", ""},
		right{"list", infraGroup, "metal3clusters", "fleet", ""},
	)
	s.wantRights(t, false,
		right{"get watch create update patch delete", "metal3.io", "baremetalhosts", "fleet", ""},
		right{"get watch create update patch delete", infraGroup, "metal3machines", "fleet", ""},
		right{"get watch create update patch delete", infraGroup, "metal3clusters", "fleet", ""},
		right{"list", "metal3.io", "hostfirmwaresettings", "fleet", ""},
		right{"list", infraGroup, "metal3machinetemplates", "fleet", ""},
		right{"get list", "", "secrets", "fleet", ""}, // those of the hosts' BMCs
	)
}

// Of Secrets, the controller writes those that are its own, and no others.
func onlyItsOwnSecrets(t *testing.T) {
	ctx := t.Context()
	fleet := strings.TrimPrefix(newNamespace(t), "--namespace=")
	admin, controller := management.Client().CoreV1().Secrets(fleet), management.controller(t).CoreV1().Secrets(fleet)
	secret := func(name string, kind corev1.SecretType) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, Type: kind, Data: map[string][]byte{}}
	}
	const ours = corev1.SecretType("cluster.x-k8s.io/secret")
	isRefused := func(err error) bool {
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'node-attestation-secrets'")
	}
	refused := func(what string, err error) {
		t.Helper()
		if !isRefused(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The policy is in effect some time after it is stored.
	harness.Eventually(t, harness.Soon, "the policy is in effect", func() bool {
		_, err := controller.Create(ctx, secret("probe", ours), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return isRefused(err)
	})
	made, err := controller.Create(ctx, secret("one-node-attestation", ours), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made.Data = map[string][]byte{"key": []byte("x")}
	if _, err := controller.Update(ctx, made, metav1.UpdateOptions{}); err != nil {
		t.Error(err)
	}
	for _, s := range []*corev1.Secret{
		secret("one-ca", ours), secret("one-node-attestation-2", ours), secret("two-node-attestation", corev1.SecretTypeOpaque),
		{ObjectMeta: metav1.ObjectMeta{GenerateName: "x-node-attestation"}, Type: ours},
		{ObjectMeta: metav1.ObjectMeta{Name: "three-node-attestation", Annotations: map[string]string{"kubernetes.io/service-account.name": "default"}}, Type: corev1.SecretTypeServiceAccountToken},
	} {
		_, err := controller.Create(ctx, s, metav1.CreateOptions{})
		refused("create "+s.Name, err)
	}
	ca, err := admin.Create(ctx, secret("one-ca", ours), metav1.CreateOptions{}) // others are free
	if err != nil {
		t.Fatal(err)
	}
	_, err = controller.Update(ctx, ca, metav1.UpdateOptions{})
	refused("update a CA", err)
}

// Nobody but the controller writes records, except while the overlay for moves in the guide is
// applied, whom that names.
func TestMoveOverlay(t *testing.T) {
	apply := []string{"apply", "--server-side", "--force-conflicts", "--validate=strict", "-k"}
	management.mustKubectl(t, append(apply, examples+"/management")...)
	management.mustKubectl(t, "wait", "--for=condition=Established", "crd/nodeattestations."+recordGroup)
	fleet := strings.TrimPrefix(newNamespace(t), "--namespace=")
	record := write(t, `apiVersion: attestation.cluster.x-k8s.io/v1alpha1
kind: NodeAttestation
metadata: {name: planted, namespace: `+fleet+`}
spec: {cluster: c, machine: {source: cluster-api, name: m}, provider: tpm, nodeName: m}
`)
	refused := func(user string) bool {
		t.Helper()
		out, err := management.kubectl(t, "create", "--dry-run=server", "--as="+user, "--as-group=system:masters", "--filename="+record)
		if err != nil && !strings.Contains(err.Error()+out, "ValidatingAdmissionPolicy 'node-attestation-records'") {
			t.Fatalf("%s: %v %s", user, err, out)
		}
		return err != nil
	}
	becomes := func(user string, want bool) {
		t.Helper()
		harness.Eventually(t, harness.Soon, fmt.Sprintf("%s is refused: %t", user, want), func() bool { return refused(user) == want })
	}
	const mover = "kubernetes-admin"
	becomes(mover, true)
	if refused(controllerUser) {
		t.Error("the controller is refused")
	}
	management.mustKubectl(t, append(apply, overlayOf(t, "move"))...)
	becomes(mover, false)
	if !refused("another") || refused(controllerUser) {
		t.Error("the overlay lets others write, or the controller not")
	}
	management.mustKubectl(t, append(apply, examples+"/management")...)
	becomes(mover, true)
}

// overlayOf writes the overlay of the management cluster with that title in the guide into a
// folder.
func overlayOf(t *testing.T, title string) (dir string) {
	t.Helper()
	dir, overlay := t.TempDir(), ""
	for _, block := range blocks(read(t, document), "yaml") {
		if rest, ok := strings.CutPrefix(block, "# "+title+"\n"); ok {
			overlay = rest
		}
	}
	base, err := filepath.Abs(examples + "/management")
	if err != nil {
		t.Fatal(err)
	}
	relative, err := filepath.Rel(dir, base)
	if err != nil || strings.Count(overlay, "../management") != 1 {
		t.Fatalf("another overlay than the test knows: %v\n%s", err, overlay)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(strings.Replace(overlay, "../management", relative, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The guide's overlay keeps names and redirects of a tenant's kubeconfig from link-local addresses.
// It leaves the ports as they are.
func TestEgressOverlay(t *testing.T) {
	apply := []string{"apply", "--server-side", "--force-conflicts", "--validate=strict", "-k"}
	management.mustKubectl(t, append(apply, examples+"/management")...)
	egress := management.mustKubectl(t, append(apply, overlayOf(t, "egress"), "--dry-run=server",
		`--output=jsonpath={range .items[?(@.kind=="NetworkPolicy")].spec.egress[*]}{.ports[*].port} {.to}{end}`)...)
	const want = `443 6443 [{"ipBlock":{"cidr":"0.0.0.0/0","except":["169.254.0.0/16","192.0.2.0/24"]}},{"ipBlock":{"cidr":"::/0","except":["fe80::/10"]}}]`
	if egress != want {
		t.Errorf("%s", egress)
	}
}

// command returns the one command of the guide that begins so.
func command(t *testing.T, prefix string) string {
	t.Helper()
	var found []string
	for _, block := range blocks(read(t, document), "sh") {
		for line := range strings.Lines(block) {
			if strings.HasPrefix(line, prefix) {
				found = append(found, strings.TrimSpace(line))
			}
		}
	}
	if len(found) != 1 {
		t.Fatalf("commands %q begin with %q", found, prefix)
	}
	return found[0]
}

// With the rights in some namespaces only, by the overlay and the file in the guide.
func TestNamespaces(t *testing.T) {
	dir, binding := overlayOf(t, "namespaces"), ""
	for _, block := range blocks(read(t, document), "yaml") {
		if _, kind := kindOf(block); kind == "RoleBinding" {
			binding = block
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "fleet.yaml"), []byte(binding), 0o600); err != nil {
		t.Fatal(err)
	}
	bound := startWorkload(t) // an empty one; what is about Cluster API's kinds are rights alone
	bound.mustKubectl(t, "create", "namespace", "fleet")
	bound.mustKubectl(t, "create", "namespace", "another")
	bound.mustKubectl(t, "apply", "--server-side", "--validate=strict", "-k", dir)
	bound.wantRights(t, true,
		right{"get create update", "", "secrets", "fleet", ""},
		right{"list watch create update", recordGroup, "nodeattestations", "fleet", ""},
		right{"list watch", clusterGroup, "clusters", "fleet", ""},
		right{"get update", leaseGroup, "leases", namespace, "node-attestation-controller"},
		right{"list watch", policyGroup, "validatingadmissionpolicies", "", ""},
		right{"list watch", policyGroup, "validatingadmissionpolicybindings", "", ""},
		right{"get patch", "", "namespaces/status", "", namespace},
	)
	for _, elsewhere := range []string{"", "another", namespace} {
		bound.wantRights(t, false,
			right{"get list create update", "", "secrets", elsewhere, ""},
			right{"list watch create update", recordGroup, "nodeattestations", elsewhere, ""},
			right{"list watch", clusterGroup, "clusters", elsewhere, ""},
		)
	}
}

// The overlay of a second controller has objects of its own, and shares the identity that the
// policies name.
func TestTenant(t *testing.T) {
	dir := overlayOf(t, "tenant")
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("clusterAPI: {namespaces: [south]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	objects, err := management.Kustomize(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	var made []string
	for _, o := range objects {
		made = append(made, o.GetKind()+" "+o.GetName())
		if o.GetKind() != "Deployment" {
			continue
		}
		if account, _, _ := unstructured.NestedString(o.Object, "spec", "template", "spec", "serviceAccountName"); account != "node-attestation-controller" {
			t.Errorf("it runs as %q, which the policies do not know", account)
		}
		if labels, _, _ := unstructured.NestedStringMap(o.Object, "spec", "selector", "matchLabels"); labels["app.kubernetes.io/name"] != o.GetName() {
			t.Errorf("it selects the first controller's pods: %v", labels)
		}
	}
	slices.Sort(made)
	if want := []string{
		"ConfigMap node-attestation-controller-south", "Deployment node-attestation-controller-south", "NetworkPolicy node-attestation-controller-south",
		"PodDisruptionBudget node-attestation-controller-south", "Role node-attestation-controller-replicas-south", "RoleBinding node-attestation-controller-replicas-south",
	}; !slices.Equal(made, want) {
		t.Errorf("it makes %q, not %q", made, want)
	}
	s := startWorkload(t)
	s.mustKubectl(t, "apply", "--server-side", "--validate=strict", "-k", examples+"/management")
	s.mustKubectl(t, "apply", "--server-side", "--validate=strict", "-k", dir)
	s.wantRights(t, true, right{"get update", leaseGroup, "leases", namespace, "node-attestation-controller-south"})
}

// A workload cluster takes its part as the ClusterResourceSet brings it: from the ConfigMap that
// the guide's commands make.
func TestWorkload(t *testing.T) {
	s := startWorkload(t)
	kustomize, create := command(t, "kubectl kustomize "), command(t, "kubectl create configmap ")
	folder, file, ok := strings.Cut(strings.TrimPrefix(kustomize, "kubectl kustomize "), " > ")
	if !ok {
		t.Fatal(kustomize)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, file), []byte(management.mustKubectl(t, "kustomize", filepath.Join(module, folder))), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(mustAbs(t, module+"/packaging"), filepath.Join(dir, "packaging")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	made := management.mustKubectl(t, append(strings.Fields(create)[1:], "--dry-run=server", "--output=yaml")...)
	var configMap corev1.ConfigMap
	if err := yaml.Unmarshal([]byte(made), &configMap); err != nil || len(configMap.Data) != 2 || configMap.Name != "node-attestation" {
		t.Fatalf("%v %v", configMap, err)
	}
	for _, content := range configMap.Data {
		s.mustKubectl(t, "apply", "--server-side", "--validate=strict", "--filename="+write(t, content))
	}
	if err := controllerprocess.AwaitPolicies(t.Context(), s.ControlPlane); err != nil {
		t.Fatal(err)
	}
	t.Run("rights", s.workloadRights)
	t.Run("approval", s.onlyTheUserApproves)
}

func mustAbs(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}

func (s *server) workloadRights(t *testing.T) {
	s.wantRights(t, true,
		right{"get list watch patch", csrGroup, requests, "", ""},
		right{"patch", csrGroup, requests + "/approval", "", ""},
		right{"patch", csrGroup, requests + "/status", "", ""},
		right{"approve", csrGroup, "signers", "", "cluster.x-k8s.io/attestation-hello"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kube-apiserver-client-kubelet-ec2-role"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kube-apiserver-client-kubelet-gce"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kube-apiserver-client-kubelet-azure"},
		right{"approve", csrGroup, "signers", "", certificatesv1.KubeAPIServerClientKubeletSignerName},
		right{"approve", csrGroup, "signers", "", certificatesv1.KubeletServingSignerName},
		right{"get list", "", "nodes", "", ""},
		right{"list watch", rbacGroup, "clusterrolebindings", "", ""},
		right{"create", "events.k8s.io", "events", "default", ""},
		right{"list watch", policyGroup, "validatingadmissionpolicies", "", ""},
		right{"list watch", policyGroup, "validatingadmissionpolicybindings", "", ""},
		right{"get patch", "", "namespaces/status", "", namespace},
	)
	s.wantRights(t, false,
		right{"create update patch delete", policyGroup, "validatingadmissionpolicybindings", "", ""},
		right{"get patch", "", "namespaces/status", "", "kube-system"},
		right{"approve sign", csrGroup, "signers", "", "kubernetes.io/kube-apiserver-client"},
		right{"approve sign", csrGroup, "signers", "", "cluster.x-k8s.io/kubelet-serving-tpm"},
		right{"sign", csrGroup, "signers", "", certificatesv1.KubeAPIServerClientKubeletSignerName},
		right{"create update delete", csrGroup, requests, "", ""},
		right{"get list", "", "secrets", "kube-system", ""},
		right{"get list", "", "secrets", namespace, ""},
		right{"get list", "", "configmaps", "kube-system", ""},
		right{"create", "", "pods", namespace, ""},
		right{"create update patch delete", "", "nodes", "", ""},
		right{"impersonate", "", "users", "", ""},
		right{"create update delete", rbacGroup, "clusterrolebindings", "", ""},
		right{"list watch", recordGroup, "nodeattestations", "", ""},
	)
	// What Cluster API's ClusterCache asks for to see whether it is connected.
	if err := s.controller(t).CertificatesV1().RESTClient().Get().AbsPath("/").Do(t.Context()).Error(); err != nil {
		t.Error(err)
	}
}

// The policies name the user as whom the controller acts, not the administrator whose credential it
// has.
func (s *server) onlyTheUserApproves(t *testing.T) {
	for _, signer := range []string{"cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm", certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName} {
		csr, err := s.Client().CertificatesV1().CertificateSigningRequests().Create(t.Context(), requestFor(t, signer), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		approve := func(c kubernetes.Interface) error {
			approved := []byte(`{"status":{"conditions":[{"type":"Approved","status":"True","reason":"Test"}]}}`)
			_, err := c.CertificatesV1().CertificateSigningRequests().Patch(t.Context(), csr.Name, types.MergePatchType, approved, metav1.PatchOptions{}, "approval")
			return err
		}
		if err := approve(s.Client()); !apierrors.IsForbidden(err) {
			t.Errorf("%s: an administrator approves: %v", signer, err)
		}
		if err := approve(s.as(t, "system:serviceaccount:another:node-attestation-controller", "system:masters")); !apierrors.IsForbidden(err) {
			t.Errorf("%s: a service account of another namespace approves: %v", signer, err)
		}
		if err := approve(s.controller(t)); err != nil {
			t.Errorf("%s: the controller is refused: %v", signer, err)
		}
	}
}

func requestFor(t *testing.T, signer string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: "system:node:one", Organization: []string{"system:nodes"}}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject, DNSNames: []string{"one"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	usage := certificatesv1.UsageClientAuth
	if signer == certificatesv1.KubeletServingSignerName {
		usage = certificatesv1.UsageServerAuth
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: signer, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, usage},
		},
	}
}

// A provider whose CRD has the guide's fields names its signers, and one whose CRD has not hears of
// it.
func TestContract(t *testing.T) {
	var fields string
	for _, block := range blocks(read(t, document), "yaml") {
		if rest, ok := strings.CutPrefix(block, "# status\n"); ok {
			fields = rest
		}
	}
	var properties map[string]apiextensionsv1.JSONSchemaProps
	if err := yaml.UnmarshalStrict([]byte(fields), &properties); err != nil || len(properties) != 2 {
		t.Fatalf("%v %v", properties, err)
	}
	c, err := client.New(management.AdminConfig(), client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	signers := contract.Signers{Client: "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm", Serving: "cluster.x-k8s.io/kubelet-serving-tpm"}
	set := func(t *testing.T, kind string, properties map[string]apiextensionsv1.JSONSchemaProps) error {
		object := infraCluster(t, c, kind, properties)
		before := object.GetResourceVersion()
		if err := contract.SetSigners(t.Context(), c, object, signers); err != nil {
			return err
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
			t.Fatal(err)
		}
		if got, err := contract.SignersOf(object); err != nil || got != signers || object.GetResourceVersion() == before {
			t.Errorf("%+v %v", got, err)
		}
		if err := contract.SetSigners(t.Context(), c, object, contract.Signers{}); err != nil {
			t.Error(err)
		}
		if err := contract.SetSigners(t.Context(), c, object, contract.Signers{Client: signers.Client}); !apierrors.IsConflict(err) {
			t.Errorf("on an old object: %v", err)
		}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(object), object); err != nil {
			t.Fatal(err)
		}
		if got, err := contract.SignersOf(object); err != nil || got != (contract.Signers{}) {
			t.Errorf("%+v %v", got, err)
		}
		return nil
	}
	if err := set(t, "NewCluster", properties); err != nil {
		t.Error(err)
	}
	if err := set(t, "OldCluster", nil); err == nil || !strings.Contains(err.Error(), "CRD's schema") {
		t.Errorf("without the fields: %v", err)
	}
}

// infraCluster makes an InfraCluster of a new kind, whose status has these fields.
func infraCluster(t *testing.T, c client.Client, kind string, properties map[string]apiextensionsv1.JSONSchemaProps) *unstructured.Unstructured {
	t.Helper()
	plural := strings.ToLower(kind) + "s"
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + infraGroup},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: infraGroup, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: kind, ListKind: kind + "List", Plural: plural, Singular: strings.ToLower(kind)},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1beta1", Served: true, Storage: true,
				Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{
						"spec": {Type: "object"}, "status": {Type: "object", Properties: properties},
					},
				}},
			}},
		},
	}
	if err := management.InstallCRDs(t.Context(), crd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := management.RunKubectl(context.WithoutCancel(t.Context()), management.admin, "delete", "crd", crd.Name); err != nil {
			t.Error(err)
		}
	})
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": infraGroup + "/v1beta1", "kind": kind, "metadata": map[string]any{"name": "one", "namespace": "default"}, "spec": map[string]any{},
	}}
	if err := c.Create(t.Context(), object); err != nil {
		t.Fatal(err)
	}
	return object
}

// What the guide says is shown by a test is, and all that it names are files.
func TestLinksAndAnchors(t *testing.T) {
	for _, path := range []string{document, module + "/docs/providers.md"} {
		text := read(t, path)
		headings := map[string]bool{}
		for _, h := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(text, -1) {
			anchor := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(h[1]), "")
			headings[strings.ReplaceAll(anchor, " ", "-")] = true
		}
		links := regexp.MustCompile(`\]\(([^)#]*)(?:#([^)]+))?\)`).FindAllStringSubmatch(text, -1)
		if len(links) < 3 {
			t.Errorf("%s: %d links", path, len(links))
		}
		for _, link := range links {
			if strings.Contains(link[1], "://") {
				continue
			}
			if link[1] != "" {
				if _, err := os.Stat(filepath.Join(filepath.Dir(path), link[1])); err != nil {
					t.Errorf("%s: %v", path, err)
				}
			} else if !headings[link[2]] {
				t.Errorf("%s: there is no heading %s", path, link[2])
			}
		}
	}
}
