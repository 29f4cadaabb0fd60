// SPDX-License-Identifier: Apache-2.0

package text

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// maxProblems limits how many problems an error names.
const maxProblems = 5

// MaxProblem limits the text about one problem, in bytes.
const MaxProblem = 300

// Problems are errors by what they are about, such as a machine. The zero value is ready to use.
type Problems map[string]error

// Set adds an error, or replaces it.
func (p *Problems) Set(what string, err error) {
	if *p == nil {
		*p = Problems{}
	}
	(*p)[what] = err
}

// Err names a few problems in one line, in a stable order. It is nil if there are none.
func (p Problems) Err() error {
	var all []error
	for what, err := range p {
		all = append(all, errors.New(Line(what+": "+err.Error(), MaxProblem)))
	}
	slices.SortFunc(all, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	if more := len(all) - maxProblems; more > 0 {
		all = append(all[:maxProblems], fmt.Errorf("and %d more", more))
	}
	return JoinLine(all)
}

// JoinLine returns errors as one line, nil if there are none.
func JoinLine(all []error) error {
	var lines []string
	for _, err := range all {
		if err != nil {
			lines = append(lines, Line(err.Error(), (maxProblems+1)*MaxProblem))
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return errors.New(strings.Join(lines, "; "))
}
