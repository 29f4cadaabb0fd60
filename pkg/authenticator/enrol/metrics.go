// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// resultSuccess is the label of a worker that did not fail. No Reason has this name.
const resultSuccess = "Success"

// writeMetrics writes the metrics file if the operator configured one. state has the result of this
// worker. An error is only logged: a certificate matters more than its metrics.
//
// It is the last step of a worker. Before the write it releases the lock and the worker's process
// ID. If the file system of the metrics hangs, this process hangs, too, and even SIGKILL may not
// end it. Then the next worker can still start.
func (w *worker) writeMetrics(state *cache.State) {
	if w.enroller.MetricsTextfile == "" {
		return
	}
	if err := w.lock.NameWorker(process.ID{}); err != nil {
		w.log.Info("metrics are not written", "cause", err.Error())
		return
	}
	w.lock.Unlock()
	// The collector reads no temporary file: the name of one does not end in .prom.
	dir, name := cache.At(filepath.Dir(w.enroller.MetricsTextfile)), filepath.Base(w.enroller.MetricsTextfile)
	dir.CleanFile(name)
	if err := dir.WritePublic(name, w.metrics(state)); err != nil {
		w.log.Info("metrics are not written", "cause", err.Error())
	}
}

// metrics renders the metrics of the certificate, the workers and the pending request. They have no
// secret and no text of a peer. Each label has a closed set of values.
func (w *worker) metrics(state *cache.State) []byte {
	var text metricsText
	program, version, _ := strings.Cut(w.enroller.Node.Access.UserAgent, "/")
	text.gauge("build_info", "The program that wrote this file. The value is always 1.",
		sample{label("program", program) + "," + label("version", version) + "," + label("goversion", runtime.Version()), 1})
	w.certificateMetrics(&text)
	w.pendingMetrics(&text)
	text.gauge("last_success_timestamp_seconds", "When a certificate was installed last, 0 if never.", timestamp(state.Issued))
	text.gauge("consecutive_failures", "Workers in a row that failed for causes of one kind. Waiting for the signer does not count.", sample{"", float64(state.Failures)})
	text.gauge("next_attempt_timestamp_seconds", "Earliest start of the next worker after a failure, 0 if it may start at once.", timestamp(state.NextAttempt))
	if w.enroller.Node.Checks() {
		announcementMetrics(&text, state.Announcement)
	}
	lastWorkerMetrics(&text, state.Last)
	return []byte(text.file.String())
}

// certificateMetrics adds the metrics of the certificate on disk. Without one there are none.
func (w *worker) certificateMetrics(text *metricsText) {
	pair, err := w.enroller.Node.Dir().Current()
	if err != nil {
		return
	}
	text.gauge("certificate_not_before_timestamp_seconds", "Start of the validity of the certificate on disk.", timestamp(pair.Leaf.NotBefore))
	text.gauge("certificate_not_after_timestamp_seconds", "End of the validity of the certificate on disk.", timestamp(pair.Leaf.NotAfter))
	if w.enroller.Node.Access.Renews {
		text.gauge("certificate_renewal_timestamp_seconds", "Time from which on the certificate on disk is due for renewal.", timestamp(nodestate.RenewAt(pair.Leaf)))
	}
}

// pendingMetrics adds the metric of the pending request.
func (w *worker) pendingMetrics(text *metricsText) {
	var named time.Time
	if pending, err := w.enroller.Node.Dir().Pending(); err == nil && pending != nil && pending.Last().UID != "" {
		named = pending.Last().FiledAt
	}
	text.gauge("pending_request_timestamp_seconds", "When the name of the pending CertificateSigningRequest was chosen, 0 if none was filed.", timestamp(named))
}

// announcementMetrics adds the metrics of the checks for announced renewals. found is nil before
// the first check.
func announcementMetrics(text *metricsText, found *cache.Announcement) {
	var answered, due time.Time
	if found != nil {
		if answered = found.Answered; found.Renewal != nil {
			due = found.Renewal.DueAt
		}
	}
	text.gauge("last_announcement_check_timestamp_seconds", "When a check for announced renewals was last answered, 0 if never.", timestamp(answered))
	text.gauge("announced_renewal_timestamp_seconds", "When the announced renewal that selects the certificate is due, 0 if none does.", timestamp(due))
}

// lastWorkerMetrics adds the metrics of the worker that ended last. last is nil if none has ended.
func lastWorkerMetrics(text *metricsText, last *cache.Result) {
	var started, finished sample
	var result, took []sample
	if last != nil {
		started, finished = timestamp(last.Started), timestamp(last.Finished)
		outcome := resultSuccess
		if last.Reason != "" {
			// another release may have written another name
			outcome = string(reason.Reason(last.Reason).Info().Reason)
		}
		result, took = []sample{{label("reason", outcome), 1}}, phases(last)
	}
	text.gauge("last_worker_start_timestamp_seconds", "Start of the worker that ended last, 0 if none has.", started)
	text.gauge("last_worker_end_timestamp_seconds", "End of the worker that ended last, 0 if none has.", finished)
	text.gauge("last_worker_result", "Result of the worker that ended last: Success, or the reason of docs/node.md. The value is always 1.", result...)
	text.gauge("last_worker_phase_duration_seconds", "Time that the worker that ended last spent in each phase.", took...)
}

// phases returns the time that the worker spent in each phase, in the order of Steps. A worker may
// enter a phase more than once.
func phases(result *cache.Result) []sample {
	spent := map[Step]time.Duration{}
	for _, phase := range result.Phases {
		spent[Step(phase.Name)] += time.Duration(phase.Milliseconds * float64(time.Millisecond))
	}
	// These have no duration yet: they are still running.
	delete(spent, stepRecord)
	delete(spent, stepForget)
	var samples []sample
	for _, step := range Steps() {
		if took, ok := spent[step]; ok {
			samples = append(samples, sample{label("phase", string(step)), took.Round(time.Microsecond).Seconds()})
		}
	}
	return samples
}

// metricsText is a file in the Prometheus text format, version 0.0.4. The client library would be
// larger than all of this package.
type metricsText struct{ file strings.Builder }

// sample is one value. Its labels are rendered already.
type sample struct {
	labels string
	value  float64
}

// gauge adds a metric. Without samples it adds nothing.
func (m *metricsText) gauge(name, help string, samples ...sample) {
	if len(samples) == 0 {
		return
	}
	name = "kubelet_authenticator_" + name
	m.file.WriteString("# HELP " + name + " " + help + "\n# TYPE " + name + " gauge\n")
	for _, s := range samples {
		m.file.WriteString(name)
		if s.labels != "" {
			m.file.WriteString("{" + s.labels + "}")
		}
		m.file.WriteString(" " + strconv.FormatFloat(s.value, 'f', -1, 64) + "\n")
	}
}

func label(name, value string) string {
	return name + `="` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(value) + `"`
}

// timestamp is the sample of a time, 0 for the zero Time.
func timestamp(t time.Time) sample {
	if t.IsZero() {
		return sample{}
	}
	return sample{"", float64(t.UnixMilli()) / 1000}
}
