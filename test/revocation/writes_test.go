// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	merge = "application/merge-patch+json"
	apply = "application/apply-patch+yaml"
	// deletion only tries. With ?dryRun=All and another body, the API server deletes.
	deletion = `{"apiVersion":"v1","kind":"DeleteOptions","dryRun":["All"]}`

	things = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.test}
spec:
  group: example.test
  scope: Cluster
  names: {kind: Thing, listKind: ThingList, plural: things, singular: thing}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`
)

// write is a request that changes something. "NODE", "NODEUID" and "PODUID" in it are replaced.
type write struct {
	name string
	call
	// connects is set where no kubelet answers: all that is shown is that admission passed.
	connects bool
}

// nodeWrites are those that each node may do.
var nodeWrites = []write{
	{name: "renew Lease", call: call{verb: "PATCH", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/NODE", contentType: merge, body: `{"spec":{"leaseDurationSeconds":41}}`}},
	{name: "delete Lease", call: call{verb: "DELETE", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/NODE", body: deletion}},
	{name: "patch Node", call: call{verb: "PATCH", path: "/api/v1/nodes/NODE", contentType: merge, body: `{"metadata":{"annotations":{"example.test/x":"!"}}}`}},
	{name: "apply Node", call: call{verb: "PATCH", path: "/api/v1/nodes/NODE?fieldManager=x&force=true", contentType: apply, body: `{"apiVersion":"v1","kind":"Node","metadata":{"name":"NODE","annotations":{"example.test/y":"!"}}}`}},
	{name: "patch nodes/status", call: call{verb: "PATCH", path: "/api/v1/nodes/NODE/status", contentType: "application/strategic-merge-patch+json", body: `{"status":{"conditions":[{"type":"Ready","status":"True","reason":"!"}]}}`}},
	{name: "create a mirror pod", call: call{verb: "POST", path: "/api/v1/namespaces/apps/pods?dryRun=All", body: `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"mirror-!","annotations":{"kubernetes.io/config.mirror":"x"},"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"NODE","uid":"NODEUID","controller":true}]},"spec":{"nodeName":"NODE","containers":[{"name":"c","image":"i"}]}}`}},
	{name: "patch pods/status", call: call{verb: "PATCH", path: "/api/v1/namespaces/apps/pods/bound-NODE/status", contentType: merge, body: `{"status":{"message":"!"}}`}},
	{name: "delete pod", call: call{verb: "DELETE", path: "/api/v1/namespaces/apps/pods/bound-NODE", body: deletion}},
	{name: "evict pod", call: call{verb: "POST", path: "/api/v1/namespaces/apps/pods/bound-NODE/eviction?dryRun=All", body: `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"bound-NODE"},"deleteOptions":{"dryRun":["All"]}}`}},
	{name: "create Event", call: call{verb: "POST", path: "/api/v1/namespaces/default/events", body: `{"apiVersion":"v1","kind":"Event","metadata":{"name":"e-!"},"involvedObject":{"kind":"Node","name":"NODE"},"reason":"Test","type":"Normal"}`}},
	{name: "create token of a pod's account", call: call{verb: "POST", path: "/api/v1/namespaces/apps/serviceaccounts/app/token", body: `{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest","spec":{"boundObjectRef":{"apiVersion":"v1","kind":"Pod","name":"bound-NODE","uid":"PODUID"}}}`}},
	{name: "create CSINode", call: call{verb: "POST", path: "/apis/storage.k8s.io/v1/csinodes?dryRun=All", body: `{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"name":"NODE"},"spec":{"drivers":[]}}`}},
	{name: "create ResourceSlice", call: call{verb: "POST", path: "/apis/resource.k8s.io/v1/resourceslices?dryRun=All", body: `{"apiVersion":"resource.k8s.io/v1","kind":"ResourceSlice","metadata":{"name":"s-!"},"spec":{"nodeName":"NODE","driver":"example.test","pool":{"name":"NODE","generation":1,"resourceSliceCount":1}}}`}},
	{name: "ask for a serving certificate", call: requestTo("kubernetes.io/kubelet-serving", "server auth")},
	{name: "ask the signer of kubelets", call: requestTo("kubernetes.io/kube-apiserver-client-kubelet", "client auth")},
	{name: "ask our other signer", call: requestTo("cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure", "client auth")},
	{name: "ask any signer", call: requestTo("example.test/signer", "client auth")},
	{name: "ask a signer whose name begins alike", call: requestTo(attestation.HelloSignerName+"-2", "client auth")},
}

