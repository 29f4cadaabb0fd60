// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"hash/maphash"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Retries remembers the requests that wait, such as for an inventory, until they are decided or
// gone. M is what the controller keeps of a request's evidence.
//
// When a decision is to wait, the controller calls Wait and requeues the request after the time
// that it returns. It calls News to learn whether to report the decision, and Published to learn
// whether to write the reason into the request. It calls Keep if it judged the evidence again. When
// machines have changed it adds the names of Wake to the queue, and calls Queue.Relist. When a
// request is decided or gone it calls Forget. A waiting request costs nothing until it is requeued.
//
// A request that was woken is also requeued at its former time, since client-go's delaying queue
// cannot cancel that.
//
// A waiting request takes some 300 bytes with its name, UID and claim, and the size of M.
type Retries[M any] struct {
	seed maphash.Seed

	mu      sync.Mutex
	waiting map[string]*retry[M]
	// causes counts the waiting requests by Waiting.Cause.
	causes map[string]int
}

// retry is what is remembered of one request.
type retry[M any] struct {
	uid   types.UID
	claim Claim
	cause string
	// reported is the hash of the message that was last reported, if hasReported: the text of
	// 100,000 messages would be the largest part.
	reported    uint64
	hasReported bool
	// published is the reason that the request itself was last seen to have. Reasons are constants.
	published string
	// memo was made at the time judged, which is zero if there is none.
	memo   M
	judged time.Time
}

// NewRetries returns an empty memory of waiting requests.
func NewRetries[M any]() *Retries[M] {
	return &Retries[M]{seed: maphash.MakeSeed(), waiting: map[string]*retry[M]{}, causes: map[string]int{}}
}

// Waiting is a request that waits.
type Waiting struct {
	Name string
	// UID distinguishes the request from others that have the same name in the course of time.
	UID types.UID
	// Claim is what it claims, for Wake.
	Claim Claim
	// Cause is why it waits, for Causes: one of a few texts.
	Cause string
	// Created is when it was filed.
	Created time.Time
	// Deadline is when the decision will be another at the latest; zero if there is none.
	Deadline time.Time
}

// A waiting request is looked at again after a 60th of its age, within these bounds: machines
// appear without an event, such as in a platform's API.
const (
	soonestLook = time.Second
	latestLook  = 15 * time.Second
	lookShare   = 60
)

// Wait remembers that a request waits, and returns after which time to look at it again: the longer
// it has been waiting, the later, and at its deadline at the latest.
func (r *Retries[M]) Wait(w Waiting, now time.Time) time.Duration {
	r.mu.Lock()
	known := r.of(w.Name, w.UID)
	r.uncount(known)
	known.claim, known.cause = w.Claim, w.Cause
	if w.Cause != "" {
		r.causes[w.Cause]++
	}
	r.mu.Unlock()
	after := min(max(now.Sub(w.Created)/lookShare, soonestLook), latestLook)
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

// News reports whether a message about a waiting request differs from the one before, and remembers
// that it was reported.
func (r *Retries[M]) News(name string, uid types.UID, message string) bool {
	hash := maphash.String(r.seed, message)
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.of(name, uid)
	news := !known.hasReported || known.reported != hash
	known.reported, known.hasReported = hash, true
	return news
}

// Published returns the reason that SetPublished was given last, "" if there is none.
func (r *Retries[M]) Published(name string, uid types.UID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		return known.published
	}
	return ""
}

// SetPublished remembers which reason was written into the request, if the request waits.
func (r *Retries[M]) SetPublished(name string, uid types.UID, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		known.published = reason
	}
}

// maxJudged is how long a memo may be used: to judge evidence is what costs most, and many may
// wait.
const maxJudged = time.Minute

// Memo returns what Keep was given within the last minute.
func (r *Retries[M]) Memo(name string, uid types.UID, now time.Time) (memo M, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.known(name, uid)
	if known == nil || known.judged.IsZero() {
		return memo, false
	}
	if age := now.Sub(known.judged); age < 0 || age >= maxJudged {
		return memo, false
	}
	return known.memo, true
}

// Keep keeps a memo of evidence that was judged at a time, if the request waits. What Memo returned
// must not be kept with a later time.
func (r *Retries[M]) Keep(name string, uid types.UID, memo M, judged time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known(name, uid); known != nil {
		known.memo, known.judged = memo, judged
	}
}

// Len returns how many requests wait.
func (r *Retries[M]) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting)
}

// Causes returns how many requests wait, by cause.
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

// Forget drops what is remembered of a request that is decided or gone.
func (r *Retries[M]) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.uncount(r.waiting[name])
	delete(r.waiting, name)
}

// Wake returns the names of the waiting requests whose claims are listed. Others wait for their
// next look: a change of the machines must not cost a look at each of 100,000 requests.
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

// known returns what is remembered of a request, nil if nothing is. The caller locks.
func (r *Retries[M]) known(name string, uid types.UID) *retry[M] {
	if known := r.waiting[name]; known != nil && known.uid == uid {
		return known
	}
	return nil
}

// of remembers a request, in place of another one of the same name. The caller locks.
func (r *Retries[M]) of(name string, uid types.UID) *retry[M] {
	known := r.known(name, uid)
	if known == nil {
		r.uncount(r.waiting[name])
		known = &retry[M]{uid: uid}
		r.waiting[name] = known
	}
	return known
}
