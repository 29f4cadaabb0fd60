// SPDX-License-Identifier: Apache-2.0

package ektrust

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const token = "controller"

// bearer is a transport with the controller's credential.
type bearer struct{ http.RoundTripper }

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	return b.RoundTripper.RoundTrip(r)
}

// serve returns an API that answers with a handler.
func serve(t *testing.T, handler http.Handler) *Fleet {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	fleet, err := New(server.URL, bearer{server.Client().Transport})
	if err != nil {
		t.Fatal(err)
	}
	return fleet
}

func newKey(t *testing.T) *ecdsa.PublicKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &key.PublicKey
}

// fingerprint is what a verifier makes of a key.
func fingerprint(t *testing.T, key any) tpm.Fingerprint {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return tpm.FingerprintOf(der)
}

func machine(name, instance string) clusterapi.PlatformMachine {
	return clusterapi.PlatformMachine{Name: name, ProviderID: identity.ProviderID(instance)}
}

func TestEndorsementKeys(t *testing.T) {
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ecc := newKey(t)
	cloud := &platform.Fleet{Token: token}
	for id, keys := range map[string][]any{"i-1": {&rsaKey.PublicKey, ecc}, "i-2": nil, "i-of-somebody-else": {newKey(t)}} {
		if err := cloud.Launch(id, "host-"+id, keys...); err != nil {
			t.Fatal(err)
		}
	}
	fleet := serve(t, cloud)
	one, same, bare, late := machine("one", "i-1"), machine("same", "i-1"), machine("bare", "i-2"), machine("late", "i-3")
	answers, err := fleet.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{one, same, bare, late})
	if err != nil || len(answers) != 3 {
		t.Fatalf("%v %v", answers, err)
	}
	want := []tpm.Fingerprint{fingerprint(t, &rsaKey.PublicKey), fingerprint(t, ecc)}
	for _, m := range []clusterapi.PlatformMachine{one, same} {
		if !slices.Equal(answers[m].EKs, want) {
			t.Errorf("%s: %v", m.Name, answers[m])
		}
	}
	if a := answers[one].Addresses; len(a) != 1 || a[0] != (clusterv1.MachineAddress{Type: clusterv1.MachineHostName, Address: "host-i-1"}) {
		t.Errorf("%v", a)
	}
	if a, ok := answers[bare]; !ok || len(a.EKs) != 0 {
		t.Errorf("without a TPM: %v", a)
	}
	// Launched meanwhile.
	if err := cloud.Launch("i-3", "", ecc); err != nil {
		t.Fatal(err)
	}
	if answers, err = fleet.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{late}); err != nil || !slices.Equal(answers[late].EKs, want[1:]) {
		t.Errorf("%v %v", answers, err)
	}
}

// A provider ID that is not Acme's keeps the others from nothing, and is never asked for as if it
// were.
func TestForeignProviderIDs(t *testing.T) {
	cloud := &platform.Fleet{Token: token}
	if err := cloud.Launch("i-1", "", newKey(t)); err != nil {
		t.Fatal(err)
	}
	good := machine("good", "i-1")
	machines := []clusterapi.PlatformMachine{good}
	for _, id := range []string{"aws:///eu/i-1", "acme://", "acme://i-1,i-2", "acme://I-1", "i-1", "acme:///i-1"} {
		machines = append(machines, clusterapi.PlatformMachine{Name: "foreign", ProviderID: id})
	}
	answers, err := serve(t, cloud).EndorsementKeys(t.Context(), machines)
	if err == nil || strings.Count(err.Error(), "machine foreign") != len(machines)-1 || len(answers) != 1 || len(answers[good].EKs) != 1 {
		t.Errorf("%v %v", answers, err)
	}
}

