// SPDX-License-Identifier: Apache-2.0

package collect

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// The cached hello serves only if the machine's record is older: a later one may be of a proof of
// this hello.
func TestAttestedSince(t *testing.T) {
	filed := time.Unix(1_800_000_000, 0)
	hello := &certificatesv1.CertificateSigningRequest{}
	hello.CreationTimestamp = metav1.NewTime(filed)
	for name, c := range map[string]struct {
		attested *metav1.Time
		want     bool
	}{
		"an hour before":           {&metav1.Time{Time: filed.Add(-time.Hour)}, false},
		"just before":              {&metav1.Time{Time: filed.Add(-time.Second)}, true},
		"since":                    {&metav1.Time{Time: filed.Add(time.Second)}, true},
		"nothing says when it was": {nil, true},
	} {
		s := &Inputs{Objects: []v1alpha1.NodeAttestation{{}}}
		s.Objects[0].Status.LastAttested = c.attested
		if got := s.attestedSince(hello); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if (&Inputs{}).attestedSince(hello) {
		t.Error("without a record: creating one fails if there is one")
	}
}
