// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/x509"
	"os"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// postponed returns an Authenticator of a node whose renewal waits after an outage that is over.
func postponed(t *testing.T) (*Authenticator, *announcer, *cache.Pair) {
	t.Helper()
	a, api, _ := announced(t)
	pair := plugintest.NewPair(t, func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = plugintest.Noon.Add(-22*time.Hour), plugintest.Noon.Add(2*time.Hour)
	})
	plugintest.InstallPair(t, a.node.Dir(), pair)
	before, state := plugintest.Noon.Add(-time.Minute), &cache.State{}
	for range 2 {
		enrol.AddFailure(state, &cache.Result{Reason: string(reason.APIUnreachable), Message: "away", Finished: before}, 0, pair.Leaf.NotAfter, before)
		enrol.SpreadAfterOutage(state, pair.Leaf.NotAfter, before)
	}
	plugintest.WriteState(t, a.node.Dir(), state)
	if state.NextAttempt.Before(plugintest.Noon.Add(10 * time.Minute)) {
		t.Fatalf("it is not patient: %v", state.NextAttempt)
	}
	return a, api, pair
}

// What happens during the pause after an outage may make the certificate worthless.
func TestOnlyAgeWaitsToTheEndOfThePause(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(a *Authenticator, pair *cache.Pair)
		renews bool
	}{
		"its age": {func(*Authenticator, *cache.Pair) {}, false},
		"was read": {func(a *Authenticator, _ *cache.Pair) {
			if err := os.Chmod(a.node.Dir().File(cache.CurrentFile), 0o644); err != nil {
				t.Fatal(err)
			}
		}, true},
		"rejected": {func(a *Authenticator, pair *cache.Pair) {
			a.node.Note = rejectedNote(a, pair)
			a.node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(a.exec.Cluster.Server, a.exec.Cluster.CertificateAuthorityData), "token: abc"))
		}, true},
		"a renewal": {func(a *Authenticator, pair *cache.Pair) { announce(t, a, pair, plugintest.Noon.Add(-time.Hour)) }, true},
		"lost": {func(a *Authenticator, _ *cache.Pair) {
			a.node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(a.exec.Cluster.Server, a.exec.Cluster.CertificateAuthorityData), "token: abc"))
			if err := os.Remove(a.node.Dir().File(cache.CurrentFile)); err != nil {
				t.Fatal(err)
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			a, api, pair := postponed(t)
			c.change(a, pair)
			err := a.Work(t.Context())
			if renewed := err == nil && len(api.Filed) > 0; renewed != c.renews {
				t.Errorf("renewed: %v, %v", api.Filed, err)
			}
		})
	}
}

// A node that waits after an outage still checks, so a rotation or a revocation reaches it in time.
func TestChecksGoOnInThePause(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		renewals []attestation.Renewal
		renews   bool
	}{
		"none":   {nil, false},
		"rotate": {[]attestation.Renewal{rotate(nil)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			a, api, pair := postponed(t)
			api.get = configMap(t, c.renewals...)
			starts := 0
			start := a.startWorker
			a.startWorker = func() (id process.ID, err error) { starts++; return start() }
			if _, err := a.Run(t.Context()); err != nil || starts != 1 {
				t.Errorf("a run starts %d workers, %v", starts, err)
			}
			plugintest.Put(t, a.node.Dir(), cache.LockFile, nil, 0o600)
			before, _ := a.node.Dir().State()
			if err := a.Work(t.Context()); err != nil {
				t.Fatal(err)
			}
			now, err := a.node.Dir().Current()
			if err != nil || (now.Fingerprint() != pair.Fingerprint()) != c.renews {
				t.Errorf("renewed: %v, %v", api.Filed, err)
			}
			state, err := a.node.Dir().State()
			if err != nil || !c.renews && (state.Failures != 2 || !state.NextAttempt.Equal(before.NextAttempt) || state.Last.Reason != string(reason.APIUnreachable)) {
				t.Errorf("the check changes the pause: %+v, %v", state, err)
			}
			if !c.renews {
				a.at(plugintest.Noon.Add(time.Minute))
				plugintest.MustFail(t, a.Work(t.Context()), reason.APIUnreachable) // no other check yet
			}
		})
	}
}

// announce has the last check have found a renewal.
func announce(t *testing.T, a *Authenticator, pair *cache.Pair, dueAt time.Time) {
	t.Helper()
	a.node.CheckInterval = 15 * time.Minute
	plugintest.WriteState(t, a.node.Dir(), &cache.State{Announcement: &cache.Announcement{
		Checked: plugintest.Noon, Answered: plugintest.Noon, Exists: true, Certificate: pair.Fingerprint(), Reported: pair.Fingerprint(),
		Renewal: &cache.Renewal{Name: "r", IssuedBefore: plugintest.Noon, DueAt: dueAt},
	}})
}

// rejectedNote says that the API server rejects the pair.
func rejectedNote(a *Authenticator, pair *cache.Pair) nodestate.NoteFile {
	a.node.Note.Write(nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true})
	return a.node.Note
}
