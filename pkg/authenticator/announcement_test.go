// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// announcer is an API server with the announcement and a Node, before one with requests.
type announcer struct {
	plugintest.APIServer

	get, patch http.HandlerFunc
	// tryWrite answers the dry run of a write. It answers 200 if it is nil.
	tryWrite http.HandlerFunc

	mu      sync.Mutex
	calls   []string // method and path
	patched []byte   // the last patch
	shown   []byte   // the certificate of the last call
}

func (s *announcer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	next := map[string]http.HandlerFunc{
		"GET /api/v1/namespaces/kube-public/configmaps/node-attestation-renewal": s.get,
		"PATCH /api/v1/nodes/a": s.patch,
	}[r.Method+" "+r.URL.Path]
	if next == nil && r.URL.Query().Get("dryRun") == "" {
		s.APIServer.ServeHTTP(w, r)
		return
	}
	if r.URL.Query().Get("dryRun") == "All" {
		if s.tryWrite != nil {
			s.tryWrite(w, r)
		}
		return
	}
	s.mu.Lock()
	s.calls = append(s.calls, r.Method)
	if r.Method == http.MethodPatch {
		s.patched, _ = io.ReadAll(r.Body)
		if r.Header.Get("Content-Type") != "application/merge-patch+json" {
			s.T.Errorf("it is no merge patch: %s", r.Header.Get("Content-Type"))
		}
	}
	if len(r.TLS.PeerCertificates) > 0 {
		s.shown = r.TLS.PeerCertificates[0].Raw
	}
	s.mu.Unlock()
	next(w, r)
}

// seen returns the calls since the last time.
func (s *announcer) seen() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := strings.Join(s.calls, " ")
	s.calls = nil
	return calls
}

// configMap is the answer with these renewals.
func configMap(t testing.TB, renewals ...attestation.Renewal) http.HandlerFunc {
	t.Helper()
	data, err := attestation.Announcement{Renewals: renewals}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return configMapOf(t, string(data))
}

func configMapOf(t testing.TB, data string) http.HandlerFunc {
	t.Helper()
	body, err := json.Marshal(map[string]any{"kind": "ConfigMap", "apiVersion": "v1", "data": map[string]string{attestation.AnnouncementKey: data}})
	if err != nil {
		t.Fatal(err)
	}
	return plugintest.AnswerCode(200, string(body))
}

// rotate is a renewal of all nodes that starts at noon, of the certificates from before noon.
func rotate(change func(*attestation.Renewal)) attestation.Renewal {
	r := attestation.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, All: true, Start: plugintest.Noon}
	if change != nil {
		change(&r)
	}
	return r
}

// announced returns an Authenticator of a node that checks every 15 minutes. Its certificate is
// half a day old, and its API server announces no renewal.
func announced(t *testing.T) (*Authenticator, *announcer, *cache.Pair) {
	t.Helper()
	api := &announcer{get: configMap(t), patch: plugintest.AnswerCode(200, "{}")}
	api.T, api.Review = t, plugintest.AnswerCode(201, plugintest.Someone) // these tests' runs follow one another too soon
	api.Decide = func(object *certificatesv1.CertificateSigningRequest) {
		object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(12 * time.Hour) })
	}
	server, ca := plugintest.TLSServer(t, api, func(s *httptest.Server) {
		s.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12}
	})
	a := testAuthenticator(t)
	a.parent, a.node.CheckInterval = plugintest.Asker, 15*time.Minute
	a.ask(ExecInfo{APIVersion: execV1, Cluster: &clientauthentication.Cluster{Server: server.URL, CertificateAuthorityData: ca}})
	pair := plugintest.NewPair(t, nil)
	plugintest.InstallPair(t, a.node.Dir(), pair)
	return a, api, pair
}

// found returns what is written down, with the checks that are sure to be there.
func found(t testing.TB, a *Authenticator) cache.Announcement {
	t.Helper()
	state, err := a.node.Dir().State()
	if err != nil || state.Announcement == nil {
		t.Fatalf("nothing was written down: %v", err)
	}
	if state.Announcement.UnderWay {
		t.Error("the check is under way for ever")
	}
	return *state.Announcement
}

