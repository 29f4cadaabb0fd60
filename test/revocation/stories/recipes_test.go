// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// operatorsShell is the environment of an administrator who has kubectl and kubectl-attest.
func operatorsShell(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	admin := filepath.Join(dir, "kubeconfig")
	harness.Must(t, compile.Program(t.Context(), module, filepath.Join(dir, "kubectl-attest"), "./cmd/kubectl-attest"))
	harness.Must(t, shared.WriteKubeconfig(admin, shared.AdminUser()))
	return []string{"PATH=" + dir + ":" + filepath.Dir(shared.Kubectl()) + ":" + os.Getenv("PATH"), "KUBECONFIG=" + admin, "HOME=" + dir}
}

// isReady has the kubelet of a node report that it is ready.
func (n *node) isReady(t *testing.T) {
	t.Helper()
	patch := `{"status":{"conditions":[{"type":"Ready","status":"True","reason":"Test","message":"","lastHeartbeatTime":null,"lastTransitionTime":null}]}}`
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}
	if err := n.client(t).Status().Patch(t.Context(), object, client.RawPatch("application/strategic-merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// An operator follows the recipes of docs/revocation.md, with two nodes whose plugins are played.
func TestRecipes(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "recipe", 2)
	victim, other := nodes[0], nodes[1]
	for _, n := range nodes {
		n.joins(t)
		n.isReady(t)
	}
	page, err := harness.ReadPage(filepath.Join(module, "docs", "revocation.md"))
	harness.Must(t, err)
	shell := operatorsShell(t)
	t.Cleanup(func() { // nodes of other tests never renew, so that the rotation would go on
		harness.Must(t, shared.client.DeleteAllOf(context.WithoutCancel(t.Context()), &v1alpha1.NodeRevocation{}, client.InNamespace(controllerprocess.Namespace)))
	})
	of := map[string]string{"NODE": victim.Name, "NAMESPACE": controllerprocess.Namespace, "SPREAD": "1s"}
	t.Run("key leaked", func(t *testing.T) { keyLeaked(t, page.Recipe(t, "Key leaked", of, shell...), victim) })
	t.Run("rotation", func(t *testing.T) { rotation(t, page.Recipe(t, "Rotation", of, shell...), nodes) })
	t.Run("machine stolen", func(t *testing.T) { machineStolen(t, page.Recipe(t, "Machine stolen", of, shell...), victim) })
	other.credential().MustWrite(t)
	if !t.Failed() {
		page.AllAreTried(t)
	}
}

func keyLeaked(t *testing.T, r *harness.Recipe, victim *node) {
	stolen := victim.credential()
	time.Sleep(time.Second) // what was issued in the same second does not count as issued before
	r.Step("--dry-run")
	stolen.MustWrite(t)
	back := make(chan error, 1)
	go func() { // what the plugin does
		for stolen.Write(t.Context(), stolen.Client(t)) == nil {
			time.Sleep(50 * time.Millisecond)
		}
		back <- victim.attest(t.Context())
	}()
	r.Step("revoke")
	harness.Must(t, <-back)
	stolen.RefusedWithin(t, 0, attestation.MessageRevoked)
	victim.credential().MustWrite(t)
	if out := r.Step("describe"); !strings.Contains(out, "key leaked") {
		t.Error("the reason is not shown")
	}
}

func rotation(t *testing.T, r *harness.Recipe, nodes []*node) {
	time.Sleep(time.Second)
	r.Step("--dry-run")
	old := nodes[0].credential()
	renewed := make(chan error, 1)
	go func() { renewed <- renewAsAnnounced(t, nodes) }()
	r.Step("rotate")
	harness.Must(t, <-renewed)
	old.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	if out := r.Step("revocations"); !strings.Contains(out, "CA rotation") {
		t.Error("the rotation is not shown")
	}
}

// renewAsAnnounced does what the plugins do.
func renewAsAnnounced(t *testing.T, nodes []*node) error {
	for due := false; !due; time.Sleep(50 * time.Millisecond) {
		_, _, due = nodes[1].announced(t).Due(nodes[1].Name, time.Now().Add(-time.Minute), nil)
	}
	time.Sleep(time.Second) // a request in the same second counts as older
	for _, n := range nodes {
		if err := n.attest(t.Context()); err != nil {
			return err
		}
		certificates := n.record(t).Status.Certificates
		n.uses(t, certificates[len(certificates)-1].SHA256)
	}
	return nil
}

func machineStolen(t *testing.T, r *harness.Recipe, victim *node) {
	if out := r.Step("get nodeattestation"); !strings.Contains(out, "notAfter") || !strings.Contains(out, "fingerprint") {
		t.Error("it is not said which EK it has, and when its certificate ends")
	}
	present := victim.credential()
	r.Step("suspend")
	present.RefusedWithin(t, refusedIn, attestation.MessageSuspended)
	if err := shared.client.Get(t.Context(), client.ObjectKey{Name: victim.Name}, &corev1.Node{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Node is still there: %v", err)
	}
	mustBeDenied(t, victim.Machine)
	if out := r.Step("bootstrap.kubernetes.io/token"); !strings.Contains(out, "bootstrap-token-") {
		t.Error("the token is not listed")
	}
	r.Step("resume")
	present.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	harness.Must(t, victim.attest(t.Context()))
	victim.credential().MustWrite(t)
	left := &v1alpha1.NodeSuspensionList{}
	if err := shared.client.List(t.Context(), left, client.InNamespace(controllerprocess.Namespace)); err != nil || len(left.Items) > 0 {
		t.Errorf("%d suspensions are left, %v", len(left.Items), err)
	}
}
