// SPDX-License-Identifier: Apache-2.0

package telemetry

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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
)

// patches is a sink of Events that counts changed Events. The controller may not change Events.
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

// An Event that is repeated for an hour never becomes a series, and another version of an object
// has its own Event at once.
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
		recorder := NewDedupRecorder(broadcaster.NewRecorder(scheme, "test"))
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

func requestNamed(name string, uid types.UID) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name, UID: uid}}
}
