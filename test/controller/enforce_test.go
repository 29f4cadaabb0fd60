// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

const gateCluster = "cluster-uid"

// gated is a namespace with records and the Secret in which a Preflight stores its state.
type gated struct {
	*bed
	secret types.NamespacedName
}

func newGated(t *testing.T) *gated {
	t.Helper()
	fleets++
	g := &gated{shared, types.NamespacedName{Namespace: fmt.Sprintf("fleet-%d", fleets), Name: "challenge-keys"}}
	if err := g.client.Create(t.Context(), namespace(g.secret.Namespace)); err != nil {
		t.Fatal(err)
	}
	nodes := &corev1.NodeList{}
	if err := g.client.List(t.Context(), nodes); err != nil || len(nodes.Items) > 0 {
		t.Fatalf("there are %d Nodes already, %v", len(nodes.Items), err)
	}
	return g
}

// nodes creates Nodes, which are deleted when the test ends.
func (g *gated) nodes(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := g.client.Create(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := g.client.Delete(context.WithoutCancel(t.Context()), node); err != nil {
				t.Error(err)
			}
		})
	}
}

func (g *gated) store(api client.Client) *sources.KeyStore {
	return sources.NewKeyStore(api, api, g.secret, func(keys verifiertpm.Keys) (*verifiertpm.Verifier, error) {
		return verifiertpm.New(verifiertpm.Config{
			NamedEKs: true, ClusterUID: gateCluster, Keys: keys, PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{7}},
		})
	})
}

// open runs the preflight of a controller that starts.
func (g *gated) open(t *testing.T, api client.Client, audit bool, listed ...string) error {
	gate := &preflight.Preflight{
		Keys: g.store(api), Records: api, Cluster: gateCluster, Namespace: g.secret.Namespace, Unattested: func() []string { return listed }, Audit: audit, Log: logr.Discard(),
	}
	return gate.Await(t.Context())
}

// since returns when enforcement started, "" if it has not, and the keys.
func (g *gated) since(t *testing.T) (string, map[string][]byte) {
	t.Helper()
	secret := &corev1.Secret{}
	if err := client.IgnoreNotFound(g.client.Get(t.Context(), g.secret, secret)); err != nil {
		t.Fatal(err)
	}
	return secret.Annotations[preflight.AnnotationEnforcingSince], secret.Data
}

// refusedFor checks that enforcement does not start, because of these Nodes.
func refusedFor(t *testing.T, err error, nodes ...string) {
	t.Helper()
	var refused *preflight.Error
	if !errors.As(err, &refused) || !slices.Equal(refused.Nodes, nodes) {
		t.Errorf("not refused for %v: %v", nodes, err)
	}
}

// Enforcement starts once each Node has a record or is listed. The start is remembered until an
// audit.
func TestEnforcementStartsOnce(t *testing.T) {
	g := newGated(t)
	g.nodes(t, "cp-1", "worker-2", "worker-1")
	refusedFor(t, g.open(t, g.client, false), "cp-1", "worker-1", "worker-2")
	refusedFor(t, g.open(t, g.client, false, "cp-1"), "worker-1", "worker-2")
	for name, cluster := range map[string]string{"worker-1": gateCluster, "worker-2": "another"} {
		record := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: g.secret.Namespace, Name: name}}
		record.Spec = v1alpha1.NodeAttestationSpec{
			Cluster: cluster, Machine: v1alpha1.MachineReference{Source: "inventory", Name: name}, Provider: "tpm", NodeName: name,
		}
		if err := g.client.Create(t.Context(), record); err != nil {
			t.Fatal(err)
		}
	}
	refusedFor(t, g.open(t, g.client, false, "cp-1"), "worker-2")
	if since, keys := g.since(t); since != "" || keys != nil {
		t.Errorf("refused, and since %s, %d entries", since, len(keys))
	}
	if err := g.open(t, g.client, false, "cp-1", "worker-2"); err != nil {
		t.Fatal(err)
	}
	since, keys := g.since(t)
	if _, err := time.Parse(time.RFC3339, since); err != nil || len(keys) != 2 {
		t.Fatalf("%v, %d entries", err, len(keys))
	}
	// Later, a Node has no record, and the list is shorter.
	g.nodes(t, "virtual-kubelet")
	time.Sleep(1100 * time.Millisecond) // the time that is noted has whole seconds
	if err := g.open(t, g.client, false); err != nil {
		t.Error(err)
	}
	if now, _ := g.since(t); now != since {
		t.Errorf("since %s, and then %s", since, now)
	}
	if err := g.open(t, g.client, true); err != nil {
		t.Error(err)
	}
	if now, _ := g.since(t); now != "" {
		t.Errorf("after an audit: since %s", now)
	}
	if err := g.open(t, g.client, true); err != nil {
		t.Error(err)
	}
	refusedFor(t, g.open(t, g.client, false, "cp-1", "worker-2"), "virtual-kubelet")
	if _, after := g.since(t); fmt.Sprint(after) != fmt.Sprint(keys) {
		t.Error("the keys have changed")
	}
}

