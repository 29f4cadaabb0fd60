// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/earlier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// short is the lifetime of a certificate that is due at once, since the controller backdates it.
const short = "expiration: 10m\n"

// Controller and plugin are upgraded one by one, in each order, and downgraded in the same order.
// At the end both are upgraded together, from the state that the downgrade left.
func TestUpgrade(t *testing.T) {
	for _, c := range []struct {
		name  string
		first half
	}{{"controller first", controller}, {"plugin first", plugin}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			second := controller + plugin - c.first
			w := newWorld(t, string(rune('a'+int(c.first))))
			w.changes(c.first, now)
			w.changes(second, now)
			w.changes(c.first, before)
			w.changes(second, before)
			w.changes(controller+plugin, now)
		})
	}
}

// half is the part that an upgrade replaces: controller, plugin, or the sum of both.
type half int

const (
	controller half = 1
	plugin     half = 2
)

// world is a cluster with nodes.
type world struct {
	*cluster
	t *testing.T
	// controls is the present release of the controller, plugged that of the plugin.
	controls, plugged earlier.Release
	// steady has a certificate for a week, and due one that is due before each change.
	steady, due *node
	prefix      string
	changed     int
}

// newWorld makes one of the earlier release.
func newWorld(t *testing.T, prefix string) *world {
	t.Helper()
	w := &world{cluster: newCluster(t, before), t: t, controls: before, plugged: before, prefix: prefix}
	w.steady, w.due = w.newNode(t, prefix+"-steady", before, ""), w.newNode(t, prefix+"-due", before, short)
	w.steady.enrols()
	w.due.enrols()
	return w
}

// changes replaces a half while a proof waits that answers the previous controller's challenge. If
// it replaces the plugin alone, another machine's hello waits, too.
func (w *world) changes(what half, to earlier.Release) {
	w.t.Helper()
	w.changed++
	began := time.Now()
	newNode := func(name string) *node {
		return w.newNode(w.t, fmt.Sprintf("%s-%s-%d", w.prefix, name, w.changed), w.plugged, "")
	}
	w.due.becomesDue()
	steady, due := w.record(w.steady.name), w.record(w.due.name)
	nodes := []*node{w.steady, w.due}
	hello, proof := newNode("hello"), newNode("proof")
	hello.filesHello()
	proof.filesHello()
	w.stops()
	proof.filesProof()
	nodes = append(nodes, hello, proof)

	if what&controller != 0 {
		w.apply(to)
		w.overlaps(proof)
		w.controls = to
	}
	if what&plugin != 0 {
		for _, n := range nodes {
			n.installs(to)
		}
		w.plugged = to
	}
	w.steady.keeps() // nobody answers
	w.starts(w.controls)

	w.steady.sameMachine(steady, w.record(w.steady.name))
	w.due.sameMachine(due, w.record(w.due.name))
	w.steady.keeps()
	w.due.renews()
	proof.finishes()
	hello.finishes()
	newNode("fresh").enrols()
	if conditions := w.record(w.due.name).Status.Conditions; w.controls == now && len(conditions) == 0 {
		w.t.Errorf("the record of %s has no conditions", w.due.name)
	}
	w.t.Logf("controller of %s, plugin of %s: %s", w.controls.Name, w.plugged.Name, time.Since(began).Round(time.Second))
}

// overlaps runs the old controller after the other release's manifests were applied, like a pod
// that is not replaced yet. It may lack a right that the other release has under another name. Then
// requests may wait, and nothing else may happen.
func (w *world) overlaps(proof *node) {
	w.t.Helper()
	from := len(w.log())
	harness.Must(w.t, w.controller.Start(w.t.Context()))
	harness.Eventually(w.t, patience, "the controller has issued, or lacks a right", func() bool {
		_, proofs := harness.Requests(w.t, w.ControlPlane, proof.name)
		return len(proofs[0].Status.Certificate) > 0 || strings.Contains(w.log()[from:], "forbidden")
	})
	w.steady.keeps()
	w.stops()
}

