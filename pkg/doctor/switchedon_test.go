// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// stock returns a machine whose kubelet has joined without this program.
func stock(t *testing.T) *machine {
	m := newMachine(t)
	m.remove(m.certs.Path())
	m.remove(filepath.Join(m.root, "config.yaml"))
	m.writeOverwritten()
	return m
}

// A machine without any configuration gets one result in place of a list of failures.
func TestNotSwitchedOn(t *testing.T) {
	for name, change := range map[string]func(*machine){
		"joined without this program": func(*machine) {},
		"no kubelet.conf":             func(m *machine) { m.remove(m.conf) },
		"an empty certificate directory, as the package makes it": func(m *machine) {
			if err := os.Mkdir(m.certs.Path(), 0o700); err != nil {
				m.t.Fatal(err)
			}
		},
		"a drop-in of another program": func(m *machine) { m.write(filepath.Join(m.root, "kubelet.service.d", "10-kubeadm.conf"), "", 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			m := stock(t)
			change(m)
			before := tree(t, m.root)
			report := Run(t.Context(), m.options())
			if after := tree(t, m.root); after != before {
				t.Errorf("it changed\n%s\nto\n%s", before, after)
			}
			if failed := report.Checks.Named(checkup.Failure); !report.NotSwitchedOn || report.Status != checkup.Failure || len(failed) != 1 || len(report.Checks) != len(Checks()) {
				t.Errorf("%+v", report)
			}
			if out := report.Text(); !strings.HasPrefix(out, "not switched on: ") || strings.Count(out, "\n") != 2 || !strings.Contains(out, "\nremedy: ") {
				t.Errorf("it says\n%s", out)
			}
			if len(m.requests) > 0 {
				t.Errorf("it asked the API server: %q", m.requests)
			}
		})
	}
}

// One file of this program is enough for an examination.
func TestSwitchedOn(t *testing.T) {
	for name, change := range map[string]func(*machine, *Options){
		"a configuration file":        func(m *machine, _ *Options) { m.write(filepath.Join(m.root, "config.yaml"), "", 0o600) },
		"a wrong configuration":       func(m *machine, o *Options) { o.ConfigErr = os.ErrInvalid },
		"a flag":                      func(_ *machine, o *Options) { o.Explicit = true },
		"a drop-in":                   func(m *machine, _ *Options) { m.writeDropIn() },
		"a kubeconfig of ours":        func(m *machine, _ *Options) { m.writeConf() },
		"a kubeconfig with a token":   func(m *machine, _ *Options) { m.writeConf("    exec:", "    token: x\n    exec:") },
		"a kubeconfig that is broken": func(m *machine, _ *Options) { m.write(m.conf, "{", 0o600) },
		"a file of a worker":          func(m *machine, _ *Options) { m.write(m.certs.File("kubelet-authenticator-worker.log"), "", 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			m := stock(t)
			options := m.options()
			change(m, &options)
			if report := Run(t.Context(), options); report.NotSwitchedOn || len(report.Checks.Named(checkup.Failure)) < 2 {
				t.Errorf("%s", report.Text())
			}
		})
	}
}

// The report begins with the flags that come from the kubelet's kubeconfig.
func TestExecFlagsAreReported(t *testing.T) {
	m := newMachine(t)
	options := m.options()
	options.ExecFlags = &nodestatus.ExecFlags{Kubeconfig: kubelet.KubeconfigFile, Flags: []string{"--cert-dir=/x", "--provider=fake"}}
	report := Run(t.Context(), options)
	if want := "flags: --cert-dir=/x --provider=fake, taken from /etc/kubernetes/kubelet.conf\n\n"; !strings.HasPrefix(report.Text(), want) || report.ExecFlags != options.ExecFlags {
		t.Errorf("got\n%s", report.Text())
	}
}
