// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"fmt"
	"reflect"
	"testing"
)

// leaf is one field of a structure, or of one within it.
type leaf struct {
	name  string
	value reflect.Value
}

// leaves returns every field of what v points to, in order. A field of an unknown kind fails the
// test. If you add one, say here how it changes.
func leaves(t *testing.T, prefix string, v reflect.Value) []leaf {
	t.Helper()
	if v.Kind() != reflect.Struct {
		return []leaf{{prefix, v}}
	}
	var all []leaf
	for i := range v.NumField() {
		if !v.Type().Field(i).IsExported() {
			t.Fatalf("%s.%s is not exported", prefix, v.Type().Field(i).Name)
		}
		all = append(all, leaves(t, prefix+"."+v.Type().Field(i).Name, v.Field(i))...)
	}
	return all
}

// others returns values that differ from v's.
func others(t *testing.T, name string, v reflect.Value) []reflect.Value {
	t.Helper()
	var list []reflect.Value
	add := func(values ...any) {
		for _, value := range values {
			list = append(list, reflect.ValueOf(value).Convert(v.Type()))
		}
	}
	switch old := v.Interface().(type) {
	case string:
		add(old+"\x00", old[:len(old)-1], "x"+old, "")
	case Version:
		add(old+"0", Version(""))
	case []byte:
		changed := bytes.Clone(old)
		changed[0] ^= 1
		add(changed, append(bytes.Clone(old), 0), old[:len(old)-1], []byte{})
	case int64:
		add(old+1, old-1, -old, old<<32, int64(0))
	case []int:
		add(append([]int{old[0] + 1}, old[1:]...), old[1:], append([]int{}, old[:len(old)-1]...), []int{})
	case []string:
		last := len(old) - 1
		add(append([]string{}, old[1:]...), append([]string{}, old[:last]...), append([]string{old[last]}, old[:last]...), append([]string{""}, old...),
			append([]string{}, append(old, "")...), []string{old[0] + old[1]}, []string{})
	case *int32:
		zero, more, minus := int32(0), *old+1, -*old
		add(&zero, &more, &minus, (*int32)(nil))
	default:
		t.Fatalf("%s: nobody has said how a %s changes", name, v.Type())
	}
	return list
}

// eachIsBound changes one field at a time, and moves a byte from each to its neighbour: compute
// must give something else each time.
func eachIsBound(t *testing.T, structure reflect.Value, compute func() []byte) {
	t.Helper()
	seen := map[string]string{string(compute()): "the original"}
	see := func(what string) {
		t.Helper()
		got := string(compute())
		if before, twice := seen[got]; twice {
			t.Errorf("%s gives the same as %s", what, before)
		}
		seen[got] = what
	}
	all := leaves(t, structure.Type().Name(), structure)
	for _, l := range all {
		old := reflect.New(l.value.Type()).Elem()
		old.Set(l.value)
		if l.value.IsZero() {
			t.Fatalf("%s is not set, so its change shows nothing", l.name)
		}
		for i, other := range others(t, l.name, old) {
			l.value.Set(other)
			see(fmt.Sprintf("%s, change %d", l.name, i))
		}
		l.value.Set(old)
	}
	for i := 1; i < len(all); i++ {
		left, right := all[i-1], all[i]
		a, okA := text(left.value)
		b, okB := text(right.value)
		if !okA || !okB {
			continue
		}
		set := func(x, y string) {
			left.value.Set(reflect.ValueOf(x).Convert(left.value.Type()))
			right.value.Set(reflect.ValueOf(y).Convert(right.value.Type()))
		}
		for _, move := range []struct{ x, y string }{
			{a[:len(a)-1], a[len(a)-1:] + b}, {a + b[:1], b[1:]}, {a + b, ""}, {"", a + b}, {b, a},
		} {
			set(move.x, move.y)
			see(fmt.Sprintf("%s and %s as %q and %q", left.name, right.name, move.x, move.y))
		}
		set(a, b)
	}
	if before := seen[string(compute())]; before != "the original" {
		t.Errorf("not put back: %s", before)
	}
}

// text returns a value that is a string of bytes.
func text(v reflect.Value) (string, bool) {
	if v.Kind() == reflect.String || v.Type() == reflect.TypeFor[[]byte]() {
		return v.Convert(reflect.TypeFor[string]()).String(), true
	}
	return "", false
}

func TestTheMACIsOverEachItem(t *testing.T) {
	expiration := int32(3600)
	transcript := Transcript{
		Version: VersionTPM, SignerName: "example.com/tpm", HelloName: "node-csr-a", HelloUID: "uid-a", HelloRequest: []byte("request"),
		ProofName: "node-csr-b", PKCS10: []byte("DER"), Usages: []string{"digital signature", "client auth"}, ExpirationSeconds: &expiration,
		KeyID: "kid", PCRs: PCRSelection{"sha256", []int{1, 2, 7}},
	}
	secret := bytes.Repeat([]byte{7}, SecretSize)
	eachIsBound(t, reflect.ValueOf(&transcript).Elem(), func() []byte { return transcript.MAC(secret) })

	mac := transcript.MAC(secret)
	if len(mac) != SecretSize || bytes.Equal(mac, transcript.MAC(bytes.Repeat([]byte{8}, SecretSize))) {
		t.Error("the MAC does not depend on the secret")
	}
}

func TestTheSecretIsForEachItem(t *testing.T) {
	info := SecretInfo{
		Version: VersionTPM, ClusterUID: "cluster", SignerName: "example.com/tpm", EKPublicKey: []byte("SPKI"), AKName: []byte("\x00\x0bname"),
		HelloRequest: []byte("request"), Expires: 1767225600, PCRs: PCRSelection{"sha256", []int{1, 2, 7}},
	}
	key, uid := bytes.Repeat([]byte{7}, 32), "uid-a"
	secret := func(key []byte, uid string) []byte {
		t.Helper()
		s, err := Secret(key, uid, info)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	eachIsBound(t, reflect.ValueOf(&info).Elem(), func() []byte { return secret(key, uid) })

	seen := map[string]bool{}
	for _, s := range [][]byte{
		secret(key, uid), secret(key, uid+"b"), secret(key, uid[1:]),
		secret(append(bytes.Clone(key), 1), uid), secret(bytes.Repeat([]byte{8}, 32), uid),
	} {
		if seen[string(s)] {
			t.Error("key and UID do not count")
		}
		seen[string(s)] = true
	}
}
