// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"context"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// goodTrust is a proof of a new machine whose endorsement key nobody names.
func goodTrust() *world { return trusting(good(First)) }

// trusting has the policy trust on first use, and nobody name the machine's endorsement key.
func trusting(w *world) *world {
	w.policy.TrustOnFirstUse = true
	w.machine().EKs, w.machine().Created = nil, testNow.Add(-10*time.Minute)
	return w
}

// another adds a third machine, as new as the honest one.
func (w *world) another() *Machine {
	m := machine("worker-3")
	m.Created = testNow.Add(-10 * time.Minute)
	w.in.Machines = append(w.in.Machines, m)
	return &w.in.Machines[2]
}

// Each condition of trust on first use, for proof and hello alike. TrustsOnFirstUse is asked before
// there is any evidence.
func TestTrustOnFirstUse(t *testing.T) {
	type reasons = []Reason
	made := func(ago time.Duration) func(*world) {
		return func(w *world) { w.machine().Created = testNow.Add(-ago) }
	}
	recorded := func(bend func(*Record)) func(*world) {
		return func(w *world) {
			r := recordOf(nodeName, "e8")
			bend(&r)
			w.in.Records = append(w.in.Records, r)
		}
	}
	for _, c := range []struct {
		name     string
		bend     func(*world)
		want     Outcome // Approve: Challenge for a hello
		why      reasons
		proposes bool
	}{
		{"good", func(*world) {}, Approve, nil, true},
		{"no source of keys at all", func(w *world) { w.policy.EKSources = nil }, Approve, nil, true},
		{"a source that does not count names another key", func(w *world) { w.machine().EKs = []NamedEK{{EKAnnotation, "e8"}} }, Approve, nil, true},
		{"a source names no key", func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, ""}} }, Approve, nil, true},
		{"almost two hours old", made(2*time.Hour - time.Second), Approve, nil, true},
		{"made a little ahead", made(-5 * time.Minute), Approve, nil, true},
		{"the key is named: nothing else matters", func(w *world) {
			made(24 * time.Hour)(w)
			w.machine().EKs, w.machine().NodeRef = []NamedEK{{EKInventory, ek1}}, "a-node"
		}, Approve, nil, false},
		// What it does not stop, as documented: a client that has the token and the provider ID,
		// and is first, is the machine. See TestFirstUseIsWorthTheTokensSecrecy for what follows.
		{"LIMIT: an attacker with his own key, and the machine's token and provider ID", func(w *world) { w.in.Evidence.EK = "e9" }, Approve, nil, true},

		{"off", func(w *world) { w.policy.TrustOnFirstUse = false }, Wait, reasons{ReasonMachineNotFound}, false},

		{"the token is not known yet", func(w *world) { w.in.Token = Token{} }, Wait, reasons{ReasonTokenNotForMachine}, false},
		{"the token is only guessed", func(w *world) { w.in.Token.Known = false }, Wait, reasons{ReasonTokenNotForMachine}, false},
		{"the token is not known for long", func(w *world) { w.in.Token = Token{}; w.created(time.Hour) }, Deny, reasons{ReasonTokenNotForMachine}, false},
		{"the token is another machine's", func(w *world) { w.in.Token.Machine = machine("worker-2").Ref }, Deny, reasons{ReasonTokenNotForMachine}, false},
		{"the token is of a machine of the same name", func(w *world) { w.in.Token.Machine.UID = "older" }, Deny, reasons{ReasonTokenNotForMachine}, false},
		{"the token is nobody's", func(w *world) { w.in.Token.Machine = MachineRef{} }, Deny, reasons{ReasonTokenNotForMachine}, false},
		{"no token", user("system:serviceaccount:infra:joiner", "system:serviceaccounts:infra"), Deny, reasons{ReasonTokenNotForMachine}, false},
		{"not in the tokens' group", user("system:bootstrap:abc123", "system:authenticated"), Deny, reasons{ReasonRequesterNotAllowed}, false},
		{"a renewal without a record", user(userNode+nodeName, groupNodes), Wait, reasons{ReasonMachineNotFound}, false},

		{"no machine yet", func(w *world) { w.in.Machines = w.in.Machines[:1] }, Wait, reasons{ReasonMachineNotFound}, false},
		{"no machine for long", func(w *world) { w.in.Machines = w.in.Machines[:1]; w.created(time.Hour) }, Deny, reasons{ReasonMachineNotFound}, false},
		{"the machine has no provider ID yet", func(w *world) { w.machine().ProviderID = "" }, Wait, reasons{ReasonMachineNotFound}, false},
		{"no machine of this provider ID", func(w *world) { w.machine().ProviderID = "acme://zone/worker-9" }, Wait, reasons{ReasonMachineNotFound}, false},
		{"the request has no provider ID", func(w *world) { w.named(nodeName, "") }, Wait, reasons{ReasonMachineNotFound}, false},
		{"neither has a provider ID", func(w *world) { w.named(nodeName, ""); w.machine().ProviderID = "" }, Wait, reasons{ReasonMachineNotFound}, false},
		{"a machine without a name", func(w *world) { w.machine().Ref = MachineRef{} }, Wait, reasons{ReasonMachineNotFound}, false},
		{"two machines have the provider ID", func(w *world) { w.another().ProviderID = providerID }, Deny, reasons{ReasonAmbiguousMachine}, false},
		{"another machine's provider ID", func(w *world) {
			w.another()
			w.named(nodeName, "acme://zone/worker-3")
		}, Deny, reasons{ReasonTokenNotForMachine, ReasonNodeNameMismatch, ReasonAmbiguousName}, false},
		{"another machine, with its provider ID and name", func(w *world) {
			w.another()
			w.named("worker-3", "acme://zone/worker-3")
		}, Deny, reasons{ReasonTokenNotForMachine}, false},

		{"nothing says how old it is", func(w *world) { w.machine().Created = time.Time{} }, Wait, reasons{ReasonMachineNotFound}, false},
		{"far from made", made(-5*time.Minute - time.Second), Wait, reasons{ReasonMachineNotFound}, false},
		{"two hours old", made(2 * time.Hour), Deny, reasons{ReasonTrustExpired}, false},
		{"years old", made(30000 * time.Hour), Deny, reasons{ReasonTrustExpired}, false},
		{"it has, or had, a nodeRef", func(w *world) { w.machine().NodeRef = "a-node" }, Deny, reasons{ReasonNodeAlreadyRegistered}, false},
		{"its nodeRef is to a Node of its own name", func(w *world) { w.machine().NodeRef = nodeName }, Deny, reasons{ReasonNodeAlreadyRegistered}, false},
		// An attested node that claims this machine's provider ID has it refer to that node.
		{"its nodeRef is to another machine's Node", func(w *world) { w.machine().NodeRef = "worker-2" }, Approve, nil, true},
		{"its nodeRef is to a Node whose record is about to go", func(w *world) {
			w.machine().NodeRef, w.in.Records[0].Orphaned = "worker-2", true
		}, Deny, reasons{ReasonNodeAlreadyRegistered}, false},

		{"the machine has a record", recorded(func(*Record) {}), Deny, reasons{ReasonIdentityBound}, false},
		{"the machine has a record, and a Node", func(w *world) {
			recorded(func(*Record) {})(w)
			w.in.Node, w.machine().NodeRef = Present, "a-node"
		}, Deny, reasons{ReasonIdentityBound, ReasonNodeAlreadyRegistered}, false},
		{"the machine has a record without a key", recorded(func(r *Record) { r.EK, r.Provider = "", InsecureProvider }), Deny, reasons{ReasonIdentityBound}, false},
		{"a record of the machine before", recorded(func(r *Record) { r.Machine.UID = "older" }), Deny, reasons{ReasonIdentityBound, ReasonAmbiguousName}, false},
		{"a record of the machine before, with this key", recorded(func(r *Record) { r.Machine.UID, r.EK = "older", ek1 }), Deny, reasons{ReasonIdentityBound, ReasonAmbiguousName}, false},
		{"a record of the machine before, about to go", recorded(func(r *Record) { r.Machine.UID, r.Orphaned = "older", true }), Wait, reasons{ReasonIdentityBound}, true},
		{"the key is in a record about to go", func(w *world) { w.in.Records[0].EK, w.in.Records[0].Orphaned = ek1, true }, Wait, reasons{ReasonIdentityBound}, true},
		{"the key is in the record of a machine that is gone", func(w *world) {
			w.in.Records[0].EK = ek1
			w.in.Machines[0] = machine("worker-7")
		}, Deny, reasons{ReasonIdentityBound}, false},
		// In these two the key selects the machine, as without trust on first use.
		{"the key is in another machine's record", func(w *world) { w.in.Records[0].EK, w.in.Machines[0].EKs = ek1, nil }, Deny,
			reasons{ReasonTokenNotForMachine, ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonIdentityBound}, false},
		{"the key is named for another machine", func(w *world) { w.another().EKs = []NamedEK{{EKInventory, ek1}} }, Deny,
			reasons{ReasonTokenNotForMachine, ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonAmbiguousName}, false},
		{"the key is named for a machine without a name", func(w *world) {
			*w.another() = Machine{EKs: []NamedEK{{EKInventory, ek1}}}
		}, Deny, reasons{ReasonIdentityBound}, false},
		{"another key is named for the machine", func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, "e8"}} }, Deny, reasons{ReasonNodeNameMismatch}, false},
		{"another key is named for the machine, whose node name is not known", func(w *world) {
			w.machine().EKs, w.machine().Names = []NamedEK{{EKInventory, "e8"}}, nil
		}, Wait, reasons{ReasonMachineNotFound}, false},

		{"all at once", func(w *world) {
			recorded(func(*Record) {})(w)
			made(3 * time.Hour)(w)
			w.in.Token.Machine, w.machine().NodeRef = machine("worker-2").Ref, "a-node"
		}, Deny, reasons{ReasonTokenNotForMachine, ReasonIdentityBound, ReasonNodeAlreadyRegistered, ReasonTrustExpired}, false},

		// The other rules hold as for any first request.
		{"not ready", func(w *world) { w.machine().Ready = false }, Wait, reasons{ReasonMachineNotReady}, true},
		{"being deleted", func(w *world) { w.machine().Deleted = testNow }, Deny, reasons{ReasonMachineDeleting}, true},
		{"another node name", func(w *world) { w.named("worker-9", providerID) }, Deny, reasons{ReasonNodeNameMismatch}, true},
		{"a node name with a record", func(w *world) { w.named("worker-2", providerID) }, Deny, reasons{ReasonAmbiguousName, ReasonNodeNameMismatch, ReasonIdentityBound}, true},
		{"a Node exists", func(w *world) { w.in.Node = Present }, Deny, reasons{ReasonNodeAlreadyRegistered}, true},
		{"no usages", usages(), Deny, reasons{ReasonUsageMismatch}, false},
		{"no time", func(w *world) { w.in.Now = time.Time{} }, Deny, reasons{ReasonRefused}, false},

		{"the evidence is refused", func(w *world) { w.in.Evidence = Evidence{EK: ek1, Err: Refusals{{"AttestationX", "x"}}} }, Deny, reasons{"AttestationX"}, true},
		{"the evidence is not judged yet", func(w *world) { w.in.Evidence = Evidence{EK: ek1, Err: context.Canceled} }, Wait, reasons{ReasonAttestationUnavailable}, true},
		{"the evidence says that nobody names its key", func(w *world) {
			w.in.Evidence.EKUntrusted, w.in.Evidence.Err = true, Refusals{{"AttestationEKUntrusted", "x"}}
		}, Wait, reasons{ReasonMachineNotFound}, true},
	} {
		for _, hello := range []bool{false, true} {
			name, w, want := "proof: "+c.name, goodTrust(), c.want
			if hello && c.name == "a Node exists" {
				continue // M5 is judged by the proof
			}
			if hello {
				name, w = "hello: "+c.name, trusting(goodHello(First))
				if want == Approve {
					want = Challenge
				}
			}
			t.Run(name, func(t *testing.T) {
				c.bend(w)
				ref, proposes := must(New(w.policy)).TrustsOnFirstUse(w.in, w.in.Evidence.EK)
				if proposes != c.proposes || proposes && ref != machine(nodeName).Ref || !proposes && ref != (MachineRef{}) {
					t.Errorf("proposes %v, %t, want %t", ref, proposes, c.proposes)
				}
				d := w.judge(t)
				if d.Outcome != want || !slices.Equal(d.Refusals.Reasons(), c.why) || (d.Grant != nil) != (c.want == Approve) || len(d.Warnings) > 0 {
					t.Errorf("%s, %v, %+v, want %s, %v", d.Outcome, d.Refusals, d.Grant, want, c.why)
				}
				for i, refusal := range d.Refusals {
					if slices.Contains(d.Refusals[:i], refusal) {
						t.Errorf("twice: %s", refusal)
					}
				}
				// Until TrustsOnFirstUse has said yes, the evidence is that of a key which nobody
				// names.
				w.in.Evidence.EKUntrusted, w.in.Evidence.Err = true, Refusals{{"AttestationEKUntrusted", "x"}}
				if d := w.judge(t); d.Outcome != Wait && d.Outcome != Deny || d.Refusals == nil || !proposes && want == Deny && d.Outcome != Deny {
					t.Errorf("unvouched: %s, %v", d.Outcome, d.Refusals)
				}
			})
		}
	}
}

