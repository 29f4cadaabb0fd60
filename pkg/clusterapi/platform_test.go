// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// platform is an EKTrust.
type platform struct {
	mu      sync.Mutex
	answers map[string]PlatformAnswer // by provider ID
	fail    error
	slow    time.Duration
	deaf    bool // to the end of its context
	asked   []string
	last    []PlatformMachine
}

func (p *platform) EndorsementKeys(ctx context.Context, machines []PlatformMachine) (map[PlatformMachine]PlatformAnswer, error) {
	p.mu.Lock()
	var names []string
	for _, m := range machines {
		names = append(names, m.Name)
	}
	p.asked, p.last = append(p.asked, strings.Join(names, " ")), slices.Clone(machines)
	slow, deaf := p.slow, p.deaf
	p.mu.Unlock()
	if deaf {
		time.Sleep(slow)
	}
	select {
	case <-time.After(slow):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	answers := map[PlatformMachine]PlatformAnswer{{Name: "nobody asked"}: {}}
	for _, m := range machines {
		if answer, ok := p.answers[m.ProviderID]; ok {
			answers[m] = answer
		}
	}
	clear(machines) // what is given is the platform's
	return answers, p.fail
}

func (p *platform) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

// calls returns the machines of each call since the last look.
func (p *platform) calls() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { p.asked = nil }()
	return strings.Join(p.asked, "; ")
}

func answer(digits ...string) PlatformAnswer {
	var a PlatformAnswer
	for _, d := range digits {
		f, err := tpm.ParseFingerprint(ek(d))
		if err != nil {
			panic(err)
		}
		a.EKs = append(a.EKs, f)
	}
	return a
}

// withPlatform runs a test in a bubble, on Machines with a platform that is asked every 30 s.
func withPlatform(t *testing.T, test func(*testing.T, *platform, *store, *machineSource)) {
	synctest.Test(t, func(t *testing.T) {
		trust := &platform{answers: map[string]PlatformAnswer{}}
		p := newPlatformPoller(trust, 0)
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- p.Start(ctx) }()
		cache := newStore(t)
		time.Sleep(10 * time.Second) // between the ticks nothing depends on
		test(t, trust, cache, newMachineSource(machineSourceConfig{Reader: cache, Cluster: blue, Platform: p}))
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// look returns the EKs of one machine, after all goroutines have blocked.
func look(t *testing.T, s *machineSource, name string) string {
	t.Helper()
	read(t, s, time.Now())
	time.Sleep(readInterval)
	synctest.Wait()
	m, ok := read(t, s, time.Now())[name]
	if !ok {
		t.Fatalf("%s is missing", name)
	}
	time.Sleep(readInterval)
	return ekList(m)
}

func TestPlatform(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"] = answer("a", "b", "a") })
		cache.put(machine("m"))
		cache.put(machine("early", func(m *clusterv1.Machine) { m.Spec.ProviderID = "" }))
		if first := read(t, s, time.Now())["m"]; ekList(first) != "" || !first.Created.IsZero() {
			// no call waits, and no machine is trusted before there is an answer
			t.Errorf("got %+v", first)
		}
		if got := look(t, s, "m"); got != "Platform a, Platform b" {
			t.Errorf("got %s", got)
		}
		if got := read(t, s, time.Now())["m"]; got.Created.IsZero() {
			t.Errorf("got %+v", got)
		}
		if got := trust.calls(); got != "m" { // and not about the one without a provider ID
			t.Errorf("asked about %q", got)
		}
		want := PlatformMachine{
			Cluster: blue, Name: "m", UID: "uid-m", ProviderID: "metal://m",
			Infrastructure: clusterv1.ContractVersionedObjectReference{APIGroup: infraKindOf.Group, Kind: infraKindOf.Kind, Name: "infra-m"},
		}
		if len(trust.last) != 1 || trust.last[0] != want {
			t.Errorf("asked about %+v", trust.last)
		}

		// The platform is asked about a new machine at once, and only about that one. It is asked
		// about an unknown machine again with all others.
		cache.put(machine("x"))
		if got := look(t, s, "x"); got != "" {
			t.Errorf("got %s", got)
		}
		trust.set(func() { trust.answers["metal://x"] = answer("c") })
		time.Sleep(3 * time.Second)
		if got := trust.calls(); got != "x" {
			t.Errorf("asked about %q", got)
		}
		time.Sleep(30 * time.Second)
		if got := trust.calls(); got != "m x" {
			t.Errorf("asked about %q", got)
		}
		if got := look(t, s, "x"); got != "Platform c" {
			t.Errorf("got %s", got)
		}
		problem(t, s.Problem())
	})
}

