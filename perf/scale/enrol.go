// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/witness"
)

const (
	enrolled = 1000
	// stuck is what no machine may take, from its first hello to its certificate.
	stuck = time.Minute
	// minKills is how often a replica is killed, at least, while requests are open, and maxKills at
	// most: a start costs processor time, too.
	minKills, maxKills = 3, 6
	// calmFrom and calmTo are for how long nobody is killed after one that was killed is back, and
	// somebody leads.
	calmFrom, calmTo = 500 * time.Millisecond, 5 * time.Second
)

// enrol has a thousand machines enrol at once with two replicas of which one is killed, again and
// again.
func enrol(ctx context.Context, b *bench) error {
	return b.withControlPlane(ctx, testbed.Options{}, func(cp *testbed.ControlPlane) (err error) {
		if err := cp.BindKubeadmBootstrap(ctx); err != nil {
			return err
		}
		cluster, err := joining(ctx, cp)
		if err != nil {
			return err
		}
		c, err := b.newCrowd("enrol", b.sized(enrolled), realTPMs, cluster)
		if err != nil {
			return err
		}
		defer c.stop()
		inventory, err := b.inventory(ctx, c.machines)
		if err != nil {
			return err
		}
		pair, stop, err := b.replicas(ctx, cp, 2, inventory)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
		if _, err := leader(ctx, pair); err != nil {
			return err
		}
		w, err := witness.Observe(ctx, cp)
		if err != nil {
			return err
		}
		defer w.Close()

		b.note("%d machines enrol, %d of them with swtpm", len(c.machines), c.real)
		k := &killer{bench: b, crowd: c, pair: pair, witness: w, dice: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))} //nolint:gosec // G404: no secret
		done := make(chan struct{})
		killed := make(chan error, 1)
		go func() { killed <- k.run(ctx, done) }()
		times, err := c.attest(ctx)
		close(done)
		if err := errors.Join(<-killed, ctx.Err()); err != nil {
			return err
		}
		b.expect(err == nil, "each machine gets its certificate: %v", err)
		return b.reportEnrolments(ctx, cp, c, k, times)
	})
}

// joining returns the cluster for a crowd of machines that have one bootstrap token, all of them,
// as with kubeadm.
func joining(ctx context.Context, cp *testbed.ControlPlane) (fleet.Cluster, error) {
	token, err := cp.CreateBootstrapToken(ctx, time.Hour)
	return fleet.Cluster{URL: cp.ServerURL(), CA: cp.ServerCA(), Token: token, Issuer: cp.ClientCA().Certificate()}, err
}

// inventory writes a file with the machines, and has a controller use it: a ConfigMap holds a
// megabyte.
func (b *bench) inventory(ctx context.Context, machines []*fleet.Machine) (func(*config.Config), error) {
	content, err := fleet.Inventory(ctx, machines...)
	if err != nil {
		return nil, err
	}
	dir, err := b.folder("inventory")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, controllerprocess.InventoryKey)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return nil, err
	}
	return func(c *config.Config) { c.Inventory = config.Inventory{File: file} }, nil
}

// killer kills replicas at random, as long as there is something to do, and starts them again at
// once.
type killer struct {
	bench   *bench
	crowd   *crowd
	pair    []*replica
	witness *witness.Witness
	dice    *rand.Rand

	kills []kill
}

// kill is one that was done.
type kill struct {
	after time.Duration
	led   bool
	// open is how many requests the controller had something to do about, and atIt how many
	// machines had no certificate yet.
	open int
	atIt int64
	// missing is for how long nobody led.
	missing time.Duration
}

// run kills until all machines have ended.
func (k *killer) run(ctx context.Context, done <-chan struct{}) error {
	began := time.Now()
	for len(k.kills) < maxKills {
		leads, err := leader(ctx, k.pair)
		if err != nil {
			return err
		}
		select {
		case <-done:
			return nil
		case <-time.After(between(k.dice, calmFrom, calmTo)):
		}
		open := k.witness.Open()
		if open == 0 {
			continue
		}
		// The first victim is the leader, so that a leader is killed at least once.
		victim := leads
		if len(k.kills) > 0 {
			victim = k.pair[k.dice.IntN(len(k.pair))]
		}
		if err := victim.Kill(); err != nil {
			return fmt.Errorf("replica %s ended by itself: %w", victim.name, err)
		}
		killed := time.Now()
		one := kill{after: killed.Sub(began), led: victim == leads, open: open, atIt: k.crowd.atIt.Load()}
		k.bench.note("replica %s was killed (leading: %t) after %s, with %d requests open, of %d machines", victim.name, one.led, figure(one.after), open, one.atIt)
		if err := victim.Start(ctx); err != nil {
			return err
		}
		if err := victim.Ready(ctx); err != nil {
			return err
		}
		if one.led {
			if _, err := leader(ctx, k.pair); err != nil {
				return err
			}
			one.missing = time.Since(killed)
		}
		k.kills = append(k.kills, one)
	}
	return nil
}

