// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
)

// setOf returns a key set of these members.
func setOf(t testing.TB, members ...any) []byte {
	t.Helper()
	data, err := json.Marshal(map[string]any{"keys": members})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// with returns the key of Google with one member changed, or without it if value is nil.
func with(name string, value any) map[string]any {
	k := theGoogle().Key().JWK()
	if k[name] = value; value == nil {
		delete(k, name)
	}
	return k
}

// privateKey returns Google's key with its private members.
func privateKey(t *testing.T) map[string]any {
	t.Helper()
	k := theGoogle().Key()
	data, err := jose.JSONWebKey{Key: k.Private, KeyID: k.ID, Algorithm: "RS256", Use: "sig"}.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	var members map[string]any
	if err := json.Unmarshal(data, &members); err != nil || members["d"] == nil {
		t.Fatal(members, err)
	}
	return members
}

func TestParseKeySet(t *testing.T) {
	good := stranger().JWK()
	for what, c := range map[string]struct {
		data []byte
		want int
	}{
		"as published":          {theGoogle().KeySet(), 2},
		"the last size":         {append(theGoogle().KeySet(), strings.Repeat(" ", MaxKeySet-len(theGoogle().KeySet()))...), 2},
		"a member beside it":    {setOf(t, good, with("key_ops", []string{"verify"})), 2},
		"another type":          {setOf(t, good, map[string]any{"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "a"}), 1},
		"another algorithm":     {setOf(t, good, with("alg", "PS256")), 1},
		"no algorithm":          {setOf(t, good, with("alg", nil)), 1},
		"another use":           {setOf(t, good, with("use", "enc")), 1},
		"no use":                {setOf(t, good, with("use", nil)), 1},
		"another type, same ID": {setOf(t, good, map[string]any{"kty": "oct", "kid": good["kid"], "k": "AA"}), 1},
	} {
		set, err := ParseKeySet(c.data)
		if err != nil || len(set.keys) != c.want {
			t.Errorf("%s: %d keys, %v", what, len(set.keys), err)
		}
	}
}

func TestKeySetRefused(t *testing.T) {
	good := stranger().JWK()
	encode := base64.RawURLEncoding.EncodeToString
	modulus := func(bits int) string {
		n := new(big.Int).SetBit(new(big.Int), bits-1, 1)
		return encode(n.SetBit(n, 0, 1).Bytes())
	}
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	double := strings.Replace(string(setOf(t, good)), `"kid":`, `"kid":"x","kid":`, 1)
	many := slices.Repeat([]any{with("alg", "PS256")}, maxKeys+1)
	if _, err := ParseKeySet(setOf(t, with("n", modulus(4096)), good)); err != nil {
		t.Fatalf("the longest key: %v", err)
	}
	for what, data := range map[string][]byte{
		"nothing":           nil,
		"a page":            []byte("<html>"),
		"a list":            []byte("[]"),
		"no keys":           []byte("{}"),
		"an empty list":     []byte(`{"keys":[]}`),
		"keys is an object": []byte(`{"keys":{}}`),
		"a key is a string": []byte(`{"keys":["k"]}`),
		"something follows": append(theGoogle().KeySet(), '{', '}'),
		"cut short":         theGoogle().KeySet()[:100],
		"too long":          append(theGoogle().KeySet(), strings.Repeat(" ", MaxKeySet)...),
		"too many":          setOf(t, append(many, good)...),
		"v1/certs":          []byte(`{"a":"-----BEGIN CERTIFICATE-----\n"}`),
		"keys twice":        []byte(`{"keys":[],` + string(setOf(t, good)[1:])),
		"a key ID twice":    setOf(t, good, with("kid", good["kid"])),
		"a member twice":    []byte(double),
		"none is for us":    setOf(t, with("use", "enc")),
		"no key ID":         setOf(t, good, with("kid", nil)),
		"a long key ID":     setOf(t, good, with("kid", strings.Repeat("k", maxKeyID+1))),
		"no modulus":        setOf(t, good, with("n", nil)),
		"1024 bits":         setOf(t, good, with("n", encode(small.N.Bytes()))),
		"2047 bits":         setOf(t, good, with("n", modulus(minModulus-1))),
		"4097 bits":         setOf(t, good, with("n", modulus(4097))),
		"exponent 3":        setOf(t, good, with("e", "Aw")),
		"a private key":     setOf(t, good, privateKey(t)),
		"not base64":        setOf(t, good, with("n", "?")),
	} {
		if set, err := ParseKeySet(data); err == nil || len(set.keys) != 0 {
			t.Errorf("%s: %d keys, %v", what, len(set.keys), err)
		}
	}
}

// A token that is under way during a rotation is accepted. Afterwards the old key is worth nothing,
// even to the one who has it and writes an earlier time into a token.
func TestRotation(t *testing.T) {
	g := google.New("rotation")
	old, removed := g.Key(), created // the rotation is noticed at created
	before, err := ParseKeySet(g.KeySet())
	if err != nil {
		t.Fatal(err)
	}
	g.Rotate()
	after, err := ParseKeySet(g.KeySet())
	if err != nil {
		t.Fatal(err)
	}
	merged := after.Merge(before, removed)
	later := after.Merge(merged, removed.Add(retention-time.Second)) // keeps the first time of removal
	for what, c := range map[string]struct {
		key           google.Key
		keys          KeySet
		issued, filed time.Time
		reason        verifier.Reason // empty: accepted
	}{
		"the new key":             {g.Key(), merged, created, created, ""},
		"the new key, alone":      {g.Key(), after, created, created, ""},
		"the old key, under way":  {old, merged, removed.Add(-time.Second), removed.Add(time.Minute), ""},
		"judged again, a day on":  {old, later, removed.Add(-time.Second), removed.Add(time.Minute), ""},
		"issued after":            {old, merged, removed, removed.Add(time.Minute), cloud.ReasonSignature},
		"issued after, a day on":  {old, later, removed, removed.Add(time.Minute), cloud.ReasonSignature},
		"backdated, in the grace": {old, merged, removed.Add(-time.Second), removed.Add(9 * time.Minute), ""},
		"backdated, after it":     {old, merged, removed.Add(-time.Second), removed.Add(Grace), cloud.ReasonSignature},
		"backdated, a day on":     {old, later, removed.Add(-time.Second), removed.Add(Grace), cloud.ReasonSignature},
	} {
		a := someAttempt(t)
		a.key, a.keys, a.issued, a.node.Created = c.key, c.keys, c.issued, c.filed
		_, err := judge(t, a)
		refusals, _ := errors.AsType[verifier.Refusals](err)
		if c.reason == "" && err != nil || c.reason != "" && (len(refusals) == 0 || refusals.Reason() != c.reason) {
			t.Errorf("%s: %v", what, err)
		}
	}

	gone := after.Merge(later, removed.Add(retention))
	if gone.find(old.ID) != nil || len(gone.keys) != 2 {
		t.Errorf("the old key is kept: %d keys", len(gone.keys))
	}
	if back := before.Merge(merged, removed.Add(time.Minute)); back.find(old.ID) == nil || !back.find(old.ID).removed.IsZero() {
		t.Error("a key that is published again is not valid again")
	}
	if len(after.keys) != 2 || len(before.keys) != 2 {
		t.Error("Merge changed a set")
	}
	if none := (KeySet{}).Merge(KeySet{}, removed); len(none.keys) != 0 {
		t.Errorf("%d keys of nothing", len(none.keys))
	}
	if only := (KeySet{}).Merge(before, removed); len(only.keys) != 2 {
		t.Errorf("%d keys", len(only.keys))
	}
}
