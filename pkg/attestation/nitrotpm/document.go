// SPDX-License-Identifier: Apache-2.0

// Package nitrotpm reads and writes what the NitroTPM of an EC2 instance says: its attestation
// document, and the messages by which the document is requested. It verifies nothing.
//
// The document is described in "Validate a NitroTPM Attestation Document" of the EC2 User Guide. It
// is a COSE_Sign1 (RFC 9052, section 4.2).
package nitrotpm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"
)

const (
	// PCRCount is how many PCRs a document has.
	PCRCount = 24
	// DigestSize is the size of a PCR's value in bytes: SHA-384.
	DigestSize = 48
	// SignatureSize is the size of an ES384 signature in bytes: r and s (RFC 9053, section 2.1).
	SignatureSize = 96

	// maxDocument bounds a document in bytes. A real one has about 5,000.
	maxDocument = 16 << 10
	// maxBundle bounds the CA bundle. A real one has 4 certificates.
	maxBundle = 8
	// digestName is the document's name of its hash algorithm.
	digestName = "SHA384"
)

// protected is the protected header: algorithm ES384 (-35), and nothing else.
var protected = []byte{0xa1, 0x01, 0x38, 0x22}

// Document is what an instance's NitroTPM states.
type Document struct {
	// ModuleID names the instance and its TPM: i-0123456789abcdef0-tpm0000000000000000.
	ModuleID string
	// Timestamp is when the document was made, in milliseconds since 1970.
	Timestamp uint64
	// PCRs are the values of the TPM's PCRs 0 to 23 in its SHA-384 bank.
	PCRs [PCRCount][]byte
	// Certificate has the key that signed, in DER. CABundle has its issuers, the root first.
	Certificate []byte
	CABundle    [][]byte
	// PublicKey, UserData and Nonce are the requester's own words. Nil means that it gave none.
	PublicKey, UserData, Nonce []byte
}

// Signed is a document with its signature, which is not verified.
type Signed struct {
	Document
	// Payload is the document as it is signed. Signature is r and s.
	Payload, Signature []byte
}

// envelope is a COSE_Sign1.
type envelope struct {
	_                  struct{} `cbor:",toarray"`
	Protected          []byte
	Unprotected        map[int64]cbor.RawMessage
	Payload, Signature []byte
}

// payload has the fields in the order of a document.
type payload struct {
	ModuleID    string            `cbor:"module_id"`
	Digest      string            `cbor:"digest"`
	Timestamp   uint64            `cbor:"timestamp"`
	PCRs        map[uint64][]byte `cbor:"nitrotpm_pcrs"`
	Certificate []byte            `cbor:"certificate"`
	CABundle    [][]byte          `cbor:"cabundle"`
	PublicKey   []byte            `cbor:"public_key"`
	UserData    []byte            `cbor:"user_data"`
	Nonce       []byte            `cbor:"nonce"`
}

// decoder bounds what a peer's bytes can cost. What else is wrong with them, Parse finds by
// encoding again.
var decoder = func() cbor.DecMode {
	mode, err := cbor.DecOptions{
		DupMapKey: cbor.DupMapKeyEnforcedAPF, TagsMd: cbor.TagsForbidden, MaxNestedLevels: 4,
		MaxArrayElements: 16, MaxMapPairs: PCRCount, ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
	}.DecMode()
	if err != nil {
		panic(err) // the options are constant
	}
	return mode
}()

