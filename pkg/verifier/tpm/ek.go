// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"math/big"
	"slices"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// trustSource is a source of trust in an EK.
type trustSource string

// The sources of trust in an EK, in the order in which Endorsement.sources has them.
const (
	// trustAllowed is Config.AllowedEKs.
	trustAllowed trustSource = "allowed"
	// trustNamed means that the caller named the EK for one call.
	trustNamed trustSource = "named"
	// trustChain is a certificate that chains to Config.Roots.
	trustChain trustSource = "chain"
)

// Endorsement is an EK with the sources that vouch for it.
type Endorsement struct {
	// Fingerprint is the fingerprint of publicKey, a SubjectPublicKeyInfo in DER.
	Fingerprint Fingerprint
	publicKey   []byte
	// template is the name of the EK template, from the hello. Two templates may make the same kind
	// of key, and nothing shows which one made this key.
	template string
	// sources are all sources that vouch for the EK, one or more.
	sources []trustSource
	// certificate is the EK's certificate, nil unless it was verified.
	certificate *ekCertificate
}

// chainVerified reports whether the EK's certificate chains to a root.
func (e Endorsement) chainVerified() bool { return slices.Contains(e.sources, trustChain) }

// candidateEK is an EK while it is judged.
type candidateEK struct {
	Endorsement
	public tpm2.TPMTPublic
	key    crypto.PublicKey
}

// publicEK returns the EK of a hello. It is nil unless the public area is that of the named
// template, byte for byte except the key (EK Credential Profile, annex B). So the EK is a
// restricted decryption key, which opens credentials only for the TPM itself.
func publicEK(refusals *verifier.Refusals, document *attestation.Hello) *candidateEK {
	ekTemplate, ok := template.EKByName(document.EKTemplate)
	if !ok {
		refusals.Add(reasonEKTemplateUnknown, "EK: template %.32q is not known", document.EKTemplate)
		return nil
	}
	area, key, err := ekTemplate.Parse(document.EKPublic)
	var bad *template.KeyError
	switch {
	case errors.As(err, &bad) && ekTemplate.IsRSA():
		refusals.Add(reasonEKWeak, "EK: %v", err)
		return nil
	case errors.As(err, &bad):
		refusals.Add(reasonEKPoint, "EK: %v", err)
		return nil
	case err != nil:
		refusals.Add(reasonEKPublicMismatch, "EK: the public area is not that of template %s", ekTemplate.Name)
		return nil
	}
	spki, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		refusals.Add(reasonEKPublicMismatch, "EK: the public key cannot be encoded")
		return nil
	}
	return &candidateEK{
		Endorsement: Endorsement{Fingerprint: FingerprintOf(spki), publicKey: spki, template: ekTemplate.Name},
		public:      area,
		key:         key,
	}
}

// verifyEK decides whether the EK is trusted: a source names it, or its certificate chains to a
// root. If a source names it, only two problems of its certificate matter. A certificate of another
// key is a contradiction. A certificate that does not parse does not come from an honest node.
func (v *Verifier) verifyEK(refusals *verifier.Refusals, ek *candidateEK, certificates [][]byte, namedEKs []Fingerprint, now time.Time) {
	if v.denied[ek.Fingerprint] {
		refusals.Add(ReasonEKDenied, "EK: %s is denied", ek.Fingerprint)
	}
	if key, ok := ek.key.(*rsa.PublicKey); ok && isROCA(key.N) {
		refusals.Add(reasonEKWeak, "EK: its RSA key has the form of those made by a faulty library (CVE-2017-15361)")
	}
	if v.allowed[ek.Fingerprint] {
		ek.sources = append(ek.sources, trustAllowed)
	}
	if v.namedEKs && slices.Contains(namedEKs, ek.Fingerprint) {
		ek.sources = append(ek.sources, trustNamed)
	}
	at := v.chainTime
	if at.IsZero() {
		at = now
	}
	certificate, problems := v.verifyCertificates(ek, certificates, at)
	if certificate != nil {
		ek.sources = append(ek.sources, trustChain)
		ek.certificate = certificate
	}
	trusted := len(ek.sources) > 0
	for _, problem := range problems {
		if !trusted || problem.Reason == reasonEKCertMismatch || problem.Reason == reasonEKCertMalformed {
			*refusals = append(*refusals, problem)
		}
	}
	// not reached, since verifyCertificates always returns a problem then; refuse nevertheless
	if !trusted && len(problems) == 0 {
		refusals.Add(reasonEKUntrusted, "EK: nothing vouches for it")
	}
}

// isROCA reports whether an RSA modulus has the form of keys made by Infineon's RSALib, whose
// factors can be found. Modulo each of these primes it is a power of 65537 (Nemec et al., "The
// Return of Coppersmith's Attack", section 2.2). The primes are those of the authors' detection
// tool. One in 2^27 secure moduli has that form, too.
func isROCA(modulus *big.Int) bool {
	for _, prime := range []uint64{11, 13, 17, 19, 37, 53, 61, 71, 73, 79, 97, 103, 107, 109, 127, 151, 157} {
		rest := new(big.Int).Mod(modulus, new(big.Int).SetUint64(prime)).Uint64()
		power, found := uint64(1), false
		for range prime {
			if power == rest {
				found = true
				break
			}
			power = power * 65537 % prime
		}
		if !found {
			return false
		}
	}
	return true
}
