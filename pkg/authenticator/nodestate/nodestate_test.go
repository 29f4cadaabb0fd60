// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"crypto/x509"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// leafOf returns a certificate as far as times go. It has its bytes, which stand for all its other
// content, and its validity.
func leafOf(content uint64, notBefore time.Time, lifetime time.Duration) *x509.Certificate {
	return &x509.Certificate{Raw: binary.BigEndian.AppendUint64(nil, content), NotBefore: notBefore, NotAfter: notBefore.Add(lifetime)}
}

// lifetimes that are promised to work, and many in between.
func lifetimes() []time.Duration {
	const shortest, longest = 10 * time.Minute, 10 * 365 * 24 * time.Hour
	random := rand.New(rand.NewPCG(1, 2))
	all := []time.Duration{shortest, time.Hour, 24 * time.Hour, 168 * time.Hour, 365 * 24 * time.Hour, longest}
	for range 5000 {
		all = append(all, shortest+time.Duration(random.Int64N(int64(longest-shortest))).Truncate(time.Second))
	}
	for range 1000 {
		all = append(all, shortest+time.Duration(random.Int64N(int64(24*time.Hour))).Truncate(time.Second))
	}
	return all
}

func TestRenewalIsBetweenSevenAndNineTenths(t *testing.T) {
	for i, lifetime := range lifetimes() {
		leaf := leafOf(uint64(i), noon, lifetime)
		at := RenewAt(leaf)
		if at.Before(noon.Add(lifetime/10*7)) || at.After(noon.Add(lifetime/10*9)) {
			t.Fatalf("of %v, at %v", lifetime, at.Sub(noon))
		}
		if again := RenewAt(leafOf(uint64(i), noon, lifetime)); !again.Equal(at) {
			t.Fatalf("of the same certificate: at %v, then at %v", at, again)
		}
	}
}

// Machines that were installed together must not renew together.
func TestRenewalsSpreadOut(t *testing.T) {
	const fleet, buckets, lifetime = 1000, 10, 168 * time.Hour
	var count [buckets]int
	for i := range uint64(fleet) {
		part := RenewAt(leafOf(i, noon, lifetime)).Sub(noon.Add(lifetime / 10 * 7))
		count[min(int(part*buckets/(lifetime/5)), buckets-1)]++
	}
	for _, n := range count {
		if n < 60 || n > 140 { // 100 expected, with a standard deviation of 9.5
			t.Fatalf("not uniform: %v", count)
		}
	}
}

func TestSteadyExpiration(t *testing.T) {
	for i, lifetime := range lifetimes() {
		leaf := leafOf(uint64(i), noon, lifetime)
		for _, renews := range []bool{true, false} {
			at := SteadyExpiration(leaf, renews)
			switch {
			case !at.Equal(at.Truncate(time.Second)):
				t.Fatalf("%v has a fraction of a second, which the timestamp would lose", at)
			case !SteadyExpiration(leaf, renews).Equal(at):
				t.Fatal("it differs between two calls")
			case !at.Before(leaf.NotAfter):
				t.Fatalf("of %v: not before its end", lifetime)
			case renews && (at.After(RenewAt(leaf)) || RenewAt(leaf).Sub(at) >= time.Second):
				t.Fatalf("of %v: %v is not the renewal point %v", lifetime, at, RenewAt(leaf))
			case !renews && leaf.NotAfter.Sub(at) > time.Minute:
				t.Fatalf("of %v: %v before its end", lifetime, leaf.NotAfter.Sub(at))
			}
		}
	}
	// from the end, where the provider does not renew
	for lifetime, want := range map[time.Duration]time.Duration{
		10 * time.Minute: 30 * time.Second,
		20 * time.Minute: time.Minute,
		24 * time.Hour:   time.Minute,
	} {
		if got := noon.Add(lifetime).Sub(SteadyExpiration(leafOf(1, noon, lifetime), false)); got != want {
			t.Errorf("of %v: %v before its end, want %v", lifetime, got, want)
		}
	}
}

func TestNearExpiration(t *testing.T) {
	for left, most := range map[time.Duration]time.Duration{
		-time.Second:              2 * time.Second, // while something else is printed all the same
		0:                         2 * time.Second,
		100 * time.Millisecond:    2 * time.Second,
		time.Second:               2 * time.Second,
		4 * time.Second:           2 * time.Second,
		40 * time.Second:          11 * time.Second,
		time.Minute:               16 * time.Second,
		2 * time.Minute:           31 * time.Second,
		time.Hour:                 31 * time.Second,
		10 * 365 * 24 * time.Hour: 31 * time.Second,
	} {
		for _, fraction := range []time.Duration{0, 1, 499 * time.Millisecond, 500 * time.Millisecond, time.Second - 1} {
			now := noon.Add(fraction)
			leaf := leafOf(1, now.Add(left-time.Hour), time.Hour)
			at := NearExpiration(leaf, now)
			if !at.Equal(at.Truncate(time.Second)) {
				t.Errorf("%v left: %v has a fraction of a second", left, at)
			}
			// client-go asks for every request once the timestamp is past: a second of
			// pause at the least.
			if at.Before(now.Add(time.Second)) || at.After(now.Add(most)) {
				t.Errorf("%v left, %v into the second: %v from now, want 1s to %v", left, fraction, at.Sub(now), most)
			}
		}
	}
}
