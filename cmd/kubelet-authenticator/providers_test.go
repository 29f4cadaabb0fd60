// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/auto"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// The shell completes the values of the TPM provider's own flag. The provider takes each of them.
func TestCompletionOfTheEKTemplate(t *testing.T) {
	var stdout, stderr bytes.Buffer
	p := command.Program{Name: "kubelet-authenticator", Providers: providers(), DefaultProvider: tpm.Name, FlagValues: flagValues}
	args := []string{"__completeNoDesc", "status", "--ek-template", ""}
	code := p.Run(t.Context(), command.Process{Args: args, Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }})
	words, _, _ := strings.Cut(stdout.String(), ":")
	values := strings.Fields(words)
	if code != 0 || len(values) < 3 || !slices.Contains(values, "auto") || !slices.Contains(values, "rsa-2048") {
		t.Fatalf("exit code %d: %q %q", code, stdout.String(), stderr.String())
	}
	for _, value := range values {
		if _, err := tpm.Factory().New(provider.Settings{EKTemplate: value}); err != nil {
			t.Error(err)
		}
	}
}

// Each provider that "auto" can choose is in this binary.
func TestAutoChoosesProvidersOfThisBinary(t *testing.T) {
	for name, c := range map[string]struct{ field, value, device string }{
		"tpm": {}, "ec2-role": {"sys_vendor", "Amazon EC2", "/nonexistent"}, "ec2": {"sys_vendor", "Amazon EC2", os.Args[0]},
		"gce":   {"product_name", "Google Compute Engine", "/nonexistent"},
		"azure": {"chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "/nonexistent"},
	} {
		dir := t.TempDir()
		if c.field != "" {
			if err := os.WriteFile(filepath.Join(dir, c.field), []byte(c.value+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		chosen, why := auto.Chooser{DMI: dir}.Choose(t.Context(), provider.Settings{TPMDevice: c.device, RuntimeDir: t.TempDir()})
		if chosen != name {
			t.Errorf("%s is chosen instead of %s: %s", chosen, name, why)
		}
		if !slices.ContainsFunc(providers(), func(f provider.Factory) bool { return f.Name == name }) {
			t.Errorf("%s is not in this binary", name)
		}
	}
}

// fipsChild has the test binary be the plugin that TestFIPS starts. It holds the arguments.
const fipsChild = "PROVIDERS_TEST_FIPS_CHILD"

// If FIPS 140-3 is enforced, the plugin says so, and its worker does not crash. In the mode that
// enforces nothing, it continues until the missing TPM.
func TestFIPS(t *testing.T) {
	const absent, enforced = 14, 35
	if args := os.Getenv(fipsChild); args != "" {
		p := command.Program{Name: "kubelet-authenticator", Providers: providers(), DefaultProvider: tpm.Name}
		os.Exit(p.Run(t.Context(), command.Process{Args: strings.Fields(args), Stdout: os.Stdout, Stderr: os.Stderr, Getenv: func(string) string { return "" }}))
	}
	flags := "--node-name=a --tpm-device=/nonexistent --cert-dir=" + t.TempDir() + " --runtime-dir=" + t.TempDir()
	for _, c := range []struct {
		mode, args string
		want       int
	}{
		{"off", "identify " + flags, absent}, {"on", "identify " + flags, absent},
		{"only", "identify " + flags, enforced}, {"only", flags, enforced},
	} {
		child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFIPS$")
		child.Env = append(os.Environ(), fipsChild+"="+c.args, "GODEBUG=fips140="+c.mode)
		out, err := child.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != c.want {
			t.Errorf("%s, %s: %v: %s", c.mode, c.args, err, out)
		}
		if named := strings.Contains(string(out), "AES-CFB") && strings.Contains(string(out), "hint: run it with GODEBUG=fips140=on"); named != (c.want == enforced) {
			t.Errorf("%s, %s: %s", c.mode, c.args, out)
		}
	}
}
