// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os/exec"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// The files of a machine beside the programs in /usr/bin. They are those of Kubernetes' own
// packages (kubernetes/release, cmd/krel/templates/latest/kubelet and kubeadm). A container runtime
// that runs no containers is added.
var kubeadmFiles = map[string]string{
	"/usr/lib/systemd/system/kubelet.service": `[Unit]
Description=kubelet: The Kubernetes Node Agent
Documentation=https://kubernetes.io/docs/
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
`,
	"/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf": `# Note: This dropin only works with kubeadm and kubelet v1.11+
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
`,
	"/usr/lib/systemd/system/fakecri.service": `[Service]
Type=exec
ExecStart=/usr/libexec/fakecri /run/fakecri.sock
`,
}

// KubeadmMachine returns the options of a machine on which kubeadm can be run, and which reaches
// this control plane; files are added to its own.
func (cp *ControlPlane) KubeadmMachine(name, kubeadm string, kubelet compile.KubeletComponents, files map[string]string) MachineOptions {
	options := KubeadmMachine(name, kubeadm, kubelet, files)
	options.Reaches = cp.own.addr
	return options
}

// KubeadmMachine returns the options of a machine on which kubeadm can run. It reaches no address.
// files are added to its own.
func KubeadmMachine(name, kubeadm string, kubelet compile.KubeletComponents, files map[string]string) MachineOptions {
	all := maps.Clone(kubeadmFiles)
	maps.Copy(all, files)
	return MachineOptions{
		Name: name, Files: all, Binds: map[string]string{},
		Programs: map[string]string{"/usr/bin/kubeadm": kubeadm, "/usr/bin/kubelet": kubelet.Kubelet, "/usr/libexec/fakecri": kubelet.FakeCRI},
		Enabled:  []string{"kubelet.service", "fakecri.service"},
	}
}

// "none", as kubeadm would drop an empty list.
const kubeadmInit = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: %[1]s, ttl: 1h0m0s}]
nodeRegistration: {name: control-plane, criSocket: "unix:///run/fakecri.sock"}
localAPIEndpoint: {advertiseAddress: %[4]s}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %[2]s
controlPlaneEndpoint: %[3]s
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
resolvConf: ""
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: [none]
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
`

// KubeadmInit prepares this control plane for joining machines with the real kubeadm. It runs the
// phases of "kubeadm init" that write to the API server, including the auto-approving bindings. It
// returns a bootstrap token. The controller manager has to run.
func (cp *ControlPlane) KubeadmInit(ctx context.Context, kubeadm string) (token string, err error) {
	text := strings.ToLower(rand.Text())
	token = text[:6] + "." + text[6:22]
	// the address is not used, but kubeadm refuses a loopback address
	addresses, err := newKubeletAddresses(KubeletOptions{})
	if err != nil {
		return "", err
	}
	config := fmt.Sprintf(kubeadmInit, token, cp.components.KubernetesVersion, cp.own.addr, addresses[0])
	if err := cp.write("kubeadm-init.yaml", []byte(config)); err != nil {
		return "", err
	}
	const admin = "kubeadm-admin.kubeconfig"
	if err := cp.WriteKubeconfig(cp.path(admin), cp.AdminUser()); err != nil {
		return "", err
	}
	for _, phase := range [][]string{{"upload-config", "all"}, {"bootstrap-token"}} {
		args := append(append([]string{"init", "phase"}, phase...), "--config="+cp.path("kubeadm-init.yaml"), "--kubeconfig="+cp.path(admin))
		if out, err := exec.CommandContext(ctx, kubeadm, args...).CombinedOutput(); err != nil { //nolint:gosec // G204: running kubeadm is the purpose
			return "", fmt.Errorf("kubeadm %s: %w\n%s", strings.Join(args, " "), err, out)
		}
	}
	return token, cp.awaitToken(ctx, token[:6], token)
}

// KubeadmJoin says how a machine joins.
type KubeadmJoin struct {
	Name string
	// Token is a bootstrap token; without one the machine joins with Kubeconfig, a file on it.
	Token, Kubeconfig string
	// Timeout is how long kubeadm waits for the kubelet, and again for its certificate; 0 is a
	// minute.
	Timeout time.Duration
	// KubeletArgs are flags for the kubelet, name to value.
	KubeletArgs map[string]string
}

const kubeadmJoin = `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
timeouts: {kubeletHealthCheck: %[1]s, tlsBootstrap: %[1]s}
discovery: %[2]s
nodeRegistration:
  name: %[3]s
  criSocket: unix:///run/fakecri.sock
  kubeletExtraArgs: %[4]s
  ignorePreflightErrors: [all]
`

// KubeadmJoinConfig returns the configuration with which a machine joins.
func (cp *ControlPlane) KubeadmJoinConfig(join KubeadmJoin) string {
	discovery := fmt.Sprintf("{file: {kubeConfigPath: %s}}", join.Kubeconfig)
	if join.Token != "" {
		pin := sha256.Sum256(cp.serverCA.Certificate().RawSubjectPublicKeyInfo)
		discovery = fmt.Sprintf(`{bootstrapToken: {token: %s, apiServerEndpoint: "%s", caCertHashes: ["sha256:%s"]}}`, join.Token, cp.own.addr, hex.EncodeToString(pin[:]))
	}
	args := fmt.Sprintf("[{name: node-ip, value: %s}", MachineAddress)
	for name, value := range join.KubeletArgs {
		args += fmt.Sprintf(", {name: %s, value: %q}", name, value)
	}
	return fmt.Sprintf(kubeadmJoin, cmp.Or(join.Timeout, time.Minute), discovery, join.Name, args+"]")
}
