// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"context"
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// writeCondition has the Namespace's status say it. What was written is read again from time to
// time: others may change it.
func (w *PolicyWatch) writeCondition(ctx context.Context, v verdict, now time.Time) {
	want := corev1.NamespaceCondition{Type: ConditionPolicies, Status: v.status, Reason: v.reason, Message: v.message}
	says := w.written.Status == want.Status && w.written.Reason == want.Reason && w.written.Message == want.Message
	if says && now.Sub(w.writtenAt) < w.Remind {
		return
	}
	err := w.putCondition(ctx, want)
	if err == nil {
		w.written, w.writtenAt, w.unwritten = want, now, ""
		return
	}
	if cause := text.Line(err.Error(), telemetry.MaxLogged); cause != w.unwritten {
		w.unwritten = cause
		w.log.Info("the condition cannot be written, see packaging/kubernetes/rbac.yaml", "namespace", w.Namespace, "cause", cause)
	}
}

func (w *PolicyWatch) putCondition(ctx context.Context, want corev1.NamespaceCondition) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	status := w.api.SubResource("status")
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.Namespace}}
	if err := status.Get(ctx, namespace.DeepCopy(), namespace); err != nil {
		return err
	}
	w.namespace = namespace
	want.LastTransitionTime = metav1.Now()
	for _, c := range namespace.Status.Conditions {
		if c.Type != want.Type {
			continue
		}
		if c.Status == want.Status && c.Reason == want.Reason && c.Message == want.Message {
			return nil
		}
		if c.Status == want.Status {
			want.LastTransitionTime = c.LastTransitionTime
		}
	}
	// Conditions of other types stay: they are merged by their types.
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NamespaceCondition{want}}})
	if err != nil {
		return err
	}
	return status.Patch(ctx, namespace, client.RawPatch(types.StrategicMergePatchType, patch))
}
