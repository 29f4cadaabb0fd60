// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
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
	providers := map[string]evidence.Provider{tpm.Provider: tpmprovider.Provider{Verifier: v}}

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
		// shown says that the request has an origin.
		shown bool
	}{
		{"hello/2 kB", attestation.HelloSignerName, request(b, p256, hello(400)), true, false},
		{"hello/2 kB with an origin", attestation.HelloSignerName, request(b, p256, hello(400)), true, true},
		{"hello/12 kB", attestation.HelloSignerName, request(b, p256, hello(2900, 2900)), true, false},
		{"hello/largest", attestation.HelloSignerName, request(b, p256, hello(8192, 8192, 8192, 8192, 8192, 8192)), false, false},
		{"hello/P-384", attestation.HelloSignerName, request(b, pkcs10(b, newKey(b, elliptic.P384())), hello()), true, false},
		{"hello/RSA-4096", attestation.HelloSignerName, request(b, pkcs10(b, rsa4096), hello()), true, false},
		{"proof/largest", benchSigner, request(b, p256, largestProof(b)), true, false},
		{"malformed/one string", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"x":"`, "x", `"}`)), false, false},
		{"malformed/versions", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"versions":[`, `"",`, `""]}`)), false, false},
		{"malformed/certificates", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"ekCertificates":[`, `"",`, `""]}`)), false, false},
		{"malformed/PCRs", benchSigner, request(b, p256, full(head("proof")+`"pcrs":[`, `{},`, `{}]}`)), false, false},
		{"malformed/nested", attestation.HelloSignerName, request(b, p256, full(head("hello")+`"x":`, `[`, ``)), false, false},
		{"malformed/unknown fields", attestation.HelloSignerName, request(b, p256, full(head("hello"), `"x":1,`, `"x":1}`)), false, false},
		{"malformed/no PEM", attestation.HelloSignerName, bytes.Repeat([]byte("x"), whole), false, false},
		{"malformed/PEM headers", attestation.HelloSignerName, []byte("-----BEGIN X-----\n" + headers.String() + "\n" + tail), false, false},
		{"malformed/PEM ends", attestation.HelloSignerName, bytes.Repeat([]byte("-----BEGIN X-----\n"+tail), whole/len("-----BEGIN X-----\n"+tail)), false, false},
		{"malformed/beyond the limit", attestation.HelloSignerName, bytes.Repeat([]byte("x"), whole+1), false, false},
	} {
		b.Run(c.name, func(b *testing.B) {
			object := &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{
				SignerName: c.signer, Request: c.content, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
			}}
			object.Name, object.UID = "r", "u"
			origin := ""
			if c.shown {
				origin = originOf(b, object)
			}
			b.ReportAllocs()
			for b.Loop() {
				found := summarize(rules, providers, object, origin)
				if claimed := found.EK+found.Hello != "" && found.Node == benchNode; claimed != c.claimed || c.shown != (found.AK != "") {
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

// originOf returns what a TPM that does not exist says of a request.
func originOf(b *testing.B, object *certificatesv1.CertificateSigningRequest) string {
	b.Helper()
	ak, akArea := newKey(b, elliptic.P256()), template.AK()
	point, err := ak.PublicKey.Bytes()
	must(b, err)
	akArea.Unique = tpm2.NewTPMUPublicID(tpm2.TPMAlgECC, &tpm2.TPMSECCPoint{
		X: tpm2.TPM2BECCParameter{Buffer: point[1:33]}, Y: tpm2.TPM2BECCParameter{Buffer: point[33:]},
	})
	quote := tpm2.Marshal(tpm2.TPMSAttest{
		Magic: tpm2.TPMGeneratedValue, Type: tpm2.TPMSTAttestQuote, ExtraData: tpm2.TPM2BData{Buffer: attestation.OriginData(object.Name, object.Spec.Request)},
		Attested: tpm2.NewTPMUAttest(tpm2.TPMSTAttestQuote, &tpm2.TPMSQuoteInfo{PCRDigest: tpm2.TPM2BDigest{Buffer: make([]byte, 32)}}),
	})
	digest := sha256.Sum256(quote)
	r, s, err := ecdsa.Sign(rand.Reader, ak, digest[:])
	must(b, err)
	signature := tpm2.Marshal(tpm2.TPMTSignature{SigAlg: tpm2.TPMAlgECDSA, Signature: tpm2.NewTPMUSignature(tpm2.TPMAlgECDSA, &tpm2.TPMSSignatureECC{
		Hash: tpm2.TPMAlgSHA256, SignatureR: tpm2.TPM2BECCParameter{Buffer: r.Bytes()}, SignatureS: tpm2.TPM2BECCParameter{Buffer: s.Bytes()},
	})})
	origin, err := attestation.Origin{Version: attestation.VersionTPM, AKPublic: tpm2.Marshal(akArea), Quote: quote, Signature: signature}.Marshal()
	must(b, err)
	return string(origin)
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
