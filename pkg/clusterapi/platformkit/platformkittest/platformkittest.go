// SPDX-License-Identifier: Apache-2.0

// Package platformkittest tests an adapter of package platformkit against an imitation of its
// platform's API.
package platformkittest

import (
	"context"
	"fmt"
	"io"
	"log"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Imitation is a platform's API, and what its adapter needs. Machines have names of lower-case
// letters and digits.
type Imitation interface {
	// Server is the server of the API.
	Server() *Server
	// Trust returns a new adapter that asks the server, spends the budget, and has these options.
	Trust(t *testing.T, options platformkit.Options, budget *platformkit.Budget) clusterapi.EKTrust
	// Machine returns the machine of that name, always the same.
	Machine(name string) clusterapi.PlatformMachine
	// Foreign returns machines of other platforms, and of wrong forms.
	Foreign() []clusterapi.PlatformMachine
	// Launch makes the instance of a machine, with a new immutable ID, and replaces the one that
	// was there. It returns the fingerprints of the TPM's endorsement keys. It is false if the
	// platform has no such instance.
	Launch(name string, tpm TPM) (eks []tpm.Fingerprint, possible bool)
	// Change gives the same instance another TPM. It has the results of Launch.
	Change(name string, tpm TPM) (eks []tpm.Fingerprint, possible bool)
	// Terminate removes the instance.
	Terminate(name string)
	// Double has answers list the instance twice from now on. It is false if the API has no list.
	Double(name string) bool
	// Twins says that a second Machine of the same instance has the same answer. Otherwise it has
	// none.
	Twins() bool
}

// TPM is the TPM of an instance.
type TPM struct {
	// Number identifies its endorsement keys: instances with the same number have the same keys.
	Number int
	// None says that there is no TPM, Broken that a key cannot be parsed, and Silent that calls
	// about this one are not answered.
	None, Broken, Silent bool
}

// slack is how much longer than expected a call may take on a busy machine.
const slack = 10 * time.Second

var quiet = log.New(io.Discard, "", 0)

// Run runs the conformance table. start makes a new imitation for each row.
func Run(t *testing.T, start func(t *testing.T) Imitation) {
	for _, row := range []struct {
		name string
		run  func(*testing.T, *fixture)
	}{
		{"answers", answers},
		{"provider ID of another platform", foreign},
		{"two Machines of one instance", twins},
		{"instance that comes late", late},
		{"instance that is gone, its name reused", reused},
		{"answer with an instance twice", doubled},
		{"key that cannot be parsed", broken},
		{"no TPM", none},
		{"two instances with one TPM", copied},
		{"fault/throttled", fault(Throttled)},
		{"fault/no answer", fault(Silent)},
		{"fault/forbidden", fault(Forbidden)},
		{"fault/expired credential", fault(Expired)},
		{"fault/redirect", fault(Redirected)},
		{"fault/certificate of another CA", fault(OtherCA)},
		{"one machine that never answers", silent},
		{"1000 machines", many(1000)},
		{"5000 machines", many(5000)},
	} {
		t.Run(row.name, func(t *testing.T) {
			// Rows of many machines run first, alone. Rows with time limits would starve beside
			// them.
			if !strings.HasSuffix(row.name, "machines") {
				t.Parallel()
			}
			row.run(t, &fixture{Imitation: start(t), last: map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer{}})
		})
	}
}

// fixture has an adapter, and its last answers as the controller keeps them.
type fixture struct {
	Imitation
	trust clusterapi.EKTrust
	last  map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer
}

// open makes the adapter. Without options, each call reads all keys again.
func (f *fixture) open(t *testing.T, options platformkit.Options) {
	t.Helper()
	f.trust = f.Trust(t, options, platformkit.NewBudget(1000, 1000))
}

// launch makes instances, or skips the row.
func (f *fixture) launch(t *testing.T, name string, chip TPM) []tpm.Fingerprint {
	t.Helper()
	eks, possible := f.Launch(name, chip)
	if !possible {
		t.Skip("this platform has no such instance")
	}
	return eks
}

// ask asks about machines, and keeps the answers.
func (f *fixture) ask(t *testing.T, machines ...clusterapi.PlatformMachine) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	answers, err := f.trust.EndorsementKeys(ctx, machines)
	f.keep(machines, answers, err)
	return err
}

