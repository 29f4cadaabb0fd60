// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

type noMachines struct{}

func (noMachines) Machines(context.Context, time.Time) ([]verifier.Machine, error) { return nil, nil }

type noTokens struct{ noMachines }

func (noTokens) Token(context.Context, string, time.Time) (verifier.Token, error) {
	return verifier.Token{}, nil
}

func policy() verifier.Policy {
	return verifier.Policy{
		Cluster: "c", Providers: []verifier.Provider{{Name: "tpm", Challenges: true}},
		Signers: []verifier.Signer{{Name: "example.com/tpm", Providers: []string{"tpm"}}},
		Token:   verifier.Off, Credential: verifier.Required, BootCounters: verifier.Warn,
		EKSources: []verifier.EKSource{verifier.EKInventory}, NameSources: []verifier.NameSource{verifier.NameInventory},
	}
}

// What is missing is an error at the start, not a rule that never holds or a request that waits in vain.
func TestConfigIsComplete(t *testing.T) {
	for name, c := range map[string]struct {
		bend func(*Config, *verifier.Policy)
		want string
	}{
		"good":                       {func(*Config, *verifier.Policy) {}, ""},
		"tokens, and who knows them": {func(c *Config, p *verifier.Policy) { p.Token = verifier.Required; c.Machines = noTokens{} }, ""},
		"no machines":                {func(c *Config, _ *verifier.Policy) { c.Machines = nil }, "machines"},
		"no namespace":               {func(c *Config, _ *verifier.Policy) { c.Namespace = "" }, "namespace"},
		"no provider":                {func(c *Config, _ *verifier.Policy) { c.Providers = nil }, "provider"},
		"a provider twice":           {func(c *Config, _ *verifier.Policy) { c.Providers = append(c.Providers, stubTPM{}) }, "twice"},
		"a provider of the rules only": {func(_ *Config, p *verifier.Policy) {
			p.Providers = append(p.Providers, verifier.Provider{Name: "acme"})
		}, `"acme"`},
		"rules that say it does not challenge": {func(_ *Config, p *verifier.Policy) { p.Providers[0].Challenges = false }, "challenges"},
		"rules that say it does": {func(c *Config, p *verifier.Policy) {
			p.Providers = append(p.Providers, verifier.Provider{Name: "acme", Challenges: true})
			c.Providers = append(c.Providers, FromSigner("acme", InsecureSigner{}))
		}, "challenges"},
		"insecure, without a provider": {func(c *Config, p *verifier.Policy) {
			p.InsecureSigner, c.Machines = verifier.InsecureSignerName, noTokens{}
		}, `"insecure"`},
		"insecure, without tokens": {func(c *Config, p *verifier.Policy) {
			p.InsecureSigner = verifier.InsecureSignerName
			c.Providers = append(c.Providers, FromSigner(verifier.InsecureProvider, InsecureSigner{}))
		}, "token"},
		"tokens required, and nobody knows": {func(_ *Config, p *verifier.Policy) { p.Token = verifier.Required }, "token"},
		"no limits for a CA":                {func(c *Config, _ *verifier.Policy) { c.CA = signing.NewFiles("a", "b") }, "lifetime"},
		"a rate that is none":               {func(c *Config, _ *verifier.Policy) { c.Rates.Machine.Burst = 1 }, "rates"},
	} {
		t.Run(name, func(t *testing.T) {
			config, p := Config{Providers: []Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}, policy()
			c.bend(&config, &p)
			rules, err := verifier.New(p)
			if err != nil {
				t.Fatal(err)
			}
			config.Rules = rules
			_, err = newController(config)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want an error of %q", err, c.want)
			}
		})
	}
	if _, err := newController(Config{Providers: []Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}); err == nil {
		t.Error("without rules it starts")
	}
}

// stubTPM is a Challenger named tpm, for tests that judge nothing.
type stubTPM struct{ Challenger }

func (stubTPM) Name() string { return "tpm" }
