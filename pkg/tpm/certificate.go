// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"encoding/asn1"
	"encoding/binary"
	"errors"
)

const (
	// maxCertificate bounds one NV index in bytes. Chips have up to 2048.
	maxCertificate = 8 << 10
	// maxChain bounds the number of CA certificates, and of the NV indices that they are read
	// from.
	maxChain = 8
)

// trimCertificate returns the certificate in the content of an NV index. Chips put the header of
// the TCG PC Client specification before it, and padding behind it. The result is a DER SEQUENCE of
// its full length. Nothing else is checked.
func trimCertificate(nv []byte) ([]byte, error) {
	// TCG PC Client Specific Implementation Specification, 7.3.2: TCG_PCCLIENT_STORED_CERT, of
	// type TCG_FULL_CERT or without that inner tag.
	if len(nv) >= 5 && bytes.HasPrefix(nv, []byte{0x10, 0x01, 0x00}) {
		size := int(binary.BigEndian.Uint16(nv[3:]))
		nv = nv[5:]
		if size > len(nv) {
			return nil, errors.New("certificate: its header promises more than there is")
		}
		nv = bytes.TrimPrefix(nv[:size], []byte{0x10, 0x02})
	}
	var der asn1.RawValue
	if _, err := asn1.Unmarshal(nv, &der); err != nil || der.Class != asn1.ClassUniversal || der.Tag != asn1.TagSequence || !der.IsCompound {
		return nil, errors.New("certificate: not DER")
	}
	return der.FullBytes, nil
}

// splitChain returns the certificates in data, one after the other, with or without padding.
func splitChain(data []byte) [][]byte {
	var chain [][]byte
	for len(chain) < maxChain {
		data = bytes.TrimLeft(data, "\x00\xff")
		der, err := trimCertificate(data)
		if err != nil {
			break
		}
		chain = append(chain, der)
		data = data[bytes.Index(data, der)+len(der):] // behind its header, too
	}
	return chain
}
