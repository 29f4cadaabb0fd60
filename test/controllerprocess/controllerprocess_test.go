// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The binary starts on the rights that the manifests give it, survives a crash, and ends as told.
func TestStartKillStop(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	binary := filepath.Join(t.TempDir(), "controller")
	if err := Build(t.Context(), "../..", binary); err != nil {
		t.Fatal(err)
	}
	if err := Install(t.Context(), cp, "../.."); err != nil {
		t.Fatal(err)
	}
	c, err := New(Options{ControlPlane: cp, Dir: t.TempDir(), Binary: binary, Configure: func(c *config.Config) { c.LeaderElection.Enabled = false }})
	if err != nil {
		t.Fatal(err)
	}
	start := func() {
		t.Helper()
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	start()
	if err := c.Start(t.Context()); err == nil {
		t.Error("it was started twice")
	}
	if metrics, err := c.Metrics(t.Context()); err != nil || !strings.Contains(metrics, "rest_client_requests_total") {
		t.Errorf("%v: %s", err, metrics)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Ready(t.Context()); err == nil {
		t.Error("a killed process is ready")
	}
	start()
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if log, err := os.ReadFile(c.LogFile()); err != nil || strings.Count(string(log), `"starting"`) != 2 || strings.Contains(string(log), "forbidden") {
		t.Errorf("not two starts, or a right is missing: %v\n%s", err, log)
	}
	if err := os.WriteFile(c.ConfigFile(), []byte("kind: Other\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-c.Process().Done()
	if err := c.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 10") {
		t.Errorf("an exit code of 10 is reported as %v", err)
	}
}

// What is written is what was configured, and no more than a person would write.
func TestConfigurationFile(t *testing.T) {
	c, err := New(Options{Dir: t.TempDir(), Configure: func(c *config.Config) { c.Audit = true; c.BootCounters = "Required" }})
	if err != nil {
		t.Fatal(err)
	}
	read, err := config.Load(c.ConfigFile())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := config.New(read); err != nil {
		t.Fatal(err)
	}
	if !read.Audit || read.BootCounters != "Required" || read.HealthBindAddress != c.health.Addr() || read.WaitDeadline != config.Default().WaitDeadline {
		t.Errorf("%+v", read)
	}
	if content, err := os.ReadFile(c.ConfigFile()); err != nil || strings.Contains(string(content), "waitDeadline") {
		t.Errorf("%v:\n%s", err, content)
	}
}
