// SPDX-License-Identifier: Apache-2.0

package nitrotpm

import (
	"errors"
	"fmt"
)

// MessageSize is the size of the buffer for a request and its answer, in bytes. AWS's own tool
// takes the same.
const MessageSize = 8192

// response is the answer to a request: one of its fields is set.
type response struct {
	Attestation *struct {
		Document []byte `cbor:"document"`
	} `cbor:"Attestation"`
	Error string `cbor:"Error"`
}

// Request returns the message that asks for a document with this nonce, and with no user data and
// no public key.
func Request(nonce []byte) []byte {
	b := appendText(appendHead(nil, majorMap, 1), "Attestation")
	b = appendHead(b, majorMap, 3)
	b = append(appendText(b, "user_data"), null)
	b = appendBytes(appendText(b, "nonce"), nonce)
	return append(appendText(b, "public_key"), null)
}

// ParseResponse returns the document of an answer. The answer is at the start of the buffer. What
// follows it is left from the request.
func ParseResponse(buffer []byte) ([]byte, error) {
	var r response
	if _, err := decoder.UnmarshalFirst(buffer, &r); err != nil {
		return nil, errors.New("the NitroTPM's answer is malformed")
	}
	if r.Attestation == nil || len(r.Attestation.Document) == 0 {
		return nil, fmt.Errorf("the NitroTPM returns no document, but error %.64q", r.Error)
	}
	return r.Attestation.Document, nil
}

// Answer returns the message with a document.
func Answer(document []byte) []byte {
	b := appendText(appendHead(nil, majorMap, 1), "Attestation")
	return appendBytes(appendText(appendHead(b, majorMap, 1), "document"), document)
}
