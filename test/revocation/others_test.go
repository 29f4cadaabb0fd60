// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// annotateNode is a write of people and service accounts.
func annotateNode(node string) call {
	return call{verb: "PATCH", path: "/api/v1/nodes/" + node, contentType: merge, body: `{"metadata":{"annotations":{"example.test/other":"!"}}}`}
}

// everybody are users of each kind that write to a cluster, each with such a write. Some have no
// extra fields at all.
func everybody(t *testing.T, node *madeNode, neighbour *credential) map[string]func(server int) answer {
	t.Helper()
	ctx := t.Context()
	token, err := shared.admin.CoreV1().ServiceAccounts(apps).CreateToken(ctx, "app", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	harness.Must(t, err)
	account := tokenCredential(t, token.Status.Token)
	review, err := account.clients[0].AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	harness.Must(t, err)
	if id := review.Status.UserInfo.Extra["authentication.kubernetes.io/credential-id"]; len(id) != 1 || !strings.HasPrefix(id[0], "JTI=") {
		t.Fatalf("the account's credential ID: %q", id)
	}
	id, err := shared.CreateBootstrapToken(ctx, time.Hour)
	harness.Must(t, err)
	bootstrapper := tokenCredential(t, id)
	admin := certificateOf(t, "somebody", "system:masters")
	impersonated := credentialOf(t, "", func(s *testbed.APIServer) []byte { return s.Kubeconfig(shared.AdminUser()) })
	for i, s := range shared.servers {
		config := s.AdminConfig()
		config.Impersonate = rest.ImpersonationConfig{UserName: "operator", Groups: []string{"system:masters"}}
		impersonated.clients[i], err = kubernetes.NewForConfig(config)
		harness.Must(t, err)
	}
	hello := attesting[0].of(node)
	as := func(c *credential, what call) func(int) answer {
		return func(server int) answer { return c.do(ctx, server, what) }
	}
	return map[string]func(int) answer{
		"administrator":              as(admin, annotateNode(node.name)),
		"service account":            as(account, annotateNode(node.name)),
		"impersonated, without ID":   as(impersonated, annotateNode(node.name)),
		"bootstrap token, for hello": as(bootstrapper, hello),
		"bootstrap token, any other": as(bootstrapper, write{call: requestTo("example.test/signer", "client auth")}.of(node)),
		"the node's new certificate": as(node.fine, renewal(node.name)),
		"another node":               as(neighbour, renewal("neighbour")),
	}
}

// grantEverybody gives the rights for what everybody does.
func grantEverybody(t *testing.T) {
	t.Helper()
	harness.Must(t, shared.BindKubeadmBootstrap(t.Context()))
	_, err := shared.admin.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "app"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: apps, Name: "app"}},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
}

// Everybody writes as before, beside ten empty policies as they are shipped, and beside ten that
// have certificates of others. The API servers themselves write, too: they have no credential ID.
// Empty policies are not even evaluated.
func TestOthersAreUntouched(t *testing.T) {
	grantEverybody(t)
	node := makeNode(t, "untouched")
	neighbour, _ := newNode(t, "neighbour")
	all := everybody(t, node, neighbour)
	write := func(t *testing.T, crd string) {
		t.Helper()
		for who, do := range all {
			for server := range shared.servers {
				var a answer
				harness.Eventually(t, limit, who, func() bool {
					a = do(server)
					return a.code == 200 || a.code == 201 || a.refused("ValidatingAdmissionPolicy")
				})
				if a.code == 403 {
					t.Errorf("%s, API server %d: %s", who, server, a)
				}
			}
		}
		// The API servers make a CRD Established by a write of their own.
		file := filepath.Join(t.TempDir(), "crd.yaml")
		harness.WriteFile(t, file, []byte(strings.NewReplacer("thing", crd, "Thing", crd).Replace(things)))
		crds, err := testbed.ReadCRDs(file)
		harness.Must(t, err)
		harness.Must(t, shared.InstallCRDs(t.Context(), crds...))
	}
	t.Run("empty", func(t *testing.T) {
		empty := lists{}
		for number := range int32(revocation.PolicyCount) {
			empty[number+1] = nil
		}
		before := evaluations(t)
		harness.Eventually(t, limit, "what other tests wrote into the policies is gone", func() bool {
			last := before
			for server := range shared.servers {
				passes(t, node.fine, server, renewal(node.name), false)
			}
			before = evaluations(t)
			return before == last
		})
		write(t, "empties")
		if after := evaluations(t); after != before {
			t.Errorf("empty policies were evaluated %v times", after-before)
		}
		// As fill writes them, in place of those that are shipped.
		harness.Must(t, fill(t.Context(), empty))
		if a := node.stolen.do(t.Context(), 0, renewal(node.name)); a.code != 200 {
			t.Error(a)
		}
	})
	t.Run("filled", func(t *testing.T) {
		filled := lists{}
		for number := range int32(revocation.PolicyCount) {
			filled[number+1] = append(others(9), suspended(nodeCertificate(t, node.name)), revoked(nodeCertificate(t, "neighbour")))
		}
		filled[10] = append(filled[10], revoked(node.stolen))
		before := evaluations(t)
		inForceFor(t, filled, node.name, node.stolen)
		write(t, "filleds")
		if after := evaluations(t); after < before+float64(len(all)*revocation.PolicyCount) {
			t.Errorf("policies were evaluated %v times", after-before)
		}
		for server := range shared.servers {
			if a := node.stolen.do(t.Context(), server, renewal(node.name)); !a.refused(attestation.MessageRevoked) {
				t.Error(a)
			}
		}
	})
}

