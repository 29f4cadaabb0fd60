// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// instance1 is the honest machine. instance2 is another one in the same account, such as one that
// was started from a copy of the first one's disk. instance3 is the other machine's.
var (
	instance1 = attestation.Instance{Platform: "ec2", ID: "i-1", Account: "a"}
	instance2 = attestation.Instance{Platform: "ec2", ID: "i-2", Account: "a"}
	instance3 = attestation.Instance{Platform: "ec2", ID: "i-3", Account: "a"}
)

// shownBy makes the evidence that of an instance, as package cloudprovider makes it. machine is
// the one that has the instance's provider ID, "" if there is none.
func (w *world) shownBy(i attestation.Instance, machine string) {
	w.in.Evidence = Evidence{Provider: "acme", EK: i.Fingerprint(), Instance: &i, Machine: machine}
}

// pin makes the record that of an instance.
func (r *Record) pin(i attestation.Instance) {
	r.Provider, r.EK, r.Instance, r.AK, r.Boot = "acme", i.Fingerprint(), &i, "", nil
}

// goodInstance is one of a cloud's instance, which Cluster API names by its provider ID. No source
// names keys.
func goodInstance(class Class) *world {
	w := goodAcme(class)
	w.policy.Credential = Recover
	w.in.Machines[0].EKs, w.machine().EKs = nil, nil
	w.in.Records[0].pin(instance3)
	w.shownBy(instance1, w.machine().Ref.Name)
	if class != First {
		w.record().pin(instance1)
		w.in.Token = good(First).in.Token
	}
	return w
}

// An instance is a machine's for as long as the record is there. Each row is what may happen to an
// instance, its name, its Machine or its record.
func TestInstances(t *testing.T) {
	named := func(i attestation.Instance) func(*world) {
		return func(w *world) {
			w.machine().EKs = []NamedEK{{EKInventory, i.Fingerprint()}}
			w.shownBy(i, "") // the rules select by the fingerprint
		}
	}
	for name, c := range map[string]struct {
		class Class
		bend  func(w *world)
		want  Outcome
		why   Reason
		says  string
	}{
		"first":             {First, func(*world) {}, Approve, "", ""},
		"again":             {Again, func(*world) {}, Approve, "", ""},
		"renewal":           {Renewal, func(*world) {}, Approve, "", ""},
		"named, first":      {First, named(instance1), Approve, "", ""},
		"named, renewal":    {Renewal, named(instance1), Approve, "", ""},
		"stopped, migrated": {Renewal, func(w *world) { w.in.Machines[1].Addresses = Addresses{DNSNames: []string{"moved"}} }, Approve, "", ""},

		"its machine is not known": {First, func(w *world) { w.shownBy(instance1, "") }, Wait, ReasonMachineNotFound, ""},
		"another machine's instance": {First, func(w *world) { w.shownBy(instance3, w.in.Machines[0].Ref.Name) }, Deny,
			ReasonProviderIDMismatch, ""},
		"a source names another instance": {First, func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, instance2.Fingerprint()}} }, Deny,
			ReasonIdentityBound, "a source names another endorsement key or instance"},
		// The platform's name, and so the provider ID, of a deleted instance is free again.
		"name reused": {Renewal, func(w *world) { w.shownBy(instance2, w.machine().Ref.Name) }, Deny,
			ReasonIdentityBound, "the machine is another instance"},
		"name reused, and its certificate is lost": {Again, func(w *world) { w.shownBy(instance2, w.machine().Ref.Name) }, Deny,
			ReasonIdentityBound, "the machine is another instance"},
		"in another machine's record": {First, func(w *world) { w.in.Records[0].pin(instance1) }, Deny,
			ReasonIdentityBound, "the endorsement key is another machine's"},
		"its Machine was deleted, the record not yet": {First, func(w *world) {
			w.in.Records[0].pin(instance1)
			w.in.Records[0].Orphaned = true
		}, Wait, ReasonIdentityBound, "that of a machine that is gone"},
		"its Machine and the record were deleted": {First, func(w *world) { w.in.Records = w.in.Records[:0] }, Approve, "", ""},
		// A clone has the disk, and so the certificate and the key, of the first one.
		"clone": {Renewal, func(w *world) { w.shownBy(instance2, "") }, Deny, ReasonIdentityBound, "the node name is bound to another endorsement key"},
		"clone with a machine of its own": {Renewal, func(w *world) { w.shownBy(instance3, w.in.Machines[0].Ref.Name) }, Deny,
			ReasonUnknownCredential, ""},
		"suspended": {Renewal, func(w *world) { w.in.SuspendedEKs = map[string]bool{instance1.Fingerprint(): true} }, Deny, ReasonSuspended, ""},
		"suspended, under another account": {Renewal, func(w *world) {
			i := instance1
			i.Account = "" // not all evidence names it
			w.in.SuspendedEKs = map[string]bool{i.Fingerprint(): true}
		}, Deny, ReasonSuspended, ""},

		// The order of strength.
		"a source names a TPM's key": {First, func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, ek1}} }, Deny,
			ReasonIdentityBound, "a source names another endorsement key or instance"},
		"weaker after stronger": {Renewal, func(w *world) { w.record().Provider, w.record().EK, w.record().Instance = "tpm", ek1, nil }, Deny,
			ReasonIdentityBound, "the machine is held to a stronger provider"},
		"weaker after stronger, for the same instance": {Renewal, func(w *world) {
			w.policy.Providers = slices.Insert(w.policy.Providers, 1, Provider{Name: "acme-strong"})
			w.record().Provider = "acme-strong"
		}, Deny, ReasonIdentityBound, "the machine is held to a stronger provider"},
		"stronger after weaker, for the same instance": {Renewal, func(w *world) {
			w.policy.Providers = append(w.policy.Providers, Provider{Name: "acme-weak"})
			w.record().Provider = "acme-weak"
		}, Approve, "", ""},
	} {
		w := goodInstance(c.class)
		c.bend(w)
		d := w.judge(t)
		switch {
		case d.Outcome != c.want || c.why != "" && d.Refusals.Reason() != c.why:
			t.Errorf("%s: %s, %v, want %s, %s", name, d.Outcome, d.Refusals, c.want, c.why)
		case !strings.Contains(d.Refusals.Error(), c.says):
			t.Errorf("%s: it does not say %q: %v", name, c.says, d.Refusals)
		case c.want == Approve && (d.Grant.Record.EK != instance1.Fingerprint() || *d.Grant.Record.Instance != instance1 || d.Grant.Record.Provider != "acme"):
			t.Errorf("%s: record %+v", name, d.Grant.Record)
		}
	}
}

