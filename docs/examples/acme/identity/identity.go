// SPDX-License-Identifier: Apache-2.0

// Package identity is the document format of the imaginary platform Acme, its machines and its
// controller. In a document the platform names the instance that got it, and its purpose. Bytes
// only: no I/O, no clock.
package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// The names that both halves use.
const (
	// Provider is the name in the request's PROVIDER block.
	Provider = "acme"
	// SignerName is the signer for this kind of evidence: the last label is the provider's name.
	SignerName = "cluster.x-k8s.io/kube-apiserver-client-kubelet-acme"
	// Version is that of the document.
	Version = "acme/v1"
	// Audience is whom the document is for. The caller chooses the nonce, so a document that
	// another verifier had an instance ask for must not count here.
	Audience = "kubelet-authenticator"
)

// MaxSize bounds a document, in bytes.
const MaxSize = 4 << 10

// The labels make sure that no other data has the same hash or signature as the data here.
const (
	labelNonce     = "acme node request"
	labelSignature = "acme identity document " + Version
)

// Document is what goes into the request's DATA block: the version comes first.
type Document struct {
	Version string `json:"version"`
	// Statement is the encoding of a Statement: the very bytes that are signed.
	Statement []byte `json:"statement"`
	// Signature is the platform's (Ed25519) over a label and the Statement.
	Signature []byte `json:"signature"`
}

// Statement is what the platform says.
type Statement struct {
	Audience string `json:"audience"`
	// Instance is the one that asked: the platform knows it by the way on which it was asked, not
	// by what was said.
	Instance string `json:"instance"`
	// Nonce is as the instance gave it.
	Nonce []byte `json:"nonce"`
	// IssuedAt is in seconds since 1970, by the platform's clock.
	IssuedAt int64 `json:"issuedAt"`
}

// Nonce binds a document to one request. Every node can read every request, so an attacker who
// copies the document can replace everything that is not in the nonce. The object's name is in it,
// since it is used once. The certification request is in it, since the certificate is for its key.
// Each item comes after its length, so that no two requests have the same bytes.
func Nonce(signerName, objectName string, pkcs10 []byte) []byte {
	var b []byte
	for _, item := range [][]byte{[]byte(labelNonce), []byte(signerName), []byte(objectName), pkcs10} {
		b = binary.BigEndian.AppendUint64(b, uint64(len(item)))
		b = append(b, item...)
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

// Sign returns the document that says so, encoded.
func Sign(key ed25519.PrivateKey, says Statement) ([]byte, error) {
	statement, err := json.Marshal(says)
	if err != nil {
		return nil, err
	}
	return json.Marshal(Document{Version: Version, Statement: statement, Signature: ed25519.Sign(key, signed(statement))})
}

func signed(statement []byte) []byte { return append([]byte(labelSignature+"\x00"), statement...) }

// Parse reads a document and what it says strictly: each has one encoding. It checks no signature.
func Parse(data []byte) (Document, Statement, error) {
	var document Document
	var says Statement
	if err := decode(data, &document); err != nil {
		return Document{}, Statement{}, fmt.Errorf("identity document: %w", err)
	}
	if document.Version != Version {
		return Document{}, Statement{}, fmt.Errorf("identity document: it is not of version %s", Version)
	}
	if err := decode(document.Statement, &says); err != nil {
		return Document{}, Statement{}, fmt.Errorf("identity document: statement: %w", err)
	}
	if !isInstance(says.Instance) || len(says.Nonce) != sha256.Size {
		return Document{}, Statement{}, errors.New("identity document: statement: no instance, or no nonce")
	}
	return document, says, nil
}

// SignedBy reports whether the document has the signature of a key. It is false for a key of the
// wrong size, nil above all.
func (d Document) SignedBy(key ed25519.PublicKey) bool {
	return len(key) == ed25519.PublicKeySize && ed25519.Verify(key, signed(d.Statement), d.Signature)
}

// decode accepts exactly the bytes that json.Marshal writes for the decoded value. encoding/json
// alone accepts doubled, unknown and differently-cased keys, white space, and more than one
// spelling of a value. None of them survives the comparison.
func decode(data []byte, into any) error {
	if len(data) > MaxSize {
		return fmt.Errorf("it is longer than %d bytes", MaxSize)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return errors.New("it is not the JSON of its kind")
	}
	if canonical, err := json.Marshal(into); err != nil || !bytes.Equal(canonical, data) {
		return errors.New("it is not in its one encoding: no unknown, doubled or missing field, no white space, nothing after")
	}
	return nil
}

// isInstance reports whether s may be an instance's ID: 1 to 63 of [a-z0-9-], so that it has one
// spelling in a provider ID.
func isInstance(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

// ProviderID returns the spec.providerID of an instance, as the cloud controller manager of Acme
// writes it.
func ProviderID(instance string) string { return "acme://" + instance }

// Instance returns the instance that has a provider ID.
func Instance(providerID string) (string, error) {
	id, ok := strings.CutPrefix(providerID, ProviderID(""))
	if !ok || !isInstance(id) {
		return "", fmt.Errorf("%.128q is not the provider ID of an instance of Acme", providerID)
	}
	return id, nil
}
