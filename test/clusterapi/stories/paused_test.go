// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// pausedFor is how long the test checks that a request stays unanswered. An unpaused Cluster is
// served within a second.
const pausedFor = 10 * time.Second

// A Cluster and its Machine are paused while the Machine's host boots. The host sends a request.
// Our controller writes nothing in that Cluster, not even the reason why the request waits. kubectl
// attest check shows the reason. Then the Cluster is unpaused: the request now says that its
// Machine is paused. Then the Machine is unpaused, and joins without further action.
func TestPausedDuringJoin(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")
	d := c.newMachineDeployment(t, "paused", nil)
	d.scale(t, 1)
	name := d.awaitOne(t, "")
	m := &clusterv1.Machine{}
	harness.Eventually(t, joinLimit, "Cluster API has copied the provider ID, and the infrastructure is provisioned", func() bool {
		harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, m))
		return m.Spec.ProviderID != "" && ptr.Deref(m.Status.Initialization.InfrastructureProvisioned, false)
	})

	c.pause(t, true)
	c.annotateMachine(t, name, func(m *clusterv1.Machine) {
		metav1.SetMetaDataAnnotation(&m.ObjectMeta, clusterv1.PausedAnnotation, "")
	})
	mark, err := c.workload.AuditMark()
	harness.Must(t, err)
	c.awaitRequest(t, name, func(hellos, _ []certificatesv1.CertificateSigningRequest) bool { return len(hellos) > 0 })
	harness.Never(t, pausedFor, "the request is answered, or there is another request", func() bool {
		hellos, others := harness.Requests(t, c.workload, name)
		return len(others) > 0 || len(hellos) != 1 || len(hellos[0].Status.Conditions) > 0 ||
			hellos[0].Annotations[attestation.AnnotationChallenge]+hellos[0].Annotations[attestation.AnnotationWaiting] != ""
	})
	c.mustNotHaveJoined(t, name)
	c.mustNotHaveWritten(t, mark)
	if out := c.attest(t, "check"); !strings.Contains(out, "is paused") {
		t.Errorf("kubectl attest check does not say that the Cluster is paused:\n%s", out)
	}
	if out := c.attest(t, "pending"); !strings.Contains(out, name) {
		t.Errorf("kubectl attest pending does not name the request:\n%s", out)
	}

	c.pause(t, false)
	reason := c.awaitWaiting(t, name, verifier.ReasonMachineNotReady)
	if out := c.attest(t, "pending"); !strings.Contains(out, string(verifier.ReasonMachineNotReady)) {
		t.Errorf("kubectl attest pending does not show %s:\n%s", verifier.ReasonMachineNotReady, out)
	}
	if !strings.Contains(reason, "is paused") {
		t.Errorf("the request does not say that the Machine is paused: %q", reason)
	}
	c.mustNotHaveJoined(t, name)

	c.annotateMachine(t, name, func(m *clusterv1.Machine) { delete(m.Annotations, clusterv1.PausedAnnotation) })
	if joined := d.awaitRunning(t, 1); joined[0].Name != name {
		t.Errorf("Machine %s joined instead of %s", joined[0].Name, name)
	}
	// This shows that written can see the controller's writes at all.
	if c.written(t, mark) == 0 {
		t.Error("the audit log has none of the controller's writes for the join")
	}
}

// pause sets the Cluster's spec.paused.
func (c *cluster) pause(t *testing.T, paused bool) {
	t.Helper()
	before := c.object.DeepCopy()
	c.object.Spec.Paused = &paused
	harness.Must(t, c.client.Patch(t.Context(), c.object, client.MergeFrom(before)))
}

// annotateMachine changes a Machine's annotations.
func (c *cluster) annotateMachine(t *testing.T, name string, change func(*clusterv1.Machine)) {
	t.Helper()
	m := &clusterv1.Machine{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: name}, m))
	before := m.DeepCopy()
	change(m)
	harness.Must(t, c.client.Patch(t.Context(), m, client.MergeFrom(before)))
}

// written counts the controller's writes in the workload cluster since the mark.
func (c *cluster) written(t *testing.T, mark testbed.AuditMark) (count int) {
	t.Helper()
	events, err := c.workload.AuditSince(mark)
	harness.Must(t, err)
	for _, e := range events {
		ours := e.ImpersonatedUser == "system:serviceaccount:"+controllerprocess.Namespace+":"+controllerprocess.Account
		switch e.Verb {
		case "create", "update", "patch", "delete", "deletecollection":
			if ours && e.Resource != "selfsubjectaccessreviews" && e.Resource != "selfsubjectreviews" {
				t.Logf("%s: %s %s", e.Time.Format(time.TimeOnly), e.Verb, e.RequestURI)
				count++
			}
		}
	}
	return count
}

func (c *cluster) mustNotHaveWritten(t *testing.T, mark testbed.AuditMark) {
	t.Helper()
	if n := c.written(t, mark); n != 0 {
		t.Errorf("the controller wrote %d times into a paused Cluster", n)
	}
}

// attest runs kubectl attest as an administrator of the management cluster. It returns stdout and
// stderr, for any exit code.
func (c *cluster) attest(t *testing.T, args ...string) string {
	t.Helper()
	admin := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, c.WriteKubeconfig(admin, c.AdminUser()))
	var out bytes.Buffer
	attestctl.Program{Version: "v0.0.0-test"}.Run(t.Context(), attestctl.Process{
		Args:  append(args, "--kubeconfig="+admin, "--namespace="+c.namespace, "--workload-cluster="+c.name),
		Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out, Getenv: os.Getenv,
	})
	return out.String()
}
