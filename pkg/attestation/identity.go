// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/big"
	"strconv"
)

// KindIdentity is the kind of an Identity in a DocumentError. The document itself has no kind: its
// version says it.
const KindIdentity = "identity"

// The versions of the documents of cloud platforms.
const (
	// VersionEC2 has an attestation document of the NitroTPM.
	VersionEC2 = "ec2/v1"
	// VersionEC2Role has a request to AWS STS that the instance identity role signed.
	VersionEC2Role = "ec2-role/v1"
	// VersionGCE has an instance identity token.
	VersionGCE = "gce/v1"
	// VersionAzure has an attested document.
	VersionAzure = "azure/v1"
)

// MaxIdentity bounds an Identity, in bytes. maxStatement bounds what the platform signed.
const MaxIdentity, maxStatement = 48 << 10, 32 << 10

// The labels distinguish these hashes from all others.
const (
	labelBinding  = "kubelet-authenticator instance identity"
	labelInstance = "kubelet-authenticator instance"
)

// Identity is the document of a cloud's instance: a statement that the platform made of the
// instance for one request.
type Identity struct {
	Version Version `json:"version"`
	// ClusterUID is the cluster that the statement is for: the node's clusterUID setting, empty if
	// unset.
	ClusterUID string `json:"clusterUID"`
	// Statement is the platform's, in the platform's own encoding.
	Statement []byte `json:"statement"`
}

// Marshal returns the one encoding of i. It fails with a *DocumentError if i could not be parsed
// again.
func (i Identity) Marshal() ([]byte, error) { return encode(KindIdentity, MaxIdentity, &i) }

// ParseIdentity accepts exactly the bytes that Marshal writes; else it fails with a *DocumentError.
// version is the one that the caller can verify.
func ParseIdentity(version Version, data []byte) (*Identity, error) {
	i := &Identity{}
	if err := decode(KindIdentity, MaxIdentity, data, i); err != nil {
		return nil, err
	}
	if i.Version != version {
		return nil, &DocumentError{KindIdentity, "version", fmt.Sprintf("not %s", version)}
	}
	return i, nil
}

func (i *Identity) check() *DocumentError {
	fail := func(field, reason string) *DocumentError { return &DocumentError{KindIdentity, field, reason} }
	_, number := i.Version.split()
	switch {
	case number == 0:
		return fail("version", "not a version")
	case CheckClusterUID(i.ClusterUID) != nil:
		return fail("clusterUID", CheckClusterUID(i.ClusterUID).Error())
	case !between(i.Statement, maxStatement):
		return fail("statement", fmt.Sprintf("must have 1 to %d bytes", maxStatement))
	}
	return nil
}

// CheckClusterUID returns an error unless uid may be a cluster's, or empty: at most 128 printable
// ASCII characters without a space.
func CheckClusterUID(uid string) error {
	if len(uid) > 128 {
		return fmt.Errorf("must have at most 128 characters")
	}
	for _, c := range uid {
		if c <= ' ' || c > '~' {
			return fmt.Errorf("must have printable ASCII characters only, and no space")
		}
	}
	return nil
}

// Binding is what an Identity is bound to. Each side fills it from its own data: the node from its
// own bytes, the controller from the object in the API server. Every node can read every request.
// So a statement that did not cover all of this would also prove a request of another node.
type Binding struct {
	Version Version
	// ClusterUID is the Identity's.
	ClusterUID string
	// SignerName and Name are the CertificateSigningRequest's spec.signerName and name.
	SignerName, Name string
	// PKCS10 is the certification request in DER.
	PKCS10 []byte
	// Usages are spec.usages, in their order. ExpirationSeconds is spec.expirationSeconds, nil if
	// unset.
	Usages            []string
	ExpirationSeconds *int32
}

// Nonce returns the SHA-256 of the binding. It is the nonce of platforms that take 32 bytes.
func (b Binding) Nonce() [sha256.Size]byte {
	pkcs10 := sha256.Sum256(b.PKCS10)
	var i items
	i.text(labelBinding)
	i.text(string(b.Version))
	i.text(b.ClusterUID)
	i.text(b.SignerName)
	i.text(b.Name)
	i.bytes(pkcs10[:])
	i.terms(b.Usages, b.ExpirationSeconds)
	return sha256.Sum256(i)
}

// Hex returns the nonce in lower-case hex, for platforms that take text.
func (b Binding) Hex() string {
	nonce := b.Nonce()
	return hex.EncodeToString(nonce[:])
}

// alphanumericLength is the length of the shortest nonce that a platform takes as text.
const alphanumericLength = 32

// Alphanumeric returns the nonce for platforms that take 32 letters and digits: the binding's
// SHA-256, as a number in big endian, modulo 62^32, in the digits 0-9A-Za-z. 190 of its 256 bits
// remain, so a second request with the same nonce costs 2^190 tries.
func (b Binding) Alphanumeric() string {
	const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	nonce := b.Nonce()
	rest, base, digit := new(big.Int).SetBytes(nonce[:]), big.NewInt(int64(len(digits))), new(big.Int)
	text := make([]byte, alphanumericLength)
	for i := range text {
		rest.DivMod(rest, base, digit)
		text[len(text)-1-i] = digits[digit.Int64()]
	}
	return string(text)
}

// Instance is what a platform calls one of its instances.
type Instance struct {
	// Platform is ec2, gce or azure.
	Platform string
	// ID is the one that the platform never gives to another instance: i-..., a number, or a GUID.
	ID string
	// Account is the account, project or subscription. It is empty if the evidence does not name
	// it.
	Account string
}

// Fingerprint identifies the instance in records, inventories and suspensions, like the fingerprint
// of an endorsement key: the SHA-256 of Platform and ID, in lower-case hex. Account is not part of
// it: not all evidence of one instance names it.
func (i Instance) Fingerprint() string {
	var b items
	b.text(labelInstance)
	b.text(i.Platform)
	b.text(i.ID)
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// terms adds two items: the usages, and the lifetime in decimal, empty if there is none.
func (b *items) terms(usages []string, expirationSeconds *int32) {
	var list items
	for _, usage := range usages {
		list.text(usage)
	}
	b.bytes(list)
	expiration := ""
	if expirationSeconds != nil {
		expiration = strconv.Itoa(int(*expirationSeconds))
	}
	b.text(expiration)
}
