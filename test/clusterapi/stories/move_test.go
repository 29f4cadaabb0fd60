// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A user moves a Cluster to another management cluster in the middle of a rollout, and later back.
// The user runs the commands of the guide. clusterctl refuses to move while a Machine has no Node.
// While the Cluster is paused, a renewal waits. The target approves the renewal by the record that
// clusterctl moved, and the rollout completes there. After the move back the user adds a Machine.
// No machine joins or boots twice.
func TestMove(t *testing.T) {
	full(t)
	t.Parallel()
	target := newTarget(t)
	here := newStory(t, nil)
	c := here.newCluster(t, "one")
	d := c.newMachineDeployment(t, "one-workers", nil)
	d.scale(t, 2)
	old := d.awaitRunning(t, 2)
	o := newOperator(t, here, target)
	o.must(t, target, o.install())
	there := target.newStory(t, here.namespace, nil)

	// A rollout begins, and its first Machine has no Node yet.
	boot := d.hosts.delayBoot(t, d.object.Name)
	d.rollOut(t, func(template *bootstrapv1.KubeadmConfigTemplate) {
		template.Spec.Template.Spec.PreKubeadmCommands = append(template.Spec.Template.Spec.PreKubeadmCommands, "touch /etc/rolled-out")
	})
	first := d.awaitMachine(t, old)
	before := c.currentCluster(t)
	out, err := o.run(t, here.bed, "clusterctl move --namespace=fleet --to-kubeconfig=target.kubeconfig")
	if err == nil || !strings.Contains(out, here.namespace+"/"+first.Name+" is still provisioning the node") {
		t.Fatalf("clusterctl moved a Machine without a Node, or refused for another reason: %v\n%s", err, out)
	}
	t.Logf("clusterctl refuses:\n%s", out)
	if after := c.currentCluster(t); ptr.Deref(after.Spec.Paused, false) || after.UID != before.UID || after.Generation != before.Generation {
		t.Errorf("clusterctl refused, but it changed the Cluster: %+v", after)
	}
	if err := target.client.Get(t.Context(), client.ObjectKey{Name: here.namespace}, &corev1.Namespace{}); !apierrors.IsNotFound(err) {
		t.Errorf("clusterctl refused, but the namespace exists in the target, or cannot be read: %v", err)
	}

	// The user pauses the MachineDeployment, and its new Machine joins. Now each has a Node.
	move := o.block(t, "the move")
	o.must(t, here.bed, move[0])
	boot()
	o.must(t, here.bed, move[1])
	moved := d.awaitRunning(t, 3)
	started := d.startedMachines(t, moved)

	// The annotation block-move on the MetalCluster makes clusterctl wait after it has paused the
	// Cluster. No request is decided in that time.
	o.must(t, target, o.overlay(t))
	records, identity := here.recordsByName(t), c.identity(t)
	served := here.logSize(t)
	infra := &infrav1.MetalCluster{ObjectMeta: c.meta(c.name)}
	annotate(t, here.client, infra, clusterctlv1.BlockMoveAnnotation, ptr.To("true"))
	began := time.Now()
	ended := make(chan error, 1)
	go func() {
		out, err := o.run(t, here.bed, move[2])
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
		ended <- err
	}()
	harness.Eventually(t, time.Minute, "clusterctl has paused the Cluster", func() bool { return ptr.Deref(c.currentCluster(t).Spec.Paused, false) })
	harness.Eventually(t, harness.Soon, "the controller no longer serves the Cluster", func() bool {
		return strings.Contains(here.logFrom(t, served), "no longer served")
	})
	served = here.logSize(t)
	d.makeRenewalDue(t, first)
	harness.Eventually(t, joinLimit, "a machine requests its renewal", func() bool { return c.waiting(t, first.Name) == 1 })
	harness.Never(t, 3*time.Second, "the request is answered while the Cluster is paused", func() bool { return c.waiting(t, first.Name) != 1 })
	annotate(t, here.client, infra, clusterctlv1.BlockMoveAnnotation, nil)
	harness.Must(t, <-ended)
	t.Logf("the move took %s, with a renewal that waited", time.Since(began).Round(100*time.Millisecond))
	c.moveTo(t, there)
	d.reload(t)
	here.isEmpty(t)

	// The records have new owners, and the waiting machine gets its renewal.
	d.awaitRunning(t, 3)
	d.awaitRenewal(t, first, records)
	there.haveMoved(t, records, c.identity(t), identity)
	o.checkAfterMove(t, target, 3, identity)
	o.must(t, target, o.install())

	// The rollout goes on: the second new Machine joins, and the old Machines are deleted.
	second := d.awaitMachine(t, moved)
	moved = d.awaitReplaced(t, old)
	for _, m := range moved {
		if m.Name != first.Name && m.Name != second.Name {
			t.Errorf("after the rollout there is an unexpected Machine %s", m.Name)
		}
	}
	here.hasDoneNothing(t, served)
	here.isEmpty(t)
	d.haveNotBooted(t, started, first)

	// Move back with the same commands.
	started = d.startedMachines(t, moved)
	records = there.recordsByName(t)
	served = there.logSize(t)
	o.must(t, here.bed, o.blockOf(t, "before the move"))
	began = time.Now()
	o.target(t, here.bed)
	o.must(t, there.bed, move[1])
	o.must(t, there.bed, move[2])
	t.Logf("the move back took %s", time.Since(began).Round(100*time.Millisecond))
	c.moveTo(t, here)
	d.reload(t)
	there.isEmpty(t)
	o.must(t, here.bed, o.blockOf(t, "movers out"))
	d.awaitRunning(t, 2)
	here.haveMoved(t, records, c.identity(t), identity)
	gone := there.logSize(t)

	// The user adds a Machine, and a Machine that was moved twice renews.
	d.scale(t, 3)
	third := d.awaitMachine(t, moved)
	d.awaitRunning(t, 3)
	d.makeRenewalDue(t, first)
	d.awaitRenewal(t, first, records)
	d.haveNotBooted(t, started, moved...)
	there.hasDoneNothing(t, gone)
	if !strings.Contains(there.logFrom(t, served), "no longer served") {
		t.Error("the second controller still serves the Cluster")
	}
	there.isEmpty(t)
	for _, m := range append(slices.Clone(old), first, second, third) {
		want := 1
		if m.Name == first.Name {
			want = 3 // it renewed twice
		}
		c.issued(t, m.Name, want)
	}
}

