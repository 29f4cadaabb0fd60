// SPDX-License-Identifier: Apache-2.0

package facts

import (
	"testing"
	"testing/synctest"
	"time"
)

// A fact is kept while somebody asks for it, and dropped within two days after that.
func TestFactsExpire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f Facts[int]
		f.Set("used", 1)
		f.Set("unused", 2)
		for range 48 {
			time.Sleep(time.Hour)
			if got := f.Get("used"); got != 1 {
				t.Fatalf("got %d", got)
			}
		}
		f.Set("other", 3)
		if f.Get("used") != 1 || f.Get("other") != 3 || f.Get("unused") != 0 || len(f.byID) != 2 {
			t.Errorf("kept: %v", f.byID)
		}
	})
}
