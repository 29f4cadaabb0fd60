// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/procfs"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// bound is what the 99th percentile of enrolments has to keep that begin outside of an outage,
// without a flood.
const bound = 5 * time.Second

// enrolment is one certificate that a machine got.
type enrolment struct {
	began  time.Time
	took   time.Duration
	tries  int // attempts that failed before
	joined bool
}

// journal has what is measured.
type journal struct {
	c       *campaign
	began   time.Time
	outages []*outage
	flooded outage
	// floodDeleted is when the flood's requests were deleted. They were kept until
	// flooded.recovered.
	floodDeleted time.Time
	// warm, end and most are resident memory of a replica, in bytes.
	warm, end int64
	most      atomic.Int64
	skipped   atomic.Int64
	deleted   atomic.Int64 // records that were deleted after the restore

	mu       sync.Mutex
	all      []enrolment
	reasons  map[string]int
	failures map[string]int
	loads    []float64
	memories []int64
}

func newJournal(c *campaign) *journal {
	return &journal{c: c, reasons: map[string]int{}, failures: map[string]int{}}
}

// say prints a line with time and load.
func (l *journal) say(format string, args ...any) {
	l.c.t.Logf("%s load %.1f  %s", time.Now().Format(time.TimeOnly), load(), fmt.Sprintf(format, args...))
}

// busy is which part of the time between two readings of /proc/stat the processors were not idle,
// in percent.
func busy(before, now procfs.CPUStat) float64 {
	idle := now.Idle + now.Iowait - before.Idle - before.Iowait
	worked := now.User + now.Nice + now.System + now.IRQ + now.SoftIRQ + now.Steal -
		(before.User + before.Nice + before.System + before.IRQ + before.SoftIRQ + before.Steal)
	return 100 * worked / max(worked+idle, 1)
}

// processors reads /proc/stat, and returns nothing where that is not there.
func processors() procfs.CPUStat {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return procfs.CPUStat{}
	}
	stat, _ := fs.Stat()
	return stat.CPUTotal
}

// load is the machine's load average of the last minute.
func load() (average float64) {
	content, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		_, _ = fmt.Sscan(string(content), &average)
	}
	return average
}

func (l *journal) note(e enrolment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e)
}

func (l *journal) refused(reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reasons[reason]++
}

func (l *journal) refusals(reason string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reasons[reason]
}

// failed notes an attempt that got no decision, by how far it had come.
func (l *journal) failed(times fleet.Times, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	far := "before the hello was filed"
	switch {
	case times.ProofFiled > 0:
		far = "while it waited for the certificate"
	case times.ChallengeSeen > 0:
		far = "before the proof was filed"
	case times.HelloFiled > 0:
		far = "while it waited for the challenge"
	}
	l.failures[far]++
	if l.failures[far] <= 2 {
		l.c.t.Logf("an attempt failed %s: %v", far, err)
	}
}

// begunAfter returns how many machines got a certificate that they began to ask for after a time.
func (l *journal) begunAfter(when time.Time) int {
	return len(l.took(func(e enrolment) bool { return e.began.After(when) }))
}

// memory is the resident memory of the larger replica.
func (l *journal) memory() (largest int64) {
	for _, r := range l.c.replicas {
		largest = max(largest, r.memory())
	}
	return largest
}

// median is the median of the last minute's measurements of memory.
func (l *journal) median() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	const minute = 12 // of a long run
	last := slices.Sorted(slices.Values(l.memories[max(0, len(l.memories)-minute):]))
	if len(last) == 0 {
		return 0
	}
	return last[len(last)/2]
}

// follow measures memory and load until ctx ends, and prints a line each minute.
func (l *journal) follow(ctx context.Context) {
	tick := time.NewTicker(l.c.size.look)
	defer tick.Stop()
	last, before := time.Now(), processors()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		memory := l.memory()
		l.most.Store(max(l.most.Load(), memory))
		l.mu.Lock()
		l.memories = append(l.memories, memory)
		l.loads = append(l.loads, load())
		l.mu.Unlock()
		if time.Since(last) > time.Minute {
			recent := l.took(func(e enrolment) bool { return e.began.Add(e.took).After(last) })
			last = time.Now()
			now := processors()
			l.say("%d certificates in this minute, p50 %s, p99 %s; %d at it; %d MiB; processors %.0f %% busy",
				len(recent), round(quantile(recent, .5)), round(quantile(recent, .99)), l.c.atIt(last), memory>>20, busy(before, now))
			before = now
		}
	}
}

