// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// announce puts an announcement into the cluster until the test ends, which nodes may read.
func announce(t *testing.T, cluster *testbed.ControlPlane, entry string) {
	t.Helper()
	const namespace, name = attestation.AnnouncementNamespace, attestation.AnnouncementName
	ctx, core, rbac := t.Context(), cluster.Client().CoreV1(), cluster.Client().RbacV1()
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace}
	_, err := core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	_, roleErr := rbac.Roles(namespace).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{name}, Verbs: []string{"get"},
	}}}, metav1.CreateOptions{})
	_, bindingErr := rbac.RoleBindings(namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{{Kind: "Group", APIGroup: rbacv1.GroupName, Name: "system:nodes"}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
	}, metav1.CreateOptions{})
	_, err = core.ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{attestation.AnnouncementKey: entry}}, metav1.CreateOptions{})
	t.Cleanup(func() {
		ctx, options := context.WithoutCancel(ctx), metav1.DeleteOptions{}
		if err := errors.Join(core.ConfigMaps(namespace).Delete(ctx, name, options), rbac.RoleBindings(namespace).Delete(ctx, name, options), rbac.Roles(namespace).Delete(ctx, name, options)); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, errors.Join(roleErr, bindingErr, err))
	// The authorizer gets the Role by a watch.
	user := testbed.CertificateUser(issueNode(t, cluster, "reader"))
	kubeconfig := t.TempDir() + "/kubeconfig"
	harness.Must(t, cluster.WriteKubeconfig(kubeconfig, user))
	harness.Eventually(t, harness.Soon, "nodes may read it", func() bool {
		_, err := cluster.RunKubectl(ctx, kubeconfig, "get", "configmap", name, "--namespace="+namespace)
		return err == nil
	})
}

func issueNode(t *testing.T, cluster *testbed.ControlPlane, name string) testbed.KeyPair {
	t.Helper()
	pair, err := cluster.ClientCA().IssueClient("system:node:"+name, []string{"system:nodes"}, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	return pair
}

func entryOf(t *testing.T, renewals ...attestation.Renewal) string {
	t.Helper()
	data, err := attestation.Announcement{Renewals: renewals}.Marshal()
	harness.Must(t, err)
	return string(data)
}

// installUnchecked installs a certificate whose renewal is not due, and that is old enough for a
// check.
func (n *node) installUnchecked(t *testing.T) *cache.Pair {
	t.Helper()
	return n.install(t, time.Now().Add(-time.Hour), time.Now().Add(10*time.Hour))
}

// register creates the Node.
func (n *node) register(t *testing.T) {
	t.Helper()
	nodes := n.Client().CoreV1().Nodes()
	_, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}, metav1.CreateOptions{})
	harness.Must(t, err)
	t.Cleanup(func() {
		if err := nodes.Delete(context.WithoutCancel(t.Context()), n.name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// reports returns the certificate that the Node's annotation names.
func (n *node) reports(t *testing.T) string {
	t.Helper()
	object, err := n.Client().CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
	harness.Must(t, err)
	return object.Annotations[attestation.AnnotationCertificate]
}

// checked waits for the last check, and returns its result.
func (n *node) checked(t *testing.T) cache.Announcement {
	t.Helper()
	harness.Eventually(t, harness.Soon, "a check has ended", func() bool {
		state, err := n.dir.State()
		return err == nil && state.Announcement != nil && !state.Announcement.UnderWay
	})
	harness.WorkerEnds(t, n.dir)
	state, err := n.dir.State()
	harness.Must(t, err)
	return *state.Announcement
}

// expiresIn returns the time until client-go runs the plugin again.
func expiresIn(r harness.Result) time.Duration {
	return time.Until(r.Credential.Status.ExpirationTimestamp.Time)
}

// An announced renewal reaches a node whose certificate is valid for hours. The node's next run
// finds the announcement, and the run after that prints the new certificate. Then the Node names
// the new certificate.
func TestAnnouncedRenewal(t *testing.T) {
	for name, renewal := range map[string]attestation.Renewal{
		"for all":       {All: true},
		"for this node": {Nodes: []string{"another", "e2e"}},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			n := renewingNode(t)
			n.register(t)
			old := n.installUnchecked(t)
			renewal.Name, renewal.IssuedBefore, renewal.Start = "rotate", time.Now(), time.Now()
			if len(renewal.Nodes) > 0 {
				renewal.Nodes[1] = n.name
			}
			announce(t, n.ControlPlane, entryOf(t, renewal))
			r := n.run(t)
			if r.Code != 0 || !r.Leaf.Equal(old.Leaf) || r.Took > time.Second+slack || expiresIn(r) > 31*time.Second {
				t.Fatalf("exit code %d after %s, client-go asks again in %s: %s", r.Code, r.Took, expiresIn(r), r.Stderr)
			}
			harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
				r = n.run(t)
				return !r.Leaf.Equal(old.Leaf)
			})
			if got := n.whoami(t, r); got != "system:node:"+n.name {
				t.Errorf("the API server takes it for %q", got)
			}
			renewed, err := n.dir.Current()
			harness.Must(t, err)
			harness.WorkerEnds(t, n.dir)
			harness.Eventually(t, harness.Soon, "the Node names the new certificate", func() bool {
				n.run(t)
				return n.reports(t) == renewed.Fingerprint()
			})
			// The renewal stays announced, and selects this certificate, which is backdated.
			found := n.checked(t)
			if found.Renewal != nil || len(found.Done) != 1 || found.Problem != "" || found.ReportProblem != "" {
				t.Errorf("found %+v", found)
			}
			if got := n.requests(t); len(got) != 1 || got[0].Spec.Username != "system:node:"+n.name {
				t.Errorf("%d requests were filed", len(got))
			}
			if r = n.run(t); expiresIn(r) < time.Minute || expiresIn(r) > 15*time.Minute {
				t.Errorf("client-go asks again in %s", expiresIn(r))
			}
		})
	}
}