// Under trust on first use, too, an instance whose provider ID no machine has is nobody's. The
// provider ID in its request is only its own claim.
func TestInstanceIsNotTrustedOnFirstUse(t *testing.T) {
	w := trusting(goodInstance(First))
	w.shownBy(instance2, "")
	if d := w.judge(t); d.Outcome != Wait || d.Refusals.Reason() != ReasonMachineNotFound {
		t.Errorf("%s, %v", d.Outcome, d.Refusals)
	}
	w.in.Evidence.Instance = nil // a vendor's evidence with a key
	if d := w.judge(t); d.Outcome != Approve {
		t.Errorf("the test's request is bad: %s, %v", d.Outcome, d.Refusals)
	}
}

// A node moves from a cloud's evidence to its TPM. The operator lists the endorsement key. Until
// the controller accepts that change, the instance renews. From then on only the TPM does.
func TestInstanceMovesToTPM(t *testing.T) {
	for accepted, want := range map[bool]struct{ instance, tpm Reason }{
		false: {"", ReasonEKChangePending},
		true:  {ReasonIdentityBound, ""},
	} {
		for _, provider := range []string{"acme", "tpm"} {
			for _, class := range []Class{Again, Renewal} {
				w, reason := goodInstance(class), want.instance
				if provider == "tpm" {
					record := *w.record()
					w, reason = good(class), want.tpm
					w.policy.Credential, w.in.Token = Recover, good(First).in.Token
					*w.record() = record
				}
				w.machine().EKs = []NamedEK{{EKInventory, ek1}}
				if accepted {
					w.record().EKReplacedBy = []string{ek1}
				}
				d := w.judge(t)
				switch {
				case (reason == "") != (d.Outcome == Approve) || reason != "" && reason != d.Refusals.Reason():
					t.Errorf("accepted %t, %s, %s: %s, %v", accepted, provider, class, d.Outcome, d.Refusals)
				case provider == "tpm" && reason == "" && (d.Grant.Record.Provider != "tpm" || d.Grant.Record.EK != ek1 || d.Grant.Record.Instance != nil):
					t.Errorf("record %+v", d.Grant.Record)
				}
			}
		}
	}
	// Without a source the TPM does not replace the instance: the operator deletes the record.
	w := good(Renewal)
	w.record().pin(instance1)
	w.machine().EKs = nil
	if d := w.judge(t); d.Outcome == Approve {
		t.Errorf("%s", d.Outcome)
	}
}

// While a source that may name a TPM's key for the machine is unavailable, a cloud's evidence gets
// no machine. An instance in its own record goes on.
func TestInstanceWaitsForSources(t *testing.T) {
	t.Parallel()
	for class, want := range map[Class]Outcome{First: Wait, Renewal: Approve} {
		w := goodInstance(class)
		w.machine().UnavailableSources = []EKSource{EKInventory}
		if d := w.judge(t); d.Outcome != want {
			t.Errorf("%s: %s, %v", class, d.Outcome, d.Refusals)
		}
	}
	w := goodInstance(First)
	w.machine().UnavailableSources = []EKSource{EKPlatform} // not one of the policy
	if d := w.judge(t); d.Outcome != Approve {
		t.Errorf("another source: %s, %v", d.Outcome, d.Refusals)
	}
}

// Two machines have the provider ID of an instance, so the evidence names none. A new instance
// waits, and one in its own record goes on.
func TestInstanceOfTwoMachines(t *testing.T) {
	t.Parallel()
	for class, want := range map[Class]Outcome{First: Wait, Again: Approve, Renewal: Approve} {
		w := goodInstance(class)
		w.in.Machines[0].ProviderID, w.in.Evidence.Machine = w.machine().ProviderID, ""
		if d := w.judge(t); d.Outcome != want {
			t.Errorf("%s: %s, %v", class, d.Outcome, d.Refusals)
		}
	}
}
