// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// A worker records what it chose before it files a request, and the provider with the certificate.
func TestWorkerRecordsTheProvider(t *testing.T) {
	n := newNode(t)
	chosen := n.Provider
	n.use(plugintest.Provider{CanRenew: true})
	n.SignerName = ""
	n.Choose = func(context.Context) (Chosen, error) {
		return Chosen{chosen, "example.com/chosen", "it was there"}, nil
	}
	n.Step = func(step Step) {
		if state := nodestate.ReadState(n.Node.Dir()); step == StepPrepare && (state.Provider != "" || state.Choice == nil || *state.Choice != cache.Choice{Provider: chosen.Name(), Why: "it was there"}) {
			t.Errorf("before the request: provider %q, choice %v", state.Provider, state.Choice)
		}
	}
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	if _, proofs := n.api.split(); len(proofs) != 1 || proofs[0].Spec.SignerName != "example.com/chosen" {
		t.Errorf("filed: %v", proofs)
	}
	if state := nodestate.ReadState(n.Node.Dir()); state.Provider != chosen.Name() || state.Choice == nil {
		t.Errorf("after the certificate: provider %q, choice %v", state.Provider, state.Choice)
	}
}

// A worker that needs no certificate chooses nothing, and one that cannot choose files nothing.
func TestWorkerThatDoesNotChoose(t *testing.T) {
	n := newNode(t)
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	filed := len(n.api.filed)
	n.Choose = func(context.Context) (Chosen, error) {
		return Chosen{}, reason.Configuration.Failure("", errors.New("no choice"))
	}
	if err := n.work(); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	n.time = n.time.Add(2 * time.Hour)
	failure := plugintest.WantFailure(t, n.work(), reason.Configuration)
	if state := nodestate.ReadState(n.Node.Dir()); len(n.api.filed) != filed || state.Last == nil || state.Last.Message != failure.Error() {
		t.Errorf("%d requests, state %+v", len(n.api.filed)-filed, state.Last)
	}
}

// A provider with one round wants nothing remembered. Its name is kept all the same, in place of
// that of the provider before it.
func TestProviderWithOneRoundIsRecorded(t *testing.T) {
	n := newNode(t)
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	first := nodestate.ReadState(n.Node.Dir()).Provider
	n.use(oneRound{plugintest.Provider{CanRenew: true}})
	n.time = n.time.Add(2 * time.Hour)
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	if state := nodestate.ReadState(n.Node.Dir()); first != n.tpm.Name() || state.Provider != "one-round" {
		t.Errorf("first %q, then %q", first, state.Provider)
	}
}

// oneRound is a provider with another name than the node's first.
type oneRound struct{ plugintest.Provider }

func (oneRound) Name() string { return "one-round" }