func between(dice *rand.Rand, shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(dice.Int64N(int64(longest-shortest)))
}

func (b *bench) reportEnrolments(ctx context.Context, cp *testbed.ControlPlane, c *crowd, k *killer, times []fleet.Times) error {
	all := took(times)
	first, last := took(times[:c.real]), took(times[c.real:])
	report := newTable("from the first hello to the certificate", "number", "median", "95 %", "99 %", "slowest")
	for _, row := range []struct {
		name string
		took []time.Duration
	}{{"all machines", all}, {"those with swtpm", first}, {"those with the model", last}} {
		report.row(row.name, len(row.took), quantile(row.took, .5), quantile(row.took, .95), quantile(row.took, .99), quantile(row.took, 1))
	}
	report.print()
	kills := newTable("kills", "after", "requests open", "machines without a certificate", "without a leader for")
	leaders, leaderless := 0, time.Duration(0)
	for _, kill := range k.kills {
		if kill.led {
			leaders, leaderless = leaders+1, leaderless+kill.missing
			kills.row("the one that led", kill.after, kill.open, kill.atIt, kill.missing)
		} else {
			kills.row("the one that stood by", kill.after, kill.open, kill.atIt)
		}
	}
	kills.print()
	span := spanned(times)
	b.say("%d certificates within %s, %.0f a second; without the %s in which nobody led, %.0f a second",
		len(all), figure(span), float64(len(all))/span.Seconds(), figure(leaderless), float64(len(all))/(span-leaderless).Seconds())

	b.expect(len(all) == len(c.machines), "%d of %d machines got a certificate", len(all), len(c.machines))
	b.expect(quantile(all, 1) <= stuck, "the slowest took %s", quantile(all, 1))
	if b.size >= 1 { // a few are done before anybody can be killed
		b.expect(len(k.kills) >= minKills, "replicas were killed %d times with requests open, not %d", len(k.kills), minKills)
	}
	issued, err := k.witness.SignedOnce(ctx)
	b.expect(err == nil, "each proof is signed once: %v", err)
	proofs, certificates := k.witness.Proofs(), 0
	for _, of := range issued {
		certificates += len(of)
	}
	closed, waiting, err := k.witness.HellosAreSettled(ctx)
	b.expect(err == nil, "each hello is settled: %v", err)
	records, err := readRecords(ctx, cp)
	if err != nil {
		return err
	}
	machines := make([]witness.Machine, len(c.machines))
	for i, m := range c.machines {
		machines[i] = witness.Machine{Name: m.Name, ProviderID: m.ProviderID()}
	}
	unpublished, err := witness.OneRecordEach(records, machines, issued)
	b.expect(err == nil, "each machine has one record, with all its certificates: %v", err)
	lease, err := cp.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(ctx, leaseName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	takeovers := int32(0)
	if lease.Spec.LeaseTransitions != nil {
		takeovers = *lease.Spec.LeaseTransitions
	}
	b.say("%d proofs have %d certificates, %d records; %d certificates were noted that nobody was given; hellos: %d closed, %d wait for the end of their challenge",
		proofs, certificates, len(records), unpublished, closed, waiting)
	b.say("the one that led was killed %d times, and went on leading when it was back, but for %d takeovers by the other one", leaders, takeovers)
	return nil
}

// readRecords returns the records of all machines.
func readRecords(ctx context.Context, cp *testbed.ControlPlane) ([]v1alpha1.NodeAttestation, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	reader, err := client.New(cp.AdminConfig(), client.Options{Scheme: scheme})
	if err != nil {
		return nil, err
	}
	list := &v1alpha1.NodeAttestationList{}
	err = reader.List(ctx, list, client.InNamespace(controllerprocess.Namespace))
	return list.Items, err
}