// at sets the clock.
func (a *Authenticator) at(now time.Time) { a.node.Now = func() time.Time { return now } }

// expires is the expirationTimestamp of a run that starts no worker, as a time from now.
func expires(t testing.TB, a *Authenticator) time.Duration {
	t.Helper()
	answer, err := a.Run(t.Context())
	if err != nil || len(answer.Remarks) > 0 {
		t.Fatalf("%v, %v", answer.Remarks, err)
	}
	return printed(t, answer).ExpirationTimestamp.Sub(a.node.Now())
}

// client-go asks again at the next check, and each run until then prints the same.
func TestExpirationIsTheNextCheck(t *testing.T) {
	t.Parallel()
	a, _, pair := announced(t)
	began := pair.Leaf.NotBefore
	a.at(began)
	first, err := a.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	next := printed(t, first).ExpirationTimestamp.Time
	if in := next.Sub(began); in < 11*time.Minute || in > 15*time.Minute {
		t.Errorf("the next check is in %s", in)
	}
	a.at(next.Add(-time.Second))
	if again, err := a.Run(t.Context()); err != nil || !bytes.Equal(again.Credential, first.Credential) {
		t.Errorf("later it prints something else: %v", err)
	}
	spread := map[time.Duration]bool{}
	for minute := range 40 {
		checked := plugintest.Noon.Add(-time.Duration(minute) * time.Minute)
		plugintest.WriteState(t, a.node.Dir(), &cache.State{Announcement: &cache.Announcement{Checked: checked}})
		a.at(checked)
		in := expires(t, a)
		if in < 11*time.Minute || in > 15*time.Minute {
			t.Errorf("after a check at %s the next is in %s", checked, in)
		}
		spread[in.Round(time.Minute)] = true
	}
	if len(spread) < 4 {
		t.Errorf("the checks do not spread: %v", spread)
	}
	a.node.CheckInterval = 0
	if in := expires(t, a); in < 5*time.Hour {
		t.Errorf("without checks, client-go asks again in %s", in)
	}
	a.node.CheckInterval = 15 * time.Minute
	a.use(plugintest.Provider{})
	if in := expires(t, a); in < 5*time.Hour {
		t.Errorf("without renewals, client-go asks again in %s", in)
	}
}

// A run starts the worker for a check, waits for nothing, and prints the same certificate.
func TestRunStartsACheck(t *testing.T) {
	for name, c := range map[string]struct {
		state  *cache.State // nil: there is none
		checks bool
		near   bool
	}{
		"none yet":             {nil, true, true},
		"long ago":             {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon.Add(-time.Hour)}}, true, true},
		"15 min ago":           {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon.Add(-15 * time.Minute)}}, true, true},
		"5 min ago":            {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon.Add(-5 * time.Minute)}}, false, false},
		"a moment ago, failed": {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon, Problem: "no"}}, false, false},
		"under way":            {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon, UnderWay: true}}, false, true},
		"its worker died":      {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon.Add(-2 * time.Minute), UnderWay: true}}, false, false},
		"by a clock ahead":     {&cache.State{Announcement: &cache.Announcement{Checked: plugintest.Noon.Add(time.Hour)}}, true, true},
		"during a back-off": {&cache.State{NextAttempt: plugintest.Noon.Add(time.Minute), Last: &cache.Result{Finished: plugintest.Noon, Reason: string(reason.RequestDenied)}},
			false, false},
	} {
		t.Run(name, func(t *testing.T) {
			a, _, pair := announced(t)
			if c.state != nil {
				plugintest.WriteState(t, a.node.Dir(), c.state)
			}
			started := false
			start := workerThat(t, func() {}) // it hangs
			a.startWorker = func() (process.ID, error) { started = true; return start() }
			clock := plugintest.Noon
			a.node.Now = func() time.Time { // it does not stand still during a run
				clock = clock.Add(time.Millisecond)
				return clock
			}
			began := time.Now()
			answer, err := a.Run(t.Context())
			if took := time.Since(began); took > a.waitTimeout {
				t.Errorf("it waited for %s", took)
			}
			if err != nil || len(answer.Remarks) > 0 {
				t.Fatalf("%v, %v", answer.Remarks, err)
			}
			status := printed(t, answer)
			if status.ClientCertificateData != string(pair.Chain) || started != c.checks {
				t.Errorf("a worker was started: %v", started)
			}
			if until := status.ExpirationTimestamp.Sub(plugintest.Noon); until <= 0 || until > 15*time.Minute || (until <= 31*time.Second) != c.near {
				t.Errorf("client-go asks again in %s", until)
			}
		})
	}
}

