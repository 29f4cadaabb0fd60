// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
)

// issuedCertificate is a certificate that is in a record and not published yet.
type issuedCertificate struct {
	request     types.UID
	fingerprint string
	chain       []byte
}

// unpublished has issued certificates by the name of their request, until API servers accept them.
// The zero value is empty. After a restart of the controller it is empty, too: then the request gets
// another certificate.
type unpublished struct {
	mu     sync.Mutex
	byName map[string]*issuedCertificate
}

// get returns the certificate of a request, nil if there is none.
func (u *unpublished) get(request *certificatesv1.CertificateSigningRequest) *issuedCertificate {
	u.mu.Lock()
	defer u.mu.Unlock()
	if c := u.byName[request.Name]; c != nil && c.request == request.UID {
		return c
	}
	return nil
}

func (u *unpublished) keep(request *certificatesv1.CertificateSigningRequest, c *issuedCertificate) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byName == nil {
		u.byName = map[string]*issuedCertificate{}
	}
	u.byName[request.Name] = c
}

// forget drops the certificate of a request that is decided or gone.
func (u *unpublished) forget(request string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.byName, request)
}
