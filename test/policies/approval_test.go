// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"context"
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// patch sends a patch to a request or a subresource of it.
func patch(t *testing.T, client kubernetes.Interface, kind types.PatchType, name string, content any, subresources ...string) error {
	t.Helper()
	data, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	options := metav1.PatchOptions{}
	if kind == types.ApplyPatchType {
		force := true
		options.FieldManager, options.Force = "policies-test", &force
	}
	_, err = client.CertificatesV1().CertificateSigningRequests().Patch(t.Context(), name, kind, data, options, subresources...)
	return err
}

func TestOnlyTheControllerApproves(t *testing.T) {
	for _, signer := range guarded {
		t.Run(signer, func(t *testing.T) {
			name := filed(t, signer)
			wantRefusedBy(t, approve(t, shared.admin, name), approvalPolicy)
			if _, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "certificate", "approve", name); err == nil {
				t.Error("kubectl certificate approve went through")
			}
			conditions := map[string]any{"status": map[string]any{"conditions": []any{condition(certificatesv1.CertificateApproved)}}}
			wantRefusedBy(t, patch(t, shared.admin, types.MergePatchType, name, conditions, "approval"), approvalPolicy)
			wantRefusedBy(t, patch(t, shared.admin, types.StrategicMergePatchType, name, conditions, "approval"), approvalPolicy)
			whole := map[string]any{"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "status": conditions["status"]}
			wantRefusedBy(t, patch(t, shared.admin, types.ApplyPatchType, name, whole, "approval"), approvalPolicy)
			for _, other := range []string{
				"system:serviceaccount:kube-system:certificate-controller",
				"system:serviceaccount:" + namespace + ":default",
				"system:serviceaccount:default:" + account,
				controllerUser + "x",
			} {
				wantRefusedBy(t, approve(t, as(t, other, "system:masters"), name), approvalPolicy)
			}
			if csr := get(t, name); len(csr.Status.Conditions) > 0 {
				t.Fatalf("there are conditions: %+v", csr.Status.Conditions)
			}

			controller := shared.controller
			if !slices.Contains(granted, signer) {
				controller = as(t, controllerUser, "system:masters")
			}
			want(t, approve(t, controller, name))
			if !hasCondition(get(t, name), certificatesv1.CertificateApproved) {
				t.Error("the controller's approval is not there")
			}
		})
	}
}

// The API server accepts an approval only through /approval. In case that changes, the policy
// covers the other paths, too.
func TestApprovalByOtherPaths(t *testing.T) {
	name := filed(t, tpmSigner)
	approved := map[string]any{"status": map[string]any{"conditions": []any{condition(certificatesv1.CertificateApproved)}}}
	if err := patch(t, shared.admin, types.MergePatchType, name, approved, "status"); err == nil {
		t.Error("an approval passed through /status")
	}
	want(t, patch(t, shared.admin, types.MergePatchType, name, approved)) // accepted, and dropped
	created := newRequest(tpmSigner)
	created.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateApproved)}
	if _, err := shared.admin.CertificatesV1().CertificateSigningRequests().Create(t.Context(), created, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{name, created.Name} {
		if csr := get(t, n); len(csr.Status.Conditions) > 0 {
			t.Errorf("there are conditions: %+v", csr.Status.Conditions)
		}
	}
}

// The policies do not apply to a request of another signer. It cannot become one of ours later, nor
// the reverse.
func TestSignerCannotBeChanged(t *testing.T) {
	for _, from := range []string{tpmSigner, "example.com/x"} {
		name, err := file(t.Context(), shared.admin, from)
		if err != nil {
			t.Fatal(err)
		}
		other := map[string]any{"spec": map[string]any{"signerName": "example.com/y"}}
		want(t, patch(t, shared.admin, types.MergePatchType, name, other)) // accepted, and dropped
		other["status"] = map[string]any{"conditions": []any{condition(certificatesv1.CertificateApproved)}}
		err = patch(t, shared.admin, types.MergePatchType, name, other, "approval")
		if from == tpmSigner {
			wantRefusedBy(t, err, approvalPolicy)
		} else {
			want(t, err)
		}
		if got := get(t, name).Spec.SignerName; got != from {
			t.Errorf("the signer is now %s", got)
		}
	}
}