// newTarget starts a second management cluster with the same hosts, but without node attestation.
func newTarget(t *testing.T) *bed {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: shared.ControlPlane})
	harness.Must(t, err)
	target := &bed{ControlPlane: cp, hosts: shared.hosts}
	t.Cleanup(func() {
		if t.Failed() && target.clusterAPI != nil {
			t.Log(target.clusterAPI.Logs())
		}
		target.hosts = nil // all stories share the hosts: do not close them
		if err := target.stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, target.start(t.Context()))
	return target
}

// moveTo records that another management cluster manages the Cluster from now on.
func (c *cluster) moveTo(t *testing.T, to *story) {
	t.Helper()
	c.clusters = slices.DeleteFunc(c.clusters, func(other *cluster) bool { return other == c })
	c.story, to.clusters = to, append(to.clusters, c)
	c.object = c.currentCluster(t)
	if ptr.Deref(c.object.Spec.Paused, false) {
		t.Error("the Cluster is still paused after the move")
	}
}

func (c *cluster) currentCluster(t *testing.T) *clusterv1.Cluster {
	t.Helper()
	object := &clusterv1.Cluster{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: c.name}, object))
	return object
}

// reload reads the MachineDeployment again, after clusterctl or kubectl has changed it.
func (d *machineDeployment) reload(t *testing.T) {
	t.Helper()
	harness.Must(t, d.client.Get(t.Context(), client.ObjectKeyFromObject(d.object), d.object))
}

// isEmpty checks that left returns nothing, and that the namespace has no Secret: our controller
// must not create its Secrets again after the move.
func (s *story) isEmpty(t *testing.T) {
	t.Helper()
	left, err := s.left(t.Context())
	harness.Must(t, err)
	secrets := &corev1.SecretList{}
	harness.Must(t, s.client.List(t.Context(), secrets, client.InNamespace(s.namespace)))
	for _, secret := range secrets.Items {
		left = append(left, "Secret "+secret.Name)
	}
	if len(left) > 0 {
		t.Errorf("the management cluster that the Cluster left still has %v", left)
	}
}

// host waits until a Machine's host is on, and returns it.
func (d *machineDeployment) host(t *testing.T, m clusterv1.Machine) *testbed.Machine {
	t.Helper()
	var host *testbed.Machine
	harness.Eventually(t, joinLimit, "the host of Machine "+m.Name+" is on", func() bool {
		ids := d.hosts.IDs(m.Name)
		if len(ids) != 1 {
			return false
		}
		var err error
		host, err = d.hosts.Machine(t.Context(), ids[0])
		return err == nil
	})
	return host
}

