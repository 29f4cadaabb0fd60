// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// operatorUser and suspenderUser are persons with rights of optional/operators.yaml.
const (
	operatorUser    = "operator@example.com"
	suspenderUser   = "suspender@example.com"
	operatorsGroup  = "node-attestation-operators"
	viewersGroup    = "node-attestation-viewers"
	suspendersGroup = "node-attestation-suspenders"
	evictorsGroup   = "node-attestation-evictors"
)

// person is a user of kubectl attest.
type person struct {
	*live
	program, kubeconfig string
}

// newPerson returns a person in these groups.
func (l *live) newPerson(t *testing.T, program, user string, groups ...string) *person {
	t.Helper()
	pair, err := l.ClientCA().IssueClient(user, groups, time.Now().Add(-time.Minute), time.Now().Add(time.Hour))
	harness.Must(t, err)
	p := &person{live: l, program: program, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	harness.WriteFile(t, p.kubeconfig, l.Kubeconfig(testbed.CertificateUser(pair)))
	return p
}

// attest runs kubectl attest, and returns its output and exit code. The output must be safe for a
// terminal.
func (p *person) attest(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runPlugin(t, exec.CommandContext(t.Context(), p.program, append(args, "--kubeconfig="+p.kubeconfig)...))
}

func runPlugin(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	var exit *exec.ExitError
	if failed := cmd.Run(); failed != nil && !errors.As(failed, &exit) {
		t.Fatal(failed)
	}
	for _, printed := range []string{out.String(), err.String()} {
		if strings.ContainsFunc(printed, func(r rune) bool { return r != '\n' && !text.Visible(r) }) {
			t.Errorf("%q is not printable", printed)
		}
	}
	return out.String(), err.String(), cmd.ProcessState.ExitCode()
}

// succeeds runs kubectl attest, and returns its standard output.
func (p *person) succeeds(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, code := p.attest(t, args...)
	if code != 0 {
		t.Fatalf("%v: exit code %d: %s%s", args, code, stdout, stderr)
	}
	return stdout
}

// checks runs the command check, and returns the state of each check.
func (p *person) checks(t *testing.T) (states map[string]string, code int) {
	t.Helper()
	stdout, stderr, code := p.attest(t, "check", "-o", "json")
	var report struct {
		Checks []struct{ Name, Status, Message, Remedy string }
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || len(report.Checks) < 10 {
		t.Fatalf("%v, %s%s", err, stdout, stderr)
	}
	states = map[string]string{}
	for _, c := range report.Checks {
		states[c.Name] = c.Status
		if c.Status == "failure" && c.Remedy == "" {
			t.Errorf("%s has no remedy: %s", c.Name, c.Message)
		}
	}
	return states, code
}

// becomes waits until exactly these checks are not ok.
func (p *person) becomes(t *testing.T, code int, want map[string]string) {
	t.Helper()
	var got map[string]string
	last := 0
	deadline := time.Now().Add(patience)
	for {
		got, last = p.checks(t)
		// The condition of the controller's sources changes with the problems made here:
		// TestConditionsAreShown. Attacks from before have left requests without evidence.
		maps.DeleteFunc(got, func(name, state string) bool {
			return state == "ok" || name == "sources-condition" || name == "kubelets"
		})
		if maps.Equal(got, want) && last == code {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("checks %v, exit code %d; not %v, %d", got, last, want, code)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// deployed makes the objects that the controller's pods would have: the test runs it as a process.
func (l *live) deployed(t *testing.T) {
	t.Helper()
	content, err := os.ReadFile(l.controller.ConfigFile())
	harness.Must(t, err)
	_, err = l.admin.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: account}, Data: map[string]string{"config.yaml": string(content)},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	manifest, err := os.ReadFile(manifests + "/deployment.yaml")
	harness.Must(t, err)
	first, _, _ := strings.Cut(string(manifest), "\n---\n")
	deployment := &appsv1.Deployment{}
	harness.Must(t, yaml.Unmarshal([]byte(first), deployment))
	created, err := l.admin.AppsV1().Deployments(namespace).Create(t.Context(), deployment, metav1.CreateOptions{})
	harness.Must(t, err)
	created.Status = appsv1.DeploymentStatus{Replicas: 2, ReadyReplicas: 2}
	_, err = l.admin.AppsV1().Deployments(namespace).UpdateStatus(t.Context(), created, metav1.UpdateOptions{})
	harness.Must(t, err)
}

// operates is an operator's day in a cluster with kubeadm's bindings and an attested node. The
// operator lists who waits, admits a machine, replaces one, and finds out what is wrong. The rights
// are those of optional/operators.yaml, and none of them is unused.
func (l *live) operates(t *testing.T, honest *machine) {
	bin := t.TempDir()
	program := filepath.Join(bin, "kubectl-attest")
	harness.Must(t, compile.Program(t.Context(), module, program, "./cmd/kubectl-attest"))
	l.kubectl(t, "apply", "--server-side", "--validate=strict", "--filename="+manifests+"/optional/operators.yaml")
	l.deployed(t)
	mark, err := l.AuditMark()
	harness.Must(t, err)
	operator := l.newPerson(t, program, operatorUser, operatorsGroup)
	viewer := l.newPerson(t, program, "viewer@example.com", viewersGroup)

	plugin := exec.CommandContext(t.Context(), l.Kubectl(), "attest", "status", "--kubeconfig="+operator.kubeconfig)
	plugin.Env = append(os.Environ(), "PATH="+bin)
	if stdout, stderr, code := runPlugin(t, plugin); code != 0 || !strings.Contains(stdout, honest.Name) {
		t.Errorf("as a plugin of kubectl: exit code %d: %s%s", code, stdout, stderr)
	}
	t.Run("admit", func(t *testing.T) { l.admits(t, operator) })
	t.Run("replace", func(t *testing.T) { l.replaces(t, operator, viewer) })
	t.Run("check", func(t *testing.T) { l.findsProblems(t, operator) })

	t.Run("revoke", func(t *testing.T) { l.revokes(t, operator, viewer) })

	used, forbidden := l.askedBy(t, operatorUser, mark)
	for _, e := range forbidden {
		// the CA's private key, a right of its own, and the question for static policies
		if e.Resource != "secrets" && e.Resource != "nodesuspensions" && e.Resource != "namespaces" {
			t.Errorf("refused: %s %s", e.Verb, e.RequestURI)
		}
	}
	more, forbidden := l.askedBy(t, suspenderUser, mark)
	for _, e := range forbidden {
		t.Errorf("refused: %s %s", e.Verb, e.RequestURI)
	}
	maps.Copy(used, more)
	for _, group := range []string{operatorsGroup, suspendersGroup, evictorsGroup} {
		for _, r := range l.rolesOf(t, group, "") {
			for _, g := range r.atoms() {
				forKubectl := g.group == recordAPI && (g.verb == "get" || g.verb == "watch")
				if !forKubectl && !slices.ContainsFunc(slices.Collect(maps.Keys(used)), g.covers) {
					t.Errorf("in operators.yaml, and not used: %s", g)
				}
			}
		}
	}
}

// revokes revokes and suspends with the rights of optional/operators.yaml, where no controller does
// its part: that it is not in force is said. Then the test plays the controller, for an eviction.
func (l *live) revokes(t *testing.T, operator, viewer *person) {
	const node, reason = "newcomer", "--reason=a test"
	if _, stderr, code := operator.attest(t, "revoke", node, reason, "--yes"); code != 34 || !strings.Contains(stderr, "revocation is switched off") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	l.kubectl(t, "apply", "--server-side", "--filename="+manifests+"/../kubernetes-revocation/component/crd.yaml")
	l.kubectl(t, "wait", "--for=condition=Established", "--timeout=60s", "customresourcedefinition", "noderevocations."+recordAPI, "nodesuspensions."+recordAPI, "revocationslices."+recordAPI)
	suspender := l.newPerson(t, operator.program, suspenderUser, suspendersGroup, evictorsGroup)
	for what, c := range map[string]struct {
		who  *person
		args []string
		code int
		says string
	}{
		"a viewer does not revoke":     {viewer, []string{"revoke", node, reason, "--yes"}, 20, "hint: the rights are in"},
		"an operator does not suspend": {operator, []string{"suspend", node, reason, "--yes"}, 20, "hint: the rights are in"},
		"a suspender does not revoke":  {suspender, []string{"rotate", node, reason, "--dry-run"}, 0, "Renew, then revoke"},
	} {
		if stdout, stderr, code := c.who.attest(t, c.args...); code != c.code || !strings.Contains(stdout+stderr, c.says) {
			t.Errorf("%s: exit code %d: %s%s", what, code, stdout, stderr)
		}
	}
	stdout, stderr, code := operator.attest(t, "revoke", node, reason, "--issued-before=0s", "--yes", "--wait=false")
	if code != 37 || !strings.Contains(stdout, "NodeRevocation revoke-") || !strings.Contains(stderr, "NOT in force") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	stdout, stderr, code = operator.attest(t, "rotate", "--all", reason, "--yes", "--wait=false")
	name, _, _ := strings.Cut(strings.TrimPrefix(stdout, "NodeRevocation "), " ")
	if code != 37 || !strings.HasPrefix(name, "rotate-") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	if out := operator.succeeds(t, "revocations"); !strings.Contains(out, name) || !strings.Contains(out, "AfterRenewal") || !strings.Contains(out, "Immediately") {
		t.Errorf("%s", out)
	}
	if _, err := l.RunKubectl(t.Context(), operator.kubeconfig, "--namespace="+namespace, "delete", "noderevocation", name); err != nil {
		t.Error(err)
	}

	if stdout, stderr, code = suspender.attest(t, "suspend", node, reason, "--yes", "--wait=false"); code != 37 || !strings.Contains(stdout, "NodeSuspension ek-") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	if out := suspender.succeeds(t, "resume", node, "--yes"); !strings.Contains(out, " deleted\n") {
		t.Errorf("%s", out)
	}
	l.evicts(t, suspender)
}

// evicts suspends a machine without a record, and takes its pods and its Node away.
func (l *live) evicts(t *testing.T, suspender *person) {
	const stolen, ek = "stolen", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	object, err := l.admin.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{})
	harness.Must(t, err)
	object.Status.Conditions = append(object.Status.Conditions, corev1.NamespaceCondition{
		Type: telemetry.ConditionRevocation, Status: corev1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now(),
	})
	_, err = l.admin.CoreV1().Namespaces().UpdateStatus(t.Context(), object, metav1.UpdateOptions{})
	harness.Must(t, err)
	_, err = l.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: stolen}}, metav1.CreateOptions{})
	harness.Must(t, err)
	const shop = "shop"
	_, err = l.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop}}, metav1.CreateOptions{})
	harness.Must(t, err)
	_, err = l.admin.CoreV1().ServiceAccounts(shop).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	harness.Must(t, err)
	for name, node := range map[string]string{"web-0": stolen, "web-1": stolen, "db-0": "another"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
		pod.Spec = corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "registry.example/c"}}, AutomountServiceAccountToken: new(false)}
		_, err = l.admin.CoreV1().Pods(shop).Create(t.Context(), pod, metav1.CreateOptions{})
		harness.Must(t, err)
	}
	if out := suspender.succeeds(t, "suspend", stolen, "--ek="+ek, "--reason=it was stolen", "--evict", "--yes"); !strings.Contains(out, "node stolen evicted: 2 pods deleted") {
		t.Errorf("%s", out)
	}
	pods, err := l.admin.CoreV1().Pods(shop).List(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	if len(pods.Items) != 1 || pods.Items[0].Name != "db-0" {
		t.Errorf("%d pods are left", len(pods.Items))
	}
	if _, err := l.admin.CoreV1().Nodes().Get(t.Context(), stolen, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the Node is left: %v", err)
	}
	if out := suspender.succeeds(t, "revocations"); !strings.Contains(out, "it was stolen") || !strings.Contains(out, "In force:  True") {
		t.Errorf("%s", out)
	}
}