// A machine with another provider ID, or with another object, is another one.
func TestPlatformAnswersStayWithTheirMachine(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"] = answer("a") })
		cache.put(machine("m"))
		look(t, s, "m")
		trust.set(func() { trust.fail = errors.New("down") })
		trust.set(func() { trust.answers = nil })
		for what, change := range map[string]func(*clusterv1.Machine){
			"UID":            func(m *clusterv1.Machine) { m.UID = "other" },
			"provider ID":    func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://other" },
			"infrastructure": func(m *clusterv1.Machine) { m.Spec.InfrastructureRef.Name = "other" },
		} {
			cache.put(machine("m", change))
			if got := look(t, s, "m"); got != "" {
				t.Errorf("%s: got %s", what, got)
			}
		}
		// The old answer is dropped.
		cache.put(machine("m"))
		if got := look(t, s, "m"); got != "" {
			t.Errorf("got %s", got)
		}
	})
}

func TestPlatformFails(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"], trust.answers["metal://x"] = answer("a"), answer("b") })
		cache.put(machine("m"))
		cache.put(machine("x"))
		look(t, s, "m")
		trust.calls()

		// With an error, the returned answers count, and other machines keep their last answers.
		trust.set(func() {
			trust.fail = fmt.Errorf("vcenter\n%s", strings.Repeat("x", 1<<20))
			delete(trust.answers, "metal://m")
			trust.answers["metal://x"] = answer("c")
		})
		cache.put(machine("new"))
		time.Sleep(31 * time.Second)
		if m, x := look(t, s, "m"), look(t, s, "x"); m != "Platform a" || x != "Platform c" {
			t.Errorf("got %s and %s", m, x)
		}
		problem(t, s.Problem(), "platform: vcenter xxx")
		if got := read(t, s, time.Now())["new"]; !got.Created.IsZero() {
			t.Errorf("nobody has said anything of it: %+v", got)
		}
		trust.calls()
		time.Sleep(20 * time.Second)
		read(t, s, time.Now())
		if got := trust.calls(); got != "" {
			t.Errorf("one that failed is asked again before its time, about %q", got)
		}

		// Without an error, a machine without an answer loses its last answer.
		trust.set(func() { trust.fail = nil })
		time.Sleep(30 * time.Second)
		if m, x := look(t, s, "m"), look(t, s, "x"); m != "" || x != "Platform c" {
			t.Errorf("got %s and %s", m, x)
		}
		if got := read(t, s, time.Now())["new"]; !got.Created.IsZero() {
			t.Errorf("the platform does not know it, and it is trusted on first use: %+v", got)
		}
		problem(t, s.Problem())
	})
}

// A machine that the platform does not know, or does not know any more, has no answer.
func TestPlatformThatDoesNotKnow(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"] = answer("a") })
		cache.put(machine("m"))
		if got := look(t, s, "m"); got != "Platform a" {
			t.Errorf("got %s", got)
		}
		trust.set(func() {
			unknown := answer("a")
			unknown.Unknown, unknown.ProviderID = true, "metal://x"
			trust.answers["metal://m"], trust.fail = unknown, errors.New("it is refused")
		})
		time.Sleep(31 * time.Second)
		if got := look(t, s, "m"); got != "" {
			t.Errorf("got %s", got)
		}
		if got := read(t, s, time.Now())["m"]; !got.Created.IsZero() {
			t.Errorf("it is trusted on first use: %+v", got)
		}
		problem(t, s.Problem(), "platform: it is refused")
	})
}

// knowsIDs is a platform that also knows the provider IDs of Machines without one.
type knowsIDs struct{ *platform }

func (knowsIDs) KnowsProviderIDs() {}

