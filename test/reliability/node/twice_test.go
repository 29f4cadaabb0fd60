// SPDX-License-Identifier: Apache-2.0

package node

import (
	"strings"
	"sync"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// Two kubelets run by mistake on one machine, with one certificate directory. Both ask at once,
// again and again. There is one worker and one request, and both get the same certificate.
func TestTwoKubelets(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			u := newUnit(t, built.plugin)
			if kind == "renewal" {
				u.due(t)
			}
			const calls = 10
			var results [2][calls]harness.Result
			var kubelets sync.WaitGroup
			for k := range results {
				kubelets.Go(func() {
					for i := range calls {
						results[k][i] = u.run(t)
					}
				})
			}
			kubelets.Wait()
			for k, all := range results {
				for i, r := range all {
					if r.Code != 0 {
						t.Errorf("kubelet %d, call %d: exit code %d: %s", k, i, r.Code, r.Stderr)
					}
				}
			}
			harness.WorkerEnds(t, u.Certs())
			if hellos, proofs := harness.Requests(t, shared, u.Name); len(hellos) != 1 || len(proofs) != 1 {
				t.Errorf("%d hellos and %d proofs, not one each", len(hellos), len(proofs))
			}
			u.isClean(t)
			last := u.run(t)
			if current, err := u.Certs().Current(); err != nil || last.Code != 0 || !current.Leaf.Equal(last.Leaf) {
				t.Errorf("%v; exit code %d: %s", err, last.Code, last.Stderr)
			}
		})
	}
}

// Two kubelets of one machine have different node names, and one certificate directory. A
// certificate is never printed for the other name. Each kubelet gets its own one, or an error that
// names the other node. Neither makes the other file one request after another.
func TestTwoKubeletsWithTwoNames(t *testing.T) {
	t.Parallel()
	u := newUnit(t, built.plugin)
	attestor.Start(t, shared, u.Name+"-b", u.chip)
	names := []string{u.Name, u.Name + "-b"}
	const calls = 5
	var kubelets sync.WaitGroup
	answers, refusals := make([]int, len(names)), make([]string, len(names))
	for k, name := range names {
		kubelets.Go(func() {
			for range calls {
				r := u.run(t, "--node-name="+name, "--provider-id=test://"+name, "--wait-timeout=10s")
				switch {
				case r.Code != 0:
					isActionable(t, r)
					refusals[k] += r.Stderr
				case r.Leaf.Subject.CommonName != "system:node:"+name:
					t.Errorf("node %s was given the certificate of %s", name, r.Leaf.Subject.CommonName)
				default:
					answers[k]++
				}
			}
		})
	}
	kubelets.Wait()
	harness.KillWorker(t, u.Certs())
	for k, name := range names {
		hellos, proofs := harness.Requests(t, shared, name)
		t.Logf("%s: %d answers, %d hellos, %d proofs; %s", name, answers[k], len(hellos), len(proofs), refusals[k])
		if answers[k] < calls && !strings.Contains(refusals[k], "but this is node") {
			t.Errorf("%d of %d calls have an answer, and no error says why: %s", answers[k], calls, refusals[k])
		}
		if len(hellos) > 3 || len(proofs) > 3 {
			t.Errorf("%d hellos and %d proofs: the kubelets make each other file requests", len(hellos), len(proofs))
		}
	}
	u.isWhole(t)
}
