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
	// maxQueued and maxQueuedBytes bound the queue of one sink, in lines and bytes.
	maxQueued, maxQueuedBytes = 10_000, 16 << 20
	// Denials may fill one part in deniedShare of a queue. Requesters can cause any number of
	// denials. These must not take the room of approvals while a sink is unavailable.
	deniedShare = 2
	// maxBatch and maxBatchBytes bound one batch, in lines and bytes. A single line may be longer.
	maxBatch, maxBatchBytes = 256, 1 << 20
	// minRetry and maxRetry bound the back-off of a sink that fails.
	minRetry, maxRetry = time.Second, 30 * time.Second
	// flushTimeout bounds how long Close lets the sinks write. abortTimeout bounds how long it then
	// waits for them to give up. Together with the manager's shutdown they fit into a pod's grace
	// period.
	flushTimeout, abortTimeout = 5 * time.Second, time.Second
)

// Sink writes lines. Only one goroutine uses a Sink.
type Sink interface {
	// Name returns the sink's name in metrics and logs.
	Name() string
	// Write writes lines in order. Each line ends with a line feed. It returns the number of
	// written lines. The caller retries the others later, unless the error is a *RefusedError.
	Write(ctx context.Context, lines [][]byte) (int, error)
	Close() error
}

// RefusedError says that a sink will never accept these lines.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }
func (e *RefusedError) Unwrap() error { return e.Err }

// Config configures how a controller records its decisions.
type Config struct {
	// Log gets the records. If it is nil, each record is in the process log, in the line about its
	// decision.
	Log *Log
	// Archive adds the requests to each record.
	Archive bool
	// Controller and Cluster are in each record.
	Controller Controller
	Cluster    Cluster
}

// Log passes records to sinks. Each sink has a queue and a goroutine of its own, so a slow sink
// delays neither decisions nor other sinks.
type Log struct {
	queues  []*queue
	running sync.WaitGroup
	// abort ends the writes that Close does not wait for.
	abort context.CancelFunc
}

// New returns a Log that runs until Close. metrics may be nil.
func New(log logr.Logger, metrics *telemetry.RecordMetrics, sinks ...Sink) *Log {
	ctx, abort := context.WithCancel(context.Background())
	l := &Log{abort: abort}
	for _, sink := range sinks {
		q := &queue{sink: sink, log: log.WithValues("sink", sink.Name()), metrics: metrics, wake: make(chan struct{}, 1), closing: make(chan struct{})}
		metrics.Start(sink.Name())
		l.queues = append(l.queues, q)
		l.running.Go(func() { q.run(ctx) })
	}
	return l
}

// Add queues a record for all sinks. It never blocks.
func (l *Log) Add(record *Record) { l.add(record, record.Outcome == Denied) }

// AddRevocation queues a revocation for all sinks. It never blocks.
func (l *Log) AddRevocation(revocation *Revocation) { l.add(revocation, false) }

func (l *Log) add(document any, denied bool) {
	line, err := json.Marshal(document)
	if err != nil { // not reached: strings, numbers and requests of the API server always marshal
		for _, q := range l.queues {
			q.lose(1, err)
		}
		return
	}
	line = append([]byte(text.Escape(string(line))), '\n')
	for _, q := range l.queues {
		q.add(line, denied)
	}
}

// Close writes the queued lines, as far as the sinks accept them in time. Call it once, after the
// last Add. A nil *Log may be closed, too.
func (l *Log) Close() {
	if l == nil {
		return
	}
	for _, q := range l.queues {
		close(q.closing)
	}
	ended := make(chan struct{})
	go func() {
		l.running.Wait()
		close(ended)
	}()
	defer l.abort()
	select {
	case <-ended:
		return
	case <-time.After(flushTimeout):
	}
	l.abort()
	select {
	case <-ended:
	case <-time.After(abortTimeout): // a file system that hangs cannot be aborted
	}
}

