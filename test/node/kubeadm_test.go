// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// What happens without us: kubeadm joins a machine, whose kubelet gets a certificate from kube-controller-manager by itself.
func TestKubeadmJoin(t *testing.T) {
	t.Parallel()
	cp := startBareCluster(t)
	token, err := cp.KubeadmInit(t.Context(), built.kubeadm)
	if err != nil {
		t.Fatal(err)
	}
	const name = "stock"
	join, err := cp.KubeadmJoinConfig(name, token)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	m, err := testbed.StartMachine(t.Context(), testbed.KubeadmMachine(name, built.kubeadm, built.kubelet, map[string]string{"/root/join.yaml": join}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(m.Journal(context.WithoutCancel(t.Context()), "kubelet"))
		}
		if err := m.Remove(); err != nil {
			t.Error(err)
		}
	})
	t.Logf("systemd has started after %s", time.Since(began).Round(10*time.Millisecond))
	if out, err := m.Run(t.Context(), "kubeadm", "join", "--config=/root/join.yaml"); err != nil || !strings.Contains(out, "This node has joined the cluster") {
		t.Fatalf("%v: %s", err, out)
	}
	t.Logf("joined after %s", time.Since(began).Round(10*time.Millisecond))
	node := &machine{cluster: &cluster{ControlPlane: cp}, name: name}
	eventually(t, time.Minute, "the node is ready", func() bool { return node.ready(t.Context()) == "" })

	list, err := cp.Client().CertificatesV1().CertificateSigningRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 1 || list.Items[0].Spec.SignerName != builtinSigner || list.Items[0].Spec.Username != "system:bootstrap:"+token[:6] {
		t.Errorf("requests: %+v", list.Items)
	}
	kubeconfig, err := os.ReadFile(m.Path("/etc/kubernetes/kubelet.conf"))
	if err != nil || !strings.Contains(string(kubeconfig), "/var/lib/kubelet/pki/kubelet-client-current.pem") {
		t.Errorf("%v: kubelet.conf is not the kubelet's own:\n%s", err, kubeconfig)
	}
}

// startBareCluster starts a control plane as kubeadm has it, without anything of ours.
func startBareCluster(t *testing.T) *testbed.ControlPlane {
	t.Helper()
	starting.Lock()
	defer starting.Unlock()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(cp.Logs())
		}
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := cp.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	return cp
}
