// SPDX-License-Identifier: Apache-2.0

// Package form has regular expressions that are compiled when they are first used. The plugin runs
// for each certificate that the kubelet wants, and mostly prints one. Compiling the forms of
// clouds' names each time would be a part of that.
package form

import (
	"regexp"
	"sync"
)

// Form is a regular expression. Get compiles it, once.
type Form struct{ get func() *regexp.Regexp }

// New returns a Form. Get panics if it does not compile.
func New(expression string) Form {
	return Form{sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })}
}

// Get returns the compiled expression.
func (f Form) Get() *regexp.Regexp { return f.get() }
