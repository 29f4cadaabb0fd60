// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	pluginFile    = "/usr/bin/kubelet-authenticator"
	tpmSocket     = "/opt/testbed/tpm"
	bootstrapFile = "/etc/kubelet-authenticator/bootstrap.kubeconfig"
	holdFile      = "/run/kubelet-authenticator/hold"

	unitFile = "/etc/systemd/system/kubelet.service.d/90-reliability.conf"
	// unitCommand has the kubelet ask a plugin with hooks.
	unitCommand = "[Service]\nExecStart=\nExecStart=/usr/bin/kubelet --kubeconfig=/etc/kubernetes/kubelet.conf --config=/etc/kubernetes/kubelet.yaml --node-ip=" +
		testbed.MachineAddress + "\nEnvironment=TEST_HOLD_FILE=" + holdFile + "\n"

	pluginConfig = `apiVersion: authenticator.cluster.x-k8s.io/v1alpha1
kind: KubeletAuthenticatorConfiguration
provider: tpm
providerID: metal://restarted
bootstrapKubeconfig: ` + bootstrapFile + `
tpmDevice: ` + tpmSocket + "\n"
	kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
rotateCertificates: false
containerRuntimeEndpoint: unix:///run/fakecri.sock
resolvConf: ""
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: [none]
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
`
)

// sandboxes returns the documented sandbox, and what a kubelet needs beside it.
func sandboxes(t *testing.T) (plugin, kubelet string) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(module, "docs", "integration", "without-kubeadm.md"))
	harness.Must(t, err)
	var found []string
	for i, part := range strings.Split(string(data), "```") {
		if block, ok := strings.CutPrefix(part, "ini\n"); ok && i%2 == 1 && !strings.Contains(block, "PROXY") {
			found = append(found, block)
		}
	}
	if len(found) != 2 || !strings.Contains(found[0], "ProtectSystem=strict\n") || !strings.Contains(found[0], "NoNewPrivileges=yes\n") || !strings.Contains(found[0], "PrivateTmp=yes\n") {
		t.Fatalf("%q", found)
	}
	return found[0], found[1]
}

// The kubelet runs as a unit of systemd in the documented sandbox. systemd restarts it while a run
// or a worker takes a step, and so kills the whole control group. The node loses nothing: the next
// kubelet takes up the same request, and there is one certificate.
func TestUnitIsRestartedAtEachStep(t *testing.T) {
	t.Parallel()
	const name = "restarted"
	plugin, kubelet := sandboxes(t)
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	attestor.Start(t, shared, name, chip)
	options := shared.KubeadmMachine(name, "", built.kubelet, map[string]string{
		"/etc/kubelet-authenticator/config.yaml": pluginConfig,
		"/etc/kubernetes/kubelet.yaml":           kubeletConfig,
		"/etc/kubernetes/kubelet.conf":           string(shared.ExecKubeconfig("client.authentication.k8s.io/v1", pluginFile, nil, nil, true)),
		"/var/lib/kubelet/.keep":                 "",
		unitFile:                                 plugin + kubelet + unitCommand,
	})
	delete(options.Programs, "/usr/bin/kubeadm") // there is no join
	options.Programs[pluginFile] = built.testPlugin
	options.Binds[tpmSocket] = swtpm.NewProxy(t, chip).Socket()
	options.Enabled = []string{"fakecri.service"}
	m, err := testbed.StartMachine(t.Context(), options)
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(m.Journal(context.WithoutCancel(t.Context()), "kubelet"))
		}
		if err := m.Remove(); err != nil {
			t.Error(err)
		}
	})
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.Must(t, m.WriteFile(bootstrapFile, shared.BootstrapKubeconfig(token), 0o600))
	run(t, m, "systemctl", "start", "kubelet")
	mustBecomeReady(t, name)

	certs, hold := cache.At(m.Path(cache.DefaultPath)), strings.TrimPrefix(holdFile, "/run/")
	for i, step := range steps(t) {
		run(t, m, "systemctl", "stop", "kubelet")
		// A worker that was killed after the installation leaves its request, which the next one
		// would resume.
		if err := os.Remove(certs.File(cache.PendingFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		old := harness.Install(t, shared, certs, name, time.Now().Add(-95*time.Minute), time.Now().Add(10*time.Minute))
		run(t, m, "sh", "-c", "mkdir -p -m 700 /run/kubelet-authenticator && rm -f /run/"+hold+".held && printf %s '"+step+"' > /run/"+hold)
		run(t, m, "systemctl", "start", "kubelet")
		var held string
		harness.Eventually(t, 30*time.Second, "a process takes the step "+step, func() bool {
			held, err = m.Run(t.Context(), "cat", "/run/"+hold+".held")
			return err == nil
		})
		run(t, m, "systemctl", "restart", "kubelet")
		if _, err := m.Run(t.Context(), "test", "-e", "/proc/"+held); err == nil {
			t.Errorf("%s: process %s outlives the restart", step, held)
		}
		began := time.Now()
		harness.Eventually(t, time.Minute, step+": the node has a new certificate", func() bool {
			pair, err := certs.Current()
			return err == nil && pair.Fingerprint() != old.Fingerprint()
		})
		t.Logf("%s: a new certificate %s after the restart", step, round(time.Since(began)))
		if hellos, proofs := harness.Requests(t, shared, name); len(hellos) != i+2 || len(proofs) != i+2 {
			t.Errorf("%s: %d hellos and %d proofs for %d certificates", step, len(hellos), len(proofs), i+2)
		}
	}
	// A kubelet that found its directories read-only would not report its node.
	run(t, m, "systemctl", "restart", "kubelet")
	p := harness.WatchNode(t, shared.Client(), name)
	harness.Eventually(t, 30*time.Second, "the Lease is renewed in the sandbox", func() bool { return p.Count() > 1 })
	if out, err := m.Run(t.Context(), "nsenter", "--target="+strings.TrimSpace(run(t, m, "systemctl", "show", "--property=MainPID", "--value", "kubelet")),
		"--mount", "touch", "/var/lib/outside"); err == nil || !strings.Contains(strings.ToLower(out), "read-only file system") {
		t.Errorf("the kubelet is in no sandbox: %v: %s", err, out)
	}
}

func run(t *testing.T, m *testbed.Machine, args ...string) string {
	t.Helper()
	out, err := m.Run(t.Context(), args...)
	harness.Must(t, err)
	return out
}

func mustBecomeReady(t *testing.T, name string) {
	t.Helper()
	harness.Eventually(t, 2*time.Minute, "node "+name+" is ready", func() bool {
		why, err := harness.NotReady(t.Context(), shared.Client(), name)
		return err == nil && why == ""
	})
}