// Times that are ahead count for nothing.
func TestNextCheckByAClockThatWasSetBack(t *testing.T) {
	a, _, _ := announced(t)
	ago := func(d time.Duration) time.Time { return plugintest.Noon.Add(-d) }
	for name, c := range map[string]struct {
		notBefore, checked time.Time
		checks             bool
	}{
		"a check ahead, a new certificate":           {ago(time.Minute), ago(-time.Hour), false},
		"a check ahead, an old certificate":          {ago(time.Hour), ago(-time.Hour), true},
		"a certificate that is early, after a check": {ago(-5 * time.Minute), ago(time.Minute), false},
		"a certificate that is early, unchecked":     {ago(-5 * time.Minute), time.Time{}, true},
	} {
		status := a.node.StatusOf(plugintest.NewPair(t, func(x *x509.Certificate) { x.NotBefore = c.notBefore }), &cache.State{Announcement: &cache.Announcement{Checked: c.checked}})
		if got := status.CheckDue(); got != c.checks {
			t.Errorf("%s: due: %v", name, got)
		}
	}
}

// If no worker can be started for a check, the certificate is printed as if there had been one.
func TestCheckThatCannotBegin(t *testing.T) {
	for name, prepare := range map[string]func(a *Authenticator){
		"no worker can be started": func(*Authenticator) {},
		"another process holds the lock": func(a *Authenticator) {
			lock, err := a.node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(lock.Unlock)
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, _, _ := announced(t)
			prepare(a)
			if in := expires(t, a); in < 11*time.Minute || in > 15*time.Minute {
				t.Errorf("client-go asks again in %s", in)
			}
		})
	}
}

func TestCheckIntervalBoundsTheNearExpiration(t *testing.T) {
	a, _, _ := announced(t)
	a.node.CheckInterval = 10 * time.Second
	a.startWorker = workerThat(t, func() {})
	if in := expires(t, a); in > 10*time.Second {
		t.Errorf("client-go asks again in %s", in)
	}
}

