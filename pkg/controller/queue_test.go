// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func filedBy(name, requester string) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.CertificateSigningRequestSpec{Username: requester},
	}
}

func inQueue(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

// newTestQueue returns a queue, and what has requests come into it as a watch does.
func newTestQueue(t *testing.T) (workqueue.TypedRateLimitingInterface[reconcile.Request], func(name, requester string), *requesters) {
	t.Helper()
	known := &requesters{byName: map[string]string{}}
	queue := known.newFairQueue("", workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Millisecond, time.Millisecond))
	t.Cleanup(queue.ShutDown)
	return queue, func(name, requester string) {
		if !known.watched().Create(event.CreateEvent{Object: filedBy(name, requester)}) {
			t.Errorf("%s is not looked at", name)
		}
		queue.Add(inQueue(name))
	}, known
}

// next takes requests until the queue is empty, and says which.
func next(queue workqueue.TypedRateLimitingInterface[reconcile.Request]) (all []string) {
	for queue.Len() > 0 {
		request, _ := queue.Get()
		all = append(all, request.Name)
		queue.Done(request)
	}
	return all
}

func TestRequestersAreServedInTurn(t *testing.T) {
	queue, file, _ := newTestQueue(t)
	for i := range 10_000 {
		file(fmt.Sprintf("junk-%d", i), "system:bootstrap:aaaaaa")
	}
	file("b-1", "system:bootstrap:bbbbbb")
	file("c-1", "system:bootstrap:cccccc")
	file("b-2", "system:bootstrap:bbbbbb")
	for i := range 100 { // and many others renew
		file(fmt.Sprintf("node-%d", i), fmt.Sprintf("system:node:%d", i))
	}
	queue.Add(inQueue("of nobody that is known"))
	if n := queue.Len(); n != 10_104 {
		t.Fatalf("%d wait", n)
	}
	got := next(queue)
	want := []string{"node-0", "junk-0", "of nobody that is known", "node-1", "b-1", "node-2", "c-1", "node-3", "junk-1", "node-4", "b-2", "node-5", "junk-2"}
	if !slices.Equal(got[:len(want)], want) {
		t.Errorf("%q, want %q", got[:len(want)], want)
	}
	if len(got) != 10_104 || got[10_103] != "junk-9999" || slices.Index(got, "node-99") > 205 {
		t.Errorf("%d came, the last %q, the last node's as number %d", len(got), got[len(got)-1], slices.Index(got, "node-99"))
	}
}

// What is added again while it is looked at comes once more, at the end of its requester's line.
func TestRequestThatComesAgain(t *testing.T) {
	queue, file, _ := newTestQueue(t)
	for _, name := range []string{"a-1", "a-2", "a-3"} {
		file(name, "a")
		file(name, "a")
	}
	first, _ := queue.Get()
	queue.Add(first)
	queue.Done(first)
	if got, want := next(queue), []string{"a-2", "a-3", "a-1"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Nothing is remembered of what is decided or gone; the request of another under the same name is the other's.
func TestRequestersAreForgotten(t *testing.T) {
	_, _, known := newTestQueue(t)
	watched := known.watched()
	watched.Create(event.CreateEvent{Object: filedBy("x", "a")})
	watched.Create(event.CreateEvent{Object: filedBy("y", "b")})
	watched.Create(event.CreateEvent{Object: filedBy("z", "a")})
	watched.Update(event.UpdateEvent{ObjectNew: filedBy("z", "c")})
	if known.of("x") != "a" || known.of("y") != "b" || known.of("z") != "c" || known.of("w") != "" {
		t.Errorf("%v", known.byName)
	}
	denied := filedBy("x", "a")
	denied.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied}}
	if !watched.Update(event.UpdateEvent{ObjectNew: denied}) || !watched.Delete(event.DeleteEvent{Object: filedBy("y", "b")}) {
		t.Error("it is not looked at")
	}
	watched.Update(event.UpdateEvent{ObjectNew: filedBy("z", "")}) // trimmed
	if len(known.byName) != 0 {
		t.Errorf("%v", known.byName)
	}
}
