// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// simulation is an order with a clock that jumps to the next request. Nothing sleeps.
type simulation struct {
	*order
	t   *testing.T
	now time.Duration
}

// free are rates that limit nobody.
var free = Rates{Requester: Rate{1, maxBurst}, Cluster: Rate{1, maxBurst}, Machine: Rate{1, 1}}

// Machines whose node begins with "listed" are listed, and those whose AK is "known" are attested.
func isListed(c Claim) bool     { return strings.HasPrefix(c.Node, "listed") }
func isAttested(ak string) bool { return ak == "known" }

// newSimulation returns an empty order.
func newSimulation(t *testing.T, rates Rates) *simulation {
	t.Helper()
	o := newOrder(rates, isListed, isAttested)
	return &simulation{order: o, t: t}
}

// add queues a request of a flow.
func (s *simulation) add(name string, flow Flow) {
	s.observe(requestOf(name), flow)
	s.Push(requestOf(name))
}

// next returns the next request, at the time when the limits allow it.
func (s *simulation) next() string {
	s.t.Helper()
	for !s.pick(s.now) {
		at, limited := s.nextAt()
		if !limited || at <= s.now {
			s.t.Fatalf("nothing is picked at %v, and next at %v (%v), with %d queued", s.now, at, limited, s.Len())
		}
		s.now = at
	}
	request := s.Pop()
	s.done(request)
	return request.Name
}

// position returns how many are served until a request is, with itself.
func (s *simulation) position(name string) int {
	s.t.Helper()
	for i := 1; s.Len() > 0; i++ {
		if s.next() == name {
			return i
		}
	}
	s.t.Fatalf("%s is not served", name)
	return 0
}

// all returns all that are queued, in their order.
func (s *simulation) all() (names []string) {
	for s.Len() > 0 {
		names = append(names, s.next())
	}
	return names
}

func token(node string) Flow {
	return Flow{Class: Tokens, Requester: "system:bootstrap:aaaaaa", Claim: Claim{EK: "ek of " + node, Node: node}}
}

func node(name string) Flow {
	return Flow{Class: Nodes, Requester: "system:node:" + name, Claim: Claim{EK: "ek of " + name, Node: name}}
}

const flood = 100_000

// The aim of the package: a flood under its own token does not delay a listed machine. That holds
// at once, and after the token's burst is used up.
func TestListedMachineIsNextBesideAFlood(t *testing.T) {
	s := newSimulation(t, DefaultRates())
	for i := range flood {
		s.add(fmt.Sprint("junk-", i), token(fmt.Sprint("junk-", i)))
	}
	for range 5000 {
		s.next()
	}
	began := s.now
	s.add("hello", token("listed"))
	if got := s.position("hello"); got > 2 {
		t.Errorf("the hello is served as number %d", got)
	}
	proof := token("listed")
	proof.Claim.Proof = true
	s.add("proof", proof)
	if got := s.position("proof"); got > 2 {
		t.Errorf("the proof is served as number %d", got)
	}
	if took := s.now - began; took > 50*time.Millisecond {
		t.Errorf("both took %v", took)
	}
}

// A thief has a node's credential and copies its claim. The node's own requests have its AK, which
// the thief cannot claim, and are next.
func TestAttestedMachineIsNextBesideAFlood(t *testing.T) {
	for name, junk := range map[string]func(i int) Flow{
		"copies": func(int) Flow { return node("listed") },
		"listed machines, and others": func(i int) Flow {
			f := node("listed")
			f.Claim.EK, f.Claim.Node = fmt.Sprint("ek-", i), []string{"listed-", "junk-"}[i%2]+fmt.Sprint(i)
			return f
		},
		"AKs that no record has": func(i int) Flow {
			f := node("listed")
			f.Claim.AK = fmt.Sprint("unknown-", i)
			return f
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimulation(t, DefaultRates())
			for i := range flood {
				s.add(fmt.Sprint("junk-", i), junk(i))
			}
			for range 5000 {
				s.next()
			}
			for _, step := range []string{"hello", "proof"} {
				f := node("listed")
				f.Claim.AK, f.Claim.Proof = "known", step == "proof"
				s.add(step, f)
				if got := s.position(step); got > 2 {
					t.Errorf("the %s is served as number %d", step, got)
				}
			}
			s.check()
		})
	}
}

