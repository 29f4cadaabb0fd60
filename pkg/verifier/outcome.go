// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto"
	"fmt"
	"time"
)

// Outcome is what to do with a request. The zero value is no outcome, and allows nothing.
type Outcome int

// The outcomes.
const (
	// Ignore: others decide on the request.
	Ignore Outcome = iota + 1
	// Wait: something is missing. Look again later; no condition is set.
	Wait
	// Deny: something contradicts, or was missing for too long. Terminal.
	Deny
	// Challenge: a good hello. It gets a challenge, and is never approved.
	Challenge
	// Approve: every rule holds. Write the Record first, and approve only if that succeeded.
	Approve
	// Fail: somebody approved the request, and it must not be signed. Terminal.
	Fail
	// Sign: every rule holds for an approved request that the record was written for.
	Sign
	// ApproveUnattested: an unattested node of the policy renews without evidence, and another
	// signer issues. No record is written.
	ApproveUnattested
	// ApproveServing: a serving certificate of a node that has attested. The record stays as it is.
	ApproveServing
	// SignServing: every rule holds for an approved serving certificate, under a signer of ours.
	// The record stays as it is.
	SignServing
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
	}
	return fmt.Sprintf("Outcome(%d)", int(o))
}

// Class is the kind of a request. The zero value is that of a requester who may ask for nothing.
type Class int

// The classes.
const (
	// First: a bootstrap identity asks for a machine that has no record.
	First Class = iota + 1
	// Again: a bootstrap identity asks for a machine that has a record.
	Again
	// Renewal: a node asks with its own certificate.
	Renewal
	// Serving: a node asks, with its own certificate, for a serving certificate.
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
	// Refusals are all the rules that led to Deny or Fail, or what Wait waits for. They contain
	// nothing of the policy, since the node reads them.
	Refusals Refusals
	// Warnings are rules that failed and do not count, by the policy.
	Warnings Refusals
	// Grant is set with each outcome that lets a request pass.
	Grant *Grant
}

// Grant is what the rules found: claimed for Challenge, proven for Approve and Sign. Nothing in it
// comes from the request alone.
type Grant struct {
	// NodeName is the machine's node name, which the certificate gets.
	NodeName string
	// PublicKey is the request's key, which signed the request.
	PublicKey crypto.PublicKey
	// MaxLifetime bounds the certificate's lifetime. Zero: the rules set no bound.
	MaxLifetime time.Duration
	// Addresses are the names and IPs that a serving certificate is for: the machine's, and no
	// other's. A client certificate has none.
	Addresses Addresses
	// Record is the machine's record as it must be from now on. If none is to be written: the zero
	// value.
	Record Record
}
