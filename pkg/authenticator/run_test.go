// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// printed reads what a run printed.
func printed(t testing.TB, answer *Answer) clientauthentication.ExecCredentialStatus {
	t.Helper()
	var credential clientauthentication.ExecCredential
	if err := json.Unmarshal(answer.Credential, &credential); err != nil || credential.Status == nil {
		t.Fatalf("%q: %v", answer.Credential, err)
	}
	return *credential.Status
}

// workerThat pretends that a detached worker, which is this very process, does something. The test
// ends after it.
func workerThat(t testing.TB, does func()) func() (process.ID, error) {
	t.Helper()
	self, err := process.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	return func() (process.ID, error) {
		running.Go(does)
		return self, nil
	}
}

// A valid certificate: nothing but printing it, and the same bytes each time, so that no connection
// is closed.
func TestRunPrintsAValidCertificateAndDoesNothingElse(t *testing.T) {
	a := testAuthenticator(t)
	pair := plugintest.NewPair(t, nil)
	plugintest.InstallPair(t, a.node.Dir(), pair)
	before := plugintest.Snapshot(t, a.node.Dir().Path())
	first, err := a.Run(t.Context())
	if err != nil || len(first.Remarks) > 0 {
		t.Fatalf("%v, %v", first.Remarks, err)
	}
	now := plugintest.Noon.Add(4*time.Hour + 3*time.Millisecond)
	a.node.Now = func() time.Time { return now }
	second, err := a.Run(t.Context())
	if err != nil || !bytes.Equal(first.Credential, second.Credential) {
		t.Errorf("hours later it prints something else: %v", err)
	}
	if after := plugintest.Snapshot(t, a.node.Dir().Path()); after != before {
		t.Errorf("it left something behind:\n%s\nnow\n%s", before, after)
	}
	status := printed(t, first)
	if status.ClientCertificateData != string(pair.Chain) || !status.ExpirationTimestamp.Time.Equal(nodestate.RenewAt(pair.Leaf).Truncate(time.Second)) {
		t.Errorf("expires %v, want the renewal point", status.ExpirationTimestamp)
	}
}

func TestRunNotesWhatItPrintedForAParentOnly(t *testing.T) {
	a := testAuthenticator(t)
	pair := plugintest.NewPair(t, nil)
	plugintest.InstallPair(t, a.node.Dir(), pair)
	if _, err := a.Run(t.Context()); err != nil || a.node.Note.Read() != (nodestate.Note{}) {
		t.Errorf("a person's call was noted: %+v, %v", a.node.Note.Read(), err)
	}
	a.parent = plugintest.Asker
	answer, err := a.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: printed(t, answer).ExpirationTimestamp.Unix()}
	if got := a.node.Note.Read(); got != want {
		t.Errorf("note %+v, want %+v", got, want)
	}
}

// A renewal that comes to nothing costs the node nothing: no request waits for it.
func TestRunPrintsTheOldCertificateWhileARenewalFails(t *testing.T) {
	t.Parallel()
	failure := &cache.State{Failures: 1, NextAttempt: plugintest.Noon.Add(time.Minute), Last: &cache.Result{Reason: string(reason.RequestDenied), Message: "denied", Hint: "ask", Finished: plugintest.Noon}}
	for name, c := range map[string]struct {
		prepare func(t *testing.T, a *Authenticator)
		remark  string // empty: nothing has failed
	}{
		"no worker can be started": {func(*testing.T, *Authenticator) {}, "no worker was to be started"},
		"the worker hangs":         {func(t *testing.T, a *Authenticator) { a.startWorker = workerThat(t, func() {}) }, ""},
		"the worker hangs, and the last one was denied": {func(t *testing.T, a *Authenticator) {
			a.startWorker = workerThat(t, func() {})
			past := *failure
			past.NextAttempt = plugintest.Noon
			plugintest.WriteState(t, a.node.Dir(), &past)
		}, "denied"},
		"the last one was denied a moment ago": {func(t *testing.T, a *Authenticator) { plugintest.WriteState(t, a.node.Dir(), failure) }, "denied (next attempt in 1m0s)"},
		"another process holds the lock": {func(t *testing.T, a *Authenticator) {
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(lock.Unlock)
		}, "held by another process"},
		"a directory is in the lock's place": {func(t *testing.T, a *Authenticator) {
			if err := os.Mkdir(a.node.Dir().File(cache.LockFile), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "no worker was to be started"},
	} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t)
			pair := plugintest.NewPair(t, plugintest.DueSoon)
			plugintest.InstallPair(t, a.node.Dir(), pair)
			c.prepare(t, a)
			began := time.Now()
			answer, err := a.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > a.renewalWait/2 {
				t.Errorf("it waited for %v", took)
			}
			status := printed(t, answer)
			if status.ClientCertificateData != string(pair.Chain) {
				t.Error("another certificate was printed")
			}
			if until := status.ExpirationTimestamp.Sub(plugintest.Noon); until <= 0 || until > 31*time.Second {
				t.Errorf("client-go asks again after %v", until)
			}
			if remarks := fmt.Sprint(answer.Remarks); c.remark == "" && len(answer.Remarks) > 0 || c.remark != "" && (len(answer.Remarks) != 1 || !strings.Contains(remarks, "nearly over") || !strings.Contains(remarks, c.remark)) {
				t.Errorf("remarks %q", answer.Remarks)
			}
		})
	}
}

