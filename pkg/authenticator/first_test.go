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
		return mark + kubeconfig(onServer(a.exec.Cluster.Server, ca), "token: abcdef.0123456789abcdef")
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
		"taken":               {answerCode(201, someone), copied, nil, true, 1, ""},
		"for somebody else":   {answerCode(201, `{"status":{"userInfo":{"username":"system:node:b"}}}`), copied, nil, false, 1, "system:node:b"},
		"rejected":            {answerCode(401, ""), copied, nil, false, 1, "401"},
		"no such API":         {answerCode(404, ""), copied, nil, false, 1, "404"},
		"no answer":           {plugintest.Hang, copied, nil, false, 1, "kept for now"},
		"to be kept":          {answerCode(201, someone), copied, func(a *Authenticator) { a.keepBootstrap = true }, false, 0, ""},
		"an operator's":       {answerCode(201, someone), func(*Authenticator) string { return "apiVersion: v1\n" }, nil, false, 0, ""},
		"another cluster's":   {answerCode(201, someone), elsewhere, nil, false, 0, ""},
		"nobody's":            {answerCode(201, someone), func(*Authenticator) string { return mark + "apiVersion: v1\n" }, nil, false, 0, "current-context"},
		"configuration wrong": {answerCode(201, someone), copied, func(a *Authenticator) { a.node.Invalid = errors.New("wrong") }, false, 0, ""},
		"no certificate":      {answerCode(201, someone), copied, func(a *Authenticator) { _ = os.Remove(a.node.Dir().File(cache.CurrentFile)) }, false, 0, ""},
		"noted as rejected": {answerCode(201, someone), copied, func(a *Authenticator) {
			pair, _ := a.node.Dir().Current()
			a.node.Note.Write(nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true})
		}, false, 0, ""},
		"state damaged": {answerCode(201, someone), copied, func(a *Authenticator) { _ = os.WriteFile(a.node.Dir().File(cache.StateFile), []byte("{"), 0o600) }, false, 1, "JSON"},
		"a worker is at it": {answerCode(201, someone), copied, func(a *Authenticator) {
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
				a.reviewTimeout = reviewTimeout
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
