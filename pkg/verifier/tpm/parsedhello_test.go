// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// A hello that was parsed once is judged like one that is parsed again. Each verdict depends only
// on its own inputs.
func TestParsedHelloIsJudgedAnew(t *testing.T) {
	for _, name := range []string{"ecc-p256", "rsa-2048"} {
		ek := FingerprintOf(spkiOf(theKit().ekKeys[name]))
		p := theKit().play(t, bend{ek: name, policy: func(c *Config) { c.NamedEKs = true }})
		opened := p.verifier.ParseHello(p.hello)
		late := p.now.AddDate(50, 0, 0) // the certificate has run out
		for range 2 {
			for _, c := range []struct {
				named   []Fingerprint
				now     time.Time
				sources []trustSource // nil: refused
			}{
				{nil, p.now, []trustSource{trustChain}},
				{nil, late, nil},
				{[]Fingerprint{ek}, late, []trustSource{trustNamed}},
				{[]Fingerprint{{1}}, late, nil},
				{[]Fingerprint{ek}, p.now, []trustSource{trustNamed, trustChain}},
				{nil, time.Time{}, nil},
			} {
				anew, anewErr := p.verifier.VerifyHello(p.hello, c.named, c.now)
				claim, err := opened.Verify(c.named, c.now)
				if (err == nil) != (c.sources != nil) || (anewErr == nil) != (err == nil) || err != nil && err.Error() != anewErr.Error() {
					t.Fatalf("%s: %v at %s: %v, anew: %v", name, c.named, c.now, err, anewErr)
				}
				if err != nil {
					continue
				}
				if !slices.Equal(claim.EK.sources, c.sources) || !slices.Equal(anew.EK.sources, c.sources) || claim.EK.Fingerprint != ek {
					t.Errorf("%s: %v at %s: %+v, anew: %+v", name, c.named, c.now, claim.EK, anew.EK)
				}
				if _, err := p.verifier.Challenge(bytes.NewReader(make([]byte, 1024)), claim, c.now); err != nil {
					t.Errorf("%s: no challenge: %v", name, err)
				}
				clear(claim.EK.publicKey) // a caller's own
				claim.EK.sources[0] = trustAllowed
			}
			evidence, err := opened.VerifyProof(p.proof, nil, p.now)
			if err != nil || evidence.EK.Fingerprint != ek || !slices.Equal(evidence.EK.sources, []trustSource{trustChain}) {
				t.Errorf("%s: %+v, %v", name, evidence, err)
			}
			if got, err := opened.ClaimedEK(); err != nil || got != ek {
				t.Errorf("%s: EK %s, %v", name, got, err)
			}
		}
	}
}

// What is wrong with a hello is wrong with it for each question, and said once.
func TestParsedHelloRefusesWhatCannotBeRead(t *testing.T) {
	good := theKit().play(t, bend{})
	for name, hello := range map[string]Request{
		"no document": {Name: "x", UID: "y", SignerName: attestation.HelloSignerName},
		"a proof":     good.proof,
		"another EK's template": theKit().play(t, bend{hello: func(h *attestation.Hello) {
			h.EKTemplate = "ecc-p256-high"
		}}).hello,
		"other signer": func() Request { r := good.hello; r.SignerName = "example.com/x"; return r }(),
	} {
		opened := good.verifier.ParseHello(hello)
		_, want := ClaimedEK(hello)
		for range 2 {
			_, ekErr := opened.ClaimedEK()
			_, helloErr := opened.Verify(nil, good.now)
			_, proofErr := opened.VerifyProof(good.proof, nil, good.now)
			if want == nil || ekErr == nil || ekErr.Error() != want.Error() || helloErr == nil || proofErr == nil {
				t.Errorf("%s: %v, %v, %v; anew %v", name, ekErr, helloErr, proofErr, want)
			}
		}
	}
	var none ParsedHello
	_, ekErr := none.ClaimedEK()
	_, helloErr := none.Verify(nil, good.now)
	_, proofErr := none.VerifyProof(good.proof, nil, good.now)
	if ekErr == nil || helloErr == nil || proofErr == nil {
		t.Errorf("the zero value: %v, %v, %v", ekErr, helloErr, proofErr)
	}
}
