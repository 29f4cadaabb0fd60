// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const benchSigner = "example.com/tpm"

// BenchmarkParseClaim is what each request costs before its turn. One goroutine, the
// informer's, does that for each event about each pending request.
func BenchmarkParseClaim(b *testing.B) {
	v, err := tpm.New(tpm.Config{
		NamedEKs: true, ClusterUID: "c", Keys: tpm.Keys{Current: "k", ByID: map[string][]byte{"k": []byte("0123456789abcdef0123456789abcdef")}},
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
	})
	must(b, err)
	rules, err := verifier.New(verifier.Policy{
		Cluster: "c", Providers: []verifier.Provider{{Name: tpm.Provider, Challenges: true}},
		Signers: []verifier.Signer{{Name: benchSigner, Providers: []string{tpm.Provider}}},
		Token:   verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	})
	must(b, err)
	providers := map[string]controller.Provider{tpm.Provider: tpmprovider.Provider{Verifier: v}}

	rsa4096, err := rsa.GenerateKey(rand.Reader, 4096)
	must(b, err)
	p256 := pkcs10(b, newKey(b, elliptic.P256()))
	hello := func(certificates ...int) []byte { return marshalHello(b, certificates...) }
	// Documents that are as long as they may be, and whose JSON has as many parts as possible.
	head := func(kind string) string { return fmt.Sprintf(`{"version":%q,"kind":%q,`, attestation.VersionTPM, kind) }
	full := func(start, part, end string) []byte {
		return []byte(start + strings.Repeat(part, (attestation.MaxDocument-len(start)-len(end))/len(part)) + end)
	}
	const whole, tail = attestation.MaxRequestSize, "-----END X-----\n"
	var headers strings.Builder
	for i := 0; headers.Len() < whole-100; i++ {
		fmt.Fprintf(&headers, "%x:\n", i)
	}
	for _, c := range []struct {
		name, signer string
		content      []byte
		// claimed says that the claim can be read.
		claimed bool
	}{
		{"hello/2 kB", attestation.HelloSignerName, request(b, p256, hello(400)), true},
		{"hello/12 kB", attestation.HelloSignerName, request(b, p256, hello(2900, 2900)), true},
		{"hello/largest", attestation.HelloSignerName, request(b, p256, hello(8192, 8192, 8192, 8192, 8192, 8192)), true},
		{"hello/P-384", attestation.HelloSignerName, request(b, pkcs10(b, newKey(b, elliptic.P384())), hello()), true},
		{"hello/RSA-4096", attestation.HelloSignerName, request(b, pkcs10(b, rsa4096), hello()), true},
		{"proof/largest", benchSigner, request(b, p256, largestProof(b)), true},
		{"malformed/one string", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"x":"`, "x", `"}`)), false},
		{"malformed/versions", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"versions":[`, `"",`, `""]}`)), false},
		{"malformed/certificates", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"ekCertificates":[`, `"",`, `""]}`)), false},
		{"malformed/PCRs", benchSigner, request(b, p256, full(head("proof")+`"pcrs":[`, `{},`, `{}]}`)), false},
		{"malformed/nested", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"x":`, `[`, ``)), false},
		{"malformed/unknown fields", attestation.HelloSignerName, request(b, p256, full(head("hello"), `"x":1,`, `"x":1}`)), false},
		{"malformed/no PEM", attestation.HelloSignerName, bytes.Repeat([]byte("x"), whole), false},
		{"malformed/PEM headers", attestation.HelloSignerName, []byte("-----BEGIN X-----\n" + headers.String() + "\n" + tail), false},
		{"malformed/PEM ends", attestation.HelloSignerName, bytes.Repeat([]byte("-----BEGIN X-----\n"+tail), whole/len("-----BEGIN X-----\n"+tail)), false},
		{"malformed/beyond the limit", attestation.HelloSignerName, bytes.Repeat([]byte("x"), whole+1), false},
	} {
		b.Run(c.name, func(b *testing.B) {
			object := &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: c.signer, Request: c.content, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
			}}
			object.Name, object.UID = "r", "u"
			b.ReportAllocs()
			for b.Loop() {
				found := controller.ParseClaim(rules, providers, object)
				if claimed := found.EK != "" && found.Node == benchNode; claimed != c.claimed {
					b.Fatalf("%+v", found)
				}
			}
			b.ReportMetric(float64(len(c.content)), "B/request")
		})
	}
}

const benchNode = "worker-000001"

func pkcs10(b *testing.B, key crypto.Signer) []byte {
	b.Helper()
	der, err := csr.PKCS10(csr.Identity{NodeName: benchNode, ProviderID: "test://" + benchNode}, key)
	must(b, err)
	return der
}

func request(b *testing.B, pkcs10, document []byte) []byte {
	b.Helper()
	content, err := attestation.Request{PKCS10: pkcs10, Provider: tpm.Provider, Data: document}.Marshal()
	must(b, err)
	return content
}

// marshalHello returns the hello of a TPM that does not exist, with certificates of these sizes.
func marshalHello(b *testing.B, certificates ...int) []byte {
	b.Helper()
	ek, _ := template.EKByName("ecc-p256")
	ekArea, err := ek.PublicArea(newKey(b, elliptic.P256()).Public())
	must(b, err)
	akArea := template.AK()
	akArea.Unique = ekArea.Unique
	hello := attestation.Hello{
		Version: attestation.VersionTPM, Versions: attestation.Versions{attestation.VersionTPM}, SignerName: benchSigner,
		EKTemplate: ek.Name, EKPublic: tpm2.Marshal(ekArea), AKPublic: tpm2.Marshal(akArea),
	}
	for _, size := range certificates {
		hello.EKCertificates = append(hello.EKCertificates, make([]byte, size))
	}
	document, err := hello.Marshal()
	must(b, err)
	return document
}

func largestProof(b *testing.B) []byte {
	b.Helper()
	document, err := attestation.Proof{
		Version: attestation.VersionTPM, HelloName: "h", HelloUID: "u", KeyID: "k", Expires: 1, PCRBank: "sha256",
		PCRs: []attestation.PCR{{Index: 0, Value: make([]byte, 32)}}, Quote: make([]byte, 1024), Signature: make([]byte, 1024), EventLog: make([]byte, attestation.MaxEventLog),
	}.Marshal()
	must(b, err)
	return document
}

func newKey(b *testing.B, curve elliptic.Curve) *ecdsa.PrivateKey {
	b.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	must(b, err)
	return key
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}
