// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// A hello that was opened once is judged like one that is read anew, each time by what it is judged with: no verdict leaves anything behind.
func TestOpenedIsJudgedAnew(t *testing.T) {
	for _, name := range []string{"ecc-p256", "rsa-2048"} {
		ek := FingerprintOf(spkiOf(theKit().ekKeys[name]))
		p := theKit().play(t, bend{ek: name, policy: func(c *Config) { c.NamedEKs = true }})
		opened := p.verifier.Open(p.hello)
		late := p.now.AddDate(50, 0, 0) // the certificate has run out
		for range 2 {
			for _, c := range []struct {
				named   []Fingerprint
				now     time.Time
				sources []Source // nil: refused
			}{
				{nil, p.now, []Source{SourceChain}},
				{nil, late, nil},
				{[]Fingerprint{ek}, late, []Source{SourceNamed}},
				{[]Fingerprint{{1}}, late, nil},
				{[]Fingerprint{ek}, p.now, []Source{SourceNamed, SourceChain}},
				{nil, time.Time{}, nil},
			} {
				anew, anewErr := p.verifier.Hello(p.hello, c.named, c.now)
				claim, err := opened.Hello(c.named, c.now)
				if (err == nil) != (c.sources != nil) || (anewErr == nil) != (err == nil) || err != nil && err.Error() != anewErr.Error() {
					t.Fatalf("%s: %v at %s: %v, anew: %v", name, c.named, c.now, err, anewErr)
				}
				if err != nil {
					continue
				}
				if !slices.Equal(claim.EK.Sources, c.sources) || !slices.Equal(anew.EK.Sources, c.sources) || claim.EK.Fingerprint != ek {
					t.Errorf("%s: %v at %s: %+v, anew: %+v", name, c.named, c.now, claim.EK, anew.EK)
				}
				if _, err := p.verifier.Challenge(bytes.NewReader(make([]byte, 1024)), claim, c.now); err != nil {
					t.Errorf("%s: no challenge: %v", name, err)
				}
				clear(claim.EK.PublicKey) // a caller's own
				claim.EK.Sources[0] = SourceAllowed
			}
			evidence, err := opened.Proof(p.proof, nil, p.now)
			if err != nil || evidence.EK.Fingerprint != ek || !slices.Equal(evidence.EK.Sources, []Source{SourceChain}) {
				t.Errorf("%s: %+v, %v", name, evidence, err)
			}
			if got, err := opened.EK(); err != nil || got != ek {
				t.Errorf("%s: EK %s, %v", name, got, err)
			}
		}
	}
}

// What is wrong with a hello is wrong with it for each question, and said once.
func TestOpenedRefusesWhatCannotBeRead(t *testing.T) {
	good := theKit().play(t, bend{})
	for name, hello := range map[string]Request{
		"no document": {Name: "x", UID: "y", SignerName: attestation.HelloSignerName},
		"a proof":     good.proof,
		"another EK's template": theKit().play(t, bend{hello: func(h *attestation.Hello) {
			h.EKTemplate = "ecc-p256-high"
		}}).hello,
		"other signer": func() Request { r := good.hello; r.SignerName = "example.com/x"; return r }(),
	} {
		opened := good.verifier.Open(hello)
		_, want := good.verifier.EK(hello)
		for range 2 {
			_, ekErr := opened.EK()
			_, helloErr := opened.Hello(nil, good.now)
			_, proofErr := opened.Proof(good.proof, nil, good.now)
			if want == nil || ekErr == nil || ekErr.Error() != want.Error() || helloErr == nil || proofErr == nil {
				t.Errorf("%s: %v, %v, %v; anew %v", name, ekErr, helloErr, proofErr, want)
			}
		}
	}
	var none Opened
	_, ekErr := none.EK()
	_, helloErr := none.Hello(nil, good.now)
	_, proofErr := none.Proof(good.proof, nil, good.now)
	if ekErr == nil || helloErr == nil || proofErr == nil {
		t.Errorf("the zero value: %v, %v, %v", ekErr, helloErr, proofErr)
	}
}
