// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/machinelist"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// entry is what identify prints of the machine for a list.
func (m *machine) entry(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), m.plugin, append([]string{"identify", "--output=entry"}, m.flags()...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// inConfigMap writes entries of a list into a ConfigMap of the fleet, as the content of the key
// "machines".
func (f *fleet) inConfigMap(t *testing.T, name string, entries ...string) {
	t.Helper()
	content := strings.TrimSuffix(machinelist.Of(), " []\n") + "\n" + strings.Join(entries, "")
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name}, Data: map[string]string{"machines": content}}
	err := f.client.Update(t.Context(), object)
	if apierrors.IsNotFound(err) {
		err = f.client.Create(t.Context(), object)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// An invalid part of an inventory does not affect machines of another part. If two parts contradict
// each other, the first certificates of those machines wait. The machine that attested renews.
func TestInventoryOfTwoConfigMaps(t *testing.T) {
	var inventory *sources.Inventory
	f := newFleet(t, func(f *fleet, _ *verifier.Policy) {
		entry := func(name string) sources.ConfigMapEntry {
			return sources.ConfigMapEntry{ConfigMap: types.NamespacedName{Namespace: f.namespace, Name: name}, Key: "machines"}
		}
		inventory = sources.NewConfigMapInventory(f.client, entry("north"), entry("south"))
		f.config.Machines = inventory
	})
	north, south, fresh := f.newMachine(t, "north-1"), f.newMachine(t, "south-1"), f.newMachine(t, "north-2")
	hello := func(m *machine) (*peer, string) {
		p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
		return p, p.hello(t).Name
	}
	waits := func(name string, reason verifier.Reason) {
		t.Helper()
		harness.Eventually(t, harness.Soon, "it waits: "+string(reason), func() bool { return waitsFor(f.get(t, name)) == reason })
	}
	f.inConfigMap(t, "north", north.entry(t), "- rack: 1\n")
	f.inConfigMap(t, "south", south.entry(t))
	waiting, first := hello(north)
	waits(first, verifier.ReasonMachineNotFound)
	node := south.attested(t)
	if problem := inventory.Problem(); problem == nil || !strings.Contains(problem.Error(), `configmap north/machines: line `) || strings.Contains(problem.Error(), "south") {
		t.Errorf("the problem is %v", problem)
	}
	f.inConfigMap(t, "north", north.entry(t))
	f.issued(t, waiting.file(t, waiting.proof(t, waiting.challenged(t, f.get(t, first)))), north.name)
	f.inConfigMap(t, "south", "- rack: 1\n")
	harness.Eventually(t, harness.Soon, "the part is read", func() bool { return inventory.Problem() != nil })
	_, proof := node.attests(t)
	f.issued(t, proof, south.name)

	// One EK of each for another machine, too.
	claim := func(m *machine) string {
		return machineentry.Machine{NodeName: "other-" + m.name, EKs: []string{m.identified(t)}}.String()
	}
	f.inConfigMap(t, "south", south.entry(t), claim(fresh))
	f.inConfigMap(t, "north", north.entry(t), claim(south), fresh.entry(t))
	// With south's new entries and north's old ones, fresh is another machine, and denied.
	disputed := []string{south.identified(t), fresh.identified(t)}
	harness.Eventually(t, harness.Soon, "both parts are read, and contradict each other", func() bool {
		if _, err := inventory.Latest(t.Context(), time.Now()); err != nil {
			return false
		}
		problem := inventory.States()[2].Problem
		return problem != nil && strings.Contains(problem.Error(), disputed[0]) && strings.Contains(problem.Error(), disputed[1])
	})
	waiting, first = hello(fresh)
	waits(first, verifier.ReasonAmbiguousMachine)
	_, proof = node.attests(t)
	f.issued(t, proof, south.name)
	f.says(t, proof.Name, string(verifier.ReasonAmbiguousMachine))
	if got := f.get(t, first); got.Annotations[attestation.AnnotationChallenge] != "" || len(got.Status.Conditions) > 0 {
		t.Errorf("it does not wait: %+v", got)
	}
	f.inConfigMap(t, "south", south.entry(t))
	f.issued(t, waiting.file(t, waiting.proof(t, waiting.challenged(t, f.get(t, first)))), fresh.name)
}
