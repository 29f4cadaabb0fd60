// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// sink is a Sink made of functions. It remembers the lines that it accepted.
type sink struct {
	name  string
	write func(ctx context.Context, lines [][]byte) (int, error)

	mu     sync.Mutex
	lines  []string
	calls  int
	closed bool
}

func (s *sink) Name() string { return s.name }

func (s *sink) Write(ctx context.Context, lines [][]byte) (int, error) {
	n, err := len(lines), error(nil)
	if s.write != nil {
		n, err = s.write(ctx, lines)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	for _, line := range lines[:n] {
		s.lines = append(s.lines, string(line))
	}
	return n, err
}

func (s *sink) Close() error {
	s.closed = true
	return nil
}

func (s *sink) called() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func (s *sink) took() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.lines...)
}

// journal collects log lines.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) logger() logr.Logger {
	return funcr.New(func(_, args string) {
		j.mu.Lock()
		defer j.mu.Unlock()
		j.lines = append(j.lines, args)
	}, funcr.Options{})
}

// count returns how many lines contain a text.
func (j *journal) count(text string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Count(strings.Join(j.lines, "\n"), text)
}

func record(i int) *Record {
	return &Record{APIVersion: APIVersion, Kind: Kind, ID: fmt.Sprintf("uid-%d/Issued", i), Outcome: Issued}
}

// A sink that hangs does not delay Add, and holds no more than its queue. What it loses is counted,
// and logged once.
func TestSlowSink(t *testing.T) {
	metrics, read := registered(t)
	synctest.Test(t, func(t *testing.T) {
		before := read(t)
		j, release := &journal{}, make(chan struct{})
		slow := &sink{name: "file", write: func(_ context.Context, lines [][]byte) (int, error) { <-release; return len(lines), nil }}
		l := New(j.logger(), metrics, slow)
		const more = 500
		began := time.Now()
		for i := range maxQueued + more {
			l.Add(record(i))
		}
		synctest.Wait()
		if took := time.Since(began); took != 0 {
			t.Errorf("adding took %s", took)
		}
		if n := j.count("decision records are lost"); n != 1 {
			t.Errorf("the loss was logged %d times", n)
		}
		close(release)
		synctest.Wait()
		if n := len(slow.took()); n != maxQueued || slow.called() > maxQueued/maxBatch+2 {
			t.Errorf("it took %d lines in %d calls", n, slow.called())
		}
		if j.count("written again") != 1 || j.count(fmt.Sprintf(`"lost"=%d`, more)) != 1 {
			t.Errorf("%q", j.lines)
		}
		l.Close()
		if !slow.closed {
			t.Error("the sink is not closed")
		}
		after := read(t)
		for series, want := range map[string]float64{"written/file": maxQueued, "lost/file": more} {
			if got := after[series] - before[series]; got != want {
				t.Errorf("%s: %v, want %v", series, got, want)
			}
		}
	})
}

// The queue is also bounded in bytes.
func TestQueueIsBoundedInBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		s := &sink{name: "file", write: func(_ context.Context, lines [][]byte) (int, error) { <-release; return len(lines), nil }}
		l := New(logr.Discard(), nil, s)
		long := record(0)
		long.Message = strings.Repeat("x", 300<<10)
		for range 100 {
			l.Add(long)
		}
		close(release)
		l.Close()
		if n := len(s.took()); n < 50 || n > maxQueuedBytes/(300<<10) {
			t.Errorf("%d lines of 300 KiB were queued", n)
		}
	})
}

// Denials, which any requester can cause, fill half of a queue. The rest is for admissions, and for
// what operators do.
func TestDenialsLeaveRoomForAdmissions(t *testing.T) {
	// Without the rule, each kind fills a queue.
	for name, kind := range map[string]struct{ denials, size int }{"many": {maxQueued, 0}, "long": {100, 300 << 10}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				release := make(chan struct{})
				s := &sink{name: "file", write: func(_ context.Context, lines [][]byte) (int, error) { <-release; return len(lines), nil }}
				l := New(logr.Discard(), nil, s)
				denied := record(0)
				denied.Outcome, denied.Message = Denied, strings.Repeat("x", kind.size)
				for range kind.denials {
					l.Add(denied)
				}
				const admissions = 1000
				done := fullRevocation()
				for i := range admissions {
					l.Add(record(i))
					l.AddRevocation(done)
				}
				close(release)
				l.Close()
				all := strings.Join(s.took(), "")
				if n := strings.Count(all, `"outcome":"Issued"`); n != admissions {
					t.Errorf("%d of %d admissions are recorded", n, admissions)
				}
				if n := strings.Count(all, `"kind":"Revocation"`); n != admissions {
					t.Errorf("%d of %d revocations are recorded", n, admissions)
				}
				if n := strings.Count(all, `"outcome":"Denied"`); n < 25 || n > maxQueued/2 {
					t.Errorf("%d denials are recorded", n)
				}
			})
		})
	}
}

