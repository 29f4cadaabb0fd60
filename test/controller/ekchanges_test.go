// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// names writes an inventory in which machines have these EKs, by node name.
func (f *fleet) names(t *testing.T, eks map[string]string) {
	t.Helper()
	inventory := "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"
	for name, ek := range eks {
		inventory += fmt.Sprintf("- {nodeName: %s, providerID: test://%s, eks: [{fingerprint: %s}]}\n", name, name, ek)
	}
	harness.WriteFile(t, f.inventory, []byte(inventory))
}

// strange returns the fingerprint of an EK that no TPM has.
func strange(what string) string {
	sum := sha256.Sum256([]byte(what))
	return hex.EncodeToString(sum[:])
}

// node registers a Node, for Events on it.
func (f *fleet) node(t *testing.T, name string) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if err := f.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.client.Delete(context.WithoutCancel(t.Context()), node) })
}

// eventsOf returns what Events of a reason say about an object.
func (f *fleet) eventsOf(t *testing.T, name, reason string) (notes []string) {
	t.Helper()
	list := &eventsv1.EventList{}
	if err := f.client.List(t.Context(), list, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	for _, event := range list.Items {
		if event.Regarding.Name == name && event.Reason == reason {
			notes = append(notes, event.Note)
		}
	}
	return notes
}

// says waits until there is an Event of a reason about an object, and returns what it says.
func (f *fleet) says(t *testing.T, name, reason string) (note string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "an Event "+reason+" on "+name, func() bool {
		for _, note = range f.eventsOf(t, name, reason) {
			return true
		}
		return false
	})
	return note
}

// TPM A enrolled. Then the inventory names TPM B for that machine. A is refused with any
// credential, and B is admitted.
func TestInventoryReplacesAnEK(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Credential = verifier.Recover })
	a, b := f.newMachine(t, "replaced"), f.newMachine(t, "replaced")
	f.inventoried(t, a)
	node := a.attested(t) // renews with A's certificate
	f.node(t, a.name)
	before := f.record(t, a.name)
	if before.Spec.EK.Source != string(verifier.EKInventory) {
		t.Fatalf("the record says that %q vouched for the EK", before.Spec.EK.Source)
	}

	f.inventoried(t, b)
	// at once: it waits until the change is accepted
	hello := f.newPeer(t, b.chip, f.asToken(b.token), b.name, b.name)
	filed := hello.hello(t)
	harness.Eventually(t, harness.Soon, "the change is accepted", func() bool { return f.record(t, a.name).Status.EKReplaced != nil })
	for what, p := range map[string]*peer{
		"a renewal":                 node,
		"its token":                 f.newPeer(t, a.chip, f.asToken(a.token), a.name, a.name),
		"another bootstrap token":   f.newPeer(t, a.chip, f.asToken(f.newToken(t)), a.name, a.name),
		"without its name's record": f.newPeer(t, a.chip, f.asToken(a.token), "replaced-other", a.name),
	} {
		denied := p.hello(t)
		f.refused(t, denied, string(verifier.ReasonEKReplaced))
		if what == "a renewal" {
			f.says(t, denied.Name, string(verifier.ReasonEKReplaced))
		}
	}
	proof := hello.file(t, hello.proof(t, hello.challenged(t, filed)))
	certificate := f.issued(t, proof, b.name)
	after := f.record(t, a.name)
	if after.UID != before.UID || after.Spec.EK.Fingerprint == before.Spec.EK.Fingerprint || after.Status.EKReplaced != nil {
		t.Errorf("%+v", after)
	}
	for _, c := range after.Status.Certificates {
		if c.FormerEK == (c.RequestUID == proof.UID) {
			t.Errorf("the certificate of request %s: of the former EK: %t", c.RequestUID, c.FormerEK)
		}
	}
	history := after.Status.EKHistory
	if len(history) != 1 || history[0].Fingerprint != before.Spec.EK.Fingerprint || history[0].Source != string(verifier.EKInventory) || history[0].RequestUID != proof.UID {
		t.Errorf("the history is %+v", history)
	}
	f.says(t, proof.Name, string(verifier.ReasonEKReplaced))
	f.says(t, a.name, watch.ReasonEKChangeAccepted)
	f.refused(t, node.hello(t), string(verifier.ReasonEKReplaced))

	// B renews like any other machine.
	again := f.newPeer(t, b.chip, f.asNode(certificate, hello.keyPEM), b.name, b.name)
	_, proof = again.attests(t)
	f.issued(t, proof, b.name)
}

