// SPDX-License-Identifier: Apache-2.0

// Package sources reads what a controller decides by: the signing CA, the inventory of machines and
// the challenge keys. Each may change at any time, and is read again without a restart. While the
// latest content is invalid or cannot be read, the last good one stays in use (internal/lastgood),
// and Health reports the problem. ComparedCA signs nothing with a CA that the API server does not
// trust.
package sources

import "time"

const (
	// maxAge is how old an object may be that was read from the API server, and two seconds more
	// while it is read: many decisions share one read.
	maxAge = 500 * time.Millisecond
	// readTimeout bounds one read.
	readTimeout = 10 * time.Second
)
