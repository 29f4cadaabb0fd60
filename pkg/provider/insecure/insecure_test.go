// SPDX-License-Identifier: Apache-2.0

package insecure

import (
	"encoding/json"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

func made(t *testing.T) provider.Provider {
	t.Helper()
	p, err := Factory().New(provider.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The bytes are the wire format: the controller compares them.
func TestEvidenceIsTheConstantDocument(t *testing.T) {
	for _, request := range []provider.Request{{}, {PKCS10: []byte("x"), NodeName: "a", ProviderID: "x://y", Name: "n", SignerName: "s"}} {
		got, err := made(t).Evidence(t.Context(), request)
		if err != nil || string(got) != `{"version":"insecure/v1"}` {
			t.Fatalf("%q, %v", got, err)
		}
		got[0] = 'x' // the caller's copy
	}
}

func TestVersionIsTheOneAnnounced(t *testing.T) {
	data, err := made(t).Evidence(t.Context(), provider.Request{})
	if err != nil {
		t.Fatal(err)
	}
	var document struct{ Version string }
	if err := json.Unmarshal(data, &document); err != nil || len(Factory().Versions) == 0 || document.Version != Factory().Versions[0] {
		t.Errorf("writes %q, announces %q, %v", document.Version, Factory().Versions, err)
	}
}

func TestRequestWithItsEvidenceIsOneOfOurs(t *testing.T) {
	p := made(t)
	data, err := p.Evidence(t.Context(), provider.Request{})
	if err != nil {
		t.Fatal(err)
	}
	marshalled, err := attestation.Request{PKCS10: []byte("x"), Provider: p.Name(), Data: data}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if parsed, err := attestation.Parse(marshalled); err != nil || parsed.Provider != Factory().Name {
		t.Errorf("%+v, %v", parsed, err)
	}
}

// A thief of a certificate that nothing attests must not be able to renew it for ever. The operator
// must be warned.
func TestItDoesNotRenewAndSaysWhatItIs(t *testing.T) {
	p := made(t)
	if p.Renews() {
		t.Error("it renews")
	}
	if p.Caution() == "" {
		t.Error("it keeps silent")
	}
	if id, err := p.ProviderID(t.Context()); id != "" || err != nil {
		t.Errorf("it claims to be machine %q, %v", id, err)
	}
	if p.SignerName() != "cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure" {
		t.Errorf("it asks %q, not the signer that is off unless switched on", p.SignerName())
	}
}
