// SPDX-License-Identifier: Apache-2.0

// testplugin is a plugin built from the library, as an infrastructure provider builds its own: with a provider that may renew, one
// that hangs, and a hook that kills the process before a given step.
package main

import (
	"context"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

func main() {
	deadline, _ := time.ParseDuration(os.Getenv("TEST_WORKER_DEADLINE"))
	os.Exit(command.Program{
		Name:    "testplugin",
		Version: "test",
		Providers: []provider.Factory{
			factory("renewing", func(p insecure.Provider) provider.Provider { return renewing{p} }),
			factory("hanging", func(p insecure.Provider) provider.Provider { return hanging{p} }),
			factory("noisy", func(p insecure.Provider) provider.Provider { return noisy{p} }),
			tpm.Factory(),
		},
		WorkerDeadline: deadline,
		OnStep:         kill(os.Getenv("TEST_KILL_FILE")),
	}.Main())
}

func factory(name string, wrap func(insecure.Provider) provider.Provider) provider.Factory {
	return provider.Factory{Name: name, New: func(provider.Settings) (provider.Provider, error) {
		return wrap(insecure.Provider{}), nil
	}}
}

// renewing may use the node's own certificate.
type renewing struct{ insecure.Provider }

func (renewing) Name() string    { return "renewing" }
func (renewing) Renews() bool    { return true }
func (renewing) Caution() string { return "" }

// hanging never answers, whatever its context says: a TPM driver that is stuck.
type hanging struct{ insecure.Provider }

func (hanging) Name() string { return "hanging" }
func (hanging) Evidence(context.Context, provider.Request) ([]byte, error) {
	time.Sleep(time.Hour)
	return nil, nil
}

// noisy prints to standard output wherever it can, as a badly behaved dependency would.
type noisy struct{ insecure.Provider }

func (noisy) Name() string { return "noisy" }
func (noisy) Renews() bool {
	_, _ = os.Stdout.WriteString("noise\n")
	_, _ = syscall.Write(1, []byte("raw noise\n"))
	return true
}

// kill returns a hook that ends the process before the step named in a file, once. "save#2" is the second time that a process takes
// that step.
func kill(file string) func(authenticator.Step) {
	taken := map[authenticator.Step]int{}
	return func(step authenticator.Step) {
		taken[step]++
		name := string(step)
		if taken[step] > 1 {
			name += "#" + strconv.Itoa(taken[step])
		}
		wanted, err := os.ReadFile(file) //nolint:gosec // G703: the test's own
		if err != nil || string(wanted) != name {
			return
		}
		_ = os.Remove(file) //nolint:gosec // G703: the test's own
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}
