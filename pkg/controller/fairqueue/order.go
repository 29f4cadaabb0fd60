// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"container/heap"
	"maps"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// order is the tree of the package comment. It is the storage of a workqueue (workqueue.Queue),
// which adds to it whatever is queued. The owner locks, calls pick before each Pop, and tells the
// time.
type order struct {
	rates    Rates
	listed   func(Claim) bool
	attested func(ak string) bool

	// entries are all requests that have a flow, and those that are queued.
	entries map[reconcile.Request]*entry
	queued  int

	lanes    [2]lane
	lastLane int

	cluster    bucket
	requesters buckets
	// advances are of looks that are in process.
	advances map[reconcile.Request]advance

	// chosen is the requester whose request Pop returns, and chosenAt is when it was picked.
	chosen   *requester
	chosenAt time.Duration
}

// The lanes. A flood in one does not delay the other, since they are served in turn.
const (
	unlimited = iota
	limited
)

// entry is what is known of a request.
type entry struct {
	request reconcile.Request
	flow    Flow
	// observed says that flow is known. Otherwise the entry ends with its time in the queue.
	observed bool
	// looked says that the request took tokens before: it is no newcomer.
	looked bool
	// line is where the request is queued; nil if it is not.
	line  *line
	place element[*entry]
}

// lane has the requesters of queued requests, with or without limits.
type lane struct {
	requesters map[string]*requester
	lines      map[lineKey]*line
	// rounds are the requesters that may have a token, by class, and lastClass was served last.
	rounds    [classes]list[*requester]
	lastClass int
	// parked are those without a token, by the time of their next one.
	parked parked
}

// requester is one with queued requests.
type requester struct {
	name  string
	class Class
	// bucket is nil in the unlimited lane.
	bucket *bucket
	// denial is how many tokens each look takes in advance, since denials took that long.
	denial int
	// shares are by what is known of claims. attestedLast says that the last turn was the attested
	// ones', and listedInRow counts the listed ones' since the unlisted ones had one.
	shares       [3]share
	attestedLast bool
	listedInRow  int

	place element[*requester]
	// readyAt and index are of a parked requester. The index of another one is -1.
	readyAt time.Duration
	index   int
}

// advance is what a look took beside its own token. It is returned when the look is done.
type advance struct {
	requester string
	bucket    *bucket
	tokens    int
}

const (
	unlistedShare = iota
	listedShare
	// attestedShare has every other turn where a requester has other requests, too. Nobody but the
	// machine itself can add to its line there.
	attestedShare
)

// listedWeight is how many turns listed claims have for each turn of the others, where a requester
// has both. With DefaultRates and one token for all machines that leaves 25 looks a second to
// machines that are not listed: trust on first use and waiting for an inventory go on beside any
// number of listed claims, which can be copied. A listed machine waits for one other look.
const listedWeight = 3

// share has the lines of some claims of a requester: those of first looks and of further ones. They
// have turns of their own, so that a standing backlog of waiting requests does not delay a
// newcomer.
type share struct {
	rounds [2]list[*line]
	last   int
}

const (
	firstLooks = iota
	furtherLooks
)

// line has the queued requests of one claim, either first looks or further ones.
type line struct {
	lineKey
	share   int
	entries list[*entry]
	// newest says that the newest is next. Of further looks it is always the oldest.
	newest bool
	place  element[*line]
}

type lineKey struct {
	requester *requester
	claim     Claim
	looks     int
}

func newOrder(rates Rates, listed func(Claim) bool, attested func(ak string) bool) *order {
	o := &order{
		rates: rates, listed: listed, attested: attested, entries: map[reconcile.Request]*entry{}, requesters: newBuckets(),
		advances: map[reconcile.Request]advance{},
	}
	for i := range o.lanes {
		o.lanes[i] = lane{requesters: map[string]*requester{}, lines: map[lineKey]*line{}}
	}
	return o
}

// observe is Queue.Observe.
func (o *order) observe(request reconcile.Request, flow Flow) {
	e := o.entry(request)
	if e.observed && e.flow == flow {
		return
	}
	o.change(e, flow)
	e.observed = true
}

