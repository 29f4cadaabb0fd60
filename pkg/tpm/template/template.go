// SPDX-License-Identifier: Apache-2.0

// Package template has the templates of the keys on which node and verifier must agree. These are
// the endorsement keys (EK) of the TCG EK Credential Profile for TPM Family 2.0, and the
// attestation key (AK). It does no I/O.
package template

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"slices"

	"github.com/google/go-tpm/tpm2"
)

// EK is a template of the EK Credential Profile, version 2.6, annex B. The list of them is closed.
type EK struct {
	// Name is our own: "ecc-p256". Names of the high range end in "-high".
	Name string
	// Certificate is the NV index at which the maker of the TPM keeps the EK's certificate
	// (profile, 2.2.1.4 and 2.2.1.5).
	Certificate uint32
	// Nonce and Template are the NV indices of the manufacturer's input for this chip's EK. They
	// are set if the input is not the profile's default (profile, 2.2.1.4 and 2.2.1.5). Nonce is 0
	// in the high range, which has none.
	Nonce, Template uint32
	// Public is the template for TPM2_CreatePrimary. Its Unique is the profile's, not a key.
	Public tpm2.TPMTPublic

	// head is the start of every public area of this template. It is shared, and never changes.
	head []byte
}

// kind describes an EK template. Each caller gets a new template.
type kind struct {
	name                         string
	certificate, nonce, template uint32
	public                       func() tpm2.TPMTPublic
}

func (k kind) ek() EK {
	return EK{k.name, k.certificate, k.nonce, k.template, k.public(), ekHeads()[k.name]}
}

func kinds() []kind {
	return []kind{
		{"ecc-p256", 0x01c0000a, 0x01c0000b, 0x01c0000c, func() tpm2.TPMTPublic { return eccEK(low, tpm2.TPMECCNistP256) }},
		{"ecc-p256-high", 0x01c00014, 0, 0x01c00015, func() tpm2.TPMTPublic { return eccEK(highSHA256, tpm2.TPMECCNistP256) }},
		{"ecc-p384-high", 0x01c00016, 0, 0x01c00017, func() tpm2.TPMTPublic { return eccEK(highSHA384, tpm2.TPMECCNistP384) }},
		{"rsa-2048", 0x01c00002, 0x01c00003, 0x01c00004, func() tpm2.TPMTPublic { return rsaEK(low) }},
		{"rsa-2048-high", 0x01c00012, 0, 0x01c00013, func() tpm2.TPMTPublic { return rsaEK(highSHA256) }},
	}
}

// Names returns the name of every template, in the order of EKs. It makes no template.
func Names() []string {
	var names []string
	for _, k := range kinds() {
		names = append(names, k.name)
	}
	return names
}

// EKs returns every template, in the order of preference of a node. A chip makes an ECC key in a
// quarter of a second, and an RSA key in several seconds. Chips have shipped with the low range for
// longer.
func EKs() []EK {
	var all []EK
	for _, k := range kinds() {
		all = append(all, k.ek())
	}
	return all
}

// EKByName returns the template of that name.
func EKByName(name string) (EK, bool) {
	for _, k := range kinds() {
		if k.name == name {
			return k.ek(), true
		}
	}
	return EK{}, false
}

// IsRSA reports whether the template makes an RSA key. Otherwise it makes an ECC key.
func (e EK) IsRSA() bool { return e.Public.Type == tpm2.TPMAlgRSA }

// PolicyOR returns the branches for TPM2_PolicyOR, after TPM2_PolicySecret(TPM_RH_ENDORSEMENT) has
// satisfied the first of them. It is nil in the low range, where TPM2_PolicySecret alone is the
// whole policy.
func (e EK) PolicyOR() []tpm2.TPM2BDigest {
	for _, r := range []policies{highSHA256(), highSHA384()} {
		if bytes.Equal(r.policy, e.Public.AuthPolicy.Buffer) {
			return []tpm2.TPM2BDigest{{Buffer: r.policyA}, {Buffer: r.policyC}}
		}
	}
	return nil
}

