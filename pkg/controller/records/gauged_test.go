// SPDX-License-Identifier: Apache-2.0

package records

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// A certificate of an EK that was replaced hides no certificate that ends sooner.
func TestGaugedIsTheNewestCertificateOfTheEK(t *testing.T) {
	attested := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	record := &v1alpha1.NodeAttestation{
		Spec: v1alpha1.NodeAttestationSpec{NodeName: "worker-1"},
		Status: v1alpha1.NodeAttestationStatus{LastAttested: new(metav1.NewTime(attested)), Certificates: []v1alpha1.IssuedCertificate{
			{NotAfter: metav1.NewTime(attested.Add(24 * time.Hour)), FormerEK: true},
			{NotAfter: metav1.NewTime(attested.Add(2 * time.Hour))},
			{NotAfter: metav1.NewTime(attested.Add(time.Hour))},
		}},
	}
	if got, want := gaugedOf(record), (telemetry.Record{NodeName: "worker-1", LastAttested: attested, NotAfter: attested.Add(time.Hour)}); got != want {
		t.Errorf("%+v, not %+v", got, want)
	}
	if got := gaugedOf(&v1alpha1.NodeAttestation{}); got != (telemetry.Record{}) {
		t.Errorf("%+v of an empty record", got)
	}
}
