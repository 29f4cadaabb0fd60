// SPDX-License-Identifier: Apache-2.0

package act

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/collect"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// rehearse carries out a decision on a rehearsal, also in audit mode: it answers a hello with a
// challenge, and every other outcome with a verdict. It writes annotations only. So a rehearsal is
// never approved, denied, signed or recorded. kube-controller-manager deletes it after 24 h.
func (a *Actor) rehearse(ctx context.Context, in *collect.Inputs, d verifier.Decision) (Written, error) {
	verdict := attestation.Statement{}
	switch d.Outcome {
	case verifier.Ignore: // somebody has approved it, which has no effect
		return Written{}, nil
	case verifier.Challenge:
		return a.challenge(ctx, in)
	case verifier.Rehearsed:
		verdict = attestation.Statement{Reason: attestation.ReasonRehearsalPassed, Text: PassedText(a.Rules, in, d)}
	case verifier.Deny:
		reason := string(d.Refusals.Reason())
		verdict = attestation.Statement{Reason: reason, Text: strings.TrimPrefix(d.Refusals.Error(), reason+": ")}
	default:
		return Written{}, fmt.Errorf("a rehearsal cannot have the outcome %v", d.Outcome)
	}
	const mark = " ..." // of a cut text
	verdict.Text = text.Line(verdict.Text, attestation.MaxStatement-len(verdict.Reason)-len(": ")-len(mark))
	answered, err := a.Annotate(ctx, in.Request, map[string]any{attestation.AnnotationVerdict: verdict.String(), attestation.AnnotationWaiting: nil})
	return Written{Request: answered}, err
}

// PassedText explains the verdict on a rehearsal for which every rule holds. It names the signers,
// since a rehearsal does not show which one the node will ask.
func PassedText(rules *verifier.Rules, in *collect.Inputs, d verifier.Decision) string {
	text := fmt.Sprintf("this machine would get a certificate for the node %s from the signer %s", d.Grant.NodeName, strings.Join(rules.SignersFor(in.Claim.Provider), " or "))
	recorded := slices.ContainsFunc(in.Records, func(r verifier.Record) bool { return r.NodeName == d.Grant.NodeName })
	if d.Class == verifier.Renewal && !recorded {
		text += ", with a bootstrap credential, since there is no record of it"
	}
	if len(d.Warnings) > 0 {
		text += ", with warnings: " + d.Warnings.Error()
	}
	return text
}
