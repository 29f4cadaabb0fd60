// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// A request that was filed before the moment from which on certificates count is no renewal.
func TestRenewalByAnEarlierRequest(t *testing.T) {
	old, other := plugintest.NewPair(t, nil), plugintest.NewPair(t, nil)
	renewal := &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Minute)}
	for name, c := range map[string]struct {
		found    *cache.Announcement
		replaced *cache.Pair
		filed    time.Time
		want     bool
	}{
		"after it":            {&cache.Announcement{Certificate: old.Fingerprint(), Renewal: renewal}, old, plugintest.Noon, true},
		"before it":           {&cache.Announcement{Certificate: old.Fingerprint(), Renewal: renewal}, old, plugintest.Noon.Add(-time.Second), false},
		"done already":        {&cache.Announcement{Certificate: old.Fingerprint(), Renewal: renewal, Done: []cache.Renewal{*renewal}}, old, plugintest.Noon, false},
		"another certificate": {&cache.Announcement{Certificate: old.Fingerprint(), Renewal: renewal}, other, plugintest.Noon, false},
		"no certificate":      {&cache.Announcement{Certificate: old.Fingerprint(), Renewal: renewal}, nil, plugintest.Noon, false},
		"no renewal":          {&cache.Announcement{Certificate: old.Fingerprint()}, old, plugintest.Noon, false},
		"no check":            {nil, old, plugintest.Noon, false},
	} {
		state := &cache.State{Announcement: c.found}
		if got := markRenewalDone(state, c.replaced, c.filed); got != c.want {
			t.Errorf("%s: done: %v", name, got)
		}
	}
}
