// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Where things are on a machine that kubeadm joins.
const (
	pluginFile  = "/usr/bin/kubelet-authenticator"
	configFile  = "/etc/kubelet-authenticator/config.yaml"
	staticFile  = "/etc/kubelet-authenticator/bootstrap.kubeconfig"
	dropInFile  = "/usr/lib/systemd/system/kubelet.service.d/20-kubelet-authenticator.conf"
	joinFile    = "/root/join.yaml"
	tpmSocket   = "/opt/testbed/tpm"
	joinedWords = "This node has joined the cluster"
)

// kubeadmCluster is a cluster as "kubeadm init" makes it. It has kube-controller-manager, and the
// bindings that let it approve without attestation. Our controller and policies are added.
type kubeadmCluster struct {
	*cluster
	token string
}

func newKubeadmCluster(t *testing.T) *kubeadmCluster {
	t.Helper()
	k := &kubeadmCluster{cluster: newCluster(t, allowStatic)}
	if err := k.StartControllerManager(t.Context()); err != nil {
		t.Fatal(err)
	}
	var err error
	if k.token, err = k.KubeadmInit(t.Context(), built.kubeadm); err != nil {
		t.Fatal(err)
	}
	return k
}

// image is what is on a machine's disk beside kubeadm, the kubelet and the plugin's program.
type image struct {
	// bare is one without the plugin's program.
	bare bool
	// dropIn is the packaged one of the kubelet's unit.
	dropIn bool
	// config is added to the plugin's configuration file. Without enabled there is none.
	enabled bool
	config  string
	// secrets are files with a credential.
	secrets map[string][]byte
	join    testbed.KubeadmJoin
}

// computer is a machine with a systemd of its own.
type computer struct {
	*machine
	os *testbed.Machine
}

// newComputer starts one, which is not joined yet.
func (k *kubeadmCluster) newComputer(t *testing.T, name string, i image) *computer {
	t.Helper()
	m := k.newMachine(t, name)
	i.join.Name = name
	files := map[string]string{joinFile: k.KubeadmJoinConfig(i.join)}
	if i.dropIn {
		content, err := os.ReadFile(filepath.Join(module, "packaging", "systemd", filepath.Base(dropInFile)))
		if err != nil {
			t.Fatal(err)
		}
		files[dropInFile] = string(content)
	}
	if i.enabled {
		files[configFile] = m.config() + i.config
	}
	options := k.KubeadmMachine(name, built.kubeadm, built.kubelet, files)
	if !i.bare {
		options.Programs[pluginFile] = built.plugin
	}
	options.Binds[tpmSocket] = m.tpm.Socket()

	starting.Lock()
	defer starting.Unlock()
	started, err := testbed.StartMachine(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	c := &computer{machine: m, os: started}
	c.certs = cache.At(c.os.Path(cache.DefaultPath))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.os.Journal(context.WithoutCancel(t.Context()), "kubelet"))
			c.showWorkerLog(t)
		}
		if err := c.os.Remove(); err != nil {
			t.Error(err)
		}
	})
	for path, content := range i.secrets {
		if err := c.os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// config is the plugin's configuration file on a machine of its own.
func (m *machine) config() string {
	return fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"+
		"provider: tpm\ntpmDevice: %s\nproviderID: test://%s\n", tpmSocket, m.name)
}

// join runs "kubeadm join", and returns whether it says that the node has joined.
func (c *computer) join(t *testing.T) bool {
	t.Helper()
	began := time.Now()
	out, err := c.os.Run(t.Context(), "kubeadm", "join", "--config="+joinFile)
	t.Logf("kubeadm join: %v after %s", err == nil, time.Since(began).Round(100*time.Millisecond))
	if joined := strings.Contains(out, joinedWords); joined != (err == nil) {
		t.Fatalf("kubeadm join says one thing and exits with another: %v\n%s", err, out)
	}
	if err != nil {
		t.Log(strings.TrimSpace(out))
	}
	return err == nil
}

