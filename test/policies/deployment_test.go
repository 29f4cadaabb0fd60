// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The deployment's pods are made as the ReplicaSet controller would make them, in a namespace that
// takes restricted ones only.
func TestPodsAreRestricted(t *testing.T) {
	deployment, err := shared.admin.AppsV1().Deployments(namespace).Get(t.Context(), account, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	newPod := func() *corev1.Pod {
		template := deployment.Spec.Template.DeepCopy()
		template.Name = "pod"
		return &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	}
	try := func(pod *corev1.Pod) (*corev1.Pod, error) {
		return shared.admin.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: dryRun})
	}
	made, err := try(newPod())
	if err != nil {
		t.Fatal(err)
	}
	container := made.Spec.Containers[0]
	if made.Spec.ServiceAccountName != account || *made.Spec.Priority < 1_000_000_000 || len(container.VolumeMounts) != 2 ||
		strings.Join(container.Args, " ") != "--config=/etc/node-attestation-controller/config.yaml --leader-identity=$(POD_NAME)_$(POD_UID)" || !*container.SecurityContext.ReadOnlyRootFilesystem {
		t.Errorf("pod: %+v", made.Spec)
	}
	for what, spoil := range map[string]func(*corev1.Pod){
		"root":         func(p *corev1.Pod) { p.Spec.SecurityContext.RunAsUser = new(int64(0)) },
		"escalation":   func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.AllowPrivilegeEscalation = new(true) },
		"capabilities": func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.Capabilities = nil },
		"no seccomp":   func(p *corev1.Pod) { p.Spec.SecurityContext.SeccompProfile = nil },
		"host's disk": func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}})
		},
	} {
		pod := newPod()
		spoil(pod)
		if _, err := try(pod); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "PodSecurity") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