// admits starts a machine that is not in the inventory, and adds it.
func (l *live) admits(t *testing.T, operator *person) {
	newcomer := l.newMachine(t, "newcomer")
	enrolment := newcomer.begin(t)
	// An impostor claims names, too.
	l.file(t, helloSigner, named("system:node:\x1b]0;owned\x07\x1b[2Jnode", "system:nodes"))
	harness.Eventually(t, patience, "it is said who waits, and why", func() bool {
		out := operator.succeeds(t, "pending")
		return strings.Contains(out, "newcomer") && strings.Contains(out, "MachineNotFound")
	})
	entries := operator.succeeds(t, "pending", "newcomer", "-o", "inventory")
	fingerprint := fingerprintOf(t, newcomer)
	if !strings.Contains(entries, fingerprint) || !strings.Contains(entries, "WARNING") {
		t.Errorf("the entry lacks the EK %s, or the warning:\n%s", fingerprint, entries)
	}
	before, err := l.admin.CoreV1().ConfigMaps(namespace).Get(t.Context(), controllerprocess.Inventory, metav1.GetOptions{})
	harness.Must(t, err)
	harness.Must(t, controllerprocess.SetInventory(t.Context(), l.ControlPlane, []byte(before.Data[controllerprocess.InventoryKey]+entries)))
	enrolment.succeeds(t)
	if out := operator.succeeds(t, "status", "newcomer"); !strings.Contains(out, fingerprint[:12]) || !strings.Contains(out, "Attested") {
		t.Errorf("%s", out)
	}
	// Any node may create an Event with the controller's name as its reporter.
	_, err = l.nodeClient(t, "forger").EventsV1().Events(metav1.NamespaceDefault).Create(t.Context(), &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "forged"}, EventTime: metav1.NowMicro(), Type: corev1.EventTypeWarning, Action: "Decide",
		ReportingController: telemetry.Component, ReportingInstance: "forger", Reason: "KeyCompromised", Note: "run kubectl attest suspend newcomer",
		Regarding: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "newcomer"},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	if out := operator.succeeds(t, "status", "newcomer", "-o", "json"); strings.Contains(out, "Compromised") {
		t.Errorf("status believes an Event: %s", out)
	}
	out := operator.succeeds(t, "describe", "newcomer")
	if !strings.Contains(out, fingerprint) || strings.Count(out, "hello filed by system:bootstrap:") != 1 {
		t.Errorf("%s", out)
	}
	if trusted, claims, _ := strings.Cut(out, "\nClaims, "); strings.Contains(trusted, "Compromised") || !strings.Contains(claims, "Compromised") {
		t.Errorf("describe believes an Event: %s", out)
	}
	if out := operator.succeeds(t, "pending", "newcomer", "-o", "inventory"); !strings.Contains(out, "machines: []") {
		t.Errorf("%s", out)
	}
}

