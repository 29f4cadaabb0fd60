// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
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
