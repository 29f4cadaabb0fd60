// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/oserror"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

const (
	// leastPause and mostPause bound the pauses of a run that waits. A pause is a 16th (pausePart)
	// of the time that the run has waited. So a run notices a change soon, and a long wait costs
	// little.
	leastPause, mostPause, pausePart = 5 * time.Millisecond, 250 * time.Millisecond, 16
	// statusInterval is how often a run that waits reads the certificate again in any case.
	statusInterval = 2 * time.Second
	// A worker that still runs at the time overdue after its deadline is killed. Normally a worker
	// ends by itself shortly after its deadline.
	overdue = 30 * time.Second
	// recordTimeout bounds the time for a worker to record its result after installing its
	// certificate.
	recordTimeout = 10 * time.Second
)

// supervisor starts the worker and waits for it.
type supervisor struct {
	plugin *Authenticator
	// progress is called whenever the state may have changed. Optional.
	progress func()
}

func (a *Authenticator) supervisor() supervisor { return supervisor{a, func() {}} }

// awaitWorker starts the worker if none runs, and waits for its certificate, at most for budget. It
// returns the new status, or the old one with the reason why it is no better.
func (s supervisor) awaitWorker(ctx context.Context, before nodestate.Status, budget time.Duration, answer *Answer) (nodestate.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	began := time.Now()
	for {
		seen := s.stamps() // before reading the files, so that a change in between is noticed below
		if status := s.plugin.node.Load(); status.BetterThan(before) {
			return status, nil
		}
		if err := s.ensureWorker(before, answer); err != nil && !errors.Is(err, cache.ErrLocked) {
			return before, err
		}
		s.progress()
		if !s.awaitChange(ctx, seen, began) {
			return before, s.whyNotYet(budget)
		}
	}
}

// ensureWorker starts the worker unless one runs. It does not wait for the worker. During the
// back-off it returns the last worker's error. It returns cache.ErrLocked if another process has
// the lock. That may be a run that starts a worker, a worker before it recorded its process ID, or
// another program.
func (s supervisor) ensureWorker(before nodestate.Status, answer *Answer) error {
	if s.workerRuns() {
		return nil
	}
	started, err := s.startUnlessRunning(before)
	if err != nil {
		return reason.AsFailure(err)
	}
	if started {
		answer.caution(s.plugin.enroller.Provider)
	}
	return nil
}

// workerAppears reports whether a worker runs within some milliseconds. Call it if another run
// holds the lock: that run may be starting a worker.
func (s supervisor) workerAppears() bool {
	for range 4 {
		if s.workerRuns() {
			return true
		}
		time.Sleep(leastPause)
	}
	return false
}

// stamps returns the stamps of the files that the worker writes for waiting runs.
func (s supervisor) stamps() [2]cache.Stamp {
	return [...]cache.Stamp{s.plugin.node.Dir().Stamp(cache.CurrentFile), s.plugin.node.Dir().Stamp(cache.StateFile)}
}

// awaitChange returns when the state may have changed: one of the worker's files has changed, no
// worker runs, or statusInterval has passed. It returns false if ctx has ended. began is the time
// when the run began to wait.
func (s supervisor) awaitChange(ctx context.Context, seen [2]cache.Stamp, began time.Time) bool {
	for again := time.Now().Add(statusInterval); ; {
		pause := min(max(time.Since(began)/pausePart, leastPause), mostPause)
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
		if s.stamps() != seen || !s.plugin.node.Dir().Worker().Alive() || time.Now().After(again) {
			return true
		}
	}
}

// workerRuns reports whether a worker is alive. It kills a worker that is long past its deadline,
// since that one is stopped or stuck.
func (s supervisor) workerRuns() bool {
	id := s.plugin.node.Dir().Worker()
	if !id.Alive() {
		return false
	}
	if id.Age() > s.plugin.enroller.Deadline+overdue {
		_ = syscall.Kill(id.PID, syscall.SIGKILL)
	}
	return true
}

