// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	revocationManifests = manifests + "-revocation"
	listsPolicy         = "node-attestation-revocation-slices"
	announcementPolicy  = "node-attestation-announcement"
	lifetimePolicy      = "node-attestation-token-lifetime"
)

// revoking is a cluster of its own, with packaging/kubernetes-revocation.
type revoking struct {
	*testbed.ControlPlane
	admin, node     kubernetes.Interface
	adminKubeconfig string
	// fingerprint is that of the node's certificate.
	fingerprint string
}

func newRevoking(t *testing.T) *revoking {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	harness.Must(t, err)
	t.Cleanup(func() { ended(t, cp.Stop()) })
	r := &revoking{ControlPlane: cp, admin: cp.Client(), adminKubeconfig: filepath.Join(t.TempDir(), "admin.kubeconfig")}
	harness.Must(t, cp.WriteKubeconfig(r.adminKubeconfig, cp.AdminUser()))
	pair, err := cp.ClientCA().IssueClient("system:node:"+nodeName, []string{"system:nodes"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	harness.Must(t, err)
	block, _ := pem.Decode(pair.CertPEM)
	sum := sha256.Sum256(block.Bytes)
	r.fingerprint = hex.EncodeToString(sum[:])
	r.node, err = clientOf(cp.Kubeconfig(testbed.CertificateUser(pair)))
	harness.Must(t, err)
	r.apply(t, "-k", revocationManifests)
	harness.Must(t, controllerprocess.AwaitPolicies(t.Context(), cp))
	return r
}

func (r *revoking) apply(t *testing.T, args ...string) {
	t.Helper()
	_, err := r.RunKubectl(t.Context(), r.adminKubeconfig, append([]string{"apply", "--server-side", "--validate=strict", "--force-conflicts"}, args...)...)
	harness.Must(t, err)
}

// as returns the client configuration of another user.
func (r *revoking) as(user string, groups ...string) *rest.Config {
	config := r.AdminConfig()
	config.QPS = -1
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	return config
}

func (r *revoking) controller(t *testing.T) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(r.as(controllerUser, "system:serviceaccounts", "system:serviceaccounts:"+namespace))
	harness.Must(t, err)
	return client
}

// fill writes a policy as the controller does.
func (r *revoking) fill(t *testing.T, name string, spec admissionv1.ValidatingAdmissionPolicySpec) {
	t.Helper()
	api := r.controller(t).AdmissionregistrationV1().ValidatingAdmissionPolicies()
	policy, err := api.Get(t.Context(), name, metav1.GetOptions{})
	harness.Must(t, err)
	policy.Spec = spec
	_, err = api.Update(t.Context(), policy, metav1.UpdateOptions{})
	harness.Must(t, err)
}

// What packaging/kubernetes-revocation adds, on a real API server: the rights, the policies that
// guard what revocation depends on, the lists, and the optional policies.
func TestRevocation(t *testing.T) {
	t.Parallel()
	r := newRevoking(t)
	t.Run("rights", r.testRights)
	t.Run("lists", r.testLists)
	t.Run("announcement", r.testAnnouncement)
	t.Run("token lifetime", r.testTokenLifetime)
	t.Run("suspended tokens", r.testSuspendedTokens)
	t.Run("revoked", r.testRevoked)
	t.Run("type check", r.testTypeCheck)
}

// The real controller, with revocation on, is refused nothing, and uses each right that revocation
// adds.
func TestRevocationRightsAreUsed(t *testing.T) {
	t.Parallel()
	l := newLive(t)
	m := l.newMachine(t, "walk")
	l.install(t)
	component := revocationManifests + "/component/"
	l.kubectl(t, "apply", "--server-side", "--validate=strict", "--filename="+component+"crd.yaml", "--filename="+component+"policies.yaml", "--filename="+component+"guards.yaml",
		"--filename="+component+"rbac.yaml", "--filename="+component+"announcement.yaml", "--filename="+revocationManifests+"/optional/suspended-tokens.yaml")
	l.inventoried(t, m)
	l.args = []string{"--revocation"}
	l.startReady(t, nil)
	m.begin(t).succeeds(t)
	// times of objects are whole seconds: a certificate of the same second is not revoked
	time.Sleep(time.Second)
	record := func(path string) string {
		return l.kubectl(t, "get", "nodeattestations", m.Name, "--namespace="+namespace, "--output=jsonpath={"+path+"}")
	}
	api, err := dynamic.NewForConfig(l.AdminConfig())
	harness.Must(t, err)
	create := func(kind, resource, name string, spec map[string]any) {
		t.Helper()
		object := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v1alpha1.GroupVersion.String(), "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec,
		}}
		_, err := api.Resource(v1alpha1.GroupVersion.WithResource(resource)).Namespace(namespace).Create(t.Context(), object, metav1.CreateOptions{FieldValidation: strict})
		harness.Must(t, err)
	}
	for _, mode := range []v1alpha1.RevocationMode{v1alpha1.RevokeAfterRenewal, v1alpha1.RevokeImmediately} {
		create("NodeRevocation", "noderevocations", strings.ToLower(string(mode)), map[string]any{
			"cluster": record(".spec.cluster"), "all": true, "mode": string(mode), "reason": "test",
		})
		harness.Eventually(t, patience, "a status for mode "+string(mode), func() bool {
			return l.kubectl(t, "get", "noderevocations", strings.ToLower(string(mode)), "--namespace="+namespace, "--output=jsonpath={.status.nodes}") == "1"
		})
	}
	// In passing, the API server is one that does not send what there is at the start of a watch.
	l.setEnv(t, noWatchList+"=false")
	l.startReady(t, nil)
	ek := record(".spec.ek.fingerprint")
	create("NodeSuspension", "nodesuspensions", "ek-"+ek, map[string]any{"ek": ek, "reason": "test"})
	harness.Eventually(t, patience, "tokens of the suspended node are refused", func() bool {
		return strings.Contains(l.kubectl(t, "get", "validatingadmissionpolicies", revocation.TokenPolicyName, "--output=jsonpath={.spec.matchConditions}"), m.Name)
	})
	l.stop(t)

	used, forbidden := l.asked(t, 0)
	for _, e := range forbidden {
		t.Errorf("refused: %s %s", e.Verb, e.RequestURI)
	}
	for _, role := range l.roles(t) {
		if !strings.HasSuffix(role.name, "-revocation") {
			continue
		}
		for _, granted := range role.atoms() {
			if number, _ := strings.CutPrefix(granted.name, "node-attestation-revoked-"); number != granted.name && number != "01" {
				continue // the lists with other numbers are empty
			}
			if !slices.ContainsFunc(slices.Collect(maps.Keys(used)), granted.covers) {
				t.Errorf("granted, and not used: %s", granted)
			}
		}
	}
}

