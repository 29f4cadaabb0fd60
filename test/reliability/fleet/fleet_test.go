// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

const (
	week = 7 * 24 * time.Hour
	// bootWithin is how long it takes until all nodes of a fleet are switched on.
	bootWithin = 5 * time.Minute
	// settled is when nothing of the boot is left.
	settled = time.Hour
	// checkInterval is the plugin's default.
	checkInterval = 15 * time.Minute
)

// size is one of the test's two sizes.
type size struct {
	nodes     int
	lifetimes []time.Duration
	// wave and recovery are what the peaks are compared in: long enough for many requests.
	wave, recovery time.Duration
}

var (
	short = size{2_000, []time.Duration{24 * time.Hour}, time.Hour, 10 * time.Minute}
	long  = size{100_000, []time.Duration{24 * time.Hour, week}, time.Minute, time.Minute}
)

// side is who asks for certificates.
type side struct {
	name string
	fill func(w *world, count int)
}

const ours, theirs = 0, 1

func both(checkInterval time.Duration) [2]side {
	return [...]side{
		ours:   {"plugin", func(w *world, count int) { newPlugins(w, count, checkInterval) }},
		theirs: {"client-go", newManagers},
	}
}

// report prints one line of a table: requests for certificates, and all calls.
func report(t *testing.T, side side, w *world, what string, from, to, unit time.Duration) figure {
	t.Helper()
	f := w.renewals(from, to, unit)
	minute := w.peak(from, to, time.Minute, asks)
	t.Logf("| %d nodes, %s | %s, %s | mean %.1f a minute, peak minute %d, ratio %.1f; by %s %.1f | peak minute of calls %d, with checks %d |",
		len(w.nodes), w.lifetime, side.name, what, f.mean*float64(time.Minute)/float64(unit), minute.most, float64(minute.most)/(f.mean*float64(time.Minute)/float64(unit)), unit, f.ratio(),
		w.peak(from, to, time.Minute, asks, others).most, w.peak(from, to, time.Minute, asks, others, checks).most)
	return f
}

// safe checks that no node was without a valid certificate, and how much was left of those that
// were renewed last.
func safe(t *testing.T, side side, w *world, left float64) {
	t.Helper()
	t.Logf("%s: least part of a lifetime left at a renewal: %.3f; decisions queued at most: %d", side.name, w.leastLeft, w.mostQueued)
	if w.ended > 0 || w.leastLeft < left {
		t.Errorf("%s: %d certificates have ended, and %.3f of a lifetime was left", side.name, w.ended, w.leastLeft)
	}
}

// withChance adds to a number of independent requests what no fullest unit of a week exceeds by
// chance: four standard deviations.
func withChance(n float64) float64 { return n + 4*math.Sqrt(n) }

// After a boot of all nodes, renewals come in waves, which spread out more and more. The fullest
// minute of the week is no fuller than with client-go's certificate manager.
func TestMassBoot(t *testing.T) {
	of := reliability.Size(t, "fleet", short, long)
	for _, lifetime := range of.lifetimes {
		t.Run(lifetime.String(), func(t *testing.T) {
			var peak [2]figure
			for i, side := range both(0) {
				w := newWorld(lifetime, week)
				side.fill(w, of.nodes)
				w.bootAll(bootWithin)
				w.run()
				t.Logf("%s, boot within %s: peak minute of calls %d", side.name, bootWithin, w.peak(0, settled, time.Minute, asks, others).most)
				peak[i] = report(t, side, w, "renewals after the boot", settled, week, of.wave)
				safe(t, side, w, 0.099)
			}
			if float64(peak[ours].most) > withChance(float64(peak[theirs].most)) {
				t.Errorf("%d requests in the fullest %s, and with client-go's manager %d", peak[ours].most, of.wave, peak[theirs].most)
			}
		})
	}
}

const (
	// awayFrom and signerFrom are when an outage of an hour begins.
	awayFrom, signerFrom = 4 * time.Hour, 12 * time.Hour
	away                 = time.Hour
	// mostAfterOutage is how many times the mean the recovery may be.
	mostAfterOutage = 3
)

// A fleet that has spread out loses the API server for an hour, and later the signer.
func TestOutages(t *testing.T) {
	of := reliability.Size(t, "fleet", short, long)
	for _, lifetime := range of.lifetimes {
		t.Run(lifetime.String(), func(t *testing.T) {
			for i, side := range both(checkInterval) {
				w := newWorld(lifetime, 20*time.Hour)
				w.api, w.signer = outage{awayFrom, awayFrom + away}, outage{signerFrom, signerFrom + away}
				side.fill(w, of.nodes)
				w.spread()
				w.run()
				report(t, side, w, "steady state", time.Hour, awayFrom, of.recovery)
				after := report(t, side, w, "API server back", awayFrom+away, signerFrom, of.recovery)
				report(t, side, w, "signer away", signerFrom, signerFrom+away, of.recovery)
				report(t, side, w, "signer back", signerFrom+away, 20*time.Hour, of.recovery)
				safe(t, side, w, 0.03)
				if i == ours && float64(after.most) > withChance(mostAfterOutage*after.mean) {
					t.Errorf("once the API server is back, %d requests come in the fullest %s, and %.1f on average", after.most, of.recovery, after.mean)
				}
			}
		})
	}
}