// A failing sink is tried again, at growing intervals, and gets each line once and in order. The
// problem is logged once.
func TestFailingSinkIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, began := &journal{}, time.Now()
		s := &sink{name: "file", write: func(_ context.Context, lines [][]byte) (int, error) {
			if time.Since(began) < 10*time.Minute {
				return 0, errors.New("no space left on device")
			}
			return len(lines), nil
		}}
		l := New(j.logger(), nil, s)
		for i := range 3 {
			l.Add(record(i))
		}
		time.Sleep(9 * time.Minute)
		if n := s.called(); n < 18 || n > 25 { // after 1, 2, 4, 8, 16, 30, 30 ... seconds
			t.Errorf("it was tried %d times in 9 minutes", n)
		}
		if n := j.count("no space left on device"); n != 1 {
			t.Errorf("logged %d times", n)
		}
		time.Sleep(2 * time.Minute)
		l.Close()
		if lines := s.took(); len(lines) != 3 || !strings.Contains(lines[0], "uid-0/") || !strings.Contains(lines[2], "uid-2/") {
			t.Errorf("%q", lines)
		}
		if j.count("written again") != 1 || j.count("are lost") != 0 {
			t.Errorf("%q", j.lines)
		}
	})
}

// Part of a batch was written: the rest follows.
func TestBatchIsWrittenInPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failed, added := false, make(chan struct{})
		s := &sink{name: "file", write: func(_ context.Context, lines [][]byte) (int, error) {
			<-added // so that one of the first two batches has three lines or more
			if len(lines) > 2 && !failed {
				failed = true
				return 2, errors.New("no space left on device")
			}
			return len(lines), nil
		}}
		l := New(logr.Discard(), nil, s)
		for i := range 9 {
			l.Add(record(i))
		}
		close(added)
		l.Close()
		lines := s.took()
		for i := range 9 {
			if len(lines) != 9 || !strings.Contains(lines[i], fmt.Sprintf("uid-%d/", i)) {
				t.Fatalf("%q", lines)
			}
		}
		if !failed {
			t.Error("no batch failed")
		}
	})
}

// Close writes the queued lines, and gives up in time. The sink is one that fails, one that waits
// for the end of its context, and one that hangs.
func TestCloseIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		write    func(hang <-chan struct{}) func(context.Context, [][]byte) (int, error)
		atMost   time.Duration
		lost     bool
		unlogged bool
	}{
		"works": {func(<-chan struct{}) func(context.Context, [][]byte) (int, error) {
			return func(_ context.Context, lines [][]byte) (int, error) { time.Sleep(time.Second); return len(lines), nil }
		}, 3 * time.Second, false, false},
		"fails": {func(<-chan struct{}) func(context.Context, [][]byte) (int, error) {
			return func(context.Context, [][]byte) (int, error) { return 0, errors.New("fails") }
		}, flushTimeout, true, false},
		"waits": {func(<-chan struct{}) func(context.Context, [][]byte) (int, error) {
			return func(ctx context.Context, _ [][]byte) (int, error) { <-ctx.Done(); return 0, ctx.Err() }
		}, flushTimeout, true, false},
		"hangs": {func(hang <-chan struct{}) func(context.Context, [][]byte) (int, error) {
			return func(context.Context, [][]byte) (int, error) { <-hang; return 0, errors.New("hung") }
		}, flushTimeout + abortTimeout, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j, hang := &journal{}, make(chan struct{})
				s := &sink{name: "file", write: c.write(hang)}
				l := New(j.logger(), nil, s)
				for i := range 5 {
					l.Add(record(i))
				}
				began := time.Now()
				l.Close()
				if took := time.Since(began); took > c.atMost {
					t.Errorf("it took %s", took)
				}
				if n := len(s.took()); (n == 0) != c.lost || !c.lost && n != 5 {
					t.Errorf("%d lines were written", n)
				}
				if logged := j.count("are lost") == 1; logged != (c.lost && !c.unlogged) {
					t.Errorf("%q", j.lines)
				}
				close(hang)
			})
		})
	}
}

// Many decisions at once.
func TestAddFromManyGoroutines(t *testing.T) {
	s := &sink{name: "file"}
	l := New(logr.Discard(), nil, s)
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			for k := range 50 {
				l.Add(record(100*i + k))
			}
		})
	}
	all.Wait()
	l.Close()
	if n := len(s.took()); n != 16*50 {
		t.Errorf("%d of %d lines", n, 16*50)
	}
}

var recordMetrics = sync.OnceValues(telemetry.NewDecisionLogMetrics)