// Requests of one AK share turns, also if they claim different things, and leave every other turn
// to the rest.
func TestAttestedRequestsAlternate(t *testing.T) {
	s := newSimulation(t, free)
	for i := range 4 {
		f := node("a")
		f.Claim = Claim{AK: "known", EK: fmt.Sprint(i), Node: fmt.Sprint(i)}
		s.add(fmt.Sprint("attested-", i), f)
		s.add(fmt.Sprint("other-", i), node("a"))
	}
	if got, want := strings.Join(s.all(), " "), "attested-3 other-3 attested-0 other-0 attested-2 other-2 attested-1 other-1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// An attacker can queue any number of copies of a machine's claim.
func TestNewcomerIsNextBesideCopiesOfItsClaim(t *testing.T) {
	for _, name := range []string{"listed", "unlisted"} {
		t.Run(name, func(t *testing.T) {
			s := newSimulation(t, DefaultRates())
			for i := range flood {
				s.add(fmt.Sprint("copy-", i), token(name))
			}
			for range 5000 {
				s.next()
			}
			s.add("honest", token(name))
			if got := s.position("honest"); got > 2 {
				t.Errorf("the newcomer is served as number %d", got)
			}
			// The oldest go on meanwhile: half of the turns were theirs.
			for i := range 2500 {
				if s.entries[requestOf(fmt.Sprint("copy-", i))].queue != nil {
					t.Errorf("copy %d is still queued", i)
				}
			}
		})
	}
}

// An attacker can copy the names of all listed machines, once or often. That delays no listed
// newcomer, copied or not: neither its hello nor its proof.
func TestListedNewcomerIsNextBesideCopiesOfManyMachines(t *testing.T) {
	const machines = 5000
	for _, copies := range []int{1, 4} {
		for _, name := range []string{"listed-17", "listed-newcomer"} {
			t.Run(fmt.Sprintf("%d copies of each, %s", copies, name), func(t *testing.T) {
				s := newSimulation(t, DefaultRates())
				for i := range copies * machines {
					copied := token(fmt.Sprint("listed-", i%machines))
					for _, copied.Claim.Proof = range []bool{false, true} {
						s.add(fmt.Sprint("copy-", i, copied.Claim.Proof), copied)
					}
				}
				for range 1001 {
					s.next()
				}
				began := s.now
				for _, step := range []string{"hello", "proof"} {
					f := token(name)
					f.Claim.Proof = step == "proof"
					s.add(step, f)
					if got := s.position(step); got > 2 {
						t.Errorf("the %s is served as number %d, %v after the hello was filed", step, got, s.now-began)
					}
				}
				s.check()
			})
		}
	}
}

// While an attacker goes on filing copies faster than the newest ones are served, a listed newcomer
// waits for its own round: for two turns of each copied machine at most.
func TestListedNewcomerBesideAStreamOfCopiesOfManyMachines(t *testing.T) {
	const machines = 1000
	for _, perTurn := range []int{1, 10} {
		s := newSimulation(t, free)
		filed := 0
		file := func() {
			s.add(fmt.Sprint("copy-", filed), token(fmt.Sprint("listed-", filed%machines)))
			filed++
		}
		for range machines {
			file()
		}
		s.add("honest", token("listed-newcomer"))
		for position := 1; s.next() != "honest"; position++ {
			if position > 2*(machines+1) {
				t.Fatalf("%d copies a turn: the newcomer is not served", perTurn)
			}
			for range perTurn {
				file()
			}
		}
	}
}

// Copies that wait, and come again and again, are no newcomers.
func TestRetriesDoNotOvertakeANewcomer(t *testing.T) {
	for _, c := range []struct{ copies, honest string }{
		{"listed", "listed"}, {"unlisted", "unlisted"}, {"listed", "unlisted"}, {"unlisted", "listed"},
	} {
		t.Run(c.copies+" copies, "+c.honest+" newcomer", func(t *testing.T) {
			s := newSimulation(t, DefaultRates())
			const copies = 1000
			for i := range copies {
				s.add(fmt.Sprint("copy-", i), token(c.copies))
			}
			for range 2 * copies {
				s.Push(requestOf(s.next()))
			}
			s.add("honest", token(c.honest))
			for i := 1; ; i++ {
				name := s.next()
				if name == "honest" {
					if i > listedWeight+1 {
						t.Errorf("the newcomer is served as number %d", i)
					}
					return
				}
				if i > copies {
					t.Fatal("the newcomer is not served")
				}
				s.Push(requestOf(name))
			}
		})
	}
}

// Junk of many claims that waits does not delay a machine that is not listed.
func TestStandingBacklogDoesNotDelayAnUnlistedNewcomer(t *testing.T) {
	s := newSimulation(t, free)
	for i := range flood / 5 {
		s.add(fmt.Sprint("junk-", i), token(fmt.Sprint("junk-", i)))
		s.add(fmt.Sprint("listed-junk-", i), token(fmt.Sprint("listed-junk-", i)))
	}
	for _, name := range s.all() {
		s.Push(requestOf(name))
	}
	s.add("honest", token("honest"))
	if got := s.position("honest"); got > 2*(listedWeight+1) {
		t.Errorf("the newcomer is served as number %d", got)
	}
}

// An attacker who goes on filing copies faster than they are served is newer most of the time. Then
// the newcomer is served as the oldest at the latest: after twice the backlog that it found. The
// newest has half of the turns, so that happens where more than half of the rate is filed.
func TestNewcomerBesideAStreamOfCopies(t *testing.T) {
	for name, c := range map[string]struct {
		perLook float64
		bound   int
	}{
		"a tenth of the rate": {0.1, 10}, "four tenths of the rate": {0.4, 60},
		"nine tenths of the rate": {0.9, 2004}, "ten times the rate": {10, 2004},
	} {
		t.Run(name, func(t *testing.T) {
			const backlog, runs = 1000, 40
			var positions []int
			for run := range runs {
				random := rand.New(rand.NewPCG(1, uint64(run)))
				s := newSimulation(t, free)
				for i := range backlog {
					s.add(fmt.Sprint("copy-", i), token("listed"))
				}
				for range run % 4 {
					s.next()
				}
				s.add("honest", token("listed"))
				filed, due := backlog, 0.0
				for position := 1; ; position++ {
					for due += c.perLook * 2 * random.Float64(); due >= 1; due-- {
						s.add(fmt.Sprint("copy-", filed), token("listed"))
						filed++
					}
					if s.next() == "honest" {
						positions = append(positions, position)
						break
					}
				}
			}
			slices.Sort(positions)
			t.Logf("%d copies queued, %g filed for each one served: served as number %d in the median, %d at the latest",
				backlog, c.perLook, positions[runs/2], positions[runs-1])
			if positions[runs-1] > c.bound {
				t.Errorf("the newcomer is served as number %d at the latest", positions[runs-1])
			}
		})
	}
}

// A token's flood delays nodes that renew by the turns of their own kind alone.
func TestNodesRenewBesideAFloodedToken(t *testing.T) {
	const nodes = 1000
	s := newSimulation(t, DefaultRates())
	for i := range flood {
		s.add(fmt.Sprint("junk-", i), token(fmt.Sprint("junk-", i)))
	}
	for range 5000 {
		s.next()
	}
	began := s.now
	for i := range nodes {
		s.add(fmt.Sprint("renewal-", i), node(fmt.Sprint(i)))
	}
	for served, looks := 0, 1; served < nodes; looks++ {
		if strings.HasPrefix(s.next(), "renewal-") {
			served++
		}
		if looks > 2*nodes+1 {
			t.Fatalf("of %d turns renewals had %d", looks, served)
		}
	}
	// The cluster's rate is 250 a second, of which the token takes 100.
	if took := s.now - began; took > 7*time.Second {
		t.Errorf("%d renewals took %v", nodes, took)
	}
}

// Requests that cost a glance and those that are limited have turns beside each other.
func TestUnlimitedAndLimitedAlternate(t *testing.T) {
	s := newSimulation(t, free)
	for i := range flood {
		s.Push(requestOf(fmt.Sprint("unknown-", i)))
	}
	s.add("limited", token("a"))
	if got := s.position("limited"); got > 2 {
		t.Errorf("beside a flood of unlimited ones a limited one is served as number %d", got)
	}
	s = newSimulation(t, DefaultRates())
	for i := range flood {
		s.add(fmt.Sprint("limited-", i), token(fmt.Sprint(i)))
	}
	for range 5000 {
		s.next()
	}
	s.Push(requestOf("unknown"))
	decided := token("a")
	decided.Unlimited = true
	s.add("decided", decided)
	before := s.now
	if got := s.position("decided"); got > 4 || s.now > before+time.Duration(got)*DefaultRates().Requester.Every {
		t.Errorf("beside a flood of limited ones an unlimited one is served as number %d, after %v", got, s.now-before)
	}
	for range 2 {
		s.next()
	}
	if s.entries[requestOf("unknown")] != nil {
		t.Error("an unknown request is remembered when it is served")
	}
}

// The same where no limit holds anything back.
func TestLanesAlternate(t *testing.T) {
	s := newSimulation(t, free)
	for i := range 3 {
		s.add(fmt.Sprint("limited-", i), token(fmt.Sprint(i)))
		s.Push(requestOf(fmt.Sprint("unknown-", i)))
	}
	want := "limited-2 unknown-0 limited-0 unknown-1 limited-1 unknown-2"
	if got := strings.Join(s.all(), " "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Unlimited requests neither take nor wait for tokens.
func TestUnlimitedTakesNoToken(t *testing.T) {
	s := newSimulation(t, Rates{Requester: Rate{time.Second, 1}, Cluster: Rate{time.Second, 1}})
	flow := token("a")
	flow.Unlimited = true
	s.add("limited", token("a"))
	for i := range 100 {
		s.add(fmt.Sprint("decided-", i), flow)
	}
	s.all()
	if s.now != 0 {
		t.Errorf("it took %v", s.now)
	}
	s.add("another", token("a"))
	if s.next(); s.now != time.Second {
		t.Errorf("the second limited request is served after %v", s.now)
	}
}

// The shares' weights hold in the long run, and an idle share saves up nothing.
func TestWeightsOfShares(t *testing.T) {
	s := newSimulation(t, free)
	for i := range 8000 {
		s.add(fmt.Sprint("listed-", i), token(fmt.Sprint("listed-", i%7)))
		s.add(fmt.Sprint("unlisted-", i), token(fmt.Sprint("unlisted-", i%13)))
	}
	count := func(looks int) (listed int) {
		for range looks {
			if strings.HasPrefix(s.next(), "listed-") {
				listed++
			}
		}
		return listed
	}
	for range 10 {
		if got := count(1000); got != 750 {
			t.Errorf("of 1000 turns the listed claims had %d", got)
		}
	}
	s.all() // first the listed ones are all served, then others alone
	for i := range 100 {
		s.add(fmt.Sprint("listed-", i), token("listed"))
	}
	for range 50 {
		s.next()
	}
	s.add("unlisted-1", token("unlisted"))
	if got := s.position("unlisted-1"); got != 1 {
		t.Errorf("after listed ones alone another is served as number %d", got)
	}
}

// Levels of the tree, from class to claim, each in turn.
func TestOrderOfServing(t *testing.T) {
	proof := token("a")
	proof.Claim.Proof = true
	again := func(s *simulation, count int) {
		for i := range count {
			s.add(fmt.Sprint("again-", i), token("a"))
		}
		for range count {
			s.next()
		}
		for i := range count {
			s.Push(requestOf(fmt.Sprint("again-", i)))
		}
	}
	for name, c := range map[string]struct {
		add  func(s *simulation)
		want string
	}{
		"classes": {func(s *simulation) {
			for i := range 2 {
				s.add(fmt.Sprint("token-", i), token("a"))
				s.add(fmt.Sprint("other-", i), Flow{Requester: "kubernetes-admin"})
				s.add(fmt.Sprint("node-", i), node("a"))
			}
		}, "node-1 token-1 other-1 node-0 token-0 other-0"},
		"requesters": {func(s *simulation) {
			for i := range 3 {
				s.add(fmt.Sprint("a-", i), node("a"))
			}
			s.add("b", node("b"))
			s.add("c", node("c"))
		}, "a-2 b c a-0 a-1"},
		"claims": {func(s *simulation) {
			for i := range 3 {
				s.add(fmt.Sprint("a-", i), token("a"))
			}
			s.add("b", token("b"))
			s.add("proof", proof)
		}, "proof a-0 b a-1 a-2"},
		"newest and oldest": {func(s *simulation) {
			for i := range 5 {
				s.add(fmt.Sprint(i), token("a"))
			}
		}, "4 0 3 1 2"},
		"first and further looks": {func(s *simulation) {
			again(s, 2)
			for i := range 3 {
				s.add(fmt.Sprint("new-", i), token("a"))
			}
		}, "again-0 new-2 again-1 new-0 new-1"},
		"further looks are in order": {func(s *simulation) {
			again(s, 4)
		}, "again-0 again-1 again-2 again-3"},
		"shares": {func(s *simulation) {
			for i := range 5 {
				s.add(fmt.Sprint("listed-", i), token(fmt.Sprint("listed-", i)))
				s.add(fmt.Sprint("other-", i), token(fmt.Sprint(i)))
			}
		}, "listed-4 listed-0 listed-3 other-4 listed-1 listed-2 other-0 other-3 other-1 other-2"},
		"unknown ones are in order": {func(s *simulation) {
			for i := range 4 {
				s.Push(requestOf(fmt.Sprint(i)))
			}
		}, "0 1 2 3"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimulation(t, free)
			c.add(s)
			if got := strings.Join(s.all(), " "); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
			s.check()
		})
	}
}

// A queued request of which another flow is observed moves.
func TestFlowOfAQueuedRequestChanges(t *testing.T) {
	s := newSimulation(t, Rates{Requester: Rate{time.Second, 1}, Cluster: Rate{1, maxBurst}})
	s.add("first", token("a"))
	s.next()
	for _, name := range []string{"decided", "forgotten", "another's", "same"} {
		s.add(name, token("a"))
	}
	if s.pick(s.now) {
		t.Fatal("the requester has a token")
	}
	decided := token("a")
	decided.Unlimited = true
	s.observe(requestOf("decided"), decided)
	s.forget(requestOf("forgotten"))
	s.observe(requestOf("another's"), node("b"))
	s.observe(requestOf("same"), token("a"))
	s.check()
	got := []string{s.next(), s.next(), s.next()}
	if slices.Sort(got); !slices.Equal(got, []string{"another's", "decided", "forgotten"}) || s.now != 0 {
		t.Errorf("%q are served at %v", got, s.now)
	}
	if got := s.next(); got != "same" || s.now != time.Second {
		t.Errorf("%s is served at %v", got, s.now)
	}
	for _, name := range []string{"first", "decided", "another's", "same", "forgotten", "never seen"} {
		s.forget(requestOf(name))
	}
	if s.check(); len(s.entries) != 0 {
		t.Errorf("%d are remembered", len(s.entries))
	}
}

// Machines appear while requests of theirs are queued.
func TestClaimsAreListedLater(t *testing.T) {
	machines := map[string]bool{}
	s := newSimulation(t, free)
	s.listed = func(c Claim) bool { return machines[c.Node] }
	for i := range 1000 {
		s.add(fmt.Sprint("junk-", i), token(fmt.Sprint("junk-", i)))
	}
	s.add("honest", token("honest"))
	s.add("touched", token("touched"))
	machines["honest"], machines["touched"] = true, true
	s.Touch(requestOf("touched"))
	s.Touch(requestOf("not queued"))
	if got := s.next(); got != "touched" {
		t.Errorf("%s is next", got)
	}
	s.reclassify()
	if s.check(); s.next() != "honest" {
		t.Error("the machine that is listed now is not next")
	}
	s.add("honest again", token("honest"))
	delete(machines, "honest")
	s.reclassify()
	if s.check(); s.entries[requestOf("honest again")].queue.share != unlistedShare {
		t.Error("the machine that is no longer listed has the turns of listed ones")
	}
}

// A flood with one machine's EK or node name, and different other claims, shares the turns of that
// machine. It takes none from another machine.
func TestListedPartsAlternate(t *testing.T) {
	for name, c := range map[string]struct {
		listed func(Claim) bool
		junk   func(i int) Claim
	}{
		"its EK, other node names": {func(c Claim) bool { return c.EK == "machine" || c.EK == "other" }, func(i int) Claim {
			return Claim{EK: "machine", Node: fmt.Sprint("node-", i)}
		}},
		"its node name, other EKs": {func(c Claim) bool { return c.Node == "machine" || c.Node == "other" }, func(i int) Claim {
			return Claim{EK: fmt.Sprint("ek-", i), Node: "machine"}
		}},
	} {
		for _, later := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, listed later %t", name, later), func(t *testing.T) {
				s := newSimulation(t, free)
				if s.listed = c.listed; later {
					s.listed = func(Claim) bool { return false }
				}
				flow := func(claim Claim) Flow { return Flow{Class: Tokens, Requester: "token", Claim: claim} }
				for i := range 3000 {
					s.add(fmt.Sprint("junk-", i), flow(c.junk(i)))
				}
				s.add("other", flow(Claim{EK: "other", Node: "other"}))
				if later {
					s.listed = c.listed
					s.reclassify()
				}
				s.add("machine", flow(Claim{EK: "machine", Node: "machine"})) // it comes last
				s.check()
				for _, name := range []string{"machine", "other"} {
					if got := s.position(name); got > 6 {
						t.Errorf("%s is served as number %d", name, got)
					}
				}
			})
		}
	}
}

