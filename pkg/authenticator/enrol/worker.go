// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// LockWait bounds how long a worker waits for the lock. The run that started the worker holds the
// lock for a moment.
const LockWait = 5 * time.Second

// Work gets a new certificate if one is needed. It continues where the last worker stopped, and
// records its result. It ends within the Deadline unless the provider hangs. Only one worker
// runs at a time: another gets a Failure with reason WorkerUnavailable.
func (e *Enroller) Work(ctx context.Context) error {
	if e.Node.Invalid != nil {
		return e.Node.Invalid
	}
	ctx, cancel := context.WithTimeout(ctx, e.Deadline)
	defer cancel()
	w := &worker{enroller: e, log: klog.FromContext(ctx)}
	if err := w.takeLock(ctx); err != nil {
		return reason.AsFailure(err)
	}
	defer w.lock.Unlock()
	state, err := w.record(w.work(ctx))
	if w.onlyChecked {
		w.clearWorkerID()
	}
	w.writeMetrics(state)
	return err
}

func (w *worker) takeLock(ctx context.Context) error {
	w.result.Started = w.enroller.Node.Now().UTC()
	w.enter(StepLock)
	ctx, cancel := context.WithTimeout(ctx, LockWait)
	defer cancel()
	lock, err := w.enroller.Node.Dir().WaitLock(ctx)
	if err != nil {
		return err
	}
	w.lock = lock
	if err = w.register(); err != nil {
		lock.Unlock()
	}
	return err
}

// register makes this process the worker. It fails if the last worker left a back-off.
func (w *worker) register() (err error) {
	status := w.enroller.Node.Load()
	if wait := status.UntilStart(); wait > 0 {
		return LastFailure(status.State.Last, wait)
	}
	if w.result.Worker, err = process.Of(os.Getpid()); err != nil {
		return err
	}
	return w.lock.NameWorker(w.result.Worker)
}

// work gets the certificate. If the node's own certificate is refused as a credential, by the API
// server or by an approver, it tries again with the bootstrap credential.
func (w *worker) work(ctx context.Context) error {
	status, err := w.tidy(ctx)
	if err != nil {
		return err
	}
	if status.CheckDue() {
		status = w.checkAnnouncement(ctx, status)
	}
	if wanted, err := w.wanted(status); err != nil || !wanted {
		return err
	}
	if err := w.chooseProvider(ctx); err != nil {
		return err
	}
	to, _, err := status.Access()
	if err != nil {
		return w.explainNoAccess(status, err)
	}
	err = w.enrol(ctx, status, to)
	var denied *credentialDeniedError
	switch {
	case to.Own && errors.Is(err, errRejected):
		w.noteRejection(status)
		status.Rejected = true
		if to, err = w.enroller.Node.Access.BootstrapAccess(); err == nil {
			err = w.enrol(ctx, status, to)
		}
	case to.Own && errors.As(err, &denied):
		err = w.enrolByBootstrap(ctx, status, reason.AsFailure(err))
	}
	if w.installed != nil {
		// If this fails, or the worker is killed before, the next worker or "prepare" does it.
		if deleted, err := w.enroller.deleteBootstrap(ctx, w.lock, w.installed); err != nil || deleted {
			w.log.Info("bootstrap credential", "deleted", deleted, "problem", err)
		}
	}
	return err
}

// enrolByBootstrap enrols with the bootstrap credential after an approver has denied the node's
// own. If there is no bootstrap credential, the Failure says when the node becomes NotReady.
func (w *worker) enrolByBootstrap(ctx context.Context, status nodestate.Status, denied *reason.Failure) error {
	w.result.Wasted = true
	to, err := w.enroller.Node.Access.BootstrapAccess()
	if err != nil {
		return denied.Reason.Failure("write a bootstrap kubeconfig there before the certificate ends, or ask the controller's operator to check the machine's record",
			fmt.Errorf("%w; there is no other credential (%w), so this node becomes NotReady at %s, when its certificate ends", denied, err, status.Pair.Leaf.NotAfter.UTC().Format(time.RFC3339)))
	}
	w.log.Info("an approver denies the node's own certificate as a credential, trying the bootstrap credential", "cause", denied.Error())
	if err := w.lock.ForgetPending(); err != nil { // forget the denied request
		return err
	}
	w.spent = false
	if err := w.enrol(ctx, status, to); err != nil {
		failure := reason.AsFailure(err)
		return failure.Reason.Failure(failure.Hint, fmt.Errorf("%w (before that, with the node's own certificate: %s)", err, text.Line(denied.Error(), reason.MaxMessage/2)))
	}
	return nil
}

// explainNoAccess adds to the error of a missing credential that the certificate has expired, if it
// has by this machine's clock.
func (w *worker) explainNoAccess(status nodestate.Status, err error) error {
	var unusable *cache.UnusableError
	if !errors.As(status.Problem, &unusable) || !unusable.Clock {
		return err
	}
	failure := reason.AsFailure(err)
	return failure.Reason.Failure("check this machine's clock; if it is right, "+failure.Hint, fmt.Errorf("%w; %w", status.Problem, err))
}