func (d *machineDeployment) runOn(t *testing.T, m clusterv1.Machine, args ...string) string {
	t.Helper()
	out, err := d.host(t, m).Run(t.Context(), args...)
	harness.Must(t, err)
	return strings.TrimSpace(out)
}

// awaitMachine waits for a Machine that is not in known, and returns it.
func (d *machineDeployment) awaitMachine(t *testing.T, known []clusterv1.Machine) (found clusterv1.Machine) {
	t.Helper()
	harness.Eventually(t, joinLimit, "there is another Machine", func() bool {
		for _, m := range d.machines(t) {
			if !slices.ContainsFunc(known, func(k clusterv1.Machine) bool { return k.Name == m.Name }) {
				found = m
				return true
			}
		}
		return false
	})
	return found
}

// startedMachine has the properties that change when a machine boots or joins again.
type startedMachine struct {
	host   *testbed.Machine
	joined string // time of kubeadm join
	node   types.UID
}

func (d *machineDeployment) startedMachines(t *testing.T, of []clusterv1.Machine) map[string]startedMachine {
	t.Helper()
	all := map[string]startedMachine{}
	for _, m := range of {
		node, err := d.workload.Client().CoreV1().Nodes().Get(t.Context(), m.Name, metav1.GetOptions{})
		harness.Must(t, err)
		harness.Eventually(t, joinLimit, "cloud-init ends", func() bool { return cloudInitEnded(t, d.host(t, m)) })
		all[m.Name] = startedMachine{d.host(t, m), d.runOn(t, m, "stat", "--format=%y", "/run/cluster-api/bootstrap-success.complete"), node.UID}
	}
	return all
}

// haveNotBooted checks that the hosts of these Machines have neither booted nor joined since before
// was read.
func (d *machineDeployment) haveNotBooted(t *testing.T, before map[string]startedMachine, machines ...clusterv1.Machine) {
	t.Helper()
	after := d.startedMachines(t, machines)
	for name, now := range after {
		if now != before[name] {
			t.Errorf("the machine of %s has booted or joined again: it was %+v, and is %+v", name, before[name], now)
		}
	}
}

// makeRenewalDue makes a machine's key readable for all users: then the plugin replaces the key.
// The kubelet runs the plugin when it starts.
func (d *machineDeployment) makeRenewalDue(t *testing.T, m clusterv1.Machine) {
	t.Helper()
	d.runOn(t, m, "chmod", "0644", filepath.Join(cache.DefaultPath, cache.CurrentFile))
	d.runOn(t, m, "systemctl", "restart", "kubelet")
}

// awaitRenewal waits until a machine has a new certificate. The record must have one certificate
// more than before.
func (d *machineDeployment) awaitRenewal(t *testing.T, m clusterv1.Machine, before map[string]v1alpha1.NodeAttestation) {
	t.Helper()
	began := time.Now()
	harness.Eventually(t, joinLimit, "Machine "+m.Name+" renews", func() bool {
		return d.runOn(t, m, "stat", "--format=%a", filepath.Join(cache.DefaultPath, cache.CurrentFile)) == "600" &&
			len(d.record(t, m.Name).Status.Certificates) == len(before[m.Name].Status.Certificates)+1
	})
	t.Logf("Machine %s has renewed after %s", m.Name, time.Since(began).Round(100*time.Millisecond))
}

// recordsByName returns the story's records by Node name, which is the Machine's name, too.
func (s *story) recordsByName(t *testing.T) map[string]v1alpha1.NodeAttestation {
	t.Helper()
	all := map[string]v1alpha1.NodeAttestation{}
	for _, record := range s.records(t) {
		all[record.Spec.NodeName] = record
	}
	return all
}