// No class of request admits a denied EK, not even the recovery of a lost record.
func TestDeniedEKIsNotRecovered(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Credential = verifier.Recover })
	m := f.newMachine(t, "denied-ek")
	f.inventoried(t, m)
	node := m.attested(t)
	record := f.record(t, m.name)
	fingerprint, err := verifiertpm.ParseFingerprint(record.Spec.EK.Fingerprint)
	if err != nil {
		t.Fatal(err)
	}
	f.stop()
	f.config.Providers = []evidence.Provider{tpmprovider.Provider{Verifier: f.verifier(t, fingerprint)}}
	remove(t, f, record)
	f.start(t)
	f.refused(t, node.hello(t), string(verifiertpm.ReasonEKDenied))
	if n := f.records(t); n != 0 {
		t.Errorf("%d records", n)
	}
}

// If no source names the EK, class Again depends on the record alone: then the token must have been
// made for the machine.
func TestAgainTakesTheMachinesToken(t *testing.T) {
	f := newFleet(t, func(_ *fleet, p *verifier.Policy) { p.Token, p.EKNotNamed = verifier.Required, verifier.Warn })
	m, other := f.newMachine(t, "comes-again"), f.newMachine(t, "its-neighbour")
	eks := map[*machine]string{m: m.identified(t), other: other.identified(t)}
	entry := func(m *machine, ek string) string {
		return fmt.Sprintf("- {nodeName: %s, providerID: test://%s, bootstrapTokenID: %s, eks: [{fingerprint: %s}]}\n", m.name, m.name, strings.Split(m.token, ".")[0], ek)
	}
	head := "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n"
	harness.WriteFile(t, f.inventory, []byte(head+entry(m, eks[m])+entry(other, eks[other])))
	m.attested(t)

	// A source names the EK: any bootstrap token is enough.
	_, proof := f.newPeer(t, m.chip, f.asToken(other.token), m.name, m.name).attests(t)
	f.issued(t, proof, m.name)

	// No longer named: the record's source is unknown, as in records of older releases, and the
	// inventory names another EK.
	record := f.record(t, m.name)
	record.Spec.EK.Source = ""
	if err := f.client.Update(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	harness.WriteFile(t, f.inventory, []byte(head+entry(m, strange("another board"))+entry(other, eks[other])))
	f.refused(t, f.newPeer(t, m.chip, f.asToken(other.token), m.name, m.name).hello(t), string(verifier.ReasonTokenNotForMachine))
	_, proof = f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name).attests(t)
	f.issued(t, proof, m.name)
	f.says(t, proof.Name, string(verifier.ReasonEKNotNamed))
}

