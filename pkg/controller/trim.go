// SPDX-License-Identifier: Apache-2.0

package controller

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// TrimRequests is a transform for a cache of CertificateSigningRequests. Whoever may file requests decides how many there are, and how large: of
// those that nobody asks about again the cache keeps that they are there, and of one that is too long as much as shows it.
func TrimRequests(rules *verifier.Rules) toolscache.TransformFunc {
	return func(object any) (any, error) {
		request, ok := object.(*certificatesv1.CertificateSigningRequest)
		if !ok {
			return object, nil
		}
		refused := stateOf(request) == done && len(request.Status.Certificate) == 0
		if refused || !rules.Concerned(request) {
			return trimmed(request), nil
		}
		request.ManagedFields = nil
		if len(request.Spec.Request) > attestation.MaxRequestSize {
			request.Spec.Request = append([]byte(nil), request.Spec.Request[:attestation.MaxRequestSize+1]...)
		}
		return request, nil
	}
}

// trimmed keeps of a request which one it is, under which signer, and what became of it. Without its user it is nobody's that is left alone: what
// told it from such a one is gone.
func trimmed(request *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	kept := &certificatesv1.CertificateSigningRequest{
		TypeMeta: request.TypeMeta,
		ObjectMeta: metav1.ObjectMeta{
			Name: request.Name, UID: request.UID, ResourceVersion: request.ResourceVersion, CreationTimestamp: request.CreationTimestamp,
		},
		Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: request.Spec.SignerName},
	}
	for _, c := range request.Status.Conditions {
		kept.Status.Conditions = append(kept.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c.Type, Status: c.Status})
	}
	return kept
}

// trimBinding is a transform for a cache of ClusterRoleBindings: whom a role is bound to does not matter, but that it is to somebody.
func trimBinding(object any) (any, error) {
	binding, ok := object.(*rbacv1.ClusterRoleBinding)
	if !ok {
		return object, nil
	}
	binding.ManagedFields, binding.Annotations, binding.Labels = nil, nil, nil
	if len(binding.Subjects) > 1 {
		binding.Subjects = []rbacv1.Subject{binding.Subjects[0]}
	}
	return binding, nil
}
