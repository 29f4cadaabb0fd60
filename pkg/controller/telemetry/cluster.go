// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// ClusterMetrics are gauges of a cluster's ways around attestation. Register them once in a process.
// A nil *ClusterMetrics gauges nothing.
type ClusterMetrics struct {
	bindings, unattested, policies *prometheus.GaugeVec
	cluster                        string

	mu sync.Mutex
	// bindingNames are those that have a series.
	bindingNames map[string]bool
}

// maxBindings and maxBindingName bound the number and the length of the series that a cluster's
// administrators can make.
const maxBindings, maxBindingName = 100, 253

// NewClusterMetrics registers the gauges with controller-runtime's registry. For says which cluster's they are.
func NewClusterMetrics() (*ClusterMetrics, error) {
	m := &ClusterMetrics{
		bindings: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_auto_approving_bindings",
			Help: "1 for each ClusterRoleBinding that has kube-controller-manager approve without attestation.",
		}, []string{"cluster", "binding", "cluster_role"}),
		unattested: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_unattested_nodes",
			Help: "Nodes that have no record and are not listed in unattestedNodes.",
		}, []string{"cluster"}),
		policies: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_policy_problems",
			Help: "1 for each problem of an admission policy that keeps it from being in force, and with the problem NotWatched where that is not known.",
		}, []string{"cluster", "policy", "problem"}),
	}
	return m, errors.Join(metrics.Registry.Register(m.bindings), metrics.Registry.Register(m.unattested), metrics.Registry.Register(m.policies))
}

// For returns the gauges of one cluster.
func (m *ClusterMetrics) For(cluster string) *ClusterMetrics {
	if m == nil {
		return nil
	}
	return &ClusterMetrics{bindings: m.bindings, unattested: m.unattested, policies: m.policies, cluster: cluster}
}

// Forget drops what is gauged of the cluster.
func (m *ClusterMetrics) Forget() {
	if m != nil {
		m.bindings.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
		m.unattested.DeleteLabelValues(m.cluster)
		m.policies.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	}
}

// BindingFound gauges a ClusterRoleBinding that has kube-controller-manager approve.
func (m *ClusterMetrics) BindingFound(binding, clusterRole string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if binding = label(binding); !m.bindingNames[binding] && len(m.bindingNames) >= maxBindings {
		return
	}
	if m.bindingNames == nil {
		m.bindingNames = map[string]bool{}
	}
	m.bindingNames[binding] = true
	m.bindings.WithLabelValues(m.cluster, binding, clusterRole).Set(1)
}

// BindingGone drops the gauge of such a binding.
func (m *ClusterMetrics) BindingGone(binding string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if binding = label(binding); m.bindingNames[binding] {
		delete(m.bindingNames, binding)
		m.bindings.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster, "binding": binding})
	}
}

// label returns a name that is a valid value of a label.
func label(name string) string {
	return strings.ToValidUTF8(name[:min(len(name), maxBindingName)], "?")
}

// NodesWithoutRecord gauges how many Nodes have no record and are not listed as unattested.
func (m *ClusterMetrics) NodesWithoutRecord(n int) {
	if m != nil {
		m.unattested.WithLabelValues(m.cluster).Set(float64(n))
	}
}

// PolicyProblem is a problem of an admission policy; Policy is empty if it is about all of them.
type PolicyProblem struct{ Policy, Problem string }

// PolicyProblems gauges the problems of the admission policies, and drops those of the call before.
func (m *ClusterMetrics) PolicyProblems(problems []PolicyProblem) {
	if m == nil {
		return
	}
	m.policies.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	for _, p := range problems {
		m.policies.WithLabelValues(m.cluster, p.Policy, p.Problem).Set(1)
	}
}
