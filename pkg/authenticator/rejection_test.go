// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
)

// reviewer is an API server that is asked whom it takes a certificate for.
type reviewer struct {
	answer http.HandlerFunc
	prefix string // of the path

	mu    sync.Mutex
	calls int
	// shown is the leaf of the last client certificate, wrong what was not as it should be.
	shown []byte
	wrong []string
}

func (r *reviewer) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, _ := io.ReadAll(request.Body)
	var review struct{ APIVersion, Kind string }
	err := json.Unmarshal(body, &review)
	r.mu.Lock()
	r.calls++
	if certificates := request.TLS.PeerCertificates; len(certificates) > 0 {
		r.shown = certificates[0].Raw
	}
	if request.Method != http.MethodPost || request.URL.Path != r.prefix+"/apis/authentication.k8s.io/v1/selfsubjectreviews" ||
		request.Header.Get("Content-Type") != "application/json" || request.Header.Get("Authorization") != "" || request.UserAgent() != "test/1" ||
		err != nil || review.APIVersion != "authentication.k8s.io/v1" || review.Kind != "SelfSubjectReview" {
		r.wrong = append(r.wrong, request.Method+" "+request.URL.String()+" "+string(body))
	}
	r.mu.Unlock()
	r.answer(w, request)
}

// seen returns how often it was asked, and fails the test if it was asked otherwise than it should
// be.
func (r *reviewer) seen(t *testing.T, certificate []byte) int {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, wrong := range r.wrong {
		t.Errorf("asked wrongly: %s", wrong)
	}
	if r.calls > 0 && !bytes.Equal(r.shown, certificate) {
		t.Error("it was not shown the node's certificate")
	}
	return r.calls
}

// reviewed returns an Authenticator that asks that API server.
func reviewed(t *testing.T, answer http.HandlerFunc) (*Authenticator, *reviewer) {
	t.Helper()
	api := &reviewer{answer: answer}
	server, ca := plugintest.TLSServer(t, api, func(s *httptest.Server) {
		s.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12}
	})
	a := testAuthenticator(t)
	a.parent = plugintest.Asker
	a.ask(ExecInfo{APIVersion: execV1, Cluster: &clientauthentication.Cluster{Server: server.URL, CertificateAuthorityData: ca}})
	return a, api
}

