// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"sync"
	"testing"
	"time"
)

// now is the time at which the tests run.
func now() time.Time { return time.Date(2026, 11, 3, 12, 0, 0, 123456789, time.UTC) }

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// keys are made once, since RSA keys are slow to make.
type keys map[string]crypto.Signer

var makeKeys = sync.OnceValue(func() keys {
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	curve := func(c elliptic.Curve) crypto.Signer { return must(ecdsa.GenerateKey(c, rand.Reader)) }
	size := func(bits int) crypto.Signer { return must(rsa.GenerateKey(rand.Reader, bits)) }
	return keys{
		"p224": curve(elliptic.P224()), "p256": curve(elliptic.P256()), "p384": curve(elliptic.P384()), "p521": curve(elliptic.P521()),
		"other p256": curve(elliptic.P256()), "node p256": curve(elliptic.P256()), "node p384": curve(elliptic.P384()),
		"rsa1024": size(1024), "rsa2048": size(2048), "node rsa2048": size(2048), "rsa3072": size(3072), "ed25519": ed,
	}
})

// authority is a CA under test.
type authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

// newAuthority returns a CA below parent, or a root where that is nil, ten years around now.
func newAuthority(t testing.TB, name, key string, parent *authority, change func(*x509.Certificate)) *authority {
	t.Helper()
	signer := makeKeys()[key]
	if signer == nil {
		t.Fatalf("no key %q", key)
	}
	wanted := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: now().Add(-5 * 365 * 24 * time.Hour), NotAfter: now().Add(5 * 365 * 24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	if change != nil {
		change(wanted)
	}
	above, by := wanted, signer
	if parent != nil {
		above, by = parent.certificate, parent.key
	}
	der, err := x509.CreateCertificate(rand.Reader, wanted, above, signer.Public(), by)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{certificate, signer}
}

func (a *authority) certPEM(above ...*authority) []byte {
	out := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})
	for _, x := range above {
		out = append(out, x.certPEM()...)
	}
	return out
}

func (a *authority) keyPEM() []byte { return keyPEM(a.key) }

func keyPEM(key crypto.Signer) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(key))})
}

// parse returns the CA, with those above it.
func (a *authority) parse(t testing.TB, above ...*authority) *CA {
	t.Helper()
	ca, err := parseCA(a.certPEM(above...), a.keyPEM(), now())
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func nodeKey(name string) crypto.PublicKey { return makeKeys()[name].Public() }

// grant returns a valid grant.
func grant() Grant { return Grant{NodeName: "worker-1.example.com", PublicKey: nodeKey("node p256")} }

func seconds(n int32) *int32 { return &n }

// leafOf returns the first certificate of a chain.
func leafOf(t testing.TB, chain []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(chain)
	if block == nil {
		t.Fatalf("not PEM: %q", chain)
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}
