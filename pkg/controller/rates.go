// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"container/list"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
)

// maxLimiters bounds how many requesters and machines are told apart. One that is forgotten starts with a full burst.
const maxLimiters = 20000

// denials bounds the Events about what is denied to one requester: each costs the API server as much as the denial.
func denials() fairqueue.Rate { return fairqueue.Rate{Every: time.Second, Burst: 50} }

// maxTurn bounds how long a request is told to wait before it asks again: those before it may have gone.
const maxTurn = 5 * time.Second

// maxLate is how late a request may come back before others are served in its place.
const maxLate = time.Second

// turns gives each request its turn to be judged: of one requester one after the other, in the order in which they came, and the requesters
// in turn. So a flood of one, or of some, takes no turns from the others.
type turns struct {
	rates   fairqueue.Rates
	cluster *rate.Limiter

	mu                   sync.Mutex
	latest               time.Time // see at
	requesters, machines *lru.Cache
	// told are limiters of Events, by requester.
	told *lru.Cache
	// lines are the requests that wait, by requester.
	lines map[string]*line
	// owners are their requesters.
	owners map[string]string
	// round are the requesters whose first request waits for the cluster's rate alone, and due is when they were told to come back.
	round *line
	due   map[string]time.Time
}

// line is a queue of names. Each has a number, one more than the one before it when it came.
type line struct {
	waiting *list.List
	places  map[string]*list.Element
	next    int
}

// ticket is what stands in a line.
type ticket struct {
	name   string
	number int
}

func newLine() *line { return &line{waiting: list.New(), places: map[string]*list.Element{}} }

// before returns how many are before a name, where all of them that have gone since are counted, or would be if it came now.
func (l *line) before(name string) int {
	if l == nil || l.waiting.Len() == 0 {
		return 0
	}
	number := l.next
	if e := l.places[name]; e != nil {
		number = e.Value.(ticket).number
	}
	return number - l.waiting.Front().Value.(ticket).number
}

func (l *line) enter(name string) {
	if l.places[name] == nil {
		l.places[name] = l.waiting.PushBack(ticket{name, l.next})
		l.next++
	}
}

func (l *line) leave(name string) {
	if e := l.places[name]; e != nil {
		l.waiting.Remove(e)
		delete(l.places, name)
	}
}

func newTurns(r fairqueue.Rates) *turns {
	return &turns{
		rates: r, cluster: limiter(r.Cluster), requesters: lru.New(maxLimiters), machines: lru.New(maxLimiters), told: lru.New(maxLimiters),
		lines: map[string]*line{}, owners: map[string]string{}, round: newLine(), due: map[string]time.Time{},
	}
}

// maxBack is more than passes between asking for the time and telling it: a time that is further back is that of a clock which was put back.
const maxBack = time.Minute

// at returns the time now, or a somewhat later one that was told before: a rate.Limiter whose time goes back counts what is in between twice. The
// caller holds the mutex.
func (t *turns) at(now time.Time) time.Time {
	if now.After(t.latest) || t.latest.Sub(now) > maxBack {
		t.latest = now
	}
	return t.latest
}

func limiter(r fairqueue.Rate) *rate.Limiter { return rate.NewLimiter(rate.Every(r.Every), r.Burst) }

// limiterOf returns that of a key; the caller holds the mutex.
func limiterOf(all *lru.Cache, key string, r fairqueue.Rate) *rate.Limiter {
	if known, ok := all.Get(key); ok {
		return known.(*rate.Limiter)
	}
	l := limiter(r)
	all.Add(key, l)
	return l
}

// until returns how long it is until a limiter lets one pass; 0 if it does now.
func until(l *rate.Limiter, r fairqueue.Rate, now time.Time) time.Duration {
	if tokens := l.TokensAt(now); tokens < 1 {
		return max(time.Duration((1-tokens)*float64(r.Every)), time.Millisecond)
	}
	return 0
}

// wait returns how long a request has to wait before it asks again whether it is its turn; it is at 0. Each turn is for one look.
func (t *turns) wait(request, requester string, now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.at(now)
	mine := limiterOf(t.requesters, requester, t.rates.Requester)
	before := t.lines[requester].before(request)
	delay := until(mine, t.rates.Requester, now) + time.Duration(before)*t.rates.Requester.Every
	if delay == 0 {
		if delay = t.waitForCluster(requester, now); delay == 0 {
			mine.AllowN(now, 1)
			t.leave(request)
			return 0
		}
	}
	t.enter(request, requester)
	return min(max(delay, time.Millisecond), maxTurn)
}

// waitForCluster returns how long the first request of a requester has to wait for its place in the round.
func (t *turns) waitForCluster(requester string, now time.Time) time.Duration {
	for first := t.round.waiting.Front(); first != nil; first = t.round.waiting.Front() {
		name := first.Value.(ticket).name
		if name == requester || now.Sub(t.due[name]) <= maxLate {
			break
		}
		t.leaveRound(name)
	}
	delay := until(t.cluster, t.rates.Cluster, now) + time.Duration(t.round.before(requester))*t.rates.Cluster.Every
	if delay == 0 {
		t.cluster.AllowN(now, 1)
		t.leaveRound(requester)
		return 0
	}
	t.round.enter(requester)
	t.due[requester] = now.Add(min(delay, maxTurn))
	return delay
}

func (t *turns) leaveRound(requester string) {
	t.round.leave(requester)
	delete(t.due, requester)
}

func (t *turns) enter(request, requester string) {
	if t.owners[request] != requester {
		t.leave(request) // it was another's of the same name
	}
	if t.lines[requester] == nil {
		t.lines[requester] = newLine()
	}
	t.lines[requester].enter(request)
	t.owners[request] = requester
}

func (t *turns) leave(request string) {
	requester, waits := t.owners[request]
	if !waits {
		return
	}
	delete(t.owners, request)
	l := t.lines[requester]
	if l.leave(request); l.waiting.Len() == 0 {
		delete(t.lines, requester)
		t.leaveRound(requester)
	}
}

// forget drops the turn of a request that is no more to be judged.
func (t *turns) forget(request string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave(request)
}

// denialWorkers is how many requests of one requester are denied at a time, on the average: the slower the API server answers, the fewer.
const denialWorkers = 1

// denied has a requester's next turns come the later the longer it took to deny one of its requests.
func (t *turns) denied(requester string, took time.Duration, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.at(now)
	count := int(took / (denialWorkers * t.rates.Requester.Every))
	limiterOf(t.requesters, requester, t.rates.Requester).ReserveN(now, min(count, t.rates.Requester.Burst))
}

// machineMay reports whether a machine may have another certificate now; machineHas counts one.
func (t *turns) machineMay(machine string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.at(now)
	return until(limiterOf(t.machines, machine, t.rates.Machine), t.rates.Machine, now) == 0
}

func (t *turns) machineHas(machine string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.at(now)
	limiterOf(t.machines, machine, t.rates.Machine).AllowN(now, 1)
}

// tells reports whether there may be an Event about another denial to this requester, and counts it.
func (t *turns) tells(requester string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.at(now)
	return limiterOf(t.told, requester, denials()).AllowN(now, 1)
}
