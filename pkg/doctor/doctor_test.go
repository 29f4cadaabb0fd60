// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// good has the results of a machine without problems.
var good = map[string]checkup.Status{
	"configuration": checkup.OK, "tpm": checkup.OK, "ek-certificate": checkup.OK, "ek-template": checkup.OK, "metadata-service": checkup.Skipped, "certificate-directory": checkup.OK, "certificate": checkup.OK, "bootstrap-kubeconfig": checkup.OK, "clock": checkup.OK,
	"api-server": checkup.OK, "certificate-accepted": checkup.OK, "certificate-writes": checkup.OK, "bootstrap-credential": checkup.Skipped, "csr-create": checkup.OK, "csr-watch": checkup.OK, "signer": checkup.OK, "last-result": checkup.OK,
	"kubelet": checkup.OK, "kubelet-bootstrap": checkup.OK, "kubelet-rotation": checkup.OK, "kubelet-kubeconfig": checkup.OK, "kubelet-exec": checkup.OK, "auto-approve-bindings": checkup.Skipped,
}

// fresh has the results that differ before the first certificate.
var fresh = map[string]checkup.Status{
	"certificate-directory": checkup.Warning, "certificate": checkup.Failure, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "bootstrap-credential": checkup.OK, "signer": checkup.Warning, "last-result": checkup.Skipped,
}

// with returns base with additional or changed results.
func with(base map[string]checkup.Status, more ...any) map[string]checkup.Status {
	result := maps.Clone(base)
	for i := 0; i < len(more); i += 2 {
		result[more[i].(string)] = more[i+1].(checkup.Status)
	}
	return result
}

type scenario struct {
	change func(*machine)
	// want has the results that differ from good.
	want map[string]checkup.Status
	// says are texts in the message or the remedy of a check: "check: text".
	says []string
}

func (s scenario) check(t *testing.T) {
	m := newMachine(t)
	if s.change != nil {
		s.change(m)
	}
	results := m.examine()
	for name, status := range good {
		want, differs := s.want[name]
		if differs {
			status = want
		} else if m.timeout < unhurried {
			continue // on a busy machine the time limit may end other checks, too
		}
		if got := results[name]; got.Status != status {
			t.Errorf("%s: %s, want %s: %s", name, got.Status, status, got.Message)
		}
	}
	for _, line := range s.says {
		name, text, _ := strings.Cut(line, ": ")
		if r, there := results[name]; !there || !strings.Contains(r.Message+"\n"+r.Remedy, text) {
			t.Errorf("%s does not say %q: %+v", name, text, r)
		}
	}
}

func checkStates(t *testing.T, states map[string]scenario) {
	t.Helper()
	for name, s := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.check(t)
		})
	}
}

func TestGoodMachine(t *testing.T) {
	checkStates(t, map[string]scenario{
		"renewing":                     {says: []string{"last-result: challenge answered within 12ms", "signer: was issued to this node", "certificate: node " + nodeName, "api-server: kubelet.conf"}},
		"before its first certificate": {(*machine).bare, fresh, []string{"csr-create: the bootstrap credential", "bootstrap-credential: system:bootstrap:abcdef"}},
		"with flags in two words": {func(m *machine) {
			m.run("--kubeconfig", "/nowhere", "--kubeconfig", m.conf, "--rotate_certificates=false", "--hostname_override", nodeName)
		}, nil, nil},
		"with relative paths": {func(m *machine) {
			m.write(m.kubeletConfig, "rotateCertificates: false\n", 0o644)
			m.run("--kubeconfig=kubelet.conf", "--config=kubelet-config.yaml", "--hostname-override="+nodeName)
		}, nil, []string{"kubelet-rotation: kubelet-config.yaml"}},
		"rotation off by default": {func(m *machine) { m.run("--kubeconfig="+m.conf, "--hostname-override="+nodeName) }, nil, []string{"kubelet-rotation: by default"}},
		"rotation off in a drop-in": {func(m *machine) {
			m.write(filepath.Join(m.root, "kubelet.d", "10-a.conf"), "rotateCertificates: false\n", 0o644)
			m.write(filepath.Join(m.root, "kubelet.d", "20-b.txt"), "rotateCertificates: true\n", 0o644)
			m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--config-dir", filepath.Join(m.root, "kubelet.d"), "--hostname-override="+nodeName)
		}, nil, []string{"kubelet-rotation: 10-a.conf"}},
		"in its last days, with a token kept": {func(m *machine) { m.writeBootstrap("{token: " + token + "}") }, nil, nil},
	})
}

