// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

const (
	rotationsSigner = "example.com/rotations"
	// lifetime is that of the certificates. After untilDue each of them is due, and still valid.
	lifetime, untilDue = time.Hour, 55 * time.Minute
	// settled is how many rotations it takes until each file is there.
	settled = 5
	// mostLog is what a log may hold: it is renamed when it has more than 1 MiB, and one worker
	// writes less than the rest.
	mostLog = 1<<20 + 64<<10
	// sweepAfter is how many requests are deleted at once, as kube-controller-manager does in an
	// hour.
	sweepAfter = 100
)

// One directory holds one certificate after the other. The plugin's clock is moved on to when each
// of them is due. Each run prints the certificate that the worker before has got, with its key.
// Nothing is left over: no file, no process, no open file. The files do not grow.
func TestRotations(t *testing.T) {
	count := reliability.Size(t, "rotations", 40, 10_000)
	program, err := shared.clockTestPlugin()
	harness.Must(t, err)
	var clock atomic.Int64
	startSigner(t, rotationsSigner, func() time.Time { return time.Now().Add(time.Duration(clock.Load()) + lifetime) })
	home, name := t.TempDir(), harness.TestNode(t)
	dir, clockFile, bootstrap := cache.At(filepath.Join(home, "certs")), filepath.Join(home, "clock"), filepath.Join(home, "bootstrap.kubeconfig")
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	harness.Must(t, err)
	harness.WriteFile(t, bootstrap, shared.BootstrapKubeconfig(token))
	harness.Must(t, compile.SetClock(clockFile, 0))
	harness.Must(t, os.Mkdir(dir.Path(), 0o700))
	// The log is full soon after the first rotations.
	harness.WriteFile(t, dir.File(cache.LogFile), bytes.Repeat([]byte("filling\n"), (1<<20-8<<10)/8))
	t.Cleanup(func() { harness.KillWorker(t, dir) })
	// So this process can wait for workers, whose parents end before them.
	harness.Must(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) }()

	peak := int64(0)
	run := func() harness.Result {
		cmd := exec.CommandContext(t.Context(), program, "--provider=renewing", "--node-name="+name, "--cert-dir="+dir.Path(),
			"--runtime-dir="+filepath.Join(home, "run"), "--bootstrap-kubeconfig="+bootstrap, "--signer-name="+rotationsSigner, "--provider-id=test://"+name)
		cmd.Env = append(harness.ExecEnv(shared.ControlPlane), compile.ClockVariable+"="+clockFile)
		r := harness.RunPlugin(t, cmd)
		if r.Code != 0 || r.Stderr != "" {
			t.Fatalf("exit code %d: %s", r.Code, r.Stderr)
		}
		peak = max(peak, reap(t, dir))
		return r
	}
	rotate := func() harness.Result {
		harness.Must(t, compile.SetClock(clockFile, time.Duration(clock.Add(int64(untilDue)))))
		return run()
	}
	printed := run().Leaf
	rotate() // it prints the first one, which is due, and its worker gets the second
	began := time.Now()
	var before files
	for i := range count {
		if i == settled {
			before = filesIn(t, dir)
		}
		r := rotate()
		checkCredential(t, name, r, time.Now().Add(time.Duration(clock.Load())))
		if r.Leaf.Equal(printed) {
			t.Errorf("rotation %d: it prints the old certificate again", i)
		}
		if printed = r.Leaf; i%sweepAfter == 0 {
			sweep(t)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	took := time.Since(began)
	after := filesIn(t, dir)
	t.Logf("%d rotations in %s; the directory had %s after %d, and has %s; peak RSS: %d KiB",
		count, took.Round(time.Second), before, settled, after, peak)
	after.mustNotExceed(t, before)
	notInUse(t, dir, program)
}

// reap waits until the worker has ended, and returns the largest resident set in KiB. It is the
// worker's, or the run's if the run started the worker. It is 0 if the run has waited for the
// worker.
func reap(t testing.TB, dir cache.Dir) int64 {
	t.Helper()
	worker := dir.Worker()
	if worker.PID == 0 {
		return 0
	}
	var usage syscall.Rusage
	for {
		_, err := syscall.Wait4(worker.PID, nil, 0, &usage)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil && !errors.Is(err, syscall.ECHILD) {
			t.Fatal(err)
		}
		break
	}
	harness.WorkerEnds(t, dir)
	return usage.Maxrss
}

// sweep deletes the requests that are decided.
func sweep(t testing.TB) {
	t.Helper()
	harness.Must(t, shared.Client().CertificatesV1().CertificateSigningRequests().DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{},
		metav1.ListOptions{FieldSelector: "spec.signerName=" + rotationsSigner}))
}

// files are the sizes of the files in a directory.
type files map[string]int64

func filesIn(t testing.TB, dir cache.Dir) files {
	t.Helper()
	entries, err := os.ReadDir(dir.Path())
	harness.Must(t, err)
	all := files{}
	for _, e := range entries {
		info, err := e.Info()
		harness.Must(t, err)
		all[e.Name()] = info.Size()
	}
	return all
}

// String returns the number of files, and their size with and without the logs.
func (f files) String() string {
	var all, logs int64
	for name, size := range f {
		all += size
		if isLog(name) {
			logs += size
		}
	}
	return fmt.Sprintf("%d files with %d bytes (%d without the logs)", len(f), all, all-logs)
}

func isLog(name string) bool { return strings.HasSuffix(name, ".log") }

// mustNotExceed fails the test if there is a file more, or one that has grown.
func (f files) mustNotExceed(t testing.TB, before files) {
	t.Helper()
	// The digits of a time, and the base64 of a key or a certificate, have no fixed length.
	const noise = 64
	for name, size := range f {
		old, ok := before[name]
		switch {
		case isLog(name) && size <= mostLog:
		case !ok:
			t.Errorf("%s was not there before", name)
		case size > old+noise:
			t.Errorf("%s has grown from %d to %d bytes", name, old, size)
		}
	}
}

// notInUse fails the test if a process runs the program, or has a file of the directory open.
func notInUse(t testing.TB, dir cache.Dir, program string) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	harness.Must(t, err)
	programs, err := filepath.Glob("/proc/[0-9]*/exe")
	harness.Must(t, err)
	for _, link := range slices.Concat(links, programs) {
		if target, err := os.Readlink(link); err == nil && (strings.HasPrefix(target, dir.Path()+"/") || target == program) {
			t.Errorf("%s is still %s", link, target)
		}
	}
}
