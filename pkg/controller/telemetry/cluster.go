// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// ClusterMetrics are gauges of a cluster's state: ways around attestation, sources, requests and
// records. Make them once in a process. A nil *ClusterMetrics gauges nothing.
type ClusterMetrics struct {
	*clusterGauges
	cluster string

	mu sync.Mutex
	// bindingNames are the bindings that have a series.
	bindingNames map[string]bool
}

// clusterGauges are the gauges that all clusters share.
type clusterGauges struct {
	bindings, unattested, policies, policiesInForce *prometheus.GaugeVec
	sourceUsable, sourceRead, machines              *prometheus.GaugeVec
	caEnd, caTrusted                                *prometheus.GaugeVec
	revoked, revocationCapacity                     *prometheus.GaugeVec
	state                                           *stateCollector
}

// maxBindings and maxBindingName bound the number and the length of the series that a cluster's
// administrators can make.
const maxBindings, maxBindingName = 100, 253

// NewClusterMetrics registers the gauges with controller-runtime's registry. Use For before
// gauging: it sets the label cluster.
func NewClusterMetrics() (*ClusterMetrics, error) {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, append([]string{"cluster"}, labels...))
	}
	m := &ClusterMetrics{clusterGauges: &clusterGauges{
		bindings: gauge("node_attestation_auto_approving_bindings",
			"1 for each ClusterRoleBinding that makes kube-controller-manager approve without attestation.", "binding", "cluster_role"),
		unattested: gauge("node_attestation_unattested_nodes",
			"Nodes that have no record and are not listed in unattestedNodes."),
		policies: gauge("node_attestation_policy_problems",
			"1 for each problem that keeps an admission policy from being in force. The problem is NotWatched if the state is not known.", "policy", "problem"),
		policiesInForce: gauge("node_attestation_policies_in_force",
			"1 if the admission policies are in force, 0 if they are not or that is not known."),
		sourceUsable: gauge("node_attestation_source_usable",
			"1 if the latest content of a source is in use, 0 if it is invalid or cannot be read.", "source"),
		sourceRead: gauge("node_attestation_source_last_read_timestamp_seconds",
			"When a source was last read and valid, 0 if it never was.", "source"),
		machines: gauge("node_attestation_machines",
			"Machines that the inventory or Cluster API lists."),
		caEnd: gauge("node_attestation_ca_not_after_timestamp_seconds",
			"End of the signing CA, or of a CA above it that ends earlier. Absent if there is none."),
		caTrusted: gauge("node_attestation_ca_trusted",
			"1 if the API server trusts the signing CA, 0 if it does not. Absent if that is not known."),
		revoked: gauge("node_attestation_revoked_certificates",
			"Certificates that are revoked and have not ended, by state: revoked, suspended, or not_in_force if the policies have no room for their nodes. Absent while revocation is off.", "state"),
		revocationCapacity: gauge("node_attestation_revocation_list_capacity",
			"How many revoked certificates the admission policies have room for. Absent while revocation is off."),
		state: &stateCollector{states: map[string]State{}},
	}}
	var failed []error
	for _, v := range m.vectors() {
		failed = append(failed, metrics.Registry.Register(v))
	}
	return m, errors.Join(append(failed, metrics.Registry.Register(m.state))...)
}

func (g *clusterGauges) vectors() []*prometheus.GaugeVec {
	return []*prometheus.GaugeVec{
		g.bindings, g.unattested, g.policies, g.policiesInForce, g.sourceUsable, g.sourceRead, g.machines, g.caEnd, g.caTrusted,
		g.revoked, g.revocationCapacity,
	}
}

// For returns the gauges of one cluster.
func (m *ClusterMetrics) For(cluster string) *ClusterMetrics {
	if m == nil {
		return nil
	}
	return &ClusterMetrics{clusterGauges: m.clusterGauges, cluster: cluster}
}

// Forget drops the gauges of the cluster.
func (m *ClusterMetrics) Forget() {
	if m == nil {
		return
	}
	for _, v := range m.vectors() {
		v.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	}
	m.state.forget(m.cluster)
}

