// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

var tokenRequest = &authenticationv1.TokenRequest{}

const configFile = "/etc/kubelet-authenticator/config.yaml"

// systemctl replaces systemd and the kubelet: the unit runs "prepare" first, and the kubelet
// registers its Node with the plugin's certificate. A kubelet that the plugin does not prepare
// needs a bootstrap kubeconfig, and the test replaces it.
const systemctl = `#!/bin/sh
set -eu
case "$*" in
"start kubelet" | "restart kubelet") ;;
"stop kubelet") exit 0 ;;
*) echo "systemctl $*: not played" >&2; exit 1 ;;
esac
kubelet-authenticator prepare
if [ ! -e /run/kubelet-authenticator/kubelet.env ]; then
	exec test -e /etc/kubernetes/bootstrap-kubelet.conf
fi
kubectl --kubeconfig=/etc/kubernetes/kubelet.conf create -f - <<EOF
{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "$(sed -n 's/^nodeName: //p' /etc/kubelet-authenticator/config.yaml)"}}
EOF
`

// dpkg replaces dpkg: a package is the program. test/packages installs real packages.
const dpkg = `#!/bin/sh
set -eu
[ "$1" = -i ]
cp "$2" "$(dirname "$0")/.new"
chmod 755 "$(dirname "$0")/.new"
mv "$(dirname "$0")/.new" "$(dirname "$0")/kubelet-authenticator"
`

// ssh replaces ssh: it runs the command with the node's files in their places.
const ssh = `#!/bin/sh
set -eu
if [ "$1" = -n ]; then shift; exec < /dev/null; fi
host=${1#root@}
shift
exec "$(dirname "$0")/../hosts/$host" "$*"
`

// writeCommands puts the operator's commands, except kubectl, into the shell's PATH.
func (b *bed) writeCommands() error {
	return errors.Join(os.MkdirAll(b.hosts(), 0o700), os.WriteFile(filepath.Join(b.bin, "ssh"), []byte(ssh), 0o700))
}

// hosts has a program for each node, which runs a command there.
func (b *bed) hosts() string { return filepath.Join(filepath.Dir(b.bin), "hosts") }

// operator is the environment of the operator's shell.
func (b *bed) operator() []string {
	return []string{"PATH=" + b.bin + ":" + filepath.Dir(b.Kubectl()) + ":" + os.Getenv("PATH"), "KUBECONFIG=" + b.admin, "HOME=" + b.dir}
}

// node is a machine that runs the plugin, with every file in its usual place.
type node struct {
	harness.Places
	t *testing.T
	// name is the name of its Node, and host its name for ssh.
	name, host, providerID string
	chip                   *swtpm.TPM
}

// newNode makes a machine whose Node has the name, and lists it in the inventory. It has no
// credential.
func newNode(t *testing.T, name string) *node {
	t.Helper()
	n := &node{Places: harness.NewPlaces(t), t: t, name: name, host: name, providerID: "metal://" + name}
	n.chip = n.newChip()
	bin := filepath.Join(t.TempDir(), "bin")
	harness.Must(t, os.Mkdir(bin, 0o700))
	for name, script := range map[string]string{"systemctl": systemctl, "dpkg": dpkg} {
		harness.Must(t, os.WriteFile(filepath.Join(bin, name), []byte(script), 0o700))
	}
	if out, err := exec.CommandContext(t.Context(), "cp", "--", shared.plugin, bin).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	path := bin + ":" + filepath.Dir(shared.Kubectl()) + ":" + os.Getenv("PATH")
	line := n.Command(`exec sh -eu -c "$1"`)
	enter := "#!/bin/sh\nexport PATH='" + path + "' HOME=/root TPM_VERSIONS=tpm/v2,tpm/v1\nunset KUBECONFIG\nexec"
	for _, word := range line {
		enter += " '" + word + "'"
	}
	harness.Must(t, os.WriteFile(filepath.Join(shared.hosts(), name), []byte(enter+` sh "$1"`+"\n"), 0o700))
	n.Write(t, "/etc/kubernetes/.keep", "")
	n.configure("")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s\n%s", n.run("kubelet-authenticator status").Stdout, shared.controller.LogTail())
		}
		harness.KillWorker(t, n.kept())
		forget(t, n.name)
	})
	inventory.Lock()
	defer inventory.Unlock()
	n.listed(n.must("kubelet-authenticator identify"))
	return n
}

func (n *node) newChip() *swtpm.TPM {
	n.t.Helper()
	return swtpm.Start(n.t, swtpm.Options{Certified: []string{"ecc-p256"}, CA: shared.maker})
}

