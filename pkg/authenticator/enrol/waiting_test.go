// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"os"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// says has the controller write what a request waits for, and nothing else.
func says(annotation string) func(int, *csrObject) {
	return func(_ int, o *csrObject) { annotate(o, attestation.AnnotationWaiting, annotation) }
}

// The controller's reason to wait is in the worker's failure, in the state file and in status,
// until the request is decided. What has another form is ignored.
func TestWhatTheControllerSaysOfAWaitingRequest(t *testing.T) {
	const annotation, why, cure = "MachineNotFound: run this", "MachineNotFound", "run this"
	for name, c := range map[string]struct {
		change    func(n *testNode)
		explained bool
	}{
		"of a hello":       {func(n *testNode) { n.api.hello = says(annotation) }, true},
		"of a proof":       {func(n *testNode) { n.api.proof = says(annotation) }, true},
		"nothing":          {func(n *testNode) { n.api.hello = says("") }, false},
		"another form":     {func(n *testNode) { n.api.hello = says(annotation + "\n\x1b[2J") }, false},
		"far too much":     {func(n *testNode) { n.api.hello = says(annotation + strings.Repeat("x", attestation.MaxStatement)) }, false},
		"no reason at all": {func(n *testNode) { n.api.hello = says("machine not found: run this") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c.change(n)
			for range 2 {
				failure := plugintest.WantFailure(t, n.work(), reason.WaitingForSigner)
				if strings.Contains(failure.Error(), " yet: "+why) != c.explained || (failure.Hint == cure) != c.explained {
					t.Errorf("%v (%s)", failure, failure.Hint)
				}
			}
			if state := n.wantState(reason.WaitingForSigner, reason.BackOffNone); (state.Waiting != nil) != c.explained || c.explained && state.Waiting.Annotation != annotation {
				t.Errorf("%+v", state.Waiting)
			}
			n.api.mu.Lock()
			n.api.hello, n.api.proof = challenge, n.issue
			clear(n.api.decided)
			n.api.mu.Unlock()
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			if state := n.wantState("", reason.BackOffNone); state.Waiting != nil {
				t.Errorf("it is decided, and the state file has %+v", state.Waiting)
			}
		})
	}
}

// A state file that cannot be written while the worker waits changes nothing for the worker.
func TestWaitingIsNotWrittenDown(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.api.hello = says("MachineNotFound: run this")
	n.Step = func(step Step) {
		file := n.Node.Dir().File(cache.StateFile)
		switch step {
		case StepChallenge:
			if err := os.Mkdir(file, 0o700); err != nil {
				t.Error(err)
			}
		case stepRecord:
			if err := os.Remove(file); err != nil {
				t.Error(err)
			}
		}
	}
	failure := plugintest.WantFailure(t, n.work(), reason.WaitingForSigner)
	if state := n.wantState(reason.WaitingForSigner, reason.BackOffNone); state.Waiting != nil || strings.Contains(failure.Error(), "MachineNotFound") {
		t.Errorf("%v, %+v", failure, state.Waiting)
	}
}