// packaging/kubernetes-revocation is packaging/kubernetes, with an argument and objects of its own.
func TestRevocationSetAdds(t *testing.T) {
	base, set := rendered(t, manifests), rendered(t, revocationManifests)
	var changed []string
	for name, object := range base {
		if !reflect.DeepEqual(object, set[name]) {
			changed = append(changed, name)
		}
		delete(set, name)
	}
	if want := []string{"Deployment " + namespace + "/" + account}; !slices.Equal(changed, want) {
		t.Errorf("changed: %q", changed)
	}
	// CRDs; policies, guards with bindings; roles with bindings; the ConfigMap
	if len(set) != 3+2*revocation.PolicyCount+4+8+1 {
		t.Errorf("%d objects more: %q", len(set), slices.Sorted(maps.Keys(set)))
	}
	deployment := rendered(t, revocationManifests)["Deployment "+namespace+"/"+account]
	containers, _, _ := unstructured.NestedSlice(deployment.Object, "spec", "template", "spec", "containers")
	if args := containers[0].(map[string]any)["args"].([]any); args[len(args)-1] != "--revocation" || len(args) != 3 {
		t.Errorf("arguments %q", args)
	}
}

// Both overlays of the documents work together: the one that names another controller leaves the
// policies alone that name nobody.
func TestRevocationOverlays(t *testing.T) {
	set := rendered(t, revocationManifests)
	if documented := rendered(t, documentedOverlay(t, "revocation")); !reflect.DeepEqual(documented, set) {
		t.Error("the overlay is not packaging/kubernetes-revocation")
	}
	file := filepath.Join(documentedOverlay(t, "overlay"), "kustomization.yaml")
	content, err := os.ReadFile(file)
	harness.Must(t, err)
	changed := strings.Replace(string(content), "packaging/kubernetes\n", "packaging/kubernetes-revocation\n", 1)
	harness.Must(t, os.WriteFile(file, []byte(changed), 0o600))
	for name, object := range rendered(t, filepath.Dir(file)) {
		if object.GetKind() != "ValidatingAdmissionPolicy" {
			continue
		}
		_, filled := object.GetLabels()["attestation.cluster.x-k8s.io/filled-by"]
		if same := reflect.DeepEqual(object, set[name]); same != filled {
			t.Errorf("%s is as shipped: %v", name, same)
		}
	}
}