func (f *fixture) keep(machines []clusterapi.PlatformMachine, answers map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer, err error) {
	for _, m := range machines {
		if answer, ok := answers[m]; ok || err == nil {
			if !ok {
				answer.Unknown = true
			}
			f.last[m] = answer
		}
	}
}

// want fails unless the machine's last answer has exactly these keys.
func (f *fixture) want(t *testing.T, m clusterapi.PlatformMachine, eks []tpm.Fingerprint) {
	t.Helper()
	answer, ok := f.last[m]
	if !ok || answer.Unknown || !equal(answer.EKs, eks) {
		t.Errorf("machine %s: got %v, %+v, want the keys %v", m.Name, ok, answer, eks)
	}
}

// unknown reports whether the machine has no answer yet.
func (f *fixture) unknown(m clusterapi.PlatformMachine) bool {
	answer, ok := f.last[m]
	return !ok || answer.Unknown
}

// wantNone fails if the machine has an answer.
func (f *fixture) wantNone(t *testing.T, m clusterapi.PlatformMachine) {
	t.Helper()
	if answer, ok := f.last[m]; ok && (!answer.Unknown || len(answer.EKs) > 0) {
		t.Errorf("machine %s has an answer: %+v", m.Name, answer)
	}
}

func equal(a, b []tpm.Fingerprint) bool {
	texts := func(eks []tpm.Fingerprint) []string {
		var all []string
		for _, ek := range eks {
			all = append(all, ek.String())
		}
		return slices.Sorted(slices.Values(all))
	}
	return slices.Equal(texts(a), texts(b))
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantError fails unless the error is one line of text that names the machine, if there is one.
func wantError(t *testing.T, err error, machine string) {
	t.Helper()
	switch {
	case err == nil:
		t.Error("there is no error")
	case len(err.Error()) > 2000 || strings.ContainsAny(err.Error(), "\n\r"):
		t.Errorf("the error is long, or has lines: %s", err)
	case !strings.Contains(err.Error(), machine):
		t.Errorf("the error does not name %s: %s", machine, err)
	default:
		t.Log(err)
	}
}

func answers(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a, b := f.launch(t, "a", TPM{Number: 1}), f.launch(t, "b", TPM{Number: 2})
	noError(t, f.ask(t, f.Machine("a"), f.Machine("b")))
	f.want(t, f.Machine("a"), a)
	f.want(t, f.Machine("b"), b)
	if len(a) == 0 || equal(a, b) {
		t.Errorf("the imitation has keys %v and %v", a, b)
	}
	f.Server().Calls()
	noError(t, f.ask(t, f.Machine("a"), f.Machine("b")))
	if again := f.Server().Calls(); again == 0 {
		t.Error("existence was not asked again")
	}
	f.want(t, f.Machine("a"), a)
}

func foreign(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a := f.launch(t, "a", TPM{Number: 1})
	for _, m := range f.Foreign() {
		err := f.ask(t, f.Machine("a"), m)
		wantError(t, err, m.Name)
		f.wantNone(t, m)
		f.want(t, f.Machine("a"), a)
	}
	if len(f.Foreign()) < 3 {
		t.Errorf("too few: %v", f.Foreign())
	}
}

func twins(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a := f.launch(t, "a", TPM{Number: 1})
	twin := f.Machine("a")
	twin.Name, twin.UID = "twin", "uid-of-twin"
	err := f.ask(t, f.Machine("a"), twin)
	f.want(t, f.Machine("a"), a)
	if f.Twins() {
		noError(t, err)
		f.want(t, twin, a)
	} else {
		f.wantNone(t, twin)
	}
}

func late(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	noError(t, f.ask(t, f.Machine("a")))
	f.wantNone(t, f.Machine("a"))
	a := f.launch(t, "a", TPM{Number: 1})
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), a)
}

