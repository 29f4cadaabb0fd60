// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// duePair is a certificate whose lifetime is nearly over: it has minutes of a day left.
func duePair(t testing.TB, minutes time.Duration) *cache.Pair {
	return plugintest.NewPair(t, func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = plugintest.Noon.Add(-24*time.Hour), plugintest.Noon.Add(minutes*time.Minute)
	})
}

// justDue is a certificate whose renewal is due since a moment.
func justDue(t testing.TB, a *Node) *cache.Pair {
	pair := plugintest.NewPair(t, nil)
	at := nodestate.RenewAt(pair.Leaf).Add(time.Second)
	a.Now = func() time.Time { return at }
	return pair
}

func failedWith(why reason.Reason, at time.Time) *cache.State {
	return &cache.State{
		Failures: 3, NextAttempt: at.Add(5 * time.Minute),
		Last: &cache.Result{Worker: process.ID{PID: 1, Start: 1}, Reason: string(why), Message: "it did not work", Hint: "mend it", Request: "node-csr-w",
			Started: at.Add(-time.Minute), Finished: at, Phases: []cache.Phase{{Name: "lock", Milliseconds: 1.5}}},
	}
}

// deadWorker names a worker in the lock's file that is not alive.
func deadWorker(t testing.TB, a *Node, id process.ID) {
	plugintest.Put(t, a.Dir(), cache.LockFile, []byte(id.String()+"\n"+process.BootID()+"\n"), 0o600)
}

