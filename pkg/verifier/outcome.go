// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto"
	"fmt"
	"time"
)

// Outcome is what is to be done with a request. The zero value is no outcome: nothing may be done on it.
type Outcome int

// The outcomes.
const (
	// Ignore: the request is not for us to decide.
	Ignore Outcome = iota + 1
	// Wait: something is missing. Look again later; no condition is set.
	Wait
	// Deny: something contradicts, or was missing for too long. Terminal.
	Deny
	// Challenge: a good hello. It is answered, never approved.
	Challenge
	// Approve: every rule holds. Write the Record first, and approve only if that succeeded.
	Approve
	// Fail: a request that somebody approved must not be signed. Terminal.
	Fail
	// Sign: every rule holds for an approved request that the record names.
	Sign
	// ApproveUnattested: a node that the policy leaves alone renews without evidence, by another's signer. No record is written.
	ApproveUnattested
	// ApproveServing: a serving certificate of a node that has attested. The record stays as it is.
	ApproveServing
	// SignServing: every rule holds for a serving certificate that was approved, under a signer of ours. The record stays as it is.
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

// Class is what kind of request it is. The zero value is that of a requester who may ask for nothing.
type Class int

// The classes.
const (
	// First: a bootstrap identity asks for a machine that has no record.
	First Class = iota + 1
	// Again: a bootstrap identity asks for a machine that has a record.
	Again
	// Renewal: a node asks with its own certificate.
	Renewal
	// Serving: a node asks, with its own certificate, for one to serve with.
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
	// Refusals are all the rules that led to Deny or Fail, or what is waited for. No policy's contents are in them: the node reads them.
	Refusals Refusals
	// Warnings are rules that failed and do not count, by the policy.
	Warnings Refusals
	// Grant is set with all that let a request pass.
	Grant *Grant
}

// Grant is what the rules have found, for Challenge: claimed, for Approve and Sign: proven. None of it is taken from the request alone.
type Grant struct {
	// NodeName is the name that the machine has, and the certificate gets.
	NodeName string
	// PublicKey is that of the request, which is signed with it.
	PublicKey crypto.PublicKey
	// MaxLifetime bounds the certificate's lifetime; zero: the rules do not.
	MaxLifetime time.Duration
	// Addresses are the names and IPs that a serving certificate is for: the machine's, and no other's. A client certificate has none.
	Addresses Addresses
	// Record is the machine's record as it is to be from now on. Where there is none to write: the zero value.
	Record Record
}