// tidy removes leftovers, and sets damaged certificate and state files aside. After a change of the
// cluster's CA it adopts the certificate.
func (w *worker) tidy(ctx context.Context) (nodestate.Status, error) {
	w.enter(StepTidy)
	w.lock.Clean()
	status := w.enroller.Node.Load()
	if status.Permanent {
		return status, status.Problem
	}
	if status.Damaged {
		if err := w.setAside(cache.CurrentFile, status.Problem); err != nil {
			return status, err
		}
	}
	if _, err := w.enroller.Node.Dir().State(); cache.MustBeSetAside(err) {
		if err := w.setAside(cache.StateFile, err); err != nil {
			return status, err
		}
	}
	if status.Foreign && !status.Pair.Exposed && w.adopt(ctx, status.Pair) {
		status = w.enroller.Node.Load()
	}
	return status, nil
}

// wanted reports whether to request a certificate now. It also sets replaced, servedUntil, canWait,
// spent and onlyChecked, which record and saveBeforeInstall use. If a request follows a check,
// wanted clears the check's worker in the state file.
func (w *worker) wanted(status nodestate.Status) (bool, error) {
	if w.replaced = status.Pair; status.Pair != nil {
		w.servedUntil, w.canWait = status.Pair.Leaf.NotAfter, status.CanWait
	}
	if status.Pair != nil && status.Due == "" {
		w.spent = true
		return false, nil
	}
	if status.Waits() { // the pending request stays
		w.onlyChecked = true
		return false, nil
	}
	if w.onlyChecked {
		w.onlyChecked = false
		// From now on the death of this worker counts as a failure.
		w.saveAnnouncement(func(a *cache.Announcement) { a.Worker = process.ID{} })
	}
	if status.NameErr != nil {
		return false, reason.Configuration.Failure("set --node-name", status.NameErr)
	}
	w.log.Info("a certificate is wanted", "node", status.NodeName, "due", status.Due, "problem", status.Problem)
	return true, nil
}

// adopt keeps a certificate that seems to come from another cluster, if the requested cluster
// accepts it for this node. Then the cluster's CA was replaced, and this node never read the bundle
// with both CAs.
func (w *worker) adopt(ctx context.Context, pair *cache.Pair) bool {
	ctx, cancel := context.WithTimeout(ctx, 5*w.enroller.ReviewTimeout)
	defer cancel()
	review, err := w.enroller.Node.Access.Review(ctx, pair)
	if err != nil || !review.Accepts(pair) {
		return false
	}
	adopted := *pair
	adopted.Origin = w.enroller.Node.Access.Asked
	w.log.Info("the cluster has a new CA and accepts the certificate", "server", adopted.Origin.Server)
	return w.lock.Install(&adopted) == nil
}

// noteRejection records for the runs, and for the next worker, that the certificate is rejected.
func (w *worker) noteRejection(status nodestate.Status) {
	n := status.Note
	n.Certificate, n.Rejected, n.Reviewed = status.Pair.Fingerprint(), true, w.enroller.Node.Now().Unix()
	w.enroller.Node.Note.Write(n)
}

// record records the result of the worker, and when the next one may begin. Then it forgets the
// pending request if that is spent. In this order a crash in between loses no result. After
// success, the next worker forgets the request. After a denial, the next worker gets the same
// decision again, and the back-off grows.
func (w *worker) record(err error) (*cache.State, error) {
	w.enter(stepRecord)
	now := w.enroller.Node.Now().UTC()
	w.result.Finished = now
	state := nodestate.ReadState(w.enroller.Node.Dir())
	switch {
	case err != nil:
		failure := reason.AsFailure(err)
		w.result.Reason, w.result.Message, w.result.Hint = string(failure.Reason), text.Line(failure.Error(), reason.MaxMessage), failure.Hint
		retryAfter, _ := csr.IsOverloaded(err)
		AddFailure(state, &w.result, retryAfter, w.servedUntil, now)
		if w.canWait {
			SpreadAfterOutage(state, w.servedUntil, now)
		}
		w.log.Info("failed", "reason", failure.Reason, "cause", w.result.Message, "nextAttempt", state.NextAttempt)
		err = failure
	case w.installed != nil:
		if state.Announcement != nil {
			state.Announcement.Renewal = nil // the renewal selected another certificate
		}
		AddCertificate(state, &w.result, w.installed.Leaf.NotAfter, now)
	case !w.onlyChecked:
		state.Last, state.Failures, state.Refusals = &w.result, 0, 0
	}
	if w.spent {
		state.Waiting = nil
	}
	if stateErr := w.lock.SetState(state); stateErr != nil {
		return state, errors.Join(err, stateErr)
	}
	if !w.spent {
		return state, err
	}
	w.enter(stepForget)
	return state, errors.Join(err, w.lock.ForgetPending())
}
