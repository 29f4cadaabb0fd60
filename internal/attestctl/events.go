// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// clusterEvents is the namespace of Events on objects without a namespace.
const clusterEvents = "default"

// event is an Event that names the controller as its reporter. Nothing proves that: each node may
// create Events in any namespace, and an Event does not say who created it. RBAC cannot limit who
// uses the reporter's name. So an Event decides nothing. Texts are cut, but not escaped.
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

// newEvent uses the Event's own time of the last occurrence only if it lies between the creation of
// the Event and now.
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
	return event{e.Regarding.Kind, e.Regarding.Name, text.Cut(e.Reason, maxName), text.Cut(e.Note, maxMessage), at}
}
