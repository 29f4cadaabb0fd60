// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	node "github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// machine is a node with a TPM.
type machine struct {
	t       *testing.T
	tpm     *swtpm.TPM
	options node.Options
}

func run[T any](m machine, f func(*node.TPM) (T, error)) T {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	value, err := node.Run(ctx, m.options, f)
	if err != nil {
		m.t.Fatal(err)
	}
	return value
}

func boot(t *testing.T, o swtpm.Options) machine {
	t.Helper()
	tpm := swtpm.Start(t, o)
	return machine{t, tpm, node.Options{Device: tpm.Socket(), LockDir: t.TempDir()}}
}

// hello is the node's first request.
func (m machine) hello(ek string) (Request, attestation.Hello) {
	m.t.Helper()
	type keys struct {
		ek node.EK
		ak []byte
	}
	k := run(m, func(t *node.TPM) (k keys, err error) {
		if k.ek, err = t.ChooseEK("", ek); err == nil {
			k.ak, err = t.AK()
		}
		return k, err
	})
	h := attestation.Hello{
		Version: attestation.VersionTPM, Versions: attestation.Versions{attestation.VersionTPM}, SignerName: testSigner,
		EKTemplate: k.ek.Template, EKPublic: k.ek.Public, EKCertificates: k.ek.Certificates, AKPublic: k.ak,
	}
	content := attestation.Request{PKCS10: []byte("a certification request"), Provider: Provider, Data: must(h.Marshal())}
	return Request{
		Name: "node-csr-hello", UID: "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a01", SignerName: attestation.HelloSignerName,
		Request: must(content.Marshal()), Usages: []string{"digital signature", "client auth"},
	}, h
}

// proof is the node's second request, with the challenge as it came over the wire.
func (m machine) proof(hello Request, h attestation.Hello, annotation []byte) Request {
	m.t.Helper()
	c := must(attestation.ParseChallenge(annotation))
	proof := Request{Name: "node-csr-proof", UID: "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a02", SignerName: h.SignerName, Usages: hello.Usages}
	content := must(attestation.Parse(hello.Request))
	quote := run(m, func(t *node.TPM) (node.Quote, error) {
		return t.Prove(node.Challenge{
			EKTemplate: h.EKTemplate, EKPublic: h.EKPublic, AKPublic: h.AKPublic,
			CredentialBlob: c.CredentialBlob, EncryptedSecret: c.EncryptedSecret, PCRBank: tpm2.TPMAlgSHA256, PCRs: c.PCRs.Indexes,
		}, func(secret []byte) []byte {
			return attestation.Transcript{
				Version: c.Version, SignerName: h.SignerName, HelloName: hello.Name, HelloUID: hello.UID, HelloRequest: hello.Request,
				ProofName: proof.Name, PKCS10: content.PKCS10, Usages: proof.Usages, KeyID: c.KeyID, PCRs: c.PCRs,
			}.MAC(secret)
		})
	})
	p := attestation.Proof{
		Version: c.Version, HelloName: hello.Name, HelloUID: hello.UID, KeyID: c.KeyID, Expires: c.Expires, PCRBank: c.PCRs.Bank,
		Quote: quote.Attest, Signature: quote.Signature,
	}
	for i, index := range c.PCRs.Indexes {
		p.PCRs = append(p.PCRs, attestation.PCR{Index: index, Value: quote.PCRs[i]})
	}
	content.Data = must(p.Marshal())
	proof.Request = must(content.Marshal())
	return proof
}