// More than one answer holds.
func TestManyInstances(t *testing.T) {
	cloud := &platform.Fleet{Token: token}
	key := newKey(t)
	var machines []clusterapi.PlatformMachine
	for i := range 2*MaxInstances + 1 {
		id := fmt.Sprintf("i-%d", i)
		if err := cloud.Launch(id, "", key); err != nil {
			t.Fatal(err)
		}
		machines = append(machines, machine(id, id))
	}
	answers, err := serve(t, cloud).EndorsementKeys(t.Context(), machines)
	if err != nil || len(answers) != len(machines) {
		t.Errorf("%d answers, %v", len(answers), err)
	}
}

func TestAnswersThatDoNotCount(t *testing.T) {
	good := string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: must(t)(x509.MarshalPKIXPublicKey(newKey(t)))}))
	private := strings.ReplaceAll(good, "PUBLIC", "PRIVATE")
	describe := func(instances ...instance) string {
		data, err := json.Marshal(map[string]any{"instances": instances})
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for name, answer := range map[string]string{
		"no JSON":                     "<html>",
		"cut off":                     describe(instance{ID: "i-1", EndorsementKeys: []string{good}})[:40],
		"too long":                    describe(instance{ID: "i-1", UserData: strings.Repeat("x", maxAnswer)}),
		"one that nobody asked about": describe(instance{ID: "i-2", EndorsementKeys: []string{good}}),
		"one twice":                   describe(instance{ID: "i-1", EndorsementKeys: []string{good}}, instance{ID: "i-1"}),
		"a key that is none":          describe(instance{ID: "i-1", EndorsementKeys: []string{good, "key"}}),
		"a key of another type":       describe(instance{ID: "i-1", EndorsementKeys: []string{private}}),
		"two keys in one":             describe(instance{ID: "i-1", EndorsementKeys: []string{good + good}}),
		"a key that does not parse":   describe(instance{ID: "i-1", EndorsementKeys: []string{"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"}}),
	} {
		t.Run(name, func(t *testing.T) {
			fleet := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, answer) }))
			answers, err := fleet.EndorsementKeys(t.Context(), []clusterapi.PlatformMachine{machine("one", "i-1")})
			if err == nil || len(answers) != 0 {
				t.Errorf("%v %v", answers, err)
			}
		})
	}
}

func must(t *testing.T) func([]byte, error) []byte {
	return func(data []byte, err error) []byte {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
}

// The platform is away, or somebody else answers.
func TestPlatformAway(t *testing.T) {
	machines := []clusterapi.PlatformMachine{machine("one", "i-1")}
	ask := func(ctx context.Context, fleet *Fleet) error {
		answers, err := fleet.EndorsementKeys(ctx, machines)
		if len(answers) > 0 {
			t.Errorf("%v", answers)
		}
		return err
	}
	cloud := &platform.Fleet{Token: "another"}
	if err := cloud.Launch("i-1", "", newKey(t)); err != nil {
		t.Fatal(err)
	}
	if err := ask(t.Context(), serve(t, cloud)); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("refused: %v", err)
	}
	cloud.Token = token
	impostor := httptest.NewTLSServer(cloud)
	defer impostor.Close()
	fleet, err := New(impostor.URL, bearer{http.DefaultTransport})
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(t.Context(), fleet); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate of another CA: %v", err)
	}
	redirect := serve(t, http.RedirectHandler(impostor.URL, http.StatusFound))
	if err := ask(t.Context(), redirect); err == nil || !strings.Contains(err.Error(), "302") {
		t.Errorf("redirected: %v", err)
	}
	slow := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := ask(ctx, slow); err == nil {
		t.Error("it waits for a platform that does not answer")
	}
}

func TestNewRefuses(t *testing.T) {
	for _, address := range []string{"", "http://fleet.acme.example", "fleet.acme.example", "https://", "://"} {
		if _, err := New(address, http.DefaultTransport); err == nil {
			t.Errorf("%q was taken", address)
		}
	}
	if _, err := New("https://fleet.acme.example", nil); err == nil {
		t.Error("without a transport")
	}
}
