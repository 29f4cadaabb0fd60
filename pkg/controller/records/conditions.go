// SPDX-License-Identifier: Apache-2.0

package records

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// setConditions sets the conditions and the expiry of a record that is about to be written. They
// are for people and tools: no decision reads them. So a replica of an older release may drop them
// in an update. The next write derives them again.
func setConditions(object *v1alpha1.NodeAttestation, now time.Time) {
	newest := newestCertificate(object)
	object.Status.Expires = nil
	if newest != nil {
		object.Status.Expires = newest.NotAfter.DeepCopy()
	}
	conditions := []metav1.Condition{attested(object), certificateIssued(object, newest)}
	for _, optional := range []*metav1.Condition{revoked(object, newest), suspended(object)} {
		if optional != nil {
			conditions = append(conditions, *optional)
		}
	}
	for _, condition := range conditions {
		condition.LastTransitionTime = metav1.NewTime(now)
		meta.SetStatusCondition(&object.Status.Conditions, condition)
	}
	// This write changes spec or status, so it gets the next generation. The resource version
	// excludes a write in between. "kubectl wait" ignores conditions of earlier generations.
	for i := range object.Status.Conditions {
		object.Status.Conditions[i].ObservedGeneration = object.Generation + 1
	}
}

// newestCertificate returns the certificate that was last issued to the EK in spec, nil if there is
// none. It may not be published yet. A recovered certificate does not count.
func newestCertificate(object *v1alpha1.NodeAttestation) *v1alpha1.IssuedCertificate {
	for i := len(object.Status.Certificates) - 1; i >= 0; i-- {
		if c := &object.Status.Certificates[i]; !c.FormerEK && !c.Recovered() {
			return c
		}
	}
	return nil
}

func attested(object *v1alpha1.NodeAttestation) metav1.Condition {
	condition := metav1.Condition{Type: v1alpha1.ConditionAttested, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAttested}
	if replaced := object.Status.EKReplaced; replaced != nil {
		condition.Status, condition.Reason = metav1.ConditionFalse, v1alpha1.ReasonEKReplaced
		condition.Message = fmt.Sprintf("since %s the source in spec.ek names other endorsement keys: the one in spec.ek is refused until the source names it again, or a TPM with another one attests",
			replaced.Since.UTC().Format(time.RFC3339))
		return condition
	}
	if request := object.Status.Request; request != nil {
		condition.Message = "the evidence of request " + request.Name + " was accepted"
	}
	return condition
}

func certificateIssued(object *v1alpha1.NodeAttestation, newest *v1alpha1.IssuedCertificate) metav1.Condition {
	condition := metav1.Condition{Type: v1alpha1.ConditionCertificateIssued, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonNotIssued}
	if newest == nil {
		condition.Message = "no certificate was issued to this endorsement key yet"
		return condition
	}
	condition.Status, condition.Reason = metav1.ConditionTrue, v1alpha1.ReasonIssued
	condition.Message = fmt.Sprintf("the certificate with serial %s ends at %s", newest.Serial, newest.NotAfter.UTC().Format(time.RFC3339))
	return condition
}
