// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// intake tells the queue what arrives.
type intake struct {
	*Config
	queue  *fairqueue.Queue
	cached client.Reader
}

// cachedClaim is an annotation that exists only in the cache: the claim, as JSON, of each pending
// request of ours. A RequestCache drops the same annotation of a requester. Without a RequestCache
// the annotation is ignored.
const cachedClaim = "attestation.cluster.x-k8s.io/cached-claim"

// claim is what is known of a request without its content.
type claim struct {
	// EK is what a hello claims, and Hello is the name of the hello that a proof refers to.
	EK    string `json:"ek,omitempty"`
	Hello string `json:"hello,omitempty"`
	Node  string `json:"node,omitempty"`
	// AK is whose TPM the request comes from, which was verified.
	AK string `json:"ak,omitempty"`
	// Expires is the end of a hello's challenge, as a Unix time.
	Expires int64 `json:"expires,omitempty"`
	// Dropped says that the cache has not kept the content.
	Dropped bool `json:"dropped,omitempty"`
}

// claimIn returns the claim that a RequestCache has put into a request, the zero value if there is
// none.
func (i *intake) claimIn(object *certificatesv1.CertificateSigningRequest) (found claim, ok bool) {
	value, ok := object.Annotations[cachedClaim]
	if !ok || i.Requests == nil || json.Unmarshal([]byte(value), &found) != nil {
		return claim{}, false
	}
	return found, true
}

// maxClaimSize bounds the hellos whose claim is read, in bytes of spec.request: all requests are read
// one after the other, before their turn. A hello has some certificates of its EK, and is usually
// smaller than 16 KiB. One that is larger shares turns with the others of that kind.
const maxClaimSize = 32 << 10

// parseClaim reads what a whole request claims: it parses the request and its document, and verifies
// nothing but the origin, if there is one. A parser that panics must not end the watch; it panics
// again in a worker, which recovers.
func parseClaim(rules *verifier.Rules, providers map[string]Provider, object *certificatesv1.CertificateSigningRequest, origin string) (found claim) {
	defer func() {
		if recover() != nil {
			found = claim{}
		}
	}()
	if challenge := challengeIn(object); challenge != nil {
		found.Expires = challenge.Expires
	}
	found.AK = originAK(providers, origin, object)
	if object.Spec.SignerName == attestation.HelloSignerName && len(object.Spec.Request) > maxClaimSize {
		return found
	}
	parsed, _ := rules.ParseClaim(object)
	found.Node = parsed.NodeName
	challenger, ok := providers[parsed.Provider].(Challenger)
	switch {
	case !ok:
	case parsed.Hello:
		found.EK = challenger.EK(object, nil)
	default:
		found.Hello, _ = challenger.HelloOf(object) // Judge refuses such a proof
	}
	return found
}

// originAK returns the AK whose TPM a whole request comes from, "" if its annotation does not show one.
func originAK(providers map[string]Provider, origin string, object *certificatesv1.CertificateSigningRequest) string {
	if origin == "" || len(object.Spec.Request) > attestation.MaxRequestSize {
		return ""
	}
	for _, p := range providers {
		if v, ok := p.(OriginVerifier); ok {
			if ak := v.OriginAK(origin, object); ak != "" {
				return ak
			}
		}
	}
	return ""
}

// challengeIn returns the challenge of a whole hello, nil if there is none.
func challengeIn(object *certificatesv1.CertificateSigningRequest) *attestation.Challenge {
	value := object.Annotations[attestation.AnnotationChallenge]
	if object.Spec.SignerName != attestation.HelloSignerName || value == "" || len(value) > attestation.MaxChallenge {
		return nil
	}
	challenge, err := attestation.ParseChallenge([]byte(value))
	if err != nil {
		return nil
	}
	return challenge
}

// challengeExpiry returns when the challenge of a pending hello ends, and whether it may be ours.
// With a forged one a requester fools only itself.
func (i *intake) challengeExpiry(object *certificatesv1.CertificateSigningRequest, now time.Time) (time.Time, bool) {
	seconds := int64(0)
	if found, ok := i.claimIn(object); ok {
		seconds = found.Expires
	} else if challenge := challengeIn(object); challenge != nil {
		seconds = challenge.Expires
	}
	expires := time.Unix(seconds, 0)
	return expires, seconds != 0 && expires.Before(now.Add(maxChallenge))
}

// maxChallenge is longer than any challenge of ours lasts.
const maxChallenge = time.Hour

