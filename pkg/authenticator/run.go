// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
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

// pollInterval is how often a waiting run looks whether the worker has come to an end.
const pollInterval = 15 * time.Millisecond

// awaitWorker starts the worker if none runs, and waits for what comes of it, at most for budget. It returns the new standing, or
// the old one with the reason why it is no better.
func (o *Options) awaitWorker(ctx context.Context, before standing, budget time.Duration, answer *Answer) (standing, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	warned := false
	for {
		if s := o.look(); s.betterThan(before) {
			return s, nil
		}
		if !o.workerRuns() {
			started, err := o.startWorker(before)
			if err != nil {
				return before, AsFailure(err)
			}
			if caution := o.provider.Caution(); started && caution != "" && !warned {
				warned = true
				answer.Remarks = append(answer.Remarks, errors.New(caution))
			}
		}
		select {
		case <-ctx.Done():
			return before, o.whyNotYet(budget)
		case <-time.After(pollInterval):
		}
	}
}

// betterThan reports whether there is a certificate now that a waiting run should print.
func (s standing) betterThan(before standing) bool {
	if s.pair == nil || before.pair == nil {
		return s.pair != nil
	}
	return s.due == "" || s.pair.Fingerprint() != before.pair.Fingerprint()
}

// overdue is how long past its deadline a worker may be alive: it ends by itself a little after it.
const overdue = 30 * time.Second

// workerRuns reports whether a worker is alive. One that has long overrun its deadline, stopped or stuck, is killed.
func (o *Options) workerRuns() bool {
	id := o.dir.Worker()
	if !id.Alive() {
		return false
	}
	if id.Age() > o.WorkerDeadline+overdue {
		_ = syscall.Kill(id.PID, syscall.SIGKILL)
	}
	return true
}

// startWorker starts a worker unless one runs, or it is too early for another: then the error is the last one's. The lock is held while
// it looks and starts, so that of many runs one does.
func (o *Options) startWorker(before standing) (bool, error) {
	lock, err := o.dir.TryLock()
	if errors.Is(err, cache.ErrLocked) {
		return false, nil // another run is starting one, or a worker of unknown name is at it
	}
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	if o.workerRuns() || o.look().betterThan(before) {
		return false, nil
	}
	state := o.readState()
	if err := o.recordDeath(lock, state); err != nil {
		return false, err
	}
	if wait := o.tooEarly(state); wait > 0 {
		return false, lastFailure(state.Last, wait)
	}
	// A disk that is full is found out before a process is started.
	if err := lock.NameWorker(process.ID{}); err != nil {
		return false, err
	}
	o.step(StepStartWorker)
	id, err := o.StartWorker()
	if err != nil {
		return false, &Failure{WorkerUnavailable, "", fmt.Errorf("start worker: %w", err)}
	}
	return true, lock.NameWorker(id)
}

// whyNotYet says what a run that has waited long enough was waiting for.
func (o *Options) whyNotYet(waited time.Duration) error {
	const hint = "the worker goes on, and the next run carries on with the same request"
	if pending, err := o.dir.Pending(); err == nil && pending != nil {
		last := pending.Last()
		if last.UID != "" {
			return &Failure{WaitingForSigner, "see: kubectl describe csr " + last.Name + "; " + hint,
				fmt.Errorf("CertificateSigningRequest %s: signer %s has not %s within %s", last.Name, signerOf(pending), answerTo(last), waited)}
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
	if s.remark != nil {
		answer.Remarks = append(answer.Remarks, s.remark)
	}
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

// remember writes the note about this answer. When the API server was last asked is kept, whichever certificate that was about.
func (o *Options) remember(s standing, until time.Time) {
	n := s.note
	n.Parent, n.Certificate, n.Until = o.Parent, s.pair.Fingerprint(), until.Unix()
	n.Rejected = n.Rejected && n.Certificate == s.note.Certificate
	if n == s.note {
		return
	}
	// A worker may have noted a rejection meanwhile.
	if latest := o.note.read(); latest.Certificate == n.Certificate {
		n.Rejected = latest.Rejected
	}
	o.note.write(n)
}
