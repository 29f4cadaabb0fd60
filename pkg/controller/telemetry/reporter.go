// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
)

// Verdict is the state of one aspect of the cluster that nodes join, such as its policies.
type Verdict struct {
	// Status is True if all is well, False if there is a problem, Unknown if that is not known.
	Status          corev1.ConditionStatus
	Reason, Message string
}

// Reporter reports the verdict on one aspect to operators, in the same way for each. The condition
// has each verdict. A Warning Event tells of each new problem, and of one that stays after each
// Remind of the condition. A Normal Event follows if True comes directly after False. No other
// change makes an Event. It is not safe for concurrent use.
type Reporter struct {
	Condition *Condition
	// Events records Events on the condition's Namespace, with this Action.
	Events events.EventRecorder
	Action string
	// Mirror gets the content of each Event, to report it elsewhere, too: users of a workload
	// cluster can delete Events there. Optional.
	Mirror func(kind, reason, message string)

	last       Verdict
	reportedAt time.Time
}

// Report reports a verdict. It returns the previous verdict, the zero value before the first, and
// whether the caller should log: the verdict has changed, or a problem is reported again.
func (r *Reporter) Report(ctx context.Context, v Verdict) (before Verdict, isNews bool) {
	now := time.Now()
	v.Message = Message(v.Message)
	before, r.last = r.last, v
	r.Condition.Set(ctx, v.Status, v.Reason, v.Message)
	problem := v.Status == corev1.ConditionFalse
	if v == before && (!problem || now.Sub(r.reportedAt) < r.Condition.Remind) {
		return before, false
	}
	r.reportedAt = now
	switch {
	case problem:
		r.event(corev1.EventTypeWarning, v)
	case v.Status == corev1.ConditionTrue && before.Status == corev1.ConditionFalse:
		r.event(corev1.EventTypeNormal, v)
	}
	return before, true
}

func (r *Reporter) event(kind string, v Verdict) {
	r.Events.Eventf(r.Condition.Regarding(), nil, kind, v.Reason, r.Action, "%s", v.Message)
	if r.Mirror != nil {
		r.Mirror(kind, v.Reason, v.Message)
	}
}