// isDropped reports whether the cache has not kept the content of a request.
func (i *intake) isDropped(object *certificatesv1.CertificateSigningRequest) bool {
	found, _ := i.claimIn(object)
	return found.Dropped
}

// isOurs reports whether the rules decide on a request in the cache.
func (i *intake) isOurs(object *certificatesv1.CertificateSigningRequest) bool {
	return i.isDropped(object) || i.Rules.Matches(object)
}

// observed tells the queue the flow of each request as it comes and goes in the cache, before the
// request is queued. It drops the events of publishWaiting: a look that finds nothing new would take
// a token of the requester.
func (i *intake) observed() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { i.observe(e.Object); return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			i.observe(e.ObjectNew)
			return !i.onlyAnnotated(e.ObjectOld, e.ObjectNew)
		},
		DeleteFunc: func(e event.DeleteEvent) bool { i.queue.Forget(e.Object.GetName()); return true },
	}
}

func (i *intake) observe(object client.Object) {
	request, ok := object.(*certificatesv1.CertificateSigningRequest)
	if !ok || stateOf(request) == finished || !i.isOurs(request) {
		i.queue.Forget(object.GetName())
		return
	}
	flow, now := i.flowOf(request), i.Now()
	expires, challenged := i.challengeExpiry(request, now)
	// An approved request is signed. A hello with an open challenge is only requeued, see limit: it is
	// closed a minute after its challenge has ended (closeDelay), and the queue delays no look as long.
	flow.Unlimited = stateOf(request) == approved || challenged && now.Before(expires)
	i.queue.Observe(request.Name, flow)
}

// onlyAnnotated reports whether two versions of an undecided request of ours differ in nothing that
// decisions read. The spec of a request does not change. Which content the cache keeps may differ.
func (i *intake) onlyAnnotated(older, newer client.Object) bool {
	o, ok := older.(*certificatesv1.CertificateSigningRequest)
	n, ok2 := newer.(*certificatesv1.CertificateSigningRequest)
	if !ok || !ok2 || o.UID != n.UID || o.ResourceVersion == n.ResourceVersion || stateOf(n) == finished || !i.isOurs(o) || !i.isOurs(n) {
		return false // another request, a resync, or one whose end is to be noticed
	}
	now := i.Now()
	was, _ := i.challengeExpiry(o, now)
	is, _ := i.challengeExpiry(n, now)
	return was.Equal(is) && equality.Semantic.DeepEqual(o.Status, n.Status)
}

// closeDelay is how long after the end of its challenge a hello is closed: a proof that came in time
// may still be on its way.
const closeDelay = time.Minute

// isOpen reports whether a proof may follow a hello whose challenge ends at a time.
func isOpen(expires, now time.Time) bool { return now.Before(expires.Add(closeDelay)) }

// limit makes the next look at a hello take a token. The look that found its challenge open took
// none. The next look denies the hello, and a forged challenge must not make that denial free.
func (i *intake) limit(object *certificatesv1.CertificateSigningRequest) {
	i.queue.Observe(object.Name, i.flowOf(object))
}

// flowOf returns what the queue orders a request by.
func (i *intake) flowOf(object *certificatesv1.CertificateSigningRequest) fairqueue.Flow {
	flow := fairqueue.Flow{Class: classOf(object.Spec.Username), Requester: object.Spec.Username}
	if found, ok := i.claimIn(object); ok {
		flow.Claim = fairqueue.Claim{AK: found.AK, EK: found.EK, Node: found.Node, Proof: object.Spec.SignerName != attestation.HelloSignerName}
		if found.Hello != "" {
			flow.Claim.EK = i.cachedEK(found.Hello)
		}
	}
	return flow
}

// cachedEK returns the EK that a hello in the cache claims, empty if none is known.
func (i *intake) cachedEK(hello string) string {
	object := &certificatesv1.CertificateSigningRequest{}
	if err := i.cached.Get(context.Background(), client.ObjectKey{Name: hello}, object); err != nil {
		return ""
	}
	found, _ := i.claimIn(object)
	return found.EK
}

// classOf distinguishes nodes, bootstrap tokens and others.
func classOf(username string) fairqueue.Class {
	switch _, token := verifier.TokenID(username); {
	case strings.HasPrefix(username, "system:node:"):
		return fairqueue.Nodes
	case token:
		return fairqueue.Tokens
	}
	return fairqueue.Others
}
