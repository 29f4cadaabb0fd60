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

// Source is what vouches for an EK.
type Source string

// The sources of trust in an EK, in the order in which Endorsement.Sources has them.
const (
	// SourceAllowed is Config.AllowedEKs.
	SourceAllowed Source = "allowed"
	// SourceNamed is the caller, for one call.
	SourceNamed Source = "named"
	// SourceChain is a certificate that chains to Config.Roots.
	SourceChain Source = "chain"
)

// Endorsement is an EK and what vouches for it.
type Endorsement struct {
	// Fingerprint is that of PublicKey, the SubjectPublicKeyInfo in DER.
	Fingerprint Fingerprint
	PublicKey   []byte
	// Template is the EK template's name, as the hello has it: of two templates that make the same kind of key, nothing shows which
	// one made this.
	Template string
	// Sources are all that vouch for the EK: one or more.
	Sources []Source
	// Certificate is what the EK's certificate says; nil unless it was verified.
	Certificate *Certificate
}

// ChainVerified reports whether the EK's certificate chains to a root.
func (e Endorsement) ChainVerified() bool { return slices.Contains(e.Sources, SourceChain) }

// endorsement is an EK while it is judged.
type endorsement struct {
	Endorsement
	public tpm2.TPMTPublic
	key    crypto.PublicKey
}

// publicEK returns the EK that a hello names, nil unless its public area is that of the template named, byte for byte but for the
// key (EK Credential Profile, annex B). So the EK is a restricted decryption key: it opens credentials for nobody but the
// TPM itself.
func publicEK(refusals *verifier.Refusals, document *attestation.Hello) *endorsement {
	made, ok := template.EKByName(document.EKTemplate)
	if !ok {
		refusals.Add(ReasonEKTemplateUnknown, "EK: template %.32q is not known", document.EKTemplate)
		return nil
	}
	area, key, err := made.Parse(document.EKPublic)
	var bad *template.KeyError
	switch {
	case errors.As(err, &bad) && made.IsRSA():
		refusals.Add(ReasonEKWeak, "EK: %v", err)
		return nil
	case errors.As(err, &bad):
		refusals.Add(ReasonEKPoint, "EK: %v", err)
		return nil
	case err != nil:
		refusals.Add(ReasonEKPublicMismatch, "EK: the public area is not that of template %s", made.Name)
		return nil
	}
	spki, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		refusals.Add(ReasonEKPublicMismatch, "EK: the public key cannot be encoded")
		return nil
	}
	return &endorsement{
		Endorsement: Endorsement{Fingerprint: FingerprintOf(spki), PublicKey: spki, Template: made.Name},
		public:      area,
		key:         key,
	}
}

// judgeEK decides whether the EK counts: it does if a source names it or its certificate chains to a root. Where a source names
// it, its certificate is not relied on, and counts for nothing unless it is good; but one that is another key's contradicts.
func (v *Verifier) judgeEK(refusals *verifier.Refusals, ek *endorsement, certificates [][]byte, named []Fingerprint, now time.Time) {
	if v.denied[ek.Fingerprint] {
		refusals.Add(ReasonEKDenied, "EK: %s is denied", ek.Fingerprint)
	}
	if key, ok := ek.key.(*rsa.PublicKey); ok && isROCA(key.N) {
		refusals.Add(ReasonEKWeak, "EK: its RSA key has the form of those made by a faulty library (CVE-2017-15361)")
	}
	if v.allowed[ek.Fingerprint] {
		ek.Sources = append(ek.Sources, SourceAllowed)
	}
	if v.namedEKs && slices.Contains(named, ek.Fingerprint) {
		ek.Sources = append(ek.Sources, SourceNamed)
	}
	at := v.chainTime
	if at.IsZero() {
		at = now
	}
	certificate, problems := v.judgeCertificates(ek, certificates, at)
	if certificate != nil {
		ek.Sources = append(ek.Sources, SourceChain)
		ek.Certificate = certificate
	}
	trusted := len(ek.Sources) > 0
	for _, problem := range problems {
		if !trusted || problem.Reason == ReasonEKCertMismatch {
			*refusals = append(*refusals, problem)
		}
	}
	if !trusted && len(problems) == 0 { // judgeCertificates always has a problem then; should it ever have none, this refuses
		refusals.Add(ReasonEKUntrusted, "EK: nothing vouches for it")
	}
}

// isROCA reports whether an RSA modulus has the form of the keys that Infineon's RSALib made, whose factors can be found: modulo
// each of these primes it is a power of 65537 (Nemec et al., "The Return of Coppersmith's Attack", section 2.2; the primes are
// those of the authors' detection tool). One good modulus in 2^27 looks like that too.
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
