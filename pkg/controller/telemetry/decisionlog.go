// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// DecisionLogMetrics count decision records by sink. Register them once in a process. A nil
// *DecisionLogMetrics counts nothing.
type DecisionLogMetrics struct{ written, lost *prometheus.CounterVec }

// NewDecisionLogMetrics registers the counters with controller-runtime's registry.
func NewDecisionLogMetrics() (*DecisionLogMetrics, error) {
	m := &DecisionLogMetrics{
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

// Start makes the counters of a sink, so that they exist before the first decision record.
func (m *DecisionLogMetrics) Start(sink string) {
	m.Written(sink, 0)
	m.Lost(sink, 0)
}

// Written counts decision records that a sink accepted.
func (m *DecisionLogMetrics) Written(sink string, n int) {
	if m != nil {
		m.written.WithLabelValues(sink).Add(float64(n))
	}
}

// Lost counts decision records that a sink did not accept.
func (m *DecisionLogMetrics) Lost(sink string, n int) {
	if m != nil {
		m.lost.WithLabelValues(sink).Add(float64(n))
	}
}
