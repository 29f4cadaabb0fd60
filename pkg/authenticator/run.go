// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// The steps of a run.
const (
	StepLook        Step = "look"
	StepStartWorker Step = "start worker"
	StepPrint       Step = "print"
)

// Answer is what a run prints.
type Answer struct {
	// Credential is one ExecCredential in JSON, for standard output; empty if there is none.
	Credential []byte
	// Remarks are for people, on standard error: what is worth knowing beside the credential, or beside the error.
	Remarks []error
}

// Run is one call of the plugin by client-go. It prints what is on disk; when that is due or missing it has a worker fetch better, and
// waits a bounded time for it. It returns an error, a *Failure, only where there is no certificate of this node that has not
// expired. The Answer is never nil.
func Run(ctx context.Context, o Options) (*Answer, error) {
	answer := &Answer{}
	o.step(StepLook)
	s := o.look()
	if o.invalid != nil {
		return o.printDespite(s, answer)
	}
	o.noticeRejection(ctx, &s)
	var failure error
	switch {
	case s.final:
		return answer, AsFailure(s.lack)
	case s.pair == nil:
		s, failure = o.awaitWorker(ctx, s, o.waitTimeout, answer)
	case s.due != "":
		s, failure = o.awaitWorker(ctx, s, o.renewalWait, answer)
	}
	if s.pair == nil {
		return answer, failure
	}
	if failure != nil {
		answer.Remarks = append(answer.Remarks, fmt.Errorf("certificate of node %q is still served, but %s: %w", s.pair.NodeName(), s.due, failure))
	}
	return o.print(s, answer)
}

// printDespite prints a certificate under a configuration that is wrong: the node lives on while it is mended.
func (o *Options) printDespite(s standing, answer *Answer) (*Answer, error) {
	if s.pair == nil {
		return answer, AsFailure(o.invalid)
	}
	s.due = "the configuration is wrong"
	answer.Remarks = append(answer.Remarks, o.invalid)
	return o.print(s, answer)
}

// awaitWorker starts the worker if none runs, and waits for what comes of it, at most for budget. It returns the new standing, or
// the old one with the reason why it is no better.
func (o *Options) awaitWorker(ctx context.Context, before standing, budget time.Duration, answer *Answer) (standing, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	began, starts := o.now(), 0
	for {
		if s := o.look(); s.pair != nil && (s.due == "" || before.pair == nil || s.pair.Fingerprint() != before.pair.Fingerprint()) {
			return s, nil
		}
		if !o.dir.Worker().Alive() {
			started, err := o.startWorker(before, starts, began)
			if err != nil {
				return before, AsFailure(err)
			}
			if started {
				starts++
				if caution := o.provider.Caution(); caution != "" && starts == 1 {
					answer.Remarks = append(answer.Remarks, errors.New(caution))
				}
			}
		}
		select {
		case <-ctx.Done():
			return before, o.whyNotYet(budget)
		case <-time.After(pollInterval):
		}
	}
}

// pollInterval is how often a waiting run looks whether the worker has come to an end.
const pollInterval = 15 * time.Millisecond

// maxStarts is how many workers one run starts: each died without a result, or had to be followed by another.
const maxStarts = 3

// startWorker starts a worker unless one runs. The lock is held while it looks and starts, so that of many runs one does. It returns
// the last worker's failure where that one came to its end while this run waited, or where it is too early for another.
func (o *Options) startWorker(before standing, starts int, began time.Time) (bool, error) {
	lock, err := o.dir.TryLock()
	if errors.Is(err, cache.ErrLocked) {
		return false, nil // another run is starting one, or a worker of unknown name is at it
	}
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	if o.dir.Worker().Alive() {
		return false, nil
	}
	if s := o.look(); s.pair != nil && (before.pair == nil || s.pair.Fingerprint() != before.pair.Fingerprint()) {
		return false, nil // it has just come
	}
	state, err := o.dir.State()
	if err != nil {
		state = &cache.State{} // damaged: the worker sets it aside
	}
	if last := state.Last; last != nil && last.Reason != "" {
		wait := state.NextAttempt.Sub(o.now())
		if wait > 0 && wait <= backOffCeiling {
			return false, lastFailure(last, wait)
		}
		if Reason(last.Reason) != WaitingForSigner && !last.Finished.Before(began) {
			return false, lastFailure(last, 0)
		}
	}
	if starts >= maxStarts {
		return false, &Failure{WorkerUnavailable, "see " + o.dir.File(cache.LogFile), errors.New("the worker ended without a result, several times")}
	}
	o.step(StepStartWorker)
	id, err := o.StartWorker(o.Parent)
	if err != nil {
		return false, &Failure{WorkerUnavailable, "", fmt.Errorf("start worker: %w", err)}
	}
	return true, lock.NameWorker(id)
}

// lastFailure is the failure that the last worker wrote down.
func lastFailure(last *cache.Result, wait time.Duration) error {
	err := errors.New(last.Message)
	if wait > 0 {
		err = fmt.Errorf("%w (next attempt in %s)", err, wait.Round(time.Second))
	}
	return &Failure{Reason(last.Reason), last.Hint, err}
}

// whyNotYet says what a run that has waited long enough was waiting for.
func (o *Options) whyNotYet(waited time.Duration) error {
	const hint = "the worker goes on, and the next run carries on with the same request"
	if pending, err := o.dir.Pending(); err == nil && pending != nil {
		last := pending.Last()
		if last.UID != "" {
			return &Failure{WaitingForSigner, "see: kubectl describe csr " + last.Name + "; " + hint,
				fmt.Errorf("CertificateSigningRequest %s: signer %s has not issued a certificate within %s", last.Name, pending.SignerName, waited)}
		}
		return &Failure{APIUnreachable, hint, fmt.Errorf("%s: no answer within %s", pending.Cluster.Server, waited)}
	}
	if !o.dir.Worker().Alive() {
		return &Failure{WorkerUnavailable, "find who holds it with: fuser -v " + o.dir.File(cache.LockFile),
			fmt.Errorf("%s: held by another process for %s", o.dir.File(cache.LockFile), waited)}
	}
	return &Failure{WorkerUnavailable, hint, fmt.Errorf("the worker has not filed a request within %s", waited)}
}

// print returns the credential and notes for the next run what was answered.
func (o *Options) print(s standing, answer *Answer) (*Answer, error) {
	o.step(StepPrint)
	now := o.now()
	expiration := steadyExpiration(s.pair.Leaf, o.renews() || o.provider == nil)
	if s.due != "" || !expiration.After(now) {
		expiration = nearExpiration(s.pair.Leaf, now)
	}
	data, err := o.exec.render(s.pair, expiration)
	if err != nil {
		return answer, AsFailure(err)
	}
	answer.Credential = data
	if o.Parent.PID != 0 {
		o.remember(s, expiration)
	}
	return answer, nil
}

// remember writes the note about this answer.
func (o *Options) remember(s standing, until time.Time) {
	n := note{Parent: o.Parent, NodeName: s.pair.NodeName(), Certificate: s.pair.Fingerprint(), Until: until.Unix()}
	if n.Certificate == s.note.Certificate {
		n.Reviewed, n.Rejected = s.note.Reviewed, s.note.Rejected
	}
	if n != s.note {
		o.note.write(n)
	}
}
