// SPDX-License-Identifier: Apache-2.0

package command

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// An API server, an approver or a vendor's certificate may have written any text that the plugin
// reports. None of it gets to a terminal as it is, in any format.
func TestHostileTextOnTheNode(t *testing.T) {
	check := func(name, printed string) {
		for _, problem := range hostiletext.Find(printed) {
			t.Errorf("%s: %s", name, problem)
		}
	}
	report := &enrol.Report{Evidence: []provider.Fact{{}}}
	overview := &nodestatus.Overview{
		Certificate: &nodestatus.CertificateOverview{}, Announcement: &nodestatus.AnnouncementOverview{}, EK: &nodestatus.EKOverview{},
		LastRun: &nodestatus.LastRunOverview{}, Pending: &nodestatus.PendingOverview{},
	}
	checks := doctor.Report{Checks: []checkup.Result{{}}}
	for name, value := range map[string]any{"report": report, "overview": overview, "doctor": &checks} {
		hostiletext.Plant(value, "Request", "Failure")
		for _, format := range []string{outputformat.JSON, outputformat.YAML} {
			out, err := outputformat.Encode(format, value)
			if err != nil {
				t.Errorf("%s, %s: %v", name, format, err)
			}
			check(name+", "+format, string(out))
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := csr.PKCS10(csr.Identity{NodeName: "node"}, key)
	if err != nil {
		t.Fatal(err)
	}
	content, err := attestation.Request{PKCS10: der, Provider: "tpm", Data: []byte("{}")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	report.Request = &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{Request: content}}
	out, err := readable(report)
	if err != nil {
		t.Fatal(err)
	}
	check("dry run", string(out))
	check("status", string(describeOverview(overview)))
}
