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
	// maxQueued and maxQueuedBytes bound what waits for one sink.
	maxQueued, maxQueuedBytes = 10_000, 16 << 20
	// deniedShare is the divisor of the part of a queue that denials may fill. Requesters cause them,
	// and must not take the room of admissions while a sink is away.
	deniedShare = 2
	// maxBatch and maxBatchBytes bound what a sink gets at once. A single line may be longer.
	maxBatch, maxBatchBytes = 256, 1 << 20
	// minRetry and maxRetry bound the back-off of a sink that fails.
	minRetry, maxRetry = time.Second, 30 * time.Second
	// flushTimeout is how long Close lets the sinks write, and abortTimeout how long it then waits
	// for them to give up. Together with the manager's shutdown they fit into a pod's grace period.
	flushTimeout, abortTimeout = 5 * time.Second, time.Second
)

// Sink takes lines. One goroutine uses it.
type Sink interface {
	// Name is the sink's in metrics and logs.
	Name() string
	// Write writes lines in order, each of which ends with a line feed. It returns how many were
	// written. The others are written again later, unless the error is a *RefusedError.
	Write(ctx context.Context, lines [][]byte) (int, error)
	Close() error
}

// RefusedError says that a sink will never take what it was given.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }
func (e *RefusedError) Unwrap() error { return e.Err }

// Config is how a controller records its decisions.
type Config struct {
	// Log takes the records. Nil: each is in the process log, in the line about its decision.
	Log *Log
	// Archive adds the requests to each record.
	Archive bool
	// Controller and Cluster are in each record.
	Controller Controller
	Cluster    Cluster
}

// Log hands records to sinks. Each sink has a queue and a goroutine of its own, so a slow one delays
// neither decisions nor the other sinks.
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

// Add hands a record to all sinks. It never waits.
func (l *Log) Add(record *Record) { l.add(record, record.Outcome == Denied) }

// AddRevocation hands a revocation to all sinks. It never waits.
func (l *Log) AddRevocation(revocation *Revocation) { l.add(revocation, false) }

func (l *Log) add(document any, denied bool) {
	line, err := json.Marshal(document)
	if err != nil { // strings, numbers and requests that the API server sent always marshal
		for _, q := range l.queues {
			q.lose(1, err)
		}
		return
	}
	line = append(line, '\n')
	for _, q := range l.queues {
		q.add(line, denied)
	}
}

// Close writes what is queued, as far as the sinks take it in time. Call it once, after the last
// Add. A nil *Log needs no Close.
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

// queue has what waits for one sink.
type queue struct {
	sink    Sink
	log     logr.Logger
	metrics *telemetry.RecordMetrics
	// wake has a token if something was added. closing is closed when nothing is added any more.
	wake, closing chan struct{}

	mu    sync.Mutex
	lines [][]byte
	bytes int
	// lost counts the lines that were lost since the queue was last empty after a success.
	lost int
}

// add queues a line, or drops it if the queue is full. For a denial it is full sooner.
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
			case <-q.closing: // a line may have come since
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
			if limit = 1; len(lines) == 1 { // only the line that is to blame is lost
				q.drop(1)
				q.lose(1, err)
			}
			continue
		}
		q.pause(ctx, delay)
		delay = min(2*delay, maxRetry)
	}
}

// recovered reports that a sink works again, once the queue is empty. Until then it returns the
// problem, so that a sink which is too slow is reported once.
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