// forget is Queue.Forget. A queued request stays in the queue, for a glance.
func (o *order) forget(request reconcile.Request) {
	e := o.entries[request]
	if e == nil {
		return
	}
	o.change(e, unknown)
	e.observed = false
	o.release(e)
}

// unknown is the flow of a request of which nothing was observed.
var unknown = Flow{Unlimited: true}

func (o *order) entry(request reconcile.Request) *entry {
	e := o.entries[request]
	if e == nil {
		e = &entry{request: request, flow: unknown}
		e.place.value = e
		o.entries[request] = e
	}
	return e
}

// release forgets a request that is neither queued nor observed.
func (o *order) release(e *entry) {
	if e.line == nil && !e.observed {
		delete(o.entries, e.request)
	}
}

func (o *order) change(e *entry, flow Flow) {
	queued := e.line != nil
	if queued {
		o.detach(e)
	}
	e.flow = flow
	if queued {
		o.attach(e)
	}
}

// Push queues a request.
func (o *order) Push(request reconcile.Request) {
	o.attach(o.entry(request))
	o.queued++
}

// Touch is called when a queued request is added again. The machines may have changed since.
func (o *order) Touch(request reconcile.Request) {
	if e := o.entries[request]; e != nil && e.line != nil {
		o.relistEntry(e)
	}
}

// Len returns how many requests are queued, whether the limits allow one now or not.
func (o *order) Len() int { return o.queued }

func (o *order) lane(f Flow) *lane {
	if f.Unlimited {
		return &o.lanes[unlimited]
	}
	return &o.lanes[limited]
}

// attach puts a request at the end of its line.
func (o *order) attach(e *entry) {
	lane := o.lane(e.flow)
	r := lane.requesters[e.flow.Requester]
	if r == nil {
		r = &requester{name: e.flow.Requester, class: min(e.flow.Class, classes-1), index: -1}
		r.place.value = r
		if !e.flow.Unlimited {
			r.bucket = o.requesters.of(r.name)
		}
		lane.requesters[r.name] = r
		lane.rounds[r.class].pushBack(&r.place)
	}
	claim, share := o.shareOf(e.flow)
	key := lineKey{r, claim, firstLooks}
	if e.looked || e.flow.Unlimited {
		// The queue cannot tell how often a request was looked at that takes no tokens.
		key.looks = furtherLooks
	}
	l := lane.lines[key]
	if l == nil {
		l = &line{lineKey: key, newest: key.looks == firstLooks, share: share}
		l.place.value = l
		lane.lines[key] = l
		l.round().pushBack(&l.place)
	} else {
		l.setShare(share)
	}
	e.line = l
	l.entries.pushBack(&e.place)
}

// detach takes a request out of its line, and removes what is empty then.
func (o *order) detach(e *entry) {
	l, lane := e.line, o.lane(e.flow)
	r := l.requester
	e.line = nil
	if l.entries.remove(&e.place); !l.entries.empty() {
		return
	}
	l.round().remove(&l.place)
	delete(lane.lines, l.lineKey)
	if r.has(unlistedShare) || r.has(listedShare) || r.has(attestedShare) {
		return
	}
	delete(lane.requesters, r.name)
	if r.index >= 0 {
		heap.Remove(&lane.parked, r.index)
	} else {
		lane.rounds[r.class].remove(&r.place)
	}
	if r.bucket != nil {
		// Others may have taken its place while requests were queued.
		o.requesters.keep(r.name, r.bucket)
	}
}

// shareOf returns the claim whose line a request is queued in, and the share that has the line. Of an
// attested claim only the AK counts, and of a listed one only the part that is listed. Otherwise a
// flood with one machine's EK and many node names would have as many lines beside that machine's.
func (o *order) shareOf(f Flow) (Claim, int) {
	ak := f.Claim.AK
	f.Claim.AK = "" // a flood can have an AK that nobody knows for each request
	if f.Unlimited {
		return f.Claim, unlistedShare
	}
	if ak != "" && o.attested(ak) {
		return Claim{AK: ak}, attestedShare
	}
	for _, part := range []Claim{{EK: f.Claim.EK, Proof: f.Claim.Proof}, {Node: f.Claim.Node, Proof: f.Claim.Proof}} {
		if o.listed(part) {
			return part, listedShare
		}
	}
	return f.Claim, unlistedShare
}