// The controller may fill the policies by name and write what it needs, and nothing else there.
func (r *revoking) testRights(t *testing.T) {
	const policies, bindings, lists, group = "validatingadmissionpolicies", "validatingadmissionpolicybindings", "revocationslices", "attestation.cluster.x-k8s.io"
	var allowed, refused []right
	for number := range int32(revocation.PolicyCount) {
		name := revocation.PolicyName(number + 1)
		allowed = append(allowed, rights("get update", admission, policies, "", name)...)
		refused = append(refused, rights("patch delete", admission, policies, "", name)...)
		refused = append(refused, rights("get update patch delete", admission, bindings, "", name)...)
	}
	for _, name := range []string{approvalPolicy, recordsPolicy, listsPolicy, announcementPolicy, lifetimePolicy, revocation.PolicyName(revocation.PolicyCount + 1), ""} {
		refused = append(refused, rights("get update patch delete create", admission, policies, "", name)...)
		refused = append(refused, rights("get update patch delete create", admission, bindings, "", name)...)
	}
	allowed = slices.Concat(allowed,
		rights("list watch", group, "noderevocations", namespace, ""), rights("update", group, "noderevocations/status", namespace, ""),
		rights("list watch", group, "nodesuspensions", namespace, ""), rights("list watch create update", group, lists, namespace, ""),
		rights("get update", "", "configmaps", "kube-public", attestation.AnnouncementName))
	refused = slices.Concat(refused,
		rights("get create update patch delete", group, "noderevocations", namespace, ""),
		rights("create update patch delete", group, "nodesuspensions", namespace, ""),
		rights("get patch delete deletecollection", group, lists, namespace, ""), rights("list create update", group, lists, "default", ""),
		rights("create list watch", "", "configmaps", "kube-public", ""), rights("get update", "", "configmaps", "kube-public", "cluster-info"),
		rights("patch delete", "", "configmaps", "kube-public", attestation.AnnouncementName), rights("create", "", "configmaps", namespace, ""))
	controller := r.controller(t)
	for _, right := range allowed {
		harness.Eventually(t, patience, "allowed: "+right.String(), func() bool { return may(t, controller, right) })
	}
	for _, right := range refused {
		if may(t, controller, right) {
			t.Errorf("allowed: %s", right)
		}
	}
	// A node reads the announcement, and nothing else of this.
	for _, right := range rights("get", "", "configmaps", "kube-public", attestation.AnnouncementName) {
		harness.Eventually(t, patience, "a node may "+right.String(), func() bool { return may(t, r.node, right) })
	}
	for _, right := range slices.Concat(
		rights("update patch delete list watch", "", "configmaps", "kube-public", attestation.AnnouncementName), rights("get", "", "configmaps", "kube-public", "another"),
		rights("get list create delete", group, "noderevocations", namespace, ""), rights("get list create delete", group, "nodesuspensions", namespace, ""),
		rights("get list create update delete", group, lists, namespace, ""), rights("get", admission, policies, "", revocation.PolicyName(1)),
	) {
		if may(t, r.node, right) {
			t.Errorf("a node may %s", right)
		}
	}
}

