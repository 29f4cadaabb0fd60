// SPDX-License-Identifier: Apache-2.0

// Package controller runs node-attestation-controller within the limits of its manifest. Machines
// renew all the time, and everything around the controller fails, one thing after the other.
package controller

import (
	"context"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../../.."
	// stale is the minimum number of machines with a certificate that the backup does not have.
	stale = 5
)

// size has the numbers and times of a run.
type size struct {
	// machines have a record, a Node and a certificate when the run begins. joiners have none.
	machines, joiners int
	// rate is the number of renewals per minute. One in joins of them is a joiner.
	rate, joins int
	// steady is how long the memory of a controller grows after its start: client-go keeps Events
	// for up to 12 minutes. warm comes between that and the first fault, and calm after each one.
	// hold is how long a fault lasts.
	steady, warm, calm, hold time.Duration
	// flood is how long the flood lasts, and floodMost how many requests it files at most.
	flood     time.Duration
	floodMost int
	// after is the time from the flood's end until memory is steady again. It is measured then, but
	// not before the flood's requests are deleted.
	after time.Duration
	// least is how long machines renew, at least.
	least time.Duration
	// refused is the pause of a machine that was denied.
	refused time.Duration
	// kept is the time until a finished request is deleted. kube-controller-manager keeps it for an
	// hour.
	kept time.Duration
	// impostors is the pause between two attempts of impostors, and look that between two
	// measurements.
	impostors, look time.Duration
	// patience bounds each wait. A run that passes does not wait for it.
	patience time.Duration
	// faults are the names of the faults in this run.
	faults []string
	// bounds says that times and memory have to keep their bounds. In a short run they are those of
	// a busy machine.
	bounds bool
}

var (
	// short has the faults that no other suite has: test/replicas kills leaders, test/controller
	// takes CA, inventory and CRD away, test/policies the policies.
	short = size{
		machines: 48, joiners: 4, rate: 300, joins: 15, warm: 3 * time.Second, calm: time.Second, hold: 1500 * time.Millisecond,
		flood: 2 * time.Second, floodMost: 200, after: time.Second, refused: time.Second, kept: 5 * time.Second, impostors: 200 * time.Millisecond, look: time.Second,
		patience: 90 * time.Second, faults: []string{etcdRestored, etcdKilled, rbacRemoved},
	}
	long = size{
		machines: 10_000, joiners: 300, rate: 500, joins: 50, warm: 2 * time.Minute, calm: 30 * time.Second, hold: 15 * time.Second,
		flood: 3 * time.Minute, floodMost: 20_000, after: 13 * time.Minute, refused: 15 * time.Second, kept: 5 * time.Minute, steady: 12 * time.Minute, impostors: 2 * time.Second, look: 5 * time.Second,
		patience: 15 * time.Minute, least: 30 * time.Minute, bounds: true,
		faults: []string{
			etcdRestored, crdRemoved, apiServerKilled, etcdKilled, leaderKilled, etcdCompacted, caRemoved, inventoryRemoved, rbacRemoved, policiesRemoved,
		},
	}
)

// campaign is one run.
type campaign struct {
	t    *testing.T
	size size
	*testbed.ControlPlane
	token    string
	cluster  fleet.Cluster
	replicas []*replica
	oracle   *oracle
	dir      string

	// machines renew, joiners join. attackers have a record and a certificate each, and want
	// another name. strangers are in no inventory.
	machines, joiners, attackers, strangers []*machine
	inventories                             [][]byte

	// ctx ends with the run.
	ctx  context.Context
	wait sync.WaitGroup

	log *journal

	mu      sync.Mutex
	members []*machine  // machines, and the joiners that have joined
	first   []*machine  // who renews before all others
	next    int         // who renews next, of members
	also    func() bool // what else has to hold until a fault is over
	joined  int
	pending map[*machine]time.Time // since when they are at it
	forged  map[string]int         // attempts of impostors, by what became of them
}

// Machines renew, and a few join, while all that the controller needs fails, one thing after the
// other. Impostors try all the time. Each machine gets only its own certificate and recovers from
// each fault, and the controller stays within the memory limit of its manifest.
func TestCampaign(t *testing.T) {
	c := newCampaign(t, sized(t, reliability.Size(t, "campaign", short, long)))
	backup := filepath.Join(c.dir, "backup")
	stop := c.begin()
	c.sleep(c.size.steady + c.size.warm/2)
	backedUp := time.Now()
	harness.Must(t, c.Backup(c.ctx, backup))
	c.log.say("etcd was backed up")
	copied := time.Now()
	c.sleep(c.size.warm / 2)
	c.await("some have renewed that began after the backup", func() bool { return c.log.begunAfter(copied) >= stale })
	c.log.warm = c.log.median()

	faults := c.faults(backup, backedUp)
	for _, name := range c.size.faults {
		c.try(name, faults[name])
		c.sleep(c.size.calm)
	}
	c.log.say("resident memory before the flood: %d MiB", c.log.median()>>20)
	c.flood()
	c.sleep(max(c.size.calm, time.Until(c.log.flooded.repaired.Add(c.size.after))))
	last := c.log.outages[len(c.log.outages)-1].recovered
	if i := c.log.outage(crdRemoved); i != nil {
		last = i.recovered
	}
	c.await("each machine has renewed since", func() bool {
		return time.Since(c.log.began) > c.size.least && c.renewedSince(last)
	})
	c.log.end = c.log.median()
	stop()
	c.conclude()
}