// Nothing but a token's first request with an endorsement key is trusted.
func TestTrustsNothingElse(t *testing.T) {
	for name, c := range map[string]struct {
		world *world
		ek    string
		bend  func(*world)
	}{
		"no key":           {goodTrust(), "", nil},
		"a signer unknown": {goodTrust(), ek1, func(w *world) { w.in.Request.Spec.SignerName = "example.com/other" }},
		"no request":       {goodTrust(), ek1, func(w *world) { w.in.Request = nil }},
		"malformed":        {goodTrust(), ek1, func(w *world) { w.in.Request.Spec.Request = nil }},
		"another provider": {goodTrust(), ek1, func(w *world) {
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "acme"))
		}},
		"insecure":                  {trusting(goodInsecure()), ek1, nil},
		"again":                     {trusting(good(Again)), ek1, func(w *world) { w.in.Token = Token{true, machine(nodeName).Ref} }},
		"renewal":                   {trusting(good(Renewal)), ek1, func(w *world) { w.in.Token = Token{true, machine(nodeName).Ref} }},
		"renewal, no record":        {trusting(good(Renewal)), ek1, func(w *world) { w.in.Records, w.in.Token = nil, Token{true, machine(nodeName).Ref} }},
		"a serving certificate":     {trusting(goodServing()), ek1, func(w *world) { w.in.Records = nil }},
		"a node that is let alone":  {trusting(goodUnattested()), ek1, nil},
		"approved, with its record": {func() *world { w := goodTrust(); w.approve(); return w }(), ek1, nil},
	} {
		if c.bend != nil {
			c.bend(c.world)
		}
		if ref, proposes := must(New(c.world.policy)).TrustsOnFirstUse(c.world.in, c.ek); proposes || ref != (MachineRef{}) {
			t.Errorf("%s: %v", name, ref)
		}
	}
	w := goodTrust()
	for _, rules := range []*Rules{nil, {}} {
		if _, proposes := rules.TrustsOnFirstUse(w.in, ek1); proposes {
			t.Error("no policy proposes")
		}
	}
}

