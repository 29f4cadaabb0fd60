// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"context"
	"os/exec"
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
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// operator runs kubectl attest as an administrator.
type operator struct{ program, kubeconfig string }

func newOperator(t *testing.T) operator {
	t.Helper()
	o := operator{filepath.Join(t.TempDir(), "kubectl-attest"), filepath.Join(t.TempDir(), "kubeconfig")}
	if err := testbed.GoBuild(t.Context(), module, o.program, "./cmd/kubectl-attest"); err != nil {
		t.Fatal(err)
	}
	if err := shared.WriteKubeconfig(o.kubeconfig, shared.AdminUser()); err != nil {
		t.Fatal(err)
	}
	return o
}

// runs executes a command line, and returns what it printed.
func (o operator) runs(t *testing.T, code int, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.program, append(args, "--kubeconfig="+o.kubeconfig)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	t.Logf("kubectl attest %s\n%s", strings.Join(args, " "), out.String())
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Fatalf("exit code %d, not %d: %v", got, code, err)
	}
	return out.String()
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

// An operator handles a stolen key, a rotation and a stolen machine with the commands alone.
func TestCommands(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "commanded", 2)
	victim, other := nodes[0], nodes[1]
	for _, n := range nodes {
		n.joins(t)
		n.isReady(t)
	}
	o := newOperator(t)
	stolen := victim.credential()
	time.Sleep(time.Second) // what was issued in the same second does not count as issued before

	o.runs(t, 0, "revoke", victim.Name, "--reason=key stolen", "--dry-run")
	stolen.MustWrite(t)

	o.runs(t, 0, "revoke", victim.Name, "--reason=key stolen", "--yes", "--wait=false")
	stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	if err := victim.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := o.runs(t, 0, "revocations"); !strings.Contains(out, "key stolen") {
		t.Error("the reason is not shown")
	}

	time.Sleep(time.Second)
	old := victim.credential()
	go func() { // what the plugins do
		for due := false; !due; time.Sleep(50 * time.Millisecond) {
			_, _, due = other.announced(t).Due(other.Name, time.Now().Add(-time.Minute), nil)
		}
		time.Sleep(time.Second) // a request in the same second counts as older
		for _, n := range nodes {
			if err := n.attest(t.Context()); err != nil {
				t.Error(err)
				return
			}
			certificates := n.record(t).Status.Certificates
			n.uses(t, certificates[len(certificates)-1].SHA256)
		}
	}()
	o.runs(t, 0, "rotate", "--all", "--reason=rotation of the CA", "--spread=1s", "--yes", "--timeout=40s")
	old.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	other.credential().MustWrite(t)

	present := victim.credential()
	o.runs(t, 0, "suspend", victim.Name, "--reason=machine stolen", "--evict", "--yes", "--timeout=40s")
	present.RefusedWithin(t, refusedIn, attestation.MessageSuspended)
	if err := shared.client.Get(t.Context(), client.ObjectKey{Name: victim.Name}, &corev1.Node{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Node is still there: %v", err)
	}
	mustBeDenied(t, victim.Machine)
	if out := o.runs(t, 0, "describe", victim.Name); !strings.Contains(out, "machine stolen") {
		t.Error("describe does not say that it is suspended")
	}
	o.runs(t, 0, "resume", victim.Name, "--yes")
	present.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	if err := victim.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := &v1alpha1.NodeSuspensionList{}
	if err := shared.client.List(t.Context(), left, client.InNamespace(controllerprocess.Namespace)); err != nil || len(left.Items) > 0 {
		t.Errorf("%d suspensions are left, %v", len(left.Items), err)
	}
}