// haveMoved checks that the records are unchanged, and that the present Machines own them. They may
// have more certificates than before.
func (s *story) haveMoved(t *testing.T, before map[string]v1alpha1.NodeAttestation, identity, identityBefore string) {
	t.Helper()
	if identity != identityBefore {
		t.Errorf("the cluster's identity was %s, and is %s", identityBefore, identity)
	}
	after := s.recordsByName(t)
	if len(after) != len(before) {
		t.Errorf("there were %d records, and there are %d", len(before), len(after))
	}
	for name, was := range before {
		is := after[name]
		machine := &clusterv1.Machine{}
		harness.Must(t, s.client.Get(t.Context(), client.ObjectKey{Namespace: s.namespace, Name: name}, machine))
		if len(is.OwnerReferences) != 1 || is.OwnerReferences[0].UID != machine.UID {
			t.Errorf("the record of %s is owned by %+v", name, is.OwnerReferences)
		}
		if is.Name != was.Name || is.Spec.Cluster != was.Spec.Cluster || is.Spec.ProviderID != was.Spec.ProviderID || is.Spec.AKName != was.Spec.AKName ||
			*is.Spec.EK != *was.Spec.EK || is.Status.FirstRequestUID != was.Status.FirstRequestUID {
			t.Errorf("the record of %s was\n%+v\nand is\n%+v", name, was, is)
		}
		for _, certificate := range was.Status.Certificates {
			if !slices.ContainsFunc(is.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == certificate.SHA256 }) {
				t.Errorf("the record of %s lacks certificate %s", name, certificate.SHA256)
			}
		}
	}
}

// identity returns the cluster UID that the records have in spec.cluster.
func (c *cluster) identity(t *testing.T) string {
	t.Helper()
	secret := &corev1.Secret{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: c.namespace, Name: c.name + "-node-attestation"}, secret))
	identity := secret.Annotations["attestation.cluster.x-k8s.io/cluster-uid"]
	if identity == "" {
		t.Fatalf("the Secret %s has no cluster UID: %v", secret.Name, secret.Annotations)
	}
	return identity
}

// waiting counts the requests of a node without condition, certificate or challenge.
func (c *cluster) waiting(t *testing.T, node string) (count int) {
	t.Helper()
	hellos, others := harness.Requests(t, c.workload, node)
	for _, r := range append(hellos, others...) {
		if len(r.Status.Conditions) == 0 && len(r.Status.Certificate) == 0 && r.Annotations[attestation.AnnotationChallenge] == "" {
			count++
		}
	}
	return count
}

// issued checks that a node got exactly want certificates, and that none of its proofs was denied.
func (c *cluster) issued(t *testing.T, node string, want int) {
	t.Helper()
	_, proofs := harness.Requests(t, c.workload, node)
	count := 0
	for _, r := range proofs {
		if len(r.Status.Certificate) == 0 {
			t.Errorf("request %s of node %s has no certificate: %+v", r.Name, node, r.Status.Conditions)
			continue
		}
		count++
	}
	if count != want {
		t.Errorf("node %s got %d certificates, want %d", node, count, want)
	}
}

func annotate(t *testing.T, c client.Client, object client.Object, key string, value *string) {
	t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, key)
	if value != nil {
		patch = fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, key, *value)
	}
	harness.Must(t, c.Patch(t.Context(), object, client.RawPatch(types.MergePatchType, patch)))
}

// logSize returns the present size of the controller's log, for logFrom.
func (s *story) logSize(t *testing.T) int64 {
	t.Helper()
	info, err := os.Stat(s.controller.LogFile())
	harness.Must(t, err)
	return info.Size()
}

// logFrom returns the controller's log from an offset.
func (s *story) logFrom(t *testing.T, size int64) string {
	t.Helper()
	log, err := os.ReadFile(s.controller.LogFile())
	harness.Must(t, err)
	return string(log[size:])
}

// hasDoneNothing checks that the controller's log has no line about a Cluster since the offset. The
// end of a connection has another logger name, and is allowed.
func (s *story) hasDoneNothing(t *testing.T, since int64) {
	t.Helper()
	for line := range strings.Lines(s.logFrom(t, since)) {
		if strings.Contains(line, `logger="clusters`) {
			t.Errorf("the controller has done something for a Cluster that is paused or gone: %s", line)
		}
	}
}

// mover is the user in the guide's example of movers: the administrator of kubeadm's kubeconfig.
const mover = "kubernetes-admin"

// operator runs the guide's commands in a shell with kubectl and clusterctl.
type operator struct {
	dir       string
	namespace string
	env       []string
	text      string // of the guide
	examples  string // the folder of the guide's manifests
}

