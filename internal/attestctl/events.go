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

// event is an Event that names the controller as its reporter, which nothing proves. Its text is
// safe to show.
type event struct {
	kind, name, reason, note string
	at                       time.Time
}

// readEvents returns the controller's Events in a namespace, in no order.
func readEvents(ctx context.Context, c client.Reader, namespace string, options ...client.ListOption) (all []event, err error) {
	options = append(options, client.InNamespace(namespace), client.MatchingFields{"reportingController": telemetry.Component})
	err = readPages(ctx, c, func() *eventsv1.EventList { return &eventsv1.EventList{} }, func(page *eventsv1.EventList) {
		for i := range page.Items {
			all = append(all, newEvent(&page.Items[i]))
		}
	}, options...)
	return all, err
}

func newEvent(e *eventsv1.Event) event {
	at := e.EventTime.Time
	if e.Series != nil {
		at = e.Series.LastObservedTime.Time
	}
	if at.IsZero() {
		at = e.CreationTimestamp.Time
	}
	return event{e.Regarding.Kind, e.Regarding.Name, text.Line(e.Reason, maxName), text.Line(e.Note, maxMessage), at}
}