// took returns how long some enrolments took, in order.
func (l *journal) took(some func(enrolment) bool) (times []time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.all {
		if some(e) {
			times = append(times, e.took)
		}
	}
	slices.Sort(times)
	return times
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func round(d time.Duration) time.Duration {
	if d > 10*time.Second {
		return d.Round(100 * time.Millisecond)
	}
	return d.Round(time.Millisecond)
}

// outage returns the one of a name, nil if there was none.
func (l *journal) outage(name string) *outage {
	for _, o := range l.outages {
		if o.name == name {
			return o
		}
	}
	return nil
}

func (o *outage) has(when time.Time) bool { return !when.Before(o.from) && when.Before(o.recovered) }

// within reports whether an outage has a time.
func (l *journal) within(when time.Time) bool {
	return slices.ContainsFunc(l.outages, func(o *outage) bool { return o.has(when) })
}

// broken reports whether anything was missing at a time.
func (l *journal) broken(when time.Time) bool {
	return slices.ContainsFunc(l.outages, func(o *outage) bool { return o.has(when) && when.Before(o.repaired) })
}

// gap is the longest time within an outage in which no machine got a certificate.
func (l *journal) gap(o *outage) (longest time.Duration) {
	var got []time.Time
	l.mu.Lock()
	for _, e := range l.all {
		got = append(got, e.began.Add(e.took))
	}
	l.mu.Unlock()
	slices.SortFunc(got, time.Time.Compare)
	for i := 1; i < len(got); i++ {
		if got[i].After(o.from) && got[i-1].Before(o.recovered) {
			longest = max(longest, got[i].Sub(got[i-1]))
		}
	}
	return longest
}

// afterFlood reports whether the flood's requests were being deleted at a time.
func (l *journal) afterFlood(when time.Time) bool {
	began := l.flooded.recovered
	return !began.IsZero() && !when.Before(began) && (l.floodDeleted.IsZero() || when.Before(l.floodDeleted))
}

// hasFlood reports whether there was a request of the flood at a time.
func (l *journal) hasFlood(when time.Time) bool { return l.flooded.has(when) || l.afterFlood(when) }

// isCalm reports whether nothing was missing at a time, no machine was held up, and there was no
// request of the flood.
func (l *journal) isCalm(when time.Time) bool { return !l.within(when) && !l.hasFlood(when) }

// report prints all that was measured, and checks the bound.
func (l *journal) report() {
	c := l.c
	l.mu.Lock()
	slices.Sort(l.loads)
	var median, highest float64
	if n := len(l.loads); n > 0 {
		median, highest = l.loads[n/2], l.loads[n-1]
	}
	count := len(l.all)
	reasons, failures := maps.Clone(l.reasons), maps.Clone(l.failures)
	l.mu.Unlock()
	lasted := time.Since(l.began)
	l.say("%d machines with records, %d certificates in %s, %.0f a minute of %d wanted; load average %.1f in the median, %.1f at most; %d turns were left out",
		len(c.machines), count, round(lasted), float64(count)/lasted.Minutes(), c.size.rate, median, highest, l.skipped.Load())
	for _, o := range l.outages {
		slowest := l.took(func(e enrolment) bool { return e.began.Before(o.recovered) && e.began.Add(e.took).After(o.from) })
		l.say("%s: %s until it was repaired, %d machines held up, recovered %s later; no certificate for %s; slowest machine %s",
			o.name, round(o.repaired.Sub(o.from)), o.heldUp, round(o.recovered.Sub(o.repaired)), round(l.gap(o)), round(quantile(slowest, 1)))
	}
	for _, row := range []struct {
		name string
		some func(enrolment) bool
	}{
		{"began outside of an outage, without a flood", func(e enrolment) bool { return l.isCalm(e.began) }},
		{"began outside of the time until a fault was repaired, without a flood", func(e enrolment) bool { return !l.broken(e.began) && !l.hasFlood(e.began) }},
		{"first enrolments that began outside of an outage, without a flood", func(e enrolment) bool { return l.isCalm(e.began) && e.joined }},
		{"began during the flood", func(e enrolment) bool { return l.flooded.has(e.began) && e.began.Before(l.flooded.repaired) }},
		{"- of these, first enrolments with the flooded token", func(e enrolment) bool { return l.flooded.has(e.began) && e.joined }},
		{"began while the requests of the flood were deleted", func(e enrolment) bool { return l.afterFlood(e.began) }},
		{"began in an outage", func(e enrolment) bool { return l.within(e.began) }},
	} {
		times := l.took(row.some)
		l.say("%s: %d, p50 %s, p99 %s, slowest %s", row.name, len(times), round(quantile(times, .5)), round(quantile(times, .99)), round(quantile(times, 1)))
	}
	calm := l.took(func(e enrolment) bool { return l.isCalm(e.began) })
	if p99 := quantile(calm, .99); c.size.bounds && p99 > bound || len(calm) == 0 {
		c.t.Errorf("outside of an outage the 99th percentile is %s, of %d", p99, len(calm))
	}
	l.say("requests of honest machines that ended without a certificate: %s", c.oracle.summary(honest))
	l.say("requests of impostors: %s", c.oracle.summary(impostor))
	l.say("requests of the flood: %s", c.oracle.summary(flooder))
	l.say("the records of %d nodes were deleted after the restore", l.deleted.Load())
	l.say("denials that machines saw: %v; attempts that failed: %v", reasons, failures)
	c.mu.Lock()
	for _, name := range slices.Sorted(maps.Keys(c.forged)) {
		c.t.Logf("%6d  %s", c.forged[name], name)
	}
	c.mu.Unlock()
	l.say("%d certificates were checked, %d wrong decisions", c.oracle.issuedCount(), c.oracle.wrongCount())
}
