// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	certificatesv1 "k8s.io/api/certificates/v1"
)

// Texts of requesters and providers are bounded, printable and on one line. All of them fit into an
// Event on a Node, after the request's name.
func TestSubjectIsBounded(t *testing.T) {
	long := strings.Repeat("x\x1b\n", 1000)
	about := Describe(nil, &certificatesv1.CertificateSigningRequest{}, nil,
		verifier.Claim{NodeName: long, ProviderID: long}, verifier.Evidence{EK: long, AK: long}, verifier.First)
	about.EKTemplate = strings.Repeat("t", maxTemplate+4)
	note := strings.Repeat("n", MaxName) + ": " + about.Note("Reason: "+long)
	if len(note) > telemetry.MaxMessage || strings.ContainsAny(note, "\x1b\n") || !strings.Contains(note, `Reason: x\u001b x`) || !strings.HasSuffix(note, ", class first)") {
		t.Errorf("%d bytes: %q", len(note), note)
	}
	if len(about.AK) > maxKey+4 {
		t.Errorf("%d bytes", len(about.AK))
	}
}

// countedParses counts how often a hello is parsed.
type countedParses struct {
	evidence.Challenger
	parsed *int
}

func (c countedParses) EK(_, _ *certificatesv1.CertificateSigningRequest) string {
	*c.parsed++
	return "ek-1"
}

// An approval and the signing after it parse the hello for their reports once.
func TestSubjectIsParsedOnce(t *testing.T) {
	parsed := 0
	in := (&Inputs{Provider: countedParses{parsed: &parsed}, Input: verifier.Input{Request: &certificatesv1.CertificateSigningRequest{}}}).Complete()
	approval := SubjectOf(in, verifier.Decision{Class: verifier.First})
	signing := SubjectOf(in.Approved(in.Request, &v1alpha1.NodeAttestation{}, verifier.Record{}), verifier.Decision{Class: verifier.Renewal})
	if parsed != 1 || approval.EK != "ek-1" || signing.EK != "ek-1" || approval.Class != verifier.First || signing.Class != verifier.Renewal {
		t.Errorf("parsed %d times: %+v, %+v", parsed, approval, signing)
	}
}