// Another run holds the lock while it starts the worker. That is no failure.
func TestRunBesideOneThatStartsTheWorker(t *testing.T) {
	a := testAuthenticator(t)
	plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, plugintest.DueSoon))
	self, err := process.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	lock, err := a.node.Dir().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	time.AfterFunc(leastPause, func() {
		if err := lock.NameWorker(self); err != nil {
			t.Error(err)
		}
	})
	if answer, err := a.Run(t.Context()); err != nil || len(answer.Remarks) > 0 || len(answer.Credential) == 0 {
		t.Errorf("%v, %q", err, answer.Remarks)
	}
}

// workerThatInstalls is one that takes a while to get a certificate.
func workerThatInstalls(t *testing.T, a *Authenticator, fresh *cache.Pair, after time.Duration) func() (process.ID, error) {
	t.Helper()
	return workerThat(t, func() {
		time.Sleep(after)
		lock, err := a.node.Dir().WaitLock(t.Context())
		if err == nil {
			err = lock.Install(fresh)
			lock.Unlock()
		}
		if err != nil {
			t.Error(err)
		}
	})
}

func TestRunWaitsOnlyIfTheCertificateIsNoUse(t *testing.T) {
	t.Parallel()
	endsIn := func(left time.Duration) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(left) }
	}
	const worker = 50 * time.Millisecond // is how long it takes
	for name, c := range map[string]struct {
		old   func(*x509.Certificate) // nil: there is none
		waits bool
	}{
		"none":                        {nil, true},
		"one that ended":              {endsIn(-time.Minute), true},
		"one that ends now":           {endsIn(lastMoments), true},
		"one that ends after a while": {endsIn(lastMoments + time.Second), false},
		"one that is due":             {plugintest.DueSoon, false},
		"one that others could read":  {func(*x509.Certificate) {}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t)
			var old *cache.Pair
			if c.old != nil {
				old = plugintest.NewPair(t, c.old)
				plugintest.InstallPair(t, a.node.Dir(), old)
			}
			if name == "one that others could read" {
				if err := os.Chmod(a.node.Dir().File(cache.CurrentFile), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			fresh := plugintest.NewPair(t, nil)
			a.startWorker = workerThatInstalls(t, a, fresh, worker)
			answer, err := a.Run(t.Context())
			if err != nil || len(answer.Remarks) > 0 {
				t.Fatalf("%v, %v", answer.Remarks, err)
			}
			want := fresh
			if !c.waits {
				want = old
			}
			status := printed(t, answer)
			if status.ClientCertificateData != string(want.Chain) {
				t.Error("another certificate was printed")
			}
			if until := status.ExpirationTimestamp.Sub(plugintest.Noon); !c.waits && until > 31*time.Second {
				t.Errorf("client-go asks for the new one after %v", until)
			}
			// the worker ends before its directory
			for a.node.Dir().Stamp(cache.CurrentFile) == (cache.Stamp{}) || a.node.Load().Pair == nil || a.node.Load().Due != "" {
				time.Sleep(leastPause)
			}
		})
	}
}

// A run that waits reads metadata, and not the files: a node may have many runs that wait.
func TestRunThatWaitsReadsLittle(t *testing.T) {
	t.Parallel()
	a := testAuthenticator(t)
	a.waitTimeout = statusInterval + statusInterval/2
	a.startWorker = workerThat(t, func() {})
	reads := 0
	a.node.Now = func() time.Time { reads++; return plugintest.Noon }
	_, err := a.Run(t.Context())
	plugintest.MustFail(t, err, reason.WorkerUnavailable)
	if reads > 20 {
		t.Errorf("the clock was read %d times in %v, so the status was, too", reads, a.waitTimeout)
	}
}

