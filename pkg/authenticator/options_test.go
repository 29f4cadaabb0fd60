// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
)

func testProviders() []provider.Factory {
	return []provider.Factory{
		insecure.Factory(),
		{Name: "broken", New: func(provider.Settings) (provider.Provider, error) { return nil, errors.New("no such device") }},
		{Name: "nameless", New: func(provider.Settings) (provider.Provider, error) { return plugintest.Provider{}, nil }},
		{Name: "device", New: func(s provider.Settings) (provider.Provider, error) {
			return plugintest.Provider{Signer: "example.com/" + s.TPMDevice + s.EKTemplate + s.ClusterUID}, nil
		}},
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		says   string
	}{
		"no provider":             {func(c *Config) { c.Provider = "" }, "provider"},
		"unknown provider":        {func(c *Config) { c.Provider = "Insecure" }, `"Insecure"`},
		"provider that fails":     {func(c *Config) { c.Provider = "broken" }, "no such device"},
		"certDir relative":        {func(c *Config) { c.CertDir = "certs" }, "certDir"},
		"certDir empty":           {func(c *Config) { c.CertDir = "" }, "certDir"},
		"certDir from home":       {func(c *Config) { c.CertDir = "~/certs" }, "certDir"},
		"runtimeDir relative":     {func(c *Config) { c.RuntimeDir = "./run" }, "runtimeDir"},
		"runtimeDir empty":        {func(c *Config) { c.RuntimeDir = "" }, "runtimeDir"},
		"nodeName upper case":     {func(c *Config) { c.NodeName = "Node-1" }, "node name"},
		"nodeName with user name": {func(c *Config) { c.NodeName = "system:node:a" }, "node name"},
		"nodeName with a space":   {func(c *Config) { c.NodeName = "a " }, "node name"},
		"nodeName too long":       {func(c *Config) { c.NodeName = strings.Repeat("a", 254) }, "node name"},
		"nodeName much too long":  {func(c *Config) { c.NodeName = strings.Repeat("a", 10_000) }, "node name"},
		"providerID with newline": {func(c *Config) { c.ProviderID = "aws:///i-1\n" }, "provider ID"},
		"providerID too long":     {func(c *Config) { c.ProviderID = strings.Repeat("a", 1025) }, "provider ID"},
		"expiration too short":    {func(c *Config) { c.Expiration.Duration = 10*time.Minute - 1 }, "expiration"},
		"expiration too long":     {func(c *Config) { c.Expiration.Duration = 10*365*24*time.Hour + 1 }, "expiration"},
		"expiration negative":     {func(c *Config) { c.Expiration.Duration = -time.Hour }, "expiration"},
		"expiration beyond int32": {func(c *Config) { c.Expiration.Duration = 1<<63 - 1 }, "expiration"},
		"waitTimeout negative":    {func(c *Config) { c.WaitTimeout.Duration = -1 }, "waitTimeout"},
		"renewalWait negative":    {func(c *Config) { c.RenewalWait.Duration = -time.Second }, "renewalWait"},
		"checkInterval too short": {func(c *Config) { c.CheckInterval.Duration = 10*time.Second - 1 }, "checkInterval"},
		"checkInterval too long":  {func(c *Config) { c.CheckInterval.Duration = 24*time.Hour + 1 }, "checkInterval"},
		"checkInterval negative":  {func(c *Config) { c.CheckInterval.Duration = -time.Hour }, "checkInterval"},
		"clusterUID with a space": {func(c *Config) { c.ClusterUID = "a b" }, "clusterUID"},
		"clusterUID too long":     {func(c *Config) { c.ClusterUID = strings.Repeat("a", 129) }, "clusterUID"},
		// the proposal's
		"signerName without dot":     {func(c *Config) { c.SignerName = "cluster-x-k8s-io/kubelet" }, "signerName"},
		"signerName without path":    {func(c *Config) { c.SignerName = "example.com" }, "signerName"},
		"metricsTextfile relative":   {func(c *Config) { c.MetricsTextfile = "x.prom" }, "metricsTextfile"},
		"metricsTextfile, not .prom": {func(c *Config) { c.MetricsTextfile = "/var/lib/x.prom.txt" }, "metricsTextfile"},
		"metricsTextfile, a folder":  {func(c *Config) { c.MetricsTextfile = "/var/lib/x.prom/" }, "metricsTextfile"},
		"signerName, empty path":     {func(c *Config) { c.SignerName = "example.com/" }, "signerName"},
		"signerName, empty domain":   {func(c *Config) { c.SignerName = "/kubelet" }, "signerName"},
		"signerName, upper case":     {func(c *Config) { c.SignerName = "Example.com/kubelet" }, "signerName"},
		"signerName, longer path":    {func(c *Config) { c.SignerName = "example.com/kubelet/client" }, "signerName"},
		"signerName, path in caps":   {func(c *Config) { c.SignerName = "example.com/Kubelet" }, "signerName"},
		"signerName, path a phrase":  {func(c *Config) { c.SignerName = "example.com/kube let" }, "signerName"},
		"signerName, a long label":   {func(c *Config) { c.SignerName = strings.Repeat("a", 64) + ".com/kubelet" }, "signerName"},
		"signerName, path long, bad": {func(c *Config) { c.SignerName = "example.com/" + strings.Repeat("A/", 130) }, "signerName"},
		"signerName too long":        {func(c *Config) { c.SignerName = "example.com/" + strings.Repeat("a.", 300) + "a" }, "signerName"},
		"the provider's signerName":  {func(c *Config) { c.Provider = "nameless" }, "signerName"},
	} {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			config.Provider = insecure.Name
			c.change(&config)
			a, err := New(Options{Config: config, Providers: testProviders()})
			failure := plugintest.WantFailure(t, err, reason.Configuration)
			if !strings.Contains(failure.Error(), c.says) || failure.Hint == "" {
				t.Errorf("it does not say %q, or gives no hint: %v", c.says, failure)
			}
			// A caller that goes on all the same gets the same error where it matters.
			if report := a.DryRun(t.Context()); report.Failure != failure || report.Request != nil || report.Verdict != "a run would fail: "+failure.Error() {
				t.Errorf("a dry run: %+v", report)
			}
			if err := a.Work(t.Context()); !errors.Is(err, failure) {
				t.Errorf("a worker: %v", err)
			}
		})
	}
}

