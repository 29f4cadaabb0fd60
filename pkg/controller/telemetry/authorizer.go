// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// AuthorizerMetrics are the metrics of the authorizer. Make them once in a process. A nil
// *AuthorizerMetrics counts nothing.
type AuthorizerMetrics struct {
	denials    *prometheus.CounterVec
	unresolved prometheus.Counter
}

// NewAuthorizerMetrics registers the counters with controller-runtime's registry.
func NewAuthorizerMetrics() (*AuthorizerMetrics, error) {
	m := &AuthorizerMetrics{
		denials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_authorizer_denials_total",
			Help: "Requests that the authorizer denied, by cause and mode. With the mode rehearse they were not denied: strict mode would deny them.",
		}, []string{"cause", "mode"}),
		unresolved: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "node_attestation_authorizer_unresolved_total",
			Help: "Requests that the authorizer did not deny only because its lists may be old and no record could be read.",
		}),
	}
	return m, errors.Join(metrics.Registry.Register(m.denials), metrics.Registry.Register(m.unresolved))
}

// Lists registers the gauges of the lists. age is negative if the lists were never read. remembered
// returns the number of certificates that are remembered, and that no record names.
func (m *AuthorizerMetrics) Lists(age func() time.Duration, remembered func() int) error {
	if m == nil {
		return nil
	}
	return errors.Join(
		metrics.Registry.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "node_attestation_authorizer_list_age_seconds",
			Help: "Age of the authorizer's lists: 0 while it watches them, -1 if it never read them.",
		}, func() float64 { return age().Seconds() })),
		metrics.Registry.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "node_attestation_authorizer_remembered_certificates",
			Help: "Certificates that only the authorizer's state file names, and no record. Strict mode denies their nodes where that file is lost.",
		}, func() float64 { return float64(remembered()) })))
}

// Denied counts a denial. rehearsal says that the request was not denied.
func (m *AuthorizerMetrics) Denied(cause string, rehearsal bool) {
	if m == nil {
		return
	}
	mode := "enforce"
	if rehearsal {
		mode = "rehearse"
	}
	m.denials.WithLabelValues(cause, mode).Inc()
}

// Unresolved counts a request that was not denied because no record could be read.
func (m *AuthorizerMetrics) Unresolved() {
	if m != nil {
		m.unresolved.Inc()
	}
}