// The worker's reason is the run's, at once: nobody waits for a timeout when it is settled that
// there will be nothing.
func TestRunReturnsTheWorkersFailure(t *testing.T) {
	a := testAuthenticator(t)
	a.startWorker = workerThat(t, func() {
		lock, err := a.node.Dir().WaitLock(t.Context())
		if err == nil {
			err = lock.SetState(&cache.State{Failures: 1, Last: &cache.Result{Reason: string(reason.RequestDenied), Message: "denied by x", Hint: "ask x", Finished: plugintest.Noon}, NextAttempt: plugintest.Noon.Add(30 * time.Second)})
			err = errors.Join(err, lock.NameWorker(process.ID{})) // it has ended
			lock.Unlock()
		}
		if err != nil {
			t.Error(err)
		}
	})
	began := time.Now()
	answer, err := a.Run(t.Context())
	failure := plugintest.WantFailure(t, err, reason.RequestDenied)
	if len(answer.Credential) > 0 || failure.Hint != "ask x" || !strings.Contains(failure.Error(), "denied by x") {
		t.Errorf("%q, hint %q, %q", failure, failure.Hint, answer.Credential)
	}
	if took := time.Since(began); took > a.waitTimeout {
		t.Errorf("it took %v", took)
	}
}

// Two kubelets with one certificate directory replace each other's certificate. The one without a
// certificate says whose is there.
func TestRunNamesTheOtherNode(t *testing.T) {
	a := testAuthenticator(t)
	a.node.Name = "a"
	plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, plugintest.OfNode("b")))
	a.startWorker = func() (process.ID, error) { return process.ID{}, errors.New("no worker") }
	_, err := a.Run(t.Context())
	failure := plugintest.WantFailure(t, err, reason.WorkerUnavailable)
	for _, text := range []string{`it is for node "b", but this is node "a"`, "no worker", "--cert-dir"} {
		if !strings.Contains(failure.Error()+failure.Hint, text) {
			t.Errorf("it does not say %q: %q, hint %q", text, failure, failure.Hint)
		}
	}
}

// A worker that cannot be started has a hint for the limit that stopped it.
func TestWorkerThatCannotBeStarted(t *testing.T) {
	for number, says := range map[syscall.Errno]string{syscall.EAGAIN: "TasksMax=", syscall.EMFILE: "LimitNOFILE=", syscall.ENOMEM: "free memory"} {
		a := testAuthenticator(t)
		a.startWorker = func() (process.ID, error) {
			return process.ID{}, &os.PathError{Op: "fork/exec", Path: "/usr/bin/x", Err: number}
		}
		_, err := a.Run(t.Context())
		if failure := plugintest.WantFailure(t, err, reason.WorkerUnavailable); !strings.Contains(failure.Hint, says) {
			t.Errorf("%v: hint %q", number, failure.Hint)
		}
	}
}

// A worker that dies without a word is followed at once by one other; then there is a back-off.
func TestWorkersThatDieAreBackedOffFrom(t *testing.T) {
	a := testAuthenticator(t)
	var starts atomic.Int32
	a.startWorker = func() (process.ID, error) {
		return process.ID{PID: 1 << 30, Start: uint64(starts.Add(1))}, nil
	}
	for range 5 {
		_, err := a.Run(t.Context())
		_ = plugintest.WantFailure(t, err, reason.WorkerUnavailable)
	}
	if n := starts.Load(); n != 2 {
		t.Errorf("%d were started", n)
	}
	a.node.Now = func() time.Time { return plugintest.Noon.Add(3 * time.Second) }
	_, err := a.Run(t.Context())
	_ = plugintest.WantFailure(t, err, reason.WorkerUnavailable)
	if n := starts.Load(); n != 3 {
		t.Errorf("%d were started after the back-off", n)
	}
}

// What the last worker wrote by a clock that was ahead does not keep the next from starting.
func TestResultOfTheFutureIsNoReasonToWait(t *testing.T) {
	for name, ahead := range map[string]time.Duration{"minutes": 15 * time.Minute, "hours": 8 * time.Hour, "years": 5 * 365 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t)
			future := plugintest.Noon.Add(ahead)
			last := &cache.Result{Worker: process.ID{PID: 1 << 30, Start: 1}, Reason: string(reason.APIUnreachable), Message: "x", Started: future, Finished: future}
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Failures: 5, Last: last, NextAttempt: future.Add(15 * time.Second)})
			started := false
			a.startWorker = func() (process.ID, error) {
				started = true
				return process.ID{}, errors.New("started")
			}
			_, _ = a.Run(t.Context())
			if !started {
				t.Error("no worker was started")
			}
		})
	}
}

