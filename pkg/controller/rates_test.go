// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// takeTurns asks for all requests again and again, each when it was told to, and returns when each had its turn, in milliseconds.
func takeTurns(turns *turns, requesterOf func(int) string, count int) []int {
	served := make([]int, count)
	due := make([]time.Time, count)
	for i := range due {
		served[i], due[i] = -1, noon
	}
	for at := 0; at < 60_000; at++ {
		now := noon.Add(time.Duration(at) * time.Millisecond)
		for i := range count {
			if served[i] >= 0 || now.Before(due[i]) {
				continue
			}
			if wait := turns.wait(fmt.Sprint("request-", i), requesterOf(i), now); wait > 0 {
				due[i] = now.Add(wait)
			} else {
				served[i] = at
			}
		}
	}
	return served
}

func rates(requester, cluster fairqueue.Rate) fairqueue.Rates {
	r := fairqueue.DefaultRates()
	r.Requester, r.Cluster = requester, cluster
	return r
}

func TestRequesterIsServedAtItsRate(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: 100 * time.Millisecond, Burst: 3}, fairqueue.Rate{Every: time.Millisecond, Burst: 1000}))
	served := takeTurns(turns, func(int) string { return "one" }, 13)
	for i, at := range served {
		if want := max(0, i-2) * 100; at < want || at > want+3 {
			t.Errorf("request %d had its turn after %d ms, not %d", i, at, want)
		}
	}
	if len(turns.owners)+len(turns.lines)+len(turns.due) != 0 {
		t.Errorf("%d are still said to wait", len(turns.owners))
	}
}

// A flood of one requester costs the others nothing, as long as it alone does not make up the cluster's rate.
func TestFloodOfOneRequesterDelaysNoOther(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: 10 * time.Millisecond, Burst: 5}, fairqueue.Rate{Every: 4 * time.Millisecond, Burst: 10}))
	const flood = 2000
	served := takeTurns(turns, func(i int) string {
		if i < flood {
			return "flood"
		}
		return fmt.Sprint("other-", i)
	}, flood+10)
	for i := flood; i < len(served); i++ {
		if served[i] < 0 || served[i] > 100 {
			t.Errorf("another requester had its turn after %d ms", served[i])
		}
	}
	if last := served[flood-1]; last < 19_000 || last > 21_000 {
		t.Errorf("the last of the flood had its turn after %d ms", last)
	}
}

func TestClusterIsServedAtItsRate(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: time.Millisecond, Burst: 10}, fairqueue.Rate{Every: 100 * time.Millisecond, Burst: 4}))
	served := takeTurns(turns, func(i int) string { return fmt.Sprint(i) }, 10)
	for i, at := range served {
		if want := max(0, i-3) * 100; at < want || at > want+10 {
			t.Errorf("request %d had its turn after %d ms, not %d", i, at, want)
		}
	}
}

func TestTurnIsForOneLook(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: time.Second, Burst: 1}, fairqueue.Rate{Every: time.Millisecond, Burst: 10}))
	if turns.wait("a", "one", noon) != 0 {
		t.Fatal("the first look waits")
	}
	if wait := turns.wait("a", "one", noon); wait != time.Second {
		t.Errorf("the second look waits %s", wait)
	}
	turns.forget("a")
	if len(turns.owners)+len(turns.lines)+len(turns.due) != 0 {
		t.Error("it is remembered")
	}
}

// Requests that are gone leave nothing behind that others would have to wait for.
func TestForgottenTurnsCostNobody(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: 10 * time.Millisecond, Burst: 5}, fairqueue.Rate{Every: time.Millisecond, Burst: 10}))
	for i := range 50_000 {
		turns.wait(fmt.Sprint("gone-", i), "one", noon)
	}
	for i := range 50_000 {
		turns.forget(fmt.Sprint("gone-", i))
	}
	if wait := turns.wait("honest", "one", noon.Add(time.Second)); wait != 0 {
		t.Errorf("the next request waits %s", wait)
	}
}

// A request that was deleted and filed again under its name by another user has one place.
func TestTurnOfARequestThatIsAnothersNow(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: time.Second, Burst: 1}, fairqueue.Rate{Every: time.Millisecond, Burst: 10}))
	turns.wait("first", "one", noon)
	turns.wait("again", "one", noon)
	turns.wait("other", "two", noon)
	turns.wait("again", "two", noon)
	if wait := turns.wait("next", "one", noon.Add(time.Second)); wait != 0 {
		t.Errorf("the first user's next request waits %s", wait)
	}
	turns.forget("again")
	if len(turns.owners)+len(turns.lines)+len(turns.due) != 0 {
		t.Errorf("remembered: %v", turns.owners)
	}
}