// A Machine without a provider ID has the one that the platform gives it, if it is asked for that.
// It is then provisioned, and otherwise as ready as its object says.
func TestPlatformGivesProviderIDs(t *testing.T) {
	for name, known := range map[string]bool{"knows": true, "does not": false} {
		t.Run(name, func(t *testing.T) {
			withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
				if known {
					s.Platform.trust, s.Platform.providerIDs = knowsIDs{trust}, true
				}
				given := answer("a")
				given.ProviderID = "metal://given"
				trust.set(func() { trust.answers[""], trust.answers["metal://own"] = given, given })
				without := func(m *clusterv1.Machine) {
					m.Spec.ProviderID, m.Status.Initialization.InfrastructureProvisioned = "", nil
				}
				cache.put(machine("without", without))
				cache.put(machine("own"))
				cache.put(machine("paused", without, func(m *clusterv1.Machine) { m.Annotations = map[string]string{clusterv1.PausedAnnotation: ""} }))
				cache.put(machine("early", without, func(m *clusterv1.Machine) { m.Status.Initialization.BootstrapDataSecretCreated = nil }))
				look(t, s, "without")
				all := read(t, s, time.Now())
				want := "metal://given"
				if !known {
					want = ""
				}
				for _, name := range []string{"without", "paused", "early"} {
					if got := all[name]; got.ProviderID != want || got.Ready != (known && name == "without") {
						t.Errorf("%s: got %+v", name, got)
					}
				}
				if got := all["own"]; got.ProviderID != "metal://own" || !got.Ready {
					t.Errorf("got %+v", got)
				}
			})
		})
	}
}

// A Machine that gets the provider ID which the platform gave it keeps its answer, also while the
// platform does not answer. One that gets another provider ID does not.
func TestProviderIDIsSetInAnOutage(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		s.Platform.trust, s.Platform.providerIDs = knowsIDs{trust}, true
		given := answer("a")
		given.ProviderID = "metal://given"
		trust.set(func() { trust.answers[""] = given })
		without := func(m *clusterv1.Machine) { m.Spec.ProviderID = "" }
		cache.put(machine("same", without))
		cache.put(machine("other", without))
		look(t, s, "same")
		trust.set(func() { trust.answers, trust.fail = nil, errors.New("down") })
		cache.put(machine("same", func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://given" }))
		cache.put(machine("other", func(m *clusterv1.Machine) { m.Spec.ProviderID = "metal://other" }))
		trust.calls()
		if same, other := look(t, s, "same"), look(t, s, "other"); same != "Platform a" || other != "" {
			t.Errorf("got %s and %s", same, other)
		}
		time.Sleep(2 * platformMinPause)
		if got := trust.calls(); !strings.Contains(got, "other same") {
			t.Errorf("asked about %q", got)
		}
	})
}

func TestEKFingerprintPEM(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	good := string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	for _, text := range []string{good, "\n" + good + " \n"} {
		if got, err := EKFingerprintPEM(text); err != nil || got != tpm.FingerprintOf(der) {
			t.Errorf("got %s, %v", got, err)
		}
	}
	edKey, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	edDER, err := x509.MarshalPKIXPublicKey(edKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"nothing": "", "two": good + good, "text before": "x\n" + good, "text after": good + "x", "cut": good[:60],
		"another type": strings.ReplaceAll(good, "PUBLIC KEY", "CERTIFICATE"),
		"more bytes":   string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: append(slices.Clone(der), 0)})),
		"no key":       string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte{1}})),
		"Ed25519":      string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: edDER})),
	} {
		if got, err := EKFingerprintPEM(text); err == nil {
			t.Errorf("%s: got %s", name, got)
		}
	}
	if _, err := EKFingerprint(key); err == nil { // the private key
		t.Error("a private key is accepted")
	}
}