// A requester whose bucket was forgotten while its requests were queued keeps what it owes.
func TestBucketsAreBounded(t *testing.T) {
	s := newSimulation(t, Rates{Requester: Rate{time.Hour, 1}, Cluster: Rate{1, maxBurst}})
	s.add("a", node("a"))
	s.add("b", node("a"))
	s.next()
	for i := range 2 * maxBuckets {
		s.charge(fmt.Sprint(i), time.Hour, 0)
	}
	if n := s.requesters.recent.Len(); n != maxBuckets {
		t.Errorf("%d buckets are remembered", n)
	}
	s.charge("system:node:a", 2*time.Hour, 0)
	if s.next(); s.now != 2*time.Hour {
		t.Errorf("the second request is served after %v", s.now)
	}
	s.add("c", node("a"))
	if s.next(); s.now != 3*time.Hour {
		t.Errorf("the third request is served after %v", s.now)
	}
}

// A denial takes as many turns as fit into its time, of its requester alone, and never more than
// all that may be saved up. Many at the same time take no more than one that has an advance.
func TestCharge(t *testing.T) {
	for name, c := range map[string]struct {
		took []time.Duration
		// wait is until the next turn, and waitQueued where it was queued before the denials.
		wait, waitQueued time.Duration
	}{
		"fast":              {[]time.Duration{time.Millisecond}, 0, 0},
		"as long as a turn": {[]time.Duration{10 * time.Millisecond}, 0, 0},
		"as long as all":    {[]time.Duration{50 * time.Millisecond}, 10 * time.Millisecond, 10 * time.Millisecond},
		"for very long":     {[]time.Duration{time.Hour}, 10 * time.Millisecond, 10 * time.Millisecond},
		"16 at a time":      {slices.Repeat([]time.Duration{20 * time.Millisecond}, 16), 20 * time.Millisecond, 40 * time.Millisecond},
		"another":           {nil, 0, 0},
	} {
		for _, queuedFirst := range []bool{false, true} {
			s := newSimulation(t, Rates{Requester: Rate{10 * time.Millisecond, 5}, Cluster: Rate{1, maxBurst}})
			requester := fmt.Sprint(name, queuedFirst)
			s.charge("system:node:neighbour", time.Hour, 0)
			if queuedFirst {
				s.add(requester, node(requester))
			}
			for _, took := range c.took {
				s.charge("system:node:"+requester, took, 0)
			}
			if !queuedFirst {
				s.add(requester, node(requester))
			}
			want := c.wait
			if queuedFirst {
				want = c.waitQueued
			}
			if s.next(); s.now != want {
				t.Errorf("%s, queued first %v: the next turn is after %v, not %v", name, queuedFirst, s.now, want)
			}
		}
	}
}