func reused(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a := f.launch(t, "a", TPM{Number: 1})
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), a)
	f.Terminate("a")
	noError(t, f.ask(t, f.Machine("a")))
	f.wantNone(t, f.Machine("a"))
	a = f.launch(t, "a", TPM{Number: 2})
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), a)
	a = f.launch(t, "a", TPM{Number: 3}) // between two calls
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), a)
}

func doubled(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a, b := f.launch(t, "a", TPM{Number: 1}), f.launch(t, "b", TPM{Number: 2})
	noError(t, f.ask(t, f.Machine("b")))
	if !f.Double("a") || !f.Double("b") {
		t.Skip("no answer of this platform can have an instance twice")
	}
	wantError(t, f.ask(t, f.Machine("a"), f.Machine("b")), "")
	f.wantNone(t, f.Machine("a"))
	f.want(t, f.Machine("b"), b)
	if len(a) == 0 {
		t.Error("the imitation has no keys")
	}
}

// A key that cannot be parsed may be the one that the node shows.
func broken(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{Refresh: time.Nanosecond})
	a := f.launch(t, "a", TPM{Number: 1})
	f.launch(t, "b", TPM{Number: 2, Broken: true})
	wantError(t, f.ask(t, f.Machine("a"), f.Machine("b")), f.Machine("b").Name)
	f.want(t, f.Machine("a"), a)
	f.wantNone(t, f.Machine("b"))
	if _, possible := f.Change("a", TPM{Number: 1, Broken: true}); possible {
		wantError(t, f.ask(t, f.Machine("a")), f.Machine("a").Name)
		f.want(t, f.Machine("a"), a)
	}
}

func none(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	f.launch(t, "a", TPM{None: true})
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), nil)
}

func copied(t *testing.T, f *fixture) {
	f.open(t, platformkit.Options{})
	a := f.launch(t, "a", TPM{Number: 1})
	noError(t, f.ask(t, f.Machine("a")))
	f.want(t, f.Machine("a"), a)
	if b := f.launch(t, "b", TPM{Number: 1}); !equal(a, b) {
		t.Fatal("the imitation gives each instance other keys")
	}
	err := f.ask(t, f.Machine("a"), f.Machine("b"))
	wantError(t, err, "copied TPM")
	f.wantNone(t, f.Machine("a"))
	f.wantNone(t, f.Machine("b"))
	f.Terminate("b")
	noError(t, f.ask(t, f.Machine("a"), f.Machine("b")))
	f.want(t, f.Machine("a"), a)
}

// fault returns the row of a fault. Meanwhile the last answers count, and new machines have none.
// After the fault they have one.
func fault(fault Fault) func(*testing.T, *fixture) {
	return func(t *testing.T, f *fixture) {
		f.open(t, platformkit.Options{Refresh: time.Nanosecond, ReadTimeout: slack})
		a, b := f.launch(t, "a", TPM{Number: 1}), f.launch(t, "b", TPM{Number: 2})
		noError(t, f.ask(t, f.Machine("a")))

		f.Server().Set(fault)
		f.Server().Calls()
		limited, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began, machines := time.Now(), []clusterapi.PlatformMachine{f.Machine("a"), f.Machine("b")}
		answers, err := f.trust.EndorsementKeys(limited, machines)
		f.keep(machines, answers, err)
		if took := time.Since(began); took > time.Second+slack {
			t.Errorf("it took %s", took)
		}
		wantError(t, err, "")
		if f.Server().Calls() == 0 && fault != OtherCA {
			t.Error("no call met the fault")
		}
		f.want(t, f.Machine("a"), a)
		f.wantNone(t, f.Machine("b"))
		if strayed := f.Server().Strayed(); strayed > 0 {
			t.Errorf("it followed %d redirects", strayed)
		}

		f.Server().Set(NoFault)
		deadline := time.Now().Add(3 * slack)
		for f.ask(t, machines...) != nil && time.Now().Before(deadline) {
			time.Sleep(100 * time.Millisecond)
		}
		f.want(t, f.Machine("a"), a)
		f.want(t, f.Machine("b"), b)
	}
}

