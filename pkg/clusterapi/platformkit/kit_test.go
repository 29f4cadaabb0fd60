// SPDX-License-Identifier: Apache-2.0

package platformkit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// fake is a platform of functions. Machines are at the location of their names.
type fake struct {
	mu    sync.Mutex
	find  func(locations []string) ([]Instance, error)
	keys  func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error)
	reads []string
}

func (*fake) Location(m clusterapi.PlatformMachine) (string, error) { return m.Name, nil }

func (f *fake) Find(_ context.Context, _ types.NamespacedName, locations []string) ([]Instance, error) {
	return f.find(locations)
}

func (f *fake) EndorsementKeys(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
	f.mu.Lock()
	f.reads = append(f.reads, i.ID)
	f.mu.Unlock()
	return f.keys(ctx, i)
}

// readIDs returns the instances whose keys were read since the last time.
func (f *fake) readIDs() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.reads = nil }()
	return strings.Join(slices.Sorted(slices.Values(f.reads)), " ")
}

func fingerprint(text string) tpm.Fingerprint { return tpm.FingerprintOf([]byte(text)) }

// everywhere is a find for which each location has the instance of its name.
func everywhere(version string) func([]string) ([]Instance, error) {
	return func(locations []string) (all []Instance, err error) {
		for _, location := range locations {
			all = append(all, Instance{Location: location, ID: location, Version: version})
		}
		return all, nil
	}
}

func ownKey(_ context.Context, i Instance) ([]tpm.Fingerprint, error) {
	return []tpm.Fingerprint{fingerprint(i.ID)}, nil
}

// ask returns the answers in text: - is absent, ? is unknown.
func ask(t *testing.T, k *Kit, names ...string) (string, error) {
	t.Helper()
	machines := make([]clusterapi.PlatformMachine, len(names))
	for n, name := range names {
		machines[n] = clusterapi.PlatformMachine{Name: name}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	answers, err := k.EndorsementKeys(ctx, machines)
	texts := make([]string, len(machines))
	for n, m := range machines {
		switch answer, ok := answers[m]; {
		case !ok:
			texts[n] = "-"
		case answer.Unknown:
			texts[n] = "?"
		default:
			texts[n] = fmt.Sprint(len(answer.EKs))
		}
	}
	return strings.Join(texts, " "), err
}

func want(t *testing.T, k *Kit, answers, says string, names ...string) {
	t.Helper()
	got, err := ask(t, k, names...)
	if got != answers || (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
		t.Errorf("got %s, %v, want %s, %s", got, err, answers, says)
	}
}

// EKs are read once for each instance, again hourly, and at once if the version changes.
func TestWhenEKsAreRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere(""), keys: ownKey}
		k := New(f, Options{})
		for range 100 { // 50 minutes
			want(t, k, "1 1", "", "a", "b")
			time.Sleep(30 * time.Second)
		}
		if got := f.readIDs(); got != "a b" {
			t.Errorf("read %s", got)
		}
		for range 22 {
			want(t, k, "1 1", "", "a", "b")
			time.Sleep(30 * time.Second)
		}
		if got := f.readIDs(); got != "a b" {
			t.Errorf("after an hour read %s", got)
		}
		f.find = everywhere("2")
		want(t, k, "1 1", "", "a", "b")
		if got := f.readIDs(); got != "a b" {
			t.Errorf("of another version read %s", got)
		}
	})
}

// An instance whose EKs cannot be read is read less and less often, also if its version changes all
// the time. Its last known EKs count.
func TestReadThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{keys: ownKey}
		version := 0
		f.find = func(locations []string) ([]Instance, error) { return everywhere(fmt.Sprint(version))(locations) }
		k := New(f, Options{})
		want(t, k, "1", "", "a")
		f.keys = func(context.Context, Instance) ([]tpm.Fingerprint, error) { return nil, errors.New("no such right") }
		f.readIDs()
		for range 150 { // until it is due
			if _, err := ask(t, k, "a"); err != nil {
				break
			}
			time.Sleep(30 * time.Second)
		}
		f.readIDs()
		for range 120 {
			want(t, k, "1", "machine a: no such right", "a")
			time.Sleep(30 * time.Second)
		}
		if got := len(strings.Fields(f.readIDs())); got < 6 || got > 14 {
			t.Errorf("in an hour it was read %d times", got)
		}
		for version = range 120 {
			want(t, k, "1", "machine a: no such right", "a")
			time.Sleep(10 * time.Second)
		}
		if got := len(strings.Fields(f.readIDs())); got < 5 || got > 24 {
			t.Errorf("with new versions it was read %d times", got)
		}
		f.keys = ownKey
		time.Sleep(maxRetry)
		want(t, k, "1", "", "a")
	})
}

