// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// right is something to be allowed. In short: verb, group, resource[/subresource], namespace, name.
type right struct{ verb, group, resource, namespace, name string }

func (r right) String() string {
	return strings.TrimSpace(strings.Join([]string{r.verb, r.group + "/" + r.resource, r.name, r.namespace}, " "))
}

func (r right) attributes() *authorizationv1.ResourceAttributes {
	resource, subresource, _ := strings.Cut(r.resource, "/")
	return &authorizationv1.ResourceAttributes{Verb: r.verb, Group: r.group, Resource: resource, Subresource: subresource, Namespace: r.namespace, Name: r.name}
}

const (
	certs    = "certificates.k8s.io"
	rbac     = "rbac.authorization.k8s.io"
	requests = "certificatesigningrequests"
	lease    = "coordination.k8s.io"
)

// needed is all that the controller does.
var needed = append(slices.Concat(
	rights("get list watch", "attestation.cluster.x-k8s.io", "nodeattestations", namespace, ""),
	rights("create update patch delete", "attestation.cluster.x-k8s.io", "nodeattestations", namespace, ""),
	rights("get list watch patch", certs, requests, "", ""),
	rights("update", certs, requests+"/approval", "", ""),
	rights("update", certs, requests+"/status", "", ""),
	rights("approve", certs, "signers", "", helloSigner),
	rights("approve", certs, "signers", "", tpmSigner),
	rights("approve", certs, "signers", "", servingSigner),
	rights("approve", certs, "signers", "", builtinSigner),
	rights("sign", certs, "signers", "", tpmSigner),
	rights("sign", certs, "signers", "", servingSigner),
	rights("get list watch", "", "nodes", "", ""),
	rights("get list watch", rbac, "clusterrolebindings", "", ""),
	rights("create patch", "", "events", "default", ""),
	rights("create patch", "events.k8s.io", "events", "default", ""),
	rights("get list watch update", "", "secrets", namespace, "node-attestation-controller-key"),
	rights("get list watch", "", "secrets", namespace, "node-attestation-ca"),
	rights("get list watch", "", "configmaps", namespace, "node-attestation-inventory"),
	rights("create", lease, "leases", namespace, ""),
), rights("get update", lease, "leases", namespace, account)...)

// dangerous is what would make more of it than it is.
var dangerous = slices.Concat(
	rights("get list watch create", "", "secrets", namespace, ""),
	rights("get", "", "secrets", namespace, "another"),
	rights("get list", "", "secrets", "", ""),
	rights("get list", "", "secrets", "kube-system", ""),
	rights("update patch delete", "", "secrets", namespace, "node-attestation-ca"),
	rights("patch delete", "", "secrets", namespace, "node-attestation-controller-key"),
	rights("list", "", "configmaps", namespace, ""),
	rights("update patch", "", "configmaps", namespace, "node-attestation-inventory"),
	rights("update", lease, "leases", namespace, "another"),
	rights("get update", lease, "leases", "kube-node-lease", nodeName),
	rights("create", "", "serviceaccounts/token", namespace, account),
	rights("create", "", "pods", namespace, ""),
	rights("create", "", "pods/exec", "", ""),
	rights("update patch delete create", "", "nodes", "", ""),
	rights("approve sign", certs, "signers", "", "kubernetes.io/kube-apiserver-client"),
	rights("approve sign", certs, "signers", "", "kubernetes.io/*"),
	rights("approve sign", certs, "signers", "", "cluster.x-k8s.io/*"),
	rights("approve sign", certs, "signers", "", "kubernetes.io/kubelet-serving"),
	rights("approve sign", certs, "signers", "", insecureSigner),
	rights("sign", certs, "signers", "", helloSigner),
	rights("sign", certs, "signers", "", builtinSigner),
	rights("create update delete deletecollection", certs, requests, "", ""),
	rights("impersonate", "", "users", "", ""),
	rights("impersonate", "", "groups", "", "system:masters"),
	rights("escalate bind create update patch", rbac, "clusterroles", "", ""),
	rights("create update patch delete", rbac, "clusterrolebindings", "", ""),
	rights("create update delete", "admissionregistration.k8s.io", "validatingadmissionpolicies", "", ""),
	rights("create update delete", "admissionregistration.k8s.io", "validatingadmissionpolicybindings", "", ""),
	rights("update patch delete", "apiextensions.k8s.io", "customresourcedefinitions", "", ""),
	rights("deletecollection", "attestation.cluster.x-k8s.io", "nodeattestations", namespace, ""),
	rights("get", "attestation.cluster.x-k8s.io", "nodeattestations", "default", ""),
	rights("*", "*", "*", "", ""),
)

func rights(verbs, group, resource, namespace, name string) []right {
	var all []right
	for verb := range strings.FieldsSeq(verbs) {
		all = append(all, right{verb, group, resource, namespace, name})
	}
	return all
}

