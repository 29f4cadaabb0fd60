// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"math/big"

	"k8s.io/client-go/rest"
)

// Reencode returns other encodings, in PEM, of a certificate that this CA issued. Each has the same
// content and a valid signature, but other bytes, and so another fingerprint. A thief can make them
// without the CA's key, because a CA does not sign the encoding of its own signature.
func (ca *CA) Reencode(certificate []byte) (map[string][]byte, error) {
	block, _ := pem.Decode(certificate)
	if block == nil {
		return nil, errors.New("no certificate in PEM")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, err
	}
	var outer struct {
		TBS, Algorithm asn1.RawValue
		Signature      asn1.BitString
	}
	if _, err := asn1.Unmarshal(leaf.Raw, &outer); err != nil {
		return nil, err
	}
	original := outer.Signature.Bytes
	var value struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(original, &value); err != nil {
		return nil, err
	}
	// (r, s) and (r, n-s) are both valid
	value.S.Sub(ca.key.Curve.Params().N, value.S)
	negated, err := asn1.Marshal(value)
	if err != nil {
		return nil, err
	}
	// A signature begins with 0x30, and so with two zero bits. Shift these bits out, and declare
	// one or two unused bits at the end: crypto/x509 shifts the value back.
	shifted := func(signature []byte, by int) asn1.BitString {
		number := new(big.Int).SetBytes(signature)
		number.Lsh(number, uint(by))
		return asn1.BitString{Bytes: number.FillBytes(make([]byte, len(signature))), BitLength: 8*len(signature) - by}
	}
	others := map[string][]byte{}
	for name, signature := range map[string]asn1.BitString{
		"n-s":                     {Bytes: negated, BitLength: 8 * len(negated)},
		"an unused bit":           shifted(original, 1),
		"two unused bits":         shifted(original, 2),
		"n-s and two unused bits": shifted(negated, 2),
	} {
		outer.Signature = signature
		der, err := asn1.Marshal(outer)
		if err != nil {
			return nil, err
		}
		again, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		if err := again.CheckSignatureFrom(ca.cert); err != nil || bytes.Equal(der, leaf.Raw) || !bytes.Equal(again.RawTBSCertificate, leaf.RawTBSCertificate) {
			return nil, errors.Join(errors.New("encoding "+name+": must be valid, differ, and have the same content"), err)
		}
		others[name] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	return others, nil
}

// ReencodeConfig returns the credential of a client certificate that this CA issued, with the
// certificate in each of the encodings of Reencode.
func (ca *CA) ReencodeConfig(config *rest.Config) (map[string]*rest.Config, error) {
	encodings, err := ca.Reencode(config.CertData)
	configs := map[string]*rest.Config{}
	for name, certificate := range encodings {
		configs[name] = rest.CopyConfig(config)
		configs[name].CertData = certificate
	}
	return configs, err
}
