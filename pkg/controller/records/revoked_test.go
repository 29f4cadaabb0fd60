// SPDX-License-Identifier: Apache-2.0

package records

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// A record's conditions say what was applied to its machine, and whether it still applies.
func TestConditionsOfRevocation(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	object := &v1alpha1.NodeAttestation{}
	object.Status.Certificates = []v1alpha1.IssuedCertificate{{SHA256: "a", Serial: "1"}, {SHA256: "b", Serial: "2"}}
	check := func(kind string, status metav1.ConditionStatus, reason, part string) {
		t.Helper()
		setConditions(object, now)
		c := meta.FindStatusCondition(object.Status.Conditions, kind)
		if status == "" {
			if c != nil {
				t.Errorf("%s: %+v", kind, c)
			}
			return
		}
		if c == nil || c.Status != status || c.Reason != reason || !strings.Contains(c.Message, part) {
			t.Errorf("%s: %+v", kind, c)
		}
	}
	check(v1alpha1.ConditionRevoked, "", "", "")
	check(v1alpha1.ConditionSuspended, "", "", "")

	if newly := MarkRevoked(object, map[string]bool{"b": true, "c": true}); len(newly) != 1 || newly[0].SHA256 != "b" {
		t.Errorf("%+v", newly)
	}
	if newly := MarkRevoked(object, map[string]bool{"b": true}); len(newly) != 0 {
		t.Errorf("again: %+v", newly)
	}
	check(v1alpha1.ConditionRevoked, metav1.ConditionTrue, v1alpha1.ReasonRevoked, "serial 2")
	object.Status.Revocation = &v1alpha1.AppliedRevocation{Name: "r", Reason: "key leaked", Time: metav1.NewTime(now)}
	check(v1alpha1.ConditionRevoked, metav1.ConditionTrue, v1alpha1.ReasonRevoked, "key leaked")
	object.Status.Certificates = append(object.Status.Certificates, v1alpha1.IssuedCertificate{SHA256: "c"})
	check(v1alpha1.ConditionRevoked, metav1.ConditionFalse, v1alpha1.ReasonRenewed, "")

	object.Status.Certificates[2].FormerEK, object.Status.Certificates[1].FormerEK, object.Status.Certificates[0].FormerEK = true, true, true
	check(v1alpha1.ConditionRevoked, metav1.ConditionFalse, v1alpha1.ReasonRenewed, "") // as it was
	requested := metav1.NewTime(now.Add(time.Second))
	object.Status.Certificates = append(object.Status.Certificates, v1alpha1.IssuedCertificate{SHA256: "d", Serial: "4", Requested: &requested, Revoked: true})
	check(v1alpha1.ConditionRevoked, metav1.ConditionTrue, v1alpha1.ReasonRevoked, "serial 4 is refused")
	if c := meta.FindStatusCondition(object.Status.Conditions, v1alpha1.ConditionRevoked); strings.Contains(c.Message, "key leaked") {
		t.Errorf("an earlier revocation did not revoke it: %+v", c)
	}
	object.Status.Certificates = nil
	// as it was
	check(v1alpha1.ConditionRevoked, metav1.ConditionTrue, v1alpha1.ReasonRevoked, "serial 4")

	object.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: "machine stolen", Time: metav1.NewTime(now)}
	check(v1alpha1.ConditionSuspended, metav1.ConditionTrue, v1alpha1.ReasonSuspended, "machine stolen")
	object.Status.Suspension = nil
	check(v1alpha1.ConditionSuspended, metav1.ConditionFalse, v1alpha1.ReasonResumed, "")
}

// A grant keeps the marks of revoked certificates in the record, and the rules see them.
func TestRevokedSurvivesGrants(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)
	object := &v1alpha1.NodeAttestation{}
	object.Spec.EK = &v1alpha1.EndorsementKey{Fingerprint: "ek"}
	object.Status.Revocation = &v1alpha1.AppliedRevocation{Name: "r", Reason: "key leaked", Time: metav1.NewTime(now)}
	object.Status.Suspension = &v1alpha1.AppliedSuspension{Reason: "stolen", Time: metav1.NewTime(now)}
	for _, sha256 := range []string{"a", "b"} {
		object.Status.Certificates = append(object.Status.Certificates, v1alpha1.IssuedCertificate{SHA256: sha256, NotAfter: metav1.NewTime(now.Add(time.Hour))})
	}
	MarkRevoked(object, map[string]bool{"a": true})
	// with another key, the certificates become those of a former one
	for _, ek := range []string{"ek", "ek", "next"} {
		granted := recordOf(object)
		if ek == "ek" && (len(granted.Certificates) != 2 || !granted.Certificates[0].Revoked || granted.Certificates[1].Revoked) {
			t.Errorf("%s: the rules get %+v", ek, granted.Certificates)
		}
		granted.EK = ek
		SetGrant(object, granted, requestNamed("p", "p"), nil, now)
		if c := object.Status.Certificates; len(c) != 2 || !c[0].Revoked || c[1].Revoked {
			t.Errorf("%s: %+v", ek, c)
		}
		if object.Status.Revocation == nil || object.Status.Suspension == nil {
			t.Errorf("%s: %+v", ek, object.Status)
		}
	}
}
