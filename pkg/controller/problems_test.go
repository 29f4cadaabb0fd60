// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/klog/v2/ktesting"
)

type faulty struct{ problem error }

func (s *faulty) Problem() error { return s.problem }

// What cannot be used is said once, and once that it can be again.
func TestProblemsAreSaidOnce(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	s := &faulty{}
	w := &Problems{sources: map[string]Source{"CA": s}, log: logger, said: map[string]string{}}
	for _, problem := range []error{nil, errors.New("first"), errors.New("first"), errors.New("second\nline"), nil, nil} {
		s.problem = problem
		w.look()
	}
	said := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	for text, times := range map[string]int{"first": 1, "second line": 1, "in use again": 1, "CA": 3} {
		if strings.Count(said, text) != times {
			t.Errorf("%q is not said %d times:\n%s", text, times, said)
		}
	}
}