// What each answer comes to. Nothing of it is a failure of the worker, and none is filed.
func TestCheck(t *testing.T) {
	t.Parallel()
	before := cache.Announcement{
		Checked: plugintest.Noon.Add(-time.Hour), Answered: plugintest.Noon.Add(-time.Hour), Exists: true,
		Renewal: &cache.Renewal{Name: "earlier", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Hour)},
	}
	kept := func(problem string) cache.Announcement {
		after := before
		after.Checked, after.Problem = plugintest.Noon, problem
		return after
	}
	answered := func(exists bool, renewal *cache.Renewal) cache.Announcement {
		return cache.Announcement{Checked: plugintest.Noon, Answered: plugintest.Noon, Exists: exists, Renewal: renewal}
	}
	long := strings.Repeat("x", attestation.MaxAnnouncement)
	for name, c := range map[string]struct {
		get  http.HandlerFunc
		want cache.Announcement
	}{
		"nothing announced": {configMap(t), answered(true, nil)},
		"no entry":          {plugintest.AnswerCode(200, `{"kind":"ConfigMap"}`), answered(true, nil)},
		"404":               {plugintest.AnswerCode(404, `{"kind":"Status"}`), answered(false, nil)},
		"403":               {plugintest.AnswerCode(403, `{"kind":"Status"}`), answered(false, nil)},
		"for all, later": {configMap(t, rotate(func(r *attestation.Renewal) { r.Start = plugintest.Noon.Add(time.Hour) })),
			answered(true, &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Hour)})},
		"for this node, later": {configMap(t, rotate(func(r *attestation.Renewal) {
			r.All, r.Nodes, r.Start = false, []string{"b", "a"}, plugintest.Noon.Add(time.Hour)
		})),
			answered(true, &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Hour)})},
		"for others":              {configMap(t, rotate(func(r *attestation.Renewal) { r.All, r.Nodes = false, []string{"b"} })), answered(true, nil)},
		"of earlier certificates": {configMap(t, rotate(func(r *attestation.Renewal) { r.IssuedBefore = plugintest.Noon.Add(-12 * time.Hour) })), answered(true, nil)},
		// it may not renew too early
		"of certificates to come": {configMap(t, rotate(func(r *attestation.Renewal) { r.IssuedBefore = plugintest.Noon.Add(time.Hour) })),
			answered(true, &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon.Add(time.Hour), DueAt: plugintest.Noon.Add(time.Hour)})},
		"the earliest of two": {configMap(t, rotate(func(r *attestation.Renewal) { r.Start = plugintest.Noon.Add(time.Hour) }), rotate(func(r *attestation.Renewal) { r.Name, r.Start = "sooner", plugintest.Noon.Add(time.Minute) })),
			answered(true, &cache.Renewal{Name: "sooner", IssuedBefore: plugintest.Noon, DueAt: plugintest.Noon.Add(time.Minute)})},
		"without a name":       {configMap(t, rotate(func(r *attestation.Renewal) { r.Name = "" })), kept("whose name has 0 bytes")},
		"with an endless name": {configMap(t, rotate(func(r *attestation.Renewal) { r.Name = strings.Repeat("x", 254) })), kept("whose name has 254 bytes")},
		"another version":      {configMapOf(t, `{"version":2}`), kept("version 2 is unknown")},
		"malformed":            {configMapOf(t, `{"version":1,"renewals":[{}]}`), kept("without issuedBefore")},
		"not JSON":             {configMapOf(t, `nonsense`), kept("invalid character")},
		"oversized":            {configMapOf(t, long+"x"), kept("longer than")},
		"endless":              {plugintest.AnswerCode(200, `{"kind":"ConfigMap","data":{"x":"`+strings.Repeat(long, 8)), kept("at most")},
		"of another kind":      {plugintest.AnswerCode(200, `{"kind":"Secret"}`), kept("not a ConfigMap")},
		"of a web server":      {plugintest.AnswerPage(200), kept("not a ConfigMap")},
		"500":                  {plugintest.AnswerCode(500, `{"message":"etcd:\nleader changed"}`), kept("500: etcd: leader changed")},
		"401":                  {plugintest.AnswerCode(401, `{"message":"Unauthorized"}`), kept("401: Unauthorized")},
		"overloaded":           {plugintest.AnswerCode(429, `{"message":"later"}`), kept("429: later")},
		"redirect":             {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }, kept("302")},
		"hangs up":             {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, kept("EOF")},
		"no answer":            {plugintest.Hang, kept("no answer in time")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, api, pair := announced(t)
			api.get = c.get
			last := &cache.Result{Reason: string(reason.RequestDenied), Finished: plugintest.Noon.Add(-2 * time.Hour)}
			was := before
			was.Certificate = pair.Fingerprint()
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Last: last, Failures: 3, Refusals: 2, Announcement: &was})
			if err := a.Work(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := found(t, a)
			if got.Worker.PID == 0 || !strings.Contains(got.Problem, c.want.Problem) || (got.Problem == "") != (c.want.Problem == "") || plugintest.NotOneLine(got.Problem) != "" {
				t.Errorf("problem %q, worker %v", got.Problem, got.Worker)
			}
			c.want.Certificate, c.want.Worker, c.want.Problem = pair.Fingerprint(), got.Worker, got.Problem
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("found %+v, want %+v", got, c.want)
			}
			// The last worker's result stays, and so does what its failures come to.
			state, err := a.node.Dir().State()
			if err != nil || !reflect.DeepEqual(state.Last, last) || state.Failures != 3 || state.Refusals != 2 || !state.NextAttempt.IsZero() {
				t.Errorf("it counts as a worker: %+v, %v", state, err)
			}
			if len(api.Filed) > 0 || api.seen() != "GET" || !bytes.Equal(api.shown, pair.Leaf.Raw) {
				t.Errorf("%d requests were filed", len(api.Filed))
			}
			if a.node.Dir().Worker().PID != 0 || nodestate.LeftNoResult(got.Worker, state) {
				t.Error("it counts as a worker that died")
			}
		})
	}
}

