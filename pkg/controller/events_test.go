// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// patches is a sink of Events that counts those that are changed, which the controller has no right to.
type patches struct {
	mu      sync.Mutex
	created map[string]int // by reason
	patched int
}

func (p *patches) Create(_ context.Context, event *eventsv1.Event) (*eventsv1.Event, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.created[event.Reason]++
	return event, nil
}

func (p *patches) Update(context.Context, *eventsv1.Event) (*eventsv1.Event, error) {
	return nil, errors.New("client-go updates Events now")
}

func (p *patches) Patch(_ context.Context, event *eventsv1.Event, _ []byte) (*eventsv1.Event, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.patched++
	return event, nil
}

// Whatever is said again and again, client-go makes no series of it; of another version of an object it is said at once.
func TestEventsAreNotPatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sink := &patches{created: map[string]int{}}
		broadcaster := events.NewBroadcaster(sink)
		defer broadcaster.Shutdown()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
			t.Fatal(err)
		}
		scheme := runtime.NewScheme()
		if err := certificatesv1.AddToScheme(scheme); err != nil {
			t.Fatal(err)
		}
		recorder := Sparing(broadcaster.NewRecorder(scheme, "test"))
		request, other := requestNamed("r", "r"), requestNamed("s", "s")
		for range 60 * 60 {
			recorder.Eventf(request, nil, corev1.EventTypeNormal, "A", "Decide", "a")
			recorder.Eventf(request, other, corev1.EventTypeNormal, "A", "Decide", "a, related")
			recorder.Eventf(request, nil, corev1.EventTypeNormal, "B", "Decide", "b")
			time.Sleep(time.Second)
		}
		request.ResourceVersion = "2"
		recorder.Eventf(request, nil, corev1.EventTypeNormal, "B", "Decide", "b")
		synctest.Wait()
		sink.mu.Lock()
		defer sink.mu.Unlock()
		if sink.patched != 0 || sink.created["A"] != 2*5 || sink.created["B"] != 5+1 {
			t.Errorf("within an hour %v were created, and %d patched", sink.created, sink.patched)
		}
	})
}

// It is what a Controller says it with.
func TestControllersEventsAreSparing(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	events := &heard{}
	c, err := New(Config{Rules: rules, Providers: []Provider{TPM{}}, Machines: noMachines{}, Namespace: "n"}, Clients{Events: events})
	if err != nil {
		t.Fatal(err)
	}
	for _, message := range []string{"first", "second"} {
		c.event(requestNamed("r", "r"), nil, corev1.EventTypeNormal, "A", message)
	}
	if len(events.all) != 1 {
		t.Errorf("%q", events.all)
	}
}
