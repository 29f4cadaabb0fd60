// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// Queue is a workqueue.TypedInterface whose Get waits until the limits allow another
// reconciliation. Queue wraps client-go's queue, which keeps the guarantees and the metrics of a
// workqueue. Queue only decides which request is next, and when.
//
// Each queued or observed request needs some 0.7 kB, or 1.1 kB if each has a requester of its own.
// Beside that, an attacker can make the queue hold 20,000 buckets of requesters. Each operation
// takes constant time, or time logarithmic in the number of requesters without a token.
type Queue struct {
	mu    sync.Mutex
	queue *workqueue.Typed[reconcile.Request]
	order *order
	// ready wakes a Get that waits.
	ready *sync.Cond
	// timer calls onTimer at timerAt, if timed.
	timer   *time.Timer
	timerAt time.Duration
	timed   bool
	clock   clock
	// now is the system's monotonic clock. A configurable clock would not agree with timers.
	now      func() time.Time
	shutdown bool
}

// New returns a queue with these limits. listed reports whether a source names the machine that
// makes a claim, and attested whether a machine with this AK got a certificate. Both are called
// often and under the queue's lock: they must be as fast as a map lookup, and must not call the
// queue.
func New(rates Rates, listed func(Claim) bool, attested func(ak string) bool) *Queue {
	q := &Queue{order: newOrder(rates, listed, attested), now: time.Now}
	q.ready = sync.NewCond(&q.mu)
	q.queue = workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[reconcile.Request]{Queue: q.order})
	return q
}

// NewQueue is for the field NewQueue of a controller's options: it adds delays, and the back-off
// after failures. Call it once, before anything is added.
func (q *Queue) NewQueue(name string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
	type request = reconcile.Request
	q.mu.Lock()
	// The name registers metrics. That starts a goroutine, which ends with ShutDown.
	q.queue = workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[request]{Name: name, Queue: q.order})
	q.mu.Unlock()
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[request]{Name: name, Queue: q})
	return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[request]{Name: name, DelayingQueue: delaying})
}

// Observe sets the flow of a request. The flow stays until Forget. Call it from an event handler,
// before the request is added. Without a flow, the request is Unlimited. A queued request moves to
// the place that it would get if it was queued now.
func (q *Queue) Observe(name string, flow Flow) {
	q.update(func() { q.order.observe(requestOf(name), flow) })
}

// Forget drops the flow of a request that is decided or gone.
func (q *Queue) Forget(name string) {
	q.update(func() { q.order.forget(requestOf(name)) })
}

// Reclassify checks again which of the queued claims are listed or attested. Call it when the
// machines have changed, at most once a second: it takes some 20 ms for 100,000 claims.
func (q *Queue) Reclassify() { q.update(q.order.reclassify) }

// Charge delays a requester's next requests by the time that extra API calls for one of its
// requests took, such as a denial. So on average, such calls are made for one request of a
// requester at a time: a slow API server gets fewer of them per second. Call Charge before Done.
func (q *Queue) Charge(requester string, took time.Duration) {
	q.update(func() { q.order.charge(requester, took, q.elapsed()) })
}

// Add queues a request, unless it is queued. A request in process is queued when it is done.
func (q *Queue) Add(request reconcile.Request) {
	q.update(func() {
		if !q.shutdown {
			q.queue.Add(request)
		}
	})
}

// Done ends the processing of a request.
func (q *Queue) Done(request reconcile.Request) {
	q.update(func() {
		q.order.done(request)
		q.queue.Done(request)
	})
}

// Len returns the number of queued requests, including those that the limits delay.
func (q *Queue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.order.Len()
}

// Get returns the next request as soon as the limits allow one. After ShutDown it returns none. A
// workqueue would first return all queued requests. During a flood that could take very long: while
// workers are slower than the limits, the limits always allow one more.
func (q *Queue) Get() (request reconcile.Request, shutdown bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for !q.shutdown && !q.order.pick(q.elapsed()) {
		q.ready.Wait()
	}
	if q.shutdown {
		return reconcile.Request{}, true
	}
	request, shutdown = q.queue.Get() // calls Pop, and does not block, since pick found a request
	q.prompt()
	return request, shutdown
}

// ShutDown ends all Gets. It drops the queued requests: the next start lists the requests again.
func (q *Queue) ShutDown() {
	q.end().ShutDown()
}

// ShutDownWithDrain is ShutDown, and waits until the requests in process are done, or until
// ShutDown. Unlike a workqueue's, it does not wait for queued requests.
func (q *Queue) ShutDownWithDrain() {
	q.end().ShutDownWithDrain()
}

// ShuttingDown reports whether ShutDown was called.
func (q *Queue) ShuttingDown() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.shutdown
}

// end marks the queue as shut down, wakes all Gets, and returns the wrapped queue. The caller shuts
// that down without the lock, since it may block.
func (q *Queue) end() *workqueue.Typed[reconcile.Request] {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.shutdown = true
	if q.timer != nil {
		q.timer.Stop()
	}
	q.ready.Broadcast()
	return q.queue
}

func requestOf(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

func (q *Queue) elapsed() time.Duration { return q.clock.at(q.now()) }

// update changes the order.
func (q *Queue) update(change func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	change()
	q.prompt()
}

// prompt wakes a Get if the limits allow a request now, else it sets the timer for that time. It
// must follow each change of the order. Waking one Get is enough, since it prompts the next.
func (q *Queue) prompt() {
	now := q.elapsed()
	if q.order.pick(now) {
		q.ready.Signal()
		return
	}
	at, limited := q.order.nextAt()
	if !limited || q.shutdown || q.timed && q.timerAt <= at {
		return
	}
	q.timed, q.timerAt = true, at
	if q.timer == nil {
		q.timer = time.AfterFunc(at-now, q.onTimer)
	} else {
		q.timer.Reset(at - now)
	}
}

func (q *Queue) onTimer() {
	q.update(func() { q.timed = false })
}