func TestPlatformAnswersThatAreNone(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() {
			trust.answers["metal://m"] = PlatformAnswer{EKs: make([]tpm.Fingerprint, 1)}
			trust.answers["metal://n"] = PlatformAnswer{EKs: slices.Repeat(answer("a").EKs, maxEKs+1)}
			trust.answers["metal://x"] = answer("b")
			trust.answers["metal://y"] = PlatformAnswer{}
		})
		for _, name := range []string{"m", "n", "x", "y"} {
			cache.put(machine(name))
		}
		look(t, s, "m")
		got := read(t, s, time.Now())
		for name, want := range map[string]string{"m": "", "n": "", "x": "Platform b", "y": ""} {
			if ekList(got[name]) != want {
				t.Errorf("%s: got %s", name, ekList(got[name]))
			}
			if got[name].Created.IsZero() != (name != "x") { // y has no TPM
				t.Errorf("%s: created %v", name, got[name].Created)
			}
		}
		problem(t, s.Problem(), "machine m: an EK's fingerprint is all zeros", "machine n: it has more than 16 EKs")
	})
}

// Decisions do not wait for a platform, and calls for one Cluster do not wait for another
// Cluster's.
func TestSlowPlatform(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.slow = time.Hour })
		cache.put(machine("m"))
		begin := time.Now()
		read(t, s, begin)
		if took := time.Since(begin); took > 0 {
			t.Errorf("waited %s", took)
		}
		synctest.Wait()

		red := types.NamespacedName{Namespace: blue.Namespace, Name: "red"}
		cache.put(machine("r", func(m *clusterv1.Machine) { m.Spec.ClusterName = red.Name }))
		other := newMachineSource(machineSourceConfig{Reader: cache, Cluster: red, Platform: s.Platform})
		trust.set(func() {
			trust.slow, trust.answers["metal://r"], trust.answers["metal://m"] = 0, answer("a"), answer("b")
		})
		if got := look(t, other, "r"); got != "Platform a" {
			t.Errorf("got %s", got)
		}
		trust.calls()
		for range 25 { // not a second call while there is one
			read(t, s, time.Now())
			time.Sleep(time.Second)
		}
		if got := trust.calls(); got != "" {
			t.Errorf("asked about %q", got)
		}
		time.Sleep(platformTimeout)
		problem(t, other.Problem())
		if got := look(t, s, "m"); got != "Platform b" {
			t.Errorf("got %s", got)
		}
		trust.set(func() { trust.slow = time.Hour })
		time.Sleep(2 * platformTimeout)
		problem(t, s.Problem(), "platform: context deadline exceeded")
		if got := look(t, s, "m"); got != "Platform b" {
			t.Errorf("the last answer is gone: %q", got)
		}
	})
}

// A platform whose call does not end in time is not called again, and Problem says so.
func TestDeafPlatform(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.slow, trust.deaf = 5*time.Minute, true })
		cache.put(machine("m"))
		read(t, s, time.Now())
		time.Sleep(time.Minute)
		problem(t, s.Problem(), "platform: a call that began at 2000-01-01T00:00:10Z has not ended")
		if got := trust.calls(); got != "m" {
			t.Errorf("asked about %q", got)
		}
		trust.set(func() { trust.slow, trust.deaf, trust.answers["metal://m"] = 0, false, answer("a") })
		time.Sleep(5 * time.Minute)
		if got := look(t, s, "m"); got != "Platform a" {
			t.Errorf("got %s", got)
		}
		problem(t, s.Problem())
	})
}

// Several new machines share a call.
func TestPlatformPace(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		for i := range 100 {
			name := fmt.Sprintf("m%02d", i)
			trust.set(func() { trust.answers["metal://"+name] = answer("a") })
			cache.put(machine(name))
			read(t, s, time.Now())
			time.Sleep(readInterval)
		}
		time.Sleep(platformMinPause)
		if got := strings.Count(trust.calls(), ";") + 1; got < 9 || got > 12 {
			t.Errorf("%d calls in 10 s", got)
		}
		for name, m := range read(t, s, time.Now()) {
			if ekList(m) != "Platform a" {
				t.Errorf("%s has no EK a second later", name)
			}
		}
	})
}

