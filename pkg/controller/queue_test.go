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
		file(fmt.Sprintf("junk-%d", i), "flood")
	}
	file("a-1", "a")
	file("b-1", "b")
	file("a-2", "a")
	queue.Add(inQueue("of nobody that is known"))
	if n := queue.Len(); n != 10_004 {
		t.Fatalf("%d wait", n)
	}
	got := next(queue)
	want := []string{"junk-0", "a-1", "b-1", "of nobody that is known", "junk-1", "a-2", "junk-2", "junk-3"}
	if !slices.Equal(got[:len(want)], want) {
		t.Errorf("%q, want %q", got[:len(want)], want)
	}
	if len(got) != 10_004 || got[10_003] != "junk-9999" {
		t.Errorf("%d came, the last %q", len(got), got[len(got)-1])
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
