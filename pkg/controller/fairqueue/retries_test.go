// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// The longer a request has waited the more seldom it is looked at, and at its deadline at the
// latest.
func TestWhenAWaitingRequestIsLookedAt(t *testing.T) {
	for name, c := range map[string]struct {
		age, deadline time.Duration // the deadline's age; 0: none
		want          time.Duration
	}{
		"new":                      {0, 0, time.Second},
		"a minute old":             {time.Minute, 0, time.Second},
		"five minutes old":         {5 * time.Minute, 0, 5 * time.Second},
		"an hour old":              {time.Hour, 0, 15 * time.Second},
		"long before the deadline": {5 * time.Minute, 20 * time.Minute, 5 * time.Second},
		"before the deadline":      {19*time.Minute + 58*time.Second, 20 * time.Minute, 2 * time.Second},
		"just before the deadline": {20*time.Minute - time.Millisecond, 20 * time.Minute, time.Millisecond},
		"at the deadline":          {20 * time.Minute, 20 * time.Minute, 15 * time.Second},
		"past the deadline":        {30 * time.Minute, 20 * time.Minute, 15 * time.Second},
		"the clock was put back":   {-time.Hour, 20 * time.Minute, time.Second},
		"the clock is a day ahead": {24 * time.Hour, 0, 15 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			w := Waiting{Name: "x", UID: "1", Created: noon}
			if c.deadline != 0 {
				w.Deadline = noon.Add(c.deadline)
			}
			if got := NewRetries[int]().Remember(w, noon.Add(c.age)); got != c.want {
				t.Errorf("after %v, not %v", got, c.want)
			}
		})
	}
}

func TestNews(t *testing.T) {
	r := NewRetries[int]()
	for i, c := range []struct {
		name, message string
		want          bool
	}{
		{"a", "one", true}, {"a", "one", false}, {"a", "two", true}, {"a", "one", true}, {"b", "one", true}, {"a", "", true}, {"a", "", false},
	} {
		if got := r.MarkReported(c.name, "1", c.message); got != c.want {
			t.Errorf("%d: %v", i, got)
		}
	}
	r.Forget("a")
	if !r.MarkReported("a", "1", "") {
		t.Error("a request that was forgotten has no news")
	}
	r.Remember(Waiting{Name: "a", UID: "1"}, noon)
	if r.MarkReported("a", "1", "") {
		t.Error("Remember forgets what was reported")
	}
	if !r.MarkReported("a", "2", "") || r.Waits("a", "1") {
		t.Error("another request of the name is taken for the first")
	}
}

// What was written into a request is remembered while it waits, for that request alone.
func TestPublished(t *testing.T) {
	r := NewRetries[int]()
	r.SetPublished("a", "1", "too early")
	if r.Published("a", "1") != "" || r.Waits("a", "1") {
		t.Error("a reason is remembered of a request that does not wait")
	}
	r.Remember(Waiting{Name: "a", UID: "1"}, noon)
	r.SetPublished("a", "2", "another's")
	r.SetPublished("a", "1", "reason")
	r.Remember(Waiting{Name: "a", UID: "1"}, noon)
	if r.Published("a", "1") != "reason" || r.Published("a", "2") != "" {
		t.Errorf("%q, %q", r.Published("a", "1"), r.Published("a", "2"))
	}
	r.Forget("a")
	if r.Published("a", "1") != "" {
		t.Error("the reason outlives the request")
	}
}

func TestMemo(t *testing.T) {
	r := NewRetries[string]()
	r.Keep("a", "1", "too early", noon)
	if _, ok := r.Memo("a", "1", noon); ok || r.Waits("a", "1") {
		t.Error("there is a memo of a request that does not wait")
	}
	r.Remember(Waiting{Name: "a", UID: "1"}, noon)
	if _, ok := r.Memo("a", "1", noon); ok || !r.Waits("a", "1") {
		t.Error("there is a memo that nobody has kept")
	}
	r.Keep("a", "2", "another's", noon)
	r.Keep("a", "1", "memo", noon)
	for name, c := range map[string]struct {
		uid   string
		after time.Duration
		want  string
	}{
		"at once": {"1", 0, "memo"}, "later": {"1", maxMemoAge - 1, "memo"}, "too late": {"1", maxMemoAge, ""},
		"another": {"2", 0, ""}, "the clock was put back": {"1", -1, ""},
	} {
		r.Remember(Waiting{Name: "a", UID: "1"}, noon.Add(c.after))
		if got, ok := r.Memo("a", "1", noon.Add(c.after)); c.uid == "1" && (got != c.want || ok != (c.want != "")) {
			t.Errorf("%s: %q, %v", name, got, ok)
		}
	}
	r.Remember(Waiting{Name: "a", UID: "2"}, noon)
	if _, ok := r.Memo("a", "2", noon); ok {
		t.Error("another request has the memo of the first")
	}
}

// A change of the machines wakes those that are named now, and no flood.
func TestWake(t *testing.T) {
	r := NewRetries[int]()
	for i := range flood {
		r.Remember(Waiting{Name: fmt.Sprint("junk-", i), Claim: Claim{Node: fmt.Sprint("junk-", i)}}, noon)
	}
	for _, name := range []string{"a", "b", "c"} {
		r.Remember(Waiting{Name: name, Claim: Claim{Node: "listed-" + name}}, noon)
	}
	if r.Len() != flood+3 {
		t.Errorf("%d wait", r.Len())
	}
	r.Remember(Waiting{Name: "c", Claim: Claim{Node: "c"}}, noon) // its claim can be read only now
	r.MarkReported("no claim yet", "1", "")
	r.Forget("b")
	woken := r.Wake(func(c Claim) bool { return strings.HasPrefix(c.Node, "listed") })
	if !slices.Equal(woken, []string{"a"}) {
		t.Errorf("%q are woken", woken)
	}
}

// A request counts under the cause of its last decision, until it is decided or replaced by another
// one of its name.
func TestWaitingRequestsAreCountedByCause(t *testing.T) {
	r := NewRetries[int]()
	counts := func(want map[string]int) {
		t.Helper()
		if got := r.Causes(); !maps.Equal(got, want) {
			t.Errorf("%v, not %v", got, want)
		}
	}
	wait := func(name, uid, cause string) {
		r.Remember(Waiting{Name: name, UID: types.UID(uid), Cause: cause}, noon)
	}
	wait("a", "1", "MachineNotFound")
	wait("a", "1", "MachineNotFound")
	wait("b", "2", "MachineNotFound")
	wait("c", "3", "")
	counts(map[string]int{"MachineNotFound": 2})
	wait("a", "1", "SignerUnavailable")
	counts(map[string]int{"MachineNotFound": 1, "SignerUnavailable": 1})
	wait("a", "4", "MachineNotFound")
	counts(map[string]int{"MachineNotFound": 2})
	r.MarkReported("b", "5", "another request")
	counts(map[string]int{"MachineNotFound": 1})
	for _, name := range []string{"a", "a", "b", "c", "d"} {
		r.Forget(name)
	}
	counts(map[string]int{})
}
