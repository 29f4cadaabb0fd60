// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
)

// poolTokenTTL is the lifetime of the pool's bootstrap token. The bootstrap provider replaces a
// token after half of its lifetime, and checks that after each third of the lifetime.
const poolTokenTTL = 90 * time.Second

// A MachinePool's instances share a bootstrap token, which belongs to no Machine. With token
// Required the instances are denied. With token Off they join. Cluster API's bootstrap provider
// extends the token's lifetime while an instance has no Node. It replaces the token once all
// instances have one. So an instance joins even if it is approved late, or boots after a
// replacement.
//
// The story does not run in parallel: it changes the lifetime of all bootstrap tokens.
func TestMachinePoolTokenRotated(t *testing.T) {
	full(t)
	harness.Must(t, shared.clusterAPI.RestartKubeadmBootstrap(t.Context(), poolTokenTTL))
	t.Cleanup(func() {
		harness.Must(t, shared.clusterAPI.RestartKubeadmBootstrap(context.WithoutCancel(t.Context()), 0))
	})
	s := newStory(t, func(file map[string]any) { file["token"] = "Required" })
	c := s.newCluster(t, "one")
	p := c.newMachinePool(t, "pool")

	c.awaitDenied(t, "pool-0", verifier.ReasonTokenNotForMachine)
	c.mustNotHaveJoined(t, "pool-0")
	harness.Must(t, s.controller.Stop())
	content, err := os.ReadFile(s.controller.ConfigFile())
	harness.Must(t, err)
	harness.WriteFile(t, s.controller.ConfigFile(), []byte(strings.ReplaceAll(string(content), "token: Required", "token: \"Off\"")))
	harness.Must(t, s.restart(t.Context()))
	p.awaitRunning(t, 1)

	// All instances have joined, so the token is replaced. Another instance boots with the new
	// token. The controller does not run for longer than that token's first lifetime.
	began := time.Now()
	token := p.awaitRotation(t, p.awaitRotation(t, "")) // the inner call returns the present token
	t.Logf("the token is replaced after %s", since(began))
	harness.Must(t, s.controller.Kill())
	p.scale(t, 2)
	c.awaitRequest(t, "pool-1", func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	first := c.expiration(t, token)
	harness.Eventually(t, 3*poolTokenTTL, "the token's first lifetime is over", func() bool { return time.Now().After(first) })
	if last := c.expiration(t, token); !last.After(first) {
		t.Errorf("the token still expires at %s", last)
	}
	if p.token(t) != token {
		t.Error("the token was replaced while an instance had not joined")
	}
	harness.Must(t, s.restart(t.Context()))
	p.awaitRunning(t, 2)
	p.awaitRotation(t, token)
	p.scale(t, 1)
	p.awaitRunning(t, 1)
}

// newMachinePool makes a MachinePool of one instance that joins with a bootstrap token.
func (c *cluster) newMachinePool(t *testing.T, name string) *machinePool {
	t.Helper()
	// for its user data; it has no Machines
	template := c.newMachineDeployment(t, name+"-template", nil)
	pool := &clusterv1.MachinePool{ObjectMeta: c.meta(name), Spec: clusterv1.MachinePoolSpec{ClusterName: c.name, Replicas: ptr.To[int32](1)}}
	pool.Spec.Template.Spec = *template.object.Spec.Template.Spec.DeepCopy()
	pool.Spec.Template.Spec.Bootstrap.ConfigRef = reference(bootstrapv1.GroupVersion.Group, "KubeadmConfig", name)
	pool.Spec.Template.Spec.InfrastructureRef = reference(infrav1.GroupVersion.Group, "MetalMachinePool", name)
	for _, object := range []client.Object{
		&infrav1.MetalMachinePool{ObjectMeta: c.meta(name)},
		&bootstrapv1.KubeadmConfig{ObjectMeta: c.meta(name), Spec: *template.template.Spec.Template.Spec.DeepCopy()},
		pool,
	} {
		harness.Must(t, c.client.Create(t.Context(), object))
	}
	return c.machinePool(t, name)
}

// token returns the token in the pool's bootstrap data. It returns an empty string while the
// KubeadmConfig and the Secret differ.
func (p *machinePool) token(t *testing.T) string {
	t.Helper()
	config := &bootstrapv1.KubeadmConfig{}
	harness.Must(t, p.client.Get(t.Context(), client.ObjectKeyFromObject(p.pool), config))
	token := config.Spec.JoinConfiguration.Discovery.BootstrapToken.Token
	secret := &corev1.Secret{}
	harness.Must(t, p.client.Get(t.Context(), client.ObjectKeyFromObject(p.pool), secret))
	if !strings.Contains(string(secret.Data["value"]), token) {
		return "" // the provider writes the Secret after the KubeadmConfig
	}
	return token
}

// awaitRotation waits until the pool's bootstrap data has another token, and returns that one.
func (p *machinePool) awaitRotation(t *testing.T, before string) (token string) {
	t.Helper()
	harness.Eventually(t, 3*poolTokenTTL, "the pool's token is rotated", func() bool {
		token = p.token(t)
		return token != "" && token != before
	})
	return token
}

// expiration returns when a bootstrap token expires.
func (c *cluster) expiration(t *testing.T, token string) time.Time {
	t.Helper()
	id, _, _ := strings.Cut(token, ".")
	object, err := c.workload.Client().CoreV1().Secrets(metav1.NamespaceSystem).Get(t.Context(), "bootstrap-token-"+id, metav1.GetOptions{})
	harness.Must(t, err)
	end, err := time.Parse(time.RFC3339, string(object.Data["expiration"]))
	harness.Must(t, err)
	return end
}
