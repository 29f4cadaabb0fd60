// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// reading is by what records a request is judged. What was told costs the API server nothing, and may be old: by that is settled only what does no
// great harm if it is, or what is found out when it is carried out.
type reading int

const (
	// whileWaiting goes by what was told, and asks for no Node. It settles that a request which waits goes on waiting.
	whileWaiting reading = iota + 1
	// unjudged goes by what was told, and judges no certificates, which costs most. It settles that a hello is denied which is none, or against which
	// something speaks whatever its evidence is worth.
	unjudged
	// asTold goes by what was told. It settles what becomes of a hello: a challenge grants nothing, and who was denied one by records that are no more
	// asks again half a minute later. And it settles that a proof is approved: the record is written under the version that was told, or made under
	// the one name that it can have, and what it must agree with is looked at after that (checkSole).
	asTold
	// fromAPIServer goes by what the API server holds, and settles everything.
	fromAPIServer
)

// readings are those by which a request is judged, one after the other, until one settles it.
func (c *Controller) readings(object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time) []reading {
	provider := c.providers[claim.Provider]
	_, challenges := provider.(Challenger)
	told, waits := c.records.InSync() && stateOf(object) == undecided, c.waits.waiting(object)
	var all []reading
	if told && waits {
		all = append(all, whileWaiting)
	}
	if told && challenges && claim.Hello && !waits && now.Before(c.Rules.Deadline(object)) { // at its deadline what is missing speaks against it
		all = append(all, unjudged)
	}
	if told && !c.Audit && provider != nil && !claim.Serving && (claim.Hello || c.records.KeepsUp()) { // in audit mode, or of others, no record is written
		all = append(all, asTold)
	}
	return append(all, fromAPIServer)
}

// settles reports whether a decision is carried out that was made by what was found.
func (f *found) settles(d verifier.Decision) bool {
	switch f.reading {
	case whileWaiting:
		return d.Outcome == verifier.Wait
	case unjudged:
		return d.Outcome == verifier.Deny
	case asTold:
		return f.isHello || d.Outcome == verifier.Approve
	}
	return true
}
