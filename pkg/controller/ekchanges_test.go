// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// acknowledged are acknowledgements in memory.
type acknowledged struct {
	names []string
	err   error
}

func (a *acknowledged) AcknowledgedEKChanges() []string { return slices.Clone(a.names) }

func (a *acknowledged) RemoveAcknowledgedEKChange(_ context.Context, name string) error {
	if a.err == nil {
		a.names = slices.DeleteFunc(a.names, func(n string) bool { return n == name })
	}
	return a.err
}

// fleet is a number of machines that have attested, with a comparison of their records.
type fleet struct {
	*kit
	in       *instance
	changes  *watch.EKChanges
	accepted *acknowledged
	machines []verifier.Machine
}

func newFleet(k *kit, count int) *fleet {
	k.Helper()
	f := &fleet{kit: k, accepted: &acknowledged{}}
	for i := range count {
		name := fmt.Sprintf("m-%02d", i)
		f.machines = append(f.machines, machineNamed(name, "ek-"+name))
		k.attested(name, "ek-"+name)
		k.node(name)
	}
	k.machines.set(f.machines...)
	k.config.AcceptedEKChanges = f.accepted
	f.in = k.start(inSync)
	f.changes = f.in.ekChanges
	f.changes.Log = logr.New(k.journal)
	return f
}

// name has a source name another EK for some machines.
func (f *fleet) name(suffix string, machines ...int) {
	changed := slices.Clone(f.machines)
	for _, i := range machines {
		changed[i].EKs = []verifier.NamedEK{{Source: verifier.EKInventory, EK: "ek-" + changed[i].Ref.Name + suffix}}
	}
	f.kit.machines.set(changed...)
}

// compare goes once through all records.
func (f *fleet) compare() {
	f.Helper()
	synctest.Wait()
	if err := f.changes.Compare(f.ctx, time.Now()); err != nil {
		f.Fatal(err)
	}
	synctest.Wait()
}

// replaced checks which machines have a record whose EK is refused.
func (f *fleet) replaced(want ...int) {
	f.Helper()
	var got []int
	for i, m := range f.machines {
		if f.record(m.Ref.Name).Status.EKReplaced != nil {
			got = append(got, i)
		}
	}
	if !slices.Equal(got, want) {
		f.Errorf("refused are the EKs of %v, want %v", got, want)
	}
}

// While a source contradicts itself about a machine, nothing is accepted, and what was accepted is
// not taken back.
func TestEKsOfDisputedMachines(t *testing.T) {
	inBubble(t, func(k *kit) {
		f := newFleet(k, 5)
		f.name("-new", 1)
		f.compare()
		f.replaced(1)
		changed := slices.Clone(f.machines)
		for i, eks := range map[int][]string{1: {"ek-m-01", "ek-m-01-new"}, 2: {"ek-m-02-new", "ek-m-02-other"}} {
			changed[i].Disputed, changed[i].EKs = true, nil
			for _, ek := range eks {
				changed[i].EKs = append(changed[i].EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek})
			}
		}
		f.kit.machines.set(changed...)
		f.compare()
		f.replaced(1)
		f.name("")
		f.compare()
		f.replaced()
	})
}

// A few changes are accepted, once, and taken back where the source names the EK again.
func TestFewEKChangesAreAccepted(t *testing.T) {
	inBubble(t, func(k *kit) {
		f := newFleet(k, 5)
		f.compare()
		f.replaced()
		f.name("-new", 1)
		f.compare()
		f.replaced(1)
		since := f.record("m-01").Status.EKReplaced.DeepCopy()
		if !slices.Equal(since.EKs, []string{"ek-m-01-new"}) || since.Acknowledged {
			k.Errorf("%+v", since)
		}
		f.in.counted()
		time.Sleep(time.Hour)
		f.compare()
		if calls := f.in.counted(); calls["update nodeattestations"] > 0 {
			k.Errorf("accepted again: %v", calls)
		}
		f.name("-newer", 1) // another replacement, and still since then
		f.compare()
		if now := f.record("m-01").Status.EKReplaced; !slices.Equal(now.EKs, []string{"ek-m-01-newer"}) || !now.Since.Equal(&since.Since) {
			k.Errorf("%+v", now)
		}
		f.name("")
		f.compare()
		f.replaced()
		if events := k.journal.eventsOf(watch.ReasonEKChangeAccepted); len(events) != 4 || !strings.Contains(events[0], "on m-01") || !strings.Contains(events[1], "on record/m-01") {
			k.Errorf("%q", events)
		}
	})
}