// Only the controller writes lists, in any namespace. Deleting stays free.
func (r *revoking) testLists(t *testing.T) {
	const other = "another"
	_, err := r.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}}, metav1.CreateOptions{})
	harness.Must(t, err)
	api := func(user string) dynamic.ResourceInterface {
		client, err := dynamic.NewForConfig(r.as(user, "system:masters"))
		harness.Must(t, err)
		return client.Resource(v1alpha1.GroupVersion.WithResource("revocationslices")).Namespace(other)
	}
	list := func(name string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v1alpha1.GroupVersion.String(), "kind": "RevocationSlice", "metadata": map[string]any{"name": name},
			"spec": map[string]any{"cluster": "c", "number": int64(1), "certificates": []any{
				map[string]any{"sha256": r.fingerprint, "notAfter": "2030-01-02T03:04:05Z", "nodeName": nodeName},
			}},
		}}
	}
	stored, err := api(controllerUser).Create(t.Context(), list("one"), metav1.CreateOptions{FieldValidation: strict})
	harness.Must(t, err)
	owner := []any{map[string]any{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}}
	for what, c := range map[string]struct {
		user    string
		change  func(*unstructured.Unstructured)
		refused bool
	}{
		"nothing": {"admin", func(*unstructured.Unstructured) {}, false},
		"label":   {"admin", func(u *unstructured.Unstructured) { u.SetLabels(map[string]string{"a": "b"}) }, false},
		"empty":   {"admin", func(u *unstructured.Unstructured) { unstructured.RemoveNestedField(u.Object, "spec", "certificates") }, true},
		"owner":   {"admin", func(u *unstructured.Unstructured) { u.Object["metadata"].(map[string]any)["ownerReferences"] = owner }, true},
		"by the controller": {controllerUser, func(u *unstructured.Unstructured) {
			u.Object["metadata"].(map[string]any)["ownerReferences"] = owner
			unstructured.RemoveNestedField(u.Object, "spec", "certificates")
		}, false},
	} {
		changed := stored.DeepCopy()
		c.change(changed)
		_, err := api(c.user).Update(t.Context(), changed, metav1.UpdateOptions{DryRun: dryRun})
		if !c.refused {
			want(t, err)
		} else if !refusedBy(err, listsPolicy) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = api("admin").Create(t.Context(), list("planted"), metav1.CreateOptions{})
	wantRefusedBy(t, err, listsPolicy)
	want(t, api("admin").Delete(t.Context(), "one", metav1.DeleteOptions{}))
}

// Only the controller announces. Applying the manifests again keeps an announcement.
func (r *revoking) testAnnouncement(t *testing.T) {
	api := r.admin.CoreV1().ConfigMaps("kube-public")
	stored, err := api.Get(t.Context(), attestation.AnnouncementName, metav1.GetOptions{})
	harness.Must(t, err)
	if len(stored.Data) > 0 {
		t.Errorf("shipped with %v", stored.Data)
	}
	data := map[string]string{attestation.AnnouncementKey: `{"version":1,"renewals":[]}`}
	update := func(client kubernetes.Interface, change func(*corev1.ConfigMap)) error {
		changed := stored.DeepCopy()
		change(changed)
		_, err := client.CoreV1().ConfigMaps("kube-public").Update(t.Context(), changed, metav1.UpdateOptions{DryRun: dryRun})
		return err
	}
	refuse := map[string]func(*corev1.ConfigMap){
		"data":      func(c *corev1.ConfigMap) { c.Data = data },
		"binary":    func(c *corev1.ConfigMap) { c.BinaryData = map[string][]byte{"a": nil} },
		"immutable": func(c *corev1.ConfigMap) { c.Immutable = new(true) },
	}
	for what, change := range refuse {
		if err := update(r.admin, change); !refusedBy(err, announcementPolicy) {
			t.Errorf("%s: %v", what, err)
		}
	}
	want(t, update(r.admin, func(c *corev1.ConfigMap) { c.Labels["a"] = "b" }))
	want(t, update(r.admin, func(*corev1.ConfigMap) {}))
	// Others with that name or in that namespace are free.
	for place, name := range map[string]string{"kube-public": "another", "default": attestation.AnnouncementName} {
		_, err := r.admin.CoreV1().ConfigMaps(place).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data}, metav1.CreateOptions{})
		want(t, err)
	}
	changed := stored.DeepCopy()
	changed.Data = data
	_, err = r.controller(t).CoreV1().ConfigMaps("kube-public").Update(t.Context(), changed, metav1.UpdateOptions{})
	harness.Must(t, err)
	r.apply(t, "-k", revocationManifests)
	if stored, err = r.node.CoreV1().ConfigMaps("kube-public").Get(t.Context(), attestation.AnnouncementName, metav1.GetOptions{}); err != nil || stored.Data[attestation.AnnouncementKey] == "" {
		t.Errorf("after the manifests were applied again: %v, %v", stored.Data, err)
	}
	if err := update(r.admin, func(c *corev1.ConfigMap) { c.Data = nil }); !refusedBy(err, announcementPolicy) {
		t.Errorf("taken away: %v", err)
	}
	// An operator may delete it, and create it empty.
	want(t, api.Delete(t.Context(), attestation.AnnouncementName, metav1.DeleteOptions{}))
	_, err = api.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: attestation.AnnouncementName}, Data: data}, metav1.CreateOptions{})
	wantRefusedBy(t, err, announcementPolicy)
	r.apply(t, "-k", revocationManifests)
}

