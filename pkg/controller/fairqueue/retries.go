// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"hash/maphash"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Retries remembers the waiting requests, such as those that wait for an inventory, until they are
// decided or gone. M is the controller's type for remembered evidence.
//
// If a request must wait, the controller calls Remember and requeues the request after the returned
// time. MarkReported says whether to report the decision, and Published whether to write the reason
// into the request. After verifying the evidence again, the controller calls Keep. When the
// machines have changed, it adds the names of Wake to the queue, and calls Queue.Reclassify. When a
// request is decided or gone, it calls Forget. A waiting request costs nothing until it is
// requeued.
//
// A request that was woken is also requeued at its former time, since client-go's delaying queue
// cannot cancel that.
//
// A waiting request takes some 300 bytes with its name, UID and claim, plus the size of M.
type Retries[M any] struct {
	seed maphash.Seed

	mu      sync.Mutex
	waiting map[string]*retry[M]
	// causes counts the waiting requests by Waiting.Cause.
	causes map[string]int
}

// retry is the state of one waiting request.
type retry[M any] struct {
	uid   types.UID
	claim Claim
	cause string
	// reported is the hash of the message that was last reported, if hasReported. The texts of
	// 100,000 messages would need too much memory.
	reported    uint64
	hasReported bool
	// published is the reason that was last written into the request. Reasons are constants.
	published string
	// memo was made at the time verified. verified is zero if there is no memo.
	memo     M
	verified time.Time
}

// NewRetries returns a Retries without requests.
func NewRetries[M any]() *Retries[M] {
	return &Retries[M]{seed: maphash.MakeSeed(), waiting: map[string]*retry[M]{}, causes: map[string]int{}}
}

// Waiting is a waiting request.
type Waiting struct {
	Name string
	// UID distinguishes the request from an earlier or later one of the same name.
	UID types.UID
	// Claim is the request's claim, for Wake.
	Claim Claim
	// Cause is the reason for waiting, for Causes. There must be few different ones.
	Cause string
	// Created is the time when the API server stored the request.
	Created time.Time
	// Deadline is the time at which the request is denied if it still waits, zero if there is none.
	Deadline time.Time
}

// A waiting request is retried after a 60th of its age, within these bounds. It needs retries since
// machines may appear without an event, such as in a platform's API.
const (
	minRetry   = time.Second
	maxRetry   = 15 * time.Second
	retryShare = 60
)

// Remember stores a waiting request, and returns the time until its next retry. The time grows with
// the age of the request, and ends at its deadline.
func (r *Retries[M]) Remember(w Waiting, now time.Time) time.Duration {
	r.mu.Lock()
	known := r.of(w.Name, w.UID)
	r.uncount(known)
	known.claim, known.cause = w.Claim, w.Cause
	if w.Cause != "" {
		r.causes[w.Cause]++
	}
	r.mu.Unlock()
	after := min(max(now.Sub(w.Created)/retryShare, minRetry), maxRetry)
	if left := w.Deadline.Sub(now); left > 0 {
		after = min(after, left)
	}
	return after
}

// Waits reports whether a request was waiting when it was last decided on.
func (r *Retries[M]) Waits(name string, uid types.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.known(name, uid) != nil
}

// MarkReported reports whether a message about a waiting request differs from the one before, and
// remembers that it was reported.
func (r *Retries[M]) MarkReported(name string, uid types.UID, message string) bool {
	hash := maphash.String(r.seed, message)
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.of(name, uid)
	news := !known.hasReported || known.reported != hash
	known.reported, known.hasReported = hash, true
	return news
}

// Published returns the last reason given to SetPublished, "" if there is none.
func (r *Retries[M]) Published(name string, uid types.UID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		return known.published
	}
	return ""
}

// SetPublished remembers the reason that was written into the request, if the request waits.
func (r *Retries[M]) SetPublished(name string, uid types.UID, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		known.published = reason
	}
}

// maxMemoAge bounds the age of a memo. To verify evidence costs most, and many requests may wait.
const maxMemoAge = time.Minute

// Memo returns the memo that Keep got, if its evidence was verified less than maxMemoAge ago.
func (r *Retries[M]) Memo(name string, uid types.UID, now time.Time) (memo M, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.known(name, uid)
	if known == nil || known.verified.IsZero() {
		return memo, false
	}
	if age := now.Sub(known.verified); age < 0 || age >= maxMemoAge {
		return memo, false
	}
	return known.memo, true
}

// Keep keeps a memo of evidence that was verified at the time verified, if the request waits. Do
// not keep a memo from Memo under a later time: it would never expire.
func (r *Retries[M]) Keep(name string, uid types.UID, memo M, verified time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		known.memo, known.verified = memo, verified
	}
}

// Len returns the number of waiting requests.
func (r *Retries[M]) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting)
}

// Causes returns the number of waiting requests, by cause.
func (r *Retries[M]) Causes() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.causes)
}

// uncount takes a request out of causes. The caller locks.
func (r *Retries[M]) uncount(known *retry[M]) {
	if known == nil || known.cause == "" {
		return
	}
	if r.causes[known.cause]--; r.causes[known.cause] == 0 {
		delete(r.causes, known.cause)
	}
}

// Forget drops the state of a request that is decided or gone.
func (r *Retries[M]) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.uncount(r.waiting[name])
	delete(r.waiting, name)
}

// Wake returns the names of the waiting requests whose claims are listed. The others wait for their
// next retry: a change of the machines must not requeue all of 100,000 requests.
func (r *Retries[M]) Wake(listed func(Claim) bool) (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, known := range r.waiting {
		if listed(known.claim) {
			names = append(names, name)
		}
	}
	return names
}

// known returns the state of a request, nil if there is none. The caller locks.
func (r *Retries[M]) known(name string, uid types.UID) *retry[M] {
	if known := r.waiting[name]; known != nil && known.uid == uid {
		return known
	}
	return nil
}

// of returns the state of a request. It makes one if there is none, in place of another request of
// the same name. The caller locks.
func (r *Retries[M]) of(name string, uid types.UID) *retry[M] {
	known := r.known(name, uid)
	if known == nil {
		r.uncount(r.waiting[name])
		known = &retry[M]{uid: uid}
		r.waiting[name] = known
	}
	return known
}