// Sixteen workers deny a flood, in a second each: after the first round, one at a time. A listed
// machine with the same token waits for some of these denials, and not for the first sixteen one
// after the other.
func TestDenialsThatTakeLongAreFew(t *testing.T) {
	s := newSimulation(t, DefaultRates())
	type worker struct {
		request reconcile.Request
		done    time.Duration
	}
	var workers [16]worker
	denied, filed := 0, 0
	const (
		seconds = 60
		machine = "listed"
		filedAt = 3 * time.Second
		looks   = 200 * time.Millisecond
	)
	var answered []time.Duration
	proof := token(machine)
	proof.Claim.Proof = true
	for at := time.Duration(0); at < seconds*time.Second; at += 10 * time.Millisecond {
		if at == filedAt {
			s.add("hello", token(machine))
		}
		for i := range workers {
			w := &workers[i]
			if w.done > 0 && at >= w.done {
				switch w.request.Name {
				case "hello":
					s.add("proof", proof)
					answered = append(answered, at)
				case "proof":
					answered = append(answered, at)
				default:
					s.charge("system:bootstrap:aaaaaa", time.Second, at)
					denied++
				}
				s.done(w.request)
				w.done = 0
			}
			if s.Len() < 100 {
				s.add(fmt.Sprint("junk-", filed), token(fmt.Sprint(filed)))
				filed++
			}
			if w.done == 0 && s.pick(at) {
				w.request = s.Pop()
				w.done = at + time.Second
				if !strings.HasPrefix(w.request.Name, "junk-") {
					w.done = at + looks
				}
			}
		}
	}
	if denied < seconds*3/4 || denied > seconds+2*len(workers) {
		t.Errorf("%d were denied within %d seconds", denied, seconds)
	}
	if len(answered) < 2 || answered[1]-filedAt > 5*time.Second {
		t.Errorf("the machine is answered at %v", answered)
	}
}

