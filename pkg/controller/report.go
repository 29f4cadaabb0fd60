// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Metrics are the controller's counters. Register them once in a process.
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

// Forget drops what is counted of the cluster.
func (m *Metrics) Forget() {
	m.decisions.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	m.ekChanges.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
	m.issued.DeletePartialMatch(prometheus.Labels{"cluster": m.cluster})
}

// NewMetrics registers the metrics with controller-runtime's registry. For says which cluster's they are.
func NewMetrics() (*Metrics, error) {
	m := &Metrics{
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "node_attestation_decisions_total",
			Help: "Decisions on CertificateSigningRequests, by cluster, signer, class of request, outcome and reason.",
		}, []string{"cluster", "signer", "class", "outcome", "reason"}),
		age: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "node_attestation_request_age_seconds",
			Help:    "How old a CertificateSigningRequest is when it is decided on, by signer, class and outcome. The API server counts in whole seconds.",
			Buckets: []float64{1, 2, 5, 10, 30, 60, 300, 600, 1200},
		}, []string{"signer", "class", "outcome"}),
		judging: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "node_attestation_judging_seconds",
			Help:    "How long it takes to read what a decision depends on and to judge it, by signer.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 14),
		}, []string{"signer"}),
		ekChanges: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "node_attestation_ek_changes",
			Help: "Machines for which a source names other endorsement keys than it did, by cluster, source and state: accepted or held.",
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

func (m *Metrics) count(object *certificatesv1.CertificateSigningRequest, d verifier.Decision, reason string, took time.Duration, now time.Time) {
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

func (m *Metrics) gaugeEKChanges(source verifier.EKSource, accepted, held int) {
	if m == nil {
		return
	}
	m.ekChanges.WithLabelValues(m.cluster, string(source), "accepted").Set(float64(accepted))
	m.ekChanges.WithLabelValues(m.cluster, string(source), "held").Set(float64(held))
}

// countIssued counts a certificate that no record names. Of signers that are not Kubernetes' own
// nor this project's there may be any number.
func (m *Metrics) countIssued(signer, name string) {
	if m == nil {
		return
	}
	if !strings.HasPrefix(signer, "kubernetes.io/") && !strings.HasPrefix(signer, "cluster.x-k8s.io/") {
		signer = "other"
	}
	m.issued.WithLabelValues(m.cluster, label(signer), name).Inc()
}

// report lets a decision be seen: a log line, metrics, and, of what came of a request in the end, an Event on it and on its Node, if there is one. What
// is waited for is said once: an Event costs more than the decision, and hundreds of requests may wait.
func (c *Controller) report(ctx context.Context, object *certificatesv1.CertificateSigningRequest, f *found, d verifier.Decision, took time.Duration) {
	if d.Outcome == verifier.Ignore || !c.waits.news(object, d) {
		return
	}
	node := f.node
	reason, message := string(ReasonApproved), d.Outcome.String()
	switch {
	case len(d.Refusals) > 0:
		reason, message = string(d.Refusals.Reason()), d.Refusals.Error()
	case d.Outcome == verifier.Challenge:
		reason, message = string(ReasonChallenged), "the hello is answered by a challenge"
	case d.Outcome == verifier.ApproveServing:
		reason = string(ReasonServing)
	case d.Outcome == verifier.ApproveUnattested:
		reason, message = string(ReasonUnattested), "approved without evidence, since the node is in unattestedNodes"
	}
	line := []any{
		"request", object.Name, "signer", object.Spec.SignerName, "requester", object.Spec.Username,
		"class", d.Class.String(), "outcome", d.Outcome.String(), "reason", reason, "message", message, "audit", c.Audit,
	}
	if len(d.Warnings) > 0 {
		line = append(line, "warnings", d.Warnings.Error())
	}
	log.FromContext(ctx).Info("decided", line...)
	c.Metrics.count(object, d, reason, took, c.Now())
	for _, warning := range d.Warnings {
		c.event(object, node, corev1.EventTypeWarning, string(warning.Reason), warning.Message)
	}
	switch {
	case d.Outcome == verifier.Challenge, d.Outcome == verifier.Approve && c.CA != nil:
		// A step on the way. An Event costs as much as the step.
	case d.Outcome == verifier.Deny && !c.turns.tells(object.Spec.Username, c.Now()):
		c.eventOnNode(object, node, corev1.EventTypeWarning, reason, message)
	case d.Outcome == verifier.Deny, d.Outcome == verifier.Fail, d.Outcome == verifier.ApproveUnattested:
		c.event(object, node, corev1.EventTypeWarning, reason, message)
	default:
		c.event(object, node, corev1.EventTypeNormal, reason, message)
	}
}

// event says something of a request, and of the Node for whose name it asks, whoever asks: its owner wants to know. Of a Node the same reason
// is given once a minute.
func (c *Controller) event(object *certificatesv1.CertificateSigningRequest, node *metav1.PartialObjectMetadata, kind, reason, message string) {
	c.events.Eventf(object, nil, kind, reason, "Decide", "%s", message[:min(len(message), maxCondition)])
	c.eventOnNode(object, node, kind, reason, message)
}

// eventOnNode says it of the Node alone.
func (c *Controller) eventOnNode(object *certificatesv1.CertificateSigningRequest, node *metav1.PartialObjectMetadata, kind, reason, message string) {
	message = message[:min(len(message), maxCondition)]
	if node == nil {
		return
	}
	key, now := node.Name+"/"+reason, c.Now()
	if last, ok := c.said.Get(key); ok && now.Sub(last.(time.Time)) < time.Minute {
		return
	}
	c.said.Add(key, now)
	c.events.Eventf(node, object, kind, reason, "Decide", "%s: %s", object.Name, message)
}
