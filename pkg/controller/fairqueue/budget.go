// SPDX-License-Identifier: Apache-2.0

package fairqueue

import "sync"

// The container's limit in packaging/kubernetes is 512 MiB, of which GOMEMLIMIT leaves Go 488. The
// controller needs 80 MiB with 5,000 records. 100,000 waiting requests need some 200 MiB for their
// metadata in the cache, queue and retries. The objects may use 64 MiB, and twice that until
// garbage is collected.
//
// A requester's 16 MiB hold 1,300 requests of 12 KiB, as machines without an event log file them,
// or 128 of the largest. So a flood of one token leaves three quarters of the budget to the others.
const (
	maxBytes             = 64 << 20
	maxBytesPerRequester = 16 << 20
)

// Budget bounds the memory for the whole objects of waiting requests, in all and per requester. Of
// a request that has no reservation the controller keeps name and digest, and reads the rest when
// it is the request's turn.
type Budget struct {
	total, perRequester int

	mu       sync.Mutex
	used     int
	usedBy   map[string]int
	reserved map[string]reservation
}

type reservation struct {
	requester string
	bytes     int
}

// NewBudget returns a budget of 64 MiB in all, and 16 MiB per requester.
func NewBudget() *Budget { return newBudget(maxBytes, maxBytesPerRequester) }

func newBudget(total, perRequester int) *Budget {
	return &Budget{total: total, perRequester: perRequester, usedBy: map[string]int{}, reserved: map[string]reservation{}}
}

// Reserve reports whether there is room for the object of a request, which is the requester's until
// Release. A reservation that the name had before is released, in either case.
func (b *Budget) Reserve(name, requester string, bytes int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.release(name)
	if bytes < 0 || bytes > b.total-b.used || bytes > b.perRequester-b.usedBy[requester] {
		return false
	}
	b.used += bytes
	b.usedBy[requester] += bytes
	b.reserved[name] = reservation{requester, bytes}
	return true
}

// Release ends the reservation of a name, if it has one.
func (b *Budget) Release(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.release(name)
}

// release is Release; the caller locks.
func (b *Budget) release(name string) {
	r, ok := b.reserved[name]
	if !ok {
		return
	}
	delete(b.reserved, name)
	b.used -= r.bytes
	if b.usedBy[r.requester] -= r.bytes; b.usedBy[r.requester] == 0 {
		delete(b.usedBy, r.requester)
	}
}