// startUnlessRunning starts a worker, unless one runs. During the back-off it starts none, and
// returns the last worker's error. It holds the lock, so only one of many concurrent runs starts a
// worker.
func (s supervisor) startUnlessRunning(before nodestate.Status) (started bool, err error) {
	lock, err := s.plugin.node.Dir().TryLock()
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	status := s.plugin.node.Load()
	if s.workerRuns() || status.BetterThan(before) && !status.CheckDue() {
		return false, nil
	}
	if err := s.plugin.enroller.RecordDeath(lock, status.State); err != nil {
		return false, err
	}
	if wait := status.UntilStart(); wait > 0 {
		return false, enrol.LastFailure(status.State.Last, wait)
	}
	// This notices a full disk before a process is started.
	if err := lock.NameWorker(process.ID{}); err != nil {
		return false, err
	}
	s.plugin.enroller.Step(stepStartWorker)
	id, err := s.plugin.startWorker()
	if err != nil {
		return false, reason.WorkerUnavailable.Failure(oserror.Process(err), fmt.Errorf("start worker: %w", err))
	}
	return true, lock.NameWorker(id)
}

// whyNotYet returns the Failure of a run that has waited for its whole budget.
func (s supervisor) whyNotYet(waited time.Duration) error {
	const hint = "the worker continues, and the next run continues with the same request"
	if pending, err := s.plugin.node.Dir().Pending(); err == nil && pending != nil {
		if pending.Last().UID != "" {
			failure := enrol.StillWaiting(pending, nodestate.ReadState(s.plugin.node.Dir()))
			return failure.Reason.Failure(failure.Hint+"; "+hint, fmt.Errorf("after %s: %w", waited, failure))
		}
		return reason.APIUnreachable.Failure(hint, fmt.Errorf("%s: no answer within %s", pending.Cluster.Server, waited))
	}
	if !s.plugin.node.Dir().Worker().Alive() {
		return reason.WorkerUnavailable.Failure("find who holds it with: fuser -v "+s.plugin.node.Dir().File(cache.LockFile),
			fmt.Errorf("%s: held by another process for %s", s.plugin.node.Dir().File(cache.LockFile), waited))
	}
	// A device may be slow, hang, or be in use. The worker says so when it ends.
	failure := reason.WorkerUnavailable.Failure(hint,
		fmt.Errorf("the worker has not filed a request within %s: provider %s has not made its evidence yet", waited, s.plugin.enroller.Provider.Name()))
	if last := s.plugin.lastWorkerFailure(); last != nil {
		before := reason.AsFailure(last)
		failure.Err = fmt.Errorf("%w; the previous worker failed: %w", failure.Err, before)
		failure.Hint = cmp.Or(before.Hint, hint)
	}
	return failure
}

// awaitWorkerEnd waits until a worker has recorded its success. Otherwise systemd could kill the
// worker before that: it kills the processes that an ExecStartPre leaves running.
func (s supervisor) awaitWorkerEnd() {
	for end := time.Now().Add(recordTimeout); s.plugin.node.Dir().Worker().Alive() && time.Now().Before(end); {
		time.Sleep(leastPause)
	}
}

// ensureCheck starts a worker that checks for announced renewals, without waiting for it. It
// reports whether a worker runs.
func (s supervisor) ensureCheck(status nodestate.Status) bool {
	if s.workerRuns() {
		return true
	}
	_, err := s.startUnlessRunning(status)
	return err == nil
}

// lastWorkerFailure returns why the last worker got no certificate, nil if it did.
func (a *Authenticator) lastWorkerFailure() error {
	state := nodestate.ReadState(a.node.Dir())
	if state.Last == nil || state.Last.Reason == "" {
		return nil
	}
	return reason.Reason(state.Last.Reason).Failure(state.Last.Hint, errors.New(state.Last.Message))
}
