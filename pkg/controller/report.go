// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Metrics are the controller's counters. Register them once in a process.
type Metrics struct {
	decisions *prometheus.CounterVec
}

// NewMetrics registers the metrics with controller-runtime's registry.
func NewMetrics() (*Metrics, error) {
	m := &Metrics{prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "node_attestation_decisions_total",
		Help: "Decisions on CertificateSigningRequests, by signer, class of request, outcome and reason.",
	}, []string{"signer", "class", "outcome", "reason"})}
	return m, metrics.Registry.Register(m.decisions)
}

// report lets a decision be seen: a log line, an Event on the request, a counter. What is waited for is said each second in the log only: an Event
// costs more than the decision, and hundreds of requests may wait.
func (c *Controller) report(ctx context.Context, object *certificatesv1.CertificateSigningRequest, d verifier.Decision) {
	if d.Outcome == verifier.Ignore {
		return
	}
	reason, message := string(ReasonApproved), d.Outcome.String()
	if len(d.Refusals) > 0 {
		reason, message = string(d.Refusals.Reason()), d.Refusals.Error()
	}
	log.FromContext(ctx).Info("decided", "request", object.Name, "signer", object.Spec.SignerName, "requester", object.Spec.Username,
		"class", d.Class.String(), "outcome", d.Outcome.String(), "reason", reason, "message", message, "audit", c.Audit)
	if !c.waits.news(object.UID, d) {
		return
	}
	if c.Metrics != nil {
		c.Metrics.decisions.WithLabelValues(object.Spec.SignerName, d.Class.String(), d.Outcome.String(), reason).Inc()
	}
	for _, warning := range d.Warnings {
		c.event(object, corev1.EventTypeWarning, string(warning.Reason), warning.Message)
	}
	kind := corev1.EventTypeNormal
	if d.Outcome == verifier.Deny || d.Outcome == verifier.Fail {
		kind = corev1.EventTypeWarning
	}
	c.event(object, kind, reason, message)
}

// waits remembers what each request was last said to wait for.
type waits struct {
	mu   sync.Mutex
	last map[types.UID]string
}

// maxWaits bounds what is remembered: requests may go away while they wait. Forgetting is harmless.
const maxWaits = 10000

// news reports whether a decision is another than the one before.
func (w *waits) news(request types.UID, d verifier.Decision) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Outcome != verifier.Wait {
		delete(w.last, request)
		return true
	}
	message := d.Refusals.Error()
	if w.last[request] == message {
		return false
	}
	if w.last == nil || len(w.last) >= maxWaits {
		w.last = map[types.UID]string{}
	}
	w.last[request] = message
	return true
}

func (c *Controller) event(object *certificatesv1.CertificateSigningRequest, kind, reason, message string) {
	c.events.Eventf(object, nil, kind, reason, "Decide", "%s", message[:min(len(message), maxCondition)])
}
