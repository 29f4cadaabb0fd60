// SPDX-License-Identifier: Apache-2.0

package command

import (
	"slices"
	"testing"
)

// renew and rehearse file requests, so they must not run with other settings than the kubelet's.
func TestRenewNeedsTheKubeletsFlags(t *testing.T) {
	for name, c := range map[string]struct {
		command string
		args    []string
	}{
		"another program":             {"/usr/bin/kubelet-authenticator-acme", nil},
		"a flag that is not known":    {"/usr/bin/kubelet-authenticator-test", []string{"--later-flag=x"}},
		"an argument that is no flag": {"/usr/bin/kubelet-authenticator-test", []string{"status"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			enrolled(t, n.certs)
			args := ""
			for _, arg := range c.args {
				args += "\n      - " + arg
			}
			if args != "" {
				args = "\n      args:" + args
			}
			kubeconfig := n.write(t, "kubelet.conf", `apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users:
- name: u
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: `+c.command+args+`
      interactiveMode: Never
      provideClusterInfo: true
`)
			before := tree(t, n.root)
			for _, command := range []string{"renew", "rehearse"} {
				o := call(t, "", append(slices.Clone(n.flags[1:]), "--kubelet-kubeconfig="+kubeconfig, command)...)
				o.failed(t, 10, "the flags that the kubelet uses are not known")
			}
			if after := tree(t, n.root); after != before {
				t.Errorf("it changed\n%s\nto\n%s", before, after)
			}
		})
	}
}
