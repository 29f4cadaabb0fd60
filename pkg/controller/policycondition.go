// SPDX-License-Identifier: Apache-2.0

package controller

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
func (p *Policies) writeCondition(ctx context.Context, v verdict, now time.Time) {
	want := corev1.NamespaceCondition{Type: ConditionPolicies, Status: v.status, Reason: v.reason, Message: v.message}
	says := p.written.Status == want.Status && p.written.Reason == want.Reason && p.written.Message == want.Message
	if says && now.Sub(p.writtenAt) < p.Remind {
		return
	}
	err := p.putCondition(ctx, want)
	if err == nil {
		p.written, p.writtenAt, p.unwritten = want, now, ""
		return
	}
	if cause := text.Line(err.Error(), telemetry.MaxLogged); cause != p.unwritten {
		p.unwritten = cause
		p.log.Info("the condition cannot be written, see packaging/kubernetes/rbac.yaml", "namespace", p.Namespace, "cause", cause)
	}
}

func (p *Policies) putCondition(ctx context.Context, want corev1.NamespaceCondition) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	status := p.api.SubResource("status")
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.Namespace}}
	if err := status.Get(ctx, namespace.DeepCopy(), namespace); err != nil {
		return err
	}
	p.namespace = namespace
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