// listed puts an entry into the operator's files, and into the cluster.
func (n *node) listed(entry string) {
	n.t.Helper()
	harness.WriteFile(n.t, machineFile(n.name), []byte(entry))
	applyInventory(n.t)
}

// machineFile is the operator's file of a machine.
func machineFile(name string) string {
	return filepath.Join(shared.dir, "cluster", "machines", name+".yaml")
}

// applyInventory does what the recipes do: it writes the operator's inventory, and applies that.
// It applies the ConfigMap alone, in the name of kubectl, which is faster.
func applyInventory(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(shared.dir, "cluster", "machines", "*.yaml"))
	harness.Must(t, err)
	var all strings.Builder
	for _, file := range files {
		all.WriteString(read(t, file))
	}
	harness.WriteFile(t, filepath.Join(shared.dir, "cluster", "inventory.yaml"), []byte(all.String()))
	applied := applycorev1.ConfigMap("node-attestation-inventory", namespace).WithData(map[string]string{"inventory.yaml": all.String()})
	_, err = shared.Client().CoreV1().ConfigMaps(namespace).Apply(context.WithoutCancel(t.Context()), applied, metav1.ApplyOptions{FieldManager: "kubectl", Force: true})
	harness.Must(t, err)
}

// configure writes the plugin's configuration: the machine's own, and settings.
func (n *node) configure(settings string) {
	n.t.Helper()
	n.Write(n.t, configFile, "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: tpm\nnodeName: "+n.name+
		"\nproviderID: "+n.providerID+"\ntpmDevice: "+n.chip.Socket()+"\nprepareWait: 20s\nwaitTimeout: 20s\n"+settings)
}

// run runs a command on the node.
func (n *node) run(script string) harness.Result {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.t.Context()), harness.ShellLimit)
	defer cancel()
	return harness.Run(n.t, exec.CommandContext(ctx, filepath.Join(shared.hosts(), n.host), script))
}

// must is run, and fails the test if the command fails.
func (n *node) must(script string) (stdout string) {
	n.t.Helper()
	r := n.run(script)
	if r.Code != 0 {
		n.t.Fatalf("%s: %s: exit code %d\n%s%s", n.name, script, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// bootstrap installs a bootstrap credential, as the recipe does.
func (n *node) bootstrap() {
	n.t.Helper()
	token, err := shared.CreateBootstrapToken(n.t.Context(), time.Hour)
	harness.Must(n.t, err)
	n.Write(n.t, kubelet.BootstrapFile, string(shared.BootstrapKubeconfig(token)))
}

// joins enrols the node, registers it, and deletes its bootstrap credential, as kubeadm does.
func (n *node) joins() {
	n.t.Helper()
	n.bootstrap()
	n.must("systemctl start kubelet")
	n.must("rm -f " + kubelet.BootstrapFile + " " + n.certs().File(cache.BootstrapFile))
}

// due makes the node request certificates whose renewal is soon due: they are backdated by an hour.
const due = "expiration: 10m\n"

// enrolsDue gets a certificate that is due, and does not use it: its first use renews it. The
// renewal time is random, so several attempts may be needed.
func (n *node) enrolsDue() {
	n.t.Helper()
	n.configure(due)
	n.bootstrap()
	for range 30 {
		n.removeState()
		n.must("kubelet-authenticator prepare")
		pair, err := n.kept().Current()
		harness.Must(n.t, err)
		if nodestate.RenewAt(pair.Leaf).Before(time.Now()) {
			break
		}
	}
	n.must("rm -f " + kubelet.BootstrapFile + " " + n.certs().File(cache.BootstrapFile))
	n.configure("")
	n.goesOn()
}

// joinsDue is joins with such a certificate.
func (n *node) joinsDue() {
	n.t.Helper()
	n.enrolsDue()
	harness.Must(n.t, shared.client.Create(n.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}}))
}

// forget deletes all objects of a node name in the cluster.
func forget(t *testing.T, name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	inventory.Lock()
	defer inventory.Unlock()
	harness.Must(t, os.RemoveAll(machineFile(name)))
	harness.Must(t, client.IgnoreNotFound(shared.client.Delete(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})))
	for _, record := range records(t, name) {
		harness.Must(t, client.IgnoreNotFound(shared.client.Delete(ctx, &record)))
	}
}

// certs is the certificate directory, by its path on the node.
func (*node) certs() cache.Dir { return cache.At(cache.DefaultPath) }

// kept is the same, by its path here.
func (n *node) kept() cache.Dir { return cache.At(n.At(cache.DefaultPath)) }

