// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
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

// dangerous is what would make more of it than it is.
var dangerous = slices.Concat(
	rights("get list watch create", "", "secrets", namespace, ""),
	rights("list watch", "", "secrets", namespace, keySecret),
	rights("list watch", "", "secrets", namespace, caSecret),
	rights("get", "", "secrets", namespace, "another"),
	rights("get list", "", "secrets", "", ""),
	rights("get list", "", "secrets", "kube-system", ""),
	rights("update patch delete", "", "secrets", namespace, caSecret),
	rights("patch delete", "", "secrets", namespace, keySecret),
	rights("get list", "", "configmaps", namespace, ""),
	rights("list watch update patch", "", "configmaps", namespace, inventory),
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
	rights("approve sign", certs, "signers", "", servingSigner),
	rights("sign", certs, "signers", "", helloSigner),
	rights("sign", certs, "signers", "", builtinSigner),
	rights("create update delete deletecollection", certs, requests, "", ""),
	rights("update", certs, requests+"/approval", "", ""),
	rights("update", certs, requests+"/status", "", ""),
	rights("impersonate", "", "users", "", ""),
	rights("impersonate", "", "groups", "", "system:masters"),
	rights("escalate bind create update patch", rbac, "clusterroles", "", ""),
	rights("create update patch delete", rbac, "clusterrolebindings", "", ""),
	rights("create update patch delete", admission, "validatingadmissionpolicies", "", ""),
	rights("create update patch delete", admission, "validatingadmissionpolicybindings", "", ""),
	rights("create update patch", admission, "validatingadmissionpolicies/status", "", approvalPolicy),
	rights("get list update patch delete", "", "namespaces", "", namespace),
	rights("get update patch", "", "namespaces/status", "", "kube-system"),
	rights("get", "discovery.k8s.io", "endpointslices", "default", "another"),
	rights("list watch create update patch", "discovery.k8s.io", "endpointslices", "default", ""),
	rights("update", "", "namespaces/status", "", namespace),
	rights("update patch delete", "apiextensions.k8s.io", "customresourcedefinitions", "", ""),
	rights("patch delete deletecollection", recordAPI, "nodeattestations", namespace, ""),
	rights("get list watch create", recordAPI, "nodeattestations", "default", ""),
	rights("create", "", "events", "kube-system", ""),
	rights("create", eventsAPI, "events", "kube-system", ""),
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

// That it may do what it needs, and nothing that it does not, is TestRBACIsLeast's.
func TestControllerMayNothingDangerous(t *testing.T) {
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
		"patch certificatesigningrequests --subresource=approval":    "yes",
		"update certificatesigningrequests --subresource=approval":   "no",
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

// The user of the authorizer lists and watches what the authorizer needs, and may do nothing else
// of ours.
func TestAuthorizerOnlyReads(t *testing.T) {
	pair, err := shared.ClientCA().IssueClient("node-attestation-authorizer", nil, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	api, err := clientcmd.RESTConfigFromKubeConfig(shared.Kubeconfig(testbed.CertificateUser(pair)))
	harness.Must(t, err)
	authorizer, err := kubernetes.NewForConfig(api)
	harness.Must(t, err)
	harness.Must(t, shared.apply(t.Context(), "--filename="+filepath.Join(module, "packaging", "authorizer", "rbac.yaml")))
	for _, resource := range []string{"nodeattestations", "nodesuspensions", "revocationslices"} {
		for _, r := range rights("list watch", recordAPI, resource, namespace, "") {
			if !may(t, authorizer, r) {
				t.Errorf("needed, and refused: %s", r)
			}
		}
		for _, r := range append(rights("create update patch delete deletecollection", recordAPI, resource, namespace, ""), rights("list", recordAPI, resource, "default", "")...) {
			if may(t, authorizer, r) {
				t.Errorf("not needed, and allowed: %s", r)
			}
		}
	}
	for _, r := range dangerous {
		if isRead := r.resource == "nodeattestations" && r.namespace == namespace; !isRead && may(t, authorizer, r) {
			t.Errorf("dangerous, and allowed: %s", r)
		}
	}
}

// No flood of other requests stops the authorizer's reads: the API server admits them by a
// FlowSchema of the authorizer's own, which is exempt from limits.
func TestAuthorizersReadsAreExempt(t *testing.T) {
	pair, err := shared.ClientCA().IssueClient("node-attestation-authorizer", nil, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	api, err := clientcmd.RESTConfigFromKubeConfig(shared.Kubeconfig(testbed.CertificateUser(pair)))
	harness.Must(t, err)
	headers := make(chan http.Header, 1)
	api.Wrap(func(next http.RoundTripper) http.RoundTripper { return headerCopier{next, headers} })
	authorizer, err := kubernetes.NewForConfig(api)
	harness.Must(t, err)
	harness.Must(t, shared.apply(t.Context(), "--filename="+filepath.Join(module, "packaging", "authorizer", "rbac.yaml")))
	own, err := shared.Client().FlowcontrolV1().FlowSchemas().Get(t.Context(), "node-attestation-authorizer", metav1.GetOptions{})
	harness.Must(t, err)
	exempt, err := shared.Client().FlowcontrolV1().PriorityLevelConfigurations().Get(t.Context(), own.Spec.PriorityLevelConfiguration.Name, metav1.GetOptions{})
	if err != nil || exempt.Spec.Type != flowcontrolv1.PriorityLevelEnablementExempt {
		t.Fatalf("the level is not exempt: %v, %v", exempt, err)
	}
	path := "/apis/" + v1alpha1.GroupVersion.String() + "/namespaces/" + namespace + "/nodeattestations"
	harness.Eventually(t, 10*time.Second, "the API server admits the read by this FlowSchema", func() bool {
		harness.Must(t, authorizer.CoreV1().RESTClient().Get().AbsPath(path).Do(t.Context()).Error())
		return (<-headers).Get(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID) == string(own.UID)
	})
}

// headerCopier sends a copy of each answer's header.
type headerCopier struct {
	http.RoundTripper
	headers chan<- http.Header
}

func (c headerCopier) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := c.RoundTripper.RoundTrip(r)
	if err == nil {
		c.headers <- answer.Header
	}
	return answer, err
}

// The Secret of the challenge keys is part of the manifests, and what the controller has put there
// stays when they are applied again.
func TestKeyOutlivesTheManifests(t *testing.T) {
	ctx, secrets := t.Context(), shared.controller.CoreV1().Secrets(namespace)
	key, err := secrets.Get(ctx, keySecret, metav1.GetOptions{})
	if err != nil || len(key.Data) != 0 {
		t.Fatalf("the key's Secret: %v, %v", key.Data, err)
	}
	key.Data = map[string][]byte{"key": []byte("secret")}
	_, err = secrets.Update(ctx, key, metav1.UpdateOptions{})
	want(t, err)
	if _, err = secrets.Update(ctx, key, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("another replica overwrites the key: %v", err)
	}
	want(t, shared.apply(ctx, "-k", manifests))
	if key, err = secrets.Get(ctx, keySecret, metav1.GetOptions{}); err != nil || string(key.Data["key"]) != "secret" {
		t.Errorf("the key is gone after the manifests were applied again: %v, %v", key.Data, err)
	}
}

// It can neither file a request, and then approve it, nor delete what it has decided.
func TestControllerNeitherFilesNorDeletes(t *testing.T) {
	_, err := file(t.Context(), shared.controller, tpmSigner)
	wantNoRight(t, err)
	err = shared.controller.CertificatesV1().CertificateSigningRequests().Delete(t.Context(), filed(t, tpmSigner), metav1.DeleteOptions{})
	wantNoRight(t, err)
}

// Where it does not sign, Failed goes through /approval: /status asks for the verb sign.
func TestControllerFailsThroughApproval(t *testing.T) {
	for _, signer := range []string{helloSigner, builtinSigner} {
		name := filed(t, signer)
		wantNoRight(t, fail(t, shared.controller, name))
		want(t, decide(t.Context(), shared.controller, name, certificatesv1.CertificateFailed, nil))
	}
}

func TestOptionalRights(t *testing.T) {
	rows := map[string]struct{ gained, still []right }{
		"cert-manager.yaml": {
			gained: rights("approve", certs, "signers", "", certManagerSigner),
			still:  append(rights("sign", certs, "signers", "", certManagerSigner), rights("approve", certs, "signers", "", "clusterissuers.cert-manager.io/another")...),
		},
		"serving.yaml": {
			gained: rights("approve", certs, "signers", "", certificatesv1.KubeletServingSignerName),
			still:  append(rights("sign", certs, "signers", "", certificatesv1.KubeletServingSignerName), rights("approve", certs, "signers", "", "kubernetes.io/*")...),
		},
		"serving-tpm.yaml": {
			gained: rights("approve sign", certs, "signers", "", servingSigner),
			still:  rights("approve sign", certs, "signers", "", "cluster.x-k8s.io/*"),
		},
		"operators.yaml": { // for people
			still: slices.Concat(
				rights("delete", recordAPI, "nodeattestations", namespace, ""), rights("create delete", recordAPI, "noderevocations", namespace, ""),
				rights("create delete", recordAPI, "nodesuspensions", namespace, ""), rights("patch delete", "", "nodes", "", ""), rights("list delete", "", "pods", "", ""),
			),
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
			harness.Eventually(t, patience, path+": "+r.String(), func() bool { return may(t, shared.controller, r) })
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

// The credential that machines file their first request with can do that, and see what becomes of
// it.
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
		rights("get list watch create update", v1alpha1.GroupVersion.Group, "nodeattestations", namespace, ""),
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
	for _, pattern := range []string{"*_test.go", "../static/*_test.go", "../../pkg/controller/api/v1alpha1/*_test.go", "../../pkg/controller/policyset/*_test.go"} {
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
	for _, folder := range []string{manifests, filepath.Join(revocationManifests, "component")} {
		entries, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		kustomization, err := os.ReadFile(filepath.Join(folder, "kustomization.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if name := e.Name(); !e.IsDir() && name != "kustomization.yaml" && !strings.Contains(string(kustomization), "\n- "+name+"\n") {
				t.Errorf("%s of %s is not applied", name, folder)
			}
		}
	}
}
