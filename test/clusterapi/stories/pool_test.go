// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// machinePool is a MachinePool whose provider makes Machines, named <pool>-<number>.
type machinePool struct {
	*machineDeployment // for its methods about Machines
	pool               *clusterv1.MachinePool
}

func (c *cluster) machinePool(t *testing.T, name string) *machinePool {
	t.Helper()
	p := &machinePool{&machineDeployment{cluster: c, object: &clusterv1.MachineDeployment{ObjectMeta: c.meta(name)}}, &clusterv1.MachinePool{}}
	p.object.Spec.Selector.MatchLabels = map[string]string{clusterv1.MachinePoolNameLabel: name}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, p.pool))
	return p
}

func (p *machinePool) scale(t *testing.T, replicas int32) {
	t.Helper()
	harness.Must(t, p.client.Get(t.Context(), client.ObjectKeyFromObject(p.pool), p.pool))
	before := p.pool.DeepCopy()
	p.pool.Spec.Replicas = &replicas
	harness.Must(t, p.client.Patch(t.Context(), p.pool, client.MergeFrom(before)))
}

// The guide's MachinePool joins with a static credential, which the guide's commands create. No
// bootstrap token is created for it. The pool scales up and down, and records are deleted with
// their instances.
func TestMachinePool(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, func(file map[string]any) {
		file["bootstrappers"] = []any{map[string]any{"username": "system:serviceaccount:machines:bootstrap", "group": "system:serviceaccounts:machines"}}
	})
	c := s.newCluster(t, "one")
	c.createCredential(t)

	example, err := os.ReadFile(filepath.Join(module, "docs", "examples", "cluster-api", "machinepool.yaml"))
	harness.Must(t, err)
	// One replica to begin with, and the container runtime of the tests, which runs no containers.
	manifest := strings.NewReplacer("replicas: 3", "replicas: 1",
		"    nodeRegistration:\n", "    nodeRegistration:\n      criSocket: unix:///run/fakecri.sock\n      ignorePreflightErrors: [all]\n").Replace(string(example))
	file := filepath.Join(t.TempDir(), "machinepool.yaml")
	harness.WriteFile(t, file, []byte(manifest))
	c.kubectl(t, c.AdminKubeconfig(), "apply", "--namespace="+c.namespace, "--filename="+file)
	p := c.machinePool(t, "one-pool")
	p.awaitRunning(t, 1)
	c.mustNotHaveTokens(t)

	p.scale(t, 2)
	p.awaitRunning(t, 2)
	p.scale(t, 1)
	p.awaitRunning(t, 1)
}

// kubectl runs kubectl with a kubeconfig.
func (c *cluster) kubectl(t *testing.T, kubeconfig []byte, args ...string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	harness.WriteFile(t, file, kubeconfig)
	out, err := c.RunKubectl(t.Context(), file, args...)
	harness.Must(t, err)
	return out
}

// createCredential makes the static credential of docs/integration/kubeadm.md, in the
// Secret of docs/integration/cluster-api.md.
func (c *cluster) createCredential(t *testing.T) {
	t.Helper()
	admin := c.workload.AdminKubeconfig()
	c.kubectl(t, admin, "create", "namespace", "machines")
	c.kubectl(t, admin, "--namespace=machines", "create", "serviceaccount", "bootstrap")
	c.kubectl(t, admin, "create", "clusterrolebinding", "machines", "--clusterrole=node-attestation-requester", "--serviceaccount=machines:bootstrap")
	token := strings.TrimSpace(c.kubectl(t, admin, "--namespace=machines", "create", "token", "bootstrap", "--duration=8760h"))
	file := filepath.Join(t.TempDir(), "bootstrap.kubeconfig")
	harness.WriteFile(t, file, c.workload.BootstrapKubeconfig(token))
	management := c.AdminKubeconfig()
	c.kubectl(t, management, "--namespace="+c.namespace, "create", "secret", "generic", "one-machines-bootstrap", "--from-file="+file)
	c.kubectl(t, management, "--namespace="+c.namespace, "label", "secret", "one-machines-bootstrap", "clusterctl.cluster.x-k8s.io/move=")
}

// mustNotHaveTokens checks that the bootstrap provider has created no bootstrap token. It is known
// by its description.
func (c *cluster) mustNotHaveTokens(t *testing.T) {
	t.Helper()
	for _, secret := range c.bootstrapTokens(t) {
		if strings.Contains(string(secret.Data["description"]), "cluster-api") {
			t.Errorf("the bootstrap provider has created the token %s", secret.Name)
		}
	}
}

func (c *cluster) bootstrapTokens(t *testing.T) []corev1.Secret {
	t.Helper()
	list, err := c.workload.Client().CoreV1().Secrets(metav1.NamespaceSystem).List(t.Context(), metav1.ListOptions{FieldSelector: "type=" + string(corev1.SecretTypeBootstrapToken)})
	harness.Must(t, err)
	return list.Items
}
