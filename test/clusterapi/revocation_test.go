// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// applyKustomization applies a kustomization of packaging/cluster-api over what is there.
func applyKustomization(t *testing.T, cp *testbed.ControlPlane, name string) {
	t.Helper()
	admin := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, cp.WriteKubeconfig(admin, cp.AdminUser()))
	_, err := cp.RunKubectl(t.Context(), admin, "apply", "--server-side", "--force-conflicts", "--kustomize="+filepath.Join(module, "packaging/cluster-api", name))
	harness.Must(t, err)
}

// writesNode returns the error of a node's own write with a credential.
func writesNode(t *testing.T, config *rest.Config, name string) error {
	t.Helper()
	api, err := client.New(config, client.Options{})
	harness.Must(t, err)
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	object.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	return api.Patch(t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"a":"`+time.Now().String()+`"}}}`)))
}

// Two Clusters in one namespace. A key of one is revoked, and a machine suspended: the policies of
// that workload cluster refuse it, and nothing changes in the other. The lists are owned by the
// Cluster.
func TestRevocation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	applyKustomization(t, w.ControlPlane, "management-revocation")
	c, other := w.newCluster(t, "revoked", nil), w.newCluster(t, "other", nil)
	for _, each := range []*cluster{c, other} {
		applyKustomization(t, each.workload.ControlPlane, "workload-revocation")
	}
	w.start(t, nil, "--revocation")
	m, bystander := c.newMachine(t, "m", nil), other.newMachine(t, "bystander", nil)
	for _, each := range []*machine{m, bystander} {
		each.attests(t)
		each.registered(t)
	}
	stolen := m.credential()
	harness.Must(t, writesNode(t, stolen, "m"))
	refused := func(message string) {
		t.Helper()
		began := time.Now()
		harness.Eventually(t, harness.Soon, message, func() bool {
			err := writesNode(t, stolen, "m")
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), message)
		})
		t.Logf("%s: after %s", message, time.Since(began))
	}
	time.Sleep(time.Second) // what was issued in the same second does not count as issued before
	if stdout, stderr, code := c.attest(t, "revoke", "m", "--reason=key stolen", "--yes", "--wait=false"); code != 0 {
		t.Fatalf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	refused(attestation.MessageRevoked)
	m.attests(t) // with its revoked certificate
	harness.Must(t, writesNode(t, m.credential(), "m"))

	if certificates := w.revoked(t, c); len(certificates) != 1 {
		t.Errorf("revoked: %+v", certificates)
	}

	stolen = m.credential()
	if stdout, stderr, code := c.attest(t, "suspend", "m", "--reason=machine stolen", "--yes", "--timeout=30s"); code != 0 {
		t.Fatalf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	refused(attestation.MessageSuspended)
	harness.Must(t, writesNode(t, bystander.credential(), "bystander"))
	bystander.attests(t)
	if stdout, stderr, code := c.attest(t, "resume", "m", "--yes"); code != 0 {
		t.Fatalf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	refused(attestation.MessageRevoked)
	m.attests(t)
}