// may asks the API server on behalf of the client.
func may(t *testing.T, client kubernetes.Interface, r right) bool {
	t.Helper()
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: r.attributes()}}
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Allowed
}

func TestControllerMayWhatItNeedsAndNoMore(t *testing.T) {
	for _, r := range needed {
		if !may(t, shared.controller, r) {
			t.Errorf("needed, and refused: %s", r)
		}
	}
	for _, r := range dangerous {
		if may(t, shared.controller, r) {
			t.Errorf("dangerous, and allowed: %s", r)
		}
	}
	// As an administrator would ask.
	for question, answer := range map[string]string{
		"list secrets -n " + namespace:                               "no",
		"get secrets/node-attestation-ca -n " + namespace:            "yes",
		"impersonate users":                                          "no",
		"escalate clusterroles":                                      "no",
		"create nodeattestations -n " + namespace:                    "yes",
		"update certificatesigningrequests --subresource=approval":   "yes",
		"delete validatingadmissionpolicies/" + approvalPolicy:       "no",
		"create serviceaccounts --subresource=token -n " + namespace: "no",
	} {
		out, _ := shared.RunKubectl(t.Context(), shared.adminKubeconfig,
			append([]string{"auth", "can-i", "--as=" + controllerUser}, strings.Fields(question)...)...)
		if strings.TrimSpace(out) != answer {
			t.Errorf("kubectl auth can-i %s: %q, not %q", question, out, answer)
		}
	}
}

// atom is one verb on one resource, of one name where there are names: the least that can be taken away from a role.
type atom struct{ rule, verb, group, resource, name int }

func atoms(rules []rbacv1.PolicyRule) []atom {
	var all []atom
	for i, rule := range rules {
		for v := range rule.Verbs {
			for g := range rule.APIGroups {
				for r := range rule.Resources {
					for n := range max(1, len(rule.ResourceNames)) {
						all = append(all, atom{i, v, g, r, n})
					}
				}
			}
		}
	}
	return all
}

// without returns the rules without the atom, and what it is called.
func without(rules []rbacv1.PolicyRule, missing atom) (left []rbacv1.PolicyRule, what string) {
	for _, a := range atoms(rules) {
		rule := rules[a.rule]
		one := rbacv1.PolicyRule{Verbs: []string{rule.Verbs[a.verb]}, APIGroups: []string{rule.APIGroups[a.group]}, Resources: []string{rule.Resources[a.resource]}}
		if len(rule.ResourceNames) > 0 {
			one.ResourceNames = []string{rule.ResourceNames[a.name]}
		}
		if a == missing {
			what = strings.TrimSpace(one.Verbs[0] + " " + one.APIGroups[0] + "/" + one.Resources[0] + " " + strings.Join(one.ResourceNames, ""))
		} else {
			left = append(left, one)
		}
	}
	return left, what
}

// Each verb is taken away in turn: exactly one thing that the controller needs is then missed. So none is there for nothing.
func TestRBACIsLeast(t *testing.T) {
	ctx := t.Context()
	cluster, err := shared.admin.RbacV1().ClusterRoles().Get(ctx, account, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	local, err := shared.admin.RbacV1().Roles(namespace).Get(ctx, account, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	missed := map[right]int{}
	number := 0
	lessBy := func(namespaced bool, rules []rbacv1.PolicyRule) {
		for _, a := range atoms(rules) {
			number++
			left, what := without(rules, a)
			group := fmt.Sprintf("less-by-one-%d", number)
			clusterRules, localRules := cluster.Rules, local.Rules
			if namespaced {
				localRules = left
			} else {
				clusterRules = left
			}
			bindRoles(t, group, clusterRules, localRules)
			var gone []right
			eventually(t, "without "+what+" one right is missed", func() bool {
				gone = nil
				for _, r := range needed {
					if !groupMay(ctx, t, group, r) {
						gone = append(gone, r)
						if len(gone) > 1 {
							return false // not yet known to the authorizer
						}
					}
				}
				return len(gone) == 1
			})
			missed[gone[0]]++
		}
	}
	lessBy(false, cluster.Rules)
	lessBy(true, local.Rules)
	for _, r := range needed {
		if missed[r] != 1 {
			t.Errorf("%s was missed %d times", r, missed[r])
		}
	}
	t.Logf("%d verbs taken away", number)
}

func bindRoles(t *testing.T, group string, cluster, local []rbacv1.PolicyRule) {
	t.Helper()
	meta := metav1.ObjectMeta{Name: group}
	subjects := []rbacv1.Subject{{APIGroup: rbac, Kind: rbacv1.GroupKind, Name: group}}
	api := shared.admin.RbacV1()
	_, err := api.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: cluster}, metav1.CreateOptions{})
	if err == nil {
		_, err = api.Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: local}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = api.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "ClusterRole", Name: group},
		}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = api.RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: meta, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbac, Kind: "Role", Name: group},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_ = api.ClusterRoleBindings().Delete(ctx, group, metav1.DeleteOptions{})
		_ = api.RoleBindings(namespace).Delete(ctx, group, metav1.DeleteOptions{})
		_ = api.ClusterRoles().Delete(ctx, group, metav1.DeleteOptions{})
		_ = api.Roles(namespace).Delete(ctx, group, metav1.DeleteOptions{})
	})
}