var evaluated = regexp.MustCompile(`(?m)^apiserver_admission_match_condition_evaluation_seconds_count\{[^}]*name="node-attestation-revoked-\d\d"[^}]*\} (\S+)$`)

// evaluations is how often the API servers have evaluated the condition of a policy.
func evaluations(t *testing.T) (sum float64) {
	t.Helper()
	for _, s := range shared.servers {
		metrics, err := s.Client().CoreV1().RESTClient().Get().AbsPath("/metrics").Do(t.Context()).Raw()
		harness.Must(t, err)
		for _, m := range evaluated.FindAllSubmatch(metrics, -1) {
			n, err := strconv.ParseFloat(string(m[1]), 64)
			harness.Must(t, err)
			sum += n
		}
	}
	return sum
}

// The most certificates that one policy takes, and what happens above that: the update is refused,
// and the old list stays in force.
func TestLimitOfAPolicy(t *testing.T) {
	const number = 6
	stolen, other := newNode(t, "limit")
	all := others(2000)
	for i := range all {
		all[i].Suspended = true // in two expressions
	}
	accepted := func(count int) bool {
		spec, err := revocation.RenderPolicy(v1alpha1.RevocationSliceSpec{Certificates: all[:count]}, signers)
		harness.Must(t, err)
		policy, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(t.Context(), revocation.PolicyName(number), metav1.GetOptions{})
		harness.Must(t, err)
		policy.Spec = spec
		_, err = shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Update(t.Context(), policy, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && !strings.Contains(err.Error(), "expression code point size exceeds limit") {
			t.Fatalf("%d certificates: %.300v", count, err)
		}
		return err == nil
	}
	most := 0
	for low, high := 0, len(all); low < high; {
		middle := (low + high + 1) / 2
		if accepted(middle) {
			low, most = middle, middle
		} else {
			high = middle - 1
		}
	}
	t.Logf("a policy takes %d certificates", most)
	if most < revocation.SliceCapacity {
		t.Errorf("a list may have %d", revocation.SliceCapacity)
	}
	inForceFor(t, lists{number: append(all[:revocation.SliceCapacity-1:revocation.SliceCapacity-1], revoked(stolen))}, "limit", stolen)
	if err := fill(t.Context(), lists{number: all[:most+1]}); err == nil {
		t.Fatal("it takes one more")
	}
	harness.Never(t, inForce, "the old list is no longer in force", func() bool {
		return !stolen.do(t.Context(), 0, renewal("limit")).refused(attestation.MessageRevoked) || !stolen.do(t.Context(), 1, renewal("limit")).refused(attestation.MessageRevoked)
	})
	if a := other.do(t.Context(), 1, renewal("limit")); a.code != 200 {
		t.Error(a)
	}
}
