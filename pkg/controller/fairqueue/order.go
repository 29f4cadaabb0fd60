// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"container/heap"
	"maps"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// order is the tree of the package comment. It is the storage of a workqueue (workqueue.Queue). The
// owner locks, calls pick before each Pop, and passes the time.
type order struct {
	rates    Rates
	listed   func(Claim) bool
	attested func(ak string) bool

	// entries has all requests that have a flow or are queued.
	entries map[reconcile.Request]*entry
	queued  int

	lanes    [2]lane
	lastLane int

	cluster    bucket
	requesters buckets
	// advances has the advances of the requests in process.
	advances map[reconcile.Request]advance

	// chosen is the requester whose request Pop returns, picked at chosenAt.
	chosen   *requester
	chosenAt time.Duration
}

// The lanes are served alternately, so a flood in one does not delay the other.
const (
	unlimited = iota
	limited
)

// entry is the state of a request.
type entry struct {
	request reconcile.Request
	flow    Flow
	// observed says that flow is known. Otherwise the entry is removed once the request leaves the
	// queue.
	observed bool
	// retried says that the request was reconciled before with tokens: it is no newcomer.
	retried bool
	// queue is the queue of its claim in which the request is queued, nil if it is not queued.
	queue *claimQueue
	place element[*entry]
	// arrival is the place among the newcomers of its share, if this is a first attempt.
	arrival element[*entry]
}

// lane has the requesters of queued requests, with or without limits.
type lane struct {
	requesters map[string]*requester
	queues     map[claimQueueKey]*claimQueue
	// rounds has the requesters that may have a token, by class. lastClass is the class that was
	// served last.
	rounds    [classes]list[*requester]
	lastClass int
	// parked has the requesters without a token, by the time of their next token.
	parked parked
}

// requester is a requester with queued requests.
type requester struct {
	name  string
	class Class
	// bucket is nil in the unlimited lane.
	bucket *bucket
	// denial is the number of tokens that each request takes in advance, and returns when it is
	// done. It comes from the time of the last charge.
	denial int
	// shares divides the requests by their claims. attestedLast says that the attested share was
	// served last. listedInRow counts how often the listed share was served since the unlisted one.
	shares       [3]share
	attestedLast bool
	listedInRow  int

	place element[*requester]
	// readyAt and index are for a parked requester. If the requester is not parked, index is -1.
	readyAt time.Duration
	index   int
}

// advance has the tokens that a request took beside its own. They are returned when the request is
// done.
type advance struct {
	requester string
	bucket    *bucket
	tokens    int
}

const (
	unlistedShare = iota
	listedShare
	// attestedShare is served every other time if the requester has other requests, too. Only the
	// machine itself can add requests to its claim queue there.
	attestedShare
)

// listedWeight is the number of listed requests that are served for each unlisted one, if a
// requester has both. Unlisted machines need a part, since anybody can copy any number of listed
// claims. With DefaultRates and one token for all machines, 25 reconciliations a second are left to
// them. That keeps trust on first use and waiting for an inventory alive. A listed machine waits
// for one other request.
const listedWeight = 3

// share has the queues of some claims of a requester: one round of first attempts, and one of later
// attempts. The rounds are served alternately, so that a backlog of waiting requests does not delay
// a newcomer.
type share struct {
	rounds [2]list[*claimQueue]
	last   int
	// newcomers has the first attempts of all claims, by arrival. newestLast says that the newest
	// one was served last.
	newcomers  list[*entry]
	newestLast bool
}

const (
	firstAttempts = iota
	laterAttempts
)

// claimQueue has the queued requests of one claim, either first attempts or later ones.
type claimQueue struct {
	claimQueueKey
	share   int
	entries list[*entry]
	place   element[*claimQueue]
}

type claimQueueKey struct {
	requester *requester
	claim     Claim
	attempts  int
}

