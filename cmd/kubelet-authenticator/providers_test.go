// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
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