// Replicas that start at once write one Secret: no keys are lost, whether the Secret was there,
// empty, or not.
func TestEnforcementStartsInManyReplicas(t *testing.T) {
	for _, empty := range []bool{false, true} {
		g := newGated(t)
		if empty {
			if err := g.client.Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: g.secret.Namespace, Name: g.secret.Name}}); err != nil {
				t.Fatal(err)
			}
		}
		const replicas = 8
		var all sync.WaitGroup
		errs, keys := make([]error, replicas), make([]map[string][]byte, replicas)
		for i := range replicas {
			all.Go(func() {
				store := g.store(g.client)
				var beside sync.WaitGroup
				beside.Go(func() { _ = store.Refresh(t.Context()) })
				errs[i] = g.open(t, g.client, false)
				beside.Wait()
				_, keys[i] = g.since(t)
				errs[i] = errors.Join(errs[i], store.Refresh(t.Context()))
			})
		}
		all.Wait()
		since, last := g.since(t)
		if err := errors.Join(errs...); err != nil || since == "" || len(last) != 2 {
			t.Errorf("empty %t: since %q, %d entries, %v", empty, since, len(last), err)
		}
		for i := range keys {
			if fmt.Sprint(keys[i]) != fmt.Sprint(last) {
				t.Errorf("empty %t: replica %d saw other keys", empty, i)
			}
		}
	}
}

// meddler writes the Secret after the controller has read it.
type meddler struct {
	client.Client
	// after is the number of reads until the write.
	after int
	write func()
}

func (m *meddler) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	err := m.Client.Get(ctx, key, into, options...)
	if m.after--; m.after == 0 {
		m.write()
	}
	return err
}

