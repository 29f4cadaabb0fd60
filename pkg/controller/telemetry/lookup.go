// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// LookupBusy is the result of a look-up for which there was no place. The other results are
// "answered" and "failed".
const LookupBusy = "busy"

// LookupMetrics count the calls of outside services. Make them once in a process. A nil
// *LookupMetrics counts nothing.
type LookupMetrics struct {
	calls   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

// NewLookupMetrics registers the metrics with controller-runtime's registry.
func NewLookupMetrics() (*LookupMetrics, error) {
	m := &LookupMetrics{
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_lookups_total",
			Help: "Calls of a cloud's service, by service and result: answered, failed, or busy if too many ran. The service is ec2-role (AWS STS), gce (Google's keys) or azure (VM IDs).",
		}, []string{"service", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "node_attestation_lookup_seconds",
			Help:    "Seconds that a call of a cloud's service took, by service.",
			Buckets: []float64{0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10},
		}, []string{"service"}),
	}
	// increase() does not see the first value of a counter
	for _, service := range []string{"ec2-role", "gce", "azure"} {
		m.seconds.WithLabelValues(service)
		for _, result := range []string{"answered", "failed", LookupBusy} {
			m.calls.WithLabelValues(service, result)
		}
	}
	return m, errors.Join(metrics.Registry.Register(m.calls), metrics.Registry.Register(m.seconds))
}

// Called counts a call and observes its duration.
func (m *LookupMetrics) Called(service string, answered bool, took time.Duration) {
	if m == nil {
		return
	}
	result := "failed"
	if answered {
		result = "answered"
	}
	m.calls.WithLabelValues(service, result).Inc()
	m.seconds.WithLabelValues(service).Observe(took.Seconds())
}

// Counted counts a look-up without a call.
func (m *LookupMetrics) Counted(service, result string) {
	if m != nil {
		m.calls.WithLabelValues(service, result).Inc()
	}
}
