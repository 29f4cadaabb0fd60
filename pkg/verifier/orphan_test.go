// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"testing"
	"time"
)

// The hardware of a machine that is gone serves the next one once the record is gone, too. Until
// then it waits: a denial would be for good.
func TestOrphanedRecords(t *testing.T) {
	orphan := func(change func(*Record)) Record {
		r := recordOf("gone", "e-gone")
		r.Orphaned = true
		change(&r)
		return r
	}
	for name, c := range map[string]struct {
		record Record
		want   Outcome
	}{
		"another's":                       {orphan(func(*Record) {}), Approve},
		"the hardware's":                  {orphan(func(r *Record) { r.EK = ek1 }), Wait},
		"the node name's":                 {orphan(func(r *Record) { r.NodeName = nodeName }), Wait},
		"the machine's name's":            {orphan(func(r *Record) { r.Machine = MachineRef{machine(nodeName).Ref.Name, "uid of the last"} }), Wait},
		"all of it, in another cluster":   {orphan(func(r *Record) { *r = recordOf(nodeName, ek1); r.Cluster, r.Orphaned = "c2", true }), Wait},
		"the hardware's, and not gone":    {orphan(func(r *Record) { r.EK, r.Orphaned = ek1, false }), Deny},
		"the machine's, of a proof of it": {orphan(func(r *Record) { *r = recordOf(nodeName, ek1); r.ProofUID, r.Orphaned = "uid-proof", true }), Wait},
	} {
		t.Run(name, func(t *testing.T) {
			w := good(First)
			w.in.Records = append(w.in.Records, c.record)
			rules, err := New(w.policy)
			if err != nil {
				t.Fatal(err)
			}
			d := rules.Judge(w.in)
			if d.Outcome != c.want || c.want == Wait && d.Refusals.Reason() != ReasonIdentityBound {
				t.Errorf("%v, %v", d.Outcome, d.Refusals)
			}
			if c.want != Wait {
				return
			}
			w.in.Now = rules.Deadline(w.in.Request).Add(time.Second)
			if d := rules.Judge(w.in); d.Outcome != Deny {
				t.Errorf("it waits for ever: %v", d.Outcome)
			}
		})
	}
	// A renewal rests on a record; one that is about to go carries nothing.
	w := good(Renewal)
	for i := range w.in.Records {
		w.in.Records[i].Orphaned = true
	}
	rules, err := New(w.policy)
	if err != nil {
		t.Fatal(err)
	}
	if d := rules.Judge(w.in); d.Outcome != Deny && d.Outcome != Wait {
		t.Errorf("a renewal: %v", d.Outcome)
	}
}