// However many requests the kubelet makes at once, there is one worker, and with it one
// CertificateSigningRequest.
func TestManyRunsStartOneWorker(t *testing.T) {
	t.Parallel()
	a := testAuthenticator(t)
	fresh := plugintest.NewPair(t, nil)
	var starts atomic.Int32
	works := workerThatInstalls(t, a, fresh, 100*time.Millisecond)
	a.startWorker = func() (process.ID, error) {
		starts.Add(1)
		return works()
	}
	var wait sync.WaitGroup
	for range 30 {
		wait.Go(func() {
			answer, err := a.Run(t.Context())
			if err != nil || !bytes.Contains(answer.Credential, []byte("BEGIN CERTIFICATE")) {
				t.Errorf("%v", err)
			}
		})
	}
	wait.Wait()
	if n := starts.Load(); n != 1 {
		t.Errorf("%d workers were started", n)
	}
}

// Between two runs that both see no worker, the lock decides: the run that gets it second finds the
// first one's worker.
func TestRunLooksAgainUnderTheLock(t *testing.T) {
	for name, since := range map[string]func(lock *cache.Lock) error{
		"a worker was started": func(lock *cache.Lock) error {
			self, err := process.Of(os.Getpid())
			return errors.Join(err, lock.NameWorker(self))
		},
		"a certificate has come":   func(lock *cache.Lock) error { return lock.Install(plugintest.NewPair(t, nil)) },
		"another run holds it yet": nil,
	} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t) // its StartWorker fails
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Unlock()
			if since != nil {
				if err := since(lock); err != nil {
					t.Fatal(err)
				}
				lock.Unlock()
			}
			if started, err := a.supervisor().startUnlessRunning(nodestate.Status{}); started || err != nil && !errors.Is(err, cache.ErrLocked) {
				t.Errorf("started %v, %v", started, err)
			}
		})
	}
}

// A configuration that is wrong is said, and the node lives on.
func TestRunUnderAWrongConfiguration(t *testing.T) {
	for _, renews := range []bool{true, false} {
		a := testAuthenticator(t)
		if !renews {
			a.use(nil) // there is none under a configuration that names none
		}
		wrong := reason.Configuration.Failure("hint", errors.New("certDir: wrong"))
		a.node.Invalid = wrong
		if answer, err := a.Run(t.Context()); !errors.Is(err, wrong) || len(answer.Credential) > 0 {
			t.Errorf("without a certificate: %q, %v", answer.Credential, err)
		}
		pair := plugintest.NewPair(t, plugintest.DueSoon)
		plugintest.InstallPair(t, a.node.Dir(), pair)
		before := plugintest.Snapshot(t, a.node.Dir().Path())
		answer, err := a.Run(t.Context())
		if err != nil || len(answer.Remarks) != 1 || !errors.Is(answer.Remarks[0], wrong) || printed(t, answer).ClientCertificateData != string(pair.Chain) {
			t.Errorf("with a certificate: %v, %v", answer.Remarks, err)
		}
		if after := plugintest.Snapshot(t, a.node.Dir().Path()); after != before {
			t.Errorf("something was written:\n%s", after)
		}
	}
}

// A certificate that the API server rejects is better than none: the API server may be the one that
// is wrong.
func TestRunPrintsARejectedCertificate(t *testing.T) {
	a := testAuthenticator(t)
	a.parent = plugintest.Asker
	pair := plugintest.NewPair(t, nil)
	plugintest.InstallPair(t, a.node.Dir(), pair)
	rejected := nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Unix() - 1, Reviewed: plugintest.Noon.Unix() - 1, Rejected: true}
	a.node.Note.Write(rejected)
	answer, err := a.Run(t.Context())
	if err != nil || len(answer.Remarks) != 1 || printed(t, answer).ClientCertificateData != string(pair.Chain) {
		t.Fatalf("%v, %v", answer.Remarks, err)
	}
	got := a.node.Note.Read()
	if !got.Rejected || got.Reviewed != rejected.Reviewed || got.Until <= plugintest.Noon.Unix() {
		t.Errorf("what is known of it got lost: %+v", got)
	}
}

// Near its end a certificate that is not renewed has no steady time left, and must not make
// client-go ask for every request.
func TestRunNeverGivesATimeThatIsPast(t *testing.T) {
	for _, left := range []time.Duration{time.Hour, time.Minute, 59 * time.Second, 2 * time.Second, 100 * time.Millisecond} {
		a := testAuthenticator(t)
		a.use(plugintest.Provider{})
		plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(24 * time.Hour) }))
		a.node.Now = func() time.Time { return plugintest.Noon.Add(24*time.Hour - left) }
		answer, err := a.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if at := printed(t, answer).ExpirationTimestamp; !at.After(a.node.Now()) {
			t.Errorf("with %v left: %v from now", left, at.Sub(a.node.Now()))
		}
	}
}

