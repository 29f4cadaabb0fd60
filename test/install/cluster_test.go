// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// cluster is one as "kubeadm init" makes it, with a node that runs the Deployments' pods.
type cluster struct {
	*testbed.ControlPlane
	host *host
}

// podLogs are the logs of all pods so far.
func (c *cluster) podLogs(t *testing.T) (logs []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(c.host.dir, "*.log"))
	harness.Must(t, err)
	for _, file := range files {
		log, err := os.ReadFile(file)
		harness.Must(t, err)
		logs = append(logs, string(log))
	}
	return logs
}

// controllers are kube-controller-manager's: those of the test bed, and those that make pods of
// Deployments.
var controllers = strings.Join([]string{
	"certificatesigningrequest-approving-controller", "certificatesigningrequest-signing-controller", "certificatesigningrequest-cleaner-controller",
	"bootstrap-signer-controller", "token-cleaner-controller", "deployment-controller", "replicaset-controller",
}, ",")

func newCluster(t *testing.T) *cluster {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(cp.Logs())
		}
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, cp.StartControllerManager(t.Context(), "--controllers="+controllers))
	_, err = cp.KubeadmInit(t.Context(), built.kubeadm)
	harness.Must(t, err)
	return &cluster{cp, startHost(t, cp)}
}

// On a real machine the container runtime is there, and the checks of kubeadm that fail here pass.
const kubeadmInTestbed = `#!/bin/sh -eu
case "$1" in
join) exec /usr/bin/kubeadm "$@" --ignore-preflight-errors=all --cri-socket=unix:///run/fakecri.sock ;;
reset) exec /usr/bin/kubeadm "$@" --ignore-preflight-errors=all --cri-socket=unix:///run/fakecri.sock --cleanup-tmp-dir ;;
esac
exec /usr/bin/kubeadm "$@"
`

// newWorker starts a machine with a TPM, the kubelet and kubeadm, that has not joined.
func (c *cluster) newWorker(t *testing.T) *testbed.Machine {
	t.Helper()
	wrapper := filepath.Join(t.TempDir(), "kubeadm")
	harness.Must(t, os.WriteFile(wrapper, []byte(kubeadmInTestbed), 0o755))
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	options := c.KubeadmMachine(worker, built.kubeadm, built.kubelet, map[string]string{
		"/etc/default/kubelet": "KUBELET_EXTRA_ARGS=--node-ip=" + testbed.MachineAddress + "\n",
		// dpkg knows none of the packages in /usr.
		"/var/lib/dpkg/status": "", "/var/lib/dpkg/info/.keep": "", "/var/lib/dpkg/updates/.keep": "",
	})
	options.Programs["/usr/local/bin/kubeadm"] = wrapper
	options.Binds["/dev/tpmrm0"] = swtpm.NewProxy(t, chip).Socket()
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
	return m
}
