// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Consistency is how stale the records may be that a decision is made from.
type Consistency int

const (
	// Cached records are the informer's. They cost the API server nothing. They are usually some
	// milliseconds old, and minutes old if the watch hangs.
	Cached Consistency = iota + 1
	// Live records are read from the API server.
	Live
)

// assessment says how much a decision may trust its evidence.
type assessment int

const (
	// judged evidence was verified by its provider for this decision. The verification takes most
	// of a decision's CPU time, above all for the signatures of certificates.
	judged assessment = iota + 1
	// remembered evidence was verified within the last minute, while the request waited. If none is
	// remembered, the evidence is verified now.
	remembered
	// assumed evidence is not verified. The claimed EK is used, and no authority vouches for it, so
	// no outcome may grant anything. Only a document that names no EK is verified (addUnreadable).
	assumed
)

// pass is one attempt at a decision. If its inputs are not good enough for its outcome, Reconcile
// writes nothing and tries the next pass.
type pass struct {
	consistency Consistency
	evidence    assessment
	// applies reports whether the pass is worth an attempt.
	applies func(situation) bool
	// sufficientFor reports whether the outcome may be carried out.
	sufficientFor func(situation, verifier.Outcome) bool
}

// logUnjudged logs why evidence could not be judged. The node gets the reason without the cause. A
// waiting request, whose evidence is judged again each time, is not logged again.
func (p pass) logUnjudged(ctx context.Context, in *inputs) {
	if err := in.Evidence.Err; err != nil && !isVerdict(err) && p.evidence == judged {
		log.FromContext(ctx).Info("the evidence could not be judged", "request", in.Request.Name, "cause", err.Error())
	}
}

// situation has the facts that select the passes of a request.
type situation struct {
	// cacheInSync and cacheKeepsUp are InSync and KeepsUp of the records' Store.
	cacheInSync, cacheKeepsUp bool
	// pending says that the request is undecided.
	pending bool
	// waiting says that the last decision was to wait.
	waiting bool
	// overdue says that the deadline has passed.
	overdue bool
	// hello says that the request is a hello.
	hello bool
	// attests says that the request has evidence of a known provider.
	attests bool
	// challenges says that the provider has two rounds.
	challenges bool
	// writes says that the decision is carried out, and not only reported (audit mode).
	writes bool
}

// passes defines the consistency that each decision needs. They are tried in this order. Each
// accepts only the outcomes for which its inputs suffice: one more pass costs time, a wrong
// decision costs a node its certificate.
var passes = []pass{
	{
		// A waiting request may go on waiting without reading its Node. If the cache is stale, the
		// request waits until its next retry.
		consistency: Cached, evidence: remembered,
		applies:       func(s situation) bool { return s.cacheInSync && s.pending && s.waiting },
		sufficientFor: func(_ situation, o verifier.Outcome) bool { return o == verifier.Wait },
	},
	{
		// A hello that contradicts the records is denied, also if its evidence is valid. So a flood
		// of such hellos costs no verification of signatures. If the cache is stale, the node tries
		// again after half a minute. This pass skips overdue hellos: their denial needs the reason
		// to wait, and finding that reason needs the evidence.
		consistency: Cached, evidence: assumed,
		applies: func(s situation) bool {
			return s.cacheInSync && s.pending && s.hello && s.challenges && !s.waiting && !s.overdue
		},
		sufficientFor: func(_ situation, o verifier.Outcome) bool { return o == verifier.Deny },
	},
	{
		// Sufficient for all outcomes of a hello: a challenge grants nothing, and the next hello
		// repairs a wrong denial. Sufficient for the approval of a proof, since its writes detect a
		// stale cache. The record is updated under the cached version, or created under a name
		// derived from the machine. Then checkSole looks for rivals. Audit mode writes no record,
		// so it cannot detect a stale cache.
		consistency: Cached, evidence: judged,
		applies: func(s situation) bool {
			return s.cacheInSync && s.pending && s.attests && s.writes && (s.hello || s.cacheKeepsUp)
		},
		sufficientFor: func(s situation, o verifier.Outcome) bool { return s.hello || o == verifier.Approve },
	},
	{
		// Everything else. Signing needs the record that was written before the approval
		// (verifier.Rules.JudgeSigning). After its own approval, Reconcile already has that record
		// and signs without this pass.
		consistency: Live, evidence: judged,
		applies:       func(situation) bool { return true },
		sufficientFor: func(situation, verifier.Outcome) bool { return true },
	},
}

// situationOf returns the situation of a request. writes says that decisions on it are carried out.
func (c *collector) situationOf(object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, writes bool) situation {
	provider := c.providers[claim.Provider]
	_, challenges := provider.(Challenger)
	return situation{
		cacheInSync: c.records.InSync(), cacheKeepsUp: c.records.KeepsUp(),
		pending: csrstate.Of(object) == csrstate.Pending, waiting: c.retries.Waits(object.Name, object.UID), overdue: !now.Before(c.rules.Deadline(object)),
		hello: claim.Hello, attests: provider != nil && !claim.Serving, challenges: challenges,
		writes: writes,
	}
}