// These are no changes, since they do not contradict a record's source. The cases are a deleted
// machine, no named EK, another source, an unavailable source, and a source that only warns.
func TestWhatIsNoEKChange(t *testing.T) {
	for name, change := range map[string]func(m *verifier.Machine, r *v1alpha1.NodeAttestation){
		"another machine of its name": func(m *verifier.Machine, _ *v1alpha1.NodeAttestation) { m.Ref.UID = "another" },
		"no EK is named":              func(m *verifier.Machine, _ *v1alpha1.NodeAttestation) { m.EKs = nil },
		"first use, and a source that only warns names one": func(m *verifier.Machine, r *v1alpha1.NodeAttestation) {
			r.Spec.EK.Source = ""
			m.EKs = []verifier.NamedEK{{Source: verifier.EKPlatform, EK: "other"}}
		},
		"another source names one": func(m *verifier.Machine, _ *v1alpha1.NodeAttestation) {
			m.EKs = []verifier.NamedEK{{Source: verifier.EKPlatform, EK: "other"}}
		},
		"the source is away": func(m *verifier.Machine, _ *v1alpha1.NodeAttestation) {
			m.EKs, m.UnavailableSources = []verifier.NamedEK{{Source: verifier.EKInventory, EK: "other"}}, []verifier.EKSource{verifier.EKInventory}
		},
		"the source only warns": func(m *verifier.Machine, r *v1alpha1.NodeAttestation) {
			r.Spec.EK.Source = string(verifier.EKPlatform)
			m.EKs = []verifier.NamedEK{{Source: verifier.EKPlatform, EK: "other"}}
		},
		"a record without an EK": func(m *verifier.Machine, r *v1alpha1.NodeAttestation) {
			r.Spec.EK = nil
			m.EKs = []verifier.NamedEK{{Source: verifier.EKInventory, EK: "other"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				f := newFleet(k, 1)
				record := k.record("m-00")
				change(&f.machines[0], record)
				if err := k.server.Update(k.ctx, record); err != nil {
					k.Fatal(err)
				}
				k.machines.set(f.machines...)
				f.compare()
				f.replaced()
			})
		})
	}
}

// More changes than are free are held and reported, until an operator acknowledges just these.
// Changes one by one count together.
func TestManyEKChangesAreHeld(t *testing.T) {
	inBubble(t, func(k *kit) {
		f := newFleet(k, 6)
		f.name("-new", 0)
		f.compare()
		f.replaced(0)
		f.name("-new", 0, 1, 2, 3)
		f.compare()
		f.replaced(0)
		held := k.journal.eventsOf(watch.ReasonEKChangeHeld)
		if len(held) != 3 {
			k.Fatalf("%q", held)
		}
		name := regexp.MustCompile(sources.AnnotationAcceptEKChanges + `=(Inventory-[0-9a-f]{16})`).FindStringSubmatch(held[0])
		if name == nil {
			k.Fatalf("the Event does not say how to acknowledge: %s", held[0])
		}
		time.Sleep(ekChangesRemind - time.Second)
		f.compare()
		if lines := k.journal.linesWith("is held"); len(lines) != 1 {
			k.Errorf("%q", lines)
		}
		time.Sleep(time.Second)
		f.compare()
		if lines := k.journal.linesWith("is held"); len(lines) != 2 {
			k.Errorf("%q", lines)
		}
		f.accepted.names = []string{"Inventory-0000000000000000"}
		f.compare()
		f.replaced(0)
		// The record of one of them cannot be written: it stays acknowledged until it is.
		f.accepted.names = append(f.accepted.names, name[1])
		failed := false
		f.in.intercept = func(_ int, c call, run func() error) error {
			if c.verb == "update" && !failed {
				failed = true
				return answers["conflict"](c)
			}
			return run()
		}
		synctest.Wait()
		if err := f.changes.Compare(k.ctx, time.Now()); err == nil || !slices.Contains(f.accepted.names, name[1]) {
			k.Errorf("%v, %q", err, f.accepted.names)
		}
		f.accepted.err = errors.New("the Secret cannot be written")
		synctest.Wait()
		if err := f.changes.Compare(k.ctx, time.Now()); !errors.Is(err, f.accepted.err) {
			k.Error(err)
		}
		f.replaced(0, 1, 2, 3)
		f.accepted.err = nil
		f.compare()
		if !slices.Equal(f.accepted.names, []string{"Inventory-0000000000000000"}) {
			k.Errorf("%q", f.accepted.names)
		}
		for _, m := range []string{"m-00", "m-03"} {
			if !f.record(m).Status.EKReplaced.Acknowledged {
				k.Errorf("%s is not acknowledged", m)
			}
		}
		// Acknowledged changes do not count: three others are free again. The same mistake is held.
		f.name("-new", 0, 1, 2, 3, 4, 5)
		f.compare()
		f.replaced(0, 1, 2, 3, 4, 5)
		f.name("")
		f.compare()
		f.replaced()
		f.name("-new", 0, 1, 2, 3)
		f.compare()
		f.replaced()
	})
}

