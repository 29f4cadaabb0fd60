// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// busyKubelet has a kubelet call the API server each second, as one with many pods does. It asks
// its plugin only before a call, and an idle one makes one each 10 s. The Lease is renewed every
// 10 s all the same.
const busyKubelet = "nodeStatusUpdateFrequency: 1s\n"

// KubeletNode is a machine with a real kubelet, whose kubeconfig names the plugin.
type KubeletNode struct {
	*Machine
	cluster *testbed.ControlPlane
}

// KubeletNodeOptions say where a machine becomes a node.
type KubeletNodeOptions struct {
	Cluster    *testbed.ControlPlane
	Components compile.KubeletComponents
	// CheckInterval is the plugin's. The shortest that it takes is 10 s.
	CheckInterval time.Duration
	// Admit adds entries to the cluster's inventory.
	Admit func(t *testing.T, entries []byte)
	// Provider is the plugin's. Default: tpm.
	Provider string
	// Entry is the machine's in the inventory. Default: what identify prints.
	Entry []byte
}

// StartKubeletNode starts a kubelet on a machine, and returns when the node is ready. The machine
// has lost the token that it got its first certificate with.
func StartKubeletNode(t *testing.T, m *Machine, options KubeletNodeOptions) *KubeletNode {
	t.Helper()
	n := &KubeletNode{Machine: m, cluster: options.Cluster}
	api := n.cluster.Client()
	file := filepath.Join(n.Dir, "config.yaml")
	WriteFile(t, file, fmt.Appendf(nil, "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: %s\ncheckInterval: %s\n", cmp.Or(options.Provider, "tpm"), options.CheckInterval))
	n.Args = []string{"--config=" + file}
	if options.Entry == nil {
		options.Entry = Inventory(t, n.Machine)
	}
	options.Admit(t, options.Entry)
	token, err := n.cluster.CreateBootstrapToken(t.Context(), 10*time.Minute)
	Must(t, err)
	Must(t, n.cluster.WriteKubeconfig(n.Bootstrap, testbed.TokenUser(token)))

	kubelet, err := testbed.StartKubelet(t.Context(), testbed.KubeletOptions{
		Components: options.Components, NodeName: n.Name, Config: busyKubelet,
		Kubeconfig: n.cluster.ExecKubeconfig("client.authentication.k8s.io/v1", n.Plugin, n.Flags(), nil, true),
	})
	Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(kubelet.LogTail())
			if log, err := os.ReadFile(n.Certs().File(cache.LogFile)); err == nil {
				t.Logf("--- worker ---\n%s", log)
			}
		}
		if err := kubelet.Remove(); err != nil {
			t.Error(err)
		}
		KillWorker(t, n.Certs())
	})
	Eventually(t, time.Minute, n.Name+" is ready, and has a Lease", func() bool {
		why, err := NotReady(t.Context(), api, n.Name)
		if err != nil || why != "" {
			return false
		}
		_, err = api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), n.Name, metav1.GetOptions{})
		return err == nil
	})
	Must(t, os.Remove(n.Bootstrap))
	n.ages(t)
	return n
}

// ages has the plugin take the first certificate for one of an hour ago. After two within ten
// minutes it starts no worker for 30 s and more, not even for a report.
func (n *KubeletNode) ages(t *testing.T) {
	t.Helper()
	WorkerEnds(t, n.Certs())
	lock, err := n.Certs().WaitLock(t.Context())
	Must(t, err)
	defer lock.Unlock()
	state, err := n.Certs().State()
	Must(t, err)
	state.Issued = state.Issued.Add(-time.Hour)
	Must(t, lock.SetState(state))
}

// Pair is the certificate and the key that the plugin hands out.
func (n *KubeletNode) Pair(t *testing.T) *cache.Pair {
	t.Helper()
	pair, err := n.Certs().Current()
	Must(t, err)
	return pair
}

// Credential copies the node's certificate and key, as a thief does.
func (n *KubeletNode) Credential(t *testing.T) Credential {
	t.Helper()
	pair := n.Pair(t)
	return Credential{Node: n.Name, Config: &rest.Config{
		Host: n.cluster.ServerURL(), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: n.cluster.ServerCA(), CertData: pair.Chain, KeyData: pair.Key},
	}}
}

// NextSecond waits for the next second: what was issued in the second of a revocation does not
// count as issued before it.
func NextSecond() {
	time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second + 10*time.Millisecond)))
}
