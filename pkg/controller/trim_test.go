// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The cache keeps whole what may be decided on, and of all else that it is there.
func TestRequestsAreTrimmed(t *testing.T) {
	p := policy()
	p.UnattestedNodes = []string{"left-alone"}
	rules, err := verifier.New(p)
	if err != nil {
		t.Fatal(err)
	}
	request := func(signer string, size int, conditions ...certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequest {
		r := &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{
				Name: "r", UID: "u", ResourceVersion: "7", CreationTimestamp: metav1.Now(), Annotations: map[string]string{"a": "b"},
				ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
			},
			Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: signer, Username: "n", Request: bytes.Repeat([]byte("x"), size), Extra: map[string]certificatesv1.ExtraValue{"a": {"b"}}},
		}
		for _, c := range conditions {
			r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c, Message: "long"})
		}
		return r
	}
	issued := request("example.com/tpm", 100, certificatesv1.CertificateApproved)
	issued.Status.Certificate = []byte("c")
	// A node that is left alone here shows its evidence to somebody else.
	elsewhere := request("kubernetes.io/kube-apiserver-client-kubelet", 100)
	elsewhere.Spec.Username = "system:node:left-alone"
	elsewhere.Spec.Request = []byte("-----BEGIN " + attestation.BlockProvider + "-----\nYQ==\n-----END " + attestation.BlockProvider + "-----\n")
	leftAlone := request("kubernetes.io/kube-apiserver-client-kubelet", 100)
	leftAlone.Spec.Username = "system:node:left-alone"
	for name, c := range map[string]struct {
		request *certificatesv1.CertificateSigningRequest
		size    int
		state   state
	}{
		"ours":                   {request("example.com/tpm", 100), 100, undecided},
		"ours, approved":         {request("example.com/tpm", 100, certificatesv1.CertificateApproved), 100, approved},
		"ours, issued":           {issued, 100, done},
		"ours, denied":           {request("example.com/tpm", 100, certificatesv1.CertificateDenied), 0, done},
		"ours, failed":           {request("example.com/tpm", 100, certificatesv1.CertificateApproved, certificatesv1.CertificateFailed), 0, done},
		"ours, lower case":       {request("example.com/tpm", 100, "approved"), 0, done},
		"ours, lower case, too":  {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "approved"), 0, done},
		"ours, capitals, before": {request("example.com/tpm", 100, "APPROVED", certificatesv1.CertificateApproved), 0, done},
		"ours, with a blank":     {request("example.com/tpm", 100, "Approved "), 0, done},
		"ours, others' type":     {request("example.com/tpm", 100, certificatesv1.CertificateApproved, "Acme"), 0, done},
		"ours, as it may":        {request("example.com/tpm", attestation.MaxRequestSize), attestation.MaxRequestSize, undecided},
		"ours, too long":         {request("example.com/tpm", 1<<20), attestation.MaxRequestSize + 1, undecided},
		"left alone":             {leftAlone, 100, undecided},
		"another provider's, of a node that is left alone": {elsewhere, 0, undecided},
		"another's":       {request("example.com/other", 1<<20), 0, undecided},
		"another's, done": {request("example.com/other", 1<<20, certificatesv1.CertificateApproved), 0, approved},
	} {
		concerned := rules.Concerned(c.request)
		out, err := TrimRequests(rules)(c.request)
		got, ok := out.(*certificatesv1.CertificateSigningRequest)
		if err != nil || !ok {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got.Spec.Request) != c.size || cap(got.Spec.Request) > 2*attestation.MaxRequestSize || stateOf(got) != c.state || rules.Concerned(got) != concerned {
			t.Errorf("%s: %d bytes, of %d, %v", name, len(got.Spec.Request), cap(got.Spec.Request), stateOf(got))
		}
		if got.Name != "r" || got.UID != "u" || got.ResourceVersion != "7" || got.ManagedFields != nil || (c.size == 0) != (got.Annotations == nil && got.Spec.Extra == nil) {
			t.Errorf("%s: %+v", name, got.ObjectMeta)
		}
	}
	if out, err := TrimRequests(rules)("another object"); err != nil || out != "another object" {
		t.Errorf("%v, %v", out, err)
	}
}

func TestBindingsAreTrimmed(t *testing.T) {
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "u", ResourceVersion: "7", Finalizers: []string{"f"}, Annotations: map[string]string{"a": "b"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: roleNodeClient}, Subjects: make([]rbacv1.Subject, 1000),
	}
	if !approvesByItself(binding) {
		t.Fatal("it is not one that matters")
	}
	out, err := trimBinding(binding)
	got, ok := out.(*rbacv1.ClusterRoleBinding)
	if err != nil || !ok || len(got.Subjects) != 1 || got.Annotations != nil || !approvesByItself(got) || got.UID != "u" || got.ResourceVersion != "7" {
		t.Errorf("%+v, %v", got, err)
	}
}
