// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
)

// SecretSize is the size in bytes of the secret in a challenge, and of the MAC made with it.
const SecretSize = sha256.Size

// The labels distinguish these values from all others that may be derived from the same key.
const (
	labelSecret     = "kubelet-authenticator attestation secret" //nolint:gosec // G101: a label
	labelTranscript = "kubelet-authenticator attestation transcript"
)

// SecretInfo has the values that the secret of one challenge is derived from. The controller does
// not store them. It derives the secret again from the proof. If one value differs, the secret
// differs.
type SecretInfo struct {
	Version Version
	// ClusterUID is the cluster's, from the controller's configuration or the Cluster object.
	ClusterUID string
	// SignerName is the one that the proof asks.
	SignerName string
	// EKPublicKey is the EK's SubjectPublicKeyInfo in DER.
	EKPublicKey []byte
	// AKName is the AK's Name (TPM 2.0 Part 1, 16): algorithm and digest.
	AKName []byte
	// HelloRequest is the hello's spec.request.
	HelloRequest []byte
	// Expires is the challenge's.
	Expires int64
	PCRs    PCRSelection
}

// Secret derives the secret of one challenge: HKDF-SHA256 (RFC 5869) of the controller's key,
// salted with the hello's UID. The key has 32 bytes or more, and the PCRs are a selection that
// Check passes.
func Secret(key []byte, helloUID string, info SecretInfo) ([]byte, error) {
	if len(key) < sha256.Size || helloUID == "" {
		return nil, errors.New("secret: needs a key of 32 bytes and the hello's UID")
	}
	ek, request := sha256.Sum256(info.EKPublicKey), sha256.Sum256(info.HelloRequest)
	var b items
	b.text(labelSecret)
	b.text(string(info.Version))
	b.text(info.ClusterUID)
	b.text(info.SignerName)
	b.bytes(ek[:])
	b.bytes(info.AKName)
	b.bytes(request[:])
	b.number(uint64(info.Expires)) //nolint:gosec // G115: two's complement is as good a name for a time as any
	b.selection(info.PCRs)
	return hkdf.Key(sha256.New, key, []byte(helloUID), string(b), SecretSize)
}

// Transcript is what a proof is bound to. Each side fills it from its own data: the node from its
// own bytes, the controller from the objects in the API server.
type Transcript struct {
	Version Version
	// SignerName is the one that the proof asks.
	SignerName string
	// HelloName, HelloUID and HelloRequest are the hello's name, UID and spec.request.
	HelloName, HelloUID string
	HelloRequest        []byte
	// ProofName is the name of the proof's CertificateSigningRequest.
	ProofName string
	// PKCS10 is the certification request in DER.
	PKCS10 []byte
	// Usages are the proof's spec.usages, in their order.
	Usages []string
	// ExpirationSeconds is the proof's spec.expirationSeconds, nil if unset.
	ExpirationSeconds *int32
	// KeyID is the challenge's.
	KeyID string
	PCRs  PCRSelection
}

// MAC returns HMAC-SHA256 (RFC 2104) of the transcript's digest: the quote's extraData.
func (t Transcript) MAC(secret []byte) []byte {
	digest := t.digest()
	mac := hmac.New(sha256.New, secret)
	mac.Write(digest[:])
	return mac.Sum(nil)
}

func (t Transcript) digest() [sha256.Size]byte {
	hello, pkcs10 := sha256.Sum256(t.HelloRequest), sha256.Sum256(t.PKCS10)
	var b items
	b.text(labelTranscript)
	b.text(string(t.Version))
	b.text(t.SignerName)
	b.text(t.HelloName)
	b.text(t.HelloUID)
	b.bytes(hello[:])
	b.text(t.ProofName)
	b.bytes(pkcs10[:])
	b.terms(t.Usages, t.ExpirationSeconds)
	b.text(t.KeyID)
	b.selection(t.PCRs)
	return sha256.Sum256(b)
}

// items is a list of byte strings, each after its length in four bytes, big endian: no two lists
// have the same encoding.
type items []byte

func (b *items) bytes(item []byte) {
	*b = append(binary.BigEndian.AppendUint32(*b, uint32(len(item))), item...) //nolint:gosec // G115: nothing here has 4 GiB
}

func (b *items) text(item string) { b.bytes([]byte(item)) }

func (b *items) number(n uint64) { b.bytes(binary.BigEndian.AppendUint64(nil, n)) }

// selection adds two items: the bank, and one byte for each PCR.
func (b *items) selection(s PCRSelection) {
	indexes := make([]byte, 0, len(s.Indexes))
	for _, index := range s.Indexes {
		indexes = append(indexes, byte(index)) //nolint:gosec // G115: Check bounds it
	}
	b.text(s.Bank)
	b.bytes(indexes)
}
