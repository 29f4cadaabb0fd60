// SPDX-License-Identifier: Apache-2.0

package fairqueue

// Flow is what the queue orders and limits a request by.
type Flow struct {
	// Unlimited says that the request takes no token: it is approved, finished, not ours, or a hello
	// whose challenge is open.
	Unlimited bool
	// Class is that of the requester, whose requests all have the same one.
	Class Class
	// Requester is the user who filed the request, as the API server authenticated it.
	Requester string
	// Claim is what the request claims to be of.
	Claim Claim
}

// Class is a kind of requester. Without classes, machines that boot under one token would wait for
// each node that renews.
type Class uint8

// The classes. The queue serves them in turn, so that their order means nothing.
const (
	Others Class = iota
	Nodes
	Tokens
	classes
)

// Claim is what a request says about itself before anybody has judged it. It decides only which
// requests share turns. A request whose claim cannot be read has the zero value, and shares turns
// with all others of that kind.
type Claim struct {
	// AK is the attestation key that has signed the request, empty if it has none. Only the TPM with
	// that key can claim it. Everybody who can read requests can copy the other fields.
	AK string
	// EK is the fingerprint of the endorsement key, and Node the name of the node.
	EK, Node string
	// Proof distinguishes proofs from hellos: copies of a machine's hello do not delay its proof.
	Proof bool
}