// BindingFound gauges a ClusterRoleBinding that makes kube-controller-manager approve without
// attestation.
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

// label makes a name a valid value of a label, which a terminal can show.
func label(name string) string { return text.Quote(name, maxBindingName) }

// NodesWithoutRecord gauges the number of Nodes without a record that are not listed as unattested.
func (m *ClusterMetrics) NodesWithoutRecord(n int) {
	if m != nil {
		m.unattested.WithLabelValues(m.cluster).Set(float64(n))
	}
}

// PolicyProblem is a problem of an admission policy. Policy is empty if the problem is about all
// policies.
type PolicyProblem struct{ Policy, Problem string }

// PolicyProblems gauges the problems of the admission policies, in place of the problems in the
// previous call. Without problems the policies are in force.
func (m *ClusterMetrics) PolicyProblems(problems []PolicyProblem) {
	if m == nil {
		return
	}
	m.policies.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	for _, p := range problems {
		m.policies.WithLabelValues(m.cluster, p.Policy, p.Problem).Set(1)
	}
	m.policiesInForce.WithLabelValues(m.cluster).Set(number(len(problems) == 0))
}

// Source gauges whether a source is usable, and the time when it was last read, zero if never.
func (m *ClusterMetrics) Source(name string, usable bool, lastRead time.Time) {
	if m == nil {
		return
	}
	m.sourceUsable.WithLabelValues(m.cluster, label(name)).Set(number(usable))
	m.sourceRead.WithLabelValues(m.cluster, label(name)).Set(timestamp(lastRead))
}

// SourceGone drops the gauges of a source.
func (m *ClusterMetrics) SourceGone(name string) {
	if m != nil {
		m.sourceUsable.DeleteLabelValues(m.cluster, label(name))
		m.sourceRead.DeleteLabelValues(m.cluster, label(name))
	}
}

// Machines gauges the number of machines.
func (m *ClusterMetrics) Machines(n int) {
	if m != nil {
		m.machines.WithLabelValues(m.cluster).Set(float64(n))
	}
}

// CA gauges the end of the signing CA, and whether the API server trusts it. A zero end means that
// no CA is available. A nil trusted means that it is not known.
func (m *ClusterMetrics) CA(end time.Time, trusted *bool) {
	if m == nil {
		return
	}
	m.caEnd.DeleteLabelValues(m.cluster)
	if !end.IsZero() {
		m.caEnd.WithLabelValues(m.cluster).Set(timestamp(end))
	}
	m.caTrusted.DeleteLabelValues(m.cluster)
	if trusted != nil {
		m.caTrusted.WithLabelValues(m.cluster).Set(number(*trusted))
	}
}

// RevokedCertificates has the numbers of certificates on the lists. Each certificate is counted
// once.
type RevokedCertificates struct {
	// Revoked certificates are refused for each write except a request for a new certificate.
	// Suspended certificates are refused for that, too.
	Revoked, Suspended int
	// NotInForce counts the certificates of nodes for which there is no room or no policy. They are
	// not refused.
	NotInForce int
}

// Revoked gauges the number of revoked certificates, and the capacity of the policies.
func (m *ClusterMetrics) Revoked(count RevokedCertificates, capacity int) {
	if m == nil {
		return
	}
	m.revoked.WithLabelValues(m.cluster, "revoked").Set(float64(count.Revoked))
	m.revoked.WithLabelValues(m.cluster, "suspended").Set(float64(count.Suspended))
	m.revoked.WithLabelValues(m.cluster, "not_in_force").Set(float64(count.NotInForce))
	m.revocationCapacity.WithLabelValues(m.cluster).Set(float64(capacity))
}

// Observe makes each scrape read the cluster's state.
func (m *ClusterMetrics) Observe(state State) {
	if m != nil {
		m.state.observe(m.cluster, state)
	}
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func timestamp(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.Unix())
}