// podOf creates a pod on a node, and returns a request for a token of it.
func (r *revoking) podOf(t *testing.T, node string) *authenticationv1.TokenRequest {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "pods", Namespace: "default"}}
	if _, err := r.admin.CoreV1().ServiceAccounts("default").Create(t.Context(), account, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	if _, err := r.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	pod, err := r.admin.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "pod-"},
		Spec: corev1.PodSpec{
			NodeName: node, ServiceAccountName: "pods", Containers: []corev1.Container{{Name: "c", Image: "i"}},
		},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	return &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
}

func (r *revoking) token(t *testing.T, as kubernetes.Interface, request *authenticationv1.TokenRequest, seconds int64) (*authenticationv1.TokenRequest, error) {
	t.Helper()
	request = request.DeepCopy()
	if request.Spec.ExpirationSeconds = &seconds; seconds == 0 {
		request.Spec.ExpirationSeconds = nil
	}
	return as.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "pods", request, metav1.CreateOptions{})
}

// Nodes get no token that is valid for longer than a day, and others do. The API server extends
// those of 3607 seconds by itself, which the policy cannot see.
func (r *revoking) testTokenLifetime(t *testing.T) {
	request := r.podOf(t, nodeName)
	harness.Eventually(t, patience, "the Node authorizer knows the pod", func() bool {
		_, err := r.token(t, r.node, request, 86401)
		return err == nil
	})
	r.apply(t, "-f", revocationManifests+"/optional/token-lifetime.yaml")
	harness.Eventually(t, patience, "the policy is in effect", func() bool {
		_, err := r.token(t, r.node, request, 86401)
		return refusedBy(err, lifetimePolicy)
	})
	for _, seconds := range []int64{0, 600, 3600, 3607, 86400} {
		made, err := r.token(t, r.node, request, seconds)
		want(t, err)
		if seconds == 3607 && err == nil {
			if left := time.Until(tokenEnd(t, made.Status.Token)); left < 300*24*time.Hour {
				t.Errorf("a token of 3607 seconds is valid for %s: the comment in token-lifetime.yaml is out of date", left)
			}
		}
	}
	for _, seconds := range []int64{86401, 31536000, 1 << 32} {
		_, err := r.token(t, r.node, request, seconds)
		wantRefusedBy(t, err, lifetimePolicy)
	}
	_, err := r.token(t, r.admin, request, 86401)
	want(t, err)
}

// Tokens of a suspended node's pods write nothing, those of others do, and longest lists are taken.
func (r *revoking) testSuspendedTokens(t *testing.T) {
	r.apply(t, "-f", revocationManifests+"/optional/suspended-tokens.yaml")
	_, err := r.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), clusterAdmin("pods", "system:serviceaccount:default:pods"), metav1.CreateOptions{})
	harness.Must(t, err)
	client := func(node string) kubernetes.Interface {
		made, err := r.token(t, r.admin, r.podOf(t, node), 3600)
		harness.Must(t, err)
		client, err := kubernetes.NewForConfig(&rest.Config{Host: r.ServerURL(), BearerToken: made.Status.Token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: r.ServerCA()}})
		harness.Must(t, err)
		return client
	}
	suspended, other := client(nodeName), client("node-2")
	write := func(client kubernetes.Interface) error {
		_, err := client.CoreV1().ConfigMaps("default").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "a-"}}, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	harness.Eventually(t, patience, "a pod may write", func() bool { return write(suspended) == nil })
	full := func(length int) []string {
		nodes := []string{nodeName}
		for i := range 10_000 {
			nodes = append(nodes, fmt.Sprintf("z%0*d", length-1, i))
		}
		return nodes
	}
	for what, nodes := range map[string][]string{"one": {nodeName}, "long names": full(253), "short names": full(8)} {
		spec, omitted, err := revocation.RenderTokenPolicy(nodes)
		harness.Must(t, err)
		r.fill(t, revocation.TokenPolicyName, spec)
		harness.Eventually(t, patience, what+": the policy is in effect", func() bool { return refusedBy(write(suspended), revocation.TokenPolicyName) })
		want(t, write(other))
		want(t, write(r.admin))
		t.Logf("%s: %d names", what, len(nodes)-len(omitted))
		spec, _, err = revocation.RenderTokenPolicy(nil)
		harness.Must(t, err)
		r.fill(t, revocation.TokenPolicyName, spec)
		harness.Eventually(t, patience, "resumed", func() bool { return write(suspended) == nil })
	}
}