// Several requesters with long lines, more than the cluster's rate has room for, leave the others their share.
func TestFloodsOfSeveralRequesters(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: 10 * time.Millisecond, Burst: 5}, fairqueue.Rate{Every: 5 * time.Millisecond, Burst: 10}))
	const flood = 3000
	served := takeTurns(turns, func(i int) string {
		if i < flood {
			return fmt.Sprint("flood-", i%3)
		}
		return "honest"
	}, flood+5)
	for i := flood; i < len(served); i++ {
		if served[i] < 0 || served[i] > 500 {
			t.Errorf("an honest request had its turn after %d ms", served[i])
		}
	}
}

func TestMachineHasItsOwnRate(t *testing.T) {
	turns := newTurns(fairqueue.DefaultRates())
	for range fairqueue.DefaultRates().Machine.Burst {
		if !turns.machineMay("m", noon) {
			t.Fatal("too early")
		}
		turns.machineHas("m", noon)
	}
	if turns.machineMay("m", noon) || !turns.machineMay("n", noon) || !turns.machineMay("m", noon.Add(fairqueue.DefaultRates().Machine.Every)) {
		t.Error("not per machine, or not per time")
	}
}

// Of a flood that is denied a little is told, and of others' denials all.
func TestDenialsAreToldInMeasure(t *testing.T) {
	all, now := newTurns(fairqueue.DefaultRates()), time.Now()
	count := func(requester string, now time.Time) (told int) {
		for range 1000 {
			if all.tells(requester, now) {
				told++
			}
		}
		return told
	}
	if got := count("flood", now); got != denials().Burst {
		t.Errorf("%d of a flood", got)
	}
	if !all.tells("another", now) {
		t.Error("another's is not told")
	}
	if got := count("flood", now.Add(3*time.Second)); got != 3 {
		t.Errorf("%d three seconds later", got)
	}
}

// A denial takes as many turns as fit into its time, of its requester alone, and never more than all that may be saved up.
func TestDenialTakesTurns(t *testing.T) {
	turns := newTurns(rates(fairqueue.Rate{Every: 10 * time.Millisecond, Burst: 5}, fairqueue.Rate{Every: time.Millisecond, Burst: 1000}))
	for name, c := range map[string]struct{ took, wait time.Duration }{
		"fast": {time.Millisecond, 0}, "as long as a turn": {10 * time.Millisecond, 0},
		"as long as all": {50 * time.Millisecond, 10 * time.Millisecond}, "for very long": {time.Hour, 10 * time.Millisecond},
	} {
		turns.denied(name, c.took, noon)
		if got := turns.wait("request-"+name, name, noon); got != c.wait {
			t.Errorf("%s: the next turn is after %v, not %v", name, got, c.wait)
		}
	}
	for range 4 {
		turns.denied("one", 20*time.Millisecond, noon)
	}
	if got := turns.wait("request-one", "one", noon); got != 40*time.Millisecond { // 8 of 5 are gone, and one is wanted
		t.Errorf("after four denials the next turn is after %v", got)
	}
	if got := turns.wait("request-another", "another", noon); got != 0 {
		t.Errorf("another requester waits for %v", got)
	}
}

// Sixteen workers deny a flood, in a second each: after the first round, one at a time.
func TestDenialsThatTakeLongAreFew(t *testing.T) {
	turns := newTurns(fairqueue.DefaultRates())
	var busy [16]time.Time // when they began
	denied := 0
	const seconds = 60
	for at := range seconds * 100 {
		now := noon.Add(time.Duration(at) * 10 * time.Millisecond)
		for i, began := range busy {
			if !began.IsZero() && now.Sub(began) >= time.Second-time.Duration(i)*10*time.Millisecond {
				turns.denied("flood", time.Second, began)
				busy[i] = time.Time{}
				denied++
			}
			if busy[i].IsZero() && turns.wait(fmt.Sprint("request-", at, i), "flood", now) == 0 {
				busy[i] = now
			}
			turns.forget(fmt.Sprint("request-", at, i))
		}
	}
	if denied < seconds || denied > seconds+2*len(busy) {
		t.Errorf("%d were denied within %d seconds", denied, seconds)
	}
}

// Decisions that began first may end last: what others have had since is not given back.
func TestTimeOfTurnsDoesNotGoBack(t *testing.T) {
	turns := newTurns(fairqueue.DefaultRates())
	turns.machineHas("machine", noon)
	for range denials().Burst {
		turns.machineHas("machine", noon.Add(-maxBack))
		turns.tells("flood", noon.Add(-maxBack))
	}
	if turns.machineMay("machine", noon) || turns.tells("flood", noon) {
		t.Error("what was counted is forgotten")
	}
	// A clock that was a year ahead keeps nobody waiting once it is right.
	turns.wait("request", "requester", noon.AddDate(1, 0, 0))
	served := 0
	for at := range 1000 {
		if turns.wait(fmt.Sprint("request-", at), "requester", noon.Add(time.Duration(at)*10*time.Millisecond)) == 0 {
			served++
		}
	}
	if served < 1000 {
		t.Errorf("%d of 1000 had their turn", served)
	}
}
