// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
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

// What is missing is an error at the start, not a rule that never holds or a request that waits in
// vain.
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
			c.Providers = append(c.Providers, evidence.FromSigner("acme", evidence.InsecureSigner{}))
		}, "challenges"},
		"insecure, without a provider": {func(c *Config, p *verifier.Policy) {
			p.InsecureSigner, c.Machines = verifier.InsecureSignerName, noTokens{}
		}, `"insecure"`},
		"insecure, without tokens": {func(c *Config, p *verifier.Policy) {
			p.InsecureSigner = verifier.InsecureSignerName
			c.Providers = append(c.Providers, evidence.FromSigner(verifier.InsecureProvider, evidence.InsecureSigner{}))
		}, "token"},
		"tokens required, and nobody knows": {func(_ *Config, p *verifier.Policy) { p.Token = verifier.Required }, "token"},
		"no limits for a CA":                {func(c *Config, _ *verifier.Policy) { c.CA = signing.NewFiles("a", "b") }, "lifetime"},
		"a rate that is none":               {func(c *Config, _ *verifier.Policy) { c.Rates.Machine.Burst = 1 }, "rates"},
	} {
		t.Run(name, func(t *testing.T) {
			config, p := Config{Providers: []evidence.Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}, policy()
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
	if _, err := newController(Config{Providers: []evidence.Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}); err == nil {
		t.Error("without rules it starts")
	}
}

// stubTPM is a Challenger named tpm, for tests that judge nothing.
type stubTPM struct{ evidence.Challenger }

func (stubTPM) Name() string { return "tpm" }

// The queue decides on each request that the cache shows, again after a failure, and on one that
// waits once its machine is known.
func TestQueue(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Machines = sharedList{k.machines}
		in := k.start(unwatched)
		caches := &informertest.FakeInformers{Scheme: testScheme()}
		queue, err := in.NewUnmanaged(caches, logr.Discard())
		if err != nil {
			k.Fatal(err)
		}
		informer, err := caches.FakeInformerFor(k.ctx, &certificatesv1.CertificateSigningRequest{})
		if err != nil {
			k.Fatal(err)
		}
		ctx, cancel := context.WithCancel(k.ctx)
		ended := make(chan error)
		go func() { ended <- queue.Start(ctx) }()
		var failed atomic.Bool // Two workers write at the same time.
		in.intercept = func(_ int, c call, run func() error) error {
			if c.writes() && failed.CompareAndSwap(false, true) {
				return answers["timeout"](c)
			}
			return run()
		}
		show := func(name string) { informer.Add(in.cached(name)) }
		synctest.Wait()
		show(k.pair("first", "worker-1", "ek-1", asToken("worker-1")))
		show(k.pair("late", "late", "ek-late", asToken("late")))
		time.Sleep(10 * time.Second)
		k.is("late", "")
		if len(k.is("first", "Approved/Attested").Status.Certificate) == 0 || !failed.Load() {
			k.Error("the first is not issued")
		}
		k.machine(machineNamed("late", "ek-late"))
		time.Sleep(2 * time.Second)
		if len(k.is("late", "Approved/Attested").Status.Certificate) == 0 {
			k.Error("the machine is known, and its request still waits")
		}
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			k.Error(err)
		}
		synctest.Wait()
	})
}

// A manager gets a controller without a call of the API server.
func TestAdd(t *testing.T) {
	manager, err := ctrl.NewManager(&rest.Config{Host: "http://127.0.0.1:1"}, ctrl.Options{
		Scheme: testScheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Logger: logr.Discard(),
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return meta.NewDefaultRESTMapper(nil), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	config := Config{Providers: []evidence.Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}
	if err := Add(manager, config); err == nil {
		t.Error("without rules it is added")
	}
	config.Rules = must(verifier.New(policy()))
	if err := Add(manager, config); err != nil {
		t.Error(err)
	}
}
