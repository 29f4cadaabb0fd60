// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// ranked is a provider with a name.
type ranked struct {
	plugintest.Provider
	name string
}

func (r ranked) Name() string { return r.name }

// autoOptions are those of a node whose provider is "auto", with the providers strong, weak and
// none. none does not renew. choice is what a choice would find now.
func autoOptions(t *testing.T, choice string) (*Options, cache.Dir) {
	t.Helper()
	config := DefaultConfig()
	config.Provider, config.NodeName, config.CertDir = provider.Auto, "a", t.TempDir()+"/certs"
	o := &Options{
		Config: config,
		Choose: func(context.Context, provider.Settings) (string, string) { return choice, "it is " + choice },
	}
	for _, name := range []string{"strong", "weak", "none"} {
		p := ranked{plugintest.Provider{CanRenew: name != "none", Signer: "example.com/" + name}, name}
		o.Providers = append(o.Providers, provider.Factory{Name: name, New: func(provider.Settings) (provider.Provider, error) { return p, nil }})
	}
	return o, cache.At(config.CertDir)
}

func TestAuto(t *testing.T) {
	chosen := func(name string) *cache.Choice { return &cache.Choice{Provider: name, Why: "as before"} }
	for name, c := range map[string]struct {
		now         string       // what a choice finds now
		state       *cache.State // nil for none
		certificate bool
		shown, want string // before the worker's choice, and after; want is empty for an error
		why         string
	}{
		"first boot":                         {"weak", nil, false, provider.Auto, "weak", "it is weak"},
		"first boot, strong":                 {"strong", nil, false, provider.Auto, "strong", "it is strong"},
		"chosen before":                      {"weak", &cache.State{Choice: chosen("weak")}, false, "weak", "weak", "as before"},
		"a stronger one appears":             {"strong", &cache.State{Choice: chosen("weak")}, false, "weak", "strong", "it is strong"},
		"the stronger one fails":             {"weak", &cache.State{Choice: chosen("strong")}, false, "strong", "strong", "as before"},
		"enrolled with the strong one":       {"weak", &cache.State{Provider: "strong", Choice: chosen("weak")}, true, "strong", "strong", "last certificate"},
		"enrolled with the weak one":         {"strong", &cache.State{Provider: "weak"}, true, "weak", "weak", "last certificate"},
		"enrolled, the certificate is lost":  {"weak", &cache.State{Provider: "strong"}, false, "strong", "strong", "last certificate"},
		"enrolled with an earlier release":   {"weak", &cache.State{Remembered: map[string]string{"strong": "x"}}, true, "strong", "strong", "last certificate"},
		"the last one counts":                {"weak", &cache.State{Provider: "weak", Remembered: map[string]string{"strong": "x"}}, true, "weak", "weak", "last certificate"},
		"enrolled without evidence":          {"weak", &cache.State{Provider: "none"}, true, provider.Auto, "weak", "it is weak"},
		"the state is lost":                  {"weak", nil, true, provider.Auto, "", "could be weaker"},
		"the state is lost, strong":          {"strong", nil, true, provider.Auto, "strong", "it is strong"},
		"enrolled with one of another image": {"weak", &cache.State{Provider: "other"}, true, "", "", "not in this binary"},
		"a choice of another image":          {"other", nil, false, provider.Auto, "", "not in this binary"},
	} {
		t.Run(name, func(t *testing.T) {
			o, dir := autoOptions(t, c.now)
			if c.state != nil {
				plugintest.PutRecord(t, dir, c.state)
			}
			if c.certificate {
				plugintest.Put(t, dir, cache.CurrentFile, []byte("x"), 0o600)
			}
			a, err := New(*o)
			if c.shown == "" {
				if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), c.why) {
					t.Errorf("got %v", failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			overview := a.Overview()
			if overview.Provider != c.shown || (overview.SignerName == "") != (c.shown == provider.Auto) {
				t.Errorf("shown are provider %q and signer %q", overview.Provider, overview.SignerName)
			}
			if want := c.state != nil && c.state.Choice != nil && c.state.Choice.Provider == c.shown; (overview.ProviderChosen != "") != want {
				t.Errorf("the reason shown is %q", overview.ProviderChosen)
			}
			decided, why, err := a.enroller.Decided(t.Context())
			if c.want == "" {
				if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), c.why) || failure.Hint == "" {
					t.Errorf("got %v", failure)
				}
				return
			}
			if err != nil || decided.Provider.Name() != c.want || decided.SignerName != "example.com/"+c.want {
				t.Fatalf("%v: got %v", err, decided)
			}
			if kept := strings.Contains(c.why, "last certificate"); kept != (why == "") || !kept && !strings.Contains(why, c.why) {
				t.Errorf("because %q, want %q", why, c.why)
			}
		})
	}
}

// A certificate is printed without a choice: a choice may open a device.
func TestAutoChoosesNothingForARunWithACertificate(t *testing.T) {
	o, dir := autoOptions(t, "weak")
	o.Choose = func(context.Context, provider.Settings) (string, string) {
		t.Error("a choice was made")
		return "weak", ""
	}
	plugintest.PutRecord(t, dir, &cache.State{Provider: "strong"})
	a, err := New(*o)
	if err != nil || a.enroller.Choose != nil || a.node.Access.Provider != "strong" {
		t.Errorf("%v, provider %s", err, a.node.Access.Provider)
	}
}

// The node may have enrolled between the start of the worker and its choice.
func TestAutoKeepsWhatWasEnrolledMeanwhile(t *testing.T) {
	o, dir := autoOptions(t, "weak")
	plugintest.PutRecord(t, dir, &cache.State{Provider: "strong"})
	if chosen, err := o.ChooseProvider(t.Context()); err != nil || chosen.Provider.Name() != "strong" {
		t.Errorf("%v, %v", chosen.Provider, err)
	}
}

// The operator's signer holds for each provider.
func TestAutoWithASigner(t *testing.T) {
	o, _ := autoOptions(t, "weak")
	o.Config.SignerName = "example.org/mine"
	chosen, err := o.ChooseProvider(t.Context())
	if a, newErr := New(*o); err != nil || newErr != nil || chosen.SignerName != "example.org/mine" || a.enroller.SignerName != "example.org/mine" {
		t.Errorf("%v, %v, %+v", err, newErr, chosen)
	}
}

// A binary without a chooser has no provider "auto".
func TestAutoNeedsAChooser(t *testing.T) {
	o, _ := autoOptions(t, "weak")
	o.Choose = nil
	_, err := New(*o)
	if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), `"auto": not in this binary`) {
		t.Errorf("got %v", failure)
	}
}
