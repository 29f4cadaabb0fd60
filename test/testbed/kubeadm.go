// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os/exec"
	"strings"
)

// What a machine has beside the programs in /usr/bin: the files of Kubernetes' own packages (kubernetes/release, cmd/krel/templates/latest/kubelet
// and kubeadm), and a container runtime that runs nothing.
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
ExecStart=/opt/testbed/fakecri /run/fakecri.sock
`,
}

// KubeadmMachine returns the options of a machine on which kubeadm can be run; files are added to its own.
func KubeadmMachine(name, kubeadm string, kubelet KubeletComponents, files map[string]string) MachineOptions {
	all := maps.Clone(kubeadmFiles)
	maps.Copy(all, files)
	return MachineOptions{
		Name: name, Files: all,
		Programs: map[string]string{"/usr/bin/kubeadm": kubeadm, "/usr/bin/kubelet": kubelet.Kubelet, "/opt/testbed/fakecri": kubelet.FakeCRI},
		Enabled:  []string{"kubelet.service", "fakecri.service"},
	}
}

// The kubelets of several clusters are in one network: each cluster's have ports of their own. "none", as kubeadm would drop an empty list.
const kubeadmInit = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: %[1]s, ttl: 1h0m0s}]
nodeRegistration: {name: control-plane, criSocket: "unix:///run/fakecri.sock"}
localAPIEndpoint: {advertiseAddress: %[6]s}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %[2]s
controlPlaneEndpoint: %[3]s
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
port: %[4]d
healthzPort: %[5]d
resolvConf: ""
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: [none]
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
`

// KubeadmInit has the real kubeadm make of this control plane what machines can join: the phases of "kubeadm init" that write to the API server, with
// the bindings that approve by themselves. It returns a bootstrap token. The controller manager has to run.
func (cp *ControlPlane) KubeadmInit(ctx context.Context, kubeadm string) (token string, err error) {
	text := strings.ToLower(rand.Text())
	token = text[:6] + "." + text[6:22]
	address, err := newKubeletAddress() // nobody uses it, but kubeadm wants one that is no loopback address
	if err != nil {
		return "", err
	}
	number := int(kubeletAddresses.Load())
	config := fmt.Sprintf(kubeadmInit, token, cp.components.KubernetesVersion, cp.addr, 11000+number, 11500+number, address)
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

const kubeadmJoin = `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
timeouts: {kubeletHealthCheck: 1m0s, tlsBootstrap: 1m0s}
discovery:
  bootstrapToken: {token: %s, apiServerEndpoint: "%s", caCertHashes: ["sha256:%s"]}
nodeRegistration:
  name: %s
  criSocket: unix:///run/fakecri.sock
  kubeletExtraArgs: [{name: node-ip, value: %s}]
  ignorePreflightErrors: [all]
`

// KubeadmJoinConfig returns the configuration with which a machine joins under a name. Its kubelet gets an address of its own.
func (cp *ControlPlane) KubeadmJoinConfig(name, token string) (string, error) {
	address, err := newKubeletAddress()
	if err != nil {
		return "", err
	}
	pin := sha256.Sum256(cp.serverCA.Certificate().RawSubjectPublicKeyInfo)
	return fmt.Sprintf(kubeadmJoin, token, cp.addr, hex.EncodeToString(pin[:]), name, address), nil
}