func TestOnlyA401MarksTheCertificateAsRejected(t *testing.T) {
	t.Parallel()
	hangUp := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	halfAnswer := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, plugintest.Someone[:10])
		_ = http.NewResponseController(w).Flush()
		plugintest.Hang(w, r)
	}
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		was    bool
		want   bool
	}{
		"401":                               {plugintest.AnswerCode(401, "Unauthorized"), false, true},
		"401 again":                         {plugintest.AnswerCode(401, "Unauthorized"), true, true},
		"200":                               {plugintest.AnswerCode(200, plugintest.Someone), false, false},
		"201":                               {plugintest.AnswerCode(201, plugintest.Someone), false, false},
		"201, was rejected":                 {plugintest.AnswerCode(201, plugintest.Someone), true, false},
		"201, but no JSON":                  {plugintest.AnswerCode(201, "<html>"), false, false},
		"201, but no JSON, was rejected":    {plugintest.AnswerCode(201, "<html>"), true, true},
		"403":                               {plugintest.AnswerCode(403, "Forbidden"), false, false},
		"404":                               {plugintest.AnswerCode(404, "old API server"), false, false},
		"407":                               {plugintest.AnswerCode(407, "proxy"), false, false},
		"429":                               {plugintest.AnswerCode(429, ""), false, false},
		"500":                               {plugintest.AnswerCode(500, ""), false, false},
		"503":                               {plugintest.AnswerCode(503, ""), false, false},
		"429, was rejected":                 {plugintest.AnswerCode(429, ""), true, true},
		"503, was rejected":                 {plugintest.AnswerCode(503, ""), true, true},
		"hangs up":                          {hangUp, false, false},
		"hangs up, was rejected":            {hangUp, true, true},
		"hangs":                             {plugintest.Hang, false, false},
		"hangs, was rejected":               {plugintest.Hang, true, true},
		"hangs in the middle of its answer": {halfAnswer, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, api := reviewed(t, c.answer)
			pair := plugintest.NewPair(t, nil)
			plugintest.InstallPair(t, a.node.Dir(), pair)
			asked := nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Unix() + 100, Reviewed: plugintest.Noon.Unix() - 60, Rejected: c.was}
			a.node.Note.Write(asked)
			s := a.node.Load()
			if strings.HasPrefix(name, "hangs") && !strings.HasPrefix(name, "hangs up") {
				a.enroller.ReviewTimeout = reviewTimeout
			}
			began := time.Now()
			a.noticeRejection(t.Context(), &s)
			took := time.Since(began)
			if took > 20*reviewTimeout { // on a machine that has much else to do
				t.Errorf("every request of the kubelet waited for %v", took)
			}
			if calls := api.seen(t, pair.Leaf.Raw); calls > 1 || calls == 0 && took < reviewTimeout {
				t.Errorf("asked %d times", calls)
			}
			if s.Rejected != c.want || (s.Due != "") != c.want || s.Pair == nil {
				t.Errorf("rejected %v, due %q, pair %v; want rejected %v", s.Rejected, s.Due, s.Pair != nil, c.want)
			}
			asked.Reviewed, asked.Rejected = plugintest.Noon.Unix(), c.want
			if got := a.node.Note.Read(); got != asked {
				t.Errorf("note %+v, want %+v", got, asked)
			}
		})
	}
}

func TestWhenTheAPIServerIsAsked(t *testing.T) {
	t.Parallel()
	pair := plugintest.NewPair(t, nil)
	early := nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Unix() + 1}
	with := func(change func(*nodestate.Note)) nodestate.Note {
		n := early
		change(&n)
		return n
	}
	for name, c := range map[string]struct {
		note   nodestate.Note
		change func(*Authenticator)
		asks   bool
	}{
		"the same parent, too early":                     {early, nil, true},
		"the first time":                                 {nodestate.Note{}, nil, false},
		"at the time it was given":                       {with(func(n *nodestate.Note) { n.Until = plugintest.Noon.Unix() }), nil, false},
		"after it":                                       {with(func(n *nodestate.Note) { n.Until = plugintest.Noon.Unix() - 1 }), nil, false},
		"another parent":                                 {with(func(n *nodestate.Note) { n.Parent.PID++ }), nil, false},
		"another parent under the same pid":              {with(func(n *nodestate.Note) { n.Parent.Start++ }), nil, false},
		"a person":                                       {with(func(n *nodestate.Note) { n.Parent = process.ID{} }), func(a *Authenticator) { a.parent = process.ID{} }, false},
		"another certificate was printed":                {with(func(n *nodestate.Note) { n.Certificate = "abc" }), nil, false},
		"another certificate was printed, and rejected":  {with(func(n *nodestate.Note) { n.Certificate, n.Rejected = "abc", true }), nil, false},
		"asked 59 s ago":                                 {with(func(n *nodestate.Note) { n.Reviewed = plugintest.Noon.Unix() - 59 }), nil, false},
		"asked just now":                                 {with(func(n *nodestate.Note) { n.Reviewed = plugintest.Noon.Unix() }), nil, false},
		"asked 60 s ago":                                 {with(func(n *nodestate.Note) { n.Reviewed = plugintest.Noon.Unix() - 60 }), nil, true},
		"asked before the clock was set back":            {with(func(n *nodestate.Note) { n.Reviewed = plugintest.Noon.Unix() + 3600 }), nil, true},
		"rejected, in time, asked a minute ago":          {with(func(n *nodestate.Note) { n.Rejected, n.Until, n.Reviewed = true, 0, plugintest.Noon.Unix()-60 }), nil, true},
		"rejected, another parent, asked a minute ago":   {with(func(n *nodestate.Note) { n.Rejected, n.Parent.Start, n.Reviewed = true, 1, plugintest.Noon.Unix()-60 }), nil, true},
		"rejected, asked 59 s ago":                       {with(func(n *nodestate.Note) { n.Rejected, n.Reviewed = true, plugintest.Noon.Unix()-59 }), nil, false},
		"under a configuration that is wrong":            {early, func(a *Authenticator) { a.node.Invalid = io.EOF }, false},
		"too early, but there is nothing to ask about":   {early, func(a *Authenticator) { a.node.Now = func() time.Time { return plugintest.Noon.Add(24 * time.Hour) } }, false},
		"too early, and the note is another directory's": {early, func(a *Authenticator) { a.node.Note = nodestate.NewNoteFile(t.TempDir(), "/another") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, api := reviewed(t, plugintest.AnswerCode(201, plugintest.Someone))
			plugintest.InstallPair(t, a.node.Dir(), pair)
			a.node.Note.Write(c.note)
			if c.change != nil {
				c.change(a)
			}
			s := a.node.Load()
			a.noticeRejection(t.Context(), &s)
			if calls := api.seen(t, pair.Leaf.Raw); (calls == 1) != c.asks || calls > 1 {
				t.Errorf("asked %d times, want %v", calls, c.asks)
			}
		})
	}
}

