// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// readVectors reads the test vectors of docs/spec.md.
func readVectors(t *testing.T, into any) {
	t.Helper()
	data, err := os.ReadFile("../../attestation/testdata/vectors.json")
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestExchangeOfTheSpecification accepts the exchange of docs/spec.md's test vectors, which another
// program wrote from the text alone, and refuses it with any item of it changed.
func TestExchangeOfTheSpecification(t *testing.T) {
	var vectors struct {
		Exchange struct {
			ControllerKey, ClusterUID, SignerName     string
			Usages                                    []string
			HelloName, HelloUID, HelloRequest         string
			EKPublicKey, AKName, ProofName, Challenge string
			ProofRequest                              string
		}
	}
	readVectors(t, &vectors)
	x := vectors.Exchange
	challenge, err := attestation.ParseChallenge([]byte(x.Challenge))
	if err != nil {
		t.Fatal(err)
	}
	unhex := func(s string) []byte { return must(hex.DecodeString(s)) }
	ek := FingerprintOf(unhex(x.EKPublicKey))
	config := Config{
		AllowedEKs: []Fingerprint{ek},
		PCRs:       challenge.PCRs,
		ClusterUID: x.ClusterUID,
		Keys:       Keys{Current: challenge.KeyID, ByID: map[string][]byte{challenge.KeyID: unhex(x.ControllerKey)}},
	}
	hello := Request{Name: x.HelloName, UID: x.HelloUID, SignerName: attestation.HelloSignerName, Request: []byte(x.HelloRequest), Usages: x.Usages}
	proof := Request{Name: x.ProofName, UID: "b", SignerName: x.SignerName, Request: []byte(x.ProofRequest), Usages: x.Usages}
	now := time.Unix(challenge.Expires-60, 0)
	judge := func(config Config, proof, hello Request) (*VerifiedProof, error) {
		v, err := New(config)
		if err != nil {
			t.Fatal(err)
		}
		return v.VerifyProof(proof, hello, nil, now)
	}
	evidence, err := judge(config, proof, hello)
	if err != nil {
		t.Fatal(err)
	}
	if evidence.EK.Fingerprint != ek || hex.EncodeToString(evidence.AKName) != x.AKName {
		t.Errorf("%+v", evidence)
	}
	for name, change := range map[string]func(config *Config, proof, hello *Request){
		"cluster":    func(c *Config, _, _ *Request) { c.ClusterUID += "x" },
		"key":        func(c *Config, _, _ *Request) { c.Keys.ByID = map[string][]byte{challenge.KeyID: theKit().key} },
		"EK":         func(c *Config, _, _ *Request) { c.AllowedEKs = []Fingerprint{{1}} },
		"proof name": func(_ *Config, p, _ *Request) { p.Name += "x" },
		"hello name": func(_ *Config, _, h *Request) { h.Name += "x" },
		"hello UID":  func(_ *Config, _, h *Request) { h.UID += "x" },
		"signer":     func(_ *Config, p, _ *Request) { p.SignerName += "x" },
		"usages":     func(_ *Config, p, h *Request) { p.Usages = nil; h.Usages = nil },
		"expiration": func(_ *Config, p, h *Request) { p.ExpirationSeconds, h.ExpirationSeconds = int32p(600), int32p(600) },
		"PCRs":       func(c *Config, _, _ *Request) { c.PCRs.Indexes = []int{23} },
	} {
		c, p, h := config, proof, hello
		change(&c, &p, &h)
		if _, err := judge(c, p, h); err == nil {
			t.Errorf("accepted with another %s", name)
		}
	}
}

// TestOriginsOfTheSpecification judges the origins of docs/spec.md's test vectors.
func TestOriginsOfTheSpecification(t *testing.T) {
	var vectors struct {
		Origins struct {
			ObjectName, Request string
			Cases               []struct{ Name, Origin, AKName string }
		}
	}
	readVectors(t, &vectors)
	accepted, refused := 0, 0
	for _, c := range vectors.Origins.Cases {
		name, err := Origin(c.Origin, vectors.Origins.ObjectName, must(hex.DecodeString(vectors.Origins.Request)))
		if hex.EncodeToString(name) != c.AKName || (err == nil) != (c.AKName != "") {
			t.Errorf("%s: %x, %v, want %q", c.Name, name, err, c.AKName)
		}
		if err == nil {
			accepted++
		} else {
			refused++
		}
	}
	if accepted == 0 || refused == 0 {
		t.Errorf("%d are accepted, %d refused", accepted, refused)
	}
}