// If there are too many calls, a read waits, without a back-off. It ends with the call at the
// latest.
func TestPausedRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var paused atomic.Int32
		paused.Store(2)
		f := &fake{find: everywhere("")}
		f.keys = func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
			if paused.Add(-1) >= 0 {
				return nil, fmt.Errorf("read: %w", ErrPaused)
			}
			return ownKey(ctx, i)
		}
		began := time.Now()
		k := New(f, Options{})
		want(t, k, "1", "", "a")
		if took := time.Since(began); took != 2*pausedRetry {
			t.Errorf("it took %s", took)
		}
		paused.Store(1000)
		k = New(f, Options{})
		if got, _ := ask(t, k, "a"); got != "?" {
			t.Errorf("got %s", got)
		}
		for range 10 {
			time.Sleep(30 * time.Second)
			want(t, k, "?", "too many calls", "a")
		}
		time.Sleep(time.Minute)
		paused.Store(0)
		want(t, k, "1", "", "a")
	})
}

// While Find fails, the last EKs count, however long it takes.
func TestLongOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere(""), keys: ownKey}
		k := New(f, Options{})
		want(t, k, "1 1", "", "a", "b")
		up := f.find
		f.find = func([]string) ([]Instance, error) { return nil, errors.New("down") }
		for range 60 {
			want(t, k, "- -", "down", "a", "b")
			time.Sleep(expiry / 20)
		}
		f.find, f.keys = up, func(context.Context, Instance) ([]tpm.Fingerprint, error) { return nil, errors.New("still down") }
		want(t, k, "1 1", "", "a", "b")
	})
}

// Patience does not count while the reads of this call wait for those of others.
func TestPatienceBeginsWithTheRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere("")}
		f.keys = func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
			pause := 50 * time.Millisecond
			if strings.HasPrefix(i.ID, "other") {
				pause = 2990 * time.Millisecond
			}
			time.Sleep(pause)
			return ownKey(ctx, i)
		}
		k := New(f, Options{Concurrency: maxReaders})
		var others []string
		for n := range maxReaders {
			others = append(others, fmt.Sprintf("other%d", n))
		}
		go func() { _, _ = ask(t, k, others...) }()
		synctest.Wait()
		want(t, k, "1 1", "", "a", "b")
	})
}

// Find cannot use up the time for the reads of what it has found.
func TestFindThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{keys: ownKey}
		k := New(&hangingFake{f}, Options{})
		want(t, k, "1 -", "deadline exceeded", "a", "b")
	})
}

// hangingFake finds the first location only, and waits for the others.
type hangingFake struct{ *fake }

func (*hangingFake) Find(ctx context.Context, _ types.NamespacedName, locations []string) ([]Instance, error) {
	<-ctx.Done()
	return []Instance{{Location: locations[0], ID: "1"}}, ctx.Err()
}

// Reads of many Clusters at once do not spend the budget on first calls of reads that then time out
// before their second one.
func TestManyClusters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := NewBudget(20, 20)
		f := &fake{find: everywhere("")}
		f.keys = func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
			for range 2 {
				if err := budget.Wait(ctx); err != nil {
					return nil, err
				}
				time.Sleep(100 * time.Millisecond)
			}
			return ownKey(ctx, i)
		}
		k := New(f, Options{})
		const clusters, machines = 100, 10
		var known atomic.Int32
		var calls sync.WaitGroup
		for c := range clusters {
			calls.Go(func() {
				var names []string
				for m := range machines {
					names = append(names, fmt.Sprintf("%d-%d", c, m))
				}
				for range 8 { // 4 minutes; the budget needs 100 s
					if got, _ := ask(t, k, names...); strings.Count(got, "1") == machines {
						known.Add(1)
						return
					}
					time.Sleep(30 * time.Second)
				}
			})
		}
		calls.Wait()
		if known.Load() != clusters {
			t.Errorf("%d of %d Clusters have all answers", known.Load(), clusters)
		}
	})
}