// However often client-go runs the plugin after a 401, the network is touched once a minute.
func TestReviewsArePaced(t *testing.T) {
	t.Parallel()
	a, api := reviewed(t, plugintest.AnswerCode(500, ""))
	pair := plugintest.NewPair(t, nil)
	plugintest.InstallPair(t, a.node.Dir(), pair)
	a.node.Note.Write(nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Unix() + 3600})
	now := plugintest.Noon
	a.node.Now = func() time.Time { return now }
	for range 1200 { // two minutes of ten requests a second
		s := a.node.Load()
		a.noticeRejection(t.Context(), &s)
		now = now.Add(100 * time.Millisecond)
	}
	if calls := api.seen(t, pair.Leaf.Raw); calls != 2 {
		t.Errorf("asked %d times in two minutes", calls)
	}
}

func TestReviewNeedsAClusterAndIsNoFailureWithoutOne(t *testing.T) {
	a := testAuthenticator(t)
	a.parent = plugintest.Asker
	pair := plugintest.NewPair(t, nil) // without an origin
	plugintest.InstallPair(t, a.node.Dir(), pair)
	a.node.Note.Write(nodestate.Note{Parent: plugintest.Asker, Certificate: pair.Fingerprint(), Until: plugintest.Noon.Unix() + 100})
	s := a.node.Load()
	a.noticeRejection(t.Context(), &s)
	if s.Rejected || s.Due != "" || s.Pair == nil {
		t.Errorf("rejected %v, due %q", s.Rejected, s.Due)
	}
}

func TestReviewSaysWhom(t *testing.T) {
	t.Parallel()
	a, api := reviewed(t, plugintest.AnswerCode(201, plugintest.Someone))
	pair := plugintest.NewPair(t, nil)
	review, err := a.node.Access.Review(t.Context(), pair)
	if err != nil || review.Username != "system:node:a" || review.Status != 201 {
		t.Errorf("%+v, %v", review, err)
	}
	api.answer = plugintest.AnswerCode(401, plugintest.Someone)
	api.prefix = "/k8s/clusters/c-1" // an API server need not be at the root
	a.node.Access.Asked.Server += api.prefix + "/"
	if review, err = a.node.Access.Review(t.Context(), pair); err != nil || review.Username != "" || review.Status != 401 {
		t.Errorf("a name that comes with 401 counts: %+v, %v", review, err)
	}
	if calls := api.seen(t, pair.Leaf.Raw); calls != 2 {
		t.Errorf("asked %d times", calls)
	}
}