// TestProtocol plays the whole protocol against real TPMs, though in software.
func TestProtocol(t *testing.T) {
	for _, e := range template.EKs() {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			m := boot(t, swtpm.Options{Certified: []string{e.Name}, Chain: e.IsRSA()})
			config := theKit().config()
			config.Roots, config.Intermediates = []*x509.Certificate{m.tpm.CA.Root}, nil
			if !e.IsRSA() {
				config.Intermediates = []*x509.Certificate{m.tpm.CA.Intermediate}
			}
			config.PCRs.Indexes = []int{0, 1, 2, 3, 4, 5, 6, 7, 14, 16}
			config.MinimumFirmware = map[string]uint64{"IBM": 1}
			v, err := New(config)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.tpm.Extend(16, []byte("x")); err != nil {
				t.Fatal(err)
			}
			play := func() *VerifiedProof {
				hello, h := m.hello(e.Name)
				now := time.Now()
				claim, err := v.VerifyHello(hello, nil, now)
				if err != nil {
					t.Fatal(err)
				}
				challenge, err := v.Challenge(rand.Reader, claim, now)
				if err != nil {
					t.Fatal(err)
				}
				proof := m.proof(hello, h, must(challenge.Marshal()))
				evidence, err := v.VerifyProof(proof, hello, nil, time.Now())
				if err != nil {
					t.Fatal(err)
				}
				return evidence
			}
			first := play()
			if !first.EK.chainVerified() || first.EK.certificate.manufacturer != "IBM" || first.firmware == 0 || first.EK.template != e.Name {
				t.Errorf("%+v", first)
			}
			if err := m.tpm.Reboot(); err != nil {
				t.Fatal(err)
			}
			second := play()
			if !first.Boot.Before(second.Boot) || second.Boot.Before(first.Boot) {
				t.Errorf("a reboot is no progress: %+v, %+v", first.Boot, second.Boot)
			}
			// TPM2_Clear leaves EK and AK, and sets the counters back.
			if err := m.tpm.Clear(); err != nil {
				t.Fatal(err)
			}
			third := play()
			if !third.Boot.Before(second.Boot) || string(third.AKName) != string(first.AKName) {
				t.Errorf("TPM2_Clear goes unnoticed: %+v, %+v", second.Boot, third.Boot)
			}
		})
	}
}

// TestProtocolRefuses: what a real TPM can be made to say, and must not help.
func TestProtocolRefuses(t *testing.T) {
	m := boot(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	config := theKit().config()
	config.Roots, config.Intermediates = []*x509.Certificate{m.tpm.CA.Root}, []*x509.Certificate{m.tpm.CA.Intermediate}
	v, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	hello, h := m.hello("")
	claim, err := v.VerifyHello(hello, nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	challenge := must(v.Challenge(rand.Reader, claim, time.Now()))
	proof := m.proof(hello, h, must(challenge.Marshal()))
	if _, err := v.VerifyProof(proof, hello, nil, time.Now()); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, proof, hello Request, now time.Time, want verifier.Reason) {
		t.Helper()
		if _, err := v.VerifyProof(proof, hello, nil, now); len(reasonsOf(err)) != 1 || reasonsOf(err)[0] != want {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	copied := proof
	copied.Name = "node-csr-copied"
	refused("copied under another name", copied, hello, time.Now(), ReasonQuoteMAC)
	refused("an hour later", proof, hello, time.Now().Add(time.Hour), reasonChallengeExpired)
	// The same TPM, another hello object: its challenge is another's.
	later := hello
	later.UID = "0d7e5e0a-3c1f-4b52-8a51-0e6f6d3f9a99"
	refused("of an older hello", proof, later, time.Now(), ReasonHelloMismatch)

	// Another TPM of the same make cannot answer.
	thief := boot(t, swtpm.Options{Certified: []string{"ecc-p256"}, CA: m.tpm.CA})
	_, err = node.Run(context.Background(), thief.options, func(t *node.TPM) (node.Quote, error) {
		ek, err := t.ChooseEK("", "")
		if err != nil {
			return node.Quote{}, err
		}
		ak, err := t.AK()
		if err != nil {
			return node.Quote{}, err
		}
		return t.Prove(node.Challenge{
			EKTemplate: ek.Template, EKPublic: ek.Public, AKPublic: ak,
			CredentialBlob: challenge.CredentialBlob, EncryptedSecret: challenge.EncryptedSecret, PCRBank: tpm2.TPMAlgSHA256, PCRs: challenge.PCRs.Indexes,
		}, func([]byte) []byte { return make([]byte, 32) })
	})
	if err == nil {
		t.Error("another TPM answered the challenge")
	}
}

// TestCertificatesOfSwtpmSetup: EK certificates that somebody else's program made.
func TestCertificatesOfSwtpmSetup(t *testing.T) {
	m := boot(t, swtpm.Options{Setup: true})
	config := theKit().config()
	config.Roots, config.Intermediates = []*x509.Certificate{m.tpm.CA.Root}, []*x509.Certificate{m.tpm.CA.Intermediate}
	v, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	for _, ek := range []string{"rsa-2048", "ecc-p384-high"} {
		hello, _ := m.hello(ek)
		claim, err := v.VerifyHello(hello, nil, time.Now())
		if err != nil {
			t.Errorf("%s: %v", ek, err)
			continue
		}
		if c := claim.EK.certificate; claim.EK.template != ek || c == nil || c.manufacturer != "00001014" || c.model != "swtpm" {
			t.Errorf("%s: %+v", ek, c)
		}
	}
}
