// SPDX-License-Identifier: Apache-2.0

// Package lookup caches the answers of an outside service that may be slow or down: a cloud's STS,
// key set or API. A decision waits for an answer for one second at most. A slower call goes on in
// the background, and the next retry of the request finds its answer.
package lookup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// ErrPending means that there is no answer yet. It is no verdict: the request waits.
var ErrPending = errors.New("not answered yet")

const (
	// Wait is how long Get waits.
	Wait = time.Second
	// minBackOff and maxBackOff bound the time after a failed call in which the key is not asked
	// for again. It doubles with each failure.
	minBackOff, maxBackOff = 2 * time.Second, time.Minute
)

// Config configures a Cache. A field is required unless its comment says Optional.
type Config struct {
	// Service is the service's name in metrics and errors. There must be few different ones.
	Service string
	// Concurrency bounds the calls at the same time, and Timeout each call. A call that never ends
	// holds one slot until its timeout.
	Concurrency int
	Timeout     time.Duration
	// Size bounds the number of keys.
	Size int
	// KeepStale returns the last answer as long as no newer one could be got. It is for keys that
	// an attacker cannot choose.
	KeepStale bool
	// Metrics count the calls. Optional.
	Metrics *telemetry.LookupMetrics
}

// Cache has the answers of a service by key. It is safe for concurrent use.
type Cache[V any] struct {
	config Config
	slots  chan struct{}

	mu      sync.Mutex
	entries map[string]*entry[V]
}

// entry is the state of one key. The Cache's mutex guards it.
type entry[V any] struct {
	// value is valid if answered is not zero. It is fresh until freshUntil.
	value                V
	answered, freshUntil time.Time
	// err is the last failure since the last answer, nil if there was none. The key is asked for
	// again from the time retry.
	err      error
	failures int
	retry    time.Time
	// done is closed when the running call ends. It is nil if none runs.
	done chan struct{}
	// used is when Get was last called for the key.
	used time.Time
}

// Call asks the service. freshFor is how long the answer may be used. It should be longer than the
// time between two retries of a request, 15 s. ctx has the timeout.
type Call[V any] func(ctx context.Context) (value V, freshFor time.Duration, err error)

// New returns an empty Cache.
func New[V any](config Config) *Cache[V] {
	return &Cache[V]{config: config, slots: make(chan struct{}, config.Concurrency), entries: map[string]*entry[V]{}}
}

// Get returns the answer for a key, from the cache or by call. If there is none in time, the error
// is ErrPending. After a failed call, it is the failure until the key may be asked for again. One
// call runs for a key at a time, and the callers share its answer.
func (c *Cache[V]) Get(ctx context.Context, key string, call Call[V]) (V, error) {
	var none V
	c.mu.Lock()
	e, now := c.entries[key], time.Now()
	if e == nil {
		if !c.makeRoom() {
			c.mu.Unlock()
			c.config.Metrics.Counted(c.config.Service, telemetry.LookupBusy)
			return none, fmt.Errorf("%s: too many calls: %w", c.config.Service, ErrPending)
		}
		e = &entry[V]{}
		c.entries[key] = e
	}
	e.used = now
	switch {
	case !e.answered.IsZero() && now.Before(e.freshUntil):
		defer c.mu.Unlock()
		return e.value, nil
	case e.done == nil && now.Before(e.retry):
		defer c.mu.Unlock()
		return c.fallBack(e)
	case e.done == nil && !c.start(e, call):
		defer c.mu.Unlock()
		c.config.Metrics.Counted(c.config.Service, telemetry.LookupBusy)
		return c.fallBack(e)
	}
	done := e.done
	c.mu.Unlock()

	timer := time.NewTimer(Wait)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.done != done && e.err == nil {
		return e.value, nil // also if it may not be used again
	}
	return c.fallBack(e)
}

// fallBack returns what there is without a call. The caller holds the mutex.
func (c *Cache[V]) fallBack(e *entry[V]) (V, error) {
	var none V
	switch {
	case c.config.KeepStale && !e.answered.IsZero():
		return e.value, nil
	case e.err != nil:
		return none, fmt.Errorf("%s: %w", c.config.Service, e.err)
	}
	return none, fmt.Errorf("%s: %w", c.config.Service, ErrPending)
}

// start starts a call if a slot is free. The caller holds the mutex.
func (c *Cache[V]) start(e *entry[V], call Call[V]) bool {
	select {
	case c.slots <- struct{}{}:
	default:
		return false
	}
	e.done = make(chan struct{})
	go c.run(e, call)
	return true
}

// run makes the call. It is not the caller's: later callers use its answer.
func (c *Cache[V]) run(e *entry[V], call Call[V]) {
	ctx, cancel := context.WithTimeout(context.Background(), c.config.Timeout)
	defer cancel()
	began := time.Now()
	value, freshFor, err := call(ctx)
	now := time.Now()
	c.config.Metrics.Called(c.config.Service, err == nil, now.Sub(began))
	<-c.slots

	c.mu.Lock()
	defer c.mu.Unlock()
	close(e.done)
	e.done = nil
	if err != nil {
		e.err, e.retry = err, now.Add(min(minBackOff<<min(e.failures, 10), maxBackOff))
		e.failures++
		return
	}
	e.value, e.answered, e.freshUntil = value, now, now.Add(freshFor)
	e.err, e.failures, e.retry = nil, 0, time.Time{}
}

// makeRoom reports whether there is room for one more key. It removes the key that was not used for
// the longest time, unless its call runs. The caller holds the mutex.
func (c *Cache[V]) makeRoom() bool {
	if len(c.entries) < c.config.Size {
		return true
	}
	oldest := ""
	for key, e := range c.entries {
		if e.done == nil && (oldest == "" || e.used.Before(c.entries[oldest].used)) {
			oldest = key
		}
	}
	delete(c.entries, oldest)
	return len(c.entries) < c.config.Size
}

// Expire makes the next Get ask for a key again if its answer is older than age. A caller that the
// answer does not suffice for calls it. age bounds how often a node can make it do so.
func (c *Cache[V]) Expire(key string, age time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.entries[key]; e != nil && time.Since(e.answered) > age {
		e.freshUntil = time.Time{}
	}
}
