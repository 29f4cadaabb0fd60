// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
)

func someBinding() Binding {
	lifetime := int32(3600)
	return Binding{
		Version: VersionGCE, ClusterUID: "c", SignerName: "example.com/s", Name: "node-csr-a",
		PKCS10: []byte("pkcs10"), Usages: []string{"client auth", "digital signature"}, ExpirationSeconds: &lifetime,
	}
}

// Each field of a binding is part of the nonce, and no two fields can be confused.
func TestBinding(t *testing.T) {
	other := int32(3601)
	seen := map[[32]byte]string{someBinding().Nonce(): "unchanged"}
	for name, bend := range map[string]func(b *Binding){
		"version":             func(b *Binding) { b.Version = VersionAzure },
		"cluster":             func(b *Binding) { b.ClusterUID = "d" },
		"no cluster":          func(b *Binding) { b.ClusterUID = "" },
		"signer":              func(b *Binding) { b.SignerName = "example.com/t" },
		"name":                func(b *Binding) { b.Name = "node-csr-b" },
		"name and signer":     func(b *Binding) { b.SignerName, b.Name = "example.com/snode", "-csr-a" },
		"PKCS#10":             func(b *Binding) { b.PKCS10 = []byte("pkcs11") },
		"order of the usages": func(b *Binding) { b.Usages = []string{"digital signature", "client auth"} },
		"one usage less":      func(b *Binding) { b.Usages = b.Usages[:1] },
		"usages as one":       func(b *Binding) { b.Usages = []string{"client authdigital signature"} },
		"lifetime":            func(b *Binding) { b.ExpirationSeconds = &other },
		"no lifetime":         func(b *Binding) { b.ExpirationSeconds = nil },
	} {
		b := someBinding()
		bend(&b)
		nonce := b.Nonce()
		if same, found := seen[nonce]; found {
			t.Errorf("%s: the nonce is that of: %s", name, same)
		}
		seen[nonce] = name
	}
}

// A platform that takes only letters and digits gets 32 of them. The text was computed with
// Python's integers.
func TestAlphanumeric(t *testing.T) {
	b := someBinding()
	if text := b.Alphanumeric(); !regexp.MustCompile(`^[0-9A-Za-z]{32}$`).MatchString(text) || text != "jh1jWjBr8MlyvDu2GZozgqI4zm6LLJkl" {
		t.Errorf("%s", text)
	}
	if text := b.Hex(); text != "8537c391138631e473971f1afc752a51e44a0dba72d4f3b57af2680aaaf8a507" {
		t.Errorf("%s", text)
	}
	if text := b.Audience(); text != "https://kubelet-authenticator/8537c391138631e473971f1afc752a51e44a0dba72d4f3b57af2680aaaf8a507" {
		t.Errorf("%s", text)
	}
}

// The fingerprint depends on platform and ID, and not on the account.
func TestInstanceFingerprint(t *testing.T) {
	i := Instance{Platform: "ec2", ID: "i-0123456789abcdef0", Account: "123456789012"}
	withoutAccount, otherPlatform, shifted := i, i, Instance{Platform: "ec2i", ID: "-0123456789abcdef0"}
	withoutAccount.Account, otherPlatform.Platform = "", "gce"
	if i.Fingerprint() != withoutAccount.Fingerprint() {
		t.Error("the account is part of the fingerprint")
	}
	if i.Fingerprint() == otherPlatform.Fingerprint() || i.Fingerprint() == shifted.Fingerprint() {
		t.Error("two instances have one fingerprint")
	}
}

// An identity has one encoding.
func TestIdentityHasOneEncoding(t *testing.T) {
	data, err := Identity{Version: VersionGCE, ClusterUID: "c", Statement: []byte("statement")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if i, err := ParseIdentity(VersionGCE, data); err != nil || string(i.Statement) != "statement" || i.ClusterUID != "c" {
		t.Fatalf("%+v, %v", i, err)
	}
	if version, _ := Head(data); version != VersionGCE {
		t.Errorf("its head is %q", version)
	}
	text := string(data)
	for name, bent := range map[string]string{
		"white space":            strings.Replace(text, ":", ": ", 1),
		"trailing line feed":     text + "\n",
		"unknown field":          strings.Replace(text, "{", `{"a":1,`, 1),
		"doubled field":          strings.Replace(text, `"clusterUID":"c"`, `"clusterUID":"c","clusterUID":"c"`, 1),
		"missing field":          strings.Replace(text, `"clusterUID":"c",`, "", 1),
		"another order":          `{"clusterUID":"c",` + strings.Replace(text[1:], `"clusterUID":"c",`, "", 1),
		"a space in the cluster": strings.Replace(text, `"c"`, `"c d"`, 1),
		"no statement":           regexp.MustCompile(`"statement":"[^"]*"`).ReplaceAllString(text, `"statement":""`),
		"another version":        strings.Replace(text, "gce/v1", "gce/v2", 1),
		"another provider":       strings.Replace(text, "gce/v1", "azure/v1", 1),
	} {
		if bent == text {
			t.Fatalf("%s: nothing was bent", name)
		}
		if _, err := ParseIdentity(VersionGCE, []byte(bent)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	for name, i := range map[string]Identity{
		"long cluster":   {Version: VersionGCE, ClusterUID: strings.Repeat("c", 129), Statement: []byte("s")},
		"long statement": {Version: VersionGCE, Statement: bytes.Repeat([]byte("s"), maxStatement+1)},
		"no version":     {Statement: []byte("s")},
	} {
		if _, err := i.Marshal(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func FuzzIdentity(f *testing.F) {
	data, err := Identity{Version: VersionGCE, ClusterUID: "c", Statement: []byte("statement")}.Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		i, err := ParseIdentity(VersionGCE, data)
		if err != nil {
			return
		}
		if again, err := i.Marshal(); err != nil || !bytes.Equal(again, data) {
			t.Fatalf("two encodings of one identity: %v", err)
		}
	})
}