// A node renews at a random time of the spread, and client-go runs the plugin again by then.
func TestAnnouncedRenewalIsSpread(t *testing.T) {
	n := renewingNode(t)
	old := n.installUnchecked(t)
	announcement := attestation.Announcement{Renewals: []attestation.Renewal{
		{Name: "rotate", IssuedBefore: time.Now(), All: true, Start: time.Now().Add(35 * time.Second), SpreadSeconds: 10},
		{Name: "for others", IssuedBefore: time.Now(), Nodes: []string{"another"}, Start: time.Now()},
	}}
	announce(t, n.ControlPlane, entryOf(t, announcement.Renewals...))
	_, due, ok := announcement.Due(n.name, old.Leaf.NotBefore, nil)
	if !ok {
		t.Fatal("it does not select the node")
	}
	n.run(t)
	if found := n.checked(t); found.Renewal == nil || found.Renewal.Name != "rotate" || found.Renewal.DueAt.Sub(due).Abs() > time.Second {
		t.Fatalf("found %+v, want %s", found.Renewal, due)
	}
	r := n.run(t)
	if until := r.Credential.Status.ExpirationTimestamp.Time; until.After(due) || !r.Leaf.Equal(old.Leaf) {
		t.Errorf("client-go asks again at %s, after %s", until, due)
	}
	time.Sleep(time.Until(due.Add(-2 * time.Second)))
	if n.run(t); len(n.requests(t)) > 0 {
		t.Error("it renewed too early")
	}
	time.Sleep(time.Until(due))
	harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool { return !n.run(t).Leaf.Equal(old.Leaf) })
}

// No run waits for the check or fails because of it, whatever its result is.
func TestCheckThatFails(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, n *node)
		problem string // empty: none
		exists  bool
	}{
		"no ConfigMap": {func(*testing.T, *node) {}, "", false},
		"no right to read it": {func(t *testing.T, n *node) {
			announce(t, n.ControlPlane, entryOf(t, attestation.Renewal{Name: "x", IssuedBefore: time.Now(), Start: time.Now(), All: true}))
			bindings := n.Client().RbacV1().RoleBindings(attestation.AnnouncementNamespace)
			binding, err := bindings.Get(t.Context(), attestation.AnnouncementName, metav1.GetOptions{})
			harness.Must(t, err)
			binding.Subjects = nil
			_, err = bindings.Update(t.Context(), binding, metav1.UpdateOptions{})
			harness.Must(t, err)
			time.Sleep(2 * time.Second) // the authorizer learns of it by a watch
		}, "", false},
		"malformed":          {func(t *testing.T, n *node) { announce(t, n.ControlPlane, `{"version":1,"renewals":[{}]}`) }, "without issuedBefore", false},
		"of another version": {func(t *testing.T, n *node) { announce(t, n.ControlPlane, `{"version":2}`) }, "version 2 is unknown", false},
		"oversized": {func(t *testing.T, n *node) {
			announce(t, n.ControlPlane, strings.Repeat(" ", attestation.MaxAnnouncement+1))
		}, "longer than", false},
		"black hole": {func(t *testing.T, n *node) { harness.Must(t, n.behindProxy(t).SetMode(testbed.BlackHole)) }, "no answer in time", false},
		"refused":    {func(t *testing.T, n *node) { harness.Must(t, n.behindProxy(t).SetMode(testbed.Refuse)) }, "", false},
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			n := renewingNode(t)
			old := n.installUnchecked(t)
			c.prepare(t, n)
			for i := range 5 {
				r := n.run(t)
				for range 2 { // a busy machine is so once; what waits does each time
					if r.Took > time.Second {
						r = n.run(t)
					}
				}
				if r.Code != 0 || !r.Leaf.Equal(old.Leaf) || r.Stderr != "" || r.Took > time.Second {
					t.Fatalf("run %d: exit code %d after %s: %s", i, r.Code, r.Took, r.Stderr)
				}
			}
			found := n.checked(t)
			if !strings.Contains(found.Problem, c.problem) || c.problem == "" && name != "refused" && found.Problem != "" || name == "refused" && found.Problem == "" || found.Exists != c.exists {
				t.Errorf("found %+v", found)
			}
			state, err := n.dir.State()
			if err != nil || state.Last != nil || state.Failures != 0 || !state.NextAttempt.IsZero() || len(n.requests(t)) != 0 {
				t.Errorf("it counts as a worker: %+v, %v", state, err)
			}
			if r := n.run(t); expiresIn(r) < time.Minute || expiresIn(r) > 15*time.Minute {
				t.Errorf("client-go asks again in %s", expiresIn(r))
			}
		})
	}
}