func TestNewAccepts(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"defaults":                func(*Config) {},
		"shortest expiration":     func(c *Config) { c.Expiration.Duration = 10 * time.Minute },
		"longest expiration":      func(c *Config) { c.Expiration.Duration = 87600 * time.Hour },
		"no checks":               func(c *Config) { c.CheckInterval.Duration = 0 },
		"shortest checkInterval":  func(c *Config) { c.CheckInterval.Duration = 10 * time.Second },
		"longest checkInterval":   func(c *Config) { c.CheckInterval.Duration = 24 * time.Hour },
		"metrics":                 func(c *Config) { c.MetricsTextfile = "/none/kubelet_authenticator.prom" },
		"no waiting":              func(c *Config) { c.WaitTimeout.Duration, c.RenewalWait.Duration = 0, 0 },
		"longest node name":       func(c *Config) { c.NodeName = strings.Repeat("a", 253) },
		"Kubernetes' own signer":  func(c *Config) { c.SignerName = "kubernetes.io/kube-apiserver-client-kubelet" },
		"signer with dotted path": func(c *Config) { c.SignerName = "issuers.cert-manager.io/ns.name" },
	} {
		config := DefaultConfig()
		config.Provider = insecure.Name
		change(&config)
		if _, err := New(Options{Config: config, Providers: testProviders()}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNewTakesWhatItIsGiven(t *testing.T) {
	config := DefaultConfig()
	config.Provider, config.TPMDevice, config.EKTemplate, config.ClusterUID = "device", "tpm7", "-rsa", "-uid"
	config.Expiration.Duration = 90*time.Minute + 999*time.Millisecond
	a, err := New(Options{Config: config, Providers: testProviders()})
	if err != nil {
		t.Fatal(err)
	}
	if a.enroller.ExpirationSeconds == nil || *a.enroller.ExpirationSeconds != 5400 {
		t.Errorf("expirationSeconds %v, want 5400", a.enroller.ExpirationSeconds)
	}
	if a.enroller.SignerName != "example.com/tpm7-rsa-uid" {
		t.Errorf("the provider's settings or its signer are lost: %q", a.enroller.SignerName)
	}
	config.Expiration.Duration = 0
	config.SignerName = "example.org/other"
	if a, err = New(Options{Config: config, Providers: testProviders()}); err != nil || a.enroller.ExpirationSeconds != nil || a.enroller.SignerName != "example.org/other" {
		t.Errorf("expirationSeconds %v, signer %q, %v", a.enroller.ExpirationSeconds, a.enroller.SignerName, err)
	}
}

// Who forgets StartWorker gets an error, and no panic in the kubelet's way.
func TestNewWithoutStartWorker(t *testing.T) {
	config := DefaultConfig()
	config.Provider, config.CertDir, config.RuntimeDir, config.NodeName = insecure.Name, t.TempDir(), t.TempDir(), "a"
	a, err := New(Options{Config: config, Providers: testProviders()})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(config.CertDir, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err = a.Run(t.Context())
	_ = plugintest.WantFailure(t, err, reason.WorkerUnavailable)
}

// Steps is what tests stop a run or a worker at: one that is not in it goes untested.
func TestEveryStepIsListed(t *testing.T) {
	var declared []string
	for _, name := range []string{"authenticator.go", "enrol/enroller.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok {
				kind := spec.Type
				if selector, ok := kind.(*ast.SelectorExpr); ok {
					kind = selector.Sel
				}
				if name, ok := kind.(*ast.Ident); ok && name.Name == "Step" {
					text, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
					if err != nil {
						t.Fatal(err)
					}
					declared = append(declared, text)
				}
			}
			return true
		})
	}
	var listed []string
	for _, step := range Steps() {
		listed = append(listed, string(step))
	}
	slices.Sort(declared)
	slices.Sort(listed)
	if len(declared) < 14 || !slices.Equal(declared, listed) {
		t.Errorf("declared: %q\nlisted: %q", declared, listed)
	}
}

func TestCallerIsNobodyForAPerson(t *testing.T) {
	if got := Caller(ExecInfo{}); got.PID != 0 {
		t.Errorf("got %v", got)
	}
	if got := Caller(ExecInfo{APIVersion: execV1}); !got.Alive() {
		t.Errorf("got %v, which does not live", got)
	}
}
