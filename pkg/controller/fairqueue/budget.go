// SPDX-License-Identifier: Apache-2.0

package fairqueue

import "sync"

// The container's limit in packaging/kubernetes is 512 MiB. GOMEMLIMIT leaves 488 MiB of that to
// Go. The controller needs 80 MiB with 5,000 records. 100,000 waiting requests need some 200 MiB
// for their metadata in the cache, the queue and the retries. The objects may use 64 MiB, and twice
// that until garbage is collected.
//
// A requester's 16 MiB hold 1,300 requests of 12 KiB, the size without an event log, or 128 of the
// largest requests. So a flood of one token leaves three quarters of the budget to the others.
const (
	maxBytes             = 64 << 20
	maxBytesPerRequester = 16 << 20
)

// Budget bounds the memory for the whole objects of waiting requests, in all and per requester. Of
// a request without a reservation the controller keeps identity and claim. It reads the rest before
// it decides.
type Budget struct {
	total, perRequester int

	mu     sync.Mutex
	used   int
	usedBy map[string]int
}

// NewBudget returns a budget of 64 MiB in all, and 16 MiB per requester.
func NewBudget() *Budget { return newBudget(maxBytes, maxBytesPerRequester) }

func newBudget(total, perRequester int) *Budget {
	return &Budget{total: total, perRequester: perRequester, usedBy: map[string]int{}}
}

// Reserve reports whether there is room for an object of a requester, and reserves it.
func (b *Budget) Reserve(requester string, bytes int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if bytes < 0 || bytes > b.total-b.used || bytes > b.perRequester-b.usedBy[requester] {
		return false
	}
	b.used += bytes
	b.usedBy[requester] += bytes
	return true
}

// Release ends a reservation.
func (b *Budget) Release(requester string, bytes int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= bytes
	if b.usedBy[requester] -= bytes; b.usedBy[requester] == 0 {
		delete(b.usedBy, requester)
	}
}