func groupMay(ctx context.Context, t *testing.T, group string, r right) bool {
	t.Helper()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "nobody", Groups: []string{group}, ResourceAttributes: r.attributes()}}
	answer, err := shared.admin.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Status.Allowed
}

// One enrolment as the controller goes through it, with a token of its service account: the list above is what it really takes.
func TestControllerWorksWithItsOwnRights(t *testing.T) {
	ctx, c := t.Context(), shared.controller
	step := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Its key, in the Secret that is there, empty.
	key, err := c.CoreV1().Secrets(namespace).Get(ctx, "node-attestation-controller-key", metav1.GetOptions{})
	if err != nil || len(key.Data) != 0 {
		t.Fatalf("the key's Secret: %v, %v", key.Data, err)
	}
	key.Data = map[string][]byte{"key": []byte("secret")}
	_, err = c.CoreV1().Secrets(namespace).Update(ctx, key, metav1.UpdateOptions{})
	step("write the key", err)
	_, err = c.CoreV1().Secrets(namespace).Update(ctx, key, metav1.UpdateOptions{})
	if err == nil {
		t.Error("another replica overwrites the key")
	}
	step("apply the manifests again", shared.apply(ctx, "-k", manifests))
	if key, err = c.CoreV1().Secrets(namespace).Get(ctx, key.Name, metav1.GetOptions{}); err != nil || string(key.Data["key"]) != "secret" {
		t.Errorf("the key is gone after the manifests were applied again: %v, %v", key.Data, err)
	}
	named := metav1.ListOptions{FieldSelector: "metadata.name=node-attestation-ca"}
	_, err = c.CoreV1().Secrets(namespace).List(ctx, named)
	step("list the CA's Secret by name", err)
	watch, err := c.CoreV1().Secrets(namespace).Watch(ctx, named)
	step("watch the CA's Secret by name", err)
	if err == nil {
		watch.Stop()
	}
	_, err = c.CoreV1().Secrets(namespace).List(ctx, metav1.ListOptions{})
	wantNoRight(t, err)

	leader := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: account, Namespace: namespace}}
	leader, err = c.CoordinationV1().Leases(namespace).Create(ctx, leader, metav1.CreateOptions{})
	step("create the lease", err)
	_, err = c.CoordinationV1().Leases(namespace).Update(ctx, leader, metav1.UpdateOptions{})
	step("renew the lease", err)

	hello, proof := filed(t, helloSigner), filed(t, tpmSigner)
	challenge := map[string]any{"metadata": map[string]any{"annotations": map[string]any{attestation.AnnotationChallenge: "{}"}}}
	step("challenge", patch(t, c, types.MergePatchType, hello, challenge))
	record := fullRecord("walk")
	_, err = create(t, record, nil)
	step("record", err)
	step("approve", approve(t, c, proof))
	step("issue", issue(t, c, proof))
	step("close the hello", decide(ctx, c, hello, certificatesv1.CertificateFailed, nil))
	step("forget", records(t).Delete(ctx, record.Name, metav1.DeleteOptions{}))
	about := corev1.ObjectReference{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequest", Name: proof}
	_, err = c.CoreV1().Events("default").Create(ctx, &corev1.Event{ObjectMeta: metav1.ObjectMeta{GenerateName: "x"}, InvolvedObject: about}, metav1.CreateOptions{})
	step("event", err)
	_, err = c.EventsV1().Events("default").Create(ctx, &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "x"}, EventTime: metav1.NowMicro(), ReportingController: "x/y", ReportingInstance: "z",
		Action: "Approve", Reason: "Approved", Type: "Normal", Regarding: about,
	}, metav1.CreateOptions{})
	step("event of events.k8s.io", err)
	if _, err := c.RbacV1().ClusterRoleBindings().List(ctx, metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := c.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
	wantNoRight(t, c.CertificatesV1().CertificateSigningRequests().Delete(ctx, proof, metav1.DeleteOptions{}))
	// It cannot file a request and then approve it.
	_, err = file(ctx, c, tpmSigner)
	wantNoRight(t, err)
	// Where it does not sign, Failed goes through /approval: /status asks for the verb sign.
	for _, signer := range []string{helloSigner, builtinSigner} {
		name := filed(t, signer)
		wantNoRight(t, fail(t, c, name))
		step("fail a request of "+signer, decide(ctx, c, name, certificatesv1.CertificateFailed, nil))
	}
}