func silent(t *testing.T, f *fixture) {
	const patience, timeout = 300 * time.Millisecond, 2 * time.Second
	f.open(t, platformkit.Options{Patience: patience, ReadTimeout: timeout})
	f.launch(t, "silent", TPM{Number: 1, Silent: true})
	want, machines := map[string][]tpm.Fingerprint{}, []clusterapi.PlatformMachine{f.Machine("silent")}
	for n := range 20 {
		name := fmt.Sprintf("m%d", n)
		want[name] = f.launch(t, name, TPM{Number: 2 + n})
		machines = append(machines, f.Machine(name))
	}
	// A busy machine may need several calls: the patience also ends where no read ends in time.
	for began := time.Now(); time.Since(began) < slack && slices.ContainsFunc(machines[1:], f.unknown); {
		asked := time.Now()
		_ = f.ask(t, machines...) // an error, once the silent machine's read has timed out
		if took := time.Since(asked); took >= timeout && took > patience+slack {
			t.Errorf("the others waited %s", took)
		}
	}
	for name, eks := range want {
		f.want(t, f.Machine(name), eks)
	}
	f.wantNone(t, f.Machine("silent"))
	late := f.launch(t, "late", TPM{Number: 30})
	for began := time.Now(); time.Since(began) < slack && f.unknown(f.Machine("late")); {
		noError(t, f.ask(t, f.Machine("late")))
	}
	f.want(t, f.Machine("late"), late)
	deadline := time.Now().Add(timeout + slack)
	err := f.ask(t, machines...)
	for ; err == nil && time.Now().Before(deadline); err = f.ask(t, machines...) {
		time.Sleep(100 * time.Millisecond)
	}
	wantError(t, err, f.Machine("silent").Name)
}

// many returns the row of a number of machines: all get their answers within the budget, and a
// later call asks about existence alone, for many machines at once.
func many(count int) func(*testing.T, *fixture) {
	return func(t *testing.T, f *fixture) {
		if testing.Short() && count > 1000 {
			t.Skip("with -short, for 1,000 machines only")
		}
		rate, burst := count, 100
		f.trust = f.Trust(t, platformkit.Options{}, platformkit.NewBudget(float64(rate), burst))
		want, machines := map[string][]tpm.Fingerprint{}, []clusterapi.PlatformMachine{}
		for n := range count {
			name := fmt.Sprintf("m%d", n)
			want[name] = f.launch(t, name, TPM{Number: n + 1})
			machines = append(machines, f.Machine(name))
		}
		f.Server().Calls()
		began, calls, polls := time.Now(), 0, 0
		for answered := 0; answered < count; polls++ {
			if polls > 50 {
				t.Fatalf("after %d polls %d machines have an answer", polls, answered)
			}
			// An adapter may report that a busy platform did not answer about all in one call.
			if err := f.ask(t, machines...); err != nil {
				t.Log(err)
			}
			calls += f.Server().Calls()
			answered = 0
			for answer := range maps.Values(f.last) {
				if !answer.Unknown {
					answered++
				}
			}
		}
		// The limiter's clock may be some milliseconds off, since calls overlap.
		if most := burst + int(time.Since(began).Seconds()*float64(rate)) + rate/50; calls > most {
			t.Errorf("%d calls, and the budget allows %d", calls, most)
		}
		for name, eks := range want {
			f.want(t, f.Machine(name), eks)
		}
		noError(t, f.ask(t, machines...))
		poll := f.Server().Calls()
		if poll > count/50 {
			t.Errorf("a poll for %d machines is %d calls", count, poll)
		}
		t.Logf("%d machines: %d calls until all endorsement keys are known, %d a poll", count, calls, poll)
	}
}
