// SPDX-License-Identifier: Apache-2.0

package records

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// MarkRevoked marks the certificates of a record with these fingerprints as revoked. It returns
// those that were not marked before.
func MarkRevoked(object *v1alpha1.NodeAttestation, fingerprints map[string]bool) (newly []v1alpha1.IssuedCertificate) {
	for i := range object.Status.Certificates {
		if c := &object.Status.Certificates[i]; fingerprints[c.SHA256] && !c.Revoked {
			c.Revoked = true
			newly = append(newly, *c)
		}
	}
	return newly
}

// revoked returns the condition Revoked, which is about the newest certificate. It returns nil if
// no certificate was ever revoked. Without a newest certificate, the condition does not change.
func revoked(object *v1alpha1.NodeAttestation, newest *v1alpha1.IssuedCertificate) *metav1.Condition {
	condition := &metav1.Condition{Type: v1alpha1.ConditionRevoked, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonRevoked}
	before := meta.FindStatusCondition(object.Status.Conditions, v1alpha1.ConditionRevoked)
	switch by := object.Status.Revocation; {
	case newest == nil && before != nil:
		return before.DeepCopy()
	case newest != nil && newest.Revoked && mayHaveRevoked(by, newest):
		condition.Message = fmt.Sprintf("since %s the certificate with serial %s is refused, by revocation %s: %s", by.Time.UTC().Format(time.RFC3339), newest.Serial, by.Name, by.Reason)
	case newest != nil && newest.Revoked:
		condition.Message = fmt.Sprintf("the certificate with serial %s is refused", newest.Serial)
	case by != nil || before != nil:
		condition.Status, condition.Reason = metav1.ConditionFalse, v1alpha1.ReasonRenewed
		condition.Message = "a certificate was issued since the last revocation"
	default:
		return nil
	}
	return condition
}

// mayHaveRevoked reports whether a certificate was requested before a revocation was applied. A
// later one is revoked because the machine was suspended.
func mayHaveRevoked(by *v1alpha1.AppliedRevocation, c *v1alpha1.IssuedCertificate) bool {
	return by != nil && (c.Requested == nil || !c.Requested.After(by.Time.Time))
}

// suspended returns the condition Suspended, nil if the machine was never suspended.
func suspended(object *v1alpha1.NodeAttestation) *metav1.Condition {
	condition := &metav1.Condition{Type: v1alpha1.ConditionSuspended, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonSuspended}
	switch by := object.Status.Suspension; {
	case by != nil:
		condition.Message = fmt.Sprintf("since %s the machine gets no certificate, and API servers refuse its writes: %s", by.Time.UTC().Format(time.RFC3339), by.Reason)
	case meta.FindStatusCondition(object.Status.Conditions, v1alpha1.ConditionSuspended) != nil:
		condition.Status, condition.Reason = metav1.ConditionFalse, v1alpha1.ReasonResumed
		condition.Message = "an operator has resumed the machine"
	default:
		return nil
	}
	return condition
}
