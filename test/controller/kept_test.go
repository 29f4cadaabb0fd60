// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"reflect"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The controller's cache has no labels, finalizers, owners and other annotations of a request. They
// are still there after each of its writes: challenge, denial, approval, certificate and failure.
// So are the conditions of others.
func TestWritesKeepWhatIsNotCached(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "kept")
	f.inventoried(t, m)
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	meta := metav1.ObjectMeta{
		Labels: map[string]string{"example.com/l": "v"}, Finalizers: []string{"example.com/f"}, Annotations: map[string]string{"example.com/a": "v"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n", UID: "u"}},
	}
	file := func(object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
		name := object.Name
		object.ObjectMeta = *meta.DeepCopy()
		object.Name = name
		t.Cleanup(func() { // else it would stay for the next test
			if err := f.client.Patch(context.WithoutCancel(t.Context()), object, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
				t.Error(err)
			}
		})
		return p.file(t, object)
	}
	kept := func(what string, object *certificatesv1.CertificateSigningRequest) {
		t.Helper()
		now := f.get(t, object.Name)
		if !reflect.DeepEqual(now.Labels, meta.Labels) || !reflect.DeepEqual(now.Finalizers, meta.Finalizers) || now.Annotations["example.com/a"] != "v" ||
			!reflect.DeepEqual(now.OwnerReferences, meta.OwnerReferences) || !reflect.DeepEqual(now.Spec, object.Spec) {
			t.Errorf("%s: %+v", what, now.ObjectMeta)
		}
	}

	document, _, err := p.provider.Hello(t.Context(), p.ask("hello"))
	if err != nil {
		t.Fatal(err)
	}
	hello := p.challenged(t, file(p.object(t, attestation.HelloSignerName, document)))
	kept("challenged", hello)
	proof := file(p.proof(t, hello))
	f.issued(t, proof, m.name)
	kept("approved and issued", proof)
	f.closed(t, hello)
	kept("closed", hello)
	hopeless := file(p.object(t, attestation.HelloSignerName, []byte("{}")))
	f.refused(t, hopeless, "AttestationMalformed")
	kept("denied", hopeless)

	f.stop()
	early := file(p.object(t, tpm.SignerName, []byte("{}")))
	early.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Others", Message: "of others",
	}}
	if err := f.client.SubResource("approval").Update(t.Context(), early); err != nil {
		t.Fatal(err)
	}
	f.start(t)
	f.refused(t, early, string(verifier.ReasonApprovedWithoutAttestation))
	kept("failed", early)
	conditions := f.get(t, early.Name).Status.Conditions
	if len(conditions) != 2 || conditions[0].Type != certificatesv1.CertificateApproved || conditions[0].Message != "of others" || conditions[1].LastUpdateTime.IsZero() ||
		time.Since(conditions[1].LastUpdateTime.Time) > time.Hour {
		t.Errorf("conditions: %+v", conditions)
	}
}
