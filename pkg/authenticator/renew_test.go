// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// A certificate that is not due is replaced, also where the node checks for no announced renewals
// or the provider does not renew.
func TestRenewReplacesACertificate(t *testing.T) {
	t.Parallel()
	for name, arrange := range map[string]func(*Authenticator){
		"usual":     func(a *Authenticator) { a.node.CheckInterval = time.Hour },
		"no checks": func(a *Authenticator) { a.node.CheckInterval = 0 },
		"in a pause": func(a *Authenticator) {
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Failures: 3, NextAttempt: plugintest.Noon.Add(time.Hour), Last: &cache.Result{Reason: string(reason.RequestDenied), Finished: plugintest.Noon}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := clusteredAuthenticator(t)
			old, fresh := plugintest.NewPair(t, nil), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(48 * time.Hour) })
			plugintest.InstallPair(t, a.node.Dir(), old)
			arrange(a)
			install := workerThatInstalls(t, a, fresh, 0)
			var due string
			a.startWorker = func() (process.ID, error) { due = a.node.Load().Due; return install() }
			leaf, err := a.Renew(t.Context(), time.Minute, func(r error) { t.Error(r) })
			if err != nil || !leaf.Equal(fresh.Leaf) || due != "a person asked for a renewal" {
				t.Fatalf("%v, the worker saw %q", err, due)
			}
			// The new certificate is not due: what was asked for selects the old one.
			if status := a.node.Load(); status.Due != "" {
				t.Errorf("the new certificate is due: %s", status.Due)
			}
		})
	}
}

// The failure of the worker that renew starts ends the wait, and the certificate stays wanted.
func TestRenewReturnsTheFailure(t *testing.T) {
	t.Parallel()
	for name, held := range map[string]bool{"with a certificate": true, "without one": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := clusteredAuthenticator(t)
			if held {
				plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
			}
			denied := &cache.Result{Reason: string(reason.RequestDenied), Message: "denied before", Finished: plugintest.Noon}
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Failures: 2, Refusals: 2, NextAttempt: plugintest.Noon.Add(time.Hour), Last: denied})
			starts := 0
			a.startWorker = func() (process.ID, error) {
				starts++
				return process.ID{}, errors.New("no memory")
			}
			_, err := a.Renew(t.Context(), time.Minute, func(r error) { t.Error(r) })
			if failure := reason.AsFailure(err); starts != 1 || failure.Reason != reason.WorkerUnavailable || !strings.Contains(failure.Error(), "no memory") {
				t.Errorf("%d starts: %v", starts, err)
			}
			// the pause is over, and the count of refusals goes on: the next pause is no shorter
			if state := nodestate.ReadState(a.node.Dir()); !state.NextAttempt.IsZero() || state.Refusals != 2 {
				t.Errorf("%+v", state)
			}
			if status := a.node.Load(); held != (status.Due == "a person asked for a renewal") {
				t.Errorf("due: %q", status.Due)
			}
		})
	}
}

// Without a credential for the request nothing is recorded: the certificate stays as good as it
// was.
func TestRenewNeedsACredential(t *testing.T) {
	t.Parallel()
	a := clusteredAuthenticator(t)
	a.use(plugintest.Provider{Signer: "example.com/signer"}) // it does not renew, and there is no bootstrap kubeconfig
	plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
	before := plugintest.Snapshot(t, a.node.Dir().Path())
	_, err := a.Renew(t.Context(), time.Minute, func(error) {})
	if failure := reason.AsFailure(err); failure.Reason != reason.NoBootstrap {
		t.Errorf("%v", failure)
	}
	if after := plugintest.Snapshot(t, a.node.Dir().Path()); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
}

// A worker that already requests a certificate is awaited. No second one is started.
func TestRenewJoinsAWorker(t *testing.T) {
	t.Parallel()
	a := testAuthenticator(t)
	lock, err := a.node.Dir().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	self, err := process.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.NameWorker(self); err != nil {
		t.Fatal(err)
	}
	fresh := plugintest.NewPair(t, nil)
	done := make(chan error)
	go func() {
		defer lock.Unlock()
		done <- lock.Install(fresh)
	}()
	leaf, err := a.Renew(t.Context(), time.Minute, func(error) {})
	if installErr := <-done; err != nil || installErr != nil || !leaf.Equal(fresh.Leaf) {
		t.Fatal(errors.Join(err, installErr, fmt.Errorf("leaf %v", leaf)))
	}
}

// An announced renewal is only made due: under another name it would select the next certificate,
// too. A damaged state file is set aside. A certificate that a worker has just replaced is not
// replaced again.
func TestAskForRenewal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		arrange func(t *testing.T, a *Authenticator, pair *cache.Pair)
		want    string // name of the renewal
		aside   bool
	}{
		"announced": {func(t *testing.T, a *Authenticator, pair *cache.Pair) {
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Announcement: &cache.Announcement{
				Exists: true, Certificate: pair.Fingerprint(), Checked: plugintest.Noon, Renewal: &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Hour)},
			}})
		}, "rotate", false},
		"another certificate's": {func(t *testing.T, a *Authenticator, _ *cache.Pair) {
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Announcement: &cache.Announcement{
				Exists: true, Certificate: "other", Checked: plugintest.Noon, Renewal: &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Hour)},
			}})
		}, nodestate.AskedRenewal, false},
		"damaged": {func(t *testing.T, a *Authenticator, _ *cache.Pair) {
			plugintest.Put(t, a.node.Dir(), cache.StateFile, []byte("{"), 0o600)
		}, nodestate.AskedRenewal, true},
		"replaced meanwhile": {func(t *testing.T, a *Authenticator, _ *cache.Pair) {
			plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
		}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := clusteredAuthenticator(t)
			a.node.CheckInterval = time.Hour
			pair := plugintest.NewPair(t, nil)
			plugintest.InstallPair(t, a.node.Dir(), pair)
			before := a.node.Load()
			c.arrange(t, a, pair)
			if name == "announced" { // it is known when the command starts
				before = a.node.Load()
			}
			if err := a.askForRenewal(t.Context(), before); err != nil {
				t.Fatal(err)
			}
			status, got := a.node.Load(), ""
			if renewal := status.AnnouncedRenewal(); renewal != nil {
				got = renewal.Name
			}
			if got != c.want || (status.Due != "") != (c.want != "") {
				t.Errorf("renewal %q, due: %q", got, status.Due)
			}
			entries, err := os.ReadDir(a.node.Dir().Path())
			aside := slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), cache.StateFile+".") })
			if err != nil || aside != c.aside {
				t.Errorf("%v, set aside: %t", err, aside)
			}
		})
	}
}

// clusteredAuthenticator is a testAuthenticator that client-go has told its cluster.
func clusteredAuthenticator(t *testing.T) *Authenticator {
	t.Helper()
	a := testAuthenticator(t)
	a.ask(ExecInfo{APIVersion: execV1, Cluster: &clientauthentication.Cluster{Server: "https://127.0.0.1:1", CertificateAuthorityData: plugintest.NewCA(t)}})
	return a
}
