// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// maxQueued and maxQueuedBytes bound the queue, in lines and bytes.
	maxQueued, maxQueuedBytes = 10_000, 16 << 20
	// Denials may fill one part in deniedShare of the queue. Requesters can cause any number
	// of denials. These must not take the room of approvals while the sink is unavailable.
	deniedShare = 2
	// maxBatch and maxBatchBytes bound one batch, in lines and bytes. A single line may be longer.
	maxBatch, maxBatchBytes = 256, 1 << 20
	// minRetry and maxRetry bound the back-off of a sink that fails.
	minRetry, maxRetry = time.Second, 30 * time.Second
	// flushTimeout bounds how long Close lets the sink write. abortTimeout bounds how long it then
	// waits for the sink to give up. Together with the manager's shutdown they fit into a pod's
	// grace period.
	flushTimeout, abortTimeout = 5 * time.Second, time.Second
)

// Sink writes lines. Only one goroutine uses a Sink.
type Sink interface {
	// Name returns the sink's name in metrics and logs.
	Name() string
	// Write writes lines in order. Each line ends with a line feed. It returns the number of
	// written lines. The caller retries the others later.
	Write(ctx context.Context, lines [][]byte) (int, error)
	Close() error
}

// Config configures the decision records of a controller.
type Config struct {
	// Log gets the decision records. If it is nil, each is in the process log, in the line
	// about its decision.
	Log *Log
	// Archive adds the requests to each decision record.
	Archive bool
	// Controller and Cluster are in each decision record.
	Controller Controller
	Cluster    Cluster
}

// Log passes decision records to a sink, by a queue and a goroutine of its own. So a slow sink
// delays no decision.
type Log struct {
	sink    Sink
	log     logr.Logger
	metrics *telemetry.DecisionLogMetrics
	// wake has a token if a line was added. closing is closed after the last line was added, and
	// ended after the sink was closed.
	wake, closing, ended chan struct{}
	// abort ends a write that Close does not wait for.
	abort context.CancelFunc

	mu    sync.Mutex
	lines [][]byte
	bytes int
	// lost counts the lines that were lost since the queue was last empty after a success.
	lost int
}

// New returns a Log that runs until Close. metrics may be nil.
func New(log logr.Logger, metrics *telemetry.DecisionLogMetrics, sink Sink) *Log {
	ctx, abort := context.WithCancel(context.Background())
	l := &Log{
		sink: sink, log: log.WithValues("sink", sink.Name()), metrics: metrics, abort: abort,
		wake: make(chan struct{}, 1), closing: make(chan struct{}), ended: make(chan struct{}),
	}
	metrics.Start(sink.Name())
	go l.run(ctx)
	return l
}

// Add queues a decision record. It never blocks.
func (l *Log) Add(record *Record) { l.add(record, record.Outcome == Denied) }

// AddRevocation queues a revocation. It never blocks.
func (l *Log) AddRevocation(revocation *Revocation) { l.add(revocation, false) }

// add queues a line, or drops it if the queue is full. Denials may fill only a part of it.
func (l *Log) add(document any, denied bool) {
	line, err := json.Marshal(document)
	if err != nil { // not reached: strings, numbers and requests of the API server always marshal
		l.countLost(1, err)
		return
	}
	line = append([]byte(text.Escape(string(line))), '\n')
	lines, size := maxQueued, maxQueuedBytes
	if denied {
		lines, size = lines/deniedShare, size/deniedShare
	}
	l.mu.Lock()
	full := len(l.lines) >= lines || l.bytes+len(line) > size
	if !full {
		l.lines, l.bytes = append(l.lines, line), l.bytes+len(line)
	}
	l.mu.Unlock()
	if full {
		l.countLost(1, errFull)
		return
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

var errFull = errors.New("the queue is full")

// Close writes the queued lines, as far as the sink accepts them in time. Call it once, after the
// last Add. A nil *Log may be closed, too.
func (l *Log) Close() {
	if l == nil {
		return
	}
	close(l.closing)
	defer l.abort()
	select {
	case <-l.ended:
		return
	case <-time.After(flushTimeout):
	}
	l.abort()
	select {
	case <-l.ended:
	case <-time.After(abortTimeout): // a file system that hangs cannot be aborted
	}
}

// countLost counts lost lines, and logs the first of them.
func (l *Log) countLost(n int, cause error) {
	l.mu.Lock()
	first := l.lost == 0
	l.lost += n
	l.mu.Unlock()
	l.metrics.Lost(l.sink.Name(), n)
	if first {
		l.log.Error(cause, "decision records are lost")
	}
}

// batch returns the first queued lines.
func (l *Log) batch() [][]byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, size := 0, 0
	for n < min(maxBatch, len(l.lines)) && (n == 0 || size+len(l.lines[n]) <= maxBatchBytes) {
		size += len(l.lines[n])
		n++
	}
	return slices.Clone(l.lines[:n])
}

// drop removes the first n lines.
func (l *Log) drop(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines[:n] {
		l.bytes -= len(line)
	}
	l.lines = slices.Delete(l.lines, 0, n)
}

// run writes until the queue is closed and empty, or ctx ends.
func (l *Log) run(ctx context.Context) {
	defer close(l.ended)
	defer func() {
		l.mu.Lock()
		left := len(l.lines)
		l.mu.Unlock()
		if left > 0 {
			l.countLost(left, errors.New("the controller ends"))
		}
		if err := l.sink.Close(); err != nil {
			l.log.Error(err, "decision records: close")
		}
	}()
	delay, problem := minRetry, ""
	for ctx.Err() == nil {
		lines := l.batch()
		if len(lines) == 0 {
			select {
			case <-l.wake:
				continue
			case <-l.closing: // a line may have been added since
				if lines = l.batch(); len(lines) == 0 {
					return
				}
			}
		}
		written, err := l.sink.Write(ctx, lines)
		l.drop(written)
		l.metrics.Written(l.sink.Name(), written)
		if err == nil {
			delay, problem = minRetry, l.recovered(problem)
			continue
		}
		if now := text.Line(err.Error(), telemetry.MaxLogged); now != problem {
			problem = now
			l.log.Error(nil, "decision records cannot be written", "cause", problem)
		}
		l.pause(ctx, delay)
		delay = min(2*delay, maxRetry)
	}
}

// recovered logs that the sink works again, once the queue is empty. Until then it returns the
// problem, so that a slow sink is reported only once.
func (l *Log) recovered(problem string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) > 0 {
		return problem
	}
	if problem != "" || l.lost > 0 {
		l.log.Info("decision records are written again", "lost", l.lost)
	}
	l.lost = 0
	return ""
}

// pause waits before a write is tried again. While the queue is being closed the wait is short.
func (l *Log) pause(ctx context.Context, delay time.Duration) {
	closing := l.closing
	select {
	case <-closing:
		closing, delay = nil, minRetry/2
	default:
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-closing:
	case <-ctx.Done():
	}
}