// otherWrites need rights that an operator gave.
var otherWrites = []write{
	{name: "delete Node", call: call{verb: "DELETE", path: "/api/v1/nodes/NODE", body: deletion}},
	{name: "delete all ConfigMaps", call: call{verb: "DELETE", path: "/api/v1/namespaces/apps/configmaps", body: deletion}},
	{name: "pods/exec", connects: true, call: call{verb: "POST", path: "/api/v1/namespaces/apps/pods/bound-NODE/exec?command=x&stdout=true"}},
	{name: "pods/exec by GET", connects: true, call: call{verb: "GET", path: "/api/v1/namespaces/apps/pods/bound-NODE/exec?command=x&stdout=true"}},
	{name: "pods/portforward", connects: true, call: call{verb: "POST", path: "/api/v1/namespaces/apps/pods/bound-NODE/portforward"}},
	{name: "nodes/proxy by GET", connects: true, call: call{verb: "GET", path: "/api/v1/nodes/NODE/proxy/metrics"}},
	{name: "create CSIDriver", call: call{verb: "POST", path: "/apis/storage.k8s.io/v1/csidrivers?dryRun=All", body: `{"apiVersion":"storage.k8s.io/v1","kind":"CSIDriver","metadata":{"name":"example.test"},"spec":{}}`}},
	{name: "create custom resource", call: call{verb: "POST", path: "/apis/example.test/v1/things?dryRun=All", body: `{"apiVersion":"example.test/v1","kind":"Thing","metadata":{"name":"t-!"}}`}},
	{name: "create Secret", call: call{verb: "POST", path: "/api/v1/namespaces/apps/secrets?dryRun=All", body: `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"s-!"}}`}},
	{name: "create webhook configuration", call: call{verb: "POST", path: "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations?dryRun=All", body: `{"apiVersion":"admissionregistration.k8s.io/v1","kind":"ValidatingWebhookConfiguration","metadata":{"name":"w-!"}}`}},
	{name: "update hello", call: call{verb: "PATCH", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/hello-NODE", contentType: merge, body: `{"metadata":{"annotations":{"example.test/x":"!"}}}`}},
	{name: "approve hello", call: call{verb: "PATCH", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/hello-NODE/approval", contentType: merge, body: `{"status":{"conditions":[{"type":"Approved","status":"True","reason":"!","message":"x"}]}}`}},
	{name: "status of hello", call: call{verb: "PATCH", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/hello-NODE/status", contentType: merge, body: `{"metadata":{"annotations":{"example.test/z":"!"}}}`}},
	{name: "delete hello", call: call{verb: "DELETE", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests/hello-NODE", body: deletion}},
}

// attesting is what a revoked certificate may do, and a suspended one may not.
var attesting = []write{
	{name: "hello", call: requestTo(attestation.HelloSignerName, "client auth")},
	{name: "proof", call: requestTo(tpmSigner, "client auth")},
	{name: "proof, tried", call: tried(requestTo(tpmSigner, "client auth"))},
}

func tried(c call) call { c.path += "?dryRun=All"; return c }

// requestTo files a request for the node's name.
func requestTo(signer, usage string) call {
	return call{
		verb: "POST", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests",
		body: `{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"r-!"},"spec":{"request":"PKCS10","signerName":"` + signer + `","usages":["digital signature","` + usage + `"]}}`,
	}
}

// of is the call for a node.
func (w write) of(n *madeNode) call {
	c := w.call
	c.path, c.body = n.replace(c.path), n.replace(c.body)
	return c
}

// madeNode is a node with a pod, and with certificates: one is revoked, one is suspended, and one
// is fine.
type madeNode struct {
	name                 string
	stolen, halted, fine *credential
	replacements         *strings.Replacer
}

func (n *madeNode) replace(text string) string { return n.replacements.Replace(text) }

// makeNode makes a node with a pod and a hello.
func makeNode(t *testing.T, name string) *madeNode {
	t.Helper()
	n := &madeNode{name: name, halted: nodeCertificate(t, name)}
	n.stolen, n.fine = newNode(t, name)
	node, err := shared.admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	harness.Must(t, err)
	pod := newPod("bound-"+name, name)
	pod, err = shared.admin.CoreV1().Pods(apps).Create(t.Context(), pod, metav1.CreateOptions{})
	harness.Must(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}},
	}, key)
	harness.Must(t, err)
	request := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	n.replacements = strings.NewReplacer("NODEUID", string(node.UID), "PODUID", string(pod.UID), "NODE", name, "PKCS10", base64.StdEncoding.EncodeToString(request))
	hello := requestTo(attestation.HelloSignerName, "client auth")
	hello.body = n.replace(strings.ReplaceAll(hello.body, "r-!", "hello-NODE"))
	if a := n.fine.do(t.Context(), 0, hello); a.code != 201 {
		t.Fatal(a)
	}
	return n
}

// newPod is a pod of the account app, bound to a node unless that is empty.
func newPod(name, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: "app", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
}

// Each write with a revoked or suspended certificate is refused by each API server, and with the
// same node's other certificate it is not. What a node needs for a new certificate passes with a
// revoked one, and not with a suspended one.
func TestWritesAreRefused(t *testing.T) {
	ctx := t.Context()
	file := filepath.Join(t.TempDir(), "things.yaml")
	harness.WriteFile(t, file, []byte(things))
	crds, err := testbed.ReadCRDs(file)
	harness.Must(t, err)
	harness.Must(t, shared.InstallCRDs(ctx, crds...))
	_, err = shared.admin.CoreV1().ConfigMaps(apps).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kept"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	usual, trusted := makeNode(t, "usual"), makeNode(t, "trusted")
	_, err = shared.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "trusted"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "system:node:trusted"}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	inForceFor(t, lists{
		1: append(others(3), revoked(usual.stolen), suspended(usual.halted)),
		7: append(others(3), suspended(trusted.halted), revoked(trusted.stolen)),
	}, usual.name, usual.stolen, usual.halted)
	awaitRefused(t, trusted.name, trusted.stolen, trusted.halted)

	for _, group := range []struct {
		*madeNode
		writes []write
	}{{usual, nodeWrites}, {trusted, nodeWrites}, {trusted, otherWrites}} {
		for _, w := range group.writes {
			t.Run(group.name+"/"+w.name, func(t *testing.T) {
				what := w.of(group.madeNode)
				for server := range shared.servers {
					passes(t, group.fine, server, what, w.connects)
					if a := group.stolen.do(ctx, server, what); !a.refused(attestation.MessageRevoked) {
						t.Errorf("revoked, API server %d: %s", server, a)
					}
					if a := group.halted.do(ctx, server, what); !a.refused(attestation.MessageSuspended) {
						t.Errorf("suspended, API server %d: %s", server, a)
					}
				}
			})
		}
	}
	for _, w := range attesting {
		t.Run("attesting/"+w.name, func(t *testing.T) {
			what := w.of(usual)
			for server := range shared.servers {
				for _, c := range []*credential{usual.fine, usual.stolen} {
					if a := c.do(ctx, server, what); a.code != 201 {
						t.Errorf("API server %d: %s", server, a)
					}
				}
				if a := usual.halted.do(ctx, server, what); !a.refused(attestation.MessageSuspended) {
					t.Errorf("suspended, API server %d: %s", server, a)
				}
			}
		})
	}
	if _, err := shared.admin.CoreV1().Nodes().Get(ctx, "trusted", metav1.GetOptions{}); err != nil {
		t.Errorf("what was only tried has been done: %v", err)
	}
	t.Run("not covered", func(t *testing.T) { testNotCovered(t, trusted) })
}

// passes checks that a call succeeds. The API servers' authorizers learn of pods and rights with a
// delay.
func passes(t *testing.T, c *credential, server int, what call, connects bool) {
	t.Helper()
	var a answer
	harness.Eventually(t, limit, what.verb+" "+what.path, func() bool {
		a = c.do(t.Context(), server, what)
		if connects {
			return a.code != 403 && a.code != 404
		}
		if a.code >= 400 && os.Getenv("VERBOSE") != "" {
			t.Logf("not yet: %s", a)
		}
		return a.code == 200 || a.code == 201
	})
}

// No policy is asked about policies and reviews, nor about reads, such as logs. A node that may
// impersonate writes as somebody else. No node has rights for the first and last of these, unless
// an operator gave them.
func testNotCovered(t *testing.T, n *madeNode) {
	policy := call{verb: "PATCH", path: "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/node-attestation-revoked-09?dryRun=All", contentType: merge, body: `{"metadata":{"annotations":{"example.test/x":"!"}}}`}
	binding := call{verb: "DELETE", path: "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/node-attestation-revoked-09", body: deletion}
	for server := range shared.servers {
		for _, what := range []call{policy, binding} {
			if a := n.stolen.do(t.Context(), server, what); a.code != 200 {
				t.Errorf("%s %s: %s", what.verb, what.path, a)
			}
		}
		if a := n.stolen.do(t.Context(), server, call{verb: "GET", path: "/api/v1/namespaces/apps/pods/bound-trusted/log"}); a.refused(attestation.MessageRevoked) || a.code == 403 {
			t.Errorf("logs: %s", a)
		}
		review, err := json.Marshal(authenticationv1.SelfSubjectReview{TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "SelfSubjectReview"}})
		harness.Must(t, err)
		if a := n.stolen.do(t.Context(), server, call{verb: "POST", path: "/apis/authentication.k8s.io/v1/selfsubjectreviews", body: string(review)}); a.code != 201 {
			t.Errorf("review: %s", a)
		}
		request := n.stolen.clients[server].CoreV1().RESTClient().Patch("application/merge-patch+json").AbsPath("/api/v1/nodes/usual").
			SetHeader("Impersonate-User", "admin").SetHeader("Impersonate-Group", "system:masters").Body([]byte(`{"metadata":{"annotations":{"example.test/i":"x"}}}`))
		if err := request.Do(t.Context()).Error(); err != nil {
			t.Errorf("impersonation: %v", err)
		}
	}
}