// machinesVariable makes a long run smaller: it has so many machines, of which as large a part
// renews each minute. It is for a machine that does other things as well.
const machinesVariable = "MACHINES"

func sized(t *testing.T, s size) size {
	t.Helper()
	given := os.Getenv(machinesVariable)
	if given == "" {
		return s
	}
	count, err := strconv.Atoi(given)
	if err != nil || count < 20 || count > s.machines {
		t.Fatalf("%s=%s: not a number from 20 to %d", machinesVariable, given, s.machines)
	}
	s.rate, s.joiners, s.floodMost = s.rate*count/s.machines, max(1, s.joiners*count/s.machines), max(200, s.floodMost*count/s.machines)
	s.machines = count
	return s
}

// newCampaign starts all that a run needs.
func newCampaign(t *testing.T, s size) *campaign {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr, AuditPolicy: []byte(noAudit), EtcdArgs: []string{"--quota-backend-bytes=8589934592"}})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, cp.Stop()) })
	ctx, cancel := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM) // what was measured is printed then
	c := &campaign{t: t, size: s, ControlPlane: cp, ctx: ctx, dir: t.TempDir(), pending: map[*machine]time.Time{}, forged: map[string]int{}}
	t.Cleanup(func() {
		cancel()
		c.wait.Wait()
	})
	c.log = newJournal(c)
	for _, step := range []func() error{
		func() error { return cp.BindKubeadmBootstrap(ctx) },
		func() error { c.token, err = cp.CreateBootstrapToken(ctx, 0); return err },
		func() error { return controllerprocess.Install(ctx, cp, module) },
		c.makeMachines,
		c.provideInventory,
	} {
		harness.Must(t, step())
	}
	c.cluster = fleet.Cluster{URL: cp.ServerURL(), CA: cp.ServerCA(), Token: c.token, Issuer: cp.ClientCA().Certificate()}
	c.oracle = newOracle(c)
	c.startReplicas()
	return c
}

// begin starts renewals and impostors. It returns a function that ends both.
func (c *campaign) begin() (stop func()) {
	ctx, cancel := context.WithCancel(c.ctx)
	var wait sync.WaitGroup
	c.wait.Go(func() { c.oracle.follow(c.ctx) })
	c.wait.Go(func() { c.oracle.clean(c.ctx) })
	c.wait.Go(func() { c.log.follow(ctx) })
	c.log.began = time.Now()
	wait.Go(func() { c.stream(ctx) })
	wait.Go(func() { c.forge(ctx) })
	return func() {
		cancel()
		wait.Wait()
		c.await("who has begun has ended", func() bool { return c.atIt(time.Now()) == 0 })
	}
}

// sleep lets the run continue for a while, and measures.
func (c *campaign) sleep(d time.Duration) {
	select {
	case <-time.After(d):
	case <-c.ctx.Done():
		c.giveUp("the run was ended")
	}
	if c.oracle.failed() {
		c.log.say("there was a wrong decision")
	}
}

func (c *campaign) await(what string, condition func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(c.size.patience); !condition(); time.Sleep(50 * time.Millisecond) {
		switch {
		case c.ctx.Err() != nil:
			c.giveUp("the run was ended before this: " + what)
		case time.Now().After(deadline):
			c.giveUp("not within " + c.size.patience.String() + ": " + what)
		}
	}
}

// giveUp ends the test, with the measurements so far.
func (c *campaign) giveUp(why string) {
	c.t.Helper()
	c.t.Errorf("%s; %s", why, c.state())
	c.checkMemory()
	c.log.report()
	c.t.FailNow()
}

// state returns the waiting machines and the ends of the controllers' logs, for a failure's
// message.
func (c *campaign) state() string {
	c.mu.Lock()
	var names []string
	for m := range c.pending {
		if len(names) < 5 {
			names = append(names, m.Name)
		}
	}
	text := strings.Join(names, ", ")
	c.mu.Unlock()
	for _, r := range c.replicas {
		text += "\n" + r.logTail()
	}
	return text
}

// conclude checks the final state, and prints the measurements.
func (c *campaign) conclude() {
	c.oracle.settle()
	c.checkRecords()
	c.checkMemory()
	c.log.report()
	if c.oracle.issuedCount() < len(c.machines) || c.oracle.refusedForgeries() == 0 {
		c.t.Error("too few machines got a certificate, or no impostor was refused")
	}
}
