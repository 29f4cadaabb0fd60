// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/preflight"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// inForce returns the condition in a cluster.
func inForce(t *testing.T, c client.Client) corev1.NamespaceCondition {
	t.Helper()
	return conditionOf(t, c, preflight.ConditionPolicies)
}

// conditionOf returns a condition of the Namespace in a cluster.
func conditionOf(t *testing.T, c client.Client, kind corev1.NamespaceConditionType) corev1.NamespaceCondition {
	t.Helper()
	namespace := &corev1.Namespace{}
	if err := c.Get(t.Context(), client.ObjectKey{Name: controllerprocess.Namespace}, namespace); err != nil {
		t.Fatal(err)
	}
	for _, condition := range namespace.Status.Conditions {
		if condition.Type == kind {
			return condition
		}
	}
	return corev1.NamespaceCondition{}
}

// A workload cluster's policies are watched by its engine: what is wrong stands in that cluster,
// and in an Event on the Cluster. Enforcement does not start without them.
func TestPoliciesOfAWorkloadCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "policed", nil)
	api := c.workload.client
	const policy = "node-attestation-approval"
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{}
	if err := api.Get(t.Context(), client.ObjectKey{Name: policy}, binding); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		again := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: policy, Labels: binding.Labels}, Spec: binding.Spec}
		if err := api.Create(context.WithoutCancel(t.Context()), again); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	var serving *controllerprocess.Controller
	t.Cleanup(func() { // the next test has the cluster
		if serving != nil { // it would deny what the policies are tried on
			if err := serving.Kill(); err != nil {
				t.Error(err)
			}
		}
		restore()
		if err := controllerprocess.AwaitPolicies(context.WithoutCancel(t.Context()), c.workload.ControlPlane); err != nil {
			t.Error(err)
		}
	})
	// The condition is what an earlier test has left.
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: controllerprocess.Namespace}}
	if err := api.Status().Patch(t.Context(), namespace, client.RawPatch(types.MergePatchType, []byte(`{"status": {"conditions": null}}`))); err != nil {
		t.Fatal(err)
	}
	said := func(reason string) bool {
		list := &eventsv1.EventList{}
		if err := w.client.List(t.Context(), list, client.InNamespace(w.namespace)); err != nil {
			t.Fatal(err)
		}
		for _, e := range list.Items {
			if e.Regarding.Kind == "Cluster" && e.Reason == reason && strings.Contains(e.Note, policy) {
				return true
			}
		}
		return false
	}
	if err := api.Delete(t.Context(), binding.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	serving = w.start(t, nil)
	harness.Eventually(t, 30*time.Second, "enforcement is refused", func() bool { return said("EnforcementRefused") })
	restore()
	harness.Eventually(t, time.Minute, "the policies are in force", func() bool { return inForce(t, api).Status == corev1.ConditionTrue })
	if err := api.Delete(t.Context(), &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: policy}}); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, "the condition says that one is missing", func() bool {
		condition := inForce(t, api)
		return condition.Status == corev1.ConditionFalse && strings.Contains(condition.Message, policy+": "+preflight.PolicyMissing)
	})
	harness.Eventually(t, harness.Soon, "an Event on the Cluster says so", func() bool { return said(preflight.ReasonPoliciesNotInForce) })
	restore()
	harness.Eventually(t, harness.Soon, "the policies are in force again", func() bool { return inForce(t, api).Status == corev1.ConditionTrue })
	harness.Eventually(t, harness.Soon, "the management cluster's are, too", func() bool { return inForce(t, w.client).Status == corev1.ConditionTrue })
}
