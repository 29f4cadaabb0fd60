// SPDX-License-Identifier: Apache-2.0

package act

import (
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// IssuedCertificate is a certificate that is in a record and not published yet.
type IssuedCertificate struct {
	request           types.UID
	node, fingerprint string
	Chain             []byte
	// Warnings are those of the approval, for the decision record.
	Warnings verifier.Refusals
}

// unpublished has issued certificates by the name of their request, until API servers accept them.
// The zero value is empty. A restart of the controller loses the certificates: their requests then
// get others.
type unpublished struct {
	mu     sync.Mutex
	byName map[string]*IssuedCertificate
}

// get returns the certificate of a request, nil if there is none.
func (u *unpublished) get(request *certificatesv1.CertificateSigningRequest) *IssuedCertificate {
	u.mu.Lock()
	defer u.mu.Unlock()
	if c := u.byName[request.Name]; c != nil && c.request == request.UID {
		return c
	}
	return nil
}

func (u *unpublished) keep(request *certificatesv1.CertificateSigningRequest, c *IssuedCertificate) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byName == nil {
		u.byName = map[string]*IssuedCertificate{}
	}
	u.byName[request.Name] = c
}

// forget drops the certificate of a request that is decided or gone.
func (u *unpublished) forget(request string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.byName, request)
}
