// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/cluster-api/bootstrap/kubeadm/pkg/cloudinit"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."
	// enrolled bounds an enrolment.
	enrolled = time.Minute
)

// userData is what the kubeadm bootstrap provider renders.
func userData(t *testing.T, endpoint, token string) []byte {
	t.Helper()
	content, err := cloudinit.NewNode(&cloudinit.NodeInput{JoinConfiguration: `---
apiVersion: kubeadm.k8s.io/v1beta4
discovery:
  bootstrapToken:
    apiServerEndpoint: ` + endpoint + `
    caCertHashes: ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
    token: ` + token + `
kind: JoinConfiguration
nodeRegistration:
  kubeletExtraArgs:
  - name: provider-id
    value: 'metal://{{ ds.meta_data.instance_id }}'
  name: '{{ ds.meta_data.local_hostname }}'
`})
	harness.Must(t, err)
	return content
}

// A host attests to the shipped controller with the TPM that the platform named, and is a Node that
// is Ready until it is released.
func TestHost(t *testing.T) {
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	binary := filepath.Join(t.TempDir(), "controller")
	harness.Must(t, controllerprocess.Build(t.Context(), module, binary))
	harness.Must(t, cp.BindKubeadmBootstrap(t.Context()))
	harness.Must(t, controllerprocess.Install(t.Context(), cp, module))
	token, err := cp.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	endpoint := strings.TrimPrefix(cp.ServerURL(), "https://")
	hosts := New(Options{
		Dir: t.TempDir(), Maker: maker, Version: "v1.37.2", Log: t.Logf,
		Cluster: func(asked string) (fleet.Cluster, error) {
			if asked != endpoint {
				return fleet.Cluster{}, fmt.Errorf("no cluster %s", asked)
			}
			return fleet.Cluster{URL: cp.ServerURL(), CA: cp.ServerCA(), Issuer: cp.ClientCA().Certificate()}, nil
		},
	})
	t.Cleanup(func() { harness.Must(t, hosts.Stop()) })

	first, err := hosts.Allocate(t.Context(), "uid-1", "node-1")
	harness.Must(t, err)
	again, err := hosts.Allocate(t.Context(), "uid-1", "node-1")
	harness.Must(t, err)
	other, err := hosts.Allocate(t.Context(), "uid-2", "node-2")
	harness.Must(t, err)
	if first.ID != again.ID || first.ID == other.ID || len(first.EKs) == 0 || first.EKs[0] == other.EKs[0] {
		t.Errorf("%+v, %+v, %+v", first, again, other)
	}
	// The inventory has what Allocate says, and no more.
	harness.Must(t, controllerprocess.SetInventory(t.Context(), cp, fmt.Appendf(nil,
		"---\nnodeName: node-1\nproviderID: metal://%s\nprovider: tpm\ndevice:\n  eks:\n  - fingerprint: %s\n", first.ID, first.EKs[0])))
	controller, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: cp, Dir: t.TempDir(), Binary: binary, Configure: func(c *config.Config) { c.LeaderElection.Enabled = false },
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, controller.Kill()) })
	harness.Must(t, errors.Join(controller.Start(t.Context()), controller.Ready(t.Context())))

	for range 2 { // the second time it is on
		harness.Must(t, hosts.PowerOn(t.Context(), first.ID, metal.Metadata{InstanceID: first.ID, LocalHostname: "node-1"}, userData(t, endpoint, token)))
	}
	nodes := cp.Client().CoreV1().Nodes()
	harness.Eventually(t, enrolled, "the Node is Ready, with a Lease", func() bool {
		node, err := nodes.Get(t.Context(), "node-1", metav1.GetOptions{})
		_, noLease := cp.Client().CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), "node-1", metav1.GetOptions{})
		return err == nil && noLease == nil && node.Spec.ProviderID == "metal://"+first.ID && ready(node)
	})
	if times := hosts.Times()["node-1"]; times.Hellos != 1 {
		t.Errorf("%+v", times)
	}
	// A host of which the inventory says nothing does not get in.
	harness.Must(t, hosts.PowerOn(t.Context(), other.ID, metal.Metadata{InstanceID: other.ID, LocalHostname: "node-2"}, userData(t, endpoint, token)))
	time.Sleep(5 * time.Second) // longer than the first one took
	if list, err := nodes.List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != 1 {
		t.Errorf("%+v, %v", list, err)
	}

	for range 2 { // the second time it is unknown
		harness.Must(t, hosts.Release(t.Context(), first.ID))
	}
	if _, err := nodes.Get(t.Context(), "node-1", metav1.GetOptions{}); err != nil {
		t.Error(err) // Cluster API deletes it
	}
	if err := hosts.PowerOn(t.Context(), first.ID, metal.Metadata{}, userData(t, endpoint, token)); err == nil {
		t.Error("a host that was released boots")
	}
	if next, err := hosts.Allocate(t.Context(), types.UID("uid-1"), "node-1"); err != nil || next.ID == first.ID {
		t.Errorf("%+v, %v", next, err)
	}
}

func ready(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

func TestUserDataWithoutAToken(t *testing.T) {
	for _, data := range []string{"", "#cloud-config\n", "\x00", string(userData(t, "127.0.0.1:1", "''"))} {
		if join, err := joinConfiguration([]byte(data)); err == nil {
			t.Errorf("%q: %+v", data, join)
		}
	}
}