// An instance is the same at another location, and its EKs belong to it once.
func TestInstanceMoves(t *testing.T) {
	f := &fake{keys: func(context.Context, Instance) ([]tpm.Fingerprint, error) {
		return []tpm.Fingerprint{fingerprint("k")}, nil
	}}
	at, id := "a", "1"
	f.find = func([]string) ([]Instance, error) { return []Instance{{Location: at, ID: id}}, nil }
	k := New(f, Options{})
	want(t, k, "1", "", "a")
	at = "b"
	want(t, k, "1", "", "b")
	if got := f.readIDs(); got != "1" {
		t.Errorf("read %s", got)
	}
	id = "2" // replaces it, with the same EK
	want(t, k, "1", "", "b")
	if len(k.instances) != 1 || len(k.ids) != 1 {
		t.Errorf("kept: %v, %v", k.instances, k.ids)
	}
}

// A read that does not end delays the others by Patience, once. Those that did not begin have no
// answer: nothing says that they have no TPM.
func TestReadThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere(""), keys: func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
			if i.ID == "slow" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return ownKey(ctx, i)
		}}
		began := time.Now()
		want(t, New(f, Options{}), "1 1 ?", "", "a", "b", "slow")
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("it took %s", took)
		}

		f = &fake{find: everywhere(""), keys: func(context.Context, Instance) ([]tpm.Fingerprint, error) {
			time.Sleep(5 * time.Second)
			return []tpm.Fingerprint{fingerprint("x")}, nil
		}}
		began = time.Now()
		k := New(f, Options{Concurrency: 1})
		got, err := ask(t, k, "a", "b", "c")
		if got != "? ? ?" || err != nil || time.Since(began) != 3*time.Second {
			t.Errorf("got %s, %v, after %s", got, err, time.Since(began))
		}
		time.Sleep(time.Minute)
		if read := f.readIDs(); len(read) != 1 {
			t.Errorf("read %s", read)
		}
		got, err = ask(t, k, "a", "b", "c")
		if strings.Count(got, "1") != 1 || strings.Count(got, "?") != 2 || err != nil {
			t.Errorf("then got %s, %v", got, err)
		}
		time.Sleep(time.Minute)
	})
}

func TestAnswersThatAreNone(t *testing.T) {
	for name, c := range map[string]struct {
		found         []Instance
		err           error
		answers, says string
	}{
		"absent":             {nil, nil, "? ?", ""},
		"absent by an error": {[]Instance{{Location: "a", ID: "1"}}, errors.New("half of it"), "1 -", "half of it"},
		"twice":              {[]Instance{{Location: "a", ID: "1"}, {Location: "a", ID: "1"}, {Location: "b", ID: "2"}}, nil, "- 1", "more than once"},
		"twice, other gone":  {[]Instance{{Location: "a", ID: "1"}, {Location: "a", ID: "2"}}, nil, "- ?", "more than once"},
		"three times":        {[]Instance{{Location: "a", ID: "1"}, {Location: "a", ID: "2"}, {Location: "a", ID: "3"}, {Location: "b", ID: "2"}}, nil, "- 1", "more than once"},
		"not asked for":      {[]Instance{{Location: "c", ID: "1"}, {Location: "b", ID: "2"}}, nil, "? 1", "not asked for"},
		"without an ID":      {[]Instance{{Location: "a"}, {Location: "b", ID: "2"}}, nil, "- 1", "which instance"},
		"refused":            {[]Instance{{Location: "a", ID: "1", Refused: errors.New("is another's")}, {Location: "b", ID: "2"}}, nil, "? 1", "is another's"},
	} {
		k := New(&fake{find: func([]string) ([]Instance, error) { return c.found, c.err }, keys: ownKey}, Options{})
		t.Run(name, func(t *testing.T) { want(t, k, c.answers, c.says, "a", "b") })
	}
}

// A refusal is an answer: the last one does not count any more, and an error about others does not
// change that.
func TestRefusedLater(t *testing.T) {
	f := &fake{find: everywhere(""), keys: ownKey}
	k := New(f, Options{})
	want(t, k, "1 1", "", "a", "b")
	f.find = func([]string) ([]Instance, error) {
		return []Instance{{Location: "a", Refused: errors.New("is another's")}}, errors.New("the rest failed")
	}
	want(t, k, "? -", "is another's", "a", "b")

	// When the refusal ends, the EKs are read again, also if the adapter gave the ID.
	f.find = func([]string) ([]Instance, error) {
		return []Instance{{Location: "b", ID: "b", Refused: errors.New("is another's")}}, nil
	}
	want(t, k, "?", "is another's", "b")
	f.readIDs()
	f.find = everywhere("")
	want(t, k, "1", "", "b")
	if got := f.readIDs(); got != "b" {
		t.Errorf("read %s", got)
	}
}