// A setting of a later release is left in the configuration files after a downgrade. The controller
// does not start. The node's certificate is served, and not renewed. Without the setting all goes
// on.
func TestUpgradeUnknownSetting(t *testing.T) {
	t.Parallel()
	const later, exitConfiguration = "settingOfALaterRelease: true\n", 10
	for _, r := range []earlier.Release{before, now} {
		t.Run(r.Name, func(t *testing.T) {
			c := newCluster(t, r)
			n := c.newNode(t, "unknown-setting", r, short)
			n.enrols()
			n.becomesDue()
			due := n.pair().Fingerprint()
			hellos, proofs := n.filed()
			n.configures(short + later)
			if used := n.uses(); used != "X509SHA256="+due {
				t.Errorf("it uses %s, and has %s", used, due)
			}
			if result := n.run("kubelet-authenticator --dry-run"); result.Code != exitConfiguration || !strings.Contains(result.Stderr, "settingOfALaterRelease") {
				t.Errorf("exit code %d: %s", result.Code, result.Stderr)
			}
			if h, p := n.filed(); h != hellos || p != proofs || n.kept().Worker().Alive() {
				t.Errorf("%d hellos and %d proofs, were %d and %d", h, p, hellos, proofs)
			}

			c.stops()
			settings := read(t, c.controller.ConfigFile())
			harness.WriteFile(t, c.controller.ConfigFile(), []byte(settings+later))
			harness.Must(t, c.controller.Start(t.Context()))
			harness.Eventually(t, patience, "the controller says what it does not know", func() bool { return strings.Contains(c.log(), "settingOfALaterRelease") })
			harness.Eventually(t, patience, "it has ended with the exit code for that", func() bool {
				err := c.controller.Process().Err()
				return err != nil && strings.Contains(err.Error(), fmt.Sprintf("exit status %d", exitConfiguration))
			})
			harness.WriteFile(t, c.controller.ConfigFile(), []byte(settings))
			c.starts(r)
			n.configures(short)
			n.renews()
		})
	}
}

// A source names other EKs for machines. After a downgrade the earlier release does not know that
// the old EKs were replaced. It accepts them again, unless tpm.deniedEKs has them, as
// docs/operations.md says.
func TestUpgradeReplacedEK(t *testing.T) {
	t.Parallel()
	if strings.Contains(read(t, filepath.Join(before.Module, "packaging", "kubernetes", "crd.yaml")), "ekReplaced") {
		t.Skipf("%s knows which EKs are replaced", before.Name)
	}
	c := newCluster(t, now)
	refused, forgotten, denied := c.newNode(t, "refused", now, short), c.newNode(t, "forgotten", now, short), c.newNode(t, "denied", now, short)
	nodes := []*node{refused, forgotten, denied}
	replaced := "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"
	for i, n := range nodes {
		n.enrols()
		n.becomesDue()
		replaced += fmt.Sprintf("- {nodeName: %s, providerID: metal://%s, eks: [{fingerprint: %064d}]}\n", n.name, n.name, i+1)
	}
	c.inventory.Reset()
	c.lists(replaced)
	for _, n := range nodes {
		harness.Eventually(t, patience, "the EK of "+n.name+" is replaced", func() bool { return c.record(n.name).Status.EKReplaced != nil })
	}
	refused.isDenied()

	c.stops()
	c.apply(before)
	c.starts(before)
	forgotten.renews()
	c.stops()
	settings := read(t, c.controller.ConfigFile())
	harness.WriteFile(t, c.controller.ConfigFile(), []byte(strings.ReplaceAll(settings, deniedEK, c.record(denied.name).Spec.EK.Fingerprint)))
	c.starts(before)
	denied.isDenied()
}

// isDenied has a node whose certificate is due use it, and waits until a request for the next one
// is denied.
func (n *node) isDenied() {
	n.t.Helper()
	due := n.pair().Fingerprint()
	n.uses()
	harness.Eventually(n.t, patience, n.name+" is denied", func() bool {
		hellos, proofs := harness.Requests(n.t, n.ControlPlane, n.name)
		return slices.ContainsFunc(append(hellos, proofs...), func(r certificatesv1.CertificateSigningRequest) bool {
			return slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
				return c.Type == certificatesv1.CertificateDenied
			})
		})
	})
	if n.pair().Fingerprint() != due {
		n.t.Errorf("%s has renewed", n.name)
	}
}
