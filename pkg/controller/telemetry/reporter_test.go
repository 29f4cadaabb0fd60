// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// A problem is in an Event and in the mirror when it begins, changes, lasts long, and ends. A state
// that is good from the start, or that is not known, is not reported.
func TestReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		recorder := events.NewFakeRecorder(20)
		var mirrored []string
		r := Reporter{
			Condition: &Condition{API: fake.NewClientBuilder().Build(), Namespace: "n", Type: ConditionRevocation, Remind: RemindInterval, Log: logr.Discard()},
			Events:    recorder, Action: "Revoke", Mirror: func(kind, reason, message string) { mirrored = append(mirrored, kind+" "+reason+" "+message) },
		}
		verdict := func(status corev1.ConditionStatus, reason string) Verdict { return Verdict{status, reason, "m"} }
		for i, step := range []struct {
			pause time.Duration
			v     Verdict
			want  string // the Event
			news  bool
		}{
			{0, verdict("True", "Good"), "", true},
			{time.Hour, verdict("True", "Good"), "", false},
			{0, verdict("False", "Bad"), "Warning Bad m", true},
			{time.Minute, verdict("False", "Bad"), "", false},
			{time.Minute, verdict("False", "Worse"), "Warning Worse m", true},
			{RemindInterval - time.Second, verdict("False", "Worse"), "", false},
			{time.Second, verdict("False", "Worse"), "Warning Worse m", true},
			{0, verdict("Unknown", "Unread"), "", true},
			{time.Hour, verdict("Unknown", "Unread"), "", false},
			{0, verdict("True", "Good"), "", true},
			{0, verdict("False", "Bad"), "Warning Bad m", true},
			{0, verdict("True", "Good"), "Normal Good m", true},
		} {
			time.Sleep(step.pause)
			mirrored = nil
			_, news := r.Report(t.Context(), step.v)
			var want, recorded []string
			if step.want != "" {
				want = []string{step.want}
			}
			for len(recorder.Events) > 0 {
				recorded = append(recorded, <-recorder.Events)
			}
			if news != step.news || !slices.Equal(mirrored, want) || !slices.Equal(recorded, want) {
				t.Errorf("step %d: news %t, mirrored %q, Events %q", i, news, mirrored, recorded)
			}
		}
	})
}
