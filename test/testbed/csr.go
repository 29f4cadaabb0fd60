// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
)

// Approve approves a request.
func (cp *ControlPlane) Approve(ctx context.Context, name string) error {
	return cp.decide(ctx, name, certificatesv1.CertificateApproved, "TestbedApproved", "approved by the test")
}

// Deny denies a request.
func (cp *ControlPlane) Deny(ctx context.Context, name, reason, message string) error {
	return cp.decide(ctx, name, certificatesv1.CertificateDenied, reason, message)
}

// Fail marks a request as failed, as a signer does that cannot issue it.
func (cp *ControlPlane) Fail(ctx context.Context, name, reason, message string) error {
	return cp.updateCSR(ctx, name, "fail", func(csr *certificatesv1.CertificateSigningRequest) error {
		addCondition(csr, certificatesv1.CertificateFailed, reason, message)
		_, err := cp.client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, csr, metav1.UpdateOptions{})
		return err
	})
}

// SetCertificate issues a certificate, PEM, for a request. The API server wants
// well-formed PEM with a certificate in it, and nothing else of it.
func (cp *ControlPlane) SetCertificate(ctx context.Context, name string, pem []byte) error {
	return cp.updateCSR(ctx, name, "issue", func(csr *certificatesv1.CertificateSigningRequest) error {
		csr.Status.Certificate = pem
		_, err := cp.client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, csr, metav1.UpdateOptions{})
		return err
	})
}

func (cp *ControlPlane) decide(ctx context.Context, name string, decision certificatesv1.RequestConditionType, reason, message string) error {
	return cp.updateCSR(ctx, name, "decide on", func(csr *certificatesv1.CertificateSigningRequest) error {
		addCondition(csr, decision, reason, message)
		_, err := cp.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, name, csr, metav1.UpdateOptions{})
		return err
	})
}

// updateCSR reads, changes and writes a request, again if somebody else, such
// as the controller manager, wrote in between.
func (cp *ControlPlane) updateCSR(ctx context.Context, name, what string, update func(*certificatesv1.CertificateSigningRequest) error) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		csr, err := cp.client.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		return update(csr)
	})
	if err != nil {
		return fmt.Errorf("%s certificate signing request %s: %w", what, name, err)
	}
	return nil
}

func addCondition(csr *certificatesv1.CertificateSigningRequest, kind certificatesv1.RequestConditionType, reason, message string) {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type:    kind,
		Status:  corev1.ConditionTrue,
		Reason:  reason,
		Message: message,
	})
}
