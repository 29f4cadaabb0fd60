// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

func requestNamed(name, uid string) *certificatesv1.CertificateSigningRequest {
	object := &certificatesv1.CertificateSigningRequest{}
	object.Name, object.UID = name, types.UID(uid)
	return object
}

func waitFor(reason verifier.Reason) verifier.Decision {
	return verifier.Decision{Outcome: verifier.Wait, Refusals: verifier.Refusals{{Reason: reason}}}
}

// What a request waits for is told once, until it changes; a decision is always told. What is decided or gone is forgotten.
func TestWaitIsToldOnce(t *testing.T) {
	a, b, newA := requestNamed("a", "1"), requestNamed("b", "2"), requestNamed("a", "3")
	deny := verifier.Decision{Outcome: verifier.Deny}
	var w waits
	for i, step := range []struct {
		request  *certificatesv1.CertificateSigningRequest
		decision verifier.Decision
		want     bool
	}{
		{a, waitFor("X"), true}, {a, waitFor("X"), false}, {b, waitFor("X"), true}, {a, waitFor("Y"), true}, {a, waitFor("X"), true},
		{a, deny, true}, {a, deny, true}, {a, waitFor("X"), true}, {b, waitFor("X"), false}, {newA, waitFor("X"), true}, {newA, waitFor("X"), false},
	} {
		if got := w.news(step.request, step.decision); got != step.want {
			t.Errorf("step %d: %t", i, got)
		}
	}
	if w.waiting(a) || !w.waiting(newA) || !w.waiting(b) {
		t.Error("another one waits")
	}
	w.forget("a")
	w.news(b, deny)
	if w.waiting(newA) || w.waiting(b) || len(w.last) != 0 {
		t.Errorf("%d are remembered", len(w.last))
	}
}

// Evidence of what waits is judged once a minute, and again when what it was judged by is another; what could not be judged each time.
func TestEvidenceOfWhatWaitsIsJudgedOnce(t *testing.T) {
	request, hello := requestNamed("proof", "1"), requestNamed("hello", "2")
	var w waits
	w.news(request, waitFor("X"))
	judged := 0
	for i, step := range []struct {
		question Question
		err      error
		want     int
	}{
		{Question{Request: request, Now: noon}, nil, 1},
		{Question{Request: request, Now: noon.Add(time.Second)}, nil, 1},
		{Question{Request: request, Named: true, Now: noon.Add(time.Second)}, verifier.Refusals{{Reason: "X"}}, 2},
		{Question{Request: request, Named: true, Now: noon.Add(2 * time.Second)}, nil, 2},
		{Question{Request: request, Hello: hello, Named: true, Now: noon.Add(2 * time.Second)}, nil, 3},
		{Question{Request: request, Hello: hello, Named: true, Now: noon}, nil, 4}, // the clock went back
		{Question{Request: request, Hello: hello, Named: true, Now: noon.Add(maxJudged)}, context.Canceled, 5},
		{Question{Request: request, Hello: hello, Named: true, Now: noon.Add(maxJudged)}, nil, 6},
		{Question{Request: requestNamed("proof", "9"), Hello: hello, Named: true, Now: noon.Add(maxJudged)}, nil, 7},
	} {
		if _, known := w.evidence(step.question); !known {
			judged++
			w.keep(step.question, verifier.Evidence{Err: step.err})
		}
		w.keep(step.question, verifier.Evidence{Err: errors.New("it was judged again")})
		if judged != step.want {
			t.Errorf("step %d: judged %d times, want %d", i, judged, step.want)
		}
	}
}

// A Controller records by a telemetry.NewDedupRecorder.
func TestControllersEventsAreNotRepeated(t *testing.T) {
	rules, err := verifier.New(policy())
	if err != nil {
		t.Fatal(err)
	}
	events := &eventList{}
	c, err := New(Config{Rules: rules, Providers: []Provider{stubTPM{}}, Machines: noMachines{}, Namespace: "n"}, Clients{Events: events})
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

// eventList collects Events.
type eventList struct{ all []string }

func (l *eventList) Eventf(_, _ runtime.Object, kind, reason, _, _ string, args ...any) {
	l.all = append(l.all, kind+" "+reason+" "+args[0].(string))
}