// Each state has its exit code, and a message that says what it comes from.
func TestOverviewStates(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, a *Node)
		state   State
		code    int
		says    string
	}{
		"a good certificate": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
		}, StateOK, 0, "valid to 2026-11-21T00:00:00Z, due at "},
		"a good one, after a failure": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			plugintest.PutRecord(t, a.Dir(), failedWith(reason.APIUnreachable, plugintest.Noon.Add(-time.Hour)))
		}, StateOK, 0, "valid to"},
		"a provider that does not renew, at the end": {func(t *testing.T, a *Node) {
			a.use(plugintest.Provider{})
			plugintest.InstallPair(t, a.Dir(), duePair(t, 1))
		}, StateOK, 0, "provider fake does not renew"},
		"due": {func(t *testing.T, a *Node) { plugintest.InstallPair(t, a.Dir(), justDue(t, a)) }, StateDue, 40, "its lifetime is nearly over; no request can be filed"},
		"due, with a cluster to ask": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			a.Access.Asked = &cache.Origin{Server: "https://cluster.example.com", CertificateAuthorityData: plugintest.NewCA(t)}
		}, StateDue, 40, "its lifetime is nearly over; no worker runs"},
		"due, and requested": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), plugintest.PendingSince(a.Now().Add(-time.Minute), "uid"))
		}, StateDue, 40, "node-csr-x waits for its certificate from signer example.com/signer"},
		"due, and not yet filed": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), plugintest.PendingSince(a.Now().Add(-time.Minute), ""))
		}, StateDue, 40, "node-csr-x waits for being filed with https://cluster.example.com"},
		"due, and waiting for the signer": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), failedWith(reason.WaitingForSigner, a.Now()))
		}, StateDue, 40, "nearly over"},
		"due, because others could read the key": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			if err := os.Chmod(a.Dir().File(cache.CurrentFile), 0o644); err != nil {
				t.Fatal(err)
			}
		}, StateDue, 40, "others could read its key"},
		"due for long, and nobody tries": {func(t *testing.T, a *Node) { plugintest.InstallPair(t, a.Dir(), duePair(t, 10)) }, StateFailing, 41, "its renewal has been due since"},
		"due, and requested long ago": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), plugintest.PendingSince(a.Now().Add(-nodestate.PendingFails), "uid"))
		}, StateFailing, 41, "a request has been pending since"},
		"due, and failing": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), failedWith(reason.APIUnreachable, a.Now()))
		}, StateFailing, 41, "APIUnreachable, 3 in a row: it did not work"},
		"due, and the worker died": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			old := time.Now().Add(-365 * 24 * time.Hour) // before the boot that the worker is of
			if err := os.Chtimes(a.Dir().File(cache.CurrentFile), old, old); err != nil {
				t.Fatal(err)
			}
			deadWorker(t, a, process.ID{PID: 1 << 22, Start: 1})
		}, StateFailing, 41, "died without a result"},
		"due, and a worker was killed after it had installed": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			deadWorker(t, a, process.ID{PID: 1 << 22, Start: 1})
		}, StateDue, 40, "no request can be filed"},
		"due, and the state file is damaged": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.Put(t, a.Dir(), cache.StateFile, []byte("{"), 0o600)
		}, StateDue, 40, "no request can be filed"},
		"due, and the worker that failed has ended": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			state := failedWith(reason.APIUnreachable, a.Now())
			state.Last.Worker = process.ID{PID: 1 << 22, Start: 1}
			plugintest.PutRecord(t, a.Dir(), state)
			deadWorker(t, a, state.Last.Worker)
		}, StateFailing, 41, "APIUnreachable"},
		"issued again and again": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), justDue(t, a))
			plugintest.PutRecord(t, a.Dir(), &cache.State{Last: &cache.Result{Message: "3 in short order"}})
		}, StateFailing, 41, "3 in short order"},
		"rejected": {func(t *testing.T, a *Node) {
			pair := plugintest.NewPair(t, nil)
			plugintest.InstallPair(t, a.Dir(), pair)
			a.Note.Write(nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true})
		}, StateFailing, 41, "the API server rejects it"},
		"a wrong configuration": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			a.Invalid = reason.Configuration.Failure("mend it", errors.New("line 3: nonsense"))
			a.use(nil)
		}, StateFailing, 41, "the configuration is wrong: line 3: nonsense"},
		"expired": {func(t *testing.T, a *Node) { plugintest.InstallPair(t, a.Dir(), duePair(t, 0)) }, StateExpired, 42, "; no request can be filed"},
		"expired, and failing": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), duePair(t, 0))
			plugintest.PutRecord(t, a.Dir(), failedWith(reason.NoBootstrap, plugintest.Noon))
		}, StateExpired, 42, "NoBootstrapCredential, 3 in a row"},
		"nothing there": {func(*testing.T, *Node) {}, StateNone, 43, "no such file"},
		"damaged": {func(t *testing.T, a *Node) {
			plugintest.Put(t, a.Dir(), cache.CurrentFile, []byte("hunter2"), 0o600)
		}, StateNone, 43, "no certificate"},
		"another node's": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, plugintest.OfNode("b")))
		}, StateNone, 43, `it is for node "b"`},
		"nothing, and a wrong configuration": {func(_ *testing.T, a *Node) {
			a.Invalid = reason.Configuration.Failure("mend it", errors.New("line 3: nonsense"))
			a.use(nil)
		}, StateNone, 43, "line 3: nonsense"},
		"a directory that others may write": {func(t *testing.T, a *Node) {
			plugintest.InstallPair(t, a.Dir(), plugintest.NewPair(t, nil))
			if err := os.Chmod(a.Dir().Path(), 0o777); err != nil {
				t.Fatal(err)
			}
		}, StateUnknown, 12, "others may write into it"},
	} {
		t.Run(name, func(t *testing.T) {
			a := testNode(t)
			c.prepare(t, a)
			o := a.Overview()
			if o.State != c.state || !strings.Contains(o.Message, c.says) {
				t.Errorf("%s: %s\nwant %s: %s", o.State, o.Message, c.state, c.says)
			}
			if err := o.Failure(); c.code == 0 && err != nil || c.code != 0 && (err == nil || reason.AsFailure(err).Reason.Code() != c.code) {
				t.Errorf("%v, want exit code %d", err, c.code)
			}
			if problem := plugintest.NotOneLine(o.Message); problem != "" {
				t.Errorf("the message %s: %q", problem, o.Message)
			}
			data, err := json.Marshal(o)
			if err != nil || strings.Contains(string(data), "hunter2") {
				t.Errorf("%v, or a secret: %s", err, data)
			}
		})
	}
}