func TestKeysThatAreNone(t *testing.T) {
	many := make([]tpm.Fingerprint, 17)
	for n := range many {
		many[n] = fingerprint(fmt.Sprint(n))
	}
	for says, eks := range map[string][]tpm.Fingerprint{"more than 16": many, "all zeros": {{}}, "no list": nil} {
		k := New(&fake{find: everywhere(""), keys: func(context.Context, Instance) ([]tpm.Fingerprint, error) { return eks, nil }}, Options{})
		want(t, k, "?", says, "a")
	}
}

// In another domain an EK may belong to another instance: one tenant takes away no other's answer.
func TestDomains(t *testing.T) {
	f := &fake{keys: func(context.Context, Instance) ([]tpm.Fingerprint, error) {
		return []tpm.Fingerprint{fingerprint("k")}, nil
	}}
	f.find = func(locations []string) (all []Instance, err error) {
		for _, location := range locations {
			all = append(all, Instance{Location: location, ID: location, Domain: location[:1]})
		}
		return all, nil
	}
	k := New(f, Options{})
	want(t, k, "1 1", "", "a1", "b1")
	want(t, k, "? ? 1", "copied TPM", "a1", "a2", "b1")
	// a1 is not asked about any more
	want(t, k, "? 1", "copied TPM", "a2", "b1")
}

// An instance that no Cluster asks about has no EKs after some minutes.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere(""), keys: func(context.Context, Instance) ([]tpm.Fingerprint, error) {
			return []tpm.Fingerprint{fingerprint("k")}, nil
		}}
		k := New(f, Options{})
		want(t, k, "1", "", "a")
		want(t, k, "?", "copied TPM", "b")
		time.Sleep(expiry + time.Second)
		want(t, k, "1", "", "b")
		if len(k.instances) != 1 || len(k.ids) != 1 || len(k.owners) != 1 {
			t.Errorf("kept: %v, %v, %v", k.instances, k.ids, k.owners)
		}
	})
}

// Calls for several Clusters overlap, and their reads are not made twice.
func TestOverlappingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{find: everywhere("")}
		f.keys = func(ctx context.Context, i Instance) ([]tpm.Fingerprint, error) {
			time.Sleep(time.Second)
			return ownKey(ctx, i)
		}
		k := New(f, Options{Concurrency: 2})
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() { _, _ = ask(t, k, "a", "b", "c") })
		}
		calls.Wait()
		want(t, k, "1 1 1", "", "a", "b", "c")
		if got := f.readIDs(); got != "a b c" {
			t.Errorf("read %s", got)
		}
	})
}

func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget(10, 5)
		began := time.Now()
		for range 25 {
			if err := b.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 1990*time.Millisecond || took > 2010*time.Millisecond {
			t.Errorf("25 calls took %s", took)
		}
		limited, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		b.Pause(0)
		if err := b.Wait(limited); !errors.Is(err, ErrPaused) || limited.Err() != nil {
			t.Errorf("in a pause: %v", err)
		}
		began = time.Now()
		b.Pause(time.Second) // shorter than the one before
		if err := b.Wait(t.Context()); err != nil || time.Since(began) != defaultPause {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		b.Pause(time.Hour)
		began = time.Now()
		if err := b.Wait(t.Context()); err != nil || time.Since(began) != maxPause {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		for range 5 {
			_ = b.Wait(t.Context())
		}
		soon, cancelSoon := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancelSoon()
		if err := b.Wait(soon); !errors.Is(err, ErrPaused) {
			t.Errorf("without a token in time: %v", err)
		}
		// A pause also stops a call that waits already.
		for range 5 {
			_ = b.Wait(t.Context())
		}
		began = time.Now()
		waited := make(chan time.Duration)
		go func() {
			_ = b.Wait(t.Context())
			waited <- time.Since(began)
		}()
		synctest.Wait()
		b.Pause(time.Minute)
		if took := <-waited; took < time.Minute {
			t.Errorf("in a pause after %s", took)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := b.Wait(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("of an ended context: %v", err)
		}
	})
}
