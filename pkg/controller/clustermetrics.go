// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

// ClusterMetrics are gauges of what in a cluster goes around attestation. Register them once in a process. A nil *ClusterMetrics
// gauges nothing.
type ClusterMetrics struct {
	bindings, unattested, policies *prometheus.GaugeVec
	cluster                        string

	mu    sync.Mutex
	named map[string]bool
}

// maxBindings bounds the series that a cluster's administrators can make, and so does maxBindingName their length.
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

func (m *ClusterMetrics) bindingFound(binding, clusterRole string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if binding = label(binding); !m.named[binding] && len(m.named) >= maxBindings {
		return
	}
	if m.named == nil {
		m.named = map[string]bool{}
	}
	m.named[binding] = true
	m.bindings.WithLabelValues(m.cluster, binding, clusterRole).Set(1)
}

func (m *ClusterMetrics) bindingGone(binding string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if binding = label(binding); m.named[binding] {
		delete(m.named, binding)
		m.bindings.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster, "binding": binding})
	}
}

// label returns a name as a label may have it.
func label(name string) string {
	return strings.ToValidUTF8(name[:min(len(name), maxBindingName)], "?")
}

func (m *ClusterMetrics) nodesWithout(n int) {
	if m != nil {
		m.unattested.WithLabelValues(m.cluster).Set(float64(n))
	}
}

// policyProblems gauges what is known of the admission policies, in the place of what was.
func (m *ClusterMetrics) policyProblems(v verdict) {
	if m == nil {
		return
	}
	m.policies.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	if v.reason == ReasonPoliciesUnwatched {
		m.policies.WithLabelValues(m.cluster, "", v.reason).Set(1)
	}
	for _, p := range v.problems {
		m.policies.WithLabelValues(m.cluster, p.Policy, p.Problem).Set(1)
	}
}