// A renewal that is due is made by the same worker. It does not select the new certificate,
// although that begins before it was issued.
func TestAnnouncedRenewal(t *testing.T) {
	t.Parallel()
	a, api, old := announced(t)
	api.get = configMap(t, rotate(nil))
	if err := a.Work(t.Context()); err != nil {
		t.Fatal(err)
	}
	pair, err := a.node.Dir().Current()
	if err != nil || pair.Fingerprint() == old.Fingerprint() || len(api.Filed) != 1 || api.Filed[0] != "certificate" {
		t.Fatalf("it did not renew: %v, %v", api.Filed, err)
	}
	if !pair.Leaf.NotBefore.Before(plugintest.Noon) {
		t.Fatal("the new certificate is not backdated")
	}
	got := found(t, a)
	if got.Renewal != nil || len(got.Done) != 1 || got.Done[0].Name != "rotate" || got.Worker.PID != 0 {
		t.Errorf("found %+v", got)
	}
	if state, _ := a.node.Dir().State(); state.Last == nil || state.Last.Request == "" || nodestate.LeftNoResult(a.node.Dir().Worker(), state) {
		t.Errorf("state %+v", state)
	}
	api.seen()
	a.at(plugintest.Noon.Add(20 * time.Minute))
	if err := a.Work(t.Context()); err != nil || api.seen() != "GET" || len(api.Filed) != 1 {
		t.Errorf("it renewed again: %v, %v", api.Filed, err)
	}
	// A name can be used again.
	api.get = configMap(t, rotate(func(r *attestation.Renewal) { r.IssuedBefore = plugintest.Noon.Add(30 * time.Minute) }))
	a.at(plugintest.Noon.Add(35 * time.Minute))
	if err := a.Work(t.Context()); err != nil || len(api.Filed) != 2 {
		t.Errorf("another renewal of that name was not made: %v, %v", api.Filed, err)
	}
	// What is not announced any more is forgotten.
	api.get = configMap(t)
	a.at(plugintest.Noon.Add(50 * time.Minute))
	if err := a.Work(t.Context()); err != nil || len(found(t, a).Done) != 0 {
		t.Errorf("found %+v, %v", found(t, a), err)
	}
}

