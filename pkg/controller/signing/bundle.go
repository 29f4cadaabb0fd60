// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"fmt"
	"slices"
	"time"
)

// parseBundle parses a CA as parseCA does, with certificates in any order. During a rotation some
// of them are only trusted and do not sign, such as the old root in Cluster API's <cluster>-ca. The
// certificate with the private key's public key signs. If several have that key, the valid one that
// expires last signs.
func parseBundle(certificates, key []byte, now time.Time) (*CA, error) {
	bundle, err := parseChain(certificates)
	if err != nil {
		return nil, err
	}
	signer, err := parseKey(key)
	if err != nil {
		return nil, err
	}
	public, _ := signer.Public().(interface{ Equal(crypto.PublicKey) bool })
	var own []*x509.Certificate
	for _, c := range bundle {
		if public != nil && public.Equal(c.PublicKey) {
			own = append(own, c)
		}
	}
	if len(own) == 0 {
		return nil, &CAError{fmt.Sprintf("the key belongs to none of the %d certificates", len(bundle))}
	}
	slices.SortStableFunc(own, func(a, b *x509.Certificate) int { return b.NotAfter.Compare(a.NotAfter) })
	for _, c := range own {
		ca := &CA{chainOf(c, bundle), signer}
		if err = ca.check(); err == nil {
			err = ca.checkTime(now)
		}
		if err == nil {
			return ca, nil
		}
	}
	return nil, err
}

// chainOf returns a certificate, then its issuers in the bundle.
func chainOf(c *x509.Certificate, bundle []*x509.Certificate) []*x509.Certificate {
	chain := []*x509.Certificate{c}
	for len(chain) <= len(bundle) && !selfSigned(c) {
		above := slices.IndexFunc(bundle, func(issuer *x509.Certificate) bool {
			return !slices.Contains(chain, issuer) && bytes.Equal(issuer.RawSubject, c.RawIssuer) && c.CheckSignatureFrom(issuer) == nil
		})
		if above < 0 {
			break
		}
		c = bundle[above]
		chain = append(chain, c)
	}
	return chain
}