// A rejection is the certificate's: the next one starts without it, and what a worker finds out
// meanwhile is not written over.
func TestRunKeepsTheRejectionWithItsCertificate(t *testing.T) {
	pair, other := plugintest.NewPair(t, nil), plugintest.NewPair(t, nil)
	for name, c := range map[string]struct {
		read, latest nodestate.Note
		want         bool
	}{
		"rejected before":       {nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true}, nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true}, true},
		"another was rejected":  {nodestate.Note{Certificate: other.Fingerprint(), Rejected: true}, nodestate.Note{Certificate: other.Fingerprint(), Rejected: true}, false},
		"rejected meanwhile":    {nodestate.Note{}, nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true}, true},
		"another was meanwhile": {nodestate.Note{}, nodestate.Note{Certificate: other.Fingerprint(), Rejected: true}, false},
	} {
		a := testAuthenticator(t)
		a.parent = plugintest.Asker
		a.node.Note.Write(c.latest)
		a.noteAnswer(nodestate.Status{Pair: pair, Note: c.read}, plugintest.Noon.Add(time.Hour))
		want := nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Add(time.Hour).Unix(), Rejected: c.want}
		if got := a.node.Note.Read(); got != want {
			t.Errorf("%s: %+v, want %+v", name, got, want)
		}
	}
}

// A worker that has long overrun its deadline keeps all others from starting, so it is ended; a
// younger one is left alone.
func TestRunEndsAWorkerThatIsStuck(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		deadline time.Duration
		killed   bool
	}{"stuck": {-time.Hour, true}, "at work": {time.Hour, false}} {
		t.Run(name, func(t *testing.T) {
			stuck := exec.Command("sleep", "1000")
			if err := stuck.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = stuck.Process.Kill() }()
			id, err := process.Of(stuck.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			a := testAuthenticator(t)
			a.enroller.Deadline = c.deadline
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			err = lock.NameWorker(id)
			lock.Unlock()
			if err != nil || !a.supervisor().workerRuns() {
				t.Fatalf("it does not count as alive: %v", err)
			}
			ended := make(chan struct{})
			go func() { _ = stuck.Wait(); close(ended) }()
			enough := 200 * time.Millisecond
			if c.killed {
				enough = 10 * time.Second
			}
			select {
			case <-ended:
				if !c.killed {
					t.Error("it was killed")
				}
			case <-time.After(enough):
				if c.killed {
					t.Error("it lives on")
				}
			}
		})
	}
}

func TestRunRefusesAForeignDirectoryAtOnce(t *testing.T) {
	a := testAuthenticator(t)
	a.startWorker = func() (process.ID, error) {
		t.Error("a worker was started for a directory that it cannot use")
		return process.ID{}, errors.New("no")
	}
	plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
	if err := os.Chmod(a.node.Dir().Path(), 0o777); err != nil {
		t.Fatal(err)
	}
	answer, err := a.Run(t.Context())
	if failure := plugintest.WantFailure(t, err, reason.DirectoryRefused); failure.Hint == "" || len(answer.Credential) > 0 {
		t.Errorf("%v", failure)
	}
	if left, err := filepath.Glob(filepath.Dir(a.node.Dir().Path()) + "/*"); err != nil || len(left) != 1 {
		t.Errorf("it was touched: %q, %v", left, err)
	}
}

// The kubelet waits for a run. It leaves the metrics to the worker.
func TestRunWritesNoMetrics(t *testing.T) {
	for name, change := range map[string]func(*testing.T, *Authenticator){
		"nothing due": func(t *testing.T, a *Authenticator) {
			plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
		},
		"due": func(t *testing.T, a *Authenticator) {
			plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, plugintest.DueSoon))
		},
		"none there": func(*testing.T, *Authenticator) {},
		"a worker that died": func(t *testing.T, a *Authenticator) {
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Unlock()
			if err := lock.NameWorker(process.ID{PID: 1 << 30, Start: 1}); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := testAuthenticator(t)
			a.enroller.MetricsTextfile = filepath.Join(t.TempDir(), "x.prom")
			change(t, a)
			_, _ = a.Run(t.Context()) // no worker can be started
			if entries, err := os.ReadDir(filepath.Dir(a.enroller.MetricsTextfile)); err != nil || len(entries) > 0 {
				t.Errorf("%v, %v", entries, err)
			}
		})
	}
}