// A certificate that the API server refuses as revoked, or because no record names it, is replaced
// at the next check, though no announced renewal selects it.
func TestRefusedCertificateIsReplaced(t *testing.T) {
	t.Parallel()
	refused := plugintest.AnswerCode(403, `{"message":"leases is forbidden: `+attestation.MessageRevoked+`"}`)
	for name, c := range map[string]struct {
		write, get http.HandlerFunc
		last       time.Duration // ago
		renews     bool
	}{
		"refused":                   {refused, configMap(t), time.Hour, true},
		"refused by strict mode":    {plugintest.AnswerCode(403, `{"message":"nodes is forbidden: `+attestation.MessageUnrecorded+`"}`), configMap(t), time.Hour, true},
		"not refused":               {plugintest.AnswerCode(200, "{}"), configMap(t), time.Hour, false},
		"refused, just issued":      {refused, configMap(t), time.Minute - time.Second, false},
		"refused, no announcements": {refused, plugintest.AnswerCode(404, `{"kind":"Status"}`), time.Hour, false},
		"suspended":                 {plugintest.AnswerCode(403, `{"message":"`+attestation.MessageSuspended+`"}`), configMap(t), time.Hour, false},
		"refused, renewal later":    {refused, configMap(t, rotate(func(r *attestation.Renewal) { r.Start = plugintest.Noon.Add(time.Hour) })), time.Hour, true},
		"by another policy":         {plugintest.AnswerCode(403, `{"message":"not on Fridays"}`), configMap(t), time.Hour, false},
		"overloaded":                {plugintest.AnswerCode(429, `{"message":"`+attestation.MessageRevoked+`"}`), configMap(t), time.Hour, false},
		"no Node, and refused": {func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPatch {
				plugintest.AnswerCode(404, `{}`)(w, r)
				return
			}
			refused(w, r)
		}, configMap(t), time.Hour, true},
		"not found": {plugintest.AnswerCode(404, `{"message":"`+attestation.MessageRevoked+`"}`), configMap(t), time.Hour, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, api, old := announced(t)
			api.get, api.tryWrite = c.get, c.write
			plugintest.WriteState(t, a.node.Dir(), &cache.State{Last: &cache.Result{Request: "r", Finished: plugintest.Noon.Add(-c.last)}})
			if err := a.Work(t.Context()); err != nil {
				t.Fatal(err)
			}
			pair, err := a.node.Dir().Current()
			if err != nil || (pair.Fingerprint() != old.Fingerprint()) != c.renews || (len(api.Filed) > 0) != c.renews {
				t.Fatalf("filed %q, %v", api.Filed, err)
			}
			got := found(t, a)
			if got.Renewal != nil || got.Problem != "" {
				t.Errorf("found %+v", got)
			}
			// the name is not kept when the next announcement is read
			api.tryWrite = nil
			a.at(plugintest.Noon.Add(20 * time.Minute))
			if err := a.Work(t.Context()); err != nil || len(found(t, a).Done) > 0 {
				t.Errorf("found %+v, %v", found(t, a), err)
			}
		})
	}
}

// A renewal at an announced moment: client-go asks again by then, and the run then takes the
// certificate for due.
func TestAnnouncedMoment(t *testing.T) {
	a, _, pair := announced(t)
	due := plugintest.Noon.Add(5 * time.Minute)
	renewal := &cache.Renewal{Name: "rotate", IssuedBefore: plugintest.Noon, DueAt: due}
	stored := cache.Announcement{Checked: plugintest.Noon, Answered: plugintest.Noon, Exists: true, Certificate: pair.Fingerprint(), Renewal: renewal, Reported: pair.Fingerprint()}
	plugintest.WriteState(t, a.node.Dir(), &cache.State{Announcement: &stored})
	if in := expires(t, a); in != 5*time.Minute {
		t.Errorf("client-go asks again in %s", in)
	}
	o := a.Overview()
	if o.State != nodestatus.StateOK || !strings.Contains(o.Message, `due at 2026-11-20T12:05:00Z by the announced renewal "rotate"`) {
		t.Errorf("%s: %s", o.State, o.Message)
	}
	want := &nodestatus.AnnouncementOverview{Checked: plugintest.Noon, Answered: plugintest.Noon, NextCheck: o.Announcement.NextCheck, Exists: true, Renewal: "rotate", DueAt: due, Reported: true}
	if !reflect.DeepEqual(o.Announcement, want) || !o.Announcement.NextCheck.After(plugintest.Noon) {
		t.Errorf("%+v", o.Announcement)
	}
	a.at(due.Add(-time.Second))
	if status := a.node.Load(); status.Due != "" {
		t.Errorf("due too early: %s", status.Due)
	}
	a.at(due)
	started := false
	a.startWorker = func() (process.ID, error) { started = true; return process.ID{}, nil }
	if status := a.node.Load(); status.Due != "a renewal was announced" {
		t.Errorf("due: %q", status.Due)
	}
	answer, err := a.Run(t.Context())
	if err != nil || !started || printed(t, answer).ExpirationTimestamp.Sub(due) > 31*time.Second {
		t.Errorf("%v, %v, started: %v", answer, err, started)
	}
	if o := a.Overview(); o.State != nodestatus.StateDue || o.Certificate.Due != "a renewal was announced" {
		t.Errorf("%s: %s", o.State, o.Message)
	}
	a.at(due.Add(16 * time.Minute))
	if o := a.Overview(); o.State != nodestatus.StateFailing || !strings.Contains(o.Message, `"rotate" has been due since`) {
		t.Errorf("%s: %s", o.State, o.Message)
	}
	a.at(due)
	for name, change := range map[string]func(){
		"switched off": func() { a.node.CheckInterval = 0 },
		"another certificate": func() {
			a.node.CheckInterval = time.Hour
			plugintest.InstallPair(t, a.node.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotBefore = plugintest.Noon }))
		},
	} {
		if change(); a.node.Load().Due != "" {
			t.Errorf("%s: due", name)
		}
	}
}