// A mistake in the inventory takes down three machines at most, at once or in steps. The others
// renew by their records, until an operator acknowledges the change.
func TestManyEKChangesAreHeld(t *testing.T) {
	var keys *sources.KeyStore
	var secret types.NamespacedName
	f := newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.Credential = verifier.Recover
		secret = types.NamespacedName{Namespace: f.namespace, Name: "challenge-keys"}
		keys = sources.NewKeyStore(f.client, f.client, secret, func(verifiertpm.Keys) (*verifiertpm.Verifier, error) { return &verifiertpm.Verifier{}, nil })
		f.config.AcceptedEKChanges = keys
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = keys.Start(ctx) }()

	var machines []*machine
	eks, renew := map[string]string{}, map[string]*peer{}
	for i := range 4 {
		m := f.newMachine(t, fmt.Sprintf("held-%d", i))
		machines = append(machines, m)
		eks[m.name] = m.identified(t)
	}
	f.names(t, eks)
	for _, m := range machines {
		renew[m.name] = m.attested(t)
		f.node(t, m.name)
	}
	refused := func(m *machine) bool { return f.record(t, m.name).Status.EKReplaced != nil }

	// One change at a time: the first one is refused, and stays refused.
	eks["held-0"] = strange("0")
	f.names(t, eks)
	harness.Eventually(t, harness.Soon, "one change is accepted", func() bool { return refused(machines[0]) })
	f.refused(t, renew["held-0"].hello(t), string(verifier.ReasonEKReplaced))

	// More changes are over the limit, so none of them is refused.
	for i, m := range machines[1:] {
		eks[m.name] = strange(fmt.Sprint(i + 1))
	}
	f.names(t, eks)
	note := f.says(t, "held-1", watch.ReasonEKChangeHeld)
	for _, m := range machines[1:] {
		_, proof := renew[m.name].attests(t)
		f.issued(t, proof, m.name)
		if refused(m) {
			t.Errorf("%s is refused", m.name)
		}
	}
	f.refused(t, renew["held-0"].hello(t), string(verifier.ReasonEKReplaced))

	// An acknowledgement of another change does not count.
	name := regexp.MustCompile(sources.AnnotationAcceptEKChanges + `=(Inventory-[0-9a-f]{16})`).FindStringSubmatch(note)
	if name == nil {
		t.Fatalf("the Event does not say how to acknowledge: %s", note)
	}
	f.annotate(t, secret, "Inventory-0000000000000000")
	time.Sleep(5 * time.Second) // the store reads every 2 s, and as often is compared
	if refused(machines[1]) {
		t.Fatal("accepted by an acknowledgement of another change")
	}
	f.annotate(t, secret, "Inventory-0000000000000000,"+name[1])
	for _, m := range machines[1:] {
		harness.Eventually(t, harness.Soon, "the acknowledged change is accepted", func() bool { return refused(m) })
		f.refused(t, renew[m.name].hello(t), string(verifier.ReasonEKReplaced))
	}

	// The operator finds that it was a mistake after all.
	mistake := maps.Clone(eks)
	for _, m := range machines {
		eks[m.name] = f.record(t, m.name).Spec.EK.Fingerprint
	}
	f.names(t, eks)
	for _, m := range machines {
		harness.Eventually(t, harness.Soon, "the EK counts again", func() bool { return !refused(m) })
	}
	_, proof := renew["held-0"].attests(t)
	f.issued(t, proof, "held-0")

	// The same mistake again is held again: an acknowledgement is used once.
	f.names(t, mistake)
	time.Sleep(5 * time.Second) // as above
	for _, m := range machines {
		if refused(m) {
			t.Errorf("%s is refused by an acknowledgement that was used", m.name)
		}
	}
	if left := keys.AcknowledgedEKChanges(); len(left) != 1 || left[0] == name[1] {
		t.Errorf("the Secret has %v", left)
	}
}

// annotate acknowledges a change.
func (f *fleet) annotate(t *testing.T, secret types.NamespacedName, change string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, sources.AnnotationAcceptEKChanges, change)
	object := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: secret.Namespace, Name: secret.Name}}
	if err := f.client.Patch(t.Context(), object, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

// identified returns the fingerprint of the EK that the machine enrols with.
func (m *machine) identified(t *testing.T) string {
	t.Helper()
	all := m.fingerprints(t)
	fingerprint, ok := all["ecc-p256"] // the one with a certificate
	if !ok {
		t.Fatalf("no such EK: %v", all)
	}
	return fingerprint
}
