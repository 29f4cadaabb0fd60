// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"slices"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

// nodesGroup is the group of all nodes.
const nodesGroup = "system:nodes"

// Verdict is what the lists say about a request. The zero value is invalid.
type Verdict int

const (
	// NoOpinion leaves the request to the next authorizer.
	NoOpinion Verdict = iota + 1
	// Deny refuses the request.
	Deny
	// Unlisted says that the lists do not know the node's certificate. Stale lists lack a new one,
	// so the node's record decides. If that lacks the certificate, the request is denied.
	Unlisted
)

// Cause is why a request is denied. It is a label of metrics.
type Cause string

// The causes.
const (
	Revoked        Cause = "revoked"
	Suspended      Cause = "suspended"
	SuspendedToken Cause = "suspended_token"
	Unrecorded     Cause = "unrecorded"
	TooLong        Cause = "too_long"
)

// messageTooLong must differ from the messages from which a node learns about its certificate.
const messageTooLong = "the request's selectors are too long for the authorizer of nodes"

// message returns the reason for the API server's answer. By some of them a node learns that it has
// to attest.
func (c Cause) message() string {
	switch c {
	case Suspended:
		return attestation.MessageSuspended
	case SuspendedToken:
		return revocation.MessageSuspendedToken
	case Unrecorded:
		return attestation.MessageUnrecorded
	case TooLong:
		return messageTooLong
	default:
		return attestation.MessageRevoked
	}
}

// Decision is a verdict with its reason. Cause is empty with NoOpinion.
type Decision struct {
	Verdict Verdict
	Cause   Cause
}

// Request is what an API server asks about. The API server sets the requester's fields.
type Request struct {
	User   string
	Groups []string
	// Credentials are the IDs of the client certificate. There are none for tokens, and for users
	// that somebody impersonates.
	Credentials []string
	// TokenNodes are the nodes that the token was issued for.
	TokenNodes []string
	// Resource is nil if the request is for another path than that of an object.
	Resource *authorizationv1.ResourceAttributes
}

func newRequest(spec authorizationv1.SubjectAccessReviewSpec) Request {
	return Request{
		User: spec.User, Groups: spec.Groups, Resource: spec.ResourceAttributes,
		Credentials: spec.Extra[revocation.ExtraCredentialIDs], TokenNodes: spec.Extra[revocation.ExtraNodeNames],
	}
}

// node returns the name of the requesting node. It returns false if the requester is no node.
func (r *Request) node() (string, bool) { return strings.CutPrefix(r.User, revocation.UserPrefix) }

// has reports whether one of the requester's credentials is in the set.
func (r *Request) has(set map[string]bool) bool {
	return slices.ContainsFunc(r.Credentials, func(id string) bool { return set[id] })
}

// attests reports whether the request is one of those with which a node gets a new certificate by
// its evidence. kubelet-authenticator makes no other request for that:
//   - it creates a CertificateSigningRequest, and reads and watches it by its name. A name has 128
//     random bits, so this reads no other node's request
//   - it asks the API server who it is, to find out whether its certificate is valid
//   - it reads the announcement that asks nodes to renew
//
// The node's dry-run write, by which it finds out that it is revoked, is denied on purpose.
func (r *Request) attests() bool {
	a := r.Resource
	if a == nil || a.Subresource != "" {
		return false
	}
	switch a.Group + "/" + a.Resource {
	case "certificates.k8s.io/certificatesigningrequests":
		// For list and watch, the API server takes the name from the field selector.
		return a.Verb == "create" || slices.Contains([]string{"get", "list", "watch"}, a.Verb) && a.Name != ""
	case "authentication.k8s.io/selfsubjectreviews":
		return a.Verb == "create"
	case "/configmaps":
		return a.Verb == "get" && a.Namespace == attestation.AnnouncementNamespace && a.Name == attestation.AnnouncementName
	}
	return false
}

// Decide says what the lists of revoked certificates and suspended machines say about a request. It
// means the same as the admission policies (revocation.RenderPolicy, RenderTokenPolicy), and covers
// reads, too: what a policy accepts gets NoOpinion. Policies have room for a limited number of
// nodes. Here, lists without a policy count, too, and so do records.
func (l *Lists) Decide(r Request) Decision {
	if slices.ContainsFunc(r.TokenNodes, func(node string) bool { return l.suspendedNodes[node] }) {
		return Decision{Deny, SuspendedToken}
	}
	decision, lists := Decision{Verdict: NoOpinion}, l.byUser[r.User]
	for _, list := range lists {
		suspended := list.suspendedNodes[r.User] || r.has(list.suspended)
		switch {
		case r.has(list.current):
		case suspended:
			decision = Decision{Deny, Suspended}
		case decision.Verdict == NoOpinion && !r.attests():
			decision = Decision{Deny, Revoked}
		}
	}
	// A record says that a certificate is revoked, and no list has the node.
	if len(lists) == 0 && r.has(l.revoked) && !r.attests() {
		decision = Decision{Deny, Revoked}
	}
	// A stale list lacks the certificate with which a node came back.
	if decision.Verdict == Deny && len(r.Credentials) > 0 && !r.has(l.revoked) {
		decision.Verdict = Unlisted
	}
	return decision
}

// DecideStrict applies strict mode to a request about which Decide has no opinion: a node needs a
// certificate that a record names. unattested names nodes that have no record.
//
// It does not ask which CA issued the certificate. So a certificate of kube-controller-manager, or
// of a stolen CA key, is not enough.
//
// Without any record it denies nothing: then the namespace is wrong, or etcd is lost, and to deny
// would stop every node.
func (l *Lists) DecideStrict(r Request, unattested func(node string) bool) Decision {
	node, isNode := r.node()
	switch {
	case len(l.remembered) == 0,
		!isNode && !slices.Contains(r.Groups, nodesGroup),
		isNode && unattested(node),
		l.remembers(node, r.Credentials),
		r.attests():
		return Decision{Verdict: NoOpinion}
	case !isNode || len(r.Credentials) == 0: // no record can name it
		return Decision{Deny, Unrecorded}
	}
	return Decision{Unlisted, Unrecorded}
}