// Evidence that says itself which machine it is of, and the insecure signer, are no matter of trust
// on first use.
func TestNothingElseIsTrustedOnFirstUse(t *testing.T) {
	for name, c := range map[string]struct {
		world *world
		bend  func(*world)
		want  Outcome
		why   []Reason
	}{
		"a cloud's":                     {goodCloud(First), nil, Approve, nil},
		"a cloud's, no such machine":    {goodCloud(First), func(w *world) { w.in.Evidence.Machine = "ns/worker-9" }, Wait, []Reason{ReasonMachineNotFound}},
		"a cloud's, of another machine": {goodCloud(First), func(w *world) { w.in.Evidence.Machine = "ns/worker-2" }, Deny, []Reason{ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonIdentityBound}},
		"a cloud's, with a key nobody names": {goodCloud(First), func(w *world) {
			w.in.Evidence.Machine, w.in.Evidence.EK, w.in.Evidence.EKUntrusted, w.machine().NodeRef = "ns/worker-9", "e9", true, "a-node"
		}, Wait, []Reason{ReasonMachineNotFound}},
		"a vendor's, of one round": {goodAcme(First), nil, Approve, nil},
		"insecure":                 {goodInsecure(), nil, Approve, nil},
		"insecure, the token is not known": {goodInsecure(), func(w *world) { w.in.Token = Token{} }, Wait,
			[]Reason{ReasonMachineNotFound, ReasonTokenNotForMachine}},
		"insecure, an old machine that has joined": {goodInsecure(), func(w *world) {
			w.machine().Created, w.machine().NodeRef = testNow.AddDate(-1, 0, 0), "a-node"
		}, Approve, nil},
	} {
		w := trusting(c.world)
		if c.bend != nil {
			c.bend(w)
		}
		if d := w.judge(t); d.Outcome != c.want || !slices.Equal(d.Refusals.Reasons(), c.why) {
			t.Errorf("%s: %s, %v, want %s, %v", name, d.Outcome, d.Refusals, c.want, c.why)
		}
	}
}

