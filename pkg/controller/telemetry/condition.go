// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"encoding/json"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// The types of the conditions on the status of the controller's Namespace.
const (
	// ConditionPolicies says whether the admission policies are in force.
	ConditionPolicies = "NodeAttestationPoliciesInForce"
	// ConditionSources says whether the CA, the machines and the challenge keys are usable, and
	// whether the API server trusts the CA.
	ConditionSources = "NodeAttestationSourcesUsable"
	// ConditionRevocation says whether each revoked certificate is refused. It is missing while the
	// feature is off.
	ConditionRevocation = "NodeAttestationRevocationInForce"
)

const (
	// RemindInterval is the time between two reports of a lasting problem. It is longer than
	// DedupInterval.
	RemindInterval = DedupInterval + time.Minute
	// ConditionRetry is the time until a failed write of a condition is retried.
	ConditionRetry = 5 * time.Second
	// conditionTimeout bounds one write.
	conditionTimeout = 10 * time.Second
)

// Condition keeps one condition of a Namespace's status. It is not safe for concurrent use.
type Condition struct {
	// API reads and writes without a cache. Its RBAC right covers this Namespace only.
	API client.Client
	// Namespace is the name of the Namespace. Type is the type of the condition.
	Namespace, Type string
	// Remind is the time until the condition is read again after a write, since others may change
	// it. A Reporter reports a lasting problem again after that time, so it must be longer than
	// DedupInterval there.
	Remind time.Duration
	Log    logr.Logger

	// written is the condition as it was last read or written, at the time writtenAt.
	written   corev1.NamespaceCondition
	writtenAt time.Time
	namespace *corev1.Namespace
	// unwritten says that the last write failed. failures has the cause that was logged.
	unwritten bool
	failures  Once
}

// Set writes the condition into the Namespace's status. A failure is logged once.
func (c *Condition) Set(ctx context.Context, status corev1.ConditionStatus, reason, message string) {
	now := time.Now()
	want := corev1.NamespaceCondition{Type: corev1.NamespaceConditionType(c.Type), Status: status, Reason: reason, Message: Message(message)}
	says := c.written.Status == want.Status && c.written.Reason == want.Reason && c.written.Message == want.Message
	if says && now.Sub(c.writtenAt) < c.Remind {
		return
	}
	err := c.put(ctx, want)
	if err == nil {
		c.written, c.writtenAt, c.unwritten = want, now, false
		c.failures.Forget("")
		return
	}
	c.unwritten = true
	if cause := text.Line(err.Error(), MaxLogged); c.failures.MarkReported("", cause, now, 0) {
		c.Log.Error(nil, "the condition cannot be written, see packaging/kubernetes/rbac.yaml", "condition", c.Type, "namespace", c.Namespace, "cause", cause)
	}
}

// Unwritten reports whether the last write failed.
func (c *Condition) Unwritten() bool { return c.unwritten }

// Regarding returns the Namespace for Events. If the Namespace could not be read, the result has
// the name only.
func (c *Condition) Regarding() *corev1.Namespace {
	if c.namespace == nil {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}
	}
	return c.namespace
}

func (c *Condition) put(ctx context.Context, want corev1.NamespaceCondition) error {
	ctx, cancel := context.WithTimeout(ctx, conditionTimeout)
	defer cancel()
	status := c.API.SubResource("status")
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}
	if err := status.Get(ctx, namespace.DeepCopy(), namespace); err != nil {
		return err
	}
	c.namespace = namespace
	want.LastTransitionTime = metav1.Now()
	for _, found := range namespace.Status.Conditions {
		if found.Type != want.Type {
			continue
		}
		if found.Status == want.Status && found.Reason == want.Reason && found.Message == want.Message {
			return nil
		}
		if found.Status == want.Status {
			want.LastTransitionTime = found.LastTransitionTime
		}
	}
	// The API server merges conditions by type, so those of other types stay.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NamespaceCondition{want}}})
	if err != nil {
		return err
	}
	return status.Patch(ctx, namespace, client.RawPatch(types.StrategicMergePatchType, patch))
}
