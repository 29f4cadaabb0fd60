// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"crypto/x509"
	_ "embed"
	"encoding/pem"
	"sync"
)

// The certificates are Microsoft's and DigiCert's, listed in
// https://learn.microsoft.com/azure/security/fundamentals/azure-ca-details. The files have their
// names and SHA-256 fingerprints. The roots are from Debian's package ca-certificates 20230311. The
// intermediates were checked with these roots.
var (
	//go:embed roots.pem
	rootsPEM []byte
	//go:embed intermediates.pem
	intermediatesPEM []byte
)

var (
	shippedRoots         = sync.OnceValue(func() []*x509.Certificate { return parsePEM(rootsPEM) })
	shippedIntermediates = sync.OnceValue(func() []*x509.Certificate { return parsePEM(intermediatesPEM) })
)

// Roots returns the root CAs that Microsoft's intermediate CAs have had since 2023. The caller must
// not change them.
func Roots() []*x509.Certificate { return shippedRoots() }

// Intermediates returns the intermediate CAs that are known to sign certificates of Azure's
// metadata service. They are valid to May 2028 or June 2029. Microsoft has more: "Microsoft TLS G2
// RSA CA OCSP" 06 to 16. An operator adds those that sign in its regions. The caller must not
// change them.
func Intermediates() []*x509.Certificate { return shippedIntermediates() }

// parsePEM parses certificates that are part of the program. It panics if they do not parse, so
// that a test fails.
func parsePEM(data []byte) (certificates []*x509.Certificate) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			panic(err)
		}
		certificates = append(certificates, c)
	}
	return certificates
}
