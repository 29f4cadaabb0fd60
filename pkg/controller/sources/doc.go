// SPDX-License-Identifier: Apache-2.0

// Package sources reads the inputs of a controller: the signing CA, the inventory of machines and
// the challenge keys. Each may change at any time, and is read again without a restart. While the
// latest content is invalid or cannot be read, the last known good one is used (internal/lastgood),
// and Health reports the problem. ComparedCA keeps a CA from signing that the API server does not
// trust.
package sources

import "time"

const (
	// maxAge bounds how stale an object from the API server may be. While it is read again, it may
	// be two seconds older. Many decisions share one read.
	maxAge = 500 * time.Millisecond
	// readTimeout bounds one read.
	readTimeout = 10 * time.Second
)