// What trust on first use does not stop, as documented: the first boot is worth the token's
// secrecy. A client that has the machine's token and provider ID, and comes first, gets the
// certificate with a TPM of its own. The attack is seen then: the real machine is refused, until
// the operator names its key.
func TestFirstUseIsWorthTheTokensSecrecy(t *testing.T) {
	attacker := trusting(goodHello(First))
	attacker.in.Evidence.EK = "e9"
	if d := attacker.judge(t); d.Outcome != Challenge {
		t.Fatalf("the attacker's hello: %s, %v", d.Outcome, d.Refusals)
	}
	attacker = goodTrust()
	attacker.in.Evidence.EK = "e9"
	attacker.approve()
	if d := attacker.judge(t); d.Outcome != Sign || d.Class != First || d.Grant.NodeName != nodeName || d.Grant.Record.EK != "e9" {
		t.Fatalf("the attacker's proof: %s, %v", d.Outcome, d.Refusals)
	}
	for name, victim := range map[string]*world{"proof": goodTrust(), "hello": trusting(goodHello(First))} {
		victim.in.Records = attacker.in.Records
		if victim.in.Hello != nil {
			victim.in.Hello.UID = "uid-its-own-hello"
		}
		for _, node := range []Presence{Absent, Present} {
			victim.in.Node = node
			if d := victim.judge(t); d.Outcome != Deny || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonIdentityBound}) {
				t.Errorf("the machine's %s: %s, %v", name, d.Outcome, d.Refusals)
			}
		}
		if _, proposes := must(New(victim.policy)).TrustsOnFirstUse(victim.in, ek1); proposes {
			t.Errorf("the machine's %s: its key counts", name)
		}
		unvouched(ek1, nil)(victim)
		if d := victim.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonIdentityBound {
			t.Errorf("the machine's %s, with a key nobody names: %s, %v", name, d.Outcome, d.Refusals)
		}
	}

	// The operator names the machine's key, and the controller accepts that.
	record := attacker.in.Records[1]
	record.EKReplacedBy = []string{ek1}
	record.Certificates = []Certificate{{SHA256: certificate1, ProofUID: record.ProofUID, NotAfter: testNow.Add(time.Hour)}}
	corrected := func(w *world) *world {
		w.in.Records = []Record{w.in.Records[0], record}
		w.machine().EKs, w.in.Node = []NamedEK{{EKInventory, ek1}}, Present
		return w
	}
	for name, impostor := range map[string]*world{
		"renewal": trusting(good(Renewal)), "renewal's hello": trusting(goodHello(Renewal)),
		"enrolment": goodTrust(), "enrolment's hello": trusting(goodHello(First)),
	} {
		corrected(impostor).in.Evidence.EK = "e9"
		if impostor.in.Hello != nil {
			impostor.in.Hello.UID = "uid-another-hello"
		}
		if d := impostor.judge(t); d.Outcome != Deny || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonEKReplaced}) {
			t.Errorf("the attacker's %s after the correction: %s, %v", name, d.Outcome, d.Refusals)
		}
	}
	victim := corrected(goodTrust())
	victim.in.Hello.UID = "uid-its-own-hello"
	if d := victim.judge(t); d.Outcome != Approve || d.Grant.Record.EK != ek1 || d.Grant.Record.EKSource != EKInventory || d.Grant.Record.EKReplacedBy != nil {
		t.Errorf("the machine after the correction: %s, %v, %+v", d.Outcome, d.Refusals, d.Grant)
	}
}

