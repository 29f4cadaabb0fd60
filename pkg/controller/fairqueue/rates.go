// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"fmt"
	"time"
)

// Rate allows Burst at once, and then one per Every.
type Rate struct {
	Every time.Duration
	Burst int
}

// Rates are rule R1. A request over a rate waits. It is never denied for that.
type Rates struct {
	// Requester and Cluster bound how often evidence is verified, for each requester and for all
	// together. They cannot be per machine, since the machine is not known before evidence is
	// verified. A waiting request counts at each retry.
	Requester, Cluster Rate
	// Machine bounds the certificates of a machine, once it is attested.
	Machine Rate
}

// DefaultRates are far above the need of a fleet that boots all at once under one token. They keep
// the flood of one token below half a core.
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
			return fmt.Errorf("%s.every: must be more than 0, and at most %s", c.name, maxEvery)
		case c.rate.Burst < 1 || c.rate.Burst > maxBurst:
			return fmt.Errorf("%s.burst: must be 1 to %d", c.name, maxBurst)
		}
	}
	return nil
}
