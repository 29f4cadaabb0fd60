// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"math/big"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// ring returns the certificate of an EK, and as many CAs of one name as a hello may have. Each is
// signed by the next one, and the last by the first. crypto/x509 tries them all at each step, and
// finds no root.
func ring(ek *ecdsa.PublicKey, curve elliptic.Curve) [][]byte {
	return made(ek, curve, func(int) string { return "Ring" })
}

// ladder is a ring whose CAs have names of their own, so that there is one for each step.
func ladder(ek *ecdsa.PublicKey, curve elliptic.Curve) [][]byte {
	return made(ek, curve, func(i int) string { return fmt.Sprintf("Ladder %d", i) })
}

func made(ek *ecdsa.PublicKey, curve elliptic.Curve, name func(i int) string) [][]byte {
	const count = attestation.MaxCertificates - 1
	keys, cas := make([]*ecdsa.PrivateKey, count), make([]*x509.Certificate, count)
	for i := range count {
		keys[i] = newKey(curve)
		cas[i] = &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name(i)}, NotBefore: testNow.AddDate(-1, 0, 0), NotAfter: testNow.AddDate(1, 0, 0),
			KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
		}
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(9), NotBefore: cas[0].NotBefore, NotAfter: cas[0].NotAfter, KeyUsage: x509.KeyUsageKeyAgreement,
		UnknownExtKeyUsage: []asn1.ObjectIdentifier{oidEKCertificate()}, ExtraExtensions: []pkix.Extension{goodSAN()},
	}
	list := [][]byte{must(x509.CreateCertificate(rand.Reader, leaf, cas[0], ek, keys[0]))}
	for i := range count {
		next := (i + 1) % count
		list = append(list, must(x509.CreateCertificate(rand.Reader, cas[i], cas[next], keys[i].Public(), keys[next])))
	}
	return list
}

// The cost of the most expensive hello, compared with an honest one. A requester chooses its
// certificates, and they are judged before the machine is known.
func BenchmarkHostileHello(b *testing.B) {
	ek := &theKit().ecEKs["ecc-p256"].PublicKey
	run := func(name string, p played, passes bool) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := p.verifier.VerifyHello(p.hello, nil, p.now); (err == nil) != passes {
					b.Fatal(err)
				}
			}
		})
	}
	run("honest", theKit().play(b, bend{ek: "ecc-p256"}), true)
	for _, curve := range []elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()} {
		for shape, list := range map[string][][]byte{"ring": ring(ek, curve), "ladder": ladder(ek, curve)} {
			run(shape+" "+curve.Params().Name, theKit().play(b, bend{ek: "ecc-p256", hello: func(h *attestation.Hello) { h.EKCertificates = list }}), false)
		}
	}
}
