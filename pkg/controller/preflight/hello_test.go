// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"errors"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// The policy on approvals proves itself in each of its forms. A missing right and another policy
// prove nothing.
func TestAPolicyProvesItself(t *testing.T) {
	forbidden := func(message string) error {
		return apierrors.NewForbidden(schema.GroupResource{Group: certificatesv1.GroupName, Resource: "certificatesigningrequests"}, "hello", errors.New(message))
	}
	hello := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "hello"}}
	for title, c := range map[string]struct {
		answer           error
		refused, unknown bool
	}{
		"a policy of the API": {answer: forbidden("ValidatingAdmissionPolicy 'node-attestation-approval' with binding 'node-attestation-approval' denied request: no"), refused: true},
		"a static policy":     {answer: forbidden("ValidatingAdmissionPolicy 'node-attestation-approval.static.k8s.io' with binding 'x' denied request: no"), refused: true},
		"it passes":           {},
		"another policy":      {answer: forbidden("ValidatingAdmissionPolicy 'node-attestation-approval-of-mine' with binding 'x' denied request: no"), unknown: true},
		"no right":            {answer: forbidden(`User "u" cannot patch resource "certificatesigningrequests/approval"`), unknown: true},
		"no answer":           {answer: errors.New("connection refused"), unknown: true},
	} {
		api := interceptor.NewClient(fake.NewClientBuilder().WithObjects(hello.DeepCopy()).Build(), interceptor.Funcs{
			SubResourcePatch: func(_ context.Context, _ client.Client, subresource string, _ client.Object, _ client.Patch, options ...client.SubResourcePatchOption) error {
				var applied client.SubResourcePatchOptions
				applied.ApplyOptions(options)
				if subresource != "approval" || len(applied.DryRun) != 1 {
					t.Errorf("%s: not a dry run of an approval", title)
				}
				return c.answer
			},
		})
		refused, err := (&PolicyWatch{api: api}).refuses(t.Context(), hello.Name)
		if refused != c.refused || (err != nil) != c.unknown {
			t.Errorf("%s: %v, %v", title, refused, err)
		}
	}
}