// The platform is asked only about the latest machines of a Cluster. It is not asked about a
// Cluster that is no longer used.
func TestPlatformForgets(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"] = answer("a") })
		cache.put(machine("m"))
		cache.put(machine("x"))
		look(t, s, "m")
		cache.drop(machine("x"))
		read(t, s, time.Now())
		trust.calls()
		time.Sleep(31 * time.Second)
		if got := trust.calls(); got != "m" {
			t.Errorf("asked about %q", got)
		}
		time.Sleep(2 * platformExpiry)
		if got := strings.Count(trust.calls(), "m"); got < 15 || got > 20 {
			t.Errorf("asked %d times in %s", got, platformExpiry)
		}
		s.Platform.mu.Lock()
		if left := slices.Collect(maps.Keys(s.Platform.clusters)); len(left) > 0 {
			t.Errorf("%v are remembered", left)
		}
		s.Platform.mu.Unlock()
		if got := read(t, s, time.Now())["m"]; ekList(got) != "" {
			t.Errorf("an old answer is in use: %+v", got)
		}
		if got := look(t, s, "m"); got != "Platform a" {
			t.Errorf("got %s", got)
		}
	})
}

// The answer about a machine that was deleted meanwhile is dropped.
func TestPlatformAnswersLate(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		trust.set(func() { trust.answers["metal://m"], trust.slow = answer("a"), 5*time.Second })
		cache.put(machine("m"))
		read(t, s, time.Now())
		time.Sleep(time.Second)
		cache.drop(machine("m"))
		read(t, s, time.Now())
		time.Sleep(10 * time.Second)
		s.Platform.mu.Lock()
		defer s.Platform.mu.Unlock()
		if left := s.Platform.clusters[blue].machines; len(left) > 0 {
			t.Errorf("%v is remembered", left)
		}
	})
}

func TestPlatformOfInstances(t *testing.T) {
	withPlatform(t, func(t *testing.T, trust *platform, cache *store, s *machineSource) {
		known := answer("a")
		known.Addresses = addressList("Hostname=I-1", "InternalDNS=i-1.example.org", "InternalIP=10.0.0.1", "InternalIP=127.0.0.1")
		trust.set(func() { trust.answers["metal://1"], trust.answers["metal://m"] = known, known })
		cache.put(pool("p", "metal://1", "metal://2"))
		cache.put(machine("m"))
		if got := look(t, s, instance); got != "Platform a" {
			t.Errorf("got %s", got)
		}
		if got := trust.calls(); got != "m p p" {
			t.Errorf("asked about %q", got)
		}
		want := PlatformMachine{
			Cluster: blue, Name: "p", UID: "uid-p", MachinePool: true, ProviderID: "metal://2",
			Infrastructure: clusterv1.ContractVersionedObjectReference{APIGroup: infraKindOf.Group, Kind: "MetalMachinePool", Name: "p"},
		}
		if trust.last[2] != want {
			t.Errorf("asked about %+v", trust.last[2])
		}
		s.ServingAddresses = anyAddress()
		for range 2 { // what was added must not pile up
			time.Sleep(readInterval)
			got := read(t, s, time.Now())
			if first := got[instance]; fmt.Sprint(first.Names) != "[{Hostname i-1} {InternalDNS i-1.example.org}]" ||
				fmt.Sprint(first.Addresses) != "{[i-1 i-1.example.org] [10.0.0.1]}" || !first.Created.IsZero() {
				t.Errorf("got %+v", first)
			}
			// A Machine has its addresses from its status.
			if m := got["m"]; ekList(m) != "Platform a" || len(m.Names) != 1 || len(m.Addresses.IPs) != 0 {
				t.Errorf("got %+v", m)
			}
		}
		s.ServingAddresses = []clusterv1.MachineAddressType{clusterv1.MachineInternalDNS}
		time.Sleep(readInterval)
		if got := read(t, s, time.Now())[instance]; fmt.Sprint(got.Addresses) != "{[i-1.example.org] []}" || len(got.Names) != 2 {
			t.Errorf("got %+v", got)
		}
	})
}

func TestPlatformIntervals(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{
		0: 30 * time.Second, -1: 5 * time.Second, time.Second: 5 * time.Second, 6 * time.Second: 6 * time.Second, time.Hour: time.Hour,
	} {
		if got := newPlatformPoller(nil, given).interval; got != want {
			t.Errorf("%s: got %s", given, got)
		}
	}
}

func TestEKFingerprint(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := EKFingerprint(key.Public()); err != nil || got != tpm.Fingerprint(sha256.Sum256(der)) {
		t.Errorf("got %s, %v", got, err)
	}
	for _, none := range []any{nil, "key", key} {
		_, err := EKFingerprint(none)
		problem(t, err, "endorsement key")
	}
}
