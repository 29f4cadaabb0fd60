// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"math/big"
	"reflect"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// FuzzPublic: what passes as an EK or an AK is a template's area but for the key, and comes back
// from its key.
func FuzzPublic(f *testing.F) {
	k := theKit()
	for name, key := range k.ekKeys {
		f.Add(name, ekPublic(name, key))
	}
	f.Add("ecc-p256", akPublic(&k.ak.PublicKey))
	f.Add("rsa-2048", tpm2.Marshal(tpm2.RSASRKTemplate))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		var refusals verifier.Refusals
		ek := publicEK(&refusals, &attestation.Hello{EKTemplate: name, EKPublic: data})
		if (ek == nil) != (len(refusals) > 0) {
			t.Fatal("refused without a reason, or accepted with one")
		}
		if ek != nil {
			e, _ := template.EKByName(name)
			if len(ek.publicKey) == 0 || !bytes.HasPrefix(data, head(e.Public)) || !bytes.Equal(tpm2.Marshal(ek.public), data) {
				t.Fatal("an EK of another form")
			}
			if _, err := tpm2.ImportEncapsulationKey(&ek.public); err != nil {
				t.Fatalf("accepted, but no challenge can be made for it: %v", err)
			}
		}
		refusals = nil
		akName, key := publicAK(&refusals, data)
		if (key == nil) != (len(refusals) > 0) || (key == nil) != (akName == nil) {
			t.Fatal("refused without a reason, or accepted with one")
		}
		if key != nil && (ek != nil || !bytes.Equal(akName, nameOf(data))) {
			t.Fatal("an AK that is also an EK, or has another name")
		}
	})
}

// FuzzQuote: what passes as a quote is one to go-tpm too, with the same fields and that one
// encoding.
func FuzzQuote(f *testing.F) {
	p := theKit().play(f, bend{})
	document := must(attestation.ParseProof(must(attestation.Parse(p.proof.Request)).Data))
	f.Add(document.Quote)
	for _, other := range otherAttests() {
		f.Add(attest{magic: 0xff544347, kind: other.kind, signer: make([]byte, 34), extra: make([]byte, 32), body: other.bytes}.marshal())
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		q, err := parseQuote(data)
		if err != nil {
			return
		}
		theirs, err := tpm2.Unmarshal[tpm2.TPMSAttest](data)
		if err != nil || !bytes.Equal(tpm2.Marshal(theirs), data) {
			t.Fatalf("go-tpm reads it otherwise: %v", err)
		}
		info, err := theirs.Attested.Quote()
		if err != nil {
			t.Fatal(err)
		}
		boot := verifier.Boot{Resets: theirs.ClockInfo.ResetCount, Restarts: theirs.ClockInfo.RestartCount, Clock: theirs.ClockInfo.Clock, Safe: bool(theirs.ClockInfo.Safe)}
		if q.boot != boot || q.firmware != theirs.FirmwareVersion || !bytes.Equal(q.extraData, theirs.ExtraData.Buffer) ||
			!bytes.Equal(q.qualifiedSigner, theirs.QualifiedSigner.Buffer) || !bytes.Equal(q.pcrDigest, info.PCRDigest.Buffer) {
			t.Fatal("go-tpm reads other fields")
		}
		if q.pcrs.Check() != nil || len(info.PCRSelect.PCRSelections) != 1 {
			t.Fatal("a selection that cannot be asked for")
		}
		bits := info.PCRSelect.PCRSelections[0].PCRSelect
		if want := selectionOf(0, q.pcrs.Indexes...).bits; !bytes.Equal(bits, want) {
			t.Fatal("go-tpm reads another selection")
		}
	})
}

// FuzzSignature: what passes as a signature is one to go-tpm too.
func FuzzSignature(f *testing.F) {
	k := theKit()
	f.Add(sign(k.ak, []byte("x")))
	f.Add(signatureOf(0x14, 0x0b, make([]byte, 256), nil))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := parseSignature(data)
		if err != nil {
			return
		}
		theirs, err := tpm2.Unmarshal[tpm2.TPMTSignature](data)
		if err != nil || !bytes.Equal(tpm2.Marshal(theirs), data) {
			t.Fatalf("go-tpm reads it otherwise: %v", err)
		}
		ecdsa, err := theirs.Signature.ECDSA()
		if err != nil || s.r.Cmp(new(big.Int).SetBytes(ecdsa.SignatureR.Buffer)) != 0 || s.s.Cmp(new(big.Int).SetBytes(ecdsa.SignatureS.Buffer)) != 0 {
			t.Fatalf("go-tpm reads another one: %v", err)
		}
		if s.verify(&k.ak.PublicKey, []byte("a message that nobody signed")) {
			t.Fatal("a forgery")
		}
	})
}

