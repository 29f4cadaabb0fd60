// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// newDice returns the random source for the times of a test. SEED repeats them, as far as the
// computer allows.
func newDice(t *testing.T) (seed uint64) {
	t.Helper()
	seed = rand.Uint64()
	if given := os.Getenv("SEED"); given != "" {
		var err error
		if seed, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SEED=%d", seed)
	return seed
}

func between(dice *rand.Rand, shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(dice.Int64N(int64(longest-shortest)))
}

// stuck is longer than any request may take, from the filing of the hello to the certificate. It
// covers two takeovers and the work, on a machine that does other things as well.
const stuck = 90 * time.Second

// crowd is a set of machines that attest again and again, each in a goroutine of its own, until the
// crowd is stopped.
type crowd struct {
	machines []*machine
	ctx      context.Context
	cancel   context.CancelFunc
	wait     sync.WaitGroup

	mu    sync.Mutex
	times []time.Duration
	// since has the start times of the current attempts.
	since map[*machine]time.Time
}

func newCrowd(t *testing.T, machines []*machine) *crowd {
	c := &crowd{machines: machines, since: map[*machine]time.Time{}}
	c.ctx, c.cancel = context.WithCancel(t.Context())
	// If a test ends early, no goroutine continues during the next one.
	t.Cleanup(func() {
		c.cancel()
		c.wait.Wait()
	})
	return c
}

// attest attests a machine once. An error fails the test.
func (c *crowd) attest(t *testing.T, m *machine, way func(context.Context) (time.Duration, error)) bool {
	ctx, cancel := context.WithTimeout(c.ctx, 2*stuck)
	defer cancel()
	c.mu.Lock()
	c.since[m] = time.Now()
	c.mu.Unlock()
	took, err := way(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.since, m)
	if err != nil {
		if c.ctx.Err() == nil { // else the test has given up
			t.Error(err)
		}
		return false
	}
	c.times = append(c.times, took)
	return true
}

// oldest returns the age of the oldest current attempt.
func (c *crowd) oldest() (longest time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, since := range c.since {
		longest = max(longest, time.Since(since))
	}
	return longest
}

// all waits until all have a certificate, logs the times, and starts a new count.
func (c *crowd) all(t *testing.T, what string) {
	t.Helper()
	c.wait.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.times) == 0 {
		t.Fatalf("%s: none", what)
	}
	slices.Sort(c.times)
	median, worst := c.times[len(c.times)/2], c.times[len(c.times)-1]
	t.Logf("%s: %d, the median took %s, the slowest %s", what, len(c.times), median.Round(time.Millisecond), worst.Round(time.Millisecond))
	if worst > stuck {
		t.Errorf("that is longer than %s", stuck)
	}
	c.times = nil
	for _, m := range c.machines {
		if m.Certificate == nil {
			t.Errorf("%s has no certificate", m.Name)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

const (
	leaderKills = 3
	// renewed is the number of machines that renew while the leader is killed again.
	renewed = 30
	// atWork is the minimum number of open requests when the leader is killed.
	atWork = 3
	// young is how long ago a machine's attempt may have begun when the leader is killed. The kill
	// costs the 15 s until the Lease expires. The other replica needs up to 4.4 s to see the last
	// renewal, and up to 4.4 s to look again. That is 24 s at most. A machine is hit twice, and not
	// thrice.
	young = 25 * time.Second
	// deposed bounds those 24 s, on a busy machine.
	deposed = 80 * time.Second
)

// While a hundred machines enrol and renew, the current leader is killed at a random time, again
// and again. Each machine gets its certificates, each request one, and there is one record of each
// machine.
func TestLeaderKilledAtRandom(t *testing.T) {
	forgetAfterwards(t)
	seed := newDice(t)
	dice := rand.New(rand.NewPCG(seed, 0))
	machines := newMachines(t, "led", 100)
	inventoried(t, machines...)
	pair := []*replica{newReplica(t, "a", nil), newReplica(t, "b", nil)}
	for _, r := range pair {
		r.ready(t)
	}
	o := observe(t)
	c := newCrowd(t, machines)
	enough := make(chan struct{})
	for i, m := range machines {
		first, dice := m.attest, rand.New(rand.NewPCG(seed, uint64(i+1)))
		if i%10 == 0 {
			first = m.plug
		}
		c.wait.Go(func() {
			for good := c.attest(t, m, first); good; good = c.attest(t, m, m.attest) {
				select {
				case <-enough:
					return
				case <-time.After(between(dice, 2*time.Second, 12*time.Second)):
				}
			}
		})
	}
	for range leaderKills {
		leads := leader(t, pair)
		time.Sleep(between(dice, 0, 2*time.Second)) // at any moment of its work
		c.killAtWork(t, o, leads)
	}
	leads := leader(t, pair)
	close(enough)
	c.all(t, "enrolments and renewals")

	for _, m := range machines[:renewed] {
		c.wait.Go(func() { c.attest(t, m, m.attest) })
	}
	time.Sleep(between(dice, 0, 100*time.Millisecond)) // at any moment of a renewal
	c.killAtWork(t, o, leads)
	c.all(t, "renewals")

	unpublished := eachHasOneRecord(t, machines, o.eachSignedOnce(t))
	t.Logf("%d certificates are noted that nobody has", unpublished)
	o.hellosAreSettled(t)
	lease, err := shared.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(t.Context(), leaseName, metav1.GetOptions{})
	if err != nil || *lease.Spec.LeaseTransitions < leaderKills+1 {
		t.Errorf("%v: %+v", err, lease.Spec)
	}
}

// leader waits for the one replica that leads.
func leader(t *testing.T, replicas []*replica) *replica {
	t.Helper()
	var leads []*replica
	began := time.Now()
	harness.Eventually(t, deposed, "one leads", func() bool {
		leads = slices.DeleteFunc(slices.Clone(replicas), func(r *replica) bool { return !r.leads(t.Context()) })
		return len(leads) > 0
	})
	if len(leads) > 1 {
		t.Fatal("more than one leads")
	}
	t.Logf("replica %s leads after %s", leads[0].name, time.Since(began).Round(100*time.Millisecond))
	return leads[0]
}

// killAtWork kills a replica as soon as it has an open request, and starts it again at once.
func (c *crowd) killAtWork(t *testing.T, o *observer, r *replica) {
	t.Helper()
	var open int
	var oldest time.Duration
	harness.Eventually(t, deposed, "there is work, and all who wait for it have not waited for long", func() bool {
		open, oldest = o.Open(), c.oldest()
		return open >= atWork && oldest < young
	})
	r.kill(t)
	t.Logf("replica %s was killed with %d requests open; who has waited longest began %s before", r.name, open, oldest.Round(time.Millisecond))
	r.start(t)
}

// The only replica, with no Lease to wait for, runs for at most 1.5 s at a time.
func TestKilledWithoutMercy(t *testing.T) {
	const lasts = 20 * time.Second
	forgetAfterwards(t)
	seed := newDice(t)
	dice := rand.New(rand.NewPCG(seed, 0))
	machines := newMachines(t, "hounded", 10)
	inventoried(t, machines...)
	r := newReplica(t, "only", func(c *config.Config) { c.LeaderElection.Enabled = false })
	r.ready(t)
	o := observe(t)
	c := newCrowd(t, machines)
	end := time.Now().Add(lasts)
	for i, m := range machines {
		dice := rand.New(rand.NewPCG(seed, uint64(i+1)))
		c.wait.Go(func() {
			for c.attest(t, m, m.attest) && time.Now().Before(end) {
				// so that the machines do not start at once
				time.Sleep(between(dice, 200*time.Millisecond, time.Second))
			}
		})
	}
	kills, hits := 0, 0
	for time.Now().Before(end) {
		// the time until the replica is killed
		time.Sleep(between(dice, 700*time.Millisecond, 1500*time.Millisecond))
		// Every other time, it is killed as soon as a request is open: on a fast computer
		// there is none for half of the time.
		for kills%2 == 0 && o.Open() == 0 && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		if o.Open() > 0 {
			hits++
		}
		r.kill(t)
		r.start(t)
		kills++
	}
	c.all(t, "enrolments and renewals")
	t.Logf("it was killed %d times, of these %d at work", kills, hits)
	if hits < kills/2 {
		t.Error("that was at work too seldom")
	}
	unpublished := eachHasOneRecord(t, machines, o.eachSignedOnce(t))
	t.Logf("%d certificates are noted that nobody has", unpublished)
	o.hellosAreSettled(t)
}