// It shows what the files hold, without the keys. It takes no lock and changes nothing.
func TestOverviewShowsEachFile(t *testing.T) {
	a := testNode(t)
	pair := justDue(t, a)
	pair.Origin = &cache.Origin{Server: "https://cluster.example.com"}
	plugintest.InstallPair(t, a.Dir(), pair)
	now := a.Now()
	plugintest.PutRecord(t, a.Dir(), failedWith(reason.APIUnreachable, now.Add(-time.Minute)))
	plugintest.PutRecord(t, a.Dir(), plugintest.PendingSince(now.Add(-90*time.Second), "uid"))
	lock, err := a.Dir().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	self, err := process.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.NameWorker(self); err != nil {
		t.Fatal(err)
	}
	before := plugintest.Snapshot(t, filepath.Dir(a.Dir().Path()))
	o := a.Overview()
	if after := plugintest.Snapshot(t, filepath.Dir(a.Dir().Path())); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	second := time.Second
	want := &Overview{
		State: StateFailing, Message: o.Message, Hint: "mend it", Time: now.Truncate(second), NodeName: "a", Provider: "fake", SignerName: "example.com/signer",
		Certificate: &CertificateOverview{
			File: a.Dir().File(cache.CurrentFile), Subject: "CN=system:node:a,O=system:nodes", Serial: "1", Issuer: "CN=system:node:a,O=system:nodes",
			Fingerprint: pair.Fingerprint(), Server: "https://cluster.example.com", NotBefore: plugintest.Noon.Add(-12 * time.Hour), NotAfter: plugintest.Noon.Add(12 * time.Hour),
			RemainingSeconds: int64(plugintest.Noon.Add(12*time.Hour).Sub(now) / second), RenewAt: nodestate.RenewAt(pair.Leaf).UTC().Truncate(second), Due: "its lifetime is nearly over",
		},
		Worker: WorkerOverview{Running: true, PID: os.Getpid(), AgeSeconds: o.Worker.AgeSeconds},
		LastRun: &LastRunOverview{
			Started: now.Add(-2 * time.Minute).Truncate(second), Finished: now.Add(-time.Minute).Truncate(second), Reason: "APIUnreachable", Message: "it did not work",
			Hint: "mend it", Request: "node-csr-w", Phases: []cache.Phase{{Name: "lock", Milliseconds: 1.5}},
		},
		Failures: 3, NextAttempt: now.Add(4 * time.Minute).Truncate(second),
		Pending: &PendingOverview{
			Name: "node-csr-x", SignerName: "example.com/signer", NodeName: "a", Server: "https://cluster.example.com",
			Created: now.Add(-90 * second).Truncate(second), AgeSeconds: 90, WaitsFor: "certificate",
		},
		Credential: CredentialOverview{
			Kind: "node", Description: "the node's own certificate", Why: "the certificate can be used, and provider fake renews",
			Server: "https://cluster.example.com", Source: a.Dir().File(cache.CurrentFile),
		},
		failure: o.failure,
	}
	if !reflect.DeepEqual(o, want) {
		got, _ := json.MarshalIndent(o, "", " ")
		expected, _ := json.MarshalIndent(want, "", " ")
		t.Errorf("got %s\nwant %s", got, expected)
	}
}