func TestOptionalRights(t *testing.T) {
	kubeadm := []string{"kubeadm:node-autoapprove-bootstrap", "kubeadm:node-autoapprove-certificate-rotation"}
	rows := map[string]struct{ gained, still []right }{
		"remove-bindings.yaml": {
			gained: append(rights("delete", rbac, "clusterrolebindings", "", kubeadm[0]), rights("delete", rbac, "clusterrolebindings", "", kubeadm[1])...),
			still:  append(rights("delete", rbac, "clusterrolebindings", "", "cluster-admin"), rights("delete", rbac, "clusterrolebindings", "", "")...),
		},
		"insecure.yaml": {
			gained: rights("approve sign", certs, "signers", "", insecureSigner),
			still:  rights("approve sign", certs, "signers", "", "cluster.x-k8s.io/*"),
		},
	}
	files, err := filepath.Glob(filepath.Join(manifests, "optional", "*.yaml"))
	if err != nil || len(files) != len(rows) {
		t.Fatalf("files %v, %v", files, err)
	}
	for _, path := range files {
		row := rows[filepath.Base(path)]
		for _, r := range row.gained {
			if may(t, shared.controller, r) {
				t.Errorf("allowed without %s: %s", path, r)
			}
		}
		want(t, shared.apply(t.Context(), "-f", path))
		for _, r := range row.gained {
			eventually(t, path+": "+r.String(), func() bool { return may(t, shared.controller, r) })
		}
		for _, r := range row.still {
			if may(t, shared.controller, r) {
				t.Errorf("%s allows %s", path, r)
			}
		}
		if _, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "delete", "-f", path); err != nil {
			t.Error(err)
		}
	}
}

// The credential that machines file their first request with can do that, and see what becomes of it.
func TestRequestersRights(t *testing.T) {
	const group = "example:machines"
	if err := shared.BindGroup(t.Context(), "machines", "node-attestation-requester", group); err != nil {
		t.Fatal(err)
	}
	machine := as(t, "machine", group)
	name, err := file(t.Context(), machine, helloSigner)
	want(t, err)
	_, err = machine.CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
	want(t, err)
	watch, err := machine.CertificatesV1().CertificateSigningRequests().Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	want(t, err)
	if err == nil {
		watch.Stop()
	}
	for _, r := range slices.Concat(
		rights("list update patch delete", certs, requests, "", ""),
		rights("update patch", certs, requests+"/approval", "", ""),
		rights("update patch", certs, requests+"/status", "", ""),
		rights("approve sign", certs, "signers", "", tpmSigner),
		rights("get list", "", "nodes", "", ""),
		rights("get list", "", "secrets", "", ""),
		rights("get list create update", v1alpha1.GroupVersion.Group, "nodeattestations", namespace, ""),
	) {
		if may(t, machine, r) {
			t.Errorf("a machine may %s", r)
		}
	}
	wantNoRight(t, approve(t, machine, name))
}

// Nodes and bootstrap tokens neither see records nor write them.
func TestMachinesDoNotTouchRecords(t *testing.T) {
	for who, client := range map[string]kubernetes.Interface{"node": shared.node, "bootstrap token": shared.bootstrapper} {
		for _, r := range rights("get list watch create update patch delete", v1alpha1.GroupVersion.Group, "nodeattestations", namespace, "") {
			if may(t, client, r) {
				t.Errorf("%s may %s", who, r)
			}
		}
	}
}

// What docs/cluster-setup.md says is shown by a test is.
func TestDocumentedTestsExist(t *testing.T) {
	document, err := os.ReadFile("../../docs/cluster-setup.md")
	if err != nil {
		t.Fatal(err)
	}
	var source strings.Builder
	for _, pattern := range []string{"*_test.go", "../../pkg/controller/api/v1alpha1/*_test.go"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(data)
		}
	}
	names := regexp.MustCompile("`(Test[A-Za-z]+)`").FindAllStringSubmatch(string(document), -1)
	if len(names) < 20 {
		t.Fatalf("only %d names", len(names))
	}
	for _, name := range names {
		if !strings.Contains(source.String(), "\nfunc "+name[1]+"(") {
			t.Errorf("there is no %s", name[1])
		}
	}
}

func TestManifestsAreAllListed(t *testing.T) {
	entries, err := os.ReadDir(manifests)
	if err != nil {
		t.Fatal(err)
	}
	kustomization, err := os.ReadFile(filepath.Join(manifests, "kustomization.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); !e.IsDir() && name != "kustomization.yaml" && !strings.Contains(string(kustomization), "\n- "+name+"\n") {
			t.Errorf("%s is not applied", name)
		}
	}
}
