// SPDX-License-Identifier: Apache-2.0

package controller

import (
	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// reading is by what records a request is judged. The first ones cost the API server next to nothing, and may be old: each settles only what does no
// harm if they are, or what is found out when it is carried out.
type reading int

const (
	// whileWaiting goes by what was told, and asks for no Node. It settles that a request which waits goes on waiting.
	whileWaiting reading = iota + 1
	// inCrowd does the same. It settles that a hello among very many is challenged, which grants nothing.
	inCrowd
	// asTold goes by what was told. It settles that a hello is challenged, and that a proof is approved: the record is written under the version
	// that was told, or made under the one name that it can have, and what it must agree with is looked at after that (checkSole).
	asTold
	// fromAPIServer goes by what the API server holds, and settles everything.
	fromAPIServer
)

// passing says that nothing else is asked the API server for than requests.
func (r reading) passing() bool { return r == whileWaiting || r == inCrowd }

// readings are those by which a request is judged, one after the other, until one settles it.
func (c *Controller) readings(object *certificatesv1.CertificateSigningRequest, claim verifier.Claim) []reading {
	var all []reading
	if c.records.told.has() && stateOf(object) == undecided && !c.Audit {
		if c.waits.waiting(object) {
			all = append(all, whileWaiting)
		}
		if claim.Hello && c.requesters.crowd() {
			all = append(all, inCrowd)
		}
		if c.providers[claim.Provider] != nil && !claim.Serving { // others are approved without a record being written
			all = append(all, asTold)
		}
	}
	return append(all, fromAPIServer)
}

// settles reports whether a decision is carried out that was made by what was found.
func (f *found) settles(d verifier.Decision) bool {
	switch {
	case f.hopeless:
		return true // it was made without records
	case f.reading == whileWaiting:
		return d.Outcome == verifier.Wait
	case f.reading == inCrowd:
		return d.Outcome == verifier.Challenge
	case f.reading == asTold:
		return d.Outcome == verifier.Challenge || d.Outcome == verifier.Approve
	}
	return true
}