// A revoked certificate writes nothing but hellos, and the API server's metric that the alert is
// from counts it.
func (r *revoking) testRevoked(t *testing.T) {
	signers := []string{helloSigner, tpmSigner}
	write := func() error {
		_, err := r.node.CoordinationV1().Leases("kube-node-lease").Create(t.Context(), nodeLease(), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	harness.Eventually(t, patience, "the node may write", func() bool { return write() == nil })
	policy := revocation.PolicyName(4)
	spec, err := revocation.RenderPolicy(v1alpha1.RevocationSliceSpec{Certificates: []v1alpha1.RevokedCertificate{{SHA256: r.fingerprint, NodeName: nodeName}}}, signers)
	harness.Must(t, err)
	r.fill(t, policy, spec)
	harness.Eventually(t, patience, "the certificate is refused", func() bool { return refusedBy(write(), policy) })
	if err := write(); err == nil || !strings.Contains(err.Error(), attestation.MessageRevoked) {
		t.Error(err)
	}
	_, err = file(t.Context(), r.node, helloSigner)
	want(t, err)
	_, err = file(t.Context(), r.node, kubeletServing)
	wantRefusedBy(t, err, policy)
	served, err := r.admin.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	harness.Must(t, err)
	metric := `apiserver_validating_admission_policy_check_total{enforcement_action="deny",error_type="invalid_error",policy="` + policy + `",policy_binding="` + policy + `"} `
	if !strings.Contains(string(served), "\n"+metric) {
		t.Errorf("the API server has no %s, but %q", metric, regexp.MustCompile(`(?m)^.*check_total.*$`).FindAllString(string(served), -1))
	}
	// Applying the manifests again is a moment without the list.
	r.apply(t, "-k", revocationManifests)
	harness.Eventually(t, patience, "the list is empty", func() bool { return write() == nil })
}

// The expressions fit the API server's schemas, where it checks that.
func (r *revoking) testTypeCheck(t *testing.T) {
	harness.Must(t, r.StartControllerManager(t.Context(), "--controllers=validatingadmissionpolicy-status-controller"))
	names := []string{listsPolicy, announcementPolicy, lifetimePolicy, revocation.TokenPolicyName, revocation.PolicyName(1)}
	for _, name := range names {
		harness.Eventually(t, patience, name+" is type-checked", func() bool {
			policy, err := r.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(t.Context(), name, metav1.GetOptions{})
			harness.Must(t, err)
			if policy.Status.ObservedGeneration != policy.Generation || policy.Status.TypeChecking == nil {
				return false
			}
			for _, warning := range policy.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", name, warning.FieldRef, warning.Warning)
			}
			return true
		})
	}
	harness.Must(t, r.StopControllerManager())
}

// tokenEnd returns when a token ends, by its own claim.
func tokenEnd(t *testing.T, token string) time.Time {
	t.Helper()
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		t.Fatalf("%d parts", len(parts))
	}
	content, err := base64.RawURLEncoding.DecodeString(parts[1])
	harness.Must(t, err)
	var claims struct {
		Exp int64 `json:"exp"`
	}
	harness.Must(t, json.Unmarshal(content, &claims))
	return time.Unix(claims.Exp, 0)
}

func clusterAdmin(name, user string) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{APIGroup: rbac, Kind: rbacv1.UserKind, Name: user}},
	}
}

func nodeLease() *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Namespace: "kube-node-lease"}}
}
