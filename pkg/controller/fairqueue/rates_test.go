// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"strings"
	"testing"
	"time"
)

func TestRatesCheck(t *testing.T) {
	if err := DefaultRates().Check(); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		want string
		bend func(*Rates)
	}{
		{"perRequester.every: must be more than 0, and at most 1h0m0s", func(r *Rates) { r.Requester.Every = 0 }},
		{"perRequester.every: ", func(r *Rates) { r.Requester.Every = -1 }},
		{"perCluster.every: ", func(r *Rates) { r.Cluster.Every = 2 * time.Hour }},
		{"perMachine.burst: must be 1 to 1000000", func(r *Rates) { r.Machine.Burst = 0 }},
		{"perCluster.burst: ", func(r *Rates) { r.Cluster.Burst = maxBurst + 1 }},
	} {
		r := DefaultRates()
		c.bend(&r)
		if err := r.Check(); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
}
