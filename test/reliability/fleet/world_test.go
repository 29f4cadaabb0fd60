// SPDX-License-Identifier: Apache-2.0

// Package fleet simulates a fleet of nodes for a week of virtual time. It counts the requests that
// arrive at the API server in each minute. It does so in steady state, after a boot of all nodes,
// and after an outage. The plugin's own functions (schedule_test.go) decide when a node
// sends a request, and the controller's own rates decide how fast the controller evaluates it. The
// rest is a model: a network without delay, a kubelet that sends a request each ten seconds,
// certificates that no API server refuses.
package fleet

import (
	"crypto/x509"
	"encoding/binary"
	"math/rand/v2"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
)

// kubeletInterval is how often a kubelet sends a request, and so has client-go look at the
// expirationTimestamp: it renews its Lease each ten seconds.
const kubeletInterval = 10 * time.Second

// start is when each world begins.
var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// node is one node with what asks for its certificates.
type node interface {
	// join starts one with a certificate, and reports whether its renewal is still to come.
	join(age time.Duration) bool
	// wake is called at a time that the node asked for by world.at.
	wake(what event)
	// decided is called once the controller has decided the request that was filed with this
	// number.
	decided(number int)
}

// event is why a node is woken. number tells a worker from the one before.
type event struct {
	node   int
	kind   kind
	number int
}

type kind uint8

const (
	runs     kind = iota // the kubelet sends a request, and client-go runs the plugin
	deadline             // the worker's
)

// call is a request that a node sends to the API server.
type call int

const (
	asks   call = iota // the first request of a renewal, and each one after it that starts over
	others             // all other calls of a renewal
	checks             // for announced renewals
	calls
)

// outage is when a part of the control plane is away.
type outage struct{ from, to time.Duration }

func (o outage) has(at time.Duration) bool { return at >= o.from && at < o.to }

// world has the nodes, the API server and the controller. Its clock has whole seconds.
type world struct {
	lifetime    time.Duration
	api, signer outage
	now         time.Duration
	nodes       []node
	events      [][]event // by second
	queue       []decision
	tokens      float64
	rate        fairqueue.Rate
	random      *rand.Rand
	interval    float64 // sum of the seconds from one certificate of a node to its next
	intervals   int
	minutes     [][calls]int
	mostQueued  int
	leastLeft   float64 // the least part of a lifetime that was left at a renewal
	ended       int     // certificates that ended before the next one was there
}

type decision struct{ node, number int }

func newWorld(lifetime, length time.Duration) *world {
	return &world{
		lifetime: lifetime, events: make([][]event, length/time.Second), minutes: make([][calls]int, length/time.Minute),
		rate: fairqueue.DefaultRates().Cluster, tokens: float64(fairqueue.DefaultRates().Cluster.Burst),
		random: rand.New(rand.NewPCG(1, 2)), leastLeft: 1,
	}
}

// clock is the time of day.
func (w *world) clock() time.Time { return start.Add(w.now) }

// upTo returns a random time from 0 up to d.
func (w *world) upTo(d time.Duration) time.Duration {
	return time.Duration(w.random.Int64N(int64(d)))
}

// spread starts the nodes with certificates of the ages of a fleet that has run for long. For each
// age there are as many certificates as outlive it.
func (w *world) spread() {
	for _, n := range w.nodes {
		for !n.join(w.upTo(w.lifetime)) {
		}
	}
}

// bootAll starts the nodes without a certificate, each at a random time.
func (w *world) bootAll(within time.Duration) {
	for i := range w.nodes {
		w.at(w.upTo(within), event{node: i, kind: runs})
	}
}

// at has a node woken, in the next second at the earliest.
func (w *world) at(when time.Duration, e event) {
	second := max(int(when/time.Second), int(w.now/time.Second)+1)
	if second < len(w.events) {
		w.events[second] = append(w.events[second], e)
	}
}

// send counts n calls, and reports whether the API server is there. A call to one that is away does
// not arrive.
func (w *world) send(what call, n int) bool {
	if w.api.has(w.now) {
		return false
	}
	w.minutes[w.now/time.Minute][what] += n
	return true
}

// file puts a request before the controller.
func (w *world) file(node, number int) {
	w.queue = append(w.queue, decision{node, number})
	w.mostQueued = max(w.mostQueued, len(w.queue))
}

// issue returns a certificate that begins now. Its bytes are random, as those of a certificate are:
// they have its serial number and its key.
func (w *world) issue(begins time.Duration) *x509.Certificate {
	raw := make([]byte, 32)
	for i := 0; i < len(raw); i += 8 {
		binary.LittleEndian.PutUint64(raw[i:], w.random.Uint64())
	}
	return &x509.Certificate{Raw: raw, NotBefore: start.Add(begins), NotAfter: start.Add(begins + w.lifetime)}
}

// renewed notes that a certificate takes the place of another one.
func (w *world) renewed(before *x509.Certificate) {
	if before == nil {
		return
	}
	w.interval += w.clock().Sub(before.NotBefore).Seconds()
	w.intervals++
	left := before.NotAfter.Sub(w.clock())
	if left <= 0 {
		w.ended++
	}
	w.leastLeft = min(w.leastLeft, float64(left)/float64(w.lifetime))
}

// run lets the time pass.
func (w *world) run() {
	for second := range w.events {
		w.now = time.Duration(second) * time.Second
		w.decide()
		for _, e := range w.events[second] {
			w.nodes[e.node].wake(e)
		}
		w.events[second] = nil
	}
}

// decide lets the controller decide queued requests, as fast as its rate for a cluster allows.
func (w *world) decide() {
	w.tokens = min(w.tokens+float64(time.Second)/float64(w.rate.Every), float64(w.rate.Burst))
	if w.api.has(w.now) || w.signer.has(w.now) {
		return
	}
	n := min(len(w.queue), int(w.tokens))
	batch := w.queue[:n]
	w.queue, w.tokens = w.queue[n:], w.tokens-float64(n)
	for _, j := range batch {
		w.nodes[j.node].decided(j.number)
	}
}

// figure is a number of calls in the fullest unit of a time, and in an average one.
type figure struct {
	most int
	mean float64
}

func (f figure) ratio() float64 { return float64(f.most) / f.mean }

// peak returns the fullest unit between two times. The mean is the whole fleet's, spread evenly
// over the mean time between two renewals: that of calls over all issued certificates.
func (w *world) peak(from, to, unit time.Duration, what ...call) figure {
	f := figure{}
	for at := from; at+unit <= to; at += unit {
		n := 0
		for minute := at / time.Minute; minute < (at+unit)/time.Minute; minute++ {
			for _, c := range what {
				n += w.minutes[minute][c]
			}
		}
		f.most = max(f.most, n)
	}
	return f
}

// renewals is peak of the requests for certificates.
func (w *world) renewals(from, to, unit time.Duration) figure {
	f := w.peak(from, to, unit, asks)
	f.mean = float64(len(w.nodes)) * unit.Seconds() / (w.interval / float64(w.intervals))
	return f
}