// relist moves the requests whose claims are listed or attested now and were not before, and the
// other way round. It costs up to three calls of the constructor's functions for each queued request.
func (o *order) relist() {
	for _, l := range slices.Collect(maps.Values(o.lanes[limited].lines)) {
		var queued []*entry
		for place := l.entries.first; place != nil; place = place.next {
			queued = append(queued, place.value)
		}
		for _, e := range queued {
			o.relistEntry(e)
		}
	}
}

func (o *order) relistEntry(e *entry) {
	claim, share := o.shareOf(e.flow)
	if claim == e.line.claim {
		e.line.setShare(share)
		return
	}
	o.detach(e)
	o.attach(e)
}

// setShare moves a line to the share that its claim belongs to.
func (l *line) setShare(share int) {
	if share != l.share {
		l.round().remove(&l.place)
		l.share = share
		l.round().pushBack(&l.place)
	}
}

// pick chooses the request that Pop returns, and reports whether the limits allow one at this time.
func (o *order) pick(now time.Duration) bool {
	for i := range o.lanes {
		at := (o.lastLane + 1 + i) % len(o.lanes)
		if at == limited && o.cluster.readyAt(o.rates.Cluster) > now {
			continue
		}
		if o.chosen = o.lanes[at].next(o.rates.Requester, now); o.chosen != nil {
			o.chosenAt = now
			return true
		}
	}
	return false
}

// next returns the requester whose turn it is, nil if none has a token.
func (l *lane) next(rate Rate, now time.Duration) *requester {
	for len(l.parked) > 0 && l.parked[0].readyAt <= now {
		r := heap.Pop(&l.parked).(*requester)
		l.rounds[r.class].pushBack(&r.place)
	}
	for i := range l.rounds {
		round := &l.rounds[(l.lastClass+1+i)%len(l.rounds)]
		for !round.empty() {
			r := round.first.value
			if r.bucket == nil || r.bucket.readyAt(rate) <= now {
				return r
			}
			round.remove(&r.place)
			r.readyAt = r.bucket.readyAt(rate)
			heap.Push(&l.parked, r)
		}
	}
	return nil
}

// nextAt returns when pick may succeed, where it did not, unless something is queued before. It is
// false if nothing is queued that waits for limits.
func (o *order) nextAt() (time.Duration, bool) {
	lane := &o.lanes[limited]
	if len(lane.requesters) == 0 {
		return 0, false
	}
	at := o.cluster.readyAt(o.rates.Cluster)
	if len(lane.parked) == len(lane.requesters) {
		at = max(at, lane.parked[0].readyAt)
	}
	return at, true
}

// Pop returns the request that pick chose, which takes its tokens.
func (o *order) Pop() reconcile.Request {
	r := o.chosen
	l := r.turn()
	e := l.turn()
	lane := o.lane(e.flow)
	lane.lastClass = int(r.class)
	lane.rounds[r.class].moveToBack(&r.place)
	o.lastLane = unlimited
	if r.bucket != nil {
		o.lastLane = limited
		e.looked = true
		r.bucket.take(1+r.denial, o.rates.Requester, o.chosenAt)
		if r.denial > 0 {
			o.advances[e.request] = advance{r.name, r.bucket, r.denial}
			r.denial -= (r.denial + advanceShare - 1) / advanceShare
		}
		o.cluster.take(1, o.rates.Cluster, o.chosenAt)
	}
	o.detach(e)
	o.release(e)
	o.queued--
	return e.request
}

// advanceShare is which part of the advance each look makes it smaller by: the next denial restores
// it, and other looks end it.
const advanceShare = 8