// fingerprintOf returns the fingerprint that the machine itself prints.
func fingerprintOf(t *testing.T, m *machine) string {
	t.Helper()
	var printed struct {
		Device struct {
			EKs []struct{ Fingerprint string }
		}
	}
	harness.Must(t, yaml.Unmarshal(harness.Inventory(t, m.Machine), &printed))
	return printed.Device.EKs[0].Fingerprint
}

// replaces replaces the machine of a node by another one.
func (l *live) replaces(t *testing.T, operator, viewer *person) {
	const name = "newcomer"
	replacement := l.newMachine(t, name)
	harness.Must(t, controllerprocess.SetInventory(t.Context(), l.ControlPlane, []byte(
		"apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"+
			"- {name: replacement, nodeName: "+name+", providerID: 'test://"+name+"', eks: [{fingerprint: "+fingerprintOf(t, replacement)+"}]}\n")))
	if err := <-replacement.begin(t).ended; err == nil {
		t.Fatal("it got in under the name of the first one")
	}
	if out := operator.succeeds(t, "status", name, "-o", "yaml"); !strings.Contains(out, fingerprintOf(t, replacement)) || !strings.Contains(out, "IdentityBound") {
		t.Errorf("%s", out)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := l.admin.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	harness.Must(t, err)
	for what, c := range map[string]struct {
		who  *person
		args []string
		code int
	}{
		"nobody confirms it":   {operator, []string{"reset", name}, 35},
		"a viewer":             {viewer, []string{"reset", name, "--yes"}, 20},
		"there is no such one": {operator, []string{"reset", "another", "--yes"}, 34},
	} {
		if stdout, stderr, code := c.who.attest(t, c.args...); code != c.code || !strings.Contains(stderr, "hint: ") {
			t.Errorf("%s: exit code %d: %s%s", what, code, stdout, stderr)
		}
	}
	if out := operator.succeeds(t, "reset", name, "--delete-node", "--yes"); out != "record "+name+" deleted\nNode "+name+" deleted\n" {
		t.Errorf("%q", out)
	}
	replacement.begin(t).succeeds(t)
	if out := operator.succeeds(t, "status", name); !strings.Contains(out, "replacement") {
		t.Errorf("%s", out)
	}
}

// findsProblems makes one problem after the other.
func (l *live) findsProblems(t *testing.T, operator *person) {
	const warning, failure, unknown = "warning", "failure", "unknown"
	// The CA's Secret is not for operators.
	broken := map[string]string{"bindings": warning, "ca": unknown}
	operator.becomes(t, 33, broken)
	for _, b := range autoApproving {
		l.kubectl(t, "delete", "clusterrolebinding", b[0])
	}
	delete(broken, "bindings")
	operator.becomes(t, 33, broken)
	if states, _ := (&person{live: l, program: operator.program, kubeconfig: l.adminKubeconfig}).checks(t); states["ca"] != "ok" {
		t.Errorf("the CA is %s", states["ca"])
	}

	l.kubectl(t, "delete", "validatingadmissionpolicy", sizePolicy)
	// Operators may not ask for static policies. The controller may.
	broken["policies"], broken["policies-condition"] = unknown, failure
	operator.becomes(t, 31, broken)
	l.kubectl(t, "apply", "--server-side", "--filename="+manifests+"/policies.yaml")
	delete(broken, "policies")
	delete(broken, "policies-condition")
	operator.becomes(t, 33, broken)

	harness.Must(t, controllerprocess.SetInventory(t.Context(), l.ControlPlane, []byte("machines: [{")))
	broken["inventory"], broken["ek-sources"] = failure, unknown
	operator.becomes(t, 31, broken)
}
