// SPDX-License-Identifier: Apache-2.0

// Package intake passes the CertificateSigningRequests in the cache to the queue, each with its
// flow. A RequestCache bounds the memory of that cache.
package intake

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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Intake passes the requests in the cache to the queue, with their flows.
type Intake struct {
	Rules *verifier.Rules
	Queue *fairqueue.Queue
	// Cached reads requests from the cache. Summarized says that a RequestCache fills it.
	Cached     client.Reader
	Summarized bool
	Now        func() time.Time
}

// annotationSummary is an annotation that exists only in the cache: the summary of a pending
// request of ours, as JSON. A requester may set the same annotation: a RequestCache drops that one,
// and without a RequestCache the annotation is ignored.
const annotationSummary = "attestation.cluster.x-k8s.io/cached-claim"

// summary has the part of a request's content that the queue needs. Nothing in it is verified but
// AK.
type summary struct {
	// EK is the EK that a hello claims. Hello is the name of the hello that a proof refers to.
	EK    string `json:"ek,omitempty"`
	Hello string `json:"hello,omitempty"`
	Node  string `json:"node,omitempty"`
	// AK is the key whose signature in the origin annotation covers the request. The signature was
	// verified. Nothing shows that a TPM has the key.
	AK string `json:"ak,omitempty"`
	// Expires is the end of a hello's challenge, as a Unix time.
	Expires int64 `json:"expires,omitempty"`
	// Judged says that a rehearsal has a verdict, which may be its requester's own.
	Judged bool `json:"judged,omitempty"`
	// Dropped says that the cache did not keep the content.
	Dropped bool `json:"dropped,omitempty"`
}

// summaryIn returns the summary that a RequestCache has put into a request, the zero value if there
// is none.
func (i *Intake) summaryIn(object *certificatesv1.CertificateSigningRequest) (found summary, ok bool) {
	value, ok := object.Annotations[annotationSummary]
	if !ok || !i.Summarized || json.Unmarshal([]byte(value), &found) != nil {
		return summary{}, false
	}
	return found, true
}

// maxClaimSize bounds the hellos whose claim is parsed, in bytes of spec.request. Claims are parsed
// one after the other, before any rate limit. A hello has some certificates of its EK, and is
// usually smaller than 16 KiB. Larger hellos have no claim, so the queue orders them together.
const maxClaimSize = 32 << 10

// summarize returns the summary of a whole request. It parses the request and its document, and
// verifies only the origin, if there is one. A parser that panics must not end the watch, so
// summarize recovers. The parser panics again in a worker, which recovers and reports it.
func summarize(rules *verifier.Rules, providers map[string]evidence.Provider, object *certificatesv1.CertificateSigningRequest, origin string) (found summary) {
	defer func() {
		if recover() != nil {
			found = summary{}
		}
	}()
	if challenge := challengeIn(object); challenge != nil {
		found.Expires = challenge.Expires
	}
	found.AK = originAK(providers, origin, object)
	if attestation.IsHelloSigner(object.Spec.SignerName) && len(object.Spec.Request) > maxClaimSize {
		return found
	}
	parsed, _ := rules.ParseClaim(object)
	found.Node = parsed.NodeName
	challenger, ok := providers[parsed.Provider].(evidence.Challenger)
	switch {
	case !ok:
	case parsed.Hello:
		found.EK = challenger.EK(object, nil)
	default:
		found.Hello, _ = challenger.HelloOf(object) // Verify refuses such a proof
	}
	return found
}

// originAK returns the AK of the TPM that a whole request comes from, "" if its annotation does not
// verify.
func originAK(providers map[string]evidence.Provider, origin string, object *certificatesv1.CertificateSigningRequest) string {
	if origin == "" || len(object.Spec.Request) > attestation.MaxRequestSize {
		return ""
	}
	for _, p := range providers {
		if v, ok := p.(evidence.OriginVerifier); ok {
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
	if !attestation.IsHelloSigner(object.Spec.SignerName) || value == "" || len(value) > attestation.MaxChallenge {
		return nil
	}
	challenge, err := attestation.ParseChallenge([]byte(value))
	if err != nil {
		return nil
	}
	return challenge
}

// ChallengeExpiry returns the end of a pending hello's challenge, and whether the challenge may be
// ours. The challenge may be forged, which harms only the requester itself.
func (i *Intake) ChallengeExpiry(object *certificatesv1.CertificateSigningRequest, now time.Time) (time.Time, bool) {
	seconds := int64(0)
	if found, ok := i.summaryIn(object); ok {
		seconds = found.Expires
	} else if challenge := challengeIn(object); challenge != nil {
		seconds = challenge.Expires
	}
	expires := time.Unix(seconds, 0)
	return expires, seconds != 0 && expires.Before(now.Add(maxChallenge))
}

// maxChallenge is the longest lifetime that a challenge may have.
const maxChallenge = time.Hour

// IsDropped reports whether the cache did not keep the content of a request.
func (i *Intake) IsDropped(object *certificatesv1.CertificateSigningRequest) bool {
	found, _ := i.summaryIn(object)
	return found.Dropped
}

// isJudged reports whether a whole request is a rehearsal with a verdict.
func isJudged(object *certificatesv1.CertificateSigningRequest) bool {
	_, judged := attestation.ParseVerdict(object.Spec.SignerName, object.Annotations[attestation.AnnotationVerdict])
	return judged
}

// RehearsalIsDone reports whether a pending rehearsal needs no more decisions. An answered hello is
// never closed. A verdict is final only after the deadline: its requester may have written it, so a
// restart judges again until then.
func (i *Intake) RehearsalIsDone(object *certificatesv1.CertificateSigningRequest, challenged bool, now time.Time) bool {
	if !attestation.IsRehearsalSigner(object.Spec.SignerName) {
		return false
	}
	found, ok := i.summaryIn(object)
	if !ok {
		found.Judged = isJudged(object)
	}
	return challenged || found.Judged && !now.Before(i.Rules.Deadline(object))
}

// IsOurs reports whether the rules decide on a request in the cache.
func (i *Intake) IsOurs(object *certificatesv1.CertificateSigningRequest) bool {
	return i.IsDropped(object) || i.Rules.Matches(object)
}

// Observed passes the flow of each request to the queue when the cache adds, updates or deletes it,
// before the request is queued. It drops the events of PublishWaiting: a reconciliation that finds
// nothing new would take a token of the requester.
func (i *Intake) Observed() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { i.Observe(e.Object); return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			i.Observe(e.ObjectNew)
			return !i.onlyAnnotated(e.ObjectOld, e.ObjectNew)
		},
		DeleteFunc: func(e event.DeleteEvent) bool { i.Queue.Forget(e.Object.GetName()); return true },
	}
}