// Under trust on first use a source corrects at most three records, at once or in steps, until an
// operator acknowledges the rest. Records with a source do not raise the share.
func TestManyFirstUsesAreHeld(t *testing.T) {
	inBubble(t, func(k *kit) {
		f := newFleet(k, 30)
		for i := range 6 {
			record := f.record(f.machines[i].Ref.Name)
			record.Spec.EK.Source = ""
			if err := k.server.Update(k.ctx, record); err != nil {
				k.Fatal(err)
			}
			f.machines[i].EKs = nil
		}
		f.kit.machines.set(f.machines...)
		f.compare()
		f.replaced()
		f.name("-new", 0)
		f.compare()
		f.replaced(0)
		if events := k.journal.eventsOf(watch.ReasonEKChangeAccepted); len(events) != 2 || !strings.Contains(events[0], "Inventory names other") {
			k.Errorf("%q", events)
		}
		f.name("") // a source that falls silent takes nothing back, and frees nothing
		f.compare()
		f.replaced(0)
		f.name("-new", 1, 2, 3)
		f.compare()
		f.replaced(0)
		held := k.journal.eventsOf(watch.ReasonEKChangeHeld)
		name := regexp.MustCompile(sources.AnnotationAcceptEKChanges + `=(FirstUse-[0-9a-f]{16})`).FindStringSubmatch(strings.Join(held, "\n"))
		if len(held) != 3 || name == nil {
			k.Fatalf("%q", held)
		}
		f.accepted.names = []string{name[1]}
		f.compare()
		f.replaced(0, 1, 2, 3)
	})
}

// Of a large fleet a share is free.
func TestShareOfEKChangesIsFree(t *testing.T) {
	inBubble(t, func(k *kit) {
		f := newFleet(k, 80)
		f.name("-new", 0, 1, 2, 3)
		f.compare()
		f.replaced(0, 1, 2, 3)
		f.name("-new", 0, 1, 2, 3, 4)
		f.compare()
		f.replaced(0, 1, 2, 3)
	})
}

// In audit mode changes are reported once, and nothing is written.
func TestEKChangesInAuditMode(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.config.Audit = true
		f := newFleet(k, 5)
		f.name("-new", 0)
		f.compare()
		f.compare()
		if lines := k.journal.linesWith("enforcement would refuse"); len(lines) != 1 {
			k.Errorf("%q", lines)
		}
		f.name("-new", 0, 1, 2, 3)
		f.compare()
		f.compare()
		if lines := k.journal.linesWith("is held"); len(lines) != 1 {
			k.Errorf("%q", lines)
		}
		f.replaced()
	})
}

// ekChangesRemind is the interval after which held changes are reported again.
const ekChangesRemind = 15 * time.Minute

// The comparison runs with its controller: often with a cache of records and shared machines, and
// each minute without the cache. It ends with its context.
func TestEKChangesRun(t *testing.T) {
	for name, c := range map[string]struct {
		w      watching
		shared bool
		within time.Duration
	}{
		"shared": {inSync, true, 5 * time.Second}, "built": {inSync, false, time.Minute}, "not in sync": {unwatched, true, 2 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				k.machines.set(machineNamed("m", "ek-new"))
				if c.shared {
					k.config.Machines = sharedList{k.machines}
				}
				in := k.start(c.w)
				k.attested("m", "ek-m")
				ctx, cancel := context.WithCancel(k.ctx)
				defer synctest.Wait()
				defer cancel()
				if err := in.ekChanges.Source(logr.New(k.journal)).Start(ctx, nil); err != nil {
					k.Fatal(err)
				}
				k.machines.fail(errors.New("away"))
				time.Sleep(c.within + time.Millisecond) // not at the moment of a comparison
				if lines := k.journal.linesWith("cannot compare"); len(lines) == 0 {
					k.Error("what fails is not logged")
				}
				k.machines.fail(nil)
				if k.record("m").Status.EKReplaced != nil {
					k.Error("it was compared with machines that are not known")
				}
				time.Sleep(c.within)
				if k.record("m").Status.EKReplaced == nil {
					k.Error("it was not compared")
				}
				synctest.Wait()
			})
		})
	}
}

// An EK whose replacement was accepted is refused, and its replacement is admitted: by the record.
func TestReplacedEK(t *testing.T) {
	inBubble(t, func(k *kit) {
		in := k.start(inSync)
		record := k.attested("worker-1", "ek-1")
		k.node("worker-1")
		record.Status.EKReplaced = &v1alpha1.EKReplacement{EKs: []string{"ek-new"}}
		if err := k.server.Update(k.ctx, record); err != nil {
			k.Fatal(err)
		}
		k.machines.set(machineNamed("worker-1", "ek-new"))
		former := k.pair("former", "worker-1", "ek-1", asNode("worker-1"))
		next := k.pair("next", "worker-1", "ek-new", asToken("worker-1"))
		in.settle()
		k.is(former, "Denied/"+string(verifier.ReasonEKReplaced))
		if len(k.is(next, "Approved/Attested").Status.Certificate) == 0 {
			k.Error("it is not issued")
		}
		after := k.record("worker-1")
		if after.Spec.EK.Fingerprint != "ek-new" || after.Status.EKReplaced != nil || len(after.Status.EKHistory) != 1 || !after.Status.Certificates[0].FormerEK {
			k.Errorf("%+v", after)
		}
		if events := k.journal.eventsOf(string(verifier.ReasonEKReplaced)); len(events) == 0 {
			k.Error("there is no warning")
		}
	})
}