// If a worker is killed while the check hangs, no state is lost, and there is no back-off.
func TestWorkerIsKilledInACheck(t *testing.T) {
	n := renewingNode(t)
	old := n.installUnchecked(t)
	proxy := n.behindProxy(t)
	harness.Must(t, proxy.SetMode(testbed.BlackHole))
	n.run(t)
	harness.Eventually(t, harness.Soon, "the check is under way", func() bool {
		state, err := n.dir.State()
		return err == nil && state.Announcement != nil && state.Announcement.UnderWay
	})
	harness.KillWorker(t, n.dir)
	harness.Must(t, proxy.SetMode(testbed.Pass))
	if r := n.run(t); r.Code != 0 || !r.Leaf.Equal(old.Leaf) || expiresIn(r) > 31*time.Second {
		t.Errorf("exit code %d, client-go asks again in %s: %s", r.Code, expiresIn(r), r.Stderr)
	}
	due := n.installDue(t)
	harness.Eventually(t, harness.Soon, "the new certificate is printed", func() bool {
		r := n.run(t)
		return !r.Leaf.Equal(due.Leaf)
	})
	if state, err := n.dir.State(); err != nil || state.Failures != 0 {
		t.Errorf("%+v, %v", state, err)
	}
}

// Killed before a step of an announced renewal: the node renews once, and the Node names the new
// certificate.
func TestKilledInAnAnnouncedRenewal(t *testing.T) {
	for _, step := range []enrol.Step{enrol.StepAnnouncement, enrol.StepFile, enrol.StepInstall, "record", "forget", enrol.StepReport} {
		t.Run(string(step), func(t *testing.T) {
			n := renewingNode(t)
			n.register(t)
			old := n.installUnchecked(t)
			announce(t, n.ControlPlane, entryOf(t, attestation.Renewal{Name: "rotate", IssuedBefore: time.Now(), Start: time.Now(), All: true}))
			trap := filepath.Join(t.TempDir(), "kill")
			harness.WriteFile(t, trap, []byte(step))
			n.env = append(n.env, "TEST_KILL_FILE="+trap)
			// the time after which a killed check is repeated
			n.args = append(n.args, "--check-interval=10s")
			harness.Eventually(t, time.Minute, "the Node names the new certificate", func() bool {
				if r := n.run(t); r.Code != 0 {
					t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
				}
				held, err := n.dir.Current()
				harness.Must(t, err)
				return !exists(trap) && held.Fingerprint() != old.Fingerprint() && n.reports(t) == held.Fingerprint()
			})
			harness.WorkerEnds(t, n.dir)
			if got := len(n.requests(t)); got != 1 {
				t.Errorf("%d requests were filed", got)
			}
			if state, err := n.dir.State(); err != nil || state.Failures > 1 || len(state.Announcement.Done) != 1 {
				t.Errorf("%+v, %v", state, err)
			}
		})
	}
}

// refuseWrites makes the API server refuse writes with a certificate until the test ends, as the
// controller does.
func (n *node) refuseWrites(t *testing.T, pair *cache.Pair, message string) {
	t.Helper()
	const name = "node-attestation-e2e"
	fail, all := admissionv1.Fail, []string{"*"}
	policies, bindings := n.Client().AdmissionregistrationV1().ValidatingAdmissionPolicies(), n.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	reason := metav1.StatusReasonForbidden
	_, err := policies.Create(t.Context(), &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: &fail,
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Update, admissionv1.Delete, admissionv1.Connect},
			Rule:       admissionv1.Rule{APIGroups: all, APIVersions: all, Resources: []string{"*/*"}},
		}}}},
		MatchConditions: []admissionv1.MatchCondition{{Name: "revoked", Expression: `'authentication.kubernetes.io/credential-id' in request.userInfo.extra &&
			request.userInfo.extra['authentication.kubernetes.io/credential-id'].exists(i, i in ['X509SHA256=` + pair.Fingerprint() + `'])`}},
		Validations: []admissionv1.Validation{{Expression: "false", Message: message, Reason: &reason}},
	}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = bindings.Create(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}, metav1.CreateOptions{})
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(bindings.Delete(ctx, name, metav1.DeleteOptions{}), policies.Delete(ctx, name, metav1.DeleteOptions{})); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, err)
}

