// SPDX-License-Identifier: Apache-2.0

package oddrequest

import (
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// Largest returns a hello with as long a document, and as long an annotation, as the API server
// takes. try asks it, by a dry run. The document is no hello's.
func Largest(nodeName string, try func(*certificatesv1.CertificateSigningRequest) error) (*certificatesv1.CertificateSigningRequest, error) {
	key, _, err := csr.NewKey()
	if err != nil {
		return nil, err
	}
	der, err := csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: "test://" + nodeName}, key)
	if err != nil {
		return nil, err
	}
	made := func(document, annotation int) (*certificatesv1.CertificateSigningRequest, error) {
		data := []byte(`{"a":"` + strings.Repeat("a", document) + `"}`)
		content, err := attestation.Request{PKCS10: der, Provider: tpm.Name, Data: data}.Marshal()
		if err != nil {
			return nil, err
		}
		r := csr.Object(csr.NewName(), attestation.HelloSignerName, content, key.Public(), nil)
		if annotation > 0 {
			r.Annotations = map[string]string{"a": strings.Repeat("x", annotation)}
		}
		return r, nil
	}
	most := func(one func(length int) (*certificatesv1.CertificateSigningRequest, error)) (taken int, err error) {
		for step := 1 << 17; step > 0; step /= 2 {
			r, err := one(taken + step)
			if err != nil {
				continue // it is too long for the protocol
			}
			switch err := try(r); {
			case err == nil:
				taken += step
			case !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsRequestEntityTooLargeError(err):
				return 0, err
			}
		}
		return taken, nil
	}
	document, err := most(func(length int) (*certificatesv1.CertificateSigningRequest, error) { return made(length, 0) })
	if err != nil {
		return nil, err
	}
	annotation, err := most(func(length int) (*certificatesv1.CertificateSigningRequest, error) { return made(document, length) })
	if err != nil {
		return nil, err
	}
	return made(document, annotation)
}