// A key that an operator adds at any time is not overwritten.
func TestEnforcementKeepsWhatOthersWrite(t *testing.T) {
	g := newGated(t)
	for after := 1; after <= 3; after++ { // three reads, and one write after the last
		if err := g.open(t, g.client, true); err != nil { // forgets
			t.Fatal(err)
		}
		id := fmt.Sprintf("next-%d", after)
		m := &meddler{Client: g.client, after: after, write: func() {
			secret := &corev1.Secret{}
			if err := g.client.Get(t.Context(), g.secret, secret); err != nil {
				t.Fatal(err)
			}
			for old := range secret.Data {
				if strings.HasPrefix(old, "next-") {
					delete(secret.Data, old)
				}
			}
			secret.Data[id] = bytes.Repeat([]byte{1}, 32)
			if err := g.client.Update(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
		}}
		if after == 1 { // the Secret is made beforehand: this is about one that is there
			if err := g.store(g.client).Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := g.open(t, m, false); err != nil {
			t.Fatal(err)
		}
		if since, keys := g.since(t); since == "" || m.after > 0 || keys[id] == nil {
			t.Errorf("after read %d: since %q, %d reads short, %d entries", after, since, m.after, len(keys))
		}
	}
}

// If the preflight cannot check the cluster, its error has a hint.
func TestEnforcementNeedsToSee(t *testing.T) {
	g := newGated(t)
	g.nodes(t, "worker-1")
	secrets := rule("", "secrets", "get,update")
	for name, c := range map[string]struct {
		rules []rbacv1.PolicyRule
		says  string
	}{
		"no-nodes":   {[]rbacv1.PolicyRule{secrets}, "nodes"},
		"no-records": {[]rbacv1.PolicyRule{secrets, rule("", "nodes", "list")}, "nodeattestations"},
		"no-secret":  {[]rbacv1.PolicyRule{rule("", "nodes", "list")}, "secrets"},
		"no-create":  {[]rbacv1.PolicyRule{secrets, rule("", "nodes", "list"), rule(v1alpha1.GroupVersion.Group, "nodeattestations", "list")}, "secrets"},
	} {
		t.Run(name, func(t *testing.T) {
			as := g.may(t, name, name, c.rules...)
			api, err := client.New(as, client.Options{Scheme: newScheme()})
			if err != nil {
				t.Fatal(err)
			}
			var refused *preflight.Error
			// the authorizer takes its time
			harness.Eventually(t, harness.Soon, "refused for "+c.says, func() bool {
				err = g.open(t, api, false, "worker-1")
				if name == "no-records" {
					err = g.open(t, api, false)
				}
				return errors.As(err, &refused) && strings.Contains(err.Error(), `"`+c.says+`"`)
			})
			if !strings.Contains(refused.Hint, "rbac.yaml") {
				t.Errorf("%v, hint %q", err, refused.Hint)
			}
			if err := g.open(t, api, true); err != nil {
				t.Errorf("in audit mode: %v", err)
			}
		})
	}
}

// Without the CRD there are no records. That is right for a cluster without Nodes.
func TestEnforcementWithoutCRD(t *testing.T) {
	g := newGated(t)
	admin := g.admin(t)
	const crd = "nodeattestations.attestation.cluster.x-k8s.io"
	kubectl := func(args ...string) {
		t.Helper()
		if out, err := g.RunKubectl(context.WithoutCancel(t.Context()), admin, args...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	kubectl("delete", "crd", crd)
	t.Cleanup(func() {
		kubectl("apply", "-f", "../../packaging/kubernetes/crd.yaml")
		kubectl("wait", "--for=condition=Established", "crd/"+crd)
		harness.Eventually(t, harness.Soon, "records can be listed again", func() bool {
			return g.client.List(context.WithoutCancel(t.Context()), &v1alpha1.NodeAttestationList{}) == nil
		})
	})
	if err := g.open(t, g.client, false); err != nil {
		t.Errorf("without Nodes: %v", err)
	}
	if err := g.open(t, g.client, true); err != nil {
		t.Error(err)
	}
	g.nodes(t, "worker-1")
	fresh, err := client.New(g.AdminConfig(), client.Options{Scheme: newScheme()})
	if err != nil {
		t.Fatal(err)
	}
	for name, api := range map[string]client.Client{"that knew the kind": g.client, "that never did": fresh} {
		var refused *preflight.Error
		if err := g.open(t, api, false); !errors.As(err, &refused) || !strings.Contains(refused.Hint, "crd.yaml") {
			t.Errorf("a client %s: %v", name, err)
		}
	}
	if err := g.open(t, g.client, false, "worker-1"); err != nil {
		t.Errorf("with all Nodes listed: %v", err)
	}
}

// admin returns the path of an administrator's kubeconfig.
func (b *bed) admin(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "admin.kubeconfig")
	if err := b.WriteKubeconfig(path, b.AdminUser()); err != nil {
		t.Fatal(err)
	}
	return path
}

// The program refuses to start with the exit code of an invalid configuration, and names the Nodes.
// With the Nodes listed, it starts all its parts.
func TestProgramStartsToEnforce(t *testing.T) {
	g := newGated(t)
	g.nodes(t, "cp-1", "worker-1")
	dir := t.TempDir()
	program, file := shared.controller, filepath.Join(dir, "config.yaml")
	start := func(kubeconfig, extra string) (cmd *exec.Cmd, stderr func() string) {
		t.Helper()
		content := "apiVersion: controller.attestation.cluster.x-k8s.io/v1alpha1\nkind: NodeAttestationControllerConfiguration\nclusterUID: " + gateCluster +
			"\nnamespace: " + g.secret.Namespace + "\nchallengeKeySecret: " + g.secret.Name + "\nsigning: {mode: ApproveOnly}\nsigners: [{name: example.com/signer}]\n" +
			"inventory: {file: /nonexistent}\ntpm: {pcrs: {bank: sha256, indexes: [7]}}\nmetricsBindAddress: \"0\"\nhealthBindAddress: \"0\"\n" + extra
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		log, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { harness.Must(t, log.Close()) }()
		cmd = exec.CommandContext(t.Context(), program, "--config="+file, "--kubeconfig="+kubeconfig)
		cmd.Stderr = log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, func() string {
			content, err := os.ReadFile(log.Name())
			if err != nil {
				t.Error(err)
			}
			return string(content)
		}
	}
	cmd, stderr := start(g.admin(t), "unattestedNodes: [cp-1]\n")
	_ = cmd.Wait() // its exit code follows
	if code := cmd.ProcessState.ExitCode(); code != 10 || !strings.Contains(stderr(), "1: worker-1\nhint: attest them") {
		t.Errorf("exit code %d: %s", code, stderr())
	}
	if since, _ := g.since(t); since != "" {
		t.Errorf("refused, and since %s", since)
	}
	cmd, stderr = start(g.admin(t), "unattestedNodes: [cp-1, worker-1]\n")
	_ = cmd.Wait() // its exit code follows
	if code := cmd.ProcessState.ExitCode(); code != 10 || !strings.Contains(stderr(), approvalPolicy+": "+preflight.PolicyMissing) ||
		!strings.Contains(stderr(), "\nhint: apply packaging/kubernetes/policies.yaml") {
		t.Errorf("without policies: exit code %d: %s", code, stderr())
	}
	g.kubeadms(t)
	cmd, stderr = start(g.admin(t), "policies: {mode: Warn}\nunattestedNodes: [cp-1, worker-1]\n")
	ended := sync.OnceValue(func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		return cmd.Wait()
	})
	t.Cleanup(func() { _ = ended() })
	harness.Eventually(t, harness.Soon, "enforcement has started", func() bool { since, _ := g.since(t); return since != "" })
	for _, name := range []string{kubeadmFirst, kubeadmSecond} {
		g.reported(t, harness.Soon, g.binding(t, name))
	}
	if err := ended(); err != nil {
		t.Errorf("%v: %s", err, stderr())
	}
	// The program waits for an API server that is not reachable yet, until it gets SIGTERM.
	admin := g.admin(t)
	content, err := os.ReadFile(admin)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(admin, bytes.ReplaceAll(content, []byte(g.ServerURL()), []byte("https://127.0.0.1:1")), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, stderr = start(admin, "")
	const refused = "connection refused"
	harness.Eventually(t, harness.Soon, "it has tried", func() bool { return strings.Contains(stderr(), refused) })
	over := make(chan error, 1)
	go func() { over <- cmd.Wait() }()
	select {
	case err := <-over:
		t.Fatalf("it does not wait: %v: %s", err, stderr())
	case <-time.After(2500 * time.Millisecond):
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	if err := <-over; err != nil {
		t.Errorf("%v: %s", err, stderr())
	}
}