// goesOn removes the back-off after a denial, so that no test waits for it.
func (n *node) goesOn() {
	n.t.Helper()
	harness.WorkerEnds(n.t, n.kept())
	state, err := n.kept().State()
	harness.Must(n.t, err)
	lock, err := n.kept().TryLock()
	if errors.Is(err, os.ErrNotExist) {
		return // it has lost everything
	}
	harness.Must(n.t, err)
	defer lock.Unlock()
	state.NextAttempt = time.Time{}
	harness.Must(n.t, lock.SetState(state))
}

// removeState removes everything that the plugin has on the node.
func (n *node) removeState() {
	n.t.Helper()
	harness.WorkerEnds(n.t, n.kept())
	harness.Must(n.t, os.RemoveAll(n.kept().Path()))
}

// hasRecord waits for the node's record: Events are earlier.
func (n *node) hasRecord() {
	n.t.Helper()
	harness.Eventually(n.t, patience, "a record of "+n.name, func() bool { return len(records(n.t, n.name)) == 1 })
}

// user returns the user that the API server sees in the plugin's credential.
func (n *node) user() string {
	n.t.Helper()
	return n.must("kubectl --kubeconfig=" + kubelet.KubeconfigFile + " auth whoami -o 'jsonpath={.status.userInfo.username}'")
}

// records returns the records of a node name, none where the resource is gone.
func records(t *testing.T, name string) []v1alpha1.NodeAttestation {
	t.Helper()
	list := &v1alpha1.NodeAttestationList{}
	err := shared.client.List(context.WithoutCancel(t.Context()), list, client.InNamespace(namespace), client.MatchingFields{"spec.nodeName": name})
	if meta.IsNoMatchError(err) || apierrors.IsNotFound(err) {
		return nil
	}
	harness.Must(t, err)
	return list.Items
}

// hasEvent waits for an Event of a reason on a Node.
func hasEvent(t *testing.T, node, reason string) {
	t.Helper()
	harness.Eventually(t, patience, "an Event "+reason+" on "+node, func() bool {
		list := &eventsv1.EventList{}
		harness.Must(t, shared.client.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault)))
		for _, event := range list.Items {
			if event.Reason == reason && event.Regarding.Name == node {
				return true
			}
		}
		return false
	})
}

// bystander is a node that a recipe does not affect.
type bystander struct {
	*fleet.Machine
	t     *testing.T
	token string
}

// newBystander returns a bystander with a certificate.
func newBystander(t *testing.T, name string) *bystander {
	t.Helper()
	m, err := fleet.NewModel(name, t.TempDir(), shared.maker)
	harness.Must(t, err)
	t.Cleanup(m.Stop)
	t.Cleanup(func() { forget(t, name) })
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	b := &bystander{m, t, token}
	entry, err := fleet.Inventory(t.Context(), m)
	harness.Must(t, err)
	inventory.Lock()
	defer inventory.Unlock()
	harness.WriteFile(t, machineFile(name), entry)
	applyInventory(t)
	b.renews()
	return b
}

// attest gets the next certificate.
func (b *bystander) attest(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := b.Attest(ctx, fleet.Cluster{URL: shared.ServerURL(), CA: shared.ServerCA(), Token: b.token, Issuer: shared.issuer})
	return err
}

func (b *bystander) renews() {
	b.t.Helper()
	harness.Must(b.t, b.attest(b.t.Context()))
}

// keepsRenewing renews repeatedly until the returned function is called. That function fails the
// test if one renewal was refused.
func (b *bystander) keepsRenewing() (stop func()) {
	ctx, cancel := context.WithCancel(b.t.Context())
	var renewed atomic.Int32
	ended := make(chan error, 1)
	go func() {
		for {
			err := b.attest(ctx)
			if err == nil {
				renewed.Add(1)
			}
			if err != nil || ctx.Err() != nil {
				ended <- err
				return
			}
			time.Sleep(500 * time.Millisecond) // a node's load, not a flood
		}
	}()
	return func() {
		b.t.Helper()
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			b.t.Errorf("the bystander: %v", err)
		}
		if renewed.Load() == 0 {
			b.t.Error("the bystander never renewed")
		}
		b.t.Logf("the bystander renewed %d times", renewed.Load())
	}
}

// waitsFor waits until a request of the node's waits, or was denied, for a reason.
func waitsFor(t *testing.T, node, reason string) {
	t.Helper()
	harness.Eventually(t, patience, "a request of "+node+" with an Event "+reason, func() bool {
		hellos, others := harness.Requests(t, shared.ControlPlane, node)
		list := &eventsv1.EventList{}
		harness.Must(t, shared.client.List(t.Context(), list, client.InNamespace(corev1.NamespaceDefault)))
		for _, request := range append(hellos, others...) {
			for _, event := range list.Items {
				if event.Reason == reason && event.Regarding.Name == request.Name {
					return true
				}
			}
		}
		return false
	})
}
