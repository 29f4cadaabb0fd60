// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// The steps of a worker.
const (
	StepLock    Step = "lock"
	StepTidy    Step = "tidy"
	StepPrepare Step = "prepare"
	StepSave    Step = "save"
	StepFile    Step = "file"
	StepNote    Step = "note"
	StepWait    Step = "wait"
	StepCheck   Step = "check"
	StepInstall Step = "install"
	StepRecord  Step = "record"
	StepForget  Step = "forget"
)

// lockWait is how long a worker waits for the lock: the run that started it holds it for an instant.
const lockWait = 5 * time.Second

// maxFilings is how many requests one worker files: one, unless requests are deleted under it.
const maxFilings = 3

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
	if to.own && errors.Is(err, errRejected) {
		// The one case in which the node's own certificate will never do again.
		w.noteRejection(s)
		if to, err = w.bootstrapAccess(); err == nil {
			err = w.enrol(ctx, s, to)
		}
	}
	return err
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
	username, status, err := w.review(ctx, pair)
	if err != nil || status != http.StatusCreated || username != pair.Leaf.Subject.CommonName {
		return false
	}
	adopted := *pair
	adopted.Origin = w.exec.origin()
	w.log.Info("the cluster has a new CA and takes the certificate", "server", adopted.Origin.Server)
	return w.lock.Install(&adopted) == nil
}

// enrol takes up the pending request, or prepares one, and sees it through until it comes to something.
func (w *worker) enrol(ctx context.Context, s standing, to access) error {
	client, err := csr.NewClient(to.config)
	if err != nil {
		return &Failure{Configuration, "check the kubeconfig", err}
	}
	for range maxFilings {
		pending, err := w.resume(s, to)
		if err == nil && pending == nil {
			pending, err = w.prepare(ctx, s, to)
		}
		if err != nil {
			return err
		}
		decision, err := w.fileAndWait(ctx, client, pending, to)
		if err != nil {
			return err
		}
		if decision.Outcome != csr.Deleted {
			return w.conclude(decision, pending)
		}
		w.log.Info("the request is gone, filing another", "request", w.result.Request)
		if err := w.lock.ForgetPending(); err != nil {
			return err
		}
	}
	return &Failure{RequestFailed, "find who deletes CertificateSigningRequests",
		fmt.Errorf("CertificateSigningRequest %s: deleted, and %d before it", w.result.Request, maxFilings-1)}
}

// resume returns the pending request if it still is what is wanted, else nil.
func (w *worker) resume(s standing, to access) (*cache.Pending, error) {
	pending, err := w.dir.Pending()
	if cache.IsUnusable(err) {
		return nil, w.setAside(cache.PendingFile, err)
	}
	if err != nil || pending == nil {
		return nil, err
	}
	key, err := csr.ParseKey(pending.Key)
	wanted := err == nil && pending.Provider == w.provider.Name() && pending.NodeName == s.node &&
		(w.providerID == "" || pending.ProviderID == w.providerID) &&
		pending.SignerName == w.signerName && equal(pending.ExpirationSeconds, w.expirationSeconds) &&
		pending.Cluster.SameCluster(to.cluster)
	// A crash between installing and forgetting leaves a request behind that has been served.
	served := err == nil && s.pair != nil && cache.SameKey(s.pair.Leaf, key.Public())
	if wanted && !served {
		w.log.Info("taking up the pending request", "request", pending.Last().Name)
		return pending, nil
	}
	return nil, w.lock.ForgetPending()
}

func equal(a, b *int32) bool { return a == b || a != nil && b != nil && *a == *b }

// fileAndWait makes sure that the API server has the request, and watches it until something has become of it.
func (w *worker) fileAndWait(ctx context.Context, client *csr.Client, pending *cache.Pending, to access) (csr.Decision, error) {
	request, err := w.file(ctx, client, pending)
	if errors.Is(err, errGone) {
		return csr.Decision{Outcome: csr.Deleted}, nil
	}
	var decision csr.Decision
	if err == nil {
		w.enter(StepWait)
		decision, err = client.Wait(ctx, request)
	}
	var write *cache.WriteError
	switch {
	case err == nil, errors.As(err, &write):
		return decision, err
	case request != nil && ctx.Err() != nil:
		return decision, &Failure{WaitingForSigner, "see: kubectl describe csr " + request.Name,
			fmt.Errorf("CertificateSigningRequest %s: signer %s has not issued a certificate yet", request.Name, pending.SignerName)}
	case to.own && apierrors.IsUnauthorized(err):
		return decision, fmt.Errorf("%w: %w", errRejected, err)
	}
	failure := apiFailure(err, to.credential)
	if failure.Reason == APIRefused && pending.Last().UID == "" {
		w.spent = w.neverCreated(ctx, client, pending)
	}
	return decision, failure
}