// Parse accepts a document in the one encoding in which the NitroTPM writes it. CBOR has many for
// the same content, and a signed payload alone rules out only some of them.
func Parse(data []byte) (*Signed, error) {
	if len(data) > maxDocument {
		return nil, fmt.Errorf("has more than %d bytes", maxDocument)
	}
	var e envelope
	if err := decoder.Unmarshal(data, &e); err != nil {
		return nil, errors.New("not a COSE_Sign1 of four elements")
	}
	if !bytes.Equal(data, Assemble(e.Payload, e.Signature)) {
		return nil, errors.New("not a COSE_Sign1 with ES384 in the encoding of the NitroTPM")
	}
	if len(e.Signature) != SignatureSize {
		return nil, fmt.Errorf("the signature has not %d bytes", SignatureSize)
	}
	var p payload
	if err := decoder.Unmarshal(e.Payload, &p); err != nil {
		return nil, errors.New("the payload is not that of a NitroTPM")
	}
	d := Document{
		ModuleID: p.ModuleID, Timestamp: p.Timestamp, Certificate: p.Certificate, CABundle: p.CABundle,
		PublicKey: p.PublicKey, UserData: p.UserData, Nonce: p.Nonce,
	}
	for i := range d.PCRs {
		d.PCRs[i] = p.PCRs[uint64(i)]
		if len(d.PCRs[i]) != DigestSize {
			return nil, fmt.Errorf("PCR %d has not %d bytes", i, DigestSize)
		}
	}
	if len(d.CABundle) < 1 || len(d.CABundle) > maxBundle {
		return nil, fmt.Errorf("the CA bundle has not 1 to %d certificates", maxBundle)
	}
	if !bytes.Equal(e.Payload, d.Payload()) {
		return nil, errors.New("the payload is not in the encoding of the NitroTPM")
	}
	return &Signed{Document: d, Payload: e.Payload, Signature: e.Signature}, nil
}

// Assemble returns the document of a payload and its signature: four elements, without a tag.
func Assemble(payload, signature []byte) []byte {
	b := appendHead(nil, majorArray, 4)
	b = appendBytes(b, protected)
	b = appendHead(b, majorMap, 0)
	return appendBytes(appendBytes(b, payload), signature)
}

// ToBeSigned returns the Sig_structure of a payload (RFC 9052, section 4.4).
func ToBeSigned(payload []byte) []byte {
	b := appendText(appendHead(nil, majorArray, 4), "Signature1")
	b = appendBytes(appendBytes(b, protected), nil) // no external data
	return append(appendHead(b, majorBytes, len(payload)), payload...)
}

// Payload returns d as the NitroTPM encodes it. The outer map has no length: it ends with a break.
// All else has the shortest head, and a value that the requester did not give is null.
func (d *Document) Payload() []byte {
	b := []byte{startMap}
	b = appendText(appendText(b, "module_id"), d.ModuleID)
	b = appendText(appendText(b, "digest"), digestName)
	b = appendHead(appendText(b, "timestamp"), majorUnsigned, d.Timestamp)
	b = appendHead(appendText(b, "nitrotpm_pcrs"), majorMap, len(d.PCRs))
	for i, value := range d.PCRs {
		b = appendBytes(appendHead(b, majorUnsigned, i), value)
	}
	b = appendBytes(appendText(b, "certificate"), d.Certificate)
	b = appendHead(appendText(b, "cabundle"), majorArray, len(d.CABundle))
	for _, certificate := range d.CABundle {
		b = appendBytes(b, certificate)
	}
	b = appendOptional(appendText(b, "public_key"), d.PublicKey)
	b = appendOptional(appendText(b, "user_data"), d.UserData)
	b = appendOptional(appendText(b, "nonce"), d.Nonce)
	return append(b, breakCode)
}

// The first bytes of CBOR items (RFC 8949, section 3).
const (
	majorUnsigned byte = 0 << 5
	majorBytes    byte = 2 << 5
	majorText     byte = 3 << 5
	majorArray    byte = 4 << 5
	majorMap      byte = 5 << 5
	startMap      byte = 0xbf
	null          byte = 0xf6
	breakCode     byte = 0xff
)

// appendHead appends the head of an item in its shortest form (RFC 8949, section 4.2.1).
func appendHead[N int | uint64](b []byte, major byte, n N) []byte {
	switch v := uint64(n); {
	case v < 24:
		return append(b, major|byte(v))
	case v < 1<<8:
		return append(b, major|24, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major|26), uint32(v))
	default:
		return binary.BigEndian.AppendUint64(append(b, major|27), v)
	}
}

func appendText(b []byte, s string) []byte { return append(appendHead(b, majorText, len(s)), s...) }

func appendBytes(b, value []byte) []byte {
	return append(appendHead(b, majorBytes, len(value)), value...)
}

func appendOptional(b, value []byte) []byte {
	if value == nil {
		return append(b, null)
	}
	return appendBytes(b, value)
}