// PublicArea returns the public area of the EK with that public key and this template. A
// certificate has the key alone. The template has the rest.
func (e EK) PublicArea(key crypto.PublicKey) (tpm2.TPMTPublic, error) {
	var unique tpm2.TPMUPublicID
	switch key := key.(type) {
	case *rsa.PublicKey:
		if !e.IsRSA() {
			return tpm2.TPMTPublic{}, &otherKeyError{e.Name, "an RSA key"}
		}
		if err := checkRSA(key); err != nil {
			return tpm2.TPMTPublic{}, &otherKeyError{e.Name, err.Error()}
		}
		unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgRSA, &tpm2.TPM2BPublicKeyRSA{Buffer: key.N.Bytes()})
	case *ecdsa.PublicKey:
		if e.IsRSA() {
			return tpm2.TPMTPublic{}, &otherKeyError{e.Name, "an ECC key"}
		}
		parameters, err := e.Public.Parameters.ECCDetail()
		if err != nil {
			return tpm2.TPMTPublic{}, err
		}
		if want, err := curve(parameters.CurveID); err != nil || key.Curve != want {
			return tpm2.TPMTPublic{}, &otherKeyError{e.Name, "a key on another curve"}
		}
		point, err := key.Bytes() // refuses a point that is not on the curve
		if err != nil {
			return tpm2.TPMTPublic{}, &otherKeyError{e.Name, "a point that is not on its curve"}
		}
		x, y := point[1:1+len(point)/2], point[1+len(point)/2:]
		unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(x, y))
	default:
		return tpm2.TPMTPublic{}, &otherKeyError{e.Name, fmt.Sprintf("a key of type %T", key)}
	}
	public := e.Public
	public.Unique = unique
	return public, nil
}

// otherKeyError says that a key is not one that the template can make.
type otherKeyError struct{ Template, Problem string }

func (e *otherKeyError) Error() string {
	return fmt.Sprintf("EK template %s does not make %s", e.Template, e.Problem)
}

// AK returns the template of the attestation key, a primary key of the endorsement hierarchy.
// Quotes of other hierarchies have firmware version and boot counters obfuscated. The same TPM
// always makes the same AK, so nothing is stored.
func AK() tpm2.TPMTPublic {
	return tpm2.TPMTPublic{
		Type:    tpm2.TPMAlgECC, // made in a quarter of a second; an RSA key takes several seconds
		NameAlg: tpm2.TPMAlgSHA256,
		ObjectAttributes: tpm2.TPMAObject{
			FixedTPM:            true, // never leaves this TPM
			FixedParent:         true, // follows from FixedTPM
			SensitiveDataOrigin: true, // made by the TPM, so only the TPM knows the private key
			// used with its authorisation value, which is empty: every user of the TPM may quote
			UserWithAuth: true,
			// so an interrupted command does not count towards lockout; there is no secret to guess
			NoDA: true,
			// signs nothing but what the TPM itself has made, so a quote cannot be forged
			Restricted:  true,
			SignEncrypt: true, // signs; Decrypt must be clear in a restricted signing key
		},
		Parameters: tpm2.NewTPMUPublicParms(tpm2.TPMAlgECC, &tpm2.TPMSECCParms{
			// A restricted key has one fixed scheme.
			Scheme: tpm2.TPMTECCScheme{
				Scheme:  tpm2.TPMAlgECDSA,
				Details: tpm2.NewTPMUAsymScheme(tpm2.TPMAlgECDSA, &tpm2.TPMSSigSchemeECDSA{HashAlg: tpm2.TPMAlgSHA256}),
			},
			CurveID: tpm2.TPMECCNistP256,
		}),
		Unique: tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, eccPoint(append([]byte(akLabel), make([]byte, 32-len(akLabel))...), make([]byte, 32))),
	}
}

// akLabel distinguishes the AK from that of any other program on the machine with an AK of the same
// form. The quotes of such a program for its own server must not answer our challenges.
const akLabel = "kubelet-authenticator tpm/v1"

// maxPublic bounds a marshalled public area, in bytes. Our largest, RSA-2048, has 314.
const maxPublic = 1024

// Parse reads a marshalled TPMT_PUBLIC. It refuses input that would not marshal to the same bytes.
func Parse(public []byte) (tpm2.TPMTPublic, error) {
	if len(public) > maxPublic {
		return tpm2.TPMTPublic{}, fmt.Errorf("public area: more than %d bytes", maxPublic)
	}
	area, err := tpm2.Unmarshal[tpm2.TPMTPublic](public)
	if err != nil {
		return tpm2.TPMTPublic{}, errors.New("public area: does not parse")
	}
	if !bytes.Equal(tpm2.Marshal(area), public) {
		return tpm2.TPMTPublic{}, errors.New("public area: not in its one encoding")
	}
	return *area, nil
}

