// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"errors"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// A certificate of a node with a revoked one is published once the policies have it for
// acceptDelay. A policy that cannot be written delays it, and one that is missing does not.
func TestUntilAccepted(t *testing.T) {
	t.Parallel()
	now := time.Now()
	list := func(node string, current ...string) v1alpha1.RevocationSliceSpec {
		l := v1alpha1.RevocationSliceSpec{Certificates: []v1alpha1.RevokedCertificate{{SHA256: digits("old"), NodeName: node}}}
		for _, c := range current {
			l.Current = append(l.Current, v1alpha1.CurrentCertificate{SHA256: digits(c), NodeName: node})
		}
		return l
	}
	e := &Enforcer{}
	expect := func(what, node string, least, most time.Duration) {
		t.Helper()
		if got := e.UntilAccepted(node, digits("new")); got < least || got > most {
			t.Errorf("%s: %s, want %s to %s", what, got, least, most)
		}
	}
	round := func(at time.Time, failed map[string]error, lists map[int32]v1alpha1.RevocationSliceSpec) {
		e.state.Store(e.state.Load().next(lists, failed, at))
	}
	expect("not running", "a", 0, 0)
	e.runs.Store(&now)
	expect("before the first round", "a", unwrittenDelay, unwrittenDelay)
	e.runs.Store(new(now.Add(-startTimeout)))
	expect("without a first round", "a", 0, 0)
	lists := map[int32]v1alpha1.RevocationSliceSpec{1: list("a")}
	round(now, nil, lists)
	expect("another node", "b", 0, 0)
	expect("not in the policy", "a", unwrittenDelay, unwrittenDelay)
	lists[1] = list("a", "new")
	refused := map[string]error{PolicyName(1): errors.New("refused")}
	round(now, refused, lists)
	expect("the policy cannot be written", "a", unwrittenDelay, unwrittenDelay)
	round(now, nil, lists)
	expect("written", "a", time.Second, acceptDelay)
	round(now.Add(time.Hour), nil, lists)
	expect("written again", "a", time.Second, acceptDelay)
	lists[2] = list("a", "new")
	round(now, map[string]error{PolicyName(2): errors.New("refused")}, lists)
	expect("one of two policies cannot be written", "a", unwrittenDelay, unwrittenDelay)
	round(now.Add(-acceptDelay), nil, lists)
	expect("written long ago", "a", 0, 0)
	round(now, map[string]error{PolicyName(1): errMissing, PolicyName(2): errMissing}, lists)
	expect("the policies are missing", "a", 0, 0)
	round(now, refused, map[int32]v1alpha1.RevocationSliceSpec{PolicyCount + 1: list("a")})
	expect("only on a list without a policy", "a", 0, 0)
}
