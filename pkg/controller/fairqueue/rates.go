// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"time"
)

// Rate lets Burst pass at once, and then one each Every.
type Rate struct {
	Every time.Duration
	Burst int
}

// Rates are rule R1. A request that is over a rate waits, and is never denied for it.
type Rates struct {
	// Requester and Cluster bound how often evidence is judged, for whoever filed the request and
	// for all: before evidence has been judged nobody knows which machine it is of. A request that
	// waits for something counts each time it is looked at again.
	Requester, Cluster Rate
	// Machine bounds the certificates of a machine that has proven which one it is.
	Machine Rate
}

// DefaultRates are far above what a fleet needs that boots all at once under one token, and keep
// one token's flood below half a core.
func DefaultRates() Rates {
	return Rates{
		Requester: Rate{Every: 10 * time.Millisecond, Burst: 500},
		Cluster:   Rate{Every: 4 * time.Millisecond, Burst: 1000},
		Machine:   Rate{Every: 10 * time.Second, Burst: 10},
	}
}

// Bounds of a Rate.
const (
	maxEvery = time.Hour
	maxBurst = 1_000_000
)

// Check returns an error that names the first invalid rate.
func (r Rates) Check() error {
	for _, c := range []struct {
		name string
		rate Rate
	}{{"perRequester", r.Requester}, {"perCluster", r.Cluster}, {"perMachine", r.Machine}} {
		switch {
		case c.rate.Every <= 0 || c.rate.Every > maxEvery:
			return fmt.Errorf("%s.every: is more than 0, and %s at most", c.name, maxEvery)
		case c.rate.Burst < 1 || c.rate.Burst > maxBurst:
			return fmt.Errorf("%s.burst: is 1 to %d", c.name, maxBurst)
		}
	}
	return nil
}