// newOperator writes the kubeconfigs of both management clusters, with the story's namespace.
func newOperator(t *testing.T, here *story, target *bed) *operator {
	t.Helper()
	root, err := filepath.Abs(module)
	harness.Must(t, err)
	text, err := os.ReadFile(filepath.Join(root, "docs/integration/cluster-api.md"))
	harness.Must(t, err)
	o := &operator{dir: t.TempDir(), namespace: here.namespace, text: string(text), examples: filepath.Join(root, "docs/examples/cluster-api")}
	o.env = []string{
		"PATH=" + filepath.Dir(here.Kubectl()) + ":" + filepath.Dir(built.clusterctl) + ":" + os.Getenv("PATH"),
		// there is no network
		"HOME=" + o.dir, "XDG_CONFIG_HOME=" + o.dir, "CLUSTERCTL_DISABLE_VERSIONCHECK=true",
	}
	settings := filepath.Join(o.dir, "cluster-api")
	harness.Must(t, errors.Join(os.Mkdir(settings, 0o700), os.WriteFile(filepath.Join(settings, "clusterctl.yaml"), []byte("providers: []\n"), 0o600)))
	for _, at := range []*bed{here.bed, target} {
		admin, err := at.ClientCA().IssueClient(mover, []string{"system:masters"}, time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour))
		harness.Must(t, err)
		harness.Must(t, at.WriteKubeconfig(o.kubeconfig(at), testbed.CertificateUser(admin)))
		o.must(t, at, "kubectl config set-context --current --namespace="+o.namespace)
		if out := o.must(t, at, "kubectl auth whoami"); !strings.Contains(out, mover) {
			t.Fatalf("kubectl auth whoami: %s", out)
		}
	}
	o.target(t, target)
	return o
}

func (o *operator) kubeconfig(at *bed) string {
	return filepath.Join(o.dir, filepath.Base(at.Dir())+".kubeconfig")
}

// target makes a management cluster the target of the next move.
func (o *operator) target(t *testing.T, to *bed) {
	t.Helper()
	content, err := os.ReadFile(o.kubeconfig(to))
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(filepath.Join(o.dir, "target.kubeconfig"), content, 0o600))
}

// run runs commands of the guide in a management cluster, and returns stdout and stderr. It
// replaces the guide's namespace with the story's.
func (o *operator) run(t *testing.T, at *bed, script string) (string, error) {
	script = strings.ReplaceAll(script, "--namespace=fleet", "--namespace="+o.namespace)
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script)
	cmd.Dir, cmd.Env = o.dir, append(slices.Clone(o.env), "KUBECONFIG="+o.kubeconfig(at))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w", script, err)
	}
	return out.String(), nil
}

func (o *operator) must(t *testing.T, at *bed, script string) string {
	t.Helper()
	out, err := o.run(t, at, script)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// blockOf returns the guide's code with that title.
func (o *operator) blockOf(t *testing.T, title string) string {
	t.Helper()
	_, rest, _ := strings.Cut(o.text, "\n# "+title+"\n")
	block, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatalf("the guide has no code with the title %q", title)
	}
	return block
}

// block returns the three commands of the guide's code with that title, one a line.
func (o *operator) block(t *testing.T, title string) []string {
	t.Helper()
	commands := strings.Split(strings.TrimSpace(o.blockOf(t, title)), "\n")
	if len(commands) != 3 {
		t.Fatalf("the guide's code %q has %d lines, want 3: %q", title, len(commands), commands)
	}
	return commands
}

// overlay writes the guide's overlay for the target, and returns the command that applies it.
func (o *operator) overlay(t *testing.T) string {
	t.Helper()
	folder := filepath.Join(o.dir, "move")
	relative, err := filepath.Rel(folder, filepath.Join(o.examples, "management"))
	harness.Must(t, err)
	content := strings.Replace(o.blockOf(t, "move"), "../management", relative, 1)
	harness.Must(t, errors.Join(os.Mkdir(folder, 0o700), os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(content), 0o600)))
	return "kubectl apply --server-side -k " + folder
}

// install returns the command that installs node attestation. It also undoes the overlay.
func (o *operator) install() string {
	return "kubectl apply --server-side -k " + o.examples + "/management"
}

// checkAfterMove runs the guide's three commands after a move. The first two must print what the
// guide says.
func (o *operator) checkAfterMove(t *testing.T, at *bed, records int, identity string) {
	t.Helper()
	commands := o.block(t, "after the move")
	table := strings.Split(strings.TrimSpace(o.must(t, at, commands[0])), "\n")[1:]
	if len(table) != records || slices.ContainsFunc(table, func(row string) bool { return !strings.HasSuffix(strings.TrimSpace(row), " Machine") }) {
		t.Errorf("%s: %q", commands[0], table)
	}
	if out := o.must(t, at, commands[1]); !strings.Contains(out, identity) {
		t.Errorf("%s: %s, not %s", commands[1], out, identity)
	}
	o.must(t, at, commands[2])
}
