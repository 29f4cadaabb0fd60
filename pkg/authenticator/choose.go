// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// A node with the provider "auto" keeps the provider of its last certificate, whatever its devices
// are now: other evidence could be weaker. Before the first certificate, a worker chooses. A later
// worker may choose again, but only a stronger provider. So a TPM whose driver loads late is used,
// and a TPM that fails later is not given up silently.

// NewProvider makes the provider that the operator named. With "auto" it makes the one that the
// node has enrolled with, or the one that a worker has chosen. It opens no device. Unless final is
// set, ChooseProvider decides before a request. If no worker has chosen yet, the result is named
// "auto".
func (o *Options) NewProvider() (p provider.Provider, final bool, err error) {
	if o.Config.Provider != provider.Auto || o.Choose == nil {
		p, err = o.makeProvider(o.Config.Provider)
		return p, true, err
	}
	state := nodestate.ReadState(cache.At(o.Config.CertDir))
	if name := o.enrolledWith(state); name != "" {
		p, err = o.makeProvider(name)
		return p, true, err
	}
	if state.Choice != nil {
		p, err = o.makeProvider(state.Choice.Provider)
		return p, false, err
	}
	return undecided{}, false, nil
}

// ChooseProvider returns the provider for the next request of a node with the provider "auto". It
// may open the TPM.
func (o *Options) ChooseProvider(ctx context.Context) (enrol.Chosen, error) {
	dir := cache.At(o.Config.CertDir)
	state := nodestate.ReadState(dir)
	name, why := o.enrolledWith(state), "the last certificate was requested with it"
	if name == "" {
		name, why = o.Choose(ctx, o.settings())
		switch before := state.Choice; {
		case before != nil && o.rank(before.Provider) <= o.rank(name):
			name, why = before.Provider, before.Why
		case state.Provider == "" && o.rank(name) > 0 && dir.Stamp(cache.CurrentFile) != (cache.Stamp{}):
			return enrol.Chosen{}, reason.Configuration.Failure("set provider to the one that this node has enrolled with",
				fmt.Errorf("provider auto: the state file does not name the provider of the certificate on disk, and %s could be weaker (%s)", name, why))
		}
	}
	p, err := o.makeProvider(name)
	if err != nil {
		return enrol.Chosen{}, reason.Configuration.Failure("set provider", fmt.Errorf("provider auto chose %s (%s): %w", name, why, err))
	}
	return enrol.Chosen{Provider: p, SignerName: cmp.Or(o.Config.SignerName, p.SignerName()), Why: why}, nil
}

// enrolledWith returns the name of the provider that the node has enrolled with, empty if it has
// not. A provider that does not renew has no evidence that another one could weaken. Earlier
// releases only remembered what a Challenger returned.
func (o *Options) enrolledWith(state *cache.State) string {
	for _, factory := range o.Providers {
		if _, remembered := state.Remembered[factory.Name]; factory.Name == state.Provider || state.Provider == "" && remembered {
			if p, err := o.makeProvider(factory.Name); err == nil && !p.Renews() {
				return ""
			}
			return factory.Name
		}
	}
	return state.Provider // of another binary: makeProvider says so
}

// rank returns the place of a provider in this binary's list, which begins with the strongest.
func (o *Options) rank(name string) int {
	i := slices.IndexFunc(o.Providers, func(f provider.Factory) bool { return f.Name == name })
	if i < 0 {
		return len(o.Providers)
	}
	return i
}

// settings returns the operator's settings for a provider.
func (o *Options) settings() provider.Settings {
	c := o.Config
	return provider.Settings{
		TPMDevice: c.TPMDevice, EKTemplate: c.EKTemplate, ProviderIDScheme: c.ProviderIDScheme, SystemUUIDFrom: c.SystemUUIDFrom,
		RuntimeDir: c.RuntimeDir, ClusterUID: c.ClusterUID,
	}
}

// makeProvider makes the provider of a name.
func (o *Options) makeProvider(name string) (provider.Provider, error) {
	names := make([]string, 0, len(o.Providers)+1)
	for _, factory := range o.Providers {
		names = append(names, factory.Name)
		if factory.Name != name {
			continue
		}
		p, err := factory.New(o.settings())
		if err != nil {
			return nil, fmt.Errorf("provider %s: %w", name, err)
		}
		return p, nil
	}
	if o.Choose != nil {
		names = append(names, provider.Auto)
	}
	if name == "" {
		return nil, fmt.Errorf("provider: not set; it is one of %q", names)
	}
	return nil, fmt.Errorf("provider %.64q: not in this binary, which has %q", name, names)
}

// undecided stands for the provider until a worker has chosen one. All providers that can be chosen
// renew.
type undecided struct{}

var errUndecided = errors.New("no provider is chosen yet")

func (undecided) Name() string                               { return provider.Auto }
func (undecided) SignerName() string                         { return "" }
func (undecided) Renews() bool                               { return true }
func (undecided) Caution() string                            { return "" }
func (undecided) ProviderID(context.Context) (string, error) { return "", errUndecided }
func (undecided) Evidence(context.Context, provider.Request) ([]byte, error) {
	return nil, errUndecided
}
