// SPDX-License-Identifier: Apache-2.0

// Package revocation tests the admission policies for revoked certificates without the controller,
// on two real API servers of one cluster, with client certificates of nodes. The package stories
// has the controller, too.
package revocation

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	policies = "../../packaging/kubernetes-revocation/component/policies.yaml"

	tpmSigner = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"
	// apps is the namespace of the pods.
	apps = "apps"

	// inForce is the time that an update of a policy has to take effect in each API server: it
	// looks for changes once a second. limit is that with slack for a busy machine.
	inForce = 2 * time.Second
	limit   = 10 * time.Second
)

// signers are those that a revoked certificate may still ask.
var signers = []string{attestation.HelloSignerName, tpmSigner}

// bed is what all tests share. They run one after the other. Each has nodes of its own, and leaves
// the policies empty.
type bed struct {
	*testbed.ControlPlane
	servers [2]*testbed.APIServer
	admin   kubernetes.Interface
	// issued are the certificates of nodes. One that was never revoked is current.
	issued []*credential
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		shared = &bed{ControlPlane: cp, admin: cp.Client()}
		return shared.prepare(ctx, filepath.Join(dir, "admin.kubeconfig"))
	}))
}

// prepare applies the policies as they are shipped, and starts the second API server.
func (b *bed) prepare(ctx context.Context, kubeconfig string) error {
	second, err := b.AddAPIServer(ctx)
	if err != nil {
		return err
	}
	b.servers = [2]*testbed.APIServer{b.APIServer(), second}
	if err := b.WriteKubeconfig(kubeconfig, b.AdminUser()); err != nil {
		return err
	}
	if _, err := b.RunKubectl(ctx, kubeconfig, "apply", "--server-side", "--validate=strict", "--filename="+policies); err != nil {
		return err
	}
	_, err = b.admin.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: apps}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = b.admin.CoreV1().ServiceAccounts(apps).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "app"}}, metav1.CreateOptions{})
	return err
}

// credential is what a request is authenticated with, and a client of each API server.
type credential struct {
	// node and sha256 are those of a node's certificate.
	node, sha256 string
	clients      [2]kubernetes.Interface
	// revoked says that the certificate was on a list.
	revoked bool
}

// certificateOf issues a client certificate for a user with groups.
func certificateOf(t *testing.T, user string, groups ...string) *credential {
	t.Helper()
	pair, err := shared.ClientCA().IssueClient(user, groups, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	return pairCredential(t, pair)
}

func nodeCertificate(t *testing.T, node string) *credential {
	t.Helper()
	c := certificateOf(t, "system:node:"+node, "system:nodes")
	c.node = node
	shared.issued = append(shared.issued, c)
	return c
}

func tokenCredential(t *testing.T, token string) *credential {
	t.Helper()
	return credentialOf(t, "", func(s *testbed.APIServer) []byte { return s.Kubeconfig(testbed.TokenUser(token)) })
}

func credentialOf(t *testing.T, sum string, kubeconfig func(*testbed.APIServer) []byte) *credential {
	t.Helper()
	c := &credential{sha256: sum}
	for i, s := range shared.servers {
		config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig(s))
		harness.Must(t, err)
		config.QPS = -1
		c.clients[i], err = kubernetes.NewForConfig(config)
		harness.Must(t, err)
	}
	return c
}

// call is a request as it goes over the wire.
type call struct {
	verb, path, body string
	// contentType is application/json, unless it is set.
	contentType string
}

// answer is what an API server answered.
type answer struct {
	code    int
	message string
}

func (a answer) String() string { return fmt.Sprintf("%d %.200q", a.code, a.message) }

// refused reports whether a policy answered with this message.
func (a answer) refused(message string) bool {
	return a.code == 403 && strings.Contains(a.message, message)
}

// do sends a call to one of the API servers. "!" in its path and body becomes text that is unique.
func (c *credential) do(ctx context.Context, server int, what call) answer {
	unique := strings.ToLower(rand.Text())
	contentType := what.contentType
	if contentType == "" {
		contentType = "application/json"
	}
	request := c.clients[server].CoreV1().RESTClient().Verb(what.verb).RequestURI(strings.ReplaceAll(what.path, "!", unique))
	if what.body != "" {
		request = request.SetHeader("Content-Type", contentType).Body([]byte(strings.ReplaceAll(what.body, "!", unique)))
	}
	var a answer
	err := request.MaxRetries(0).Do(ctx).StatusCode(&a.code).Error()
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		a.code, a.message = int(status.Status().Code), status.Status().Message
	} else if err != nil {
		a.message = err.Error()
	}
	return a
}

