// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Metrics are the controller's counters. Make them once in a process. A nil *Metrics counts
// nothing.
type Metrics struct {
	decisions *prometheus.CounterVec
	age       *prometheus.HistogramVec
	judging   *prometheus.HistogramVec
	ekChanges *prometheus.GaugeVec
	issued    *prometheus.CounterVec
	cluster   string
}

// For returns the counters of one cluster.
func (m *Metrics) For(cluster string) *Metrics {
	return &Metrics{m.decisions, m.age, m.judging, m.ekChanges, m.issued, cluster}
}

// Forget drops the counters of the cluster.
func (m *Metrics) Forget() {
	m.decisions.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	m.ekChanges.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	m.issued.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
}

// NewMetrics registers the metrics with controller-runtime's registry. Use For before counting: it
// sets the label cluster.
func NewMetrics() (*Metrics, error) {
	m := &Metrics{
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_decisions_total",
			Help: "Decisions on CertificateSigningRequests, by cluster, signer, class of request, outcome and reason.",
		}, []string{"cluster", "signer", "class", "outcome", "reason"}),
		age: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "node_attestation_request_age_seconds",
			Help:    "Age of a CertificateSigningRequest when it is decided on, by signer, class and outcome. The API server counts in whole seconds.",
			Buckets: []float64{1, 2, 5, 10, 30, 60, 300, 600, 1200},
		}, []string{"signer", "class", "outcome"}),
		judging: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "node_attestation_judging_seconds",
			Help:    "Seconds to read the inputs of a decision and to evaluate it, by signer.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}, []string{"signer"}),
		ekChanges: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_ek_changes",
			Help: "Machines for which a source names other endorsement keys than their records, by cluster, source of the record (FirstUse if it has none) and state: accepted or held.",
		}, []string{"cluster", "source", "state"}),
		issued: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_issued_without_attestation_total",
			Help: "Certificates issued to nodes and bootstrap identities that no record names, by cluster, signer, and what is known of the node name.",
		}, []string{"cluster", "signer", "name"}),
	}
	for _, c := range []prometheus.Collector{m.decisions, m.age, m.judging, m.ekChanges, m.issued} {
		if err := metrics.Registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Decided counts a decision with its reason and observes its duration. Unless the request goes on
// waiting, it also observes the age of the request.
func (m *Metrics) Decided(object *certificatesv1.CertificateSigningRequest, d verifier.Decision, reason string, took time.Duration, now time.Time) {
	if m == nil {
		return
	}
	signer, class, outcome := object.Spec.SignerName, d.Class.String(), d.Outcome.String()
	m.decisions.WithLabelValues(m.cluster, signer, class, outcome, reason).Inc()
	m.judging.WithLabelValues(signer).Observe(took.Seconds())
	if d.Outcome != verifier.Wait {
		m.age.WithLabelValues(signer, class, outcome).Observe(now.Sub(object.CreationTimestamp.Time).Seconds())
	}
}

// EKChanges gauges the accepted and the held changes of endorsement keys, by the source in the
// machines' records, or FirstUse if they have none.
func (m *Metrics) EKChanges(source verifier.EKSource, accepted, held int) {
	if m == nil {
		return
	}
	m.ekChanges.WithLabelValues(m.cluster, string(source), "accepted").Set(float64(accepted))
	m.ekChanges.WithLabelValues(m.cluster, string(source), "held").Set(float64(held))
}

// kubernetesSigners are Kubernetes' own signers of CertificateSigningRequests.
var kubernetesSigners = []string{
	certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName, certificatesv1.KubeletServingSignerName,
	"kubernetes.io/legacy-unknown",
}

// IssuedWithoutAttestation counts a certificate that no record names. name is the category of its
// node name. Signers that are neither configured nor Kubernetes' own share the label "other", since
// anybody can invent signer names.
func (m *Metrics) IssuedWithoutAttestation(signer string, configured bool, name string) {
	if m == nil {
		return
	}
	if !configured && !slices.Contains(kubernetesSigners, signer) {
		signer = "other"
	}
	m.issued.WithLabelValues(m.cluster, signer, name).Inc()
}
