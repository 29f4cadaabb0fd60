// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"context"
	"encoding/json"
	"os"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// playDeployment replaces what a cluster has beside its API server: the Deployment's controller,
// scheduler and kubelet. One process is all replicas of the Deployment. It is restarted when the
// pod's template has changed, or when it has ended by itself. A restart reads the ConfigMap again.
func (b *bed) playDeployment(ctx context.Context) {
	started := "" // the template of the process that runs
	for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		d, err := b.Client().AppsV1().Deployments(namespace).Get(ctx, "node-attestation-controller", metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			d = &appsv1.Deployment{}
			d.Spec.Replicas = new(int32)
		case err != nil:
			continue // while etcd is restored
		}
		template, err := json.Marshal(d.Spec.Template)
		if err != nil {
			panic(err) // it was decoded
		}
		wanted := ""
		if *d.Spec.Replicas > 0 {
			wanted = string(template)
		}
		if started != "" && (wanted != started || b.ended()) {
			_ = b.controller.Kill()
			started = ""
		}
		if wanted != "" && started == "" && b.startPod(ctx) {
			started = wanted
		}
		b.writeStatus(ctx, d, wanted == started)
	}
}

func (b *bed) ended() bool {
	select {
	case <-b.controller.Process().Done():
		return true
	default:
		return false
	}
}

// startPod starts the controller. It reports whether it is ready.
func (b *bed) startPod(ctx context.Context) bool {
	settings, err := b.Client().CoreV1().ConfigMaps(namespace).Get(ctx, "node-attestation-controller", metav1.GetOptions{})
	if err != nil {
		return false
	}
	if err := os.WriteFile(b.controller.ConfigFile(), []byte(settings.Data["config.yaml"]), 0o600); err != nil {
		return false
	}
	if err := b.controller.Start(ctx); err != nil {
		return false
	}
	if err := b.controller.Ready(ctx); err != nil {
		_ = b.controller.Kill()
		return false
	}
	return true
}

// writeStatus writes the status that `kubectl rollout status` waits for.
func (b *bed) writeStatus(ctx context.Context, d *appsv1.Deployment, ready bool) {
	if d.Name == "" || (d.Status.ObservedGeneration == d.Generation && (d.Status.ReadyReplicas > 0) == (ready && *d.Spec.Replicas > 0)) {
		return
	}
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: *d.Spec.Replicas, UpdatedReplicas: *d.Spec.Replicas}
	if ready {
		d.Status.ReadyReplicas, d.Status.AvailableReplicas = *d.Spec.Replicas, *d.Spec.Replicas
	}
	// a conflict is written the next time
	_, _ = b.Client().AppsV1().Deployments(namespace).UpdateStatus(ctx, d, metav1.UpdateOptions{})
}