// writes returns doctor's result for writes with the current certificate.
func (n *node) writes(t *testing.T) checkup.Result {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), n.plugin, append([]string{"doctor", "--output=json", "--kubelet-kubeconfig=/nonexistent"}, n.flags()...)...).Output()
	var report doctor.Report
	if json.Unmarshal(out, &report) != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, check := range report.Checks {
		if check.Name == "certificate-writes" {
			return check
		}
	}
	t.Fatalf("there is no such check: %s", out)
	return checkup.Result{}
}

// The API server's refusal says that the certificate is revoked, or the machine suspended. doctor
// sees it by a dry run, and the worker by its request. The dry run changes nothing.
func TestRevokedAndSuspended(t *testing.T) {
	for message, want := range map[string]struct {
		reason reason.Reason
		says   string
	}{
		attestation.MessageRevoked:   {reason.CertificateRevoked, "the certificate was revoked"},
		attestation.MessageSuspended: {reason.MachineSuspended, "this machine is suspended"},
	} {
		t.Run(string(want.reason), func(t *testing.T) {
			n := renewingNode(t)
			pair := n.installDue(t)
			if got := n.writes(t); got.Status != checkup.OK {
				t.Errorf("without a Node: %+v", got)
			}
			if _, err := n.Client().CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				t.Errorf("the dry run created the Node: %v", err)
			}
			n.register(t)
			before, err := n.Client().CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
			harness.Must(t, err)
			if got := n.writes(t); got.Status != checkup.OK {
				t.Errorf("%+v", got)
			}
			n.refuseWrites(t, pair, message)
			var got checkup.Result
			harness.Eventually(t, harness.Soon, "writes are refused", func() bool {
				got = n.writes(t)
				return got.Status == checkup.Failure
			})
			if !strings.Contains(got.Message, want.says) {
				t.Errorf("%+v", got)
			}
			after, err := n.Client().CoreV1().Nodes().Get(t.Context(), n.name, metav1.GetOptions{})
			if err != nil || after.ResourceVersion != before.ResourceVersion {
				t.Errorf("the dry run has changed the Node: %v", err)
			}
			r := n.run(t)
			if r.Code != 0 || !bytes.Equal(r.Leaf.Raw, pair.Leaf.Raw) {
				t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
			}
			harness.WorkerEnds(t, n.dir)
			state, err := n.dir.State()
			if err != nil || state.Last == nil || state.Last.Reason != string(want.reason) || time.Until(state.NextAttempt) < 20*time.Second {
				t.Errorf("%+v, %v", state.Last, err)
			}
			if r = n.run(t); !strings.Contains(r.Stderr, message) || len(n.requests(t)) != 0 {
				t.Errorf("stderr: %s", r.Stderr)
			}
		})
	}
}

// client-go keeps its connection while the checks find nothing, since it gets the same certificate
// and key. No request waits for a check.
func TestChecksCloseNoConnection(t *testing.T) {
	t.Parallel()
	n := renewingNode(t)
	n.installUnchecked(t)
	proxy, err := testbed.NewProxy(n.ServerURL())
	harness.Must(t, err)
	t.Cleanup(func() { _ = proxy.Close() })
	n.args = append(n.args, "--check-interval=10s")
	n.server = proxy.URL()
	kubeconfig := n.execKubeconfig(t, "client.authentication.k8s.io/v1")
	out, err := runClient(t, n, kubeconfig, "100ms", "35s")
	harness.Must(t, err)
	requests := 0
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if fields[0] != "ok" {
			t.Fatalf("request %d: %s", requests, line)
		}
		took, err := time.ParseDuration(fields[1] + "ms")
		if err != nil || took > slack {
			t.Errorf("request %d took %s", requests, took)
		}
		requests++
	}
	checks := bytes.Count(n.read(t, cache.LogFile), []byte("checked for announced renewals"))
	if connections := proxy.Stats().Accepted; checks < 3 || requests < 100 || connections != 1+checks {
		t.Errorf("%d requests, %d checks, %d connections", requests, checks, connections)
	}
}
