// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestOnlyTheControllerIssues(t *testing.T) {
	for _, signer := range signed {
		t.Run(signer, func(t *testing.T) {
			controller := shared.controller
			if !slices.Contains(granted, signer) {
				controller = as(t, controllerUser, "system:masters")
			}
			name := filed(t, signer)
			certificate, err := anyCertificate()
			if err != nil {
				t.Fatal(err)
			}
			content := map[string]any{"status": map[string]any{"certificate": certificate}}
			whole := map[string]any{"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "status": content["status"]}
			hostile := func(t *testing.T) {
				wantRefusedBy(t, issue(t, shared.admin, name), certificatesPolicy)
				wantRefusedBy(t, patch(t, shared.admin, types.MergePatchType, name, content, "status"), certificatesPolicy)
				wantRefusedBy(t, patch(t, shared.admin, types.ApplyPatchType, name, whole, "status"), certificatesPolicy)
				// accepted, and dropped
				want(t, patch(t, shared.admin, types.MergePatchType, name, content))
				// the same
				want(t, patch(t, shared.admin, types.MergePatchType, name, content, "approval"))
				if csr := get(t, name); len(csr.Status.Certificate) > 0 {
					t.Fatal("there is a certificate")
				}
			}
			hostile(t)
			wantRefusedBy(t, issue(t, controller, name), certificatesPolicy) // not approved
			want(t, approve(t, controller, name))
			hostile(t)
			want(t, issue(t, controller, name))
			// Others may still write everything except the certificate.
			want(t, decide(t.Context(), shared.admin, name, "SeenByAuditor", nil))
		})
	}
}

func TestNoCertificateAfterADenialOrFailure(t *testing.T) {
	denied := filed(t, tpmSigner)
	want(t, decide(t.Context(), shared.admin, denied, certificatesv1.CertificateDenied, nil))
	wantRefusedBy(t, issue(t, shared.controller, denied), certificatesPolicy)
	failed := filed(t, tpmSigner)
	want(t, approve(t, shared.controller, failed))
	want(t, fail(t, shared.controller, failed))
	wantRefusedBy(t, issue(t, shared.controller, failed), certificatesPolicy)
}

// A condition of any type but Approved, to the letter, ends a request. That also holds beside a
// true Approved, and in both orders.
func TestNoCertificateBesideAnotherCondition(t *testing.T) {
	for _, kind := range []certificatesv1.RequestConditionType{"approved", "APPROVED", "Approved ", " Approved", "SeenByAuditor"} {
		alone, beside, before := filed(t, tpmSigner), filed(t, tpmSigner), filed(t, tpmSigner)
		want(t, decide(t.Context(), shared.admin, alone, kind, nil))
		want(t, approve(t, shared.controller, beside))
		want(t, decide(t.Context(), shared.admin, beside, kind, nil))
		want(t, decide(t.Context(), shared.admin, before, kind, nil))
		want(t, approve(t, shared.controller, before))
		for _, name := range []string{alone, beside, before} {
			if !hasCondition(get(t, name), kind) {
				t.Fatalf("%q: the API server did not take it", kind)
			}
			wantRefusedBy(t, issue(t, shared.controller, name), certificatesPolicy)
		}
	}
}

func TestNobodyIssuesForAHello(t *testing.T) {
	name := filed(t, helloSigner)
	wantRefusedBy(t, issue(t, shared.admin, name), certificatesPolicy)
	wantRefusedBy(t, issue(t, as(t, controllerUser, "system:masters"), name), certificatesPolicy)
	wantNoRight(t, issue(t, shared.controller, name))
}

// The limit is on the bytes of spec.request, not on their base64.
func TestRequestSize(t *testing.T) {
	for _, signer := range forMachines {
		for _, size := range []int{1000, 131_071, 131_072, 131_073, 131_074, 1_000_000} {
			csr := newRequest(signer)
			csr.Spec.Request = padTo(csr.Spec.Request, size)
			_, err := asking(signer).CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{DryRun: dryRun})
			switch {
			case size <= 131_072 && err != nil:
				t.Errorf("%s: %d bytes: %v", signer, size, err)
			case size > 131_072 && !refusedBy(err, sizePolicy):
				t.Errorf("%s: %d bytes: %v", signer, size, err)
			}
		}
	}
	csr := newRequest(tpmSigner)
	csr.Spec.Request = padTo(csr.Spec.Request, 131_073)
	_, err := shared.admin.CertificatesV1().CertificateSigningRequests().Create(t.Context(), csr, metav1.CreateOptions{})
	wantRefusedBy(t, err, sizePolicy)
}
