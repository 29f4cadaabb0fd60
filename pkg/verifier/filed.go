// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// Filed is one CertificateSigningRequest as the API server stores it. The API server sets UID and
// Created. The requester chose the rest.
type Filed struct {
	Name, UID, SignerName string
	// Request is spec.request.
	Request []byte
	// Usages and ExpirationSeconds are spec.usages in their order, and spec.expirationSeconds, nil
	// if unset.
	Usages            []string
	ExpirationSeconds *int32
	// Created is the time when the API server stored the request, by its clock. Evidence that came
	// in time stays in time, even if the request waits long for its machine or a CA.
	Created time.Time
}

// FiledOf returns the parts of an object that its evidence is verified with.
func FiledOf(object *certificatesv1.CertificateSigningRequest) Filed {
	usages := make([]string, 0, len(object.Spec.Usages))
	for _, usage := range object.Spec.Usages {
		usages = append(usages, string(usage))
	}
	return Filed{
		Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName,
		Request: object.Spec.Request, Usages: usages, ExpirationSeconds: object.Spec.ExpirationSeconds,
		Created: object.CreationTimestamp.Time,
	}
}
