// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// fairQueue holds the requests that are to be looked at: those of a requester in the order in which they came, the requesters of a kind in turn, and
// the kinds in turn. In one line for all, whoever comes after a flood would wait until each request of it had been looked at; without kinds, machines
// that boot under one token would wait for all nodes that renew.
type fairQueue struct {
	requesters *requesters
	kinds      [kinds]lines
	last       int // the kind that was served last
	count      int
}

// newFairQueue is a NewQueue of controller-runtime, which names the queue and limits what failed.
func (r *requesters) newFairQueue(name string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
	type request = reconcile.Request
	plain := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[request]{Name: name, Queue: &fairQueue{requesters: r}})
	delaying := workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[request]{Name: name, Queue: plain})
	return workqueue.NewTypedRateLimitingQueueWithConfig(limiter, workqueue.TypedRateLimitingQueueConfig[request]{Name: name, DelayingQueue: delaying})
}

// Touch has nothing to do: who is in line stays there.
func (q *fairQueue) Touch(reconcile.Request) {}

// Push has a request wait in its requester's line.
func (q *fairQueue) Push(request reconcile.Request) {
	requester := q.requesters.of(request.Name)
	q.kinds[kindOf(requester)].push(requester, request)
	q.count++
}

// Len returns how many wait.
func (q *fairQueue) Len() int { return q.count }

// Pop returns the next one. There is one.
func (q *fairQueue) Pop() reconcile.Request {
	q.count--
	for {
		q.last = (q.last + 1) % kinds
		if l := &q.kinds[q.last]; len(l.round) > 0 {
			return l.pop()
		}
	}
}

// kinds is how many kinds of requesters there are.
const kinds = 3

// kindOf tells nodes, bootstrap tokens and others apart.
func kindOf(requester string) int {
	switch _, token := verifier.TokenID(requester); {
	case strings.HasPrefix(requester, "system:node:"):
		return 1
	case token:
		return 2
	}
	return 0
}

// lines are those of the requesters of one kind.
type lines struct {
	waiting map[string][]reconcile.Request
	// round are the requesters who have one; the first is next.
	round []string
}

func (l *lines) push(requester string, request reconcile.Request) {
	if l.waiting == nil {
		l.waiting = map[string][]reconcile.Request{}
	}
	if len(l.waiting[requester]) == 0 {
		l.round = append(l.round, requester)
	}
	l.waiting[requester] = append(l.waiting[requester], request)
}

func (l *lines) pop() reconcile.Request {
	requester := l.round[0]
	l.round = l.round[1:]
	line := l.waiting[requester]
	if len(line) == 1 {
		delete(l.waiting, requester)
	} else {
		l.waiting[requester] = line[1:]
		l.round = append(l.round, requester)
	}
	return line[0]
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
