// SPDX-License-Identifier: Apache-2.0

// Package kubeadm tests that "kubelet-authenticator doctor" recognises what the real kubeadm and
// the real kubelet leave behind: attested nodes, and those that got around it. All of that runs in
// namespaces of its own.
package kubeadm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."

	pluginFile = "/usr/bin/kubelet-authenticator"
	configFile = "/etc/kubelet-authenticator/config.yaml"
	dropInFile = "/usr/lib/systemd/system/kubelet.service.d/20-kubelet-authenticator.conf"
	joinFile   = "/root/join.yaml"
	tpmSocket  = "/opt/testbed/tpm"
)

// starting keeps machines from booting all at once.
var starting sync.Mutex

// built is what the tests start.
var built struct {
	plugin, kubeadm string
	kubelet         compile.KubeletComponents
}

func TestMain(m *testing.M) {
	build := func(ctx context.Context, dir string) error {
		return compile.Program(ctx, module, filepath.Join(dir, "kubelet-authenticator"), "./cmd/kubelet-authenticator")
	}
	os.Exit(testbed.MainIsolated(m, 8, build, func(ctx context.Context, dir string) (err error) {
		built.plugin = filepath.Join(dir, "kubelet-authenticator")
		if built.kubelet, err = compile.Kubelet(ctx, os.Stderr); err != nil {
			return err
		}
		built.kubeadm, err = compile.Kubeadm(ctx, os.Stderr)
		return err
	}))
}

// cluster is one as "kubeadm init" makes it, with the bindings that approve without attestation.
type cluster struct {
	*testbed.ControlPlane
	token string
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cp.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	token, err := cp.KubeadmInit(t.Context(), built.kubeadm)
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{cp, token}
}

// image is what is on a machine's disk beside kubeadm, the kubelet and the plugin's program.
type image struct {
	dropIn, enabled bool
	// conf is a kubelet.conf written before the join.
	conf        []byte
	kubeletArgs map[string]string
}

// join starts a machine, lets kubeadm join it, and waits until its node is there.
func (c *cluster) join(t *testing.T, name string, i image) *testbed.Machine {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	attestor.Start(t, c.ControlPlane, name, chip)
	files := map[string]string{joinFile: c.KubeadmJoinConfig(testbed.KubeadmJoin{Name: name, Token: c.token, KubeletArgs: i.kubeletArgs})}
	if i.dropIn {
		content, err := os.ReadFile(filepath.Join(module, "packaging", "systemd", filepath.Base(dropInFile)))
		if err != nil {
			t.Fatal(err)
		}
		files[dropInFile] = string(content)
	}
	if i.enabled {
		files[configFile] = fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"+
			"provider: tpm\ntpmDevice: %s\nproviderID: test://%s\n", tpmSocket, name)
	}
	options := c.KubeadmMachine(name, built.kubeadm, built.kubelet, files)
	options.Programs[pluginFile] = built.plugin
	options.Binds[tpmSocket] = swtpm.NewProxy(t, chip).Socket()
	m := start(t, options)
	if i.conf != nil {
		if err := m.WriteFile(kubelet.KubeconfigFile, i.conf, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := m.Run(t.Context(), "kubeadm", "join", "--config="+joinFile); err != nil {
		t.Fatalf("kubeadm join: %v\n%s\n%s", err, out, m.Journal(t.Context(), "kubelet"))
	}
	return m
}

func start(t *testing.T, options testbed.MachineOptions) *testbed.Machine {
	t.Helper()
	starting.Lock()
	defer starting.Unlock()
	m, err := testbed.StartMachine(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Remove(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// examine runs doctor on a machine.
func examine(t *testing.T, m *testbed.Machine, args ...string) (doctor.Report, int) {
	t.Helper()
	cmd := m.Command(t.Context(), append([]string{pluginFile, "doctor", "--output=json"}, args...)...)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	var report doctor.Report
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return report, cmd.ProcessState.ExitCode()
}

// certified waits for the plugin's certificate: kubeadm's join may be done before.
func certified(t *testing.T, m *testbed.Machine) {
	t.Helper()
	path := m.Path("/var/lib/kubelet-authenticator/kubelet-authenticator-current.pem")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(m.Journal(context.WithoutCancel(t.Context()), "kubelet"))
		}
	})
	harness.Eventually(t, time.Minute, "there is a certificate", func() bool {
		_, err := os.Stat(path)
		return err == nil
	})
}

// Each machine joins with success. What doctor then says tells them apart.
func TestJoinedMachines(t *testing.T) {
	c := newCluster(t)
	exec := c.ExecKubeconfig("client.authentication.k8s.io/v1", pluginFile, nil, nil, true)
	for name, row := range map[string]struct {
		image
		args   []string
		failed []string
		kind   kubelet.Kind
	}{
		"attested": {image{dropIn: true, enabled: true}, nil, nil, kubelet.Ours},
		// (a) The kubelet wrote over an exec kubelet.conf.
		"overwritten": {image{enabled: true, conf: exec}, nil,
			[]string{"certificate", "bootstrap-kubeconfig", "kubelet-bootstrap", "kubelet-rotation", "kubelet-kubeconfig"}, kubelet.Bootstrapped},
		// (b) It does not bootstrap, but rotates.
		"rotated": {image{enabled: true, conf: exec, kubeletArgs: map[string]string{"bootstrap-kubeconfig": ""}}, nil, []string{"kubelet-rotation"}, kubelet.Ours},
		// (e) The drop-in is there, and the file that switches it on is not.
		"stock": {image{dropIn: true}, []string{"--tpm-device=" + tpmSocket},
			[]string{"configuration", "certificate", "bootstrap-kubeconfig", "kubelet-bootstrap", "kubelet-rotation", "kubelet-kubeconfig"}, kubelet.Bootstrapped},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := c.join(t, name, row.image)
			if k := kubelet.ReadKubeconfig(m.Path(kubelet.KubeconfigFile), ""); k.Kind != row.kind {
				t.Errorf("kubelet.conf: %s, want: %s", k.Kind, row.kind)
			}
			if !slices.Contains(row.failed, "certificate") {
				certified(t, m)
			}
			report, code := examine(t, m, row.args...)
			if got := report.Checks.Named(checkup.Failure); !slices.Equal(got, row.failed) || code != map[bool]int{true: 31}[len(row.failed) > 0] {
				t.Errorf("exit code %d, failed: %q, want %q:\n%s", code, got, row.failed, report.Text())
			}
		})
	}
}
