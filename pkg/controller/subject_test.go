// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// A machine that nobody has listed is named by its own hello, in the log and in the Event: the
// operator sees who waits.
func TestUnlistedMachineIsNamed(t *testing.T) {
	inBubble(t, func(k *kit) {
		k.tpm.vouched = true
		k.providerIDs["unlisted"] = "test://rack-1/slot-2"
		in := k.start(inSync)
		in.once(k.request("hello", attestation.HelloSignerName, "unlisted", asToken("worker-1"), document{EK: "ek-unlisted"}).Name)
		about := []string{"unlisted", "test://rack-1/slot-2", "ek-unlisted", "template-of-ek-unlisted", "first"}
		for i, field := range []string{"node", "providerID", "ek", "ekTemplate", "class"} {
			if lines := k.journal.linesWith(" " + field + " " + about[i]); len(lines) != 1 {
				k.Errorf("%s is in %d lines of %q", field, len(lines), k.journal.lines)
			}
		}
		const want = "(node unlisted, provider ID test://rack-1/slot-2, EK ek-unlisted, template template-of-ek-unlisted, class first)"
		if events := k.journal.eventsOf(string(verifier.ReasonMachineNotFound)); len(events) != 1 || !strings.HasSuffix(events[0], want) {
			k.Errorf("%q", events)
		}
	})
}

// A hello that is denied before its evidence is judged has its EK and template, and so has one that
// cannot be judged.
func TestSubjectWithoutJudgedEvidence(t *testing.T) {
	for name, c := range map[string]struct {
		node   string
		hello  document
		reason string
	}{
		"denied":      {"worker-2", document{EK: "ek-1"}, string(verifier.ReasonNodeNameMismatch)},
		"unavailable": {"worker-1", document{EK: "ek-1", Unavailable: true}, string(verifier.ReasonAttestationUnavailable)},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(k *kit) {
				in := k.start(inSync)
				in.once(k.request("hello", attestation.HelloSignerName, c.node, asToken("worker-1"), c.hello).Name)
				if lines := k.journal.linesWith("reason " + c.reason); len(lines) != 1 || !strings.Contains(lines[0], " ek ek-1 ekTemplate template-of-ek-1 ") {
					k.Errorf("%q", lines)
				}
			})
		})
	}
}

// Texts of requesters and providers are bounded, printable and on one line. All of them fit into an
// Event on a Node, after the request's name.
func TestSubjectIsBounded(t *testing.T) {
	long := strings.Repeat("x\x1b\n", 1000)
	about := Describe(nil, &certificatesv1.CertificateSigningRequest{}, nil,
		verifier.Claim{NodeName: long, ProviderID: long}, verifier.Evidence{EK: long, AK: long}, verifier.First)
	about.EKTemplate = strings.Repeat("t", maxTemplate+4)
	note := strings.Repeat("n", maxName) + ": " + about.note("Reason: "+long)
	if len(note) > telemetry.MaxMessage || strings.ContainsAny(note, "\x1b\n") || !strings.Contains(note, `Reason: x\u001b x`) || !strings.HasSuffix(note, ", class first)") {
		t.Errorf("%d bytes: %q", len(note), note)
	}
	if len(about.AK) > maxKey+4 {
		t.Errorf("%d bytes", len(about.AK))
	}
}

// countedParses counts how often a hello is parsed.
type countedParses struct {
	Challenger
	parsed *int
}

func (c countedParses) EK(_, _ *certificatesv1.CertificateSigningRequest) string {
	*c.parsed++
	return "ek-1"
}

// An approval and the signing after it parse the hello for their reports once.
func TestSubjectIsParsedOnce(t *testing.T) {
	parsed := 0
	in := (&inputs{provider: countedParses{parsed: &parsed}, Input: verifier.Input{Request: requestNamed("r", "r")}}).complete()
	approval := subjectOf(in, verifier.Decision{Class: verifier.First})
	signing := subjectOf(in.approved(in.Request, &v1alpha1.NodeAttestation{}, verifier.Record{}), verifier.Decision{Class: verifier.Renewal})
	if parsed != 1 || approval.EK != "ek-1" || signing.EK != "ek-1" || approval.Class != verifier.First || signing.Class != verifier.Renewal {
		t.Errorf("parsed %d times: %+v, %+v", parsed, approval, signing)
	}
}