func newOrder(rates Rates, listed func(Claim) bool, attested func(ak string) bool) *order {
	o := &order{
		rates: rates, listed: listed, attested: attested, entries: map[reconcile.Request]*entry{}, requesters: newBuckets(),
		advances: map[reconcile.Request]advance{},
	}
	for i := range o.lanes {
		o.lanes[i] = lane{requesters: map[string]*requester{}, queues: map[claimQueueKey]*claimQueue{}}
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

// forget is Queue.Forget. A queued request stays in the queue: the reconciliation finds that
// nothing is left to do.
func (o *order) forget(request reconcile.Request) {
	e := o.entries[request]
	if e == nil {
		return
	}
	o.change(e, unknown)
	e.observed = false
	o.release(e)
}

// unknown is the flow of a request before Observe.
var unknown = Flow{Unlimited: true}

func (o *order) entry(request reconcile.Request) *entry {
	e := o.entries[request]
	if e == nil {
		e = &entry{request: request, flow: unknown}
		e.place.value, e.arrival.value = e, e
		o.entries[request] = e
	}
	return e
}

// release forgets a request that is neither queued nor observed.
func (o *order) release(e *entry) {
	if e.queue == nil && !e.observed {
		delete(o.entries, e.request)
	}
}

func (o *order) change(e *entry, flow Flow) {
	queued := e.queue != nil
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
	if e := o.entries[request]; e != nil && e.queue != nil {
		o.reclassifyEntry(e)
	}
}

// Len returns the number of queued requests, including those that the limits delay.
func (o *order) Len() int { return o.queued }

func (o *order) lane(f Flow) *lane {
	if f.Unlimited {
		return &o.lanes[unlimited]
	}
	return &o.lanes[limited]
}

// attach puts a request at the end of its claim queue.
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
	key := claimQueueKey{r, claim, firstAttempts}
	if e.retried || e.flow.Unlimited {
		// A request that takes no tokens is not counted, so it has no first attempt.
		key.attempts = laterAttempts
	}
	l := lane.queues[key]
	if l == nil {
		l = &claimQueue{claimQueueKey: key, share: share}
		l.place.value = l
		lane.queues[key] = l
		l.round().pushBack(&l.place)
	} else {
		l.setShare(share)
	}
	e.queue = l
	l.entries.pushBack(&e.place)
	if l.attempts == firstAttempts {
		r.shares[l.share].newcomers.pushBack(&e.arrival)
	}
}

// detach takes a request out of its claim queue, and removes the claim queue and the requester if
// they are empty.
func (o *order) detach(e *entry) {
	l, lane := e.queue, o.lane(e.flow)
	r := l.requester
	e.queue = nil
	if l.attempts == firstAttempts {
		r.shares[l.share].newcomers.remove(&e.arrival)
	}
	if l.entries.remove(&e.place); !l.entries.empty() {
		return
	}
	l.round().remove(&l.place)
	delete(lane.queues, l.claimQueueKey)
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
		// The cache may have dropped the bucket while requests were queued.
		o.requesters.keep(r.name, r.bucket)
	}
}