// renewal is what a kubelet does every 10 s. The node's Lease exists.
func renewal(node string) call {
	return call{
		verb: "PATCH", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/" + node, contentType: "application/merge-patch+json",
		body: `{"spec":{"renewTime":"` + time.Now().UTC().Format(metav1.RFC3339Micro) + `"}}`,
	}
}

// lists are the certificates of policies, by the policies' numbers.
type lists map[int32][]v1alpha1.RevokedCertificate

// revoked is an entry for a certificate.
func revoked(c *credential) v1alpha1.RevokedCertificate {
	c.revoked = true
	return v1alpha1.RevokedCertificate{SHA256: c.sha256, NodeName: c.node}
}

func suspended(c *credential) v1alpha1.RevokedCertificate {
	entry := revoked(c)
	entry.Suspended = true
	return entry
}

// others are so many certificates of other nodes, each of another one.
func others(count int) []v1alpha1.RevokedCertificate {
	list := make([]v1alpha1.RevokedCertificate, count)
	for i := range list {
		sum := sha256.Sum256([]byte(rand.Text()))
		list[i].SHA256 = hex.EncodeToString(sum[:])
		list[i].NodeName = "ip-10-0-" + list[i].SHA256[:8] + ".compute.internal"
	}
	return list
}

// withCurrent returns the content of a list: revoked certificates, and the current ones of their
// nodes.
func withCurrent(list []v1alpha1.RevokedCertificate) v1alpha1.RevocationSliceSpec {
	content := v1alpha1.RevocationSliceSpec{Certificates: list}
	nodes := map[string]bool{}
	for _, c := range list {
		nodes[c.NodeName] = true
	}
	for _, c := range shared.issued {
		if nodes[c.node] && !c.revoked {
			content.Current = append(content.Current, v1alpha1.CurrentCertificate{SHA256: c.sha256, NodeName: c.node})
		}
	}
	return content
}

// fill writes lists into policies, as the controller does. It does not wait until they are in
// force.
func fill(ctx context.Context, what lists) error {
	for number, list := range what {
		spec, err := revocation.RenderPolicy(withCurrent(list), signers)
		if err != nil {
			return err
		}
		if err := writePolicy(ctx, number, spec); err != nil {
			return err
		}
	}
	return nil
}

func writePolicy(ctx context.Context, number int32, spec admissionv1.ValidatingAdmissionPolicySpec) error {
	api := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	policy, err := api.Get(ctx, revocation.PolicyName(number), metav1.GetOptions{})
	if err != nil {
		return err
	}
	policy.Spec = spec
	_, err = api.Update(ctx, policy, metav1.UpdateOptions{})
	return err
}

// inForceFor fills policies, and waits until each API server refuses these certificates of a node.
// It returns how long each API server took. The test empties the policies at its end.
func inForceFor(t *testing.T, what lists, node string, certificates ...*credential) [2]time.Duration {
	t.Helper()
	t.Cleanup(func() {
		empty := lists{}
		for number := range what {
			empty[number] = nil
		}
		if err := fill(context.WithoutCancel(t.Context()), empty); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, fill(t.Context(), what))
	return awaitRefused(t, node, certificates...)
}

// awaitRefused waits until each API server refuses each of the certificates. It returns how long
// each took.
func awaitRefused(t *testing.T, node string, certificates ...*credential) (took [2]time.Duration) {
	t.Helper()
	began := time.Now()
	last := func(server int) answer {
		for _, c := range certificates {
			a := c.do(t.Context(), server, renewal(node))
			if !a.refused(attestation.MessageRevoked) && !a.refused(attestation.MessageSuspended) {
				return a
			}
		}
		return answer{}
	}
	for done := [2]bool{}; !done[0] || !done[1]; time.Sleep(2 * time.Millisecond) {
		for server := range shared.servers {
			a := last(server)
			if !done[server] && a == (answer{}) {
				took[server], done[server] = time.Since(began), true
			}
			if !done[server] && time.Since(began) > limit {
				t.Fatalf("API server %d after %s: %s", server, limit, a)
			}
		}
	}
	return took
}

// newNode makes a Node with a Lease, as a kubelet has them, and two certificates of it.
func newNode(t *testing.T, name string) (stolen, other *credential) {
	t.Helper()
	stolen, other = nodeCertificate(t, name), nodeCertificate(t, name)
	for _, c := range []call{
		{verb: "POST", path: "/api/v1/nodes", body: `{"apiVersion":"v1","kind":"Node","metadata":{"name":"` + name + `"}}`},
		{
			verb: "POST", path: "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
			body: `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"` + name + `"},"spec":{"holderIdentity":"` + name + `","leaseDurationSeconds":40}}`,
		},
	} {
		if a := other.do(t.Context(), 0, c); a.code != 201 {
			t.Fatalf("%s: %s", c.path, a)
		}
	}
	return stolen, other
}
