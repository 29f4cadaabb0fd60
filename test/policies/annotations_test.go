// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

var reserved = []string{attestation.AnnotationChallenge, attestation.AnnotationVersions, attestation.AnnotationWaiting, attestation.AnnotationEK, "attestation.cluster.x-k8s.io/yet-unknown"}

func annotated(key, value string) func(*certificatesv1.CertificateSigningRequest) {
	return func(csr *certificatesv1.CertificateSigningRequest) { csr.Annotations = map[string]string{key: value} }
}

func TestAnnotationsOnCreate(t *testing.T) {
	clients := map[string]kubernetes.Interface{"bootstrap token": shared.bootstrapper, "node": shared.node, "admin": shared.admin}
	for who, client := range clients {
		t.Run(who, func(t *testing.T) {
			for _, key := range reserved {
				_, err := file(t.Context(), client, helloSigner, annotated(key, "forged"))
				wantRefusedBy(t, err, annotationPolicy)
				_, err = file(t.Context(), client, helloSigner, annotated(key, ""))
				wantRefusedBy(t, err, annotationPolicy)
			}
			_, err := file(t.Context(), shared.admin, "example.com/x", annotated(reserved[0], "forged"))
			wantRefusedBy(t, err, annotationPolicy)
			// Other annotations may be changed.
			for _, key := range []string{"example.com/note", "cluster-x-k8s-io/other", "attestation.cluster.x-k8s.io.example.com/challenge", "x"} {
				_, err := file(t.Context(), client, helloSigner, annotated(key, "value"))
				want(t, err)
			}
		})
	}
	t.Run("server-side apply", func(t *testing.T) {
		csr := newRequest(helloSigner)
		object := map[string]any{
			"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "spec": csr.Spec,
			"metadata": map[string]any{"name": csr.Name, "annotations": map[string]any{reserved[0]: "forged"}},
		}
		wantRefusedBy(t, patch(t, shared.admin, types.ApplyPatchType, csr.Name, object), annotationPolicy)
		delete(object["metadata"].(map[string]any), "annotations")
		want(t, patch(t, shared.admin, types.ApplyPatchType, csr.Name, object))
	})
}

// The API server lets metadata be changed through each of the three paths, which the last row
// shows.
func TestAnnotationsOnUpdate(t *testing.T) {
	paths := map[string][]string{"main": nil, "status": {"status"}, "approval": {"approval"}}
	for path, subresources := range paths {
		t.Run(path, func(t *testing.T) {
			name := filed(t, helloSigner)
			set := func(client kubernetes.Interface, key string, value any) error {
				return patch(t, client, types.MergePatchType, name, map[string]any{"metadata": map[string]any{"annotations": map[string]any{key: value}}}, subresources...)
			}
			apply := func(key, value string) error {
				return patch(t, shared.admin, types.ApplyPatchType, name, map[string]any{
					"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
					"metadata": map[string]any{"annotations": map[string]any{key: value}},
				}, subresources...)
			}
			// its own rights are tested elsewhere
			controller := as(t, controllerUser, "system:masters")
			for _, key := range reserved {
				wantRefusedBy(t, set(shared.admin, key, "forged"), annotationPolicy)
				wantRefusedBy(t, apply(key, "forged"), annotationPolicy)
				want(t, set(controller, key, "true"))
				wantRefusedBy(t, set(shared.admin, key, "forged"), annotationPolicy)
				wantRefusedBy(t, apply(key, "forged"), annotationPolicy)
				wantRefusedBy(t, set(shared.admin, key, nil), annotationPolicy)
			}
			wantRefusedBy(t, patch(t, shared.admin, types.MergePatchType, name, map[string]any{"metadata": map[string]any{"annotations": nil}}, subresources...), annotationPolicy)
			want(t, set(controller, reserved[1], nil))
			want(t, set(shared.admin, "example.com/note", "free"))
			want(t, apply("example.com/applied", "free"))
			annotations := get(t, name).Annotations
			if annotations[reserved[0]] != "true" || annotations["example.com/note"] != "free" || annotations["example.com/applied"] != "free" || len(annotations) != len(reserved)-1+2 {
				t.Errorf("annotations are now %v", annotations)
			}
		})
	}
	name := filed(t, helloSigner)
	for who, client := range map[string]kubernetes.Interface{"node": shared.node, "bootstrap token": shared.bootstrapper} {
		for _, subresources := range paths {
			t.Run(who, func(t *testing.T) {
				wantNoRight(t, patch(t, client, types.MergePatchType, name, map[string]any{"metadata": map[string]any{"annotations": map[string]any{"x": "y"}}}, subresources...))
			})
		}
	}
}