// Observe passes the flow of a request in the cache to the queue.
func (i *Intake) Observe(object client.Object) {
	request, ok := object.(*certificatesv1.CertificateSigningRequest)
	if !ok || csrstate.Of(request).Finished() || !i.IsOurs(request) {
		i.Queue.Forget(object.GetName())
		return
	}
	flow, now := i.FlowOf(request), i.Now()
	expires, challenged := i.ChallengeExpiry(request, now)
	// An approved request is signed, so it takes no token. Nor does a hello with an open challenge,
	// which is only requeued (see Limit).
	flow.Unlimited = csrstate.Of(request) == csrstate.Approved || challenged && now.Before(expires)
	i.Queue.Observe(request.Name, flow)
}

// onlyAnnotated reports whether two versions of an undecided request of ours differ only in fields
// that no decision reads. The spec of a request is immutable. The cache may keep the content of one
// version and not of the other.
func (i *Intake) onlyAnnotated(older, newer client.Object) bool {
	o, ok := older.(*certificatesv1.CertificateSigningRequest)
	n, ok2 := newer.(*certificatesv1.CertificateSigningRequest)
	if !ok || !ok2 || o.UID != n.UID || o.ResourceVersion == n.ResourceVersion || csrstate.Of(n).Finished() || !i.IsOurs(o) || !i.IsOurs(n) {
		return false // another request, a resync, or a finished one, which Reconcile must see
	}
	now := i.Now()
	was, _ := i.ChallengeExpiry(o, now)
	is, _ := i.ChallengeExpiry(n, now)
	return was.Equal(is) && equality.Semantic.DeepEqual(o.Status, n.Status)
}

// CloseDelay is the time between the end of a challenge and the closing of its hello. A proof that
// came in time may still be queued.
const CloseDelay = time.Minute

// MayGetProof reports whether a proof may still follow a hello whose challenge ends at expires.
func MayGetProof(expires, now time.Time) bool { return now.Before(expires.Add(CloseDelay)) }

// Limit makes the next reconciliation of a hello take a token. The reconciliation that found an
// open challenge took none. The next one denies the hello, and a forged challenge must not make
// that denial free.
func (i *Intake) Limit(object *certificatesv1.CertificateSigningRequest) {
	i.Queue.Observe(object.Name, i.FlowOf(object))
}

// FlowOf returns the flow by which the queue orders a request.
func (i *Intake) FlowOf(object *certificatesv1.CertificateSigningRequest) fairqueue.Flow {
	flow := fairqueue.Flow{Class: ClassOf(object.Spec.Username), Requester: object.Spec.Username}
	if found, ok := i.summaryIn(object); ok {
		flow.Claim = fairqueue.Claim{AK: found.AK, EK: found.EK, Node: found.Node, Proof: !attestation.IsHelloSigner(object.Spec.SignerName)}
		if found.Hello != "" {
			flow.Claim.EK = i.cachedEK(found.Hello)
		}
	}
	return flow
}

// cachedEK returns the EK that a cached hello claims, "" if none is known.
func (i *Intake) cachedEK(hello string) string {
	object := &certificatesv1.CertificateSigningRequest{}
	if err := i.Cached.Get(context.Background(), client.ObjectKey{Name: hello}, object); err != nil {
		return ""
	}
	found, _ := i.summaryIn(object)
	return found.EK
}

// ClassOf distinguishes nodes, bootstrap tokens and others.
func ClassOf(username string) fairqueue.Class {
	switch _, token := verifier.TokenID(username); {
	case strings.HasPrefix(username, "system:node:"):
		return fairqueue.Nodes
	case token:
		return fairqueue.Tokens
	}
	return fairqueue.Others
}