func (c *computer) mustJoin(t *testing.T) {
	t.Helper()
	if !c.join(t) {
		t.Fatal("kubeadm join fails")
	}
	c.mustBecomeReady(t)
}

func (c *computer) mustBecomeReady(t *testing.T) {
	t.Helper()
	began := time.Now()
	harness.Eventually(t, 2*time.Minute, "the node is ready", func() bool { return c.ready(t.Context()) == "" })
	t.Logf("ready %s later", time.Since(began).Round(100*time.Millisecond))
}

// Those of the doctor's checks that fail where the kubelet goes past the plugin (docs/node.md).
var (
	bootstrapsAround = []string{"kubelet-bootstrap", "kubelet-rotation", "kubelet-kubeconfig"}
	rotatesAround    = []string{"kubelet-rotation"}
)

// mustDiagnose checks which of the doctor's checks of the kubelet fail. If none should, no other
// may.
func (c *computer) mustDiagnose(t *testing.T, failing []string) {
	t.Helper()
	out, err := c.os.Command(t.Context(), pluginFile, "doctor", "--output=json").Output()
	var report struct {
		Checks []struct{ Name, Status string }
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("doctor: %v: %s", err, out)
	}
	var failed []string
	for _, check := range report.Checks {
		if check.Status == "failure" && strings.HasPrefix(check.Name, "kubelet") {
			failed = append(failed, check.Name)
		}
	}
	if !slices.Equal(failed, failing) || (err == nil) != (len(failing) == 0) {
		t.Errorf("doctor: %v: the checks that fail are %q, not %q: %s", err, failed, failing, out)
	}
}

// has reports whether there is a file on the machine.
func (c *computer) has(t *testing.T, path string) bool {
	t.Helper()
	// Asked from within: what the machine has mounted is not on its disk.
	err := c.os.Command(t.Context(), "test", "-e", path).Run()
	return err == nil
}

// mustHave checks which files there are.
func (c *computer) mustHave(t *testing.T, wanted map[string]bool) {
	t.Helper()
	for path, want := range wanted {
		if c.has(t, path) != want {
			t.Errorf("%s: is there: %t", path, !want)
		}
	}
}

// kubeconfig is the kubelet's.
func (c *computer) kubeconfig() kubelet.Kubeconfig {
	return kubelet.ReadKubeconfig(c.os.Path(kubelet.KubeconfigFile), "")
}

// managersRequests are the machine's to the signer that kube-controller-manager has.
func (c *computer) managersRequests(t *testing.T) (found []certificatesv1.CertificateSigningRequest) {
	t.Helper()
	_, others := c.requests(t)
	for _, r := range others {
		if r.Spec.SignerName == builtinSigner {
			found = append(found, r)
		}
	}
	return found
}

// mustBeAttested checks that the node has attested as often as it should have, and has got a
// certificate in no other way.
func (c *computer) mustBeAttested(t *testing.T, times int) {
	t.Helper()
	leaf := c.leaf(t)
	if leaf == nil {
		t.Fatal("there is no certificate")
	}
	sum := sha256.Sum256(leaf.Raw)
	certificates := c.record(t).Status.Certificates
	if n := len(certificates); n != times || certificates[n-1].SHA256 != hex.EncodeToString(sum[:]) {
		t.Errorf("the record does not know the certificate %x: %+v", sum, certificates)
	}
	if hellos, proofs := c.requests(t); len(hellos) != times || len(proofs) != times {
		t.Errorf("%d hellos and %d other requests, not %d", len(hellos), len(proofs), times)
	}
	if n := len(c.managersRequests(t)); n > 0 {
		t.Errorf("%d requests to kube-controller-manager", n)
	}
	if k := c.kubeconfig(); k.Kind != kubelet.Ours {
		t.Errorf("kubelet.conf: %s", k.Kind)
	}
	c.mustHave(t, map[string]bool{
		kubelet.EnvFile: true, kubelet.RotatedFile: false, kubelet.BootstrapFile: false,
		filepath.Join(cache.DefaultPath, cache.BootstrapFile): false,
	})
}

