// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/klog/v2/ktesting"
)

type faulty struct{ problem error }

func (s *faulty) Problem() error { return s.problem }

// A problem is logged once, and so is its end.
func TestProblemsAreLoggedOnce(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	s := &faulty{}
	h := NewHealth(map[string]any{"CA": s, "machines": "a source without problems"}, logger)
	for _, problem := range []error{nil, errors.New("first"), errors.New("first"), errors.New("second\nline"), nil, nil} {
		s.problem = problem
		h.check()
	}
	logged := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for text, times := range map[string]int{"first": 1, "second line": 1, "in use again": 1, "CA": 3} {
		if strings.Count(logged, text) != times {
			t.Errorf("%q is not logged %d times:\n%s", text, times, logged)
		}
	}
}
