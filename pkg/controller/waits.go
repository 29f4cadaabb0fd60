// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// lookAtLeast is how soon a request that has waited for long is looked at again. In between it is only noticed that there are other machines.
const lookAtLeast = 15 * time.Second

// waits remembers what each request that waits was last said to wait for, until it is decided or gone.
type waits struct {
	mu   sync.Mutex
	last map[string]*wait
}

// wait is what is remembered of one request.
type wait struct {
	uid     types.UID
	message string
	// evidence is what was made of it at a time, and of what.
	evidence verifier.Evidence
	judged   judgement
	at       time.Time
	// next is when it is looked at again, unless the machines are others by then than these, which were lent.
	next     time.Time
	machines []verifier.Machine
}

// maxJudged is how long a judgement of evidence does for a look in passing.
const maxJudged = time.Minute

// news reports whether a decision is another than the one before.
func (w *waits) news(request *certificatesv1.CertificateSigningRequest, d verifier.Decision) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Outcome != verifier.Wait {
		delete(w.last, request.Name)
		return true
	}
	message := d.Refusals.Error()
	last := w.last[request.Name]
	if last != nil && last.uid == request.UID {
		told := last.message == message
		last.message = message
		return !told
	}
	w.remember(request).message = message
	return true
}

// waiting reports whether a request was waiting when it was last decided on.
func (w *waits) waiting(request *certificatesv1.CertificateSigningRequest) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.last[request.Name]
	return last != nil && last.uid == request.UID
}

// looked notes that a request is still waiting: the longer it has been, the more seldom it is looked at.
func (w *waits) looked(request *certificatesv1.CertificateSigningRequest, lent []verifier.Machine, deadline, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if last := w.last[request.Name]; last == nil || last.uid != request.UID {
		w.remember(request)
	}
	last := w.last[request.Name]
	last.next = now.Add(min(max(now.Sub(request.CreationTimestamp.Time)/60, lookAgain), lookAtLeast))
	if deadline.After(now) && deadline.Before(last.next) {
		last.next = deadline
	}
	last.machines = lent
}

// early reports whether a request that waits need not be looked at yet. Machines that are not lent are new each time, and do not count.
func (w *waits) early(request *certificatesv1.CertificateSigningRequest, lent []verifier.Machine, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.last[request.Name]
	if last == nil || last.uid != request.UID {
		return false
	}
	if lent != nil && !same(lent, last.machines) {
		return false
	}
	left := last.next.Sub(now)
	return left > 0 && left <= lookAtLeast // else the clock was put back
}

// same reports whether machines that were lent are those that were lent before.
func same(a, b []verifier.Machine) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func (w *waits) remember(request *certificatesv1.CertificateSigningRequest) *wait {
	if w.last == nil {
		w.last = map[string]*wait{}
	}
	w.last[request.Name] = &wait{uid: request.UID}
	return w.last[request.Name]
}

func (w *waits) forget(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.last, name)
}

// evidence returns what was made a moment ago of a request that waits: judging is what costs most, and many may wait.
func (w *waits) evidence(q Question) (verifier.Evidence, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.last[q.Request.Name]
	if last == nil || last.uid != q.Request.UID || last.judged != judgementOf(q) {
		return verifier.Evidence{}, false
	}
	age := q.Now.Sub(last.at)
	return last.evidence, age >= 0 && age < maxJudged
}

// keep remembers what was made of a request that waits. What could not be judged is tried each time.
func (w *waits) keep(q Question, evidence verifier.Evidence) {
	if _, known := w.evidence(q); known || evidence.Err != nil && !isVerdict(evidence.Err) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if last := w.last[q.Request.Name]; last != nil && last.uid == q.Request.UID {
		last.evidence, last.judged, last.at = evidence, judgementOf(q), q.Now
	}
}
