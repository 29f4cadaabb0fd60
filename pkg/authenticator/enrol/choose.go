// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Chosen is the provider that the program chose, and the signer to request from.
type Chosen struct {
	Provider   provider.Provider
	SignerName string
	// Why is for people.
	Why string
}

// Decided returns the Enroller with the provider that Choose returns, and why. If the provider is
// known, it returns e and no reason.
func (e *Enroller) Decided(ctx context.Context) (*Enroller, string, error) {
	if e.Choose == nil {
		return e, "", nil
	}
	chosen, err := e.Choose(ctx)
	if err != nil {
		return nil, "", err
	}
	decided := *e
	decided.Choose, decided.Provider, decided.SignerName = nil, chosen.Provider, chosen.SignerName
	return &decided, chosen.Why, nil
}

// chooseProvider settles which provider this worker uses. It records the choice before a request is
// filed, so that status and the next worker have it.
func (w *worker) chooseProvider(ctx context.Context) error {
	decided, why, err := w.enroller.Decided(ctx)
	if err != nil || decided == w.enroller {
		return err
	}
	w.enroller = decided
	choice := cache.Choice{Provider: decided.Provider.Name(), Why: why}
	w.log.Info("provider chosen", "provider", choice.Provider, "because", why, "caution", decided.Provider.Caution())
	state := nodestate.ReadState(decided.Node.Dir())
	if state.Choice != nil && *state.Choice == choice {
		return nil
	}
	state.Choice = &choice
	return w.lock.SetState(state)
}
