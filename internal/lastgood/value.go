// SPDX-License-Identifier: Apache-2.0

// Package lastgood keeps the last known good value of a source, such as a file or a Secret. A
// source may change, become invalid or disappear at any time. The value is used until a new valid
// one is read. Meanwhile Problem returns the error.
package lastgood

import (
	"sync"
	"time"
)

// Value is the last known good value of a source. Its zero value has none yet. It is safe for
// concurrent use.
type Value[T any] struct {
	// Reparse has invalid content parsed each time that it is offered. It is for content that
	// becomes valid later, such as a CA that is not valid yet.
	Reparse bool

	offering sync.Mutex // held by Offer

	mu    sync.Mutex
	good  T
	isSet bool
	// version is the version of the good value. invalid is the version that was last found to be
	// invalid, and verdict its error.
	version, invalid string
	verdict          error
	problem          error
	lastRead         time.Time
}

// Offer parses new content and takes it over, or returns why it is invalid: then the last good
// value stays in use. The version identifies the content. Content that is in use, or that was just
// found to be invalid, is not parsed again. Get never waits for parse.
func (v *Value[T]) Offer(version string, parse func() (T, error)) error {
	v.offering.Lock()
	defer v.offering.Unlock()
	if known, err := v.lookup(version); known {
		return err
	}
	value, err := parse()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.problem = err; err != nil {
		v.invalid, v.verdict = version, err
		return err
	}
	v.good, v.isSet, v.version = value, true, version
	v.verdict, v.lastRead = nil, time.Now()
	return nil
}

// lookup reports whether a version was parsed before, and the result.
func (v *Value[T]) lookup(version string) (known bool, verdict error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.isSet && version == v.version:
		v.problem, v.lastRead = nil, time.Now()
	case v.verdict != nil && version == v.invalid && !v.Reparse:
		v.problem = v.verdict
	default:
		return false, nil
	}
	return true, v.problem
}

// Fail notes that the source could not be read. The last good value stays in use.
func (v *Value[T]) Fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.problem = err
}

// Get returns the last good value. It returns false while there has been none.
func (v *Value[T]) Get() (T, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.good, v.isSet
}

// LastRead returns when the value in use was last offered, zero if there has been none. Since then
// the source was invalid, could not be read, or was not read.
func (v *Value[T]) LastRead() time.Time {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lastRead
}

// Problem returns what keeps the source's latest content from being used, nil if it is in use.
func (v *Value[T]) Problem() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.problem
}