// mustAskForNothing checks that what happens meanwhile leaves the node with the certificate that it
// has, and renews its Lease.
func (c *computer) mustAskForNothing(t *testing.T, meanwhile func()) {
	t.Helper()
	leaf := c.leaf(t)
	hellosBefore, proofsBefore := c.requests(t)
	c.tpm.Reset()
	meanwhile()
	p := c.watch(t)
	harness.Eventually(t, time.Minute, "the Lease is renewed", func() bool { return p.Count() > 1 })
	p.Stop()
	if hellos, proofs := c.requests(t); len(hellos) != len(hellosBefore) || len(proofs) != len(proofsBefore) {
		t.Errorf("%d hellos and %d proofs more", len(hellos)-len(hellosBefore), len(proofs)-len(proofsBefore))
	}
	if n := c.tpm.Count(); n > 0 {
		t.Errorf("%d TPM commands", n)
	}
	if now := c.leaf(t); !now.Equal(leaf) {
		t.Errorf("another certificate, valid from %s", now.NotBefore)
	}
}

// kubeadm joins machines to a cluster with our controller and policies.
func TestKubeadm(t *testing.T) {
	t.Parallel()
	k := newKubeadmCluster(t)
	for name, test := range map[string]func(*testing.T, *kubeadmCluster){
		"drop-in":             testDropIn,
		"baked-image":         testBakedImage,
		"package":             testPackage,
		"sysext":              testSysext,
		"not-in-inventory":    testNotInInventory,
		"denied":              testDenied,
		"bootstrap-by-exec":   testBootstrapByExec,
		"bootstrapped-around": testBootstrappedAround,
		"rotated-around":      testRotatedAround,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, k)
		})
	}
}

// The drop-in, a plain configuration for the join, and the one file that switches the plugin on.
func testDropIn(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "attested", image{dropIn: true, enabled: true, join: testbed.KubeadmJoin{Token: k.token}})
	k.admit(t, c.identity(t))
	t.Run("first-boot", func(t *testing.T) { // before kubeadm
		c.mustHavePrepared(t)
		c.mustHave(t, map[string]bool{kubelet.EnvFile: false, kubelet.KubeconfigFile: false, cache.DefaultPath: false})
	})
	c.mustJoin(t)
	c.mustBeAttested(t, 1)
	t.Run("restart", func(t *testing.T) {
		c.mustAskForNothing(t, func() {
			if _, err := c.os.Run(t.Context(), "systemctl", "restart", "kubelet"); err != nil {
				t.Fatal(err)
			}
		})
	})
	c.mustBeAttested(t, 1)
	c.mustDiagnose(t, nil)
}

// mustHavePrepared checks that the unit's prepare has exited with 0.
func (c *computer) mustHavePrepared(t *testing.T) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "prepare exits with 0", func() bool {
		out, err := c.os.Run(t.Context(), "systemctl", "show", "kubelet", "--property=ExecStartPre")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, pluginFile+" prepare") {
			t.Fatalf("the unit runs no prepare: %s", out)
		}
		// of one that runs, they are (null) and 0/0
		return strings.Contains(out, "code=exited ; status=0 }")
	})
}

// impatient is a machine whose join does not wait for long.
func (k *kubeadmCluster) impatient() image {
	return image{dropIn: true, enabled: true, config: "prepareWait: 5s\n", join: testbed.KubeadmJoin{Token: k.token, Timeout: 5 * time.Second}}
}

// mustFailToJoin checks that the join of a machine that is not admitted fails, for which its unit's
// prepare has the reason.
func (c *computer) mustFailToJoin(t *testing.T, reason string) {
	t.Helper()
	if c.join(t) {
		t.Fatal("kubeadm join succeeds")
	}
	// On a busy machine it may be the next attempt of the unit that comes as far.
	harness.Eventually(t, 30*time.Second, "the journal says "+reason, func() bool { return strings.Contains(c.os.Journal(t.Context(), "kubelet"), reason) })
	if c.leaf(t) != nil || len(c.managersRequests(t)) > 0 {
		t.Error("there is a certificate, or kube-controller-manager was asked for one")
	}
	// kubeadm has taken its own away; what is left is our copy.
	c.mustHave(t, map[string]bool{kubelet.BootstrapFile: false, filepath.Join(cache.DefaultPath, cache.BootstrapFile): true})
}