// charge takes further tokens of a requester, as many as fit into a time.
//
// Denials that are in process at the same time must not add up: the requester would have no turn
// until all of that time has passed, and its listed machines would wait for it. So after a denial
// each look of the requester takes as much in advance, and gets it back when it is done. Before the
// first denial was charged nothing was taken in advance. So a charge also delays the next turn by no
// more than its own time and an advance.
func (o *order) charge(name string, took, now time.Duration) {
	rate := o.rates.Requester
	tokens := int(min(took/rate.Every, time.Duration(rate.Burst)))
	b, latest := o.requesters.of(name), now+took
	if r := o.lanes[limited].requesters[name]; r != nil {
		b = r.bucket
		latest += time.Duration(r.denial) * rate.Every
		r.denial = tokens
	}
	before := *b
	b.take(tokens, rate, now)
	*b = max(before, min(*b, bucket(latest)+bucket(rate.Burst-1)*bucket(rate.Every)))
}

// done returns what a look took in advance.
func (o *order) done(request reconcile.Request) {
	a, ok := o.advances[request]
	if !ok {
		return
	}
	delete(o.advances, request)
	*a.bucket -= bucket(a.tokens) * bucket(o.rates.Requester.Every)
	lane := &o.lanes[limited]
	if r := lane.requesters[a.requester]; r != nil && r.index >= 0 {
		r.readyAt = r.bucket.readyAt(o.rates.Requester)
		heap.Fix(&lane.parked, r.index)
	}
}

// turn returns the line whose turn it is, which goes to the end of its round.
func (r *requester) turn() *line {
	others := r.has(unlistedShare) || r.has(listedShare)
	if r.has(attestedShare) && (!r.attestedLast || !others) {
		r.attestedLast = true
		return r.shares[attestedShare].turn()
	}
	r.attestedLast = false
	if r.has(listedShare) && (r.listedInRow < listedWeight || !r.has(unlistedShare)) {
		r.listedInRow = min(r.listedInRow+1, listedWeight)
		return r.shares[listedShare].turn()
	}
	r.listedInRow = 0
	return r.shares[unlistedShare].turn()
}

func (r *requester) has(share int) bool { return !r.shares[share].empty() }

func (s *share) empty() bool { return s.rounds[firstLooks].empty() && s.rounds[furtherLooks].empty() }

func (s *share) turn() *line {
	s.last = 1 - s.last
	if s.rounds[s.last].empty() {
		s.last = 1 - s.last
	}
	round := &s.rounds[s.last]
	first := round.first
	round.moveToBack(first)
	return first.value
}

func (l *line) round() *list[*line] {
	return &l.requester.shares[l.share].rounds[l.looks]
}

// turn returns the request whose turn it is: the newest, or in its turn the oldest. So a backlog of
// copies of a claim does not delay a newcomer by its length, and the oldest goes on whatever comes.
// To delay a newcomer, an attacker has to file copies faster than the newest of the line are
// served, and to go on with it. Then the newcomer waits for twice the backlog that it found.
//
// A request that was looked at before does not count as new. Otherwise copies that wait would be
// the newest again at each retry, and would overtake each newcomer without another write.
func (l *line) turn() *entry {
	if l.looks == furtherLooks {
		return l.entries.first.value
	}
	newest := l.newest
	l.newest = !newest
	if newest {
		return l.entries.last.value
	}
	return l.entries.first.value
}

// parked is a heap of requesters by the time of their next token (container/heap).
type parked []*requester

func (p parked) Len() int           { return len(p) }
func (p parked) Less(i, j int) bool { return p[i].readyAt < p[j].readyAt }
func (p parked) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	p[i].index, p[j].index = i, j
}

// Push is heap.Push's.
func (p *parked) Push(x any) {
	r := x.(*requester)
	r.index = len(*p)
	*p = append(*p, r)
}

// Pop is heap.Pop's.
func (p *parked) Pop() any {
	last := len(*p) - 1
	r := (*p)[last]
	(*p)[last] = nil
	*p = (*p)[:last]
	r.index = -1
	return r
}