// In each of these set-ups, a node is Ready without attestation. They were found with the real
// kubeadm.
func TestWaysAroundAttestation(t *testing.T) {
	stock := func(m *machine) []string {
		m.writeBootstrap("{token: " + token + "}")
		return []string{"--bootstrap-kubeconfig=" + m.bootstrap, "--kubeconfig=" + m.conf, "--config=" + m.kubeletConfig, "--hostname-override=" + nodeName}
	}
	checkStates(t, map[string]scenario{
		"a: exec kubelet.conf written first, the kubelet wrote over it": {func(m *machine) {
			m.run(stock(m)...)
			m.writeOverwritten()
		}, map[string]checkup.Status{"kubelet-bootstrap": checkup.Failure, "kubelet-rotation": checkup.Failure, "kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped},
			[]string{"kubelet-kubeconfig: " + kubelet.RotatedFile, "kubelet-kubeconfig: systemctl stop kubelet; rm", "kubelet-bootstrap: --bootstrap-kubeconfig="}},
		"b: rotateCertificates": {func(m *machine) {
			m.run("--bootstrap-kubeconfig=", "--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, []string{"kubelet-rotation: rotateCertificates: true in", "kubelet-rotation: drop-in"}},
		"b: rotateCertificates, by flag": {func(m *machine) {
			m.write(m.kubeletConfig, "rotateCertificates: false\n", 0o644)
			m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--rotate-certificates", "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, []string{"kubelet-rotation: --rotate-certificates=true"}},
		"b: rotateCertificates, by a drop-in": {func(m *machine) {
			m.write(m.kubeletConfig, "rotateCertificates: false\n", 0o644)
			m.write(filepath.Join(m.root, "kubelet.d", "10-a.conf"), "rotateCertificates: false\n", 0o644)
			m.write(filepath.Join(m.root, "kubelet.d", "20-b.conf"), "rotateCertificates: true\n", 0o644)
			m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--config-dir="+filepath.Join(m.root, "kubelet.d"), "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, []string{"kubelet-rotation: 20-b.conf"}},
		"b: rotateCertificates, by a link to a drop-in": {func(m *machine) {
			m.write(m.kubeletConfig, "rotateCertificates: false\n", 0o644)
			m.write(filepath.Join(m.root, "kubelet.d", "real"), "rotateCertificates: true\n", 0o644)
			if err := os.Symlink("real", filepath.Join(m.root, "kubelet.d", "10.conf")); err != nil {
				m.t.Fatal(err)
			}
			m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--config-dir="+filepath.Join(m.root, "kubelet.d"), "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, []string{"kubelet-rotation: 10.conf"}},
		"c: bootstrap-kubeconfig still given": {func(m *machine) {
			m.run(append(stock(m), "--rotate-certificates=false")...)
		}, map[string]checkup.Status{"kubelet-bootstrap": checkup.Failure}, []string{"kubelet-bootstrap: overwrites " /* kubelet.conf */}},
		"c: bootstrap-kubeconfig in two words": {func(m *machine) {
			m.run("--kubeconfig="+m.conf, "--bootstrap-kubeconfig", m.bootstrap, "--rotate-certificates=false", "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-bootstrap": checkup.Failure}, nil},
		"d: relative command, in PATH": {func(m *machine) { m.writeConf(m.command, "kubelet-authenticator") },
			map[string]checkup.Status{"kubelet-exec": checkup.Failure}, []string{"kubelet-exec: looks for it in PATH"}},
		"d: relative command, beside the kubeconfig": {func(m *machine) { m.writeConf(m.command, "./kubelet-authenticator") },
			map[string]checkup.Status{"kubelet-exec": checkup.Failure}, []string{"kubelet-exec: beside the kubeconfig"}},
		"e: kubelet.conf stock, drop-in not enabled": {func(m *machine) {
			m.remove(m.certs.Path())
			m.run("--bootstrap-kubeconfig="+m.bootstrap, "--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--hostname-override="+nodeName)
			m.writeOverwritten() // kubeadm has deleted the bootstrap kubeconfig
			m.writeDropIn()
		}, with(fresh, "configuration", checkup.Failure, "kubelet-bootstrap", checkup.Failure, "kubelet-rotation", checkup.Failure, "kubelet-kubeconfig", checkup.Failure, "kubelet-exec", checkup.Skipped, "bootstrap-kubeconfig", checkup.Failure,
			"bootstrap-credential", checkup.Skipped, "csr-create", checkup.Skipped, "csr-watch", checkup.Skipped, "signer", checkup.Skipped, "api-server", checkup.Skipped, "clock", checkup.Skipped),
			[]string{"configuration: there is no file", "kubelet-bootstrap: see configuration", "kubelet-kubeconfig: see configuration"}},
		"f: the bootstrap kubeconfig was deleted before there was a certificate": {func(m *machine) { m.remove(m.certs.Path()) },
			with(fresh, "bootstrap-kubeconfig", checkup.Failure, "bootstrap-credential", checkup.Skipped, "csr-create", checkup.Skipped, "csr-watch", checkup.Skipped, "signer", checkup.Skipped),
			[]string{"bootstrap-kubeconfig: there is no usable certificate", "api-server: answers"}},
	})
}

func TestTheKubeletAndItsKubeconfig(t *testing.T) {
	checkStates(t, map[string]scenario{
		"none runs": {func(m *machine) {
			m.remove(filepath.Join(m.proc, fmt.Sprint(kubeletPID)))
			m.config.NodeName = nodeName
		},
			map[string]checkup.Status{"kubelet": checkup.Warning, "kubelet-bootstrap": checkup.Skipped, "kubelet-rotation": checkup.Skipped}, nil},
		"two run": {func(m *machine) {
			m.process(5000, "kubelet", "/opt/kubelet", "--kubeconfig="+m.conf, "--rotate-certificates=false")
		}, map[string]checkup.Status{"kubelet": checkup.Warning}, []string{"kubelet: [4242 5000]"}},
		"two run, the second one goes past the plugin": {func(m *machine) {
			m.process(5000, "kubelet", "/opt/kubelet", "--bootstrap-kubeconfig=/x", "--kubeconfig="+m.conf, "--config="+m.kubeletConfig)
		}, map[string]checkup.Status{"kubelet": checkup.Warning, "kubelet-bootstrap": checkup.Failure, "kubelet-rotation": checkup.Failure}, []string{"kubelet-bootstrap: process 5000: ", "kubelet-rotation: process 5000: "}},
		"two run, the second one has another kubeconfig": {func(m *machine) {
			other := filepath.Join(m.root, "other.conf")
			m.write(other, m.kubeconfig("a", "b", "{token: "+token+"}"), 0o600)
			m.process(5000, "kubelet", "/opt/kubelet", "--kubeconfig="+other, "--rotate-certificates=false")
		}, map[string]checkup.Status{"kubelet": checkup.Warning, "kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, []string{"kubelet-kubeconfig: process 5000: "}},
		"two run, the second one has a plugin that is not there": {func(m *machine) {
			other := filepath.Join(m.root, "other.conf")
			good, err := os.ReadFile(m.conf)
			if err != nil {
				m.t.Fatal(err)
			}
			m.write(other, strings.ReplaceAll(string(good), m.command, "/nowhere/kubelet-authenticator"), 0o600)
			m.process(5000, "kubelet", "/opt/kubelet", "--kubeconfig="+other, "--rotate-certificates=false")
		}, map[string]checkup.Status{"kubelet": checkup.Warning, "kubelet-exec": checkup.Failure}, []string{"kubelet-exec: process 5000: "}},
		"two run, the second one has no --kubeconfig": {func(m *machine) { m.process(5000, "kubelet", "/opt/kubelet", "--rotate-certificates=false") },
			map[string]checkup.Status{"kubelet": checkup.Warning, "kubelet-kubeconfig": checkup.Failure}, []string{"kubelet-kubeconfig: process 5000"}},
		"its files are older than it": {func(m *machine) {
			m.write(m.kubeletConfig, "rotateCertificates: false\n", 0o644)
			m.started(time.Now().Add(-time.Hour))
			m.age(m.conf, 2*time.Hour)
			m.age(m.kubeletConfig, 2*time.Hour)
		}, nil, []string{"kubelet: process 4242"}},
		"kubelet.conf is newer than it": {func(m *machine) {
			m.started(time.Now().Add(-time.Hour))
			m.age(m.conf, 59*time.Minute)
			m.age(m.kubeletConfig, 61*time.Minute)
		}, map[string]checkup.Status{"kubelet": checkup.Warning}, []string{"kubelet: kubelet.conf was written", "kubelet: the running kubelet has not read the change"}},
		"its configuration file is newer than it": {func(m *machine) {
			m.started(time.Now().Add(-time.Hour))
			m.age(m.conf, 61*time.Minute)
			m.age(m.kubeletConfig, 59*time.Minute)
		}, map[string]checkup.Status{"kubelet": checkup.Warning}, []string{"kubelet: kubelet-config.yaml was written"}},
		"a drop-in is newer than it": {func(m *machine) {
			m.started(time.Now().Add(-time.Hour))
			m.age(m.conf, 61*time.Minute)
			m.write(filepath.Join(m.root, "kubelet.d", "10-a.conf"), "rotateCertificates: false\n", 0o644)
			m.run("--kubeconfig="+m.conf, "--config-dir="+filepath.Join(m.root, "kubelet.d"), "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet": checkup.Warning}, []string{"kubelet: 10-a.conf was written"}},
		"the kubelet has written its kubeconfig itself": {func(m *machine) {
			m.started(time.Now().Add(-time.Hour))
			m.age(m.kubeletConfig, 2*time.Hour)
			m.writeOverwritten()
		}, map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"one in a container is not ours": {func(m *machine) {
			m.process(100, "kubelet", "kubelet", "--bootstrap-kubeconfig=/x")
			for pid, namespace := range map[string]string{"self": "mnt:[1]", "100": "mnt:[2]", fmt.Sprint(kubeletPID): "mnt:[1]"} {
				dir := filepath.Join(m.proc, pid, "ns")
				if err := errors.Join(os.MkdirAll(dir, 0o755), os.Symlink(namespace, filepath.Join(dir, "mnt"))); err != nil {
					m.t.Fatal(err)
				}
			}
		}, nil, nil},
		"no proc": {func(m *machine) { m.remove(m.proc); m.config.NodeName = nodeName },
			map[string]checkup.Status{"kubelet": checkup.Skipped, "kubelet-bootstrap": checkup.Skipped, "kubelet-rotation": checkup.Skipped}, nil},
		"no --kubeconfig": {func(m *machine) { m.run("--rotate-certificates=false", "--hostname-override="+nodeName) },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure}, []string{"kubelet-kubeconfig: no API server"}},
		"its configuration file is gone": {func(m *machine) {
			m.run("--kubeconfig="+m.conf, "--config=/nowhere.yaml", "--hostname-override="+nodeName)
		},
			map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, nil},
		"a link to a drop-in leads nowhere": {func(m *machine) {
			m.write(filepath.Join(m.root, "kubelet.d", "20.txt"), "", 0o644)
			if err := os.Symlink("real", filepath.Join(m.root, "kubelet.d", "10.conf")); err != nil {
				m.t.Fatal(err)
			}
			m.run("--kubeconfig="+m.conf, "--config-dir="+filepath.Join(m.root, "kubelet.d"), "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, []string{"kubelet-rotation: correct the file, so that the kubelet can read it"}},
		"its configuration file is no YAML": {func(m *machine) {
			m.write(m.kubeletConfig, "{", 0o644)
			m.run("--kubeconfig="+m.conf, "--config="+m.kubeletConfig, "--hostname-override="+nodeName)
		}, map[string]checkup.Status{"kubelet-rotation": checkup.Failure}, nil},
		"kubelet.conf missing": {func(m *machine) { m.remove(m.conf) }, map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"kubelet.conf is nonsense": {func(m *machine) { m.write(m.conf, "token: "+token, 0o600) },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"kubelet.conf writable by others": {func(m *machine) { m.chmod(m.conf, 0o666) },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, []string{"kubelet-kubeconfig: 0666"}},
		"kubelet.conf readable by others": {func(m *machine) { m.chmod(m.conf, 0o644) }, map[string]checkup.Status{"kubelet-kubeconfig": checkup.Warning}, []string{"kubelet-kubeconfig: chmod 0600"}},
		"another exec plugin": {func(m *machine) { m.writeConf(m.command, "/usr/bin/aws-iam-authenticator") },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"the plugin and a token": {func(m *machine) { m.writeConf("exec:", "token: "+token+"\n    exec:") },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, []string{"kubelet-kubeconfig: another credential beside it"}},
		"the plugin and a client certificate": {func(m *machine) { m.writeConf("exec:", "client-certificate: /x\n    client-key: /x\n    exec:") },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, []string{"kubelet-kubeconfig: another credential beside it"}},
		"the plugin and a client certificate, on a control plane": {func(m *machine) {
			m.writeConf("exec:", "client-certificate: /x\n    client-key: /x\n    exec:")
			m.write(filepath.Join(m.root, "manifests", "kube-apiserver.yaml"), "", 0o600)
		}, map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"a token": {func(m *machine) { m.write(m.conf, m.kubeconfig("a", "b", "{token: "+token+"}"), 0o600) },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"a client certificate": {func(m *machine) {
			m.write(m.conf, m.kubeconfig("a", "b", "{client-certificate: /x, client-key: /x}"), 0o600)
		},
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped}, nil},
		"a client certificate, on a control plane": {func(m *machine) {
			m.write(m.conf, m.kubeconfig("a", "b", "{client-certificate: /x, client-key: /x}"), 0o600)
			m.write(filepath.Join(m.root, "manifests", "kube-apiserver.yaml"), "", 0o600)
		}, map[string]checkup.Status{"kubelet-kubeconfig": checkup.Warning, "kubelet-exec": checkup.Skipped}, []string{"kubelet-kubeconfig: unattestedNodes"}},
		"the cluster has no CA check": {func(m *machine) { m.writeConf("certificate-authority-data:", "insecure-skip-tls-verify: true\n    x:") },
			map[string]checkup.Status{"kubelet-kubeconfig": checkup.Failure}, nil},
		"the command is not there":      {func(m *machine) { m.remove(m.command) }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, []string{"kubelet-exec: no such file"}},
		"the command is not executable": {func(m *machine) { m.chmod(m.command, 0o644) }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, []string{"kubelet-exec: not executable"}},
		"the command is a directory":    {func(m *machine) { m.remove(m.command); m.write(filepath.Join(m.command, "x"), "", 0o600) }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, nil},
		"others may write the command":  {func(m *machine) { m.chmod(m.command, 0o777) }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, nil},
		"the command is a provider's":   {func(m *machine) { m.write(m.command+"-acme", "", 0o755); m.writeConf(m.command, m.command+"-acme") }, nil, nil},
		"exec API v1beta1":              {func(m *machine) { m.writeConf("k8s.io/v1", "k8s.io/v1beta1") }, map[string]checkup.Status{"kubelet-exec": checkup.Warning}, nil},
		"exec API v1alpha1":             {func(m *machine) { m.writeConf("k8s.io/v1", "k8s.io/v1alpha1") }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, nil},
		"interactiveMode Always":        {func(m *machine) { m.writeConf("interactiveMode: Never", "interactiveMode: Always") }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, nil},
		"interactiveMode missing":       {func(m *machine) { m.writeConf("interactiveMode: Never", "") }, map[string]checkup.Status{"kubelet-exec": checkup.Failure}, nil},
		"interactiveMode IfAvailable":   {func(m *machine) { m.writeConf("interactiveMode: Never", "interactiveMode: IfAvailable") }, map[string]checkup.Status{"kubelet-exec": checkup.Warning}, nil},
		"no provideClusterInfo":         {func(m *machine) { m.writeConf("provideClusterInfo: true", "provideClusterInfo: false") }, map[string]checkup.Status{"kubelet-exec": checkup.Warning}, nil},
		"two things at once": {func(m *machine) {
			m.chmod(m.command, 0o644)
			m.writeConf("provideClusterInfo: true", "provideClusterInfo: false")
		},
			map[string]checkup.Status{"kubelet-exec": checkup.Failure}, []string{"kubelet-exec: not executable", "kubelet-exec: provideClusterInfo"}},
	})
}

// Each kind of kubeconfig except Ours is a failure, also a kind that pkg/kubelet adds later.
func TestOnlyOursIsAPass(t *testing.T) {
	e := newExamination(t.Context(), newMachine(t).options())
	for kind := range kubelet.Kind(64) {
		if f := e.assessConf(kubelet.Kubeconfig{Path: "/nowhere", Kind: kind, Problem: errors.New("x")}); (f.Status == checkup.Failure) == (kind == kubelet.Ours) {
			t.Errorf("%s: %+v", kind, f)
		}
	}
}

// If ekTemplate is changed after the node has enrolled, the next request has another key.
func TestTheChoiceOfTheEndorsementKey(t *testing.T) {
	remembered := func(setting, allowed string) func(*machine) {
		return func(m *machine) {
			state, err := m.certs.State()
			if err != nil {
				m.t.Fatal(err)
			}
			state.Remembered = map[string]string{"fake": "ecc-p256", "other": "x"}
			m.setState(*state)
			m.config.EKTemplate, m.attestor.allowed = setting, allowed
		}
	}
	checkStates(t, map[string]scenario{
		"none yet":      {nil, map[string]checkup.Status{}, []string{"ek-template: auto, and the node has not enrolled yet"}},
		"auto":          {remembered("auto", ""), map[string]checkup.Status{}, []string{"ek-template: auto, enrolled with ecc-p256"}},
		"the same":      {remembered("ecc-p256", "ecc-p256"), map[string]checkup.Status{}, []string{"ek-template: ecc-p256, enrolled with ecc-p256"}},
		"another":       {remembered("rsa-2048", "rsa-2048"), map[string]checkup.Status{"ek-template": checkup.Warning}, []string{"ek-template: enrolled with ecc-p256, and ekTemplate is rsa-2048", "ek-template: or restore ekTemplate"}},
		"it is damaged": {func(m *machine) { m.write(m.certs.File(cache.StateFile), "{", 0o600) }, map[string]checkup.Status{"ek-template": checkup.Skipped, "last-result": checkup.Warning, "signer": checkup.Warning}, []string{"ek-template: see last-result"}},
	})
}

func TestTheMetadataService(t *testing.T) {
	on := func(name string, err error) func(*machine) {
		return func(m *machine) { m.config.Provider, m.metadataErr = name, err }
	}
	without := map[string]checkup.Status{"tpm": checkup.Skipped, "ek-certificate": checkup.Skipped, "ek-template": checkup.Skipped}
	answers := with(without, "metadata-service", checkup.OK)
	absent := &provider.Error{Class: provider.NoDevice, Hint: "is this an instance", Err: errors.New("dial 169.254.169.254: refused")}
	checkStates(t, map[string]scenario{
		"of no use": {on("ec2", absent), without, []string{"metadata-service: without a metadata service"}},
		"EC2":       {on("ec2-role", nil), answers, []string{"metadata-service: cloud://ec2-role", "metadata-service: -X PUT"}},
		"EC2 without tokens": {func(m *machine) { m.config.Provider, m.tokenless = "ec2-role", true },
			with(without, "metadata-service", checkup.Warning), []string{"metadata-service: IMDSv1", "metadata-service: --http-tokens required"}},
		"Google without tokens": {func(m *machine) { m.config.Provider, m.tokenless = "gce", true }, answers, nil},
		"Google":                {on("gce", nil), answers, []string{"metadata-service: cloud://gce", "metadata-service: Metadata-Flavor"}},
		"Azure":                 {on("azure", nil), answers, []string{"metadata-service: cloud://azure", "metadata-service: Metadata: true"}},
		"absent":                {on("gce", absent), with(without, "metadata-service", checkup.Failure), []string{"metadata-service: refused", "metadata-service: is this an instance"}},
		"without hint":          {on("azure", errors.New("status 500")), with(without, "metadata-service", checkup.Failure), []string{"metadata-service: status 500", "metadata-service: 169.254.169.254"}},
		"chosen": {func(m *machine) {
			m.bare()
			m.config.Provider, m.choose = provider.Auto, choosing("gce")
		}, with(fresh, "tpm", checkup.Skipped, "ek-certificate", checkup.Skipped, "ek-template", checkup.Skipped, "metadata-service", checkup.OK), []string{"metadata-service: cloud://gce"}},
		"a choice that could weaken": {func(m *machine) { m.config.Provider, m.choose = provider.Auto, choosing("gce") },
			with(without, "configuration", checkup.Failure, "csr-create", checkup.Skipped, "signer", checkup.Skipped), []string{"configuration: gce could be weaker", "configuration: set provider to the one"}},
		"chosen before": {func(m *machine) {
			m.config.Provider, m.choose = provider.Auto, choosing("gce")
			m.withLock(func(l *cache.Lock) error { return l.SetState(&cache.State{Provider: "azure"}) })
		}, with(answers, "last-result", checkup.Skipped, "signer", checkup.Warning), []string{"metadata-service: cloud://azure"}},
	})
}

// choosing makes a choice.
func choosing(name string) func(context.Context, provider.Settings) (string, string) {
	return func(context.Context, provider.Settings) (string, string) { return name, "so it is" }
}

func TestTheDevice(t *testing.T) {
	const ek = `{"template":"rsa-2048"%s}`
	withEKs := func(eks ...string) func(*machine) {
		return func(m *machine) { m.attestor.device = `{"eks":[` + strings.Join(eks, ",") + `]}` }
	}
	checkStates(t, map[string]scenario{
		"absent": {func(m *machine) {
			m.attestor.err = &provider.Error{Class: provider.NoDevice, Hint: "look in the firmware", Err: errors.New("no TPM can be opened")}
		}, map[string]checkup.Status{"tpm": checkup.Failure, "ek-certificate": checkup.Skipped}, []string{"tpm: look in the firmware", "ek-certificate: see tpm"}},
		"a command refused": {func(m *machine) {
			m.attestor.err = &provider.Error{Class: provider.DeviceFailed, Hint: "h", Err: errors.New("TPM2_CreatePrimary: TPM_RC_LOCKOUT")}
		}, map[string]checkup.Status{"tpm": checkup.Failure, "ek-certificate": checkup.Skipped}, []string{"tpm: TPM_RC_LOCKOUT"}},
		"no right to open it": {func(m *machine) {
			m.attestor.err = &provider.Error{Class: provider.NoDevice, Err: &os.PathError{Op: "open", Path: "/dev/tpm0", Err: os.ErrPermission}}
		},
			map[string]checkup.Status{"tpm": checkup.Skipped, "ek-certificate": checkup.Skipped}, []string{"tpm: run this as root"}},
		"a panic in the driver": {func(m *machine) { m.attestor.identify = func(context.Context) { panic("nil: " + token) } },
			map[string]checkup.Status{"tpm": checkup.Failure, "ek-certificate": checkup.Failure}, []string{"tpm: panic"}},
		"it hangs": {func(m *machine) {
			m.timeout = 2 * time.Second
			m.attestor.identify = func(context.Context) { select {} }
		}, map[string]checkup.Status{"tpm": checkup.Failure, "ek-certificate": checkup.Failure}, []string{"tpm: not finished within 2s"}},
		"it does not answer in time": {func(m *machine) {
			m.timeout = 2 * time.Second
			m.attestor.identify = func(ctx context.Context) {
				<-ctx.Done()
				m.attestor.err = fmt.Errorf("TPM2_CreatePrimary: %w", ctx.Err())
			}
		}, map[string]checkup.Status{"tpm": checkup.Failure, "ek-certificate": checkup.Skipped}, []string{"tpm: TPM2_CreatePrimary", "tpm: --timeout"}},
		"a provider without one":            {func(m *machine) { m.config.Provider = "deviceless"; m.writeBootstrap("{token: " + token + "}") }, map[string]checkup.Status{"tpm": checkup.Skipped, "ek-certificate": checkup.Skipped, "ek-template": checkup.Skipped, "bootstrap-credential": checkup.OK}, []string{"bootstrap-credential: does not renew"}},
		"a device without endorsement keys": {withEKs(), map[string]checkup.Status{"ek-certificate": checkup.Skipped}, nil},
		"no certificate":                    {withEKs(fmt.Sprintf(ek, "")), map[string]checkup.Status{"ek-certificate": checkup.Warning}, []string{"ek-certificate: inventory"}},
		"a certificate that does not parse": {withEKs(fmt.Sprintf(ek, `,"certificate":{"problem":"it does not parse"}`)), map[string]checkup.Status{"ek-certificate": checkup.Warning}, []string{"ek-certificate: it does not parse"}},
		"a certificate that was left out":   {withEKs(fmt.Sprintf(ek, `,"problem":"not this key's"`)), map[string]checkup.Status{"ek-certificate": checkup.Warning}, []string{"ek-certificate: not this key's"}},
		"one good certificate will do":      {withEKs(fmt.Sprintf(ek, `,"certificate":{"notAfter":"2036"}`), fmt.Sprintf(ek, "")), nil, nil},
		"a key that is slow to make":        {withEKs(fmt.Sprintf(ek, `,"slow":true,"certificate":{"notAfter":"2036"}`)), map[string]checkup.Status{"ek-certificate": checkup.Warning}, nil},
	})
}

func TestFiles(t *testing.T) {
	current := func(m *machine) string { return m.certs.File(cache.CurrentFile) }
	checkStates(t, map[string]scenario{
		"directory writable by others": {func(m *machine) { m.chmod(m.certs.Path(), 0o777) },
			map[string]checkup.Status{"certificate-directory": checkup.Failure, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "bootstrap-kubeconfig": checkup.Failure, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped, "bootstrap-credential": checkup.Skipped},
			[]string{"certificate-directory: chmod 0700"}},
		"directory open to look into": {func(m *machine) { m.chmod(m.certs.Path(), 0o755) }, map[string]checkup.Status{"certificate-directory": checkup.Warning}, nil},
		"a folder above is writable": {func(m *machine) { m.chmod(m.root, 0o777) }, map[string]checkup.Status{"certificate-directory": checkup.Failure, "configuration": checkup.Failure, "bootstrap-kubeconfig": checkup.Warning, "kubelet-kubeconfig": checkup.Failure, "kubelet-exec": checkup.Skipped},
			[]string{"certificate-directory: others may write into it", "configuration: chmod go-w"}},
		"key readable by others":   {func(m *machine) { m.chmod(current(m), 0o644) }, map[string]checkup.Status{"certificate-directory": checkup.Failure}, []string{"certificate-directory: others may read the credential"}},
		"state readable by others": {func(m *machine) { m.chmod(m.certs.File(cache.StateFile), 0o644) }, map[string]checkup.Status{"certificate-directory": checkup.Warning}, nil},
		"state writable by others": {func(m *machine) { m.chmod(m.certs.File(cache.StateFile), 0o666) }, map[string]checkup.Status{"ek-template": checkup.Skipped, "certificate-directory": checkup.Failure, "last-result": checkup.Warning, "signer": checkup.Warning}, nil},
		"a link in a file's place": {func(m *machine) {
			if err := errors.Join(os.Rename(current(m), current(m)+".real"), os.Symlink(current(m)+".real", current(m))); err != nil {
				m.t.Fatal(err)
			}
		}, map[string]checkup.Status{"certificate-directory": checkup.Failure, "certificate": checkup.Failure, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "bootstrap-kubeconfig": checkup.Failure, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped},
			[]string{"certificate: symbolic link"}},
		"another user's file": {func(m *machine) {
			if os.Geteuid() != 0 {
				m.t.Skip("only root can give a file away")
			}
			if err := os.Chown(m.certs.File(cache.StateFile), 12345, -1); err != nil {
				m.t.Fatal(err)
			}
		}, map[string]checkup.Status{"certificate-directory": checkup.Failure, "ek-template": checkup.Skipped, "last-result": checkup.Warning, "signer": checkup.Warning}, []string{"certificate-directory: another user"}},
		"files set aside": {func(m *machine) { m.write(current(m)+".set-aside-20260101T000000.000000000Z", "", 0o644) },
			map[string]checkup.Status{"certificate-directory": checkup.Warning}, []string{"certificate-directory: set aside"}},
		"a file in the directory's place": {func(m *machine) { m.remove(m.certs.Path()); m.write(m.certs.Path(), "", 0o600) },
			with(fresh, "ek-template", checkup.Skipped, "certificate-directory", checkup.Failure, "bootstrap-kubeconfig", checkup.Failure, "bootstrap-credential", checkup.Skipped, "csr-create", checkup.Skipped, "csr-watch", checkup.Skipped, "signer", checkup.Skipped, "last-result", checkup.Warning), nil},
		"configuration wrong": {func(m *machine) {
			m.configErr = &reason.Failure{Reason: reason.Configuration, Hint: "see docs", Err: errors.New("unknown field")}
		}, map[string]checkup.Status{"configuration": checkup.Failure}, []string{"configuration: unknown field", "configuration: see docs"}},
		"configuration writable by others": {func(m *machine) { m.write(filepath.Join(m.root, "config.yaml"), "", 0o666) }, map[string]checkup.Status{"configuration": checkup.Failure}, []string{"configuration: others may write it (UID 0, mode 0666)", "configuration: chown root"}},
		"configuration is a fifo":          {func(m *machine) { m.fifo(filepath.Join(m.root, "config.yaml")) }, map[string]checkup.Status{"configuration": checkup.Failure}, []string{"configuration: not a regular file"}},
		"configuration readable by others": {func(m *machine) { m.write(filepath.Join(m.root, "config.yaml"), "", 0o644) }, nil, nil},
		"metrics":                          {func(m *machine) { m.config.MetricsTextfile = filepath.Join(m.root, "x.prom") }, nil, nil},
		"metrics, no directory": {func(m *machine) { m.config.MetricsTextfile = filepath.Join(m.root, "none", "x.prom") },
			map[string]checkup.Status{"configuration": checkup.Warning}, []string{"configuration: no such file", "configuration: --collector.textfile.directory"}},
		"metrics, a file in the directory's place": {func(m *machine) { m.config.MetricsTextfile = filepath.Join(m.root, "config.yaml", "x.prom") },
			map[string]checkup.Status{"configuration": checkup.Warning}, []string{"configuration: no metrics are written"}},
		"no such provider": {func(m *machine) {
			m.config.Provider = "nonsense"
			m.configErr = &reason.Failure{Reason: reason.Configuration, Hint: "see docs", Err: errors.New("provider nonsense")}
		},
			map[string]checkup.Status{"configuration": checkup.Failure, "tpm": checkup.Skipped, "ek-certificate": checkup.Skipped, "ek-template": checkup.Skipped, "csr-create": checkup.Skipped, "signer": checkup.Skipped}, nil},
	})
}

func TestTheCertificate(t *testing.T) {
	lost := map[string]checkup.Status{"certificate": checkup.Failure, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "bootstrap-kubeconfig": checkup.Failure, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped}
	day := 24 * time.Hour
	checkStates(t, map[string]scenario{
		"none":                                 {func(m *machine) { m.remove(m.certs.File(cache.CurrentFile)) }, lost, []string{"certificate: there is no certificate yet"}},
		"damaged":                              {func(m *machine) { m.write(m.certs.File(cache.CurrentFile), "SECRETKEY", 0o600) }, lost, nil},
		"expired":                              {func(m *machine) { m.install(nodeName, time.Now().Add(-2*day), time.Now().Add(-day)) }, lost, []string{"certificate: expired at"}},
		"too early":                            {func(m *machine) { m.install(nodeName, time.Now().Add(day), time.Now().Add(2*day)) }, map[string]checkup.Status{"certificate": checkup.Warning}, []string{"certificate: clock"}},
		"overdue":                              {func(m *machine) { m.install(nodeName, time.Now().Add(-99*time.Hour), time.Now().Add(time.Hour)) }, map[string]checkup.Status{"certificate": checkup.Warning}, []string{"certificate: due since"}},
		"another node's":                       {func(m *machine) { m.install("worker-2", time.Now().Add(-time.Hour), time.Now().Add(day)) }, map[string]checkup.Status{"certificate": checkup.Failure}, []string{"certificate: worker-2"}},
		"another node's, by the configuration": {func(m *machine) { m.config.NodeName = "worker-2" }, lost, []string{"certificate: but this is node worker-2", "bootstrap-kubeconfig: there is no usable certificate"}},
		"another host's":                       {func(m *machine) { m.run("--kubeconfig="+m.conf, "--rotate-certificates=false") }, map[string]checkup.Status{"certificate": checkup.Warning}, []string{"certificate: nodeName"}},
		"rejected": {func(m *machine) { m.replies["POST "+reviewURL] = reply{401, ""} },
			map[string]checkup.Status{"certificate-accepted": checkup.Failure, "bootstrap-kubeconfig": checkup.Warning, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped}, []string{"certificate-accepted: --client-ca-file", "bootstrap-kubeconfig: rejects"}},
		"taken for somebody else": {func(m *machine) {
			m.replies["POST "+reviewURL] = reply{201, `{"status":{"userInfo":{"username":"eve"}}}`}
		}, map[string]checkup.Status{"certificate-accepted": checkup.Failure}, []string{"certificate-accepted: eve"}},
		"whoami is not allowed": {func(m *machine) { m.replies["POST "+reviewURL] = reply{403, ""} }, nil, nil},
		"from another cluster": {func(m *machine) {
			ca, _ := newCA(m.t)
			m.cluster.CertificateAuthorityData = pemOf("CERTIFICATE", ca.Raw)
			m.install(nodeName, time.Now().Add(-time.Hour), time.Now().Add(day))
		}, map[string]checkup.Status{"bootstrap-kubeconfig": checkup.Warning, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped}, []string{"bootstrap-kubeconfig: came from another cluster"}},
	})
}

func TestTheBootstrapCredential(t *testing.T) {
	bare := func(credential string) func(*machine) {
		return func(m *machine) { m.bare(); m.writeBootstrap(credential) }
	}
	refused := with(fresh, "bootstrap-kubeconfig", checkup.Failure, "bootstrap-credential", checkup.Skipped, "csr-create", checkup.Skipped, "csr-watch", checkup.Skipped, "signer", checkup.Skipped)
	unknown := with(fresh, "bootstrap-credential", checkup.Failure, "csr-create", checkup.Skipped, "csr-watch", checkup.Skipped, "signer", checkup.Skipped)
	jwt := "a." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":1000000000}`)) + ".c"
	checkStates(t, map[string]scenario{
		"an unknown token": {bare("{token: abcdef.fedcba9876543210}"), unknown, []string{"bootstrap-credential: 401", "bootstrap-credential: kubeadm token create"}},
		"an expired JWT":   {bare("{token: " + jwt + "}"), unknown, []string{"bootstrap-credential: expired at 2001-09-09"}},
		"an exec user": {func(m *machine) { // which would be started, were it not refused
			m.bare()
			m.writeBootstrap(fmt.Sprintf("{token: %s, exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: [%s], interactiveMode: Never}}", token, filepath.Join(m.root, "started")))
		}, refused, []string{"bootstrap-kubeconfig: exec plugin"}},
		"no credential":                      {bare("{}"), refused, nil},
		"nonsense":                           {func(m *machine) { m.bare(); m.write(m.bootstrap, "token: ["+token, 0o600) }, refused, nil},
		"nonsense that an error would quote": {func(m *machine) { m.bare(); m.write(m.bootstrap, "{apiVersion: "+token+", kind: Config}", 0o600) }, refused, []string{"bootstrap-kubeconfig: cannot be read"}},
		"no CA check": {func(m *machine) {
			m.bare()
			m.write(m.bootstrap, strings.Replace(m.kubeconfig("a", "b", "{token: "+token+"}"), "certificate-authority-data", "insecure-skip-tls-verify: true, x", 1), 0o600)
		}, refused, []string{"bootstrap-kubeconfig: insecure-skip-tls-verify"}},
		"no TLS": {func(m *machine) {
			m.bare()
			m.cluster.Server = "http://127.0.0.1:1"
			m.writeBootstrap("{token: " + token + "}")
		}, refused, nil},
		"writable by others": {func(m *machine) { m.bare(); m.chmod(m.bootstrap, 0o666) }, refused, []string{"bootstrap-kubeconfig: others may write it", "bootstrap-kubeconfig: chmod go-w"}},
		"a fifo":             {func(m *machine) { m.bare(); m.fifo(m.bootstrap) }, refused, []string{"bootstrap-kubeconfig: not a regular file"}},
		"readable by others": {func(m *machine) { m.bare(); m.chmod(m.bootstrap, 0o644) }, with(fresh, "bootstrap-kubeconfig", checkup.Failure), []string{"bootstrap-kubeconfig: others may read the credential"}},
		"in the certificate directory": {func(m *machine) {
			m.bare()
			m.withLock(func(*cache.Lock) error { return os.Rename(m.bootstrap, m.certs.File(cache.BootstrapFile)) })
		}, with(fresh, "certificate-directory", checkup.OK), []string{"bootstrap-kubeconfig: certs/bootstrap.kubeconfig"}},
		// The plugin uses kubeadm's file instead, which a join to this cluster has just written.
		"another cluster's in the certificate directory, and kubeadm's": {func(m *machine) {
			m.bare()
			ca, _ := newCA(m.t)
			here := m.cluster
			m.cluster.CertificateAuthorityData = pemOf("CERTIFICATE", ca.Raw)
			m.withLock(func(*cache.Lock) error {
				return os.WriteFile(m.certs.File(cache.BootstrapFile), []byte(m.kubeconfig("kubernetes", "tls-bootstrap", "{token: abcdef.fedcba9876543210}")), 0o600)
			})
			m.cluster = here
		}, with(fresh, "certificate-directory", checkup.OK), []string{"bootstrap-kubeconfig: bootstrap-kubelet.conf", "bootstrap-credential: system:bootstrap:abcdef", "csr-create: the bootstrap credential"}},
		"named by the configuration": {func(m *machine) {
			m.bare()
			m.config.BootstrapKubeconfig = m.bootstrap
			m.config.KubeletBootstrapKubeconfig = "/nowhere"
		}, fresh, nil},
		// The plugin does not talk to the other cluster.
		"another cluster's": {func(m *machine) {
			m.bare()
			ca, _ := newCA(m.t)
			m.cluster.CertificateAuthorityData = pemOf("CERTIFICATE", ca.Raw)
			m.writeBootstrap("{token: " + token + "}")
		}, refused, []string{"bootstrap-kubeconfig: another CA", "api-server: kubelet.conf"}},
		"an expired client certificate": {func(m *machine) {
			m.bare()
			certificate, key := m.issue(&x509.Certificate{Subject: pkix.Name{CommonName: "joiner"}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(-time.Hour)})
			m.writeBootstrap("{client-certificate-data: " + base64.StdEncoding.EncodeToString(certificate) + ", client-key-data: " + base64.StdEncoding.EncodeToString(key) + "}")
			m.replies["POST "+csrPath], m.replies["GET "+csrPath], m.replies["GET "+csrPath+"?watch"] = reply{401, ""}, reply{401, ""}, reply{401, ""}
			m.replies["GET "+bindingsURL] = reply{401, ""}
		}, unknown, []string{"bootstrap-credential: expired at"}},
		"not needed, and broken": {func(m *machine) { m.writeBootstrap("{}") }, map[string]checkup.Status{"bootstrap-kubeconfig": checkup.Warning}, nil},
	})
}

func TestTheAPIServer(t *testing.T) {
	unreachable := map[string]checkup.Status{"api-server": checkup.Failure, "clock": checkup.Skipped, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "csr-create": checkup.Skipped, "csr-watch": checkup.Skipped}
	forbidden := reply{403, `{"message":"certificatesigningrequests is forbidden"}`}
	csrs := func(m *machine, r ...string) { m.bare(); m.replies["GET "+csrPath] = reply{200, list(m.t, raws(r)...)} }
	const decided = `{"metadata":{"name":"node-csr-z"},"status":{"conditions":[{"type":"Approved","lastUpdateTime":"2026-01-02T03:04:05Z"}]}}`
	const undecided = `{"metadata":{"name":"node-csr-y"}}`
	checkStates(t, map[string]scenario{
		"down": {func(m *machine) { m.server.Close() }, unreachable, []string{"api-server: connection refused", "csr-create: see api-server"}},
		"wrong CA": {func(m *machine) {
			ca, _ := newCA(m.t)
			m.cluster.CertificateAuthorityData = pemOf("CERTIFICATE", ca.Raw)
			m.writeConf()
			m.install(nodeName, time.Now().Add(-time.Hour), time.Now().Add(time.Hour*23))
		}, unreachable, []string{"api-server: did not issue its certificate", "api-server: certificate-authority-data"}},
		"wrong name": {func(m *machine) { m.cluster.TLSServerName = "other.example.com"; m.writeConf() }, unreachable, []string{"api-server: tls-server-name"}},
		"right name": {func(m *machine) { m.cluster.TLSServerName = "api.example.com"; m.writeConf() }, nil, nil},
		"expired": {func(m *machine) { m.serve(time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)); m.writeConf() },
			with(unreachable, "clock", checkup.Failure), []string{"clock: is not valid", "api-server: expired", "api-server: see clock"}},
		// The texts have no seconds: the server's clock is known to one second only, and advances
		// during the test.
		"clock 6 min ahead":  {func(m *machine) { m.now = func() time.Time { return time.Now().Add(6*time.Minute + 30*time.Second) } }, map[string]checkup.Status{"clock": checkup.Failure}, []string{"clock: 6m", "clock: s ahead of"}},
		"clock 6 min behind": {func(m *machine) { m.now = func() time.Time { return time.Now().Add(-6 * time.Minute) } }, map[string]checkup.Status{"clock": checkup.Failure}, []string{"clock: behind"}},
		"clock 1 min behind": {func(m *machine) { m.now = func() time.Time { return time.Now().Add(-time.Minute) } }, map[string]checkup.Status{"clock": checkup.Warning}, nil},
		"clock 20 s ahead":   {func(m *machine) { m.now = func() time.Time { return time.Now().Add(20 * time.Second) } }, nil, nil},
		"create forbidden":   {func(m *machine) { m.replies["POST "+csrPath] = forbidden }, map[string]checkup.Status{"csr-create": checkup.Failure}, []string{"csr-create: 403", "csr-create: node-attestation-requester"}},
		"create by a suspended machine": {func(m *machine) {
			m.replies["POST "+csrPath] = reply{403, `{"message":"forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: ` + attestation.MessageSuspended + `"}`}
		}, map[string]checkup.Status{"csr-create": checkup.Failure}, []string{"csr-create: kubectl attest resume"}},
		"create refused":  {func(m *machine) { m.replies["POST "+csrPath] = reply{422, `{"message":"admission says no"}`} }, map[string]checkup.Status{"csr-create": checkup.Failure}, []string{"csr-create: admission says no"}},
		"watch forbidden": {func(m *machine) { m.replies["GET "+csrPath+"?watch"] = forbidden }, map[string]checkup.Status{"csr-watch": checkup.Warning}, nil},
		"get forbidden":   {func(m *machine) { m.replies["GET "+csrPath+"/"] = forbidden }, map[string]checkup.Status{"csr-watch": checkup.Warning}, nil},
		"both forbidden": {func(m *machine) {
			m.replies["GET "+csrPath+"?watch"], m.replies["GET "+csrPath+"/"] = forbidden, forbidden
		}, map[string]checkup.Status{"csr-watch": checkup.Failure}, nil},
		"list forbidden":                    {func(m *machine) { m.bare(); m.replies["GET "+csrPath] = forbidden }, with(fresh, "signer", checkup.Skipped), nil},
		"signer decides":                    {func(m *machine) { csrs(m, undecided, decided) }, with(fresh, "signer", checkup.OK), []string{"signer: node-csr-z (Approved) at 2026-01-02T03:04:05Z"}},
		"signer sleeps":                     {func(m *machine) { csrs(m, undecided, undecided) }, fresh, []string{"signer: none of its requests (2)"}},
		"signer never seen":                 {func(m *machine) { csrs(m) }, fresh, []string{"signer: no request for signer " + signerName}},
		"a message with an escape sequence": {func(m *machine) { m.replies["POST "+csrPath] = reply{422, `{"message":"\u001b[31mred"}`} }, map[string]checkup.Status{"csr-create": checkup.Failure}, []string{"csr-create: [31mred"}},
		"bindings gone":                     {func(m *machine) { m.replies["GET "+bindingsURL] = reply{200, list(m.t)} }, map[string]checkup.Status{"auto-approve-bindings": checkup.OK}, nil},
		"bindings there": {func(m *machine) {
			m.replies["GET "+bindingsURL] = reply{200, list(m.t, raws([]string{
				`{"metadata":{"name":"kubeadm:node-autoapprove-bootstrap"},"subjects":[{}],"roleRef":{"kind":"ClusterRole","name":"system:certificates.k8s.io:certificatesigningrequests:nodeclient"}}`,
				`{"metadata":{"name":"nobody"},"roleRef":{"kind":"ClusterRole","name":"system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"}}`,
				`{"metadata":{"name":"$(reboot)"},"subjects":[{}],"roleRef":{"kind":"ClusterRole","name":"system:certificates.k8s.io:certificatesigningrequests:nodeclient"}}`,
				`{"metadata":{"name":"mine"},"subjects":[{}],"roleRef":{"kind":"ClusterRole","name":"system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"}}`,
				`{"metadata":{"name":"other"},"subjects":[{}],"roleRef":{"kind":"ClusterRole","name":"view"}}`,
			})...)}
		}, map[string]checkup.Status{"auto-approve-bindings": checkup.Warning}, []string{"auto-approve-bindings: kubectl delete clusterrolebinding kubeadm:node-autoapprove-bootstrap mine"}},
		"bindings out of sight": {nil, nil, []string{"auto-approve-bindings: kubectl get clusterrolebindings"}},
	})
}

// Only a write shows that a certificate is revoked.
func TestCertificateWrites(t *testing.T) {
	node, create := "PATCH /api/v1/nodes/"+nodeName, "POST /api/v1/nodes"
	denied := func(message string) string {
		return `{"kind":"Status","message":"nodes \"worker-1\" is forbidden: ValidatingAdmissionPolicy 'node-attestation-revoked-01' with binding 'x' denied request: ` + message + `"}`
	}
	answers := func(status int, body string) func(*machine) {
		return func(m *machine) { m.replies[node] = reply{status, body} }
	}
	checkStates(t, map[string]scenario{
		"fine": {nil, nil, []string{"certificate-writes: a dry run"}},
		"revoked": {answers(403, denied(attestation.MessageRevoked)), map[string]checkup.Status{"certificate-writes": checkup.Failure},
			[]string{"certificate-writes: the certificate was revoked", "certificate-writes: see last-result"}},
		"revoked, without checks": {func(m *machine) {
			m.config.CheckInterval.Duration = 0
			answers(403, denied(attestation.MessageRevoked))(m)
		}, map[string]checkup.Status{"certificate-writes": checkup.Failure}, []string{"certificate-writes: set checkInterval"}},
		"suspended": {answers(403, denied(attestation.MessageSuspended)), map[string]checkup.Status{"certificate-writes": checkup.Failure},
			[]string{"certificate-writes: is suspended", "certificate-writes: kubectl attest resume"}},
		"forbidden by another": {answers(403, denied("not on a Tuesday")), map[string]checkup.Status{"certificate-writes": checkup.Warning}, []string{"certificate-writes: not on a Tuesday"}},
		"of a proxy":           {answers(403, "<html>no</html>"), map[string]checkup.Status{"certificate-writes": checkup.Warning}, nil},
		"no Node yet": {func(m *machine) {
			answers(404, `{}`)(m)
			m.replies[create] = reply{201, `{}`}
		}, nil, []string{"certificate-writes: a dry run"}},
		"no Node, and revoked": {func(m *machine) {
			answers(404, `{}`)(m)
			m.replies[create] = reply{403, denied(attestation.MessageRevoked)}
		}, map[string]checkup.Status{"certificate-writes": checkup.Failure}, []string{"certificate-writes: the certificate was revoked"}},
		"no such API": {func(m *machine) {
			answers(404, `{}`)(m)
			m.replies[create] = reply{404, `{}`}
		}, map[string]checkup.Status{"certificate-writes": checkup.Skipped}, []string{"certificate-writes: inconclusive answer"}},
		"401":        {answers(401, `{}`), map[string]checkup.Status{"certificate-writes": checkup.Skipped}, []string{"certificate-writes: see certificate-accepted"}},
		"overloaded": {answers(429, `{"message":"later"}`), map[string]checkup.Status{"certificate-writes": checkup.Skipped}, []string{"certificate-writes: 429: later"}},
	})
}

type raw string

func (r raw) MarshalJSON() ([]byte, error) { return []byte(r), nil }

func raws(items []string) []any {
	result := make([]any, 0, len(items))
	for _, item := range items {
		result = append(result, raw(item))
	}
	return result
}

func TestTheLastResult(t *testing.T) {
	failed := func(reason reason.Reason) cache.State {
		return cache.State{Issued: time.Now().Add(-time.Hour), Failures: 3, Last: &cache.Result{Reason: string(reason), Message: "it went wrong", Hint: "do this", Finished: time.Now()}}
	}
	lost := map[string]checkup.Status{"certificate": checkup.Failure, "certificate-accepted": checkup.Skipped, "certificate-writes": checkup.Skipped, "bootstrap-credential": checkup.OK}
	removeCertificate := func(m *machine) {
		m.remove(m.certs.File(cache.CurrentFile))
		m.writeBootstrap("{token: " + token + "}")
	}
	checkStates(t, map[string]scenario{
		"denied, while served": {func(m *machine) { m.setState(failed(reason.RequestDenied)) }, map[string]checkup.Status{"last-result": checkup.Warning}, []string{"last-result: it went wrong", "last-result: do this", "last-result: RequestDenied, 3 in a row"}},
		"denied":               {func(m *machine) { m.setState(failed(reason.RequestDenied)); removeCertificate(m) }, with(lost, "last-result", checkup.Failure), nil},
		"again and again": {func(m *machine) {
			s := failed("")
			m.setState(s)
		}, map[string]checkup.Status{"last-result": checkup.Warning}, nil},
		"damaged state":                 {func(m *machine) { m.write(m.certs.File(cache.StateFile), "{", 0o600) }, map[string]checkup.Status{"ek-template": checkup.Skipped, "last-result": checkup.Warning, "signer": checkup.Warning}, nil},
		"damaged pending":               {func(m *machine) { m.write(m.certs.File(cache.PendingFile), "{", 0o600) }, map[string]checkup.Status{"last-result": checkup.Warning}, nil},
		"no result yet":                 {func(m *machine) { m.remove(m.certs.File(cache.StateFile)) }, map[string]checkup.Status{"last-result": checkup.Skipped, "signer": checkup.Warning}, nil},
		"just filed":                    {func(m *machine) { m.setPending(time.Second, true, "u") }, nil, []string{"last-result: waits for its challenge", "last-result: signer " + attestation.HelloSignerName}},
		"not filed":                     {func(m *machine) { m.setPending(time.Second, true, "") }, nil, []string{"last-result: has not been filed yet"}},
		"the challenge does not come":   {func(m *machine) { m.setPending(5*time.Minute, true, "u") }, map[string]checkup.Status{"last-result": checkup.Warning}, []string{"last-result: kubectl describe csr node-csr-b"}},
		"the certificate does not come": {func(m *machine) { m.setPending(time.Hour, false, "u"); removeCertificate(m) }, with(lost, "last-result", checkup.Failure), []string{"last-result: waits for its certificate", "last-result: signer " + signerName}},
		"the same, while served":        {func(m *machine) { m.setPending(time.Hour, false, "u") }, map[string]checkup.Status{"last-result": checkup.Warning}, nil},
		"it cannot get on with it": {func(m *machine) {
			m.setPending(time.Second, false, "")
			m.setState(failed(reason.APIUnreachable))
			removeCertificate(m)
		}, with(lost, "last-result", checkup.Failure), []string{"last-result: APIUnreachable"}},
		"waiting is no failure": {func(m *machine) {
			m.setPending(time.Second, false, "u")
			m.setState(failed(reason.WaitingForSigner))
		}, nil, nil},
	})
}

// The cause and the remedy are the controller's annotation of the pending request. It is read from
// the API server, else from the last worker's state.
func TestWhatTheRequestWaitsFor(t *testing.T) {
	const now, before = "MachineNotFound: run this", "MachineNotReady: wait"
	asked := func(spec, annotation, status string) reply {
		object := map[string]any{
			"metadata": map[string]any{"name": "node-csr-b", "annotations": map[string]string{attestation.AnnotationWaiting: annotation}},
			"spec":     map[string]any{"request": []byte(spec)}, "status": json.RawMessage(status),
		}
		body, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		return reply{200, string(body)}
	}
	seen := func(request, annotation string) *cache.Waiting {
		return &cache.Waiting{Request: request, Annotation: annotation}
	}
	const cause, earlier, none = "MachineNotFound|run this", "MachineNotReady|wait", ""
	for name, c := range map[string]struct {
		reply reply
		seen  *cache.Waiting
		want  string
	}{
		"now":                            {asked("r", now, "{}"), nil, cause},
		"now, and otherwise before":      {asked("r", now, "{}"), seen("node-csr-b", before), cause},
		"not any more":                   {asked("r", "", "{}"), seen("node-csr-b", before), none},
		"decided":                        {asked("r", now, `{"conditions":[{"type":"Denied","status":"True"}]}`), nil, none},
		"before":                         {reply{404, "{}"}, seen("node-csr-b", before), earlier},
		"another's object":               {asked("x", now, "{}"), nil, none},
		"another request before":         {reply{404, "{}"}, seen("node-csr-a", before), none},
		"not one line":                   {asked("r", now+"\n\x1b[2J", "{}"), nil, none},
		"not one line, in the state":     {reply{404, "{}"}, seen("node-csr-b", "A: \x1b[2J"), none},
		"no JSON, and something earlier": {reply{200, "<html>"}, seen("node-csr-b", before), earlier},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t)
			m.setPending(time.Second, true, "u")
			m.setState(cache.State{Issued: time.Now().Add(-time.Hour), Waiting: c.seen})
			m.replies["GET "+csrPath+"/node-csr-b"] = c.reply
			got := m.examine()["last-result"]
			reason, remedy, explained := strings.Cut(c.want, "|")
			if !strings.Contains(got.Message, reason) || explained && got.Status != checkup.Warning || !explained && got.Status != checkup.OK || got.Remedy != remedy {
				t.Errorf("%+v", got)
			}
		})
	}
}

// doctor tries the signer of hellos and the configured signer.
func TestRequestsUnderTheRightSigners(t *testing.T) {
	m := newMachine(t)
	m.config.SignerName = "example.com/mine"
	m.examine()
	slices.Sort(m.created)
	if !slices.Equal(m.created, []string{attestation.HelloSignerName, "example.com/mine"}) {
		t.Errorf("%q", m.created)
	}
}

// A list of bindings in pages is read to its end.
func TestBindingsInPages(t *testing.T) {
	names, next, err := autoApproving([]byte(`{"metadata":{"continue":"more"},"items":[{"metadata":{"name":"a"},"subjects":[{"name":"x"}],"roleRef":{"kind":"ClusterRole","name":"system:certificates.k8s.io:certificatesigningrequests:nodeclient"}}]}`))
	if err != nil || next != "more" || !slices.Equal(names, []string{"a"}) {
		t.Error(names, next, err)
	}
	if _, _, err := autoApproving([]byte(`<html>`)); err == nil {
		t.Error("nonsense is a list")
	}
}

// A check that panics, or hangs until its context ends, or hangs for ever, fails alone. The other
// checks are reported in time.
func TestNoCheckHidesAnother(t *testing.T) {
	checks := []Check{
		{Name: "panics", run: func(context.Context, *examination) checkup.Result { panic("secret") }},
		{Name: "waits", run: func(ctx context.Context, _ *examination) checkup.Result {
			<-ctx.Done()
			return failure("", "says so itself")
		}},
		{Name: "hangs", run: func(context.Context, *examination) checkup.Result { select {} }},
		{Name: "works", run: func(context.Context, *examination) checkup.Result { return ok("fine") }},
	}
	began := time.Now()
	report := run(t.Context(), 200*time.Millisecond, checks, &examination{})
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	for i, want := range []string{"itself failed, with a panic", "says so itself", "not finished within 200ms", "fine"} {
		if got := report.Checks[i]; got.Name != checks[i].Name || !strings.Contains(got.Message, want) || strings.Contains(got.Message, "secret") {
			t.Errorf("%+v, want %q", got, want)
		}
	}
	if got := report.Checks.Named(checkup.Failure); !slices.Equal(got, []string{"panics", "waits", "hangs"}) || report.Status != checkup.Failure {
		t.Errorf("%s, %q", report.Status, got)
	}
}