// The next credential is that of nodeaccess, and says why.
func TestOverviewNextCredential(t *testing.T) {
	a := testNode(t)
	o := a.Overview()
	if c := o.Credential; c.Kind != "" || c.Why != "there is no usable certificate" || !strings.Contains(c.Problem, "no bootstrap kubeconfig") || c.Hint == "" {
		t.Errorf("without a bootstrap kubeconfig: %+v", c)
	}
	a.Access.Bootstrap = filepath.Join(t.TempDir(), "bootstrap.conf")
	kubeconfig := `{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
  clusters: [{name: a, cluster: {server: "https://cluster.example.com", proxy-url: "http://u:hunter2@proxy"}}], users: [{name: a, user: {token: hunter2}}]}`
	if err := os.WriteFile(a.Access.Bootstrap, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	o = a.Overview()
	if c := o.Credential; c.Kind != "bootstrap" || c.Server != "https://cluster.example.com" || c.Source != a.Access.Bootstrap || c.Problem != "" {
		t.Errorf("%+v", c)
	}
	if data, err := json.Marshal(o); err != nil || strings.Contains(string(data), "hunter2") {
		t.Errorf("%v, or a secret: %s", err, data)
	}
}

// ekProvider is a provider with an EK.
type ekProvider struct{ plugintest.Provider }

func (ekProvider) Versions() attestation.Versions    { return nil }
func (ekProvider) EKTemplate(remember string) string { return strings.TrimSuffix(remember, "+x") }
func (ekProvider) Hello(context.Context, provider.Request) ([]byte, string, error) {
	return nil, "", errors.New("status asks no device")
}
func (ekProvider) Identify(context.Context) (any, error) {
	return nil, errors.New("status asks no device")
}
func (ekProvider) SelfTest(context.Context, func(provider.Check)) error { return nil }
func (ekProvider) Explain(document []byte) []provider.Fact {
	return []provider.Fact{{Name: "document", Value: "x"}, {Name: provider.FactEKTemplate, Value: "rsa-2048"}, {Name: provider.FactEKFingerprint, Value: string(document)}}
}

// The state file names the template, and a pending hello the key.
func TestOverviewNamesTheEK(t *testing.T) {
	a := testNode(t)
	if o := a.Overview(); o.EK != nil {
		t.Errorf("a provider without an EK has %+v", o.EK)
	}
	a.use(ekProvider{})
	if o := a.Overview(); o.EK == nil || *o.EK != (EKOverview{}) {
		t.Errorf("before the first certificate: %+v", o.EK)
	}
	plugintest.PutRecord(t, a.Dir(), &cache.State{Remembered: map[string]string{"fake": "ecc-p256+x", "other": "x"}})
	if o := a.Overview(); *o.EK != (EKOverview{Template: "ecc-p256"}) {
		t.Errorf("after a certificate: %+v", o.EK)
	}
	request, err := attestation.Request{PKCS10: []byte("x"), Provider: "fake", Data: []byte("abcdef")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	pending := plugintest.PendingSince(plugintest.Noon, "uid")
	pending.Requests[0].Hello, pending.Requests[0].Request = true, request
	plugintest.PutRecord(t, a.Dir(), pending)
	o := a.Overview()
	if *o.EK != (EKOverview{Template: "rsa-2048", Fingerprint: "abcdef"}) {
		t.Errorf("with a pending hello: %+v", o.EK)
	}
	if o.Pending.WaitsFor != "challenge" || o.Pending.SignerName != attestation.HelloSignerName {
		t.Errorf("%+v", o.Pending)
	}
}

// jsonPaths returns the names of all JSON fields below a type.
func jsonPaths(t reflect.Type, prefix string) (paths []string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		if t.Kind() == reflect.Slice {
			prefix += "[]"
		}
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || t == reflect.TypeFor[time.Time]() {
		return []string{prefix}
	}
	for i := range t.NumField() {
		name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		if !t.Field(i).IsExported() {
			continue
		}
		paths = append(paths, jsonPaths(t.Field(i).Type, strings.TrimPrefix(prefix+"."+name, "."))...)
	}
	return paths
}

// The names are a contract: docs/node.md has each of them, and no other.
func TestOverviewFieldsAreDocumented(t *testing.T) {
	document, err := os.ReadFile("../../../docs/node.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	_, fields, _ := strings.Cut(string(document), "\n| field | meaning |\n")
	fields, _, _ = strings.Cut(fields, "\n\n")
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Za-z.\\[\\]]+)` \\|").FindAllStringSubmatch(fields, -1) {
		documented = append(documented, row[1])
	}
	if want := jsonPaths(reflect.TypeFor[Overview](), ""); !slices.Equal(documented, want) {
		t.Errorf("documented are\n%s\nthere are\n%s", strings.Join(documented, "\n"), strings.Join(want, "\n"))
	}
	for _, state := range []State{StateOK, StateDue, StateFailing, StateExpired, StateNone, StateUnknown} {
		if !strings.Contains(string(document), "| `"+string(state)+"` |") {
			t.Errorf("state %s has no row", state)
		}
	}
}

// The controller's reason for which a request waits is the state's, with its remedy.
func TestOverviewOfAWaitingRequest(t *testing.T) {
	a := testNode(t)
	plugintest.PutRecord(t, a.Dir(), plugintest.PendingSince(plugintest.Noon, "uid"))
	plugintest.PutRecord(t, a.Dir(), &cache.State{Waiting: &cache.Waiting{Request: "node-csr-x", Annotation: "MachineNotFound: run this"}})
	o := a.Overview()
	if o.Pending == nil || o.Pending.Reason != "MachineNotFound" || o.Pending.Cure != "run this" || !strings.Contains(o.Message, ": MachineNotFound") || o.Hint != "run this" {
		t.Errorf("%+v, %s (%s)", o.Pending, o.Message, o.Hint)
	}
}