func testNotInInventory(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "late", k.impatient())
	identity := c.identity(t)
	c.mustFailToJoin(t, "has not sent a challenge")
	k.admit(t, identity)
	c.mustBecomeReady(t)
	c.mustBeAttested(t, 1)
}

func testDenied(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "misnamed", k.impatient())
	identity := c.identity(t)
	wrong := c.identity(t, "--node-name=another")
	k.admit(t, wrong)
	c.mustFailToJoin(t, "NodeNameMismatch")
	k.dismiss(t, wrong)
	k.admit(t, identity)
	c.mustBecomeReady(t)
	if record := c.record(t); record.Spec.NodeName != c.name {
		t.Errorf("the record names node %s", record.Spec.NodeName)
	}
	if n := len(c.managersRequests(t)); n > 0 {
		t.Errorf("%d requests to kube-controller-manager", n)
	}
}

// kubeadm itself acts as the node that has attested, and there is no token on the machine.
func testBootstrapByExec(t *testing.T, k *kubeadmCluster) {
	const discovery = "/root/discovery.conf"
	c := k.newComputer(t, "tokenless", image{
		dropIn: true, enabled: true, config: "bootstrapKubeconfig: " + staticFile + "\n",
		secrets: map[string][]byte{discovery: k.execKubeconfig(), staticFile: k.staticKubeconfig(t)},
		join:    testbed.KubeadmJoin{Kubeconfig: discovery},
	})
	k.admit(t, c.identity(t))
	c.mustJoin(t)
	c.mustBeAttested(t, 1)
	if !c.has(t, staticFile) {
		t.Error("the static credential is gone")
	}
	hellos, proofs := c.requests(t)
	for _, r := range append(hellos, proofs...) {
		if r.Spec.Username != staticUser {
			t.Errorf("%s: by %s", r.Name, r.Spec.Username)
		}
	}
}

// execKubeconfig is a kubelet.conf as an operator would write it who has not read on.
func (k *kubeadmCluster) execKubeconfig() []byte {
	return k.ExecKubeconfig("client.authentication.k8s.io/v1", pluginFile, nil, nil, true)
}

// aroundByBootstrap starts a machine whose kubelet.conf names the plugin, with kubeadm's flags for
// the kubelet. The kubelet takes that file for invalid, bootstraps without attestation, and
// overwrites it.
func (k *kubeadmCluster) aroundByBootstrap(t *testing.T, name string, timeout time.Duration) *computer {
	t.Helper()
	return k.newComputer(t, name, image{
		enabled: true, secrets: map[string][]byte{kubelet.KubeconfigFile: k.execKubeconfig()}, join: testbed.KubeadmJoin{Token: k.token, Timeout: timeout},
	})
}

// aroundByRotation starts a machine whose kubelet.conf names the plugin, with a kubelet that does
// not bootstrap, but rotates. The kubelet uses the plugin's certificate to ask for another one, and
// for nothing else.
func (k *kubeadmCluster) aroundByRotation(t *testing.T, name string, timeout time.Duration) *computer {
	t.Helper()
	return k.newComputer(t, name, image{
		enabled: true, config: "bootstrapKubeconfig: " + staticFile + "\n",
		secrets: map[string][]byte{kubelet.KubeconfigFile: k.execKubeconfig(), staticFile: k.staticKubeconfig(t)},
		join:    testbed.KubeadmJoin{Token: k.token, Timeout: timeout, KubeletArgs: map[string]string{"bootstrap-kubeconfig": ""}},
	})
}

