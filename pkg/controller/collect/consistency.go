// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
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

// Pass is one attempt at a decision. If its inputs are not good enough for its outcome, Reconcile
// writes nothing and tries the next pass.
type Pass struct {
	Consistency Consistency
	evidence    assessment
	// Applies reports whether the pass is worth an attempt.
	Applies func(Situation) bool
	// SufficientFor reports whether the outcome may be carried out.
	SufficientFor func(Situation, verifier.Outcome) bool
}

// LogUnjudged logs why evidence could not be judged. The node gets the reason without the cause. A
// waiting request, whose evidence is judged again each time, is not logged again.
func (p Pass) LogUnjudged(ctx context.Context, in *Inputs) {
	if err := in.Evidence.Err; err != nil && !evidence.IsVerdict(err) && p.evidence == judged {
		log.FromContext(ctx).Info("the evidence could not be judged", "request", in.Request.Name, "cause", err.Error())
	}
}

// Situation has the facts that select the passes of a request.
type Situation struct {
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

// Passes defines the consistency that each decision needs. They are tried in this order. Each
// accepts only the outcomes for which its inputs suffice: one more pass costs time, a wrong
// decision costs a node its certificate.
var Passes = []Pass{
	{
		// A waiting request may go on waiting without reading its Node. If the cache is stale, the
		// request waits until its next retry.
		Consistency: Cached, evidence: remembered,
		Applies:       func(s Situation) bool { return s.cacheInSync && s.pending && s.waiting },
		SufficientFor: func(_ Situation, o verifier.Outcome) bool { return o == verifier.Wait },
	},
	{
		// A hello that contradicts the records is denied, also if its evidence is valid. So a flood
		// of such hellos costs no verification of signatures. If the cache is stale, the node tries
		// again after half a minute. This pass skips overdue hellos: their denial needs the reason
		// to wait, and finding that reason needs the evidence.
		Consistency: Cached, evidence: assumed,
		Applies: func(s Situation) bool {
			return s.cacheInSync && s.pending && s.hello && s.challenges && !s.waiting && !s.overdue
		},
		SufficientFor: func(_ Situation, o verifier.Outcome) bool { return o == verifier.Deny },
	},
	{
		// Sufficient for all outcomes of a hello: a challenge grants nothing, and the next hello
		// repairs a wrong denial. Sufficient for the approval of a proof, since its writes detect a
		// stale cache. The record is updated under the cached version, or created under a name
		// derived from the machine. Then act.checkSole looks for rivals. Audit mode writes no
		// record, so it cannot detect a stale cache.
		Consistency: Cached, evidence: judged,
		Applies: func(s Situation) bool {
			return s.cacheInSync && s.pending && s.attests && s.writes && (s.hello || s.cacheKeepsUp)
		},
		SufficientFor: func(s Situation, o verifier.Outcome) bool { return s.hello || o == verifier.Approve },
	},
	{
		// Everything else. Signing needs the record that was written before the approval
		// (verifier.Rules.JudgeSigning). After its own approval, Reconcile already has that record
		// and signs without this pass.
		Consistency: Live, evidence: judged,
		Applies:       func(Situation) bool { return true },
		SufficientFor: func(Situation, verifier.Outcome) bool { return true },
	},
}

// SituationOf returns the situation of a request. writes says that decisions on it are carried out.
func (c *Collector) SituationOf(object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, writes bool) Situation {
	p := c.Providers[claim.Provider]
	_, challenges := p.(evidence.Challenger)
	return Situation{
		cacheInSync: c.Records.InSync(), cacheKeepsUp: c.Records.KeepsUp(),
		pending: csrstate.Of(object) == csrstate.Pending, waiting: c.Retries.Waits(object.Name, object.UID), overdue: !now.Before(c.Rules.Deadline(object)),
		hello: claim.Hello, attests: p != nil && !claim.Serving, challenges: challenges,
		writes: writes,
	}
}
