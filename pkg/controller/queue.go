// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// fairQueue holds the requests that are to be looked at: those of a requester in the order in which they came, and the requesters in turn. In one
// line for all, whoever comes after a flood would wait until each request of it had been looked at.
type fairQueue struct {
	requesters *requesters
	lines      map[string][]reconcile.Request
	// round are the requesters of lines; the first is next.
	round []string
	count int
}

// newFairQueue is a NewQueue of controller-runtime, which names the queue and limits what failed.
func (r *requesters) newFairQueue(name string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
	type request = reconcile.Request
	fair := &fairQueue{requesters: r, lines: map[string][]request{}}
	plain := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[request]{Name: name, Queue: fair})
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[request]{Name: name, Queue: plain})
	return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[request]{Name: name, DelayingQueue: delaying})
}

// Touch has nothing to do: who is in line stays there.
func (q *fairQueue) Touch(reconcile.Request) {}

// Push has a request wait in its requester's line.
func (q *fairQueue) Push(request reconcile.Request) {
	requester := q.requesters.of(request.Name)
	if len(q.lines[requester]) == 0 {
		q.round = append(q.round, requester)
	}
	q.lines[requester] = append(q.lines[requester], request)
	q.count++
}

// Len returns how many wait.
func (q *fairQueue) Len() int { return q.count }

// Pop returns the next one. There is one.
func (q *fairQueue) Pop() reconcile.Request {
	requester := q.round[0]
	q.round = q.round[1:]
	line := q.lines[requester]
	request, rest := line[0], line[1:]
	q.count--
	if len(rest) == 0 {
		delete(q.lines, requester)
	} else {
		q.lines[requester] = rest
		q.round = append(q.round, requester)
	}
	return request
}

// requesters remembers who filed the requests that are not decided yet, for a queue of names. One of whom it is not known is in a line with
// all others of that kind: what is decided, or nobody's business here, costs a glance.
type requesters struct {
	mu     sync.Mutex
	byName map[string]string
}

// watched remembers as requests come and go in the cache, and lets all events pass.
func (r *requesters) watched() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { r.note(e.Object); return true },
		UpdateFunc: func(e event.UpdateEvent) bool { r.note(e.ObjectNew); return true },
		DeleteFunc: func(e event.DeleteEvent) bool { r.forget(e.Object.GetName()); return true },
	}
}

func (r *requesters) note(object client.Object) {
	request, ok := object.(*certificatesv1.CertificateSigningRequest)
	if !ok || request.Spec.Username == "" || stateOf(request) == done {
		r.forget(object.GetName())
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.byName[request.Name] = request.Spec.Username
}

func (r *requesters) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byName, name)
}

func (r *requesters) of(name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byName[name]
}