// A row whose end is not what we want: kubeadm and kubelet get past the plugin. The policy leaves
// that node without a certificate.
func testBootstrappedAround(t *testing.T, k *kubeadmCluster) {
	c := k.aroundByBootstrap(t, "bootstrapped", 10*time.Second)
	k.admit(t, c.identity(t))
	if c.join(t) {
		t.Error("kubeadm join succeeds")
	}
	c.mustBeRefused(t, "system:bootstrap:"+k.token[:6])
	c.mustBeBootstrapped(t, false)
	c.mustDiagnose(t, bootstrapsAround)
}

// Nothing but the policy stands in the way.
func testBootstrappedAroundNoPolicy(t *testing.T, k *kubeadmCluster) {
	c := k.aroundByBootstrap(t, "bootstrapped", time.Minute)
	k.admit(t, c.identity(t))
	c.mustJoin(t)
	c.mustBeBootstrapped(t, true)
	c.mustDiagnose(t, bootstrapsAround)
}

// mustBeBootstrapped checks that the kubelet went past the plugin altogether, with or without
// success.
func (c *computer) mustBeBootstrapped(t *testing.T, successfully bool) {
	t.Helper()
	if k := c.kubeconfig(); k.Kind != kubelet.Bootstrapped {
		t.Errorf("kubelet.conf: %s", k.Kind)
	}
	hellos, others := c.requests(t)
	if len(hellos) > 0 || len(others) != 1 || others[0].Spec.SignerName != builtinSigner || (len(others[0].Status.Certificate) > 0) != successfully {
		t.Errorf("%d hellos, requests: %+v", len(hellos), others)
	}
	if n := c.tpm.Count(); n > 0 {
		t.Errorf("%d TPM commands", n)
	}
	c.mustHave(t, map[string]bool{kubelet.RotatedFile: successfully, cache.DefaultPath: false})
}

// As before, but this kubelet attests, and then asks for another certificate with the one that it
// got. "kubeadm join" notices nothing, either way.
func testRotatedAround(t *testing.T, k *kubeadmCluster) {
	c := k.aroundByRotation(t, "rotated", time.Minute)
	k.admit(t, c.identity(t))
	if !c.join(t) {
		t.Error("kubeadm join fails")
	}
	c.mustBeRefused(t, "system:node:"+c.name)
	c.mustBeRotated(t, false)
	if _, err := k.Client().CoreV1().Nodes().Get(t.Context(), c.name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the node: %v", err)
	}
	c.mustDiagnose(t, rotatesAround)
}

func testRotatedAroundNoPolicy(t *testing.T, k *kubeadmCluster) {
	c := k.aroundByRotation(t, "rotated", time.Minute)
	k.admit(t, c.identity(t))
	c.mustJoin(t)
	c.mustBeRotated(t, true)
	c.mustDiagnose(t, rotatesAround)
}

// mustBeRotated checks that the node has attested, and that the kubelet asked
// kube-controller-manager all the same.
func (c *computer) mustBeRotated(t *testing.T, successfully bool) {
	t.Helper()
	if k := c.kubeconfig(); k.Kind != kubelet.Ours {
		t.Errorf("kubelet.conf: %s", k.Kind)
	}
	if n := len(c.record(t).Status.Certificates); n != 1 {
		t.Errorf("%d certificates in the record", n)
	}
	if requests := c.managersRequests(t); len(requests) != 1 || requests[0].Spec.Username != "system:node:"+c.name ||
		(len(requests[0].Status.Certificate) > 0) != successfully {
		t.Errorf("requests to kube-controller-manager: %+v", requests)
	}
	c.mustHave(t, map[string]bool{kubelet.RotatedFile: successfully, cache.DefaultPath: true})
}

