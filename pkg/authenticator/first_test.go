// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"errors"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// The copy is deleted only once the API server has accepted the node's certificate. Other files are
// not deleted, nor is a copy that the settings keep.
func TestDiscardBootstrap(t *testing.T) {
	t.Parallel()
	const mark = "# Copied by kubelet-authenticator prepare.\n"
	of := func(a *Authenticator, ca []byte) string {
		return mark + plugintest.Kubeconfig(plugintest.OnServer(a.exec.Cluster.Server, ca), "token: abcdef.0123456789abcdef")
	}
	copied := func(a *Authenticator) string { return of(a, a.exec.Cluster.CertificateAuthorityData) }
	elsewhere := func(a *Authenticator) string { return of(a, plugintest.NewCA(t)) }
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		content func(*Authenticator) string
		arrange func(*Authenticator)
		deleted bool
		asked   int
		says    string
	}{
		"accepted":            {plugintest.AnswerCode(201, plugintest.Someone), copied, nil, true, 1, ""},
		"for another node":    {plugintest.AnswerCode(201, `{"status":{"userInfo":{"username":"system:node:b"}}}`), copied, nil, false, 1, "system:node:b"},
		"rejected":            {plugintest.AnswerCode(401, ""), copied, nil, false, 1, "401"},
		"no such API":         {plugintest.AnswerCode(404, ""), copied, nil, false, 1, "404"},
		"no answer":           {plugintest.Hang, copied, nil, false, 1, "kept for now"},
		"to be kept":          {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) { a.enroller.KeepBootstrap = true }, false, 0, ""},
		"by an operator":      {plugintest.AnswerCode(201, plugintest.Someone), func(*Authenticator) string { return "apiVersion: v1\n" }, nil, false, 0, ""},
		"another cluster":     {plugintest.AnswerCode(201, plugintest.Someone), elsewhere, nil, false, 0, ""},
		"no current-context":  {plugintest.AnswerCode(201, plugintest.Someone), func(*Authenticator) string { return mark + "apiVersion: v1\n" }, nil, false, 0, "current-context"},
		"configuration wrong": {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) { a.node.Invalid = errors.New("wrong") }, false, 0, ""},
		"no certificate":      {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) { _ = os.Remove(a.node.Dir().File(cache.CurrentFile)) }, false, 0, ""},
		"noted as rejected": {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) {
			pair, _ := a.node.Dir().Current()
			a.node.Note.Write(nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true})
		}, false, 0, ""},
		"state damaged": {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) { _ = os.WriteFile(a.node.Dir().File(cache.StateFile), []byte("{"), 0o600) }, false, 1, "JSON"},
		"a worker is at it": {plugintest.AnswerCode(201, plugintest.Someone), copied, func(a *Authenticator) {
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				panic(err)
			}
			// Without a reference the garbage collector would close the file, and so unlock it.
			t.Cleanup(func() { runtime.KeepAlive(lock) })
		}, false, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, api := reviewed(t, c.answer)
			pair := plugintest.NewPair(t, nil)
			plugintest.InstallPair(t, a.node.Dir(), pair)
			content := []byte(c.content(a))
			plugintest.Put(t, a.node.Dir(), cache.BootstrapFile, content, 0o600)
			if name == "no answer" {
				a.enroller.ReviewTimeout = reviewTimeout
			}
			if c.arrange != nil {
				c.arrange(a)
			}
			deleted, err := a.DiscardBootstrap(t.Context())
			if deleted != c.deleted || (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("deleted %v, %v", deleted, err)
			}
			data, err := os.ReadFile(a.node.Dir().File(cache.BootstrapFile))
			if (err != nil) != c.deleted || err == nil && !bytes.Equal(data, content) {
				t.Errorf("%q %v", data, err)
			}
			// on a busy machine the time is over before the question arrives
			if calls := api.seen(t, pair.Leaf.Raw); calls != c.asked && (name != "no answer" || calls > 1) {
				t.Errorf("the API server was asked %d times", calls)
			}
			if state, err := a.node.Dir().State(); err == nil && (state.SpentBootstrap != "") != c.deleted {
				t.Errorf("state: %+v", state)
			}
			if again, err := a.DiscardBootstrap(t.Context()); c.deleted && (again || err != nil) {
				t.Errorf("the second time: %v %v", again, err)
			}
		})
	}
}

// What no waiting mends is not waited for.
func TestAwaitFirstGivesUpAtOnce(t *testing.T) {
	t.Parallel()
	none := func(err error) { t.Error(err) }
	a := testAuthenticator(t)
	a.node.Invalid = errors.New("wrong")
	_, err := a.AwaitFirst(t.Context(), time.Hour, none)
	plugintest.MustFail(t, err, reason.Unexpected)

	a = testAuthenticator(t)
	plugintest.Put(t, a.node.Dir(), "x", nil, 0o600)
	if err := os.Chmod(a.node.Dir().Path(), 0o777); err != nil {
		t.Fatal(err)
	}
	_, err = a.AwaitFirst(t.Context(), time.Hour, none)
	plugintest.MustFail(t, err, reason.DirectoryRefused)
}

func TestAwaitFirstTakesWhatIsThere(t *testing.T) {
	t.Parallel()
	a := testAuthenticator(t)
	plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, nil))
	leaf, err := a.AwaitFirst(t.Context(), 0, func(err error) { t.Error(err) })
	if err != nil || leaf.Subject.CommonName != "system:node:a" {
		t.Error(leaf, err)
	}
}

// prepare says what the request waits for as soon as that is known, and that nothing is known after
// some seconds.
func TestProgress(t *testing.T) {
	t.Parallel()
	filed := func(ago time.Duration, uid string) func(t *testing.T, a *Authenticator) {
		return func(t *testing.T, a *Authenticator) {
			plugintest.PutRecord(t, a.node.Dir(), plugintest.PendingSince(a.node.Now().Add(-ago), uid))
		}
	}
	seen := func(request string) func(t *testing.T, a *Authenticator) {
		return func(t *testing.T, a *Authenticator) {
			filed(0, "uid")(t, a)
			plugintest.PutRecord(t, a.node.Dir(), &cache.State{Waiting: &cache.Waiting{Request: request, Annotation: "MachineNotFound: run this"}})
		}
	}
	const plain = "CertificateSigningRequest node-csr-x: signer example.com/signer has not issued a certificate yet"
	for name, c := range map[string]struct {
		arrange    func(t *testing.T, a *Authenticator)
		says, hint string
	}{
		"no request":           {func(*testing.T, *Authenticator) {}, "", ""},
		"not filed":            {filed(time.Hour, ""), "", ""},
		"just filed":           {filed(0, "uid"), "", ""},
		"filed some time ago":  {filed(unanswered, "uid"), plain, "see: kubectl describe csr node-csr-x"},
		"the controller knows": {seen("node-csr-x"), plain + ": MachineNotFound", "run this"},
		"another request":      {seen("node-csr-w"), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := testAuthenticator(t)
			c.arrange(t, a)
			got := a.progress()
			if (got == nil) != (c.says == "") || got != nil && (got.Error() != c.says || got.Hint != c.hint) {
				t.Errorf("%+v", got)
			}
		})
	}
}
