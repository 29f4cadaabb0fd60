// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// newTarget starts a second management cluster, with the same providers as the first one.
func newTarget(t *testing.T) *management {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.management.ControlPlane})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	target, err := newManagement(t.Context(), cp)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []*management{shared.management, target} {
		applyKustomization(t, m.ControlPlane, "management-revocation")
		provider := &unstructured.Unstructured{Object: map[string]any{
			"providerName": "cluster-api", "type": "CoreProvider", "version": "v1.14.2",
		}}
		provider.SetGroupVersionKind(schema.GroupVersionKind{Group: "clusterctl.cluster.x-k8s.io", Version: "v1alpha3", Kind: "Provider"})
		provider.SetNamespace("default")
		provider.SetName("cluster-api")
		if err := m.client.Create(t.Context(), provider); err != nil {
			t.Fatal(err)
		}
	}
	return target
}

// mover returns a function that runs clusterctl move for a namespace. It needs no network.
func mover(t *testing.T, namespace string, from, to *management) func() error {
	t.Helper()
	clusterctl, err := compile.Clusterctl(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	settings := filepath.Join(dir, "clusterctl.yaml")
	if err := os.WriteFile(settings, []byte("providers: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), clusterctl, "move", "--config="+settings, "--namespace="+namespace, "--kubeconfig="+from.admin,
		"--to-kubeconfig="+to.admin)
	cmd.Env = append(os.Environ(), "CLUSTERCTL_DISABLE_VERSIONCHECK=true", "HOME="+dir, "XDG_CONFIG_HOME="+dir)
	return func() error {
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("clusterctl move: %w\n%s", err, out)
		}
		return nil
	}
}

// The objects that clusterctl moves lack their status. The controllers at the target have to find
// it out again. Until the test has played those controllers, machines wait. Then they renew with
// the certificates that they had, and nothing is attested for the first time.
func TestMove(t *testing.T) {
	t.Parallel()
	// the only one on the first management cluster
	elected := func(file map[string]any) { delete(file, "leaderElection") }
	source := newWorld(t, shared.management)
	c := source.newCluster(t, "workload", nil)
	// before the controller uses it
	applyKustomization(t, c.workload.ControlPlane, "workload-revocation")
	old := source.start(t, elected, "--revocation")
	m, other := c.newMachine(t, "m", nil), c.newMachine(t, "other", nil)
	for _, m := range []*machine{m, other} {
		m.attests(t)
		m.registered(t)
	}
	time.Sleep(time.Second) // what is issued in the second of a revocation is not revoked
	stolen := m.credential()
	if stdout, stderr, code := c.attest(t, "revoke", "m", "--reason=key stolen", "--yes", "--wait=false"); code != 0 {
		t.Fatalf("exit code %d:\n%s%s", code, stdout, stderr)
	}
	isRevoked := func() bool {
		err := writesNode(t, stolen, "m")
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), attestation.MessageRevoked)
	}
	harness.Eventually(t, harness.Soon, "the stolen key is refused", isRevoked)
	m.attests(t)
	revoked := source.revoked(t, c)
	before, identity := m.remembered(t), c.identity(t)
	target := &world{management: newTarget(t), namespace: source.namespace}
	target.ends(t)
	target.admitMover(t)

	// While clusterctl waits for an object that is not to be moved yet, the Cluster is paused
	// already: the old controller does nothing more.
	update(t, source.client, m.infra, func(o *unstructured.Unstructured) { o.SetAnnotations(map[string]string{blockMove: "true"}) })
	move, moved := mover(t, source.namespace, source.management, target.management), make(chan error, 1)
	c.isLetGo(t, old, func() {
		go func() { moved <- move() }()
		harness.Eventually(t, 2*time.Minute, "the Cluster is paused", func() bool {
			select {
			case err := <-moved:
				t.Fatalf("clusterctl waits for nothing: %v", err)
			default:
			}
			if err := source.client.Get(t.Context(), client.ObjectKeyFromObject(c.object), c.object); err != nil {
				t.Fatal(err)
			}
			return c.object.Spec.Paused != nil && *c.object.Spec.Paused
		})
	})
	a := m.begins(t)
	a.waits(t, 3*time.Second)
	update(t, source.client, m.infra, func(o *unstructured.Unstructured) { o.SetAnnotations(nil) })
	if err := <-moved; err != nil {
		t.Fatal(err)
	}
	if n := len(source.records(t)); n != 0 {
		t.Errorf("%d records stay behind", n)
	}
	a.waits(t, 3*time.Second)

	target.start(t, elected, "--revocation")
	a.waits(t, 4*time.Second) // statuses are not there
	c.arrive(t, target)
	since := time.Now()
	m.arrive(t)
	a.follows(t, "a renewal after the move", since)
	other.arrive(t)
	other.attests(t)
	after := m.remembered(t)
	if now := target.revoked(t, c); !isRevoked() || !reflect.DeepEqual(now, revoked) {
		t.Errorf("revoked were %+v, and are %+v", revoked, now)
	}
	if c.identity(t) != identity || after.Spec.Cluster != identity || after.Status.FirstRequestUID != before.Status.FirstRequestUID ||
		*after.Spec.EK != *before.Spec.EK || after.Spec.AKName != before.Spec.AKName {
		t.Errorf("the cluster was %s, the record\n%+v\nand is\n%+v", identity, before, after)
	}
	for _, certificate := range before.Status.Certificates {
		if !slices.ContainsFunc(after.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == certificate.SHA256 }) {
			t.Errorf("certificate %s is forgotten", certificate.SHA256)
		}
	}
	// Machines join there as before, and the first controller does nothing.
	c.newMachine(t, "new", nil).attests(t)
	if err := old.Stop(); err != nil {
		t.Error(err)
	}
	m.attests(t)
	if n := len(target.records(t)); n != 3 {
		t.Errorf("%d records", n)
	}
}