// mustBeRefused waits until kube-controller-manager has tried to approve the machine's request, of
// this user, and was refused.
func (c *computer) mustBeRefused(t *testing.T, user string) {
	t.Helper()
	var requests []certificatesv1.CertificateSigningRequest
	harness.Eventually(t, time.Minute, "kube-controller-manager is asked", func() bool {
		requests = c.managersRequests(t)
		return len(requests) > 0
	})
	request := requests[0]
	if len(requests) > 1 || request.Spec.Username != user {
		t.Errorf("%d requests, the first by %s", len(requests), request.Spec.Username)
	}
	harness.Eventually(t, time.Minute, "kube-controller-manager is refused to approve", func() bool {
		events, err := c.Audit()
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(events, func(e testbed.AuditEvent) bool {
			return e.Code == http.StatusForbidden && e.Name == request.Name && e.Subresource == "approval" &&
				e.User == "system:serviceaccount:kube-system:certificate-controller"
		})
	})
	if requests := c.managersRequests(t); len(requests) != 1 || len(requests[0].Status.Conditions) > 0 {
		t.Errorf("requests: %+v", requests)
	}
}

// The controller is away while a machine joins, and again while the machine is restarted.
func TestKubeadmWithoutController(t *testing.T) {
	t.Parallel()
	k := newKubeadmCluster(t)
	c := k.newComputer(t, "patient", k.impatient())
	k.admit(t, c.identity(t))
	if err := k.controller.Kill(); err != nil {
		t.Fatal(err)
	}
	t.Run("join", func(t *testing.T) {
		c.mustFailToJoin(t, "has not sent a challenge")
		k.startController(t)
		c.mustBecomeReady(t)
		c.mustBeAttested(t, 1)
	})
	if t.Failed() {
		return
	}
	t.Run("reboot", func(t *testing.T) {
		if err := k.controller.Kill(); err != nil {
			t.Fatal(err)
		}
		c.mustAskForNothing(t, func() {
			if err := c.os.PowerOff(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := c.os.PowerOn(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
		c.mustBeAttested(t, 1)
	})
}

// What happens without the policy that keeps kube-controller-manager from approving.
func TestKubeadmWithoutPolicy(t *testing.T) {
	t.Parallel()
	k := newKubeadmCluster(t)
	k.dropPolicy(t)
	for name, test := range map[string]func(*testing.T, *kubeadmCluster){
		"stock":               testStock,
		"package":             testPackageUnderARunningKubelet,
		"drop-in-not-enabled": testNotEnabled,
		"bootstrapped-around": testBootstrappedAroundNoPolicy,
		"rotated-around":      testRotatedAroundNoPolicy,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, k)
		})
	}
}

func testStock(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "stock", image{join: testbed.KubeadmJoin{Token: k.token}})
	c.mustJoin(t)
	c.mustBeStock(t, k)
}

// The drop-in alone changes nothing.
func testNotEnabled(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "inert", image{dropIn: true, join: testbed.KubeadmJoin{Token: k.token}})
	c.mustJoin(t)
	c.mustHavePrepared(t)
	c.mustBeStock(t, k)
	c.mustDiagnose(t, bootstrapsAround)
}

// mustBeStock checks that kubelet and kube-controller-manager have settled it among themselves, and
// that nothing is there of us.
func (c *computer) mustBeStock(t *testing.T, k *kubeadmCluster) {
	t.Helper()
	all, _ := c.requests(t)
	if requests := c.managersRequests(t); len(all) > 0 || len(requests) != 1 || len(requests[0].Status.Certificate) == 0 ||
		requests[0].Spec.Username != "system:bootstrap:"+k.token[:6] {
		t.Errorf("%d hellos, requests: %+v", len(all), requests)
	}
	if k := c.kubeconfig(); k.Kind != kubelet.Bootstrapped {
		t.Errorf("kubelet.conf: %s", k.Kind)
	}
	if n := c.tpm.Count(); n > 0 {
		t.Errorf("%d TPM commands", n)
	}
	if _, err := os.Stat(c.certs.Path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", c.certs.Path(), err)
	}
	c.mustHave(t, map[string]bool{kubelet.RotatedFile: true, filepath.Dir(kubelet.EnvFile): false, filepath.Dir(configFile): false})
}

const approvalPolicy = "node-attestation-approval"

// dropPolicy takes the policy out of effect by which the controller alone approves.
func (c *cluster) dropPolicy(t *testing.T) {
	t.Helper()
	err := c.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(t.Context(), approvalPolicy, metav1.DeleteOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
