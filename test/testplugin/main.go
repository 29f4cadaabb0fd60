// SPDX-License-Identifier: Apache-2.0

// testplugin is a plugin built from the library, as an infrastructure provider builds its own. It
// has a provider that may renew, one that hangs, and hooks that kill or hold the process before a
// given step.
package main

import (
	"context"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
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
		OnStep:         atStep(map[string]func(file string){os.Getenv("TEST_KILL_FILE"): kill, os.Getenv("TEST_HOLD_FILE"): hold}),
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

// hanging never answers and ignores its context, like a TPM driver that is stuck.
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

// atStep returns a hook that calls a function before the step that its file names, once. "save#2"
// is the second time that a process takes that step.
func atStep(hooks map[string]func(file string)) func(enrol.Step) {
	taken := map[enrol.Step]int{}
	return func(step enrol.Step) {
		taken[step]++
		name := string(step)
		if taken[step] > 1 {
			name += "#" + strconv.Itoa(taken[step])
		}
		for file, hook := range hooks {
			wanted, err := os.ReadFile(file)
			if err == nil && string(wanted) == name {
				hook(file)
			}
		}
	}
}

// kill ends the process.
func kill(file string) {
	_ = os.Remove(file)
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// hold writes the process ID to a file, and waits until somebody removes that.
func hold(file string) {
	held := file + ".held"
	_ = os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o600)
	_ = os.Rename(file, held)
	for {
		if _, err := os.Stat(held); err != nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
}