// revoked returns the revoked certificates of a cluster, which it owns the list of.
func (w *world) revoked(t *testing.T, c *cluster) []v1alpha1.RevokedCertificate {
	t.Helper()
	list := &v1alpha1.RevocationSliceList{}
	harness.Must(t, w.client.List(t.Context(), list, client.InNamespace(w.namespace)))
	harness.Must(t, w.client.Get(t.Context(), client.ObjectKeyFromObject(c.object), c.object))
	if len(list.Items) != 1 || len(list.Items[0].OwnerReferences) != 1 || list.Items[0].OwnerReferences[0].UID != c.object.UID ||
		list.Items[0].Name != c.name+"-revoked-01" {
		t.Fatalf("not a list of Cluster %s: %+v", c.name, list.Items)
	}
	return list.Items[0].Spec.Certificates
}

// admitMover lets an administrator, as whom clusterctl runs, write records and lists of revoked
// certificates, by the change that docs/integration/cluster-api.md describes. Without it the
// policies keep everybody but the controller from that.
func (w *world) admitMover(t *testing.T) {
	t.Helper()
	record := &v1alpha1.NodeAttestation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "moved"},
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster: "c", Machine: v1alpha1.MachineReference{Source: "cluster-api", Name: "moved"}, Provider: "tpm", NodeName: "moved",
		},
	}
	may := func() error { return w.client.Create(t.Context(), record.DeepCopy(), client.DryRunAll) }
	harness.Eventually(t, harness.Soon, "nobody but the controller writes records", func() bool { return isPlanted(may()) })
	for _, name := range []string{"node-attestation-revocation-slices", recordsPolicy} {
		policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
		update(t, w.client, policy, func(p *admissionv1.ValidatingAdmissionPolicy) {
			if v := &p.Spec.Variables[1]; v.Name != "movers" {
				t.Fatalf("variable 1 is %s", v.Name)
			} else {
				v.Expression = "['" + w.whoAmI(t) + "']"
			}
		})
	}
	harness.Eventually(t, harness.Soon, "clusterctl may write records", func() bool { return may() == nil })
}

// whoAmI returns the user of an administrator's requests.
func (w *world) whoAmI(t *testing.T) string {
	t.Helper()
	review := &authenticationv1.SelfSubjectReview{}
	if err := w.client.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	return review.Status.UserInfo.Username
}

const blockMove = "clusterctl.cluster.x-k8s.io/block-move"

// arrive has a cluster be at another management cluster, with the status that Cluster API finds
// out.
func (c *cluster) arrive(t *testing.T, at *world) {
	t.Helper()
	status := c.object.Status
	c.world = at
	updateStatus(t, c.client, c.object, func(object *clusterv1.Cluster) { object.Status = status })
	updateStatus(t, c.client, c.infra, func(infra *unstructured.Unstructured) {
		infra.Object["status"] = map[string]any{"initialization": map[string]any{"provisioned": true}}
	})
}

// arrive does the same for its machine.
func (m *machine) arrive(t *testing.T) {
	t.Helper()
	infra, config, object := m.infra.Object["status"], m.config.Status, m.object.Status
	updateStatus(t, m.client, m.infra, func(o *unstructured.Unstructured) { o.Object["status"] = infra })
	updateStatus(t, m.client, m.config, func(o *bootstrapv1.KubeadmConfig) { o.Status = config })
	updateStatus(t, m.client, m.object, func(o *clusterv1.Machine) { o.Status = object })
}