// An advance is returned to a requester that waits for a token, which then comes before others.
func TestAdvanceIsReturned(t *testing.T) {
	s := newSimulation(t, Rates{Requester: Rate{10 * time.Millisecond, 1}, Cluster: Rate{1, maxBurst}})
	for _, name := range []string{"a-1", "a-2"} {
		s.add(name, node("a"))
	}
	s.charge("system:node:a", 10*time.Millisecond, 0)
	if !s.pick(20 * time.Millisecond) {
		t.Fatal("the charge has not passed")
	}
	first := s.Pop()
	for _, name := range []string{"b-1", "b-2"} {
		s.add(name, node("b"))
	}
	if !s.pick(25*time.Millisecond) || !strings.HasPrefix(s.Pop().Name, "b") {
		t.Fatal("another requester has no turn")
	}
	picked := s.pick(30 * time.Millisecond)
	if at, _ := s.nextAt(); picked || at != 35*time.Millisecond {
		t.Errorf("nothing was taken in advance: the next turn is at %v", at)
	}
	s.done(first)
	if at, _ := s.nextAt(); at != 30*time.Millisecond || !s.pick(at) || !strings.HasPrefix(s.Pop().Name, "a") {
		t.Errorf("the next turn is at %v", at)
	}
}

// The rates of a flood of one, of several requesters and of all together.
func TestFloodsAtTheirRates(t *testing.T) {
	for name, c := range map[string]struct {
		requester, cluster Rate
		floods, of         int
		want               time.Duration // of the last
	}{
		"one":                  {Rate{10 * time.Millisecond, 5}, Rate{4 * time.Millisecond, 10}, 1, 2000, 19_950 * time.Millisecond},
		"bound by all":         {Rate{10 * time.Millisecond, 5}, Rate{5 * time.Millisecond, 10}, 3, 1000, 14_950 * time.Millisecond},
		"many, one each":       {Rate{time.Millisecond, 10}, Rate{100 * time.Millisecond, 4}, 10, 1, 700 * time.Millisecond},
		"no burst to speak of": {Rate{100 * time.Millisecond, 1}, Rate{time.Millisecond, 1000}, 1, 13, 1200 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimulation(t, Rates{Requester: c.requester, Cluster: c.cluster})
			for i := range c.of {
				for f := range c.floods {
					s.add(fmt.Sprintf("%d-%d", f, i), node(fmt.Sprint("flood-", f)))
				}
			}
			for range min(60, s.Len()/2) {
				s.next()
			}
			s.add("honest", node("honest"))
			if got := s.position("honest"); got > c.floods+1 {
				t.Errorf("an honest request is served as number %d", got)
			}
			s.all()
			if off := s.now - c.want; off < -c.cluster.Every || off > c.requester.Every+c.cluster.Every {
				t.Errorf("the last is served after %v, not %v", s.now, c.want)
			}
		})
	}
}