// Once there is a record, it selects the machine: neither age nor nodeRef, nor the policy, matter
// any more.
func TestSigningAfterTrust(t *testing.T) {
	for name, c := range map[string]struct {
		bend func(*world)
		want Outcome
		why  []Reason
	}{
		"at once":                     {func(*world) {}, Sign, nil},
		"hours later":                 {func(w *world) { w.in.Now = testNow.Add(3 * time.Hour) }, Sign, nil},
		"it has joined":               {func(w *world) { w.machine().NodeRef = "a-node" }, Sign, nil},
		"switched off since":          {func(w *world) { w.policy.TrustOnFirstUse = false }, Sign, nil},
		"the token is another's":      {func(w *world) { w.in.Token.Machine = machine("worker-2").Ref }, Fail, []Reason{ReasonTokenNotForMachine}},
		"the token is gone":           {func(w *world) { w.in.Token = Token{} }, Wait, []Reason{ReasonTokenNotForMachine}},
		"the machine is gone":         {func(w *world) { w.in.Machines = w.in.Machines[:1] }, Wait, []Reason{ReasonMachineNotFound}},
		"a key is named since":        {func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, "e8"}} }, Sign, nil},
		"approved by somebody else":   {func(w *world) { w.in.Records = w.in.Records[:1] }, Fail, []Reason{ReasonApprovedWithoutAttestation}},
		"the record is another key's": {func(w *world) { w.in.Records[1].EK = "e9" }, Fail, []Reason{ReasonIdentityBound}},
	} {
		w := goodTrust()
		w.approve()
		c.bend(w)
		if d := w.judge(t); d.Outcome != c.want || !slices.Equal(d.Refusals.Reasons(), c.why) {
			t.Errorf("%s: %s, %v, want %s, %v", name, d.Outcome, d.Refusals, c.want, c.why)
		}
	}
	// The node's renewals, and its way back, as with any record.
	for _, class := range []Class{Again, Renewal} {
		w := trusting(good(class))
		w.machine().Created, w.machine().NodeRef = testNow.AddDate(-1, 0, 0), "a-node"
		w.in.Token = good(First).in.Token
		if d := w.judge(t); d.Outcome != Approve || d.Class != class {
			t.Errorf("%s: %s, %v", class, d.Outcome, d.Refusals)
		}
	}
}

// Of two that come at once, with the same token and provider ID, the one that is in the record gets
// the certificate.
func TestFirstUseRace(t *testing.T) {
	one := goodTrust()
	other := goodTrust()
	other.in.Request, other.in.Evidence.EK = object(First, tpmSigner, "other", "a proof", goodPKCS10(key("p256"))), "e9"
	other.in.Hello = object(First, attestation.HelloSignerName, "other-hello", "a hello", must(attestation.Parse(other.in.Request.Spec.Request)).PKCS10)
	if d := other.judge(t); d.Outcome != Approve {
		t.Fatalf("%s, %v", d.Outcome, d.Refusals)
	}
	one.approve()
	other.in.Records = one.in.Records
	if d := other.judge(t); d.Outcome != Deny || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonIdentityBound}) {
		t.Errorf("the second: %s, %v", d.Outcome, d.Refusals)
	}
	other.condition(certificatesv1.CertificateApproved)
	other.signing = true
	if d := other.judge(t); d.Outcome != Fail || !slices.Equal(d.Refusals.Reasons(), []Reason{ReasonApprovedWithoutAttestation, ReasonIdentityBound}) {
		t.Errorf("the second, approved by somebody: %s, %v", d.Outcome, d.Refusals)
	}
}
