// SPDX-License-Identifier: Apache-2.0

// Package attestation is the wire format that the node and the controller share. It has the PEM
// blocks of a CertificateSigningRequest's spec.request, the documents hello, challenge and proof,
// and the input of the proof's MAC. It handles bytes only: it does no I/O, reads no clock, and does
// not depend on Kubernetes. docs/spec.md describes the same bytes in words.
package attestation

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
)

// The PEM block types of spec.request, in the order in which they must appear. The API server reads
// only the first one, so the PKCS#10 request has to lead.
const (
	BlockRequest  = "CERTIFICATE REQUEST" // RFC 7468, section 7
	BlockProvider = "KUBELET AUTHENTICATOR ATTESTATION PROVIDER"
	BlockData     = "KUBELET AUTHENTICATOR ATTESTATION DATA"
)

// Limits that hold before anything is decoded.
const (
	// MaxRequestSize bounds spec.request in bytes. The API server itself takes ten times as much.
	MaxRequestSize = 128 << 10
	// MaxProviderName bounds a provider's name in bytes: a DNS label (RFC 1123), since it ends a
	// signer's name.
	MaxProviderName = 63
)

// Request is the content of spec.request. Everything in it was written by the requester: nothing is
// to be trusted before a verifier has verified it.
type Request struct {
	// PKCS10 is the certification request in DER (RFC 2986).
	PKCS10 []byte
	// Provider names the attestation provider, a lower-case DNS label.
	Provider string
	// Data is the provider's document, opaque here and never empty.
	Data []byte
}

// FormatError says why bytes are not a spec.request of ours. It never quotes them.
type FormatError struct {
	// Block is the PEM block at fault, empty if the whole request is.
	Block  string
	Reason string
}

func (e *FormatError) Error() string {
	if e.Block == "" {
		return "malformed request: " + e.Reason
	}
	return fmt.Sprintf("malformed request: block %q: %s", e.Block, e.Reason)
}

// Marshal returns the one encoding of r: three PEM blocks without headers, 64 columns, line feeds.
// It fails with a *FormatError if r could not be parsed again.
func (r Request) Marshal() ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	for _, b := range r.blocks() {
		if err := pem.Encode(&out, b); err != nil {
			return nil, err
		}
	}
	if out.Len() > MaxRequestSize {
		return nil, &FormatError{Reason: fmt.Sprintf("longer than %d bytes", MaxRequestSize)}
	}
	return out.Bytes(), nil
}

// Parse decodes spec.request strictly: it accepts exactly the bytes that Marshal writes. Any
// difference, such as a header, a fourth block, white space or another line length, is a
// *FormatError.
func Parse(data []byte) (Request, error) {
	if len(data) > MaxRequestSize {
		return Request{}, &FormatError{Reason: fmt.Sprintf("longer than %d bytes", MaxRequestSize)}
	}
	var contents [3][]byte
	rest := data
	for i, want := range []string{BlockRequest, BlockProvider, BlockData} {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			return Request{}, &FormatError{Block: want, Reason: "missing"}
		}
		if block.Type != want {
			return Request{}, &FormatError{Block: want, Reason: "another block is in its place"}
		}
		contents[i] = block.Bytes
	}
	r := Request{PKCS10: contents[0], Provider: string(contents[1]), Data: contents[2]}
	canonical, err := r.Marshal()
	if err != nil {
		return Request{}, err
	}
	// pem.Decode skips what it does not understand; comparing with the re-encoded form leaves
	// nothing to skip.
	if !bytes.Equal(canonical, data) {
		return Request{}, &FormatError{Reason: "not in canonical form: exactly three blocks, no headers, nothing between or after"}
	}
	return r, nil
}

func (r Request) blocks() []*pem.Block {
	return []*pem.Block{
		{Type: BlockRequest, Bytes: r.PKCS10},
		{Type: BlockProvider, Bytes: []byte(r.Provider)},
		{Type: BlockData, Bytes: r.Data},
	}
}

func (r Request) check() error {
	if len(r.PKCS10) == 0 {
		return &FormatError{Block: BlockRequest, Reason: "empty"}
	}
	if err := CheckProviderName(r.Provider); err != nil {
		return &FormatError{Block: BlockProvider, Reason: err.Error()}
	}
	if len(r.Data) == 0 {
		return &FormatError{Block: BlockData, Reason: "empty"}
	}
	return nil
}

// CheckProviderName returns an error unless name is a DNS label as RFC 1123 has it: 1 to
// MaxProviderName of [a-z0-9-], no hyphen at either end.
func CheckProviderName(name string) error {
	if name == "" || len(name) > MaxProviderName {
		return fmt.Errorf("a provider's name has 1 to %d characters", MaxProviderName)
	}
	for i := range len(name) {
		c := name[i]
		alnum := 'a' <= c && c <= 'z' || '0' <= c && c <= '9'
		inner := c == '-' && i > 0 && i < len(name)-1
		if !alnum && !inner {
			return errors.New("a provider's name is a lower-case DNS label")
		}
	}
	return nil
}