// check compares what the order has in several places.
func (s *simulation) check() {
	s.t.Helper()
	queued := 0
	for _, e := range s.entries {
		if e.queue != nil {
			queued++
		} else if !e.observed {
			s.t.Errorf("%s is remembered in vain", e.request.Name)
		}
	}
	inQueues, queues, requesters, newcomers := 0, 0, 0, 0
	for i := range s.lanes {
		lane := &s.lanes[i]
		for _, l := range lane.queues {
			if l.entries.empty() {
				s.t.Error("there is an empty claimQueue")
			}
			for e := l.entries.first; e != nil; e = e.next {
				if l.attempts == firstAttempts {
					newcomers++
				}
				if inQueues++; e.value.queue != l || e.next == nil && l.entries.last != e {
					s.t.Errorf("%s is in another claimQueue", e.value.request.Name)
				}
			}
		}
		for name, r := range lane.requesters {
			for i, share := range r.shares {
				for e := share.newcomers.first; e != nil; e = e.next {
					newcomers--
					if l := e.value.queue; l == nil || l.requester != r || l.attempts != firstAttempts || l.share != i {
						s.t.Errorf("%s is no newcomer of %s", e.value.request.Name, name)
					}
				}
				for _, round := range share.rounds {
					for l := round.first; l != nil; l = l.next {
						queues++
					}
				}
			}
			if r.name != name || (r.index >= 0) != (r.index >= 0 && lane.parked[r.index] == r) {
				s.t.Errorf("%s is not where it is said to be", name)
			}
		}
		queues -= len(lane.queues)
		for _, round := range lane.rounds {
			for r := round.first; r != nil; r = r.next {
				requesters++
			}
		}
		requesters += len(lane.parked) - len(lane.requesters)
	}
	if queued != s.Len() || inQueues != s.Len() || queues != 0 || requesters != 0 || newcomers != 0 {
		s.t.Errorf("%d are queued, %d in claim queues, %d said to be; %d claim queues and %d requesters too many, %d newcomers too few",
			queued, inQueues, s.Len(), queues, requesters, newcomers)
	}
}

