// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// ClusterMetrics are gauges of what in the cluster goes around attestation. Register them once in a process. A nil *ClusterMetrics
// gauges nothing.
type ClusterMetrics struct {
	bindings   *prometheus.GaugeVec
	unattested prometheus.Gauge
}

// NewClusterMetrics registers the gauges with controller-runtime's registry.
func NewClusterMetrics() (*ClusterMetrics, error) {
	m := &ClusterMetrics{
		prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_auto_approving_bindings",
			Help: "1 for each ClusterRoleBinding that has kube-controller-manager approve without attestation.",
		}, []string{"binding", "cluster_role"}),
		prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "node_attestation_unattested_nodes",
			Help: "Nodes that have no record and are not listed in unattestedNodes.",
		}),
	}
	return m, errors.Join(metrics.Registry.Register(m.bindings), metrics.Registry.Register(m.unattested))
}

func (m *ClusterMetrics) bindingFound(binding, clusterRole string) {
	if m != nil {
		m.bindings.WithLabelValues(binding, clusterRole).Set(1)
	}
}

func (m *ClusterMetrics) bindingGone(binding string) {
	if m != nil {
		m.bindings.DeletePartialMatch(prometheus.Labels{"binding": binding})
	}
}

func (m *ClusterMetrics) nodesWithout(n int) {
	if m != nil {
		m.unattested.Set(float64(n))
	}
}
