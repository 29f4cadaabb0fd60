// SPDX-License-Identifier: Apache-2.0

// Package statuspatch makes the patches by which controllers write the status of a
// CertificateSigningRequest. Controllers must patch: their cached copies lack labels, finalizers
// and other fields that no decision reads, and an update would remove these.
package statuspatch

import (
	"encoding/json"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// New returns a merge patch of fields of the status. It applies only to this version of the
// request. A merge patch replaces lists as a whole.
func New(request *certificatesv1.CertificateSigningRequest, fields map[string]any) (client.Patch, error) {
	version := map[string]any{"uid": request.UID, "resourceVersion": request.ResourceVersion}
	patch, err := json.Marshal(map[string]any{"metadata": version, "status": fields})
	return client.RawPatch(types.MergePatchType, patch), err
}

// Condition returns a condition with the status True.
func Condition(kind certificatesv1.RequestConditionType, reason, message string) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: reason, Message: telemetry.Message(message)}
}