// neverCreated reports whether a request that was refused does not exist: it would be refused again as it is, and may be
// forgotten. It could exist all the same, from a post whose answer was lost.
func (w *worker) neverCreated(ctx context.Context, client *csr.Client, pending *cache.Pending) bool {
	last := pending.Last()
	_, err := client.Get(ctx, last.Name, last.Request)
	return apierrors.IsNotFound(err) || errors.Is(err, csr.ErrNotOurs)
}

var (
	// errRejected says that the API server does not know the node's own certificate.
	errRejected = errors.New("the API server rejects the node's certificate")
	// errGone says that the API server had the request once and has it no more.
	errGone = errors.New("the request is gone")
)

// file posts the request, or finds it where it was posted before.
func (w *worker) file(ctx context.Context, client *csr.Client, pending *cache.Pending) (*certificatesv1.CertificateSigningRequest, error) {
	w.enter(StepFile)
	last := pending.Last()
	w.result.Request = last.Name
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return nil, err
	}
	var request *certificatesv1.CertificateSigningRequest
	if last.UID == "" {
		request, err = client.File(ctx, csr.Object(last.Name, pending.SignerName, last.Request, key.Public(), pending.ExpirationSeconds))
	} else {
		request, err = client.Get(ctx, last.Name, last.Request)
	}
	switch {
	case apierrors.IsNotFound(err) && last.UID != "", errors.Is(err, csr.ErrNotOurs):
		return nil, errGone
	case err != nil:
		return nil, err
	case last.UID == string(request.UID):
		return request, nil
	}
	w.enter(StepNote)
	last.UID = string(request.UID)
	w.log.Info("filed", "request", last.Name, "signer", pending.SignerName, "server", pending.Cluster.Server)
	return request, w.lock.SetPending(pending)
}

// conclude takes what has become of the request: a certificate is checked and installed, anything else is a failure. The pending
// request has then served its time.
func (w *worker) conclude(decision csr.Decision, pending *cache.Pending) error {
	w.spent = true
	pair, err := w.check(decision, pending)
	if err != nil {
		return err
	}
	w.enter(StepInstall)
	if err := w.lock.Install(pair); err != nil {
		w.spent = false
		return err
	}
	w.installed = pair
	w.log.Info("installed", "node", pending.NodeName, "notAfter", pair.Leaf.NotAfter)
	return nil
}

// check turns a decision into a certificate that may be installed, or says why not.
func (w *worker) check(decision csr.Decision, pending *cache.Pending) (*cache.Pair, error) {
	w.enter(StepCheck)
	name := pending.Last().Name
	why := func(reason Reason, verb, hint string) error {
		return &Failure{reason, hint, fmt.Errorf("CertificateSigningRequest %s: %s by signer %s: %q: %q", name, verb, pending.SignerName, decision.Reason, decision.Message)}
	}
	switch decision.Outcome {
	case csr.Denied:
		return nil, why(RequestDenied, "denied", "ask whoever runs the approver; a new request follows after a pause")
	case csr.Failed:
		return nil, why(RequestFailed, "failed", "ask whoever runs the signer; a new request follows after a pause")
	case csr.Issued:
		return w.checkIssued(decision.Certificate, pending)
	default:
		return nil, fmt.Errorf("CertificateSigningRequest %s: unknown outcome %d", name, decision.Outcome)
	}
}

// checkIssued accepts a certificate only if its key is ours and it is for this node, for client authentication, and valid now.
func (w *worker) checkIssued(certificate []byte, pending *cache.Pending) (*cache.Pair, error) {
	key, err := csr.ParseKey(pending.Key)
	if err != nil {
		return nil, err
	}
	chain, leaf, err := csr.ParseCertificates(certificate)
	switch {
	case err != nil:
		err = &cache.UnusableError{Problem: err.Error()}
	case !cache.SameKey(leaf, key.Public()):
		err = &cache.UnusableError{Problem: "it is for another key"}
	default:
		err = cache.CheckNodeCertificate(leaf, pending.NodeName, w.now())
	}
	if err != nil {
		return nil, AsFailure(fmt.Errorf("CertificateSigningRequest %s: issued %w", pending.Last().Name, err))
	}
	return &cache.Pair{Chain: chain, Key: pending.Key, Leaf: leaf, Origin: &pending.Cluster}, nil
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
