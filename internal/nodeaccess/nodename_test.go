// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestHostnameOverride(t *testing.T) {
	for name, c := range map[string]struct{ env, want string }{
		"nothing":             {"", ""},
		"as kubeadm writes":   {`KUBELET_KUBEADM_ARGS="--container-runtime-endpoint=unix:///run/containerd/containerd.sock --hostname-override=node-1 --pod-infra-container-image=registry.k8s.io/pause:3.10"` + "\n", "node-1"},
		"mixed case is kept":  {`KUBELET_KUBEADM_ARGS="--a=b --hostname-override=Node-1"`, "Node-1"},
		"none":                {`KUBELET_KUBEADM_ARGS="--a=b"`, ""},
		"single quotes":       {`KUBELET_KUBEADM_ARGS='--a=b --hostname-override=node-1'`, "node-1"},
		"no quotes":           {`KUBELET_KUBEADM_ARGS=--hostname-override=node-1`, "node-1"},
		"value apart":         {`KUBELET_KUBEADM_ARGS="--hostname-override node-1 --a=b"`, "node-1"},
		"value apart, at end": {`KUBELET_KUBEADM_ARGS="--a=b --hostname-override node-1"`, "node-1"},
		"no value":            {`KUBELET_KUBEADM_ARGS="--a=b --hostname-override"`, ""},
		"value in quotes":     {`KUBELET_KUBEADM_ARGS="--hostname-override='node-1' --a=b"`, "node-1"},
		"twice":               {`KUBELET_KUBEADM_ARGS="--hostname-override=first --hostname-override=second"`, "second"},
		"twice, both ways":    {`KUBELET_KUBEADM_ARGS="--hostname-override=first --hostname-override second"`, "second"},
		"emptied at last":     {`KUBELET_KUBEADM_ARGS="--hostname-override=first --hostname-override="`, ""},
		"commented":           {"# KUBELET_KUBEADM_ARGS=\"--hostname-override=old\"\nKUBELET_KUBEADM_ARGS=\"--hostname-override=new\"\n#KUBELET_KUBEADM_ARGS=\"--hostname-override=old\"\n", "new"},
		// systemd.exec(5), EnvironmentFile
		"commented as systemd allows": {";KUBELET_KUBEADM_ARGS=\"--hostname-override=old\"\n", ""},
		"spaces around":               {"  KUBELET_KUBEADM_ARGS = \"--hostname-override=node-1\"  \r\n", "node-1"},
		"a longer flag":               {`KUBELET_KUBEADM_ARGS="--hostname-override-x=no --x--hostname-override=no"`, ""},
		"another line after":          {"KUBELET_KUBEADM_ARGS=\"--hostname-override=node-1\"\nOTHER=\"--a=b\"\n", "node-1"},
		"no assignment":               {"hostname-override\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := hostnameOverride(c.env); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestFindNodeName(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	flags := func(content string) string {
		path := filepath.Join(t.TempDir(), "kubeadm-flags.env")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	missing := filepath.Join(t.TempDir(), "none")
	override := flags(`KUBELET_KUBEADM_ARGS="--hostname-override=Node-1.Example.COM"`)
	derived := NodeName{Name: strings.ToLower(strings.TrimSpace(host)), Derived: true}
	for name, c := range map[string]struct {
		given, file string
		want        NodeName
	}{
		"given":                       {"given", missing, NodeName{Name: "given"}},
		"given, before kubeadm's":     {"given", override, NodeName{Name: "given"}},
		"given, and kubeadm's broken": {"given", t.TempDir(), NodeName{Name: "given"}},
		"kubeadm's, in lower case":    {"", override, NodeName{Name: "node-1.example.com"}},
		"the host's":                  {"", missing, derived},
		"the host's, flags without":   {"", flags("KUBELET_KUBEADM_ARGS=\"--a=b\"\n"), derived},
	} {
		got, err := findNodeName(c.given, c.file)
		if err != nil || got != c.want {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, c.want)
		}
	}
	for name, c := range map[string]struct{ given, file string }{
		"flags that cannot be read":      {"", t.TempDir()},
		"kubeadm's is no name":           {"", flags(`KUBELET_KUBEADM_ARGS="--hostname-override=node_1"`)},
		"kubeadm's would be another CN":  {"", flags(`KUBELET_KUBEADM_ARGS="--hostname-override=a,O=system:masters"`)},
		"given in upper case":            {"Node-1", missing},
		"given as the API server has it": {"system:node:a", missing},
		"given with a newline":           {"a\nb", missing},
	} {
		_, err := findNodeName(c.given, c.file)
		if err == nil || !strings.Contains(err.Error(), "node name") || strings.ContainsAny(err.Error(), "\n\r") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
