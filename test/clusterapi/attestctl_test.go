// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1 "k8s.io/api/core/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// attest runs kubectl attest as an administrator of the management cluster.
func (c *cluster) attest(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, err bytes.Buffer
	args = append(args, "--kubeconfig="+c.admin, "--namespace="+c.namespace, "--workload-cluster="+c.name)
	code = attestctl.Program{Version: "v0.0.0-test"}.Run(t.Context(), attestctl.Process{
		Args: args, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &err, Getenv: os.Getenv,
	})
	return out.String(), err.String(), code
}

// operated reads records in the management cluster, and requests in the workload cluster, by the
// kubeconfig that Cluster API keeps. That one must not have programs run.
func (c *cluster) operated(t *testing.T, nodes ...string) {
	t.Helper()
	stdout, stderr, code := c.attest(t, "status")
	if code != 0 || strings.Count(stdout, " Attested ") != 2*len(nodes) || stderr != "" {
		t.Errorf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	for _, node := range nodes {
		stdout, stderr, code = c.attest(t, "describe", node)
		if code != 0 || !strings.Contains(stdout, "(cluster-api)") || !strings.Contains(stdout, "proof filed by system:node:"+node) {
			t.Errorf("exit code %d:\n%s%s", code, stdout, stderr)
		}
	}
	stdout, stderr, _ = c.attest(t, "check")
	for _, good := range []string{"the policies and their bindings", "the API server trusts the CA", "SourcesUsable", "kubectl delete clusterrolebinding kubeadm:"} {
		if !strings.Contains(stdout, good) {
			t.Errorf("check does not find %q:\n%s%s", good, stdout, stderr)
		}
	}

	object := &corev1.Secret{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: secret.Name(c.name, secret.Kubeconfig)}, object))
	good := object.Data[secret.KubeconfigDataName]
	trap := filepath.Join(t.TempDir(), "trap")
	object.Data[secret.KubeconfigDataName] = c.workload.Kubeconfig(testbed.ExecUser("client.authentication.k8s.io/v1", "/usr/bin/touch", []string{trap}, nil, false))
	harness.Must(t, c.client.Update(t.Context(), object))
	if stdout, stderr, code = c.attest(t, "status"); code == 0 || !strings.Contains(stderr, "wants to run a program") || !strings.Contains(stderr, "--workload-kubeconfig") {
		t.Errorf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	if _, err := os.Stat(trap); err == nil {
		t.Error("a program was run that the Secret names")
	}
	own := filepath.Join(t.TempDir(), "workload.kubeconfig")
	harness.WriteFile(t, own, good)
	if stdout, stderr, code = c.attest(t, "pending", "--workload-kubeconfig="+own); code != 0 {
		t.Errorf("exit code %d:\n%s%s", code, stdout, stderr)
	}
}