// The controller may patch, but not update.
func TestControllerAnnotatesWithItsOwnRights(t *testing.T) {
	name := filed(t, helloSigner)
	challenge := map[string]any{"metadata": map[string]any{"annotations": map[string]any{attestation.AnnotationChallenge: "{}"}}}
	want(t, patch(t, shared.controller, types.MergePatchType, name, challenge))
	csr := get(t, name)
	_, err := shared.controller.CertificatesV1().CertificateSigningRequests().Update(t.Context(), csr, metav1.UpdateOptions{})
	wantNoRight(t, err)
	_, err = shared.controller.CertificatesV1().CertificateSigningRequests().UpdateStatus(t.Context(), csr, metav1.UpdateOptions{})
	wantNoRight(t, err)
	_, err = shared.controller.CertificatesV1().CertificateSigningRequests().UpdateApproval(t.Context(), name, csr, metav1.UpdateOptions{})
	wantNoRight(t, err)
}

// A forged annotation from before the policies stays until the controller writes its own.
func TestAnnotationFromBeforeThePolicies(t *testing.T) {
	name := shared.earlyAnnotated
	set := func(client kubernetes.Interface, annotations map[string]any) error {
		return patch(t, client, types.MergePatchType, name, map[string]any{"metadata": map[string]any{"annotations": annotations}})
	}
	if got := get(t, name).Annotations[attestation.AnnotationChallenge]; got != "forged" {
		t.Fatalf("it is %q", got)
	}
	wantRefusedBy(t, set(shared.admin, map[string]any{attestation.AnnotationChallenge: "forged anew"}), annotationPolicy)
	// it does not prevent other changes
	want(t, set(shared.admin, map[string]any{"example.com/note": "free"}))
	want(t, set(shared.controller, map[string]any{attestation.AnnotationChallenge: "{}"}))
}

// A request can hold 50000 annotations, with which CEL would keep the API server busy for seconds:
// they are refused for their number. One that was filed before the policies can still be annotated
// by the controller, and denied by anybody.
func TestManyAnnotations(t *testing.T) {
	try := func(count int) error { // for our own signers node-attestation-metadata allows fewer
		_, err := file(t.Context(), shared.admin, "example.com/x", func(csr *certificatesv1.CertificateSigningRequest) { csr.Annotations = annotations(count) })
		return err
	}
	want(t, try(maxAnnotations))
	wantRefusedBy(t, try(maxAnnotations+1), annotationPolicy)
	wantRefusedBy(t, try(50_000), annotationPolicy)

	annotate := func(client kubernetes.Interface, key string) error {
		return patch(t, client, types.MergePatchType, shared.earlyFull, map[string]any{"metadata": map[string]any{"annotations": map[string]any{key: "{}"}}})
	}
	wantRefusedBy(t, annotate(shared.admin, attestation.AnnotationChallenge), annotationPolicy)
	wantRefusedBy(t, annotate(shared.admin, "example.com/note"), annotationPolicy)
	want(t, annotate(shared.controller, attestation.AnnotationChallenge))
	want(t, decide(t.Context(), shared.admin, shared.earlyFull, certificatesv1.CertificateDenied, nil))
}

func TestAnnotationsOfOtherObjects(t *testing.T) {
	// Cluster API's Machines carry the proposal's annotation: the policies are about requests only.
	namespaces := shared.admin.CoreV1().Namespaces()
	_, err := namespaces.Patch(t.Context(), "default", types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+attestation.AnnotationEK+`":"x"}}}`), metav1.PatchOptions{})
	want(t, err)
}
