// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// clusterEvents is the namespace of Events on objects without a namespace.
const clusterEvents = "default"

// event is an Event that names the controller as its reporter, which nothing proves: each node may
// create Events in any namespace, and an Event does not say who created it. Kubernetes has no
// right for the reporter's name. So an Event decides nothing. Texts are bounded, and as they were
// written.
type event struct {
	kind, name, reason, note string
	at                       time.Time
}

// readEvents returns the controller's Events in a namespace, in no order.
func readEvents(ctx context.Context, c client.Reader, namespace string, now time.Time, options ...client.ListOption) (all []event, err error) {
	options = append(options, client.InNamespace(namespace), client.MatchingFields{"reportingController": telemetry.Component})
	err = readPages(ctx, c, func() *eventsv1.EventList { return &eventsv1.EventList{} }, func(page *eventsv1.EventList) {
		for i := range page.Items {
			all = append(all, newEvent(&page.Items[i], now))
		}
	}, options...)
	return all, err
}

// newEvent takes the time of the last occurrence from the Event, but none before its creation or in
// the future.
func newEvent(e *eventsv1.Event, now time.Time) event {
	at := e.EventTime.Time
	if e.Series != nil {
		at = e.Series.LastObservedTime.Time
	}
	if at.Before(e.CreationTimestamp.Time) {
		at = e.CreationTimestamp.Time
	}
	if at.After(now) {
		at = now
	}
	return event{e.Regarding.Kind, e.Regarding.Name, cut(e.Reason, maxName), cut(e.Note, maxMessage), at}
}