func TestNobodyApprovesAHello(t *testing.T) {
	name := filed(t, helloSigner)
	for _, client := range []kubernetes.Interface{shared.admin, shared.controller, as(t, controllerUser, "system:masters")} {
		wantRefusedBy(t, approve(t, client, name), approvalPolicy)
	}
	// It is closed by its denial, or as failed, both through /approval.
	want(t, decide(t.Context(), shared.controller, name, certificatesv1.CertificateDenied, nil))
	wantRefusedBy(t, issue(t, shared.admin, name), certificatesPolicy)

	failed := filed(t, helloSigner)
	want(t, decide(t.Context(), shared.controller, failed, certificatesv1.CertificateFailed, nil))
	wantRefusedBy(t, approve(t, shared.controller, failed), approvalPolicy)
}

// No user can approve a rehearsal, or issue a certificate for it.
func TestNobodyApprovesARehearsal(t *testing.T) {
	for _, signer := range rehearsals {
		name := filed(t, signer)
		for _, client := range []kubernetes.Interface{shared.admin, as(t, controllerUser, "system:masters")} {
			wantRefusedBy(t, approve(t, client, name), approvalPolicy)
			wantRefusedBy(t, issue(t, client, name), certificatesPolicy)
		}
		wantNoRight(t, approve(t, shared.controller, name))
		wantNoRight(t, decide(t.Context(), shared.controller, name, certificatesv1.CertificateDenied, nil))
	}
}

func TestDenyingIsFree(t *testing.T) {
	for _, signer := range append([]string{helloSigner}, guarded...) {
		denied, failed := filed(t, signer), filed(t, signer)
		want(t, decide(t.Context(), shared.admin, denied, certificatesv1.CertificateDenied, nil))
		want(t, decide(t.Context(), shared.admin, failed, certificatesv1.CertificateFailed, nil))
		another := filed(t, signer)
		want(t, fail(t, shared.admin, another))
		// It stays denied: not even the controller can approve it.
		if err := approve(t, as(t, controllerUser, "system:masters"), denied); err == nil {
			t.Errorf("%s: approved after the denial", signer)
		}
	}
}

// Others may add conditions, such as Failed, to an approved request, but not change the approval.
func TestApprovalStaysAsTheControllerWroteIt(t *testing.T) {
	name := filed(t, tpmSigner)
	want(t, approve(t, shared.controller, name))
	rewrite := func(client kubernetes.Interface) error {
		return change(t.Context(), client, name, func(csr *certificatesv1.CertificateSigningRequest) error {
			csr.Status.Conditions[0].Message = "rewritten"
			return write(t.Context(), client, csr, "approval", map[string]any{"conditions": csr.Status.Conditions}, nil)
		})
	}
	wantRefusedBy(t, rewrite(shared.admin), approvalPolicy)
	want(t, rewrite(shared.controller))
	want(t, decide(t.Context(), shared.admin, name, "SeenByAuditor", nil))
	want(t, fail(t, shared.admin, name))
}

func TestOtherSignersAreUntouched(t *testing.T) {
	for _, signer := range []string{"example.com/x", "kubernetes.io/kube-apiserver-client", "kubernetes.io/kubelet-serving", "cluster.x-k8s.io/other"} {
		// signers_test.go tests which signers machines may request from
		name, err := file(t.Context(), shared.admin, signer)
		if err != nil {
			t.Fatal(err)
		}
		want(t, approve(t, shared.admin, name))
		// these names belong to other users
		if signer != "kubernetes.io/kube-apiserver-client" && signer != "kubernetes.io/kubelet-serving" {
			want(t, issue(t, shared.admin, name))
		}
	}
	long := newRequest("example.com/x")
	long.Spec.Request, long.Labels = padTo(long.Spec.Request, 300_000), annotations(5000)
	_, err := shared.admin.CertificatesV1().CertificateSigningRequests().Create(t.Context(), long, metav1.CreateOptions{})
	want(t, err)
}

