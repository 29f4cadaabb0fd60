// SPDX-License-Identifier: Apache-2.0

// Package verifier is the rules engine. Rules.Judge and Rules.JudgeSigning decide on a
// CertificateSigningRequest, from the request, its evidence, records, machines, a policy and a
// time. The package does no I/O and reads no clock. docs/rules.md defines each rule.
//
// Verifiers of providers and the rules both return Refusals, the reasons why a request is refused.
package verifier

import (
	"fmt"
	"strings"
)

// Reason is a stable CamelCase name of why a request is refused. It is used in conditions and
// metrics labels.
type Reason string

// ReasonRefused replaces a missing reason. Zero values refuse, too.
const ReasonRefused Reason = "Refused"

// maxMessage bounds the message of one refusal, in bytes.
const maxMessage = 256

// Refusal is one rule that a request failed.
type Refusal struct {
	Reason Reason
	// Message is for people. It must have no secret, and at most a few quoted words of a peer's
	// text.
	Message string
}

func (r Refusal) String() string {
	if r.Reason == "" {
		r.Reason = ReasonRefused
	}
	if r.Message == "" {
		return string(r.Reason)
	}
	return string(r.Reason) + ": " + r.Message
}

// Refusals are all the rules that a request failed, in the order of the rules. As an error,
// even an empty list refuses. Err returns nil for an empty list.
type Refusals []Refusal

// Add adds a failed rule. Each character that is not printable ASCII becomes a question mark.
func (r *Refusals) Add(reason Reason, format string, arguments ...any) {
	message := fmt.Sprintf(format, arguments...)
	if len(message) > maxMessage {
		message = message[:maxMessage-3] + "..."
	}
	message = strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, message)
	*r = append(*r, Refusal{reason, message})
}

// Err returns r as an error, nil if no rule failed.
func (r Refusals) Err() error {
	if len(r) == 0 {
		return nil
	}
	return r
}

// Error joins all of them.
func (r Refusals) Error() string {
	if len(r) == 0 {
		return string(ReasonRefused)
	}
	parts := make([]string, len(r))
	for i := range r {
		parts[i] = r[i].String()
	}
	return strings.Join(parts, "; ")
}

// Reason returns the reason of the first refusal.
func (r Refusals) Reason() Reason {
	if len(r) == 0 || r[0].Reason == "" {
		return ReasonRefused
	}
	return r[0].Reason
}

// Reasons returns each reason once, in order.
func (r Refusals) Reasons() []Reason {
	var reasons []Reason
	seen := map[Reason]bool{}
	for _, refusal := range r {
		if refusal.Reason == "" {
			refusal.Reason = ReasonRefused
		}
		if !seen[refusal.Reason] {
			seen[refusal.Reason] = true
			reasons = append(reasons, refusal.Reason)
		}
	}
	return reasons
}

// findings are the rules that a request failed. The order of denied decides which reason a denial
// shows first. The exceptions are in byPrecedence.
type findings struct {
	// denied has contradictions. missing has reasons to wait until the deadline. warned has failed
	// rules for which the policy only warns.
	denied, missing, warned Refusals
}

func (f *findings) deny(reason Reason, format string, arguments ...any) {
	f.denied.Add(reason, format, arguments...)
}

func (f *findings) wait(reason Reason, format string, arguments ...any) {
	f.missing.Add(reason, format, arguments...)
}

func (f *findings) warn(reason Reason, format string, arguments ...any) {
	f.warned.Add(reason, format, arguments...)
}

// fail adds a failed rule as a refusal or a warning, by mode.
func (f *findings) fail(mode Mode, reason Reason, format string, arguments ...any) {
	switch mode {
	case Off:
	case Warn:
		f.warn(reason, format, arguments...)
	default:
		f.deny(reason, format, arguments...)
	}
}

// add adds the findings of the next rule.
func (f *findings) add(next findings) {
	f.denied = append(f.denied, next.denied...)
	f.missing = append(f.missing, next.missing...)
	f.warned = append(f.warned, next.warned...)
}