// FuzzSubjectAltName: what passes is a short, printable name.
func FuzzSubjectAltName(f *testing.F) {
	f.Add(goodSAN().Value)
	f.Add(withDNS(goodSAN()).Value)
	f.Add(twice(goodSAN()).Value)
	f.Fuzz(func(t *testing.T, value []byte) {
		name, err := parseSubjectAltName(value)
		if err == nil && (!isPlain(name.manufacturer) || !isPlain(name.model) || !isPlain(name.version) || len(name.manufacturer) > 8) {
			t.Fatalf("%+v", name)
		}
	})
}

// FuzzCertificate: no other bytes than the maker's pass as a certificate of the EK.
func FuzzCertificate(f *testing.F) {
	k := theKit()
	good := k.intermediate.issue(k.ekKeys["ecc-p256"], nil)
	f.Add(good, k.intermediate.certificate.Raw)
	f.Add(selfSigned(k.ecEKs["ecc-p256"]), hugeCA())
	v, err := New(k.config())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, leaf, issuer []byte) {
		ek := &candidateEK{key: k.ekKeys["ecc-p256"]}
		certificate, problems := v.verifyCertificates(ek, [][]byte{leaf, issuer}, testNow)
		if (certificate == nil) != (len(problems) > 0) {
			t.Fatal("refused without a reason, or accepted with one")
		}
		if certificate != nil && !bytes.Equal(leaf, good) {
			t.Fatal("accepted")
		}
	})
}

// wrap puts a fuzzed document into the good request, unless it shall be the request itself.
func wrap(t *testing.T, good Request, data []byte, raw bool) (Request, bool) {
	r := good
	if raw {
		r.Request = data
		return r, true
	}
	content := must(attestation.Parse(good.Request))
	content.Data = data
	request, err := content.Marshal()
	r.Request = request
	return r, err == nil
}

// FuzzHello: a hello that passes names the one EK that is trusted, and none but the good one goes
// with the good proof.
func FuzzHello(f *testing.F) {
	p := theKit().play(f, bend{})
	f.Add(must(attestation.Parse(p.hello.Request)).Data, false)
	f.Add(must(attestation.Parse(p.proof.Request)).Data, false)
	f.Add(p.hello.Request, true)
	fingerprint := must(ClaimedEK(p.hello))
	f.Fuzz(func(t *testing.T, data []byte, raw bool) {
		r, ok := wrap(t, p.hello, data, raw)
		if !ok {
			return
		}
		claim, err := p.verifier.VerifyHello(r, nil, p.now)
		if err == nil && claim.EK.Fingerprint != fingerprint {
			t.Fatal("another EK is trusted")
		}
		if _, err := p.verifier.VerifyProof(p.proof, r, nil, p.now); err == nil && !bytes.Equal(r.Request, p.hello.Request) {
			t.Fatal("another hello goes with the proof")
		}
		_, _ = ClaimedEK(r)
	})
}

// FuzzProof: a proof that passes says what the good one says. The signature may be spelt otherwise,
// and an event log that nobody asked for is not read.
func FuzzProof(f *testing.F) {
	p := theKit().play(f, bend{})
	good := must(attestation.ParseProof(must(attestation.Parse(p.proof.Request)).Data))
	f.Add(must(attestation.Parse(p.proof.Request)).Data, false)
	f.Add(must(attestation.Parse(p.hello.Request)).Data, false)
	f.Add(p.proof.Request, true)
	f.Fuzz(func(t *testing.T, data []byte, raw bool) {
		r, ok := wrap(t, p.proof, data, raw)
		if !ok {
			return
		}
		if _, err := p.verifier.VerifyProof(r, p.hello, nil, p.now); err != nil {
			return
		}
		got := must(attestation.ParseProof(must(attestation.Parse(r.Request)).Data))
		got.Signature, got.EventLog = good.Signature, good.EventLog
		if !reflect.DeepEqual(got, good) {
			t.Fatal("another proof is accepted")
		}
	})
}
