// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto"
	"fmt"
	"time"
)

// Outcome says what to do with a request. The zero value is invalid, and allows nothing.
type Outcome int

// The outcomes.
const (
	// Ignore: the request is for other controllers.
	Ignore Outcome = iota + 1
	// Wait: an input is missing. Decide again later, and set no condition.
	Wait
	// Deny: an input contradicts, or was missing until the deadline. Terminal.
	Deny
	// Challenge: every rule holds for a hello. It gets a challenge, and is never approved.
	Challenge
	// Approve: every rule holds. Write the Record first, and approve only if that write succeeded.
	Approve
	// Fail: somebody approved the request, and it must not be signed. Terminal.
	Fail
	// Sign: every rule holds for an approved request, and the record was written for it.
	Sign
	// ApproveUnattested: an unattested node of the policy renews without evidence, and another
	// signer issues. No record is written.
	ApproveUnattested
	// ApproveServing: a serving certificate of a node that has attested. The record does not
	// change.
	ApproveServing
	// SignServing: every rule holds for an approved serving certificate, under a signer of ours.
	// The record does not change.
	SignServing
	// Rehearsed: every rule holds for the proof of a rehearsal. A real one would be approved. This
	// one never is.
	Rehearsed
)

func (o Outcome) String() string {
	switch o {
	case Ignore:
		return "Ignore"
	case Wait:
		return "Wait"
	case Deny:
		return "Deny"
	case Challenge:
		return "Challenge"
	case Approve:
		return "Approve"
	case Fail:
		return "Fail"
	case Sign:
		return "Sign"
	case ApproveUnattested:
		return "ApproveUnattested"
	case ApproveServing:
		return "ApproveServing"
	case SignServing:
		return "SignServing"
	case Rehearsed:
		return "Rehearsed"
	}
	return fmt.Sprintf("Outcome(%d)", int(o))
}

// Class is the kind of a request. The zero value is for a requester that may request nothing.
type Class int

// The classes.
const (
	// First: a bootstrap identity requests for a machine that has no record. A record that this
	// request created does not count until it has a certificate (isFirstProof).
	First Class = iota + 1
	// Again: a bootstrap identity requests for a machine that has a record.
	Again
	// Renewal: a node requests with its own certificate.
	Renewal
	// Serving: a node requests a serving certificate with its own client certificate.
	Serving
)

func (c Class) String() string {
	switch c {
	case First:
		return "first"
	case Again:
		return "again"
	case Renewal:
		return "renewal"
	case Serving:
		return "serving"
	}
	return "unknown"
}

// Decision is an outcome with its reasons. The zero value decides nothing.
type Decision struct {
	Outcome Outcome
	Class   Class
	// Refusals are the failed rules that led to Deny or Fail, or the reasons to Wait. They must
	// contain nothing of the policy, since the node reads them.
	Refusals Refusals
	// Warnings are failed rules for which the policy only warns.
	Warnings Refusals
	// Grant is set with each outcome that lets a request pass.
	Grant *Grant
}

// RateLimited returns the decision on a request that is over its rate (R1): a request that would
// pass waits. It has no deadline, since another request may have caused the wait. Any other
// decision stays as it is.
func (d Decision) RateLimited() Decision {
	if d.Grant == nil {
		return d
	}
	var f findings
	f.wait(ReasonRateLimited, "too many requests")
	return Decision{Outcome: Wait, Class: d.Class, Warnings: d.Warnings, Refusals: f.missing}
}

// Grant has the results of the rules. With Challenge they are only claims. With Approve and Sign
// they are proven, and nothing but PublicKey comes from the request alone.
type Grant struct {
	// NodeName is the machine's node name, for the certificate.
	NodeName string
	// PublicKey is the request's key. The request is signed with it.
	PublicKey crypto.PublicKey
	// MaxLifetime bounds the certificate's lifetime. Zero: the rules set no bound.
	MaxLifetime time.Duration
	// Addresses are the names and IPs for a serving certificate. They belong to the machine, and to
	// no other. A client certificate has none.
	Addresses Addresses
	// Record is the machine's new record. It is the zero value if no record must be written.
	Record Record
}
