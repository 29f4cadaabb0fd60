// SPDX-License-Identifier: Apache-2.0

package join

import (
	"context"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	ownConfigFile = "/etc/kubernetes/kubelet.yaml"
	ownUnitFile   = "/etc/systemd/system/kubelet.service.d/90-own.conf"

	// inTestbed is what a kubelet of the test's machines needs beside the documented fields.
	inTestbed = `containerRuntimeEndpoint: unix:///run/fakecri.sock
resolvConf: ""
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: [none]
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
`
)

// nodeIP is the address that the test bed gives the node of each of its machines.
func nodeIP(t *testing.T, c *testbed.ControlPlane) string {
	t.Helper()
	var join struct {
		NodeRegistration struct {
			KubeletExtraArgs []struct{ Name, Value string }
		}
	}
	harness.Must(t, yaml.Unmarshal([]byte(c.KubeadmJoinConfig(testbed.KubeadmJoin{Kubeconfig: discoveryFile})), &join))
	for _, arg := range join.NodeRegistration.KubeletExtraArgs {
		if arg.Name == "node-ip" {
			return arg.Value
		}
	}
	t.Fatal("no node-ip")
	return ""
}

// bootstrapToken is a kubeconfig with a token that may file requests.
func (c *cluster) bootstrapToken(t *testing.T) []byte {
	t.Helper()
	token, err := c.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	return c.BootstrapKubeconfig(token)
}

// A kubelet that nobody but the guide has set up becomes an attested node.
func TestWithoutKubeadmDocument(t *testing.T) {
	found, _ := guide(t, "without-kubeadm.md", confinementPart)
	texts, write := found["yaml"], strings.Fields(found["sh"][0])
	if len(texts) != 2 || strings.Join(write, " ") != "kubelet-authenticator kubeconfig --write="+kubelet.KubeconfigFile {
		t.Fatalf("%d texts, %q", len(texts), write)
	}
	const name = "no-kubeadm"
	c := newCluster(t)
	m := c.newMachine(t, name, texts[1], map[string]string{
		ownConfigFile: texts[0] + inTestbed,
		ownUnitFile: "[Service]\nExecStart=\nExecStart=/usr/bin/kubelet --kubeconfig=" + kubelet.KubeconfigFile + " --config=" + ownConfigFile +
			" --node-ip=" + nodeIP(t, c.ControlPlane) + "\n",
	})
	harness.Must(t, m.WriteFile(staticFile, c.bootstrapToken(t), 0o600))
	for _, command := range [][]string{write, {"systemctl", "restart", "kubelet"}} {
		if out, err := m.Run(t.Context(), command...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	c.mustBecomeReady(t, name)
	if managers, others := c.byUser(t, name); len(managers) != 0 || len(others) != 1 {
		t.Errorf("requests without evidence: %v, with: %v", managers, others)
	}
	if out, err := m.Run(t.Context(), "kubelet-authenticator", "doctor"); err != nil {
		t.Errorf("doctor: %v: %s", err, out)
	}
}

// prepare and the plugin work in the documented sandbox, in which they could not without its
// exceptions.
func TestSandbox(t *testing.T) {
	own, confined := guide(t, "without-kubeadm.md", confinementPart)
	snippets, config := confined["ini"], own["yaml"]
	if len(snippets) != 3 || len(config) != 2 {
		t.Fatalf("%q %q", snippets, config)
	}
	sandbox := snippets[1]
	const (
		name  = "sandboxed"
		write = "ReadWritePaths=/etc/kubernetes\n"
		state = "StateDirectory=kubelet-authenticator\n"
		run   = "RuntimeDirectory=kubelet-authenticator\n"
	)
	for _, exception := range []string{write, state, run} {
		if !strings.Contains(sandbox, exception) {
			t.Fatalf("there is no %q", exception)
		}
	}
	commands := "Type=oneshot\nExecStart=/usr/bin/kubelet-authenticator prepare\nExecStart=sh -c 'kubelet-authenticator > /dev/null'\n"
	c := newCluster(t)
	m := c.newMachine(t, name, config[1]+"prepareWait: 15s\n", map[string]string{
		"/etc/systemd/system/sandboxed.service": sandbox + commands,
		"/etc/systemd/system/no-write.service":  strings.Replace(sandbox, write, "", 1) + commands,
		"/etc/systemd/system/no-state.service":  strings.Replace(sandbox, state, "", 1) + commands,
		"/etc/systemd/system/no-run.service":    strings.Replace(sandbox, run, "", 1) + commands,
		"/etc/systemd/system/outside.service":   sandbox + "Type=oneshot\nExecStart=touch /var/lib/outside\n",
		"/etc/kubernetes/manifests/.keep":       "",
		kubelet.ConfigFile:                      config[0],
	})
	harness.Must(t, m.WriteFile(staticFile, c.bootstrapToken(t), 0o600))
	for _, row := range []struct {
		unit string
		good bool
	}{{"outside", false}, {"no-write", false}, {"no-state", false}, {"no-run", false}, {"sandboxed", true}} {
		out, err := m.Run(t.Context(), "systemctl", "start", row.unit)
		journal := m.Journal(context.WithoutCancel(t.Context()), row.unit)
		if (err == nil) != row.good {
			t.Errorf("%s: %v: %s\n%s", row.unit, err, out, journal)
		}
		if !row.good && !strings.Contains(strings.ToLower(journal), "read-only file system") {
			t.Errorf("%s fails for another reason: %s", row.unit, journal)
		}
	}
	if _, err := cache.At(m.Path(cache.DefaultPath)).Current(); err != nil {
		t.Error(err)
	}
	if k := kubelet.ReadKubeconfig(m.Path(kubelet.KubeconfigFile), ""); k.Kind != kubelet.Ours {
		t.Errorf("kubelet.conf: %s", k.Kind)
	}
}
