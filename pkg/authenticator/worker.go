// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// The steps of a worker.
const (
	StepLock      Step = "lock"
	StepTidy      Step = "tidy"
	StepPrepare   Step = "prepare"
	StepSave      Step = "save"
	StepFile      Step = "file"
	StepNote      Step = "note"
	StepChallenge Step = "challenge"
	StepProve     Step = "prove"
	StepWait      Step = "wait"
	StepCheck     Step = "check"
	StepInstall   Step = "install"
	StepRecord    Step = "record"
	StepForget    Step = "forget"
)

// lockWait is how long a worker waits for the lock: the run that started it holds it for an instant.
const lockWait = 5 * time.Second

// worker is one Work.
type worker struct {
	Options
	lock   *cache.Lock
	log    klog.Logger
	result cache.Result
	since  time.Time
	// heldUntil is the end of the certificate that is served meanwhile, zero if there is none.
	heldUntil time.Time
	// installed is the certificate that was fetched, and spent is set when the pending request has come to something.
	installed *cache.Pair
	spent     bool
	// version is that of the provider's documents to write, and tried those that the controller does not serve.
	version attestation.Version
	tried   []attestation.Version
}

// Work gets a new certificate where one is wanted, carrying on where the last worker stopped, and writes down how it ended. It
// ends within the Options' WorkerDeadline unless the provider hangs. There is one worker at a time: another gets a Failure with
// reason WorkerUnavailable.
func Work(ctx context.Context, o Options) error {
	if o.invalid != nil {
		return o.invalid
	}
	ctx, cancel := context.WithTimeout(ctx, o.WorkerDeadline)
	defer cancel()
	w := &worker{Options: o, log: klog.FromContext(ctx)}
	if err := w.takeLock(ctx); err != nil {
		return AsFailure(err)
	}
	defer w.lock.Unlock()
	return w.record(w.work(ctx))
}

// enter begins a step and ends the one before.
func (w *worker) enter(s Step) {
	now := time.Now()
	if n := len(w.result.Phases); n > 0 {
		w.result.Phases[n-1].Milliseconds = float64(now.Sub(w.since).Microseconds()) / 1000
	}
	w.result.Phases = append(w.result.Phases, cache.Phase{Name: string(s)})
	w.since = now
	w.log.V(1).Info("step", "name", s)
	w.step(s)
}

func (w *worker) takeLock(ctx context.Context) error {
	w.result.Started = w.now().UTC()
	w.enter(StepLock)
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	lock, err := w.dir.WaitLock(ctx)
	if err != nil {
		return err
	}
	w.lock = lock
	if err = w.claim(); err != nil {
		lock.Unlock()
	}
	return err
}

// claim makes this process the worker, unless it has been queueing for the lock behind one that was told to wait.
func (w *worker) claim() (err error) {
	state := w.readState()
	if wait := w.tooEarly(state); wait > 0 {
		return lastFailure(state.Last, wait)
	}
	if w.result.Worker, err = process.Of(os.Getpid()); err != nil {
		return err
	}
	return w.lock.NameWorker(w.result.Worker)
}

// work is the way of a certificate from the wish to the file.
func (w *worker) work(ctx context.Context) error {
	s, wanted, err := w.tidy(ctx)
	if err != nil || !wanted {
		return err
	}
	to, err := w.access(s)
	if err != nil {
		return err
	}
	err = w.enrol(ctx, s, to)
	if to.Own && errors.Is(err, errRejected) {
		// The one case in which the node's own certificate will never do again.
		w.noteRejection(s)
		if to, err = w.bootstrapAccess(); err == nil {
			err = w.enrol(ctx, s, to)
		}
	}
	if w.installed != nil {
		w.discardBootstrap(ctx)
	}
	return err
}

// discardBootstrap deletes the copy of the bootstrap kubeconfig, which has served. If it cannot, or the worker is killed before, the next
// "prepare" or worker does.
func (w *worker) discardBootstrap(ctx context.Context) {
	deleted, err := w.Options.discardBootstrap(ctx, w.lock, w.installed)
	if err != nil || deleted {
		w.log.Info("bootstrap credential", "deleted", deleted, "problem", err)
	}
}

// tidy sets aside what cannot be used, and settles whether a certificate is wanted at all.
func (w *worker) tidy(ctx context.Context) (s standing, wanted bool, err error) {
	w.enter(StepTidy)
	w.lock.Clean()
	s = w.look()
	if s.final {
		return s, false, s.lack
	}
	if s.aside {
		if err := w.setAside(cache.CurrentFile, s.lack); err != nil {
			return s, false, err
		}
	}
	if _, err := w.dir.State(); cache.IsUnusable(err) {
		if err := w.setAside(cache.StateFile, err); err != nil {
			return s, false, err
		}
	}
	if s.foreign && !s.pair.Exposed && w.adopt(ctx, s.pair) {
		s = w.look()
	}
	if s.pair != nil {
		w.heldUntil = s.pair.Leaf.NotAfter
	}
	if s.pair == nil || s.due != "" {
		if s.nameErr != nil {
			return s, false, &Failure{Configuration, "set --node-name", s.nameErr}
		}
		w.log.Info("a certificate is wanted", "node", s.node, "due", s.due, "lack", s.lack)
		return s, true, nil
	}
	w.spent = true
	return s, false, nil
}

func (w *worker) setAside(name string, why error) error {
	aside, err := w.dir.SetAside(name, w.now())
	if err == nil {
		w.log.Info("set aside", "file", aside, "why", why.Error())
	}
	return err
}

// adopt keeps a certificate that seems to be of another cluster if the cluster asked for takes it for this node: its CA was replaced, and
// this node has not heard of the bundle with both.
func (w *worker) adopt(ctx context.Context, pair *cache.Pair) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*reviewTimeout)
	defer cancel()
	review, err := w.review(ctx, pair)
	if err != nil || !accepts(review, pair) {
		return false
	}
	adopted := *pair
	adopted.Origin = w.exec.origin()
	w.log.Info("the cluster has a new CA and takes the certificate", "server", adopted.Origin.Server)
	return w.lock.Install(&adopted) == nil
}

// noteRejection tells the runs, and the next worker, that the certificate is rejected.
func (w *worker) noteRejection(s standing) {
	n := s.note
	n.Certificate, n.Rejected, n.Reviewed = s.pair.Fingerprint(), true, w.now().Unix()
	w.note.write(n)
}

// record writes down how the worker ended, and when the next one may begin; then the pending request is forgotten if it has
// served its time. In this order a crash in between costs no back-off: the request is found decided once more.
func (w *worker) record(err error) error {
	w.enter(StepRecord)
	now := w.now().UTC()
	w.result.Finished = now
	state := w.readState()
	switch {
	case err != nil:
		failure := AsFailure(err)
		w.result.Reason, w.result.Message, w.result.Hint = string(failure.Reason), text.Line(failure.Error(), maxMessage), failure.Hint
		failed(state, &w.result, w.heldUntil, now)
		w.log.Info("failed", "reason", failure.Reason, "cause", w.result.Message, "nextAttempt", state.NextAttempt)
		err = failure
	case w.installed != nil:
		issued(state, &w.result, w.installed.Leaf.NotAfter, now)
	default:
		state.Last, state.Failures = &w.result, 0
	}
	if stateErr := w.lock.SetState(state); stateErr != nil {
		return errors.Join(err, stateErr)
	}
	if !w.spent {
		return err
	}
	w.enter(StepForget)
	return errors.Join(err, w.lock.ForgetPending())
}