// queue has the lines that wait for one sink.
type queue struct {
	sink    Sink
	log     logr.Logger
	metrics *telemetry.RecordMetrics
	// wake has a token if a line was added. closing is closed after the last line was added.
	wake, closing chan struct{}

	mu    sync.Mutex
	lines [][]byte
	bytes int
	// lost counts the lines that were lost since the queue was last empty after a success.
	lost int
}

// add queues a line, or drops it if the queue is full. Denials may fill only a part of it.
func (q *queue) add(line []byte, denied bool) {
	lines, size := maxQueued, maxQueuedBytes
	if denied {
		lines, size = lines/deniedShare, size/deniedShare
	}
	q.mu.Lock()
	full := len(q.lines) >= lines || q.bytes+len(line) > size
	if !full {
		q.lines, q.bytes = append(q.lines, line), q.bytes+len(line)
	}
	q.mu.Unlock()
	if full {
		q.lose(1, errFull)
		return
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

var errFull = errors.New("the queue is full")

// lose counts lost lines, and logs the first of them.
func (q *queue) lose(n int, cause error) {
	q.mu.Lock()
	first := q.lost == 0
	q.lost += n
	q.mu.Unlock()
	q.metrics.Lost(q.sink.Name(), n)
	if first {
		q.log.Error(cause, "decision records are lost")
	}
}

// batch returns the first queued lines, at most limit of them.
func (q *queue) batch(limit int) [][]byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	n, size := 0, 0
	for n < min(limit, len(q.lines)) && (n == 0 || size+len(q.lines[n]) <= maxBatchBytes) {
		size += len(q.lines[n])
		n++
	}
	return slices.Clone(q.lines[:n])
}

// drop removes the first n lines.
func (q *queue) drop(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, line := range q.lines[:n] {
		q.bytes -= len(line)
	}
	q.lines = slices.Delete(q.lines, 0, n)
}

// run writes until the queue is closed and empty, or ctx ends.
func (q *queue) run(ctx context.Context) {
	defer func() {
		if left := len(q.batch(maxQueued)); left > 0 {
			q.lose(left, errors.New("the controller ends"))
		}
		if err := q.sink.Close(); err != nil {
			q.log.Error(err, "decision records: close")
		}
	}()
	limit, delay, problem := maxBatch, minRetry, ""
	for ctx.Err() == nil {
		lines := q.batch(limit)
		if len(lines) == 0 {
			select {
			case <-q.wake:
				continue
			case <-q.closing: // a line may have been added since
				if lines = q.batch(limit); len(lines) == 0 {
					return
				}
			}
		}
		written, err := q.sink.Write(ctx, lines)
		q.drop(written)
		q.metrics.Written(q.sink.Name(), written)
		if err == nil {
			limit, delay, problem = min(2*limit, maxBatch), minRetry, q.recovered(problem)
			continue
		}
		if now := text.Line(err.Error(), telemetry.MaxLogged); now != problem {
			problem = now
			q.log.Error(nil, "decision records cannot be written", "cause", problem)
		}
		if _, refused := errors.AsType[*RefusedError](err); refused {
			if limit = 1; len(lines) == 1 { // lose only the refused line
				q.drop(1)
				q.lose(1, err)
			}
			continue
		}
		q.pause(ctx, delay)
		delay = min(2*delay, maxRetry)
	}
}

// recovered logs that a sink works again, once the queue is empty. Until then it returns the
// problem, so that a slow sink is reported only once.
func (q *queue) recovered(problem string) string {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.lines) > 0 {
		return problem
	}
	if problem != "" || q.lost > 0 {
		q.log.Info("decision records are written again", "lost", q.lost)
	}
	q.lost = 0
	return ""
}

// pause waits before a write is tried again. While the queue is being closed the wait is short.
func (q *queue) pause(ctx context.Context, delay time.Duration) {
	closing := q.closing
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