// PublicKey returns the key in a public area: RSA of 2048 bits with exponent 65537, or a point on
// P-256 or P-384. It checks that the point is on the curve.
func PublicKey(area tpm2.TPMTPublic) (crypto.PublicKey, error) {
	switch area.Type {
	case tpm2.TPMAlgRSA:
		parameters, err := area.Parameters.RSADetail()
		if err != nil {
			return nil, fmt.Errorf("public area: %w", err)
		}
		modulus, err := area.Unique.RSA()
		if err != nil {
			return nil, fmt.Errorf("public area: %w", err)
		}
		if parameters.Exponent != 0 { // 0 means 65537
			return nil, errors.New("public area: the exponent of its RSA key is not the default")
		}
		key := &rsa.PublicKey{N: new(big.Int).SetBytes(modulus.Buffer), E: exponent}
		if err := checkRSA(key); err != nil || len(modulus.Buffer) != rsaBits/8 {
			return nil, fmt.Errorf("public area: holds no RSA key of %d bits", rsaBits)
		}
		return key, nil
	case tpm2.TPMAlgECC:
		parameters, err := area.Parameters.ECCDetail()
		if err != nil {
			return nil, fmt.Errorf("public area: %w", err)
		}
		point, err := area.Unique.ECC()
		if err != nil {
			return nil, fmt.Errorf("public area: %w", err)
		}
		c, err := curve(parameters.CurveID)
		if err != nil {
			return nil, err
		}
		size := (c.Params().BitSize + 7) / 8
		if len(point.X.Buffer) > size || len(point.Y.Buffer) > size {
			return nil, errors.New("public area: a coordinate is too long for its curve")
		}
		// Some old chips leave out leading zeros.
		uncompressed := make([]byte, 1+2*size)
		uncompressed[0] = 4
		copy(uncompressed[1+size-len(point.X.Buffer):], point.X.Buffer)
		copy(uncompressed[1+2*size-len(point.Y.Buffer):], point.Y.Buffer)
		key, err := ecdsa.ParseUncompressedPublicKey(c, uncompressed)
		if err != nil {
			return nil, errors.New("public area: its point is not on its curve")
		}
		return key, nil
	default:
		return nil, errors.New("public area: neither RSA nor ECC")
	}
}

// CertifiedKey returns the key in an EK certificate. Some makers give RSA keys the algorithm
// identifier id-RSAES-OAEP, for which crypto/x509 returns no key (go-attestation handles them too).
func CertifiedKey(cert *x509.Certificate) (crypto.PublicKey, error) {
	if cert.PublicKey != nil {
		return cert.PublicKey, nil
	}
	var spki struct {
		Algorithm pkix.AlgorithmIdentifier
		Key       asn1.BitString
	}
	rest, err := asn1.Unmarshal(cert.RawSubjectPublicKeyInfo, &spki)
	if err != nil || len(rest) > 0 || !spki.Algorithm.Algorithm.Equal(asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 7}) {
		return nil, errors.New("certificate: a key of a kind that is not known here")
	}
	key, err := x509.ParsePKCS1PublicKey(spki.Key.RightAlign())
	if err != nil {
		return nil, errors.New("certificate: its RSA key does not parse")
	}
	return key, nil
}

// Name returns the Name of an object from its marshalled public area. It is the nameAlg, then the
// hash of the area (TPM 2.0 Library, part 1, "Names"). It supports SHA-256 and SHA-384. It does not
// check the area: CheckAK, CheckEK and Parse do.
func Name(public []byte) ([]byte, error) {
	if len(public) < 4 || len(public) > maxPublic {
		return nil, errors.New("public area: has no name")
	}
	nameAlg := public[2:4] // after the type
	switch tpm2.TPMAlgID(binary.BigEndian.Uint16(nameAlg)) {
	case tpm2.TPMAlgSHA256:
		digest := sha256.Sum256(public)
		return slices.Concat(nameAlg, digest[:]), nil
	case tpm2.TPMAlgSHA384:
		digest := sha512.Sum384(public)
		return slices.Concat(nameAlg, digest[:]), nil
	default:
		return nil, errors.New("public area: its name is neither SHA-256 nor SHA-384")
	}
}

const (
	rsaBits  = 2048
	exponent = 65537
)

func checkRSA(key *rsa.PublicKey) error {
	if key.N == nil || key.N.BitLen() != rsaBits || key.N.Bit(0) == 0 || key.E != exponent {
		return fmt.Errorf("an RSA key other than one of %d bits with exponent %d", rsaBits, exponent)
	}
	return nil
}

func curve(id tpm2.TPMECCCurve) (elliptic.Curve, error) {
	switch id {
	case tpm2.TPMECCNistP256:
		return elliptic.P256(), nil
	case tpm2.TPMECCNistP384:
		return elliptic.P384(), nil
	default:
		return nil, errors.New("public area: neither P-256 nor P-384")
	}
}

func eccPoint(x, y []byte) *tpm2.TPMSECCPoint {
	return &tpm2.TPMSECCPoint{X: tpm2.TPM2BECCParameter{Buffer: x}, Y: tpm2.TPM2BECCParameter{Buffer: y}}
}
