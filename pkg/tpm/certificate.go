// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"compress/zlib"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

const (
	// maxCertificate bounds one NV index in bytes. Chips have up to 2048.
	maxCertificate = 8 << 10
	// maxChain bounds the number of CA certificates, and of the NV indices that they are read
	// from.
	maxChain = 8
)

// trimCertificate returns the certificate in the content of an NV index. Chips put the header of
// the TCG PC Client specification before it, and padding behind it. Some compress it. The result is
// a DER SEQUENCE of its full length. It checks nothing else.
func trimCertificate(nv []byte) ([]byte, error) {
	der, _, err := nextCertificate(nv)
	return der, err
}

// nextCertificate returns the first certificate in data, and the bytes behind it.
func nextCertificate(data []byte) (der, rest []byte, err error) {
	// TCG PC Client Specific Implementation Specification, 7.3.2: TCG_PCCLIENT_STORED_CERT, of
	// type TCG_FULL_CERT or without that inner tag.
	if len(data) >= 5 && bytes.HasPrefix(data, []byte{0x10, 0x01, 0x00}) {
		size := int(binary.BigEndian.Uint16(data[3:]))
		data = data[5:]
		if size > len(data) {
			return nil, nil, errors.New("certificate: it is shorter than its header says")
		}
		der, _, err := nextBare(bytes.TrimPrefix(data[:size], []byte{0x10, 0x02}))
		return der, data[size:], err
	}
	return nextBare(data)
}

// nextBare is nextCertificate for data without a header.
func nextBare(data []byte) (der, rest []byte, err error) {
	if !isCompressed(data) {
		return nextDER(data)
	}
	inflated, rest, err := inflate(data)
	if err != nil {
		return nil, nil, err
	}
	der, _, err = nextDER(inflated)
	return der, rest, err
}

func nextDER(data []byte) (der, rest []byte, err error) {
	var value asn1.RawValue
	rest, err = asn1.Unmarshal(data, &value)
	if err != nil || value.Class != asn1.ClassUniversal || value.Tag != asn1.TagSequence || !value.IsCompound {
		return nil, nil, errors.New("certificate: not DER")
	}
	return value.FullBytes, rest, nil
}

// isCompressed reports whether data begins with a header of zlib (RFC 1950, 2.2) for deflate with a
// window of 32 KiB and without a dictionary. A certificate in DER begins with 0x30 instead.
func isCompressed(data []byte) bool {
	return len(data) > 2 && data[0] == 0x78 && binary.BigEndian.Uint16(data)%31 == 0 && data[1]&0x20 == 0
}

// maxInflated bounds the inflated size of a whole chain, in bytes.
const maxInflated = maxChain * maxCertificate

// inflate returns the content of the zlib stream that data begins with, and the bytes behind it. A
// stream has a checksum, which is checked.
func inflate(data []byte) (content, rest []byte, err error) {
	source := bytes.NewReader(data) // read byte by byte, so no byte behind the stream is lost
	stream, err := zlib.NewReader(source)
	if err == nil {
		content, err = bounded.ReadAll(stream, maxInflated)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("certificate: compressed, and does not inflate: %w", err)
	}
	return content, data[len(data)-source.Len():], nil
}

// splitChain returns the certificates in data, one after the other, with or without padding. A
// compressed part may have several.
func splitChain(data []byte) [][]byte {
	var chain [][]byte
	for len(chain) < maxChain {
		data = bytes.TrimLeft(data, "\x00\xff")
		if isCompressed(data) {
			content, rest, err := inflate(data)
			if err != nil {
				break
			}
			for len(chain) < maxChain {
				der, more, err := nextDER(bytes.TrimLeft(content, "\x00\xff"))
				if err != nil {
					break
				}
				chain, content = append(chain, der), more
			}
			data = rest
			continue
		}
		der, rest, err := nextCertificate(data)
		if err != nil {
			break
		}
		chain, data = append(chain, der), rest
	}
	return chain
}