// inVain reports whether an approval was refused, or never reached the policies. A stale approval
// is answered with 409, and a busy API server answers 504 at times.
func inVain(code int) bool { return code == 403 || code == 409 || code >= 500 }

// kube-controller-manager runs with both kubeadm bindings present, as after `kubeadm upgrade`. It
// approves neither what was filed before the policies, nor what comes now, first or renewal.
func TestControllerManagerApprovesNothing(t *testing.T) {
	mark, err := shared.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	renewal, err := file(t.Context(), shared.node, builtinSigner)
	if err != nil {
		t.Fatal(err)
	}
	requests := map[string]string{"filed before the policies": shared.early, "first": filed(t, builtinSigner), "renewal": renewal}
	// It tried to approve each new request, and was refused.
	tried := map[string]bool{}
	harness.Eventually(t, patience, "kube-controller-manager tries to approve", func() bool {
		events, err := shared.AuditSince(mark)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			if e.User == kcmApprover && e.Subresource == "approval" {
				tried[e.Name] = tried[e.Name] || e.Code == 403
				if !inVain(e.Code) {
					t.Errorf("its approval of %s was answered with %d", e.Name, e.Code)
				}
			}
		}
		return tried[requests["first"]] && tried[renewal]
	})
	// a request filed beforehand was approved after 3 s without the policies
	time.Sleep(3 * time.Second)
	for what, name := range requests {
		if csr := get(t, name); len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0 {
			t.Errorf("%s: %+v", what, csr.Status)
		}
	}

	// unattestedNodes: the controller approves a renewal, and kube-controller-manager signs.
	want(t, approve(t, shared.controller, renewal))
	harness.Eventually(t, patience, "kube-controller-manager signs", func() bool { return len(get(t, renewal).Status.Certificate) > 0 })
}

// kube-controller-manager's type checker knows the schema of requests: what it warns of would fail
// when it is evaluated.
func TestPoliciesTypeCheck(t *testing.T) {
	for _, name := range []string{approvalPolicy, annotationPolicy, certificatesPolicy, sizePolicy, metadataPolicy, signersPolicy, recordsPolicy} {
		harness.Eventually(t, patience, name+" is type-checked", func() bool {
			policy, err := shared.admin.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if policy.Status.ObservedGeneration != policy.Generation || policy.Status.TypeChecking == nil {
				return false
			}
			for _, warning := range policy.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", name, warning.FieldRef, warning.Warning)
			}
			return true
		})
	}
}

// With the optional policy, only the controller approves serving certificates. Without it, nothing
// changes for them.
func TestOnlyTheControllerApprovesServing(t *testing.T) {
	const signer = kubeletServing
	want(t, approve(t, shared.admin, filed(t, signer)))
	path := filepath.Join(manifests, "optional", "serving.yaml")
	want(t, shared.apply(t.Context(), "-f", path))
	defer func() {
		if _, err := shared.RunKubectl(context.WithoutCancel(t.Context()), shared.adminKubeconfig, "delete", "-f", path); err != nil {
			t.Error(err)
		}
	}()
	name := filed(t, signer)
	harness.Eventually(t, patience, "the policy is there", func() bool {
		err := approve(t, shared.admin, filed(t, signer))
		return err != nil && strings.Contains(err.Error(), "node-attestation-serving")
	})
	harness.Eventually(t, patience, "the controller may", func() bool { return approve(t, shared.controller, name) == nil })
	want(t, decide(t.Context(), shared.admin, filed(t, signer), certificatesv1.CertificateDenied, nil))
}
