// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"bytes"
	"encoding/base64"
	"errors"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// tokenOf returns the token of a request.
func tokenOf(t testing.TB, filed verifier.Filed) []byte {
	t.Helper()
	request, err := attestation.Parse(filed.Request)
	if err != nil {
		t.Fatal(err)
	}
	identity, err := attestation.ParseIdentity(attestation.VersionGCE, request.Data)
	if err != nil {
		t.Fatal(err)
	}
	return identity.Statement
}

// No other bytes than Google's are accepted, and each verdict is one of the two kinds.
func FuzzVerify(f *testing.F) {
	a := someAttempt(f)
	filed := a.filed(f)
	good := tokenOf(f, filed)
	f.Add(good)
	f.Add(append(bytes.Clone(good), '\n'))
	f.Add([]byte("e30.e30.e30"))
	v, err := New(a.config)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, token []byte) {
		data, err := attestation.Identity{Version: attestation.VersionGCE, ClusterUID: clusterUID, Statement: token}.Marshal()
		if err != nil {
			return // empty or too long
		}
		filed := filed
		if filed.Request, err = (attestation.Request{PKCS10: []byte(a.pkcs10), Provider: Name, Data: data}).Marshal(); err != nil {
			t.Fatal(err)
		}
		verified, err := v.Verify(filed, a.keys)
		_, refused := errors.AsType[verifier.Refusals](err)
		_, unknown := errors.AsType[*UnknownKeyError](err)
		if accepted := err == nil; accepted != bytes.Equal(token, good) || accepted != (verified != nil) || !accepted && !refused && !unknown {
			t.Errorf("%q: %+v, %v", token, verified, err)
		}
	})
}

// The parsers behind the signature take any bytes. What they return is well-formed.
func FuzzClaims(f *testing.F) {
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(string(tokenOf(f, someAttempt(f).filed(f))), ".")[1])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(payload)
	f.Add([]byte(`{"iss":"","aud":"","iat":1,"exp":253402300799,"google":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseClaims(data)
		if err != nil {
			return
		}
		if c.issued.Unix() <= 0 || c.expires.Unix() <= 0 {
			t.Errorf("%+v", c)
		}
		i, err := parseInstance(c.google)
		if err == nil && (i.id == "" || strings.Count(i.providerID(), "/") != 4) {
			t.Errorf("%+v", i)
		}
	})
}

func FuzzParseKeySet(f *testing.F) {
	f.Add(theGoogle().KeySet())
	f.Add(setOf(f, with("use", "enc"), with("e", "Aw")))
	f.Fuzz(func(t *testing.T, data []byte) {
		set, err := ParseKeySet(data)
		if (err == nil) != (len(set.keys) > 0) || len(set.keys) > maxKeys {
			t.Fatalf("%d keys, %v", len(set.keys), err)
		}
		for id, k := range set.keys {
			if id == "" || k.public.N.BitLen() < minModulus || k.public.N.BitLen() > 4096 || k.public.E != exponent || !k.removed.IsZero() {
				t.Errorf("%q: %+v", id, k)
			}
		}
	})
}
