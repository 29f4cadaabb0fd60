// SPDX-License-Identifier: Apache-2.0

package collect

import (
	"maps"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

var allOutcomes = []verifier.Outcome{
	verifier.Ignore, verifier.Wait, verifier.Deny, verifier.Challenge, verifier.Approve, verifier.Fail,
	verifier.Sign, verifier.ApproveUnattested, verifier.ApproveServing, verifier.SignServing,
}

// situations returns each there is.
func situations() (all []Situation) {
	for bits := range 1 << 9 {
		bit := func(i int) bool { return bits>>i&1 == 1 }
		all = append(all, Situation{
			cacheInSync: bit(0), cacheKeepsUp: bit(1), pending: bit(2), waiting: bit(3), overdue: bit(4),
			hello: bit(5), attests: bit(6), challenges: bit(7), writes: bit(8),
		})
	}
	return all
}

// Each situation, with each outcome: which passes are tried, and which one decides.
func TestPasses(t *testing.T) {
	for _, s := range situations() {
		cached := s.cacheInSync && s.pending
		for _, outcome := range allOutcomes {
			// What may be carried out, in the words of the rules that the table follows.
			want := map[assessment]bool{
				remembered: cached && s.waiting && outcome == verifier.Wait,
				assumed:    cached && s.hello && s.challenges && !s.waiting && !s.overdue && outcome == verifier.Deny,
				judged:     cached && s.attests && s.writes && (s.hello || s.cacheKeepsUp && outcome == verifier.Approve),
			}
			got := map[assessment]bool{}
			for _, p := range Passes[:len(Passes)-1] {
				if p.Consistency != Cached {
					t.Fatalf("a pass before the last is not cached: %+v", p)
				}
				got[p.evidence] = p.Applies(s) && p.SufficientFor(s, outcome)
			}
			if !maps.Equal(got, want) {
				t.Errorf("%+v: %s by %v, want %v", s, outcome, got, want)
			}
			last := Passes[len(Passes)-1]
			if last.Consistency != Live || last.evidence != judged || !last.Applies(s) || !last.SufficientFor(s, outcome) {
				t.Errorf("%+v: no pass decides on %s", s, outcome)
			}
		}
	}
}