// shareOf returns the claim whose claim queue a request is queued in, and the share of that claim
// queue. Of an attested claim only the AK counts, and of a listed one only the listed part.
// Otherwise a flood with one machine's EK and many node names would have many queues beside that
// machine's.
func (o *order) shareOf(f Flow) (Claim, int) {
	ak := f.Claim.AK
	f.Claim.AK = "" // a flood can have another unknown AK in each request
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

// reclassify moves the requests whose claims have become listed or attested, or no longer are. It
// makes up to three calls of listed and attested for each queued request.
func (o *order) reclassify() {
	for _, l := range slices.Collect(maps.Values(o.lanes[limited].queues)) {
		var queued []*entry
		for place := l.entries.first; place != nil; place = place.next {
			queued = append(queued, place.value)
		}
		for _, e := range queued {
			o.reclassifyEntry(e)
		}
	}
}

func (o *order) reclassifyEntry(e *entry) {
	claim, share := o.shareOf(e.flow)
	if claim == e.queue.claim {
		e.queue.setShare(share)
		return
	}
	o.detach(e)
	o.attach(e)
}

// setShare moves a claim queue to the share of its claim. Its first attempts are newcomers there.
func (l *claimQueue) setShare(share int) {
	if share == l.share {
		return
	}
	before, after := &l.requester.shares[l.share], &l.requester.shares[share]
	l.round().remove(&l.place)
	l.share = share
	l.round().pushBack(&l.place)
	for place := l.entries.first; place != nil && l.attempts == firstAttempts; place = place.next {
		before.newcomers.remove(&place.value.arrival)
		after.newcomers.pushBack(&place.value.arrival)
	}
}

// pick chooses the request that Pop returns. It reports false if the limits allow none at this
// time.
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

// next returns the requester that is served next, nil if none has a token.
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

// nextAt returns the time when pick may succeed after it failed, if nothing else is queued until
// then. It returns false if no queued request waits for limits.
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

// Pop returns the request that pick chose, and takes its tokens.
func (o *order) Pop() reconcile.Request {
	r := o.chosen
	e := r.next()
	lane := o.lane(e.flow)
	lane.lastClass = int(r.class)
	lane.rounds[r.class].moveToBack(&r.place)
	o.lastLane = unlimited
	if r.bucket != nil {
		o.lastLane = limited
		e.retried = true
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

// Each request reduces the advance by one part in advanceShare. The next charge restores it, and
// requests without a charge reduce it to nothing.
const advanceShare = 8

// charge takes the tokens that the requester would get in the time took.
//
// Concurrent charges must not add up. Otherwise the requester would not be served until the sum of
// their times has passed, and its listed machines would wait. So after a charge, each request takes
// the same number of tokens in advance, and gets them back when it is done. Requests that began
// before the first charge took nothing in advance. So a charge delays the next request by no more
// than its own time and one advance.
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

// done returns the tokens that a request took in advance.
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

// next returns the request that is served next.
func (r *requester) next() *entry {
	others := r.has(unlistedShare) || r.has(listedShare)
	if r.has(attestedShare) && (!r.attestedLast || !others) {
		r.attestedLast = true
		return r.shares[attestedShare].next()
	}
	r.attestedLast = false
	if r.has(listedShare) && (r.listedInRow < listedWeight || !r.has(unlistedShare)) {
		r.listedInRow = min(r.listedInRow+1, listedWeight)
		return r.shares[listedShare].next()
	}
	r.listedInRow = 0
	return r.shares[unlistedShare].next()
}

func (r *requester) has(share int) bool { return !r.shares[share].empty() }

func (s *share) empty() bool {
	return s.rounds[firstAttempts].empty() && s.rounds[laterAttempts].empty()
}

// next returns the request that is served next. Of first attempts that is alternately the newest
// one of all claims, and the oldest one of the next claim. So no backlog delays a newcomer, neither
// of copies of its own claim nor of many claims, and the oldest requests make progress, too. To
// delay a newcomer, an attacker must keep filing copies faster than the newest ones are served.
// Then the newcomer waits for two turns of each queued claim, and once more for each older copy of
// its own claim.
//
// The newest one does not move its claim in the round. Otherwise a stream of copies would keep that
// claim at the end of the round for ever.
//
// A retried request does not count as new. Otherwise waiting copies would be the newest again at
// each retry, and would overtake each newcomer without another write.
func (s *share) next() *entry {
	s.last = 1 - s.last
	if s.rounds[s.last].empty() {
		s.last = 1 - s.last
	}
	if s.last == firstAttempts {
		s.newestLast = !s.newestLast
		if s.newestLast {
			return s.newcomers.last.value
		}
	}
	round := &s.rounds[s.last]
	first := round.first
	round.moveToBack(first)
	return first.value.entries.first.value
}

func (l *claimQueue) round() *list[*claimQueue] {
	return &l.requester.shares[l.share].rounds[l.attempts]
}

// parked is a heap of requesters by the time of their next token (container/heap).
type parked []*requester

func (p parked) Len() int           { return len(p) }
func (p parked) Less(i, j int) bool { return p[i].readyAt < p[j].readyAt }
func (p parked) Swap(i, j int) {
	p[i], p[j] = p[j], p[i]
	p[i].index, p[j].index = i, j
}

// Push implements heap.Interface.
func (p *parked) Push(x any) {
	r := x.(*requester)
	r.index = len(*p)
	*p = append(*p, r)
}

// Pop implements heap.Interface.
func (p *parked) Pop() any {
	last := len(*p) - 1
	r := (*p)[last]
	(*p)[last] = nil
	*p = (*p)[:last]
	r.index = -1
	return r
}