// model is a token bucket as the textbook has it.
type model struct {
	rate    Rate
	credit  time.Duration
	updated time.Duration
}

func (m *model) at(now time.Duration) time.Duration {
	m.credit = min(m.credit+now-m.updated, time.Duration(m.rate.Burst)*m.rate.Every)
	m.updated = now
	return m.credit
}

// For any calls in any order, limits are never exceeded, nothing waits while it is eligible, and
// everything is served once.
func TestLimitsHoldAndNothingIsIdle(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(2, seed))
		pause := func(n int) time.Duration { return time.Duration(random.IntN(n)+1) * time.Millisecond }
		rates := Rates{Requester: Rate{pause(20), random.IntN(4) + 1}, Cluster: Rate{pause(10), random.IntN(6) + 1}}
		s := newSimulation(t, rates)
		full := func(r Rate) *model { return &model{rate: r, credit: time.Duration(r.Burst) * r.Every} }
		cluster, requesters := full(rates.Cluster), map[string]*model{}
		of := func(name string) *model {
			if requesters[name] == nil {
				requesters[name] = full(rates.Requester)
				requesters[name].updated = 0
			}
			return requesters[name]
		}
		flows, queued := map[string]Flow{}, map[string]bool{}
		eligible := func(f Flow) bool {
			return f.Unlimited || cluster.at(s.now) >= rates.Cluster.Every && of(f.Requester).at(s.now) >= rates.Requester.Every
		}
		flowOf := func(name string) Flow {
			if f, ok := flows[name]; ok {
				return f
			}
			return unknown
		}
		anyFlow := func() Flow {
			requester := random.IntN(5)
			return Flow{
				Unlimited: random.IntN(5) == 0, Class: Class(requester % 3), Requester: fmt.Sprint(requester),
				Claim: Claim{Node: []string{"listed-a", "listed-b", "c", "d"}[random.IntN(4)], Proof: random.IntN(2) == 0},
			}
		}
		for range 1000 {
			name := fmt.Sprint(random.IntN(40))
			switch random.IntN(12) {
			case 0, 1, 2, 3:
				if !queued[name] {
					queued[name] = true
					s.Push(requestOf(name))
				}
			case 4, 5:
				flows[name] = anyFlow()
				s.observe(requestOf(name), flows[name])
			case 6:
				delete(flows, name)
				s.forget(requestOf(name))
			case 7:
				requester, took := fmt.Sprint(random.IntN(5)), pause(50)
				denial := time.Duration(0)
				if r := s.lanes[limited].requesters[requester]; r != nil {
					denial = time.Duration(r.denial)
				}
				s.charge(requester, took, s.now)
				m := of(requester)
				before := m.at(s.now)
				every := rates.Requester.Every
				m.credit -= min(took/every, time.Duration(rates.Requester.Burst)) * every
				m.credit = min(before, max(m.credit, every-took-denial*every))
			case 8:
				s.now += pause(10)
			default:
				if !s.pick(s.now) {
					for name := range queued {
						if eligible(flowOf(name)) {
							t.Fatalf("seed %d: %s waits at %v for nothing", seed, name, s.now)
						}
					}
					continue
				}
				got := s.Pop().Name
				s.done(requestOf(got))
				f := flowOf(got)
				if !queued[got] || !eligible(f) {
					t.Fatalf("seed %d: %s is served, queued %v, at %v", seed, got, queued[got], s.now)
				}
				delete(queued, got)
				if !f.Unlimited {
					cluster.credit -= rates.Cluster.Every
					of(f.Requester).credit -= rates.Requester.Every
				}
			}
			if s.check(); t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		for len(queued) > 0 {
			got := s.next()
			if !queued[got] {
				t.Fatalf("seed %d: %s is served twice", seed, got)
			}
			delete(queued, got)
		}
		if s.Len() != 0 {
			t.Fatalf("seed %d: %d are left", seed, s.Len())
		}
	}
}
