// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strconv"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// What a request waits for is told once, until it changes; a decision is always told. What is remembered is bounded.
func TestWaitIsToldOnce(t *testing.T) {
	wait := func(reason verifier.Reason) verifier.Decision {
		return verifier.Decision{Outcome: verifier.Wait, Refusals: verifier.Refusals{{Reason: reason}}}
	}
	deny := verifier.Decision{Outcome: verifier.Deny}
	var w waits
	for i, step := range []struct {
		request  types.UID
		decision verifier.Decision
		want     bool
	}{
		{"a", wait("X"), true}, {"a", wait("X"), false}, {"b", wait("X"), true}, {"a", wait("Y"), true}, {"a", wait("X"), true},
		{"a", deny, true}, {"a", deny, true}, {"a", wait("X"), true}, {"b", wait("X"), false},
	} {
		if got := w.news(step.request, step.decision); got != step.want {
			t.Errorf("step %d: %t", i, got)
		}
	}
	for i := range 2 * maxWaits {
		w.news(types.UID(strconv.Itoa(i)), wait("X"))
	}
	if len(w.last) > maxWaits {
		t.Errorf("%d are remembered", len(w.last))
	}
}
