// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/lru"
)

// Rate lets Burst pass at once, and then one each Every.
type Rate struct {
	Every time.Duration
	Burst int
}

// Rates are rule R1. What is over a rate waits for its turn, and is never denied for it.
type Rates struct {
	// Requester and Cluster bound how often evidence is judged, for whoever filed the request and for all: before it has been judged nobody
	// knows which machine it is of. What waits for something counts each time it is looked at again.
	Requester, Cluster Rate
	// Machine bounds the certificates of a machine that has proven which one it is.
	Machine Rate
}

// DefaultRates are far above what a fleet needs that boots all at once under one token, and keep one token's flood below half a core.
func DefaultRates() Rates {
	return Rates{
		Requester: Rate{Every: 10 * time.Millisecond, Burst: 500},
		Cluster:   Rate{Every: 4 * time.Millisecond, Burst: 1000},
		Machine:   Rate{Every: 10 * time.Second, Burst: 10},
	}
}

// Bounds of a Rate.
const (
	maxEvery = time.Hour
	maxBurst = 1_000_000
)

// Check returns an error that names the rate that will not do.
func (r Rates) Check() error {
	for _, c := range []struct {
		name string
		rate Rate
	}{{"perRequester", r.Requester}, {"perCluster", r.Cluster}, {"perMachine", r.Machine}} {
		switch {
		case c.rate.Every <= 0 || c.rate.Every > maxEvery:
			return fmt.Errorf("%s.every: is more than 0, and %s at most", c.name, maxEvery)
		case c.rate.Burst < 1 || c.rate.Burst > maxBurst:
			return fmt.Errorf("%s.burst: is 1 to %d", c.name, maxBurst)
		}
	}
	return nil
}

// maxLimiters bounds how many requesters and machines are told apart. One that is forgotten starts with a full burst.
const maxLimiters = 20000

// turns gives each request its turn to be judged.
type turns struct {
	rates   Rates
	cluster *rate.Limiter

	mu                   sync.Mutex
	requesters, machines *lru.Cache
	// next is what each request waits for, by its name.
	next map[string]turn
}

// turn is when a request may go on, and whether that is through the last gate: the requester's comes first, so that a flood of one requester takes
// no turns from the others.
type turn struct {
	at   time.Time
	last bool
}

func newTurns(r Rates) *turns {
	return &turns{
		rates: r, cluster: limiter(r.Cluster),
		requesters: lru.New(maxLimiters), machines: lru.New(maxLimiters), next: map[string]turn{},
	}
}

func limiter(r Rate) *rate.Limiter { return rate.NewLimiter(rate.Every(r.Every), r.Burst) }

// limiterOf returns that of a key; the caller holds the mutex.
func limiterOf(all *lru.Cache, key string, r Rate) *rate.Limiter {
	if known, ok := all.Get(key); ok {
		return known.(*rate.Limiter)
	}
	l := limiter(r)
	all.Add(key, l)
	return l
}

// wait returns how long a request has to wait for its turn; it is its turn at 0. Each turn is for one look.
func (t *turns) wait(request, requester string, now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	mine, waits := t.next[request]
	if !waits {
		mine = turn{at: now.Add(limiterOf(t.requesters, requester, t.rates.Requester).ReserveN(now, 1).DelayFrom(now))}
	}
	if !mine.at.After(now) && !mine.last {
		mine = turn{at: now.Add(t.cluster.ReserveN(now, 1).DelayFrom(now)), last: true}
	}
	if !mine.at.After(now) {
		delete(t.next, request)
		return 0
	}
	t.next[request] = mine
	return mine.at.Sub(now)
}

// forget drops the turn of a request that is no more to be judged.
func (t *turns) forget(request string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.next, request)
}

// machineMay reports whether a machine may have another certificate now; machineHas counts one.
func (t *turns) machineMay(machine string, now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return limiterOf(t.machines, machine, t.rates.Machine).TokensAt(now) >= 1
}

func (t *turns) machineHas(machine string, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	limiterOf(t.machines, machine, t.rates.Machine).AllowN(now, 1)
}
