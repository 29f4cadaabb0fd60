// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The longer a request has waited the more seldom it is looked at; at once where there are other machines, and at its deadline.
func TestWhenAWaitingRequestIsLookedAt(t *testing.T) {
	filed := time.Now().Truncate(time.Second)
	machines, others := make([]verifier.Machine, 3), make([]verifier.Machine, 3)
	for name, c := range map[string]struct {
		age, passed time.Duration
		lent        []verifier.Machine
		looked      []verifier.Machine
		early       bool
	}{
		"young, just now":                {0, 0, machines, machines, true},
		"young, a second ago":            {0, time.Second, machines, machines, false},
		"a minute old, a second ago":     {time.Minute, time.Second, machines, machines, false},
		"five minutes old":               {5 * time.Minute, 4 * time.Second, machines, machines, true},
		"five minutes old, after 5 s":    {5 * time.Minute, 5 * time.Second, machines, machines, false},
		"an hour old, after 14 s":        {time.Hour, 14 * time.Second, machines, machines, true},
		"an hour old, after 15 s":        {time.Hour, 15 * time.Second, machines, machines, false},
		"other machines":                 {5 * time.Minute, 0, others, machines, false},
		"one more":                       {5 * time.Minute, 0, others, machines[:2], false},
		"none, as before":                {5 * time.Minute, 0, []verifier.Machine{}, nil, true},
		"the first one":                  {5 * time.Minute, 0, machines, nil, false},
		"none any more":                  {5 * time.Minute, 0, []verifier.Machine{}, machines, false},
		"a source that lends none":       {5 * time.Minute, 0, nil, machines, true},
		"before the deadline":            {19*time.Minute + 58*time.Second, time.Second, machines, machines, true},
		"at the deadline":                {19*time.Minute + 58*time.Second, 2 * time.Second, machines, machines, false},
		"the clock was put back an hour": {5 * time.Minute, -time.Hour, machines, machines, false},
	} {
		t.Run(name, func(t *testing.T) {
			var w waits
			request := filedBy("x", "a")
			request.UID, request.CreationTimestamp = "1", metav1.NewTime(filed)
			now := filed.Add(c.age)
			if w.early(request, c.lent, now) {
				t.Error("it is early, and was never looked at")
			}
			w.looked(request, c.looked, filed.Add(20*time.Minute), now)
			if got := w.early(request, c.lent, now.Add(c.passed)); got != c.early {
				t.Errorf("early: %v", got)
			}
			if !w.waiting(request) || !w.news(request, verifier.Decision{Outcome: verifier.Wait, Refusals: verifier.Refusals{{Reason: "R"}}}) {
				t.Error("what it waits for was never said")
			}
			another := request.DeepCopy()
			another.UID = "2"
			if w.early(another, c.lent, now) {
				t.Error("it is early, and is another one of the name")
			}
			w.forget("x")
			if w.early(request, c.lent, now) {
				t.Error("it is early, and was forgotten")
			}
		})
	}
}
