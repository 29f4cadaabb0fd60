// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
)

// rule says when a certificate is replaced that begins and ends at these times.
type rule func(notBefore, notAfter time.Time) time.Time

// ownRule is the product's: the very function that a run asks. It derives the moment from the
// certificate's bytes, which are random here as they are in a certificate (its serial number, its
// key).
func ownRule(notBefore, notAfter time.Time) time.Time {
	raw := make([]byte, 64)
	_, _ = rand.Read(raw) // never fails
	return nodestate.RenewAt(&x509.Certificate{Raw: raw, NotBefore: notBefore, NotAfter: notAfter})
}

// managerRule is the rule of client-go's certificate manager, which is the kubelet's own rotation.
// It repeats jitteryDuration, which is not exported, and calls the same function of apimachinery.
func managerRule(notBefore, notAfter time.Time) time.Time {
	total := notAfter.Sub(notBefore)
	return notBefore.Add(wait.Jitter(total, 0.2) - time.Duration(float64(total)*0.3))
}

// jitter compares how the renewals of a fleet spread out. All first certificates are issued within
// one minute. Our nodes run the plugin once an hour, each at a time of its own. The kubelet's own
// rotation wakes up at the time of the renewal.
func (b *bench) jitter(context.Context) error {
	for _, c := range []struct {
		name     string
		lifetime time.Duration
	}{{"24 h", 24 * time.Hour}, {"1 year", 365 * 24 * time.Hour}} {
		for _, generation := range []int{1, 10} {
			ours, theirs := simulate(b.fleet, c.lifetime, time.Hour, generation, ownRule), simulate(b.fleet, c.lifetime, 0, generation, managerRule)
			prefix := fmt.Sprintf("fleet of %d, certificates of %s, renewal %d: ", b.fleet, c.name, generation)
			for _, unit := range []struct {
				name string
				of   time.Duration
			}{{"minute", time.Minute}, {"hour", time.Hour}} {
				mine, other := ours.peak(unit.of), theirs.peak(unit.of)
				b.table.add(row{
					what:    prefix + "peak " + unit.name + " over the average",
					figure:  fmt.Sprintf("%.1f (%d renewals)", mine.over, mine.most),
					against: fmt.Sprintf("client-go's manager, %.1f (%d)", other.over, other.most), ratio: fmt.Sprintf("%.2f", mine.over/other.over),
				})
			}
			b.table.add(row{
				what: prefix + "p1, p50, p99 after the first issuance", figure: ours.quantiles(c.lifetime),
				against: "client-go's manager, " + theirs.quantiles(c.lifetime),
				ratio:   fmt.Sprintf("%.2f", over(ours.width(), theirs.width())),
			})
		}
	}
	return nil
}

// renewals are the times of one renewal of each node, after the first issuance, and the mean time
// from one to the next.
type renewals struct {
	at   []time.Duration
	mean time.Duration
}

// simulate issues a certificate to each node within a minute, and renews it as often as generation
// says. A renewal is at the first run that finds the certificate due. If the time between runs is
// 0, it is at the moment when the certificate is due.
func simulate(fleet int, lifetime, apart time.Duration, generation int, due rule) renewals {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := renewals{at: make([]time.Duration, fleet)}
	var sum time.Duration
	for i := range r.at {
		at := start.Add(mathrand.N(time.Minute)) //nolint:gosec // G404: a simulation
		var offset time.Duration
		if apart > 0 {
			offset = mathrand.N(apart) //nolint:gosec // G404: a simulation
		}
		for range generation {
			issued := at
			at = due(issued, issued.Add(lifetime))
			if apart > 0 {
				at = firstRun(at, start, apart, offset)
			}
		}
		r.at[i] = at.Sub(start)
		sum += r.at[i] / time.Duration(generation) / time.Duration(fleet)
	}
	r.mean = sum
	return r
}

// firstRun returns the first run at or after a moment, where runs are at start + offset + a
// multiple of apart.
func firstRun(moment, start time.Time, apart, offset time.Duration) time.Time {
	first := start.Add(offset)
	late := moment.Sub(first)
	n := late / apart
	if late%apart > 0 {
		n++
	}
	return first.Add(n * apart)
}

// height is how many renewals come within the fullest unit of time, and how many times the average
// that is.
type height struct {
	most int
	over float64
}

// peak finds the fullest unit. The average is that of a fleet that is spread evenly.
func (r renewals) peak(unit time.Duration) height {
	count := map[time.Duration]int{}
	most := 0
	for _, at := range r.at {
		count[at/unit]++
		most = max(most, count[at/unit])
	}
	average := float64(len(r.at)) * over(unit, r.mean)
	return height{most, float64(most) / average}
}

// quantiles says when renewals come, in hours or, where certificates live for long, in days.
func (r renewals) quantiles(lifetime time.Duration) string {
	unit, name := time.Hour, "h"
	if lifetime > 30*24*time.Hour {
		unit, name = 24*time.Hour, "d"
	}
	value := func(q float64) float64 { return over(quantile(r.at, q), unit) }
	return fmt.Sprintf("%.1f, %.1f, %.1f %s", value(0.01), value(0.5), value(0.99), name)
}

// width is the time in which all but the first and the last hundredth of the fleet renew.
func (r renewals) width() time.Duration { return quantile(r.at, 0.99) - quantile(r.at, 0.01) }