// The certificate is reported once the run after the one that printed it shows that the kubelet has
// it, where renewals are announced.
func TestCertificateIsReported(t *testing.T) {
	t.Parallel()
	a, api, old := announced(t)
	a.startWorker = workerThat(t, func() {})
	report := func(name, want string) {
		t.Helper()
		if err := a.Work(t.Context()); err != nil || api.seen() != want {
			t.Errorf("%s: %v, not %s", name, err, want)
		}
	}
	report("not printed yet", "GET")
	a.node.Note.Write(nodestate.Note{Parent: plugintest.Asker, Certificate: old.Fingerprint(), Until: plugintest.Noon.Unix()})
	report("printed", "GET PATCH")
	want := `{"metadata":{"annotations":{"` + attestation.AnnotationCertificate + `":"` + old.Fingerprint() + `"}}}`
	if string(api.patched) != want || !bytes.Equal(api.shown, old.Leaf.Raw) {
		t.Errorf("the patch is %s, want %s", api.patched, want)
	}
	if got := found(t, a); got.Reported != old.Fingerprint() || got.NotReported != "" || got.ReportProblem != "" {
		t.Errorf("found %+v", got)
	}
	report("reported already", "")
	a.at(plugintest.Noon.Add(15 * time.Minute))
	report("reported already, at the next check", "GET")

	// The first run with another certificate has client-go ask again soon. The second has it
	// reported.
	next := plugintest.NewPair(t, func(c *x509.Certificate) { c.NotBefore = plugintest.Noon.Add(15 * time.Minute) })
	plugintest.InstallPair(t, a.node.Dir(), next)
	if in := expires(t, a); in > 31*time.Second {
		t.Errorf("client-go asks again in %s", in)
	}
	if status := a.node.Load(); !status.CheckDue() {
		t.Error("the second run has nothing reported")
	}
	if in := expires(t, a); in > 31*time.Second { // what the check finds besides is not missed
		t.Errorf("with the report client-go asks again in %s", in)
	}
	api.patch = plugintest.AnswerCode(403, `{"message":"nodes is forbidden"}`)
	report("refused", "GET PATCH")
	if got := found(t, a); got.Reported != old.Fingerprint() || got.NotReported != next.Fingerprint() || !strings.Contains(got.ReportProblem, "403: nodes is forbidden") {
		t.Errorf("found %+v", got)
	}
	if o := a.Overview(); o.Announcement.Reported || !strings.Contains(o.Announcement.ReportProblem, "403") {
		t.Errorf("%+v", o.Announcement)
	}
	report("not before the next check", "")
	if in := expires(t, a); in < 11*time.Minute {
		t.Errorf("after a refusal client-go asks again in %s", in)
	}
	a.at(plugintest.Noon.Add(30 * time.Minute))
	left := 2
	api.patch = func(w http.ResponseWriter, r *http.Request) {
		if left--; left >= 0 {
			plugintest.AnswerCode(403, `{"message":"`+attestation.MessageRevoked+`"}`)(w, r)
		}
	}
	report("the next check, before the policies know the certificate", "GET PATCH PATCH PATCH")

	api.get = plugintest.AnswerCode(404, `{}`)
	a.at(plugintest.Noon.Add(45 * time.Minute))
	plugintest.InstallPair(t, a.node.Dir(), old)
	a.node.Note.Write(nodestate.Note{Parent: plugintest.Asker, Certificate: old.Fingerprint(), Until: plugintest.Noon.Unix()})
	report("no announcements here", "GET")
}
