// SPDX-License-Identifier: Apache-2.0

package fairqueue

// Flow has the properties by which the queue orders and limits a request.
type Flow struct {
	// Unlimited says that the request takes no token: it is approved, finished, not ours, or a
	// hello whose challenge is open.
	Unlimited bool
	// Class is the class of the requester. All its requests have the same class.
	Class Class
	// Requester is the user who filed the request, as the API server authenticated it.
	Requester string
	// Claim is the request's claim about its machine.
	Claim Claim
}

// Class is a kind of requester. Without classes, machines that boot under one token would wait for
// all renewing nodes.
type Class uint8

// The classes are served round robin, so their order has no meaning.
const (
	Others Class = iota
	Nodes
	Tokens
	classes
)

// Claim has the unverified claims of a request, except AK. It only decides which requests share a
// claim queue. A request whose claim cannot be read has the zero value, and shares a claim queue
// with all others of that kind.
type Claim struct {
	// AK is the attestation key whose signature in the origin annotation covers this request, "" if
	// there is none. The signature was verified, so only the holder of the key can claim it.
	// Everybody who can read requests can copy the other fields.
	AK string
	// EK is the fingerprint of the endorsement key, and Node the name of the node.
	EK, Node string
	// Proof distinguishes proofs from hellos: copies of a machine's hello do not delay its proof.
	Proof bool
}
