// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// RecordMetrics count decision records by sink. Register them once in a process. A nil
// *RecordMetrics counts nothing.
type RecordMetrics struct{ written, lost *prometheus.CounterVec }

// NewRecordMetrics registers the counters with controller-runtime's registry.
func NewRecordMetrics() (*RecordMetrics, error) {
	m := &RecordMetrics{
		written: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_decision_records_written_total",
			Help: "Decision records that were written.",
		}, []string{"sink"}),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_decision_records_lost_total",
			Help: "Decision records that were lost since a sink failed or was too slow.",
		}, []string{"sink"}),
	}
	return m, errors.Join(metrics.Registry.Register(m.written), metrics.Registry.Register(m.lost))
}

// Start makes the counters of a sink, so that they exist before the first record.
func (m *RecordMetrics) Start(sink string) {
	m.Written(sink, 0)
	m.Lost(sink, 0)
}

// Written counts records that a sink accepted.
func (m *RecordMetrics) Written(sink string, n int) {
	if m != nil {
		m.written.WithLabelValues(sink).Add(float64(n))
	}
}

// Lost counts records that a sink did not accept.
func (m *RecordMetrics) Lost(sink string, n int) {
	if m != nil {
		m.lost.WithLabelValues(sink).Add(float64(n))
	}
}
