// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// newWorker returns a worker that holds the lock.
func newWorker(t testing.TB, a *Enroller) *worker {
	t.Helper()
	w := &worker{enroller: a, log: klog.Background()}
	if err := w.takeLock(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.lock.Unlock)
	return w
}

// newPending returns a request under way that is what o wants.
func newPending(t testing.TB, a *Enroller) *cache.Pending {
	t.Helper()
	pending, _, err := a.requestBuilder().first(t.Context(), "a", cache.Origin{Server: "https://x"}, "", "")
	if err != nil {
		t.Fatal(err)
	}
	return pending
}

func TestOnlyTheCertificateThatWasAskedForIsTaken(t *testing.T) {
	a := testEnroller(t)
	w := newWorker(t, a)
	pending := newPending(t, a)
	pkcs10 := plugintest.PKCS10Of(t, pending.Requests[0].Request)
	other := newPending(t, a)
	for name, c := range map[string]struct {
		certificate []byte
		want        reason.Reason // empty: taken
	}{
		"as asked":           {plugintest.Sign(t, pkcs10, nil), ""},
		"with its issuer":    {append(plugintest.Sign(t, pkcs10, nil), plugintest.NewCA(t)...), ""},
		"the issuer first":   {append(plugintest.NewCA(t), plugintest.Sign(t, pkcs10, nil)...), reason.CertificateUnusable},
		"for another key":    {plugintest.Sign(t, plugintest.PKCS10Of(t, other.Requests[0].Request), nil), reason.CertificateUnusable},
		"another node's":     {plugintest.Sign(t, pkcs10, plugintest.OfNode("b")), reason.CertificateUnusable},
		"an administrator's": {plugintest.Sign(t, pkcs10, func(c *x509.Certificate) { c.Subject.Organization = []string{"system:masters"} }), reason.CertificateUnusable},
		"a CA's":             {plugintest.Sign(t, pkcs10, func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }), reason.CertificateUnusable},
		"for servers":        {plugintest.Sign(t, pkcs10, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), reason.CertificateUnusable},
		"of yesterday":       {plugintest.Sign(t, pkcs10, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(-time.Second) }), reason.ClockWrong},
		"garbage":            {[]byte("hunter2"), reason.CertificateUnusable},
		"a key":              {pending.Key, reason.CertificateUnusable},
	} {
		t.Run(name, func(t *testing.T) {
			e := &enrolment{worker: w, pending: pending}
			pair, err := e.checkIssued(c.certificate)
			if c.want != "" {
				if failure := plugintest.WantFailure(t, err, c.want); pair != nil || strings.Contains(failure.Error(), "hunter2") || !strings.Contains(failure.Error(), pending.Last().Name) {
					t.Errorf("%v", failure)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(pair.Chain, c.certificate) || !bytes.Equal(pair.Key, pending.Key) || pair.Origin.Server != "https://x" {
				t.Errorf("another pair: %s of %+v", pair.Chain, pair.Origin)
			}
		})
	}
}

func TestPendingRequestIsTakenUpOnlyIfItIsStillWanted(t *testing.T) {
	t.Parallel()
	seconds := int32(3600)
	to := nodeaccess.Access{Cluster: cache.Origin{Server: "https://x"}}
	for name, c := range map[string]struct {
		change  func(t *testing.T, a *Enroller, s *nodestate.Status, to *nodeaccess.Access)
		takenUp bool
	}{
		"as it was":         {func(*testing.T, *Enroller, *nodestate.Status, *nodeaccess.Access) {}, true},
		"another node name": {func(_ *testing.T, _ *Enroller, s *nodestate.Status, _ *nodeaccess.Access) { s.NodeName = "b" }, false},
		"another signer": {func(_ *testing.T, a *Enroller, _ *nodestate.Status, _ *nodeaccess.Access) {
			a.SignerName = "example.com/other"
		}, false},
		"another lifetime": {func(_ *testing.T, a *Enroller, _ *nodestate.Status, _ *nodeaccess.Access) {
			a.ExpirationSeconds = &seconds
		}, false},
		"another provider ID": {func(_ *testing.T, a *Enroller, _ *nodestate.Status, _ *nodeaccess.Access) {
			a.ProviderID = "x://y"
		}, false},
		"another cluster": {func(_ *testing.T, _ *Enroller, _ *nodestate.Status, to *nodeaccess.Access) {
			to.Cluster.Server = "https://y"
		}, false},
		"its certificate is there": {func(t *testing.T, a *Enroller, s *nodestate.Status, _ *nodeaccess.Access) {
			pending, err := a.Node.Dir().Pending()
			if err != nil {
				t.Fatal(err)
			}
			certificate := plugintest.Sign(t, plugintest.PKCS10Of(t, pending.Requests[0].Request), nil)
			chain, leaf, err := csr.ParseCertificates(certificate)
			if err != nil {
				t.Fatal(err)
			}
			s.Pair = &cache.Pair{Chain: chain, Leaf: leaf, Key: pending.Key}
		}, false},
		"damaged": {func(t *testing.T, a *Enroller, _ *nodestate.Status, _ *nodeaccess.Access) {
			plugintest.Put(t, a.Node.Dir(), cache.PendingFile, []byte("{"), 0o600)
		}, false},
		"readable by others": {func(t *testing.T, a *Enroller, _ *nodestate.Status, _ *nodeaccess.Access) {
			if err := os.Chmod(a.Node.Dir().File(cache.PendingFile), 0o644); err != nil {
				t.Fatal(err)
			}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := testEnroller(t)
			w := newWorker(t, a)
			want := newPending(t, a)
			if err := w.lock.SetPending(want); err != nil {
				t.Fatal(err)
			}
			s, to := nodestate.Status{NodeName: "a"}, to
			c.change(t, w.enroller, &s, &to)
			e := &enrolment{worker: w, status: s, to: to}
			err := e.resume()
			got := e.pending
			if err != nil || (got != nil) != c.takenUp {
				t.Fatalf("taken up %v, %v", got != nil, err)
			}
			if got != nil && (got.Requests[0].Name != want.Requests[0].Name || !bytes.Equal(got.Key, want.Key)) {
				t.Error("another came back")
			}
			// Its key must not stay behind in a file that nobody will look at again.
			if _, err := os.Lstat(a.Node.Dir().File(cache.PendingFile)); c.takenUp != (err == nil) {
				t.Errorf("the file: %v", err)
			}
		})
	}
}

// enrolling returns an Authenticator that gets its certificate from that API server, with a token
// for the first one.
func enrolling(t *testing.T, api *plugintest.APIServer) *Enroller {
	t.Helper()
	api.T = t
	server, ca := plugintest.TLSServer(t, api, func(s *httptest.Server) {
		s.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12}
	})
	a := testEnroller(t)
	a.Node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(server.URL, ca), "token: abc"))
	a.Node.Access.Asked = &cache.Origin{Server: server.URL, CertificateAuthorityData: ca}
	return a
}

func TestWorkGetsACertificate(t *testing.T) {
	t.Parallel()
	issue := func(object *certificatesv1.CertificateSigningRequest) {
		object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
	}
	for name, c := range map[string]struct {
		old     func(*x509.Certificate) // nil: there is none
		prepare func(a *Enroller, old *cache.Pair)
		refuses []string
		filed   []string
		failure reason.Reason
	}{
		"the first": {nil, nil, nil, []string{"token"}, ""},
		"the next":  {plugintest.DueSoon, nil, nil, []string{"certificate"}, ""},
		"the next, which does not renew": {plugintest.DueSoon, func(a *Enroller, old *cache.Pair) {
			a.use(plugintest.Provider{})
			a.Node.Note = rejectedNote(a, old)
		}, nil, []string{"token"}, ""},
		"after one that ended":             {func(c *x509.Certificate) { c.NotAfter = plugintest.Noon }, nil, nil, []string{"token"}, ""},
		"after one known to be rejected":   {plugintest.DueSoon, func(a *Enroller, old *cache.Pair) { rejectedNote(a, old) }, nil, []string{"token"}, ""},
		"after one found to be rejected":   {plugintest.DueSoon, nil, []string{"certificate"}, []string{"certificate", "token"}, ""},
		"with no credential that is known": {plugintest.DueSoon, nil, []string{"certificate", "token"}, []string{"certificate", "token"}, reason.BootstrapRefused},
		"with a token that has run out":    {nil, nil, []string{"token"}, []string{"token"}, reason.BootstrapRefused},
	} {
		t.Run(name, func(t *testing.T) {
			api := &plugintest.APIServer{Decide: issue, Refuses: c.refuses}
			a := enrolling(t, api)
			var old *cache.Pair
			if c.old != nil {
				old = plugintest.NewPair(t, c.old)
				plugintest.InstallPair(t, a.Node.Dir(), old)
			}
			if c.prepare != nil {
				c.prepare(a, old)
			}
			err := a.Work(t.Context())
			if !slices.Equal(api.Filed, c.filed) {
				t.Errorf("filed with %q, want %q", api.Filed, c.filed)
			}
			state, stateErr := a.Node.Dir().State()
			if stateErr != nil || state.Last == nil || state.Last.Reason != string(c.failure) {
				t.Errorf("state %+v, %v", state, stateErr)
			}
			if c.failure != "" {
				plugintest.MustFail(t, err, c.failure)
				if state.Failures != 1 || !state.NextAttempt.After(plugintest.Noon) {
					t.Errorf("state %+v", state)
				}
				if n := a.Node.Note.Read(); old != nil && (!n.Rejected || n.Certificate != old.Fingerprint()) {
					t.Errorf("the next worker will show the rejected certificate again: %+v", n)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			s := a.Node.Load()
			if s.Pair == nil || s.Due != "" || s.Problem != nil || s.Pair.Origin == nil || s.Pair.Origin.Server != a.Node.Access.Asked.Server {
				t.Errorf("after it: due %q, lack %v", s.Due, s.Problem)
			}
			if _, err := os.Lstat(a.Node.Dir().File(cache.PendingFile)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a second copy of the key is left behind: %v", err)
			}
			if err := a.Work(t.Context()); err != nil || len(api.Filed) != len(c.filed) {
				t.Errorf("a worker too many asked again: %q, %v", api.Filed, err)
			}
		})
	}
}

// A cluster whose CA was replaced still knows its nodes: their certificates are kept, instead of
// all being asked for at once. One that does not know them gets neither the certificate as a
// credential nor as an excuse.
func TestCertificateOfAnotherCluster(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code   int
		answer string
		filed  []string
	}{
		"known":                     {201, plugintest.Someone, nil},
		"known as another":          {201, `{"status":{"userInfo":{"username":"system:node:b"}}}`, []string{"token"}},
		"known as nobody":           {201, `{}`, []string{"token"}},
		"rejected":                  {401, plugintest.Someone, []string{"token"}},
		"refused":                   {403, plugintest.Someone, []string{"token"}},
		"known, but not in so many": {200, plugintest.Someone, []string{"token"}},
	} {
		t.Run(name, func(t *testing.T) {
			api := &plugintest.APIServer{Decide: func(object *certificatesv1.CertificateSigningRequest) {
				object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
			}}
			api.Review = plugintest.AnswerCode(c.code, c.answer)
			a := enrolling(t, api)
			old := plugintest.NewPair(t, nil)
			old.Origin = &cache.Origin{Server: a.Node.Access.Asked.Server, CertificateAuthorityData: plugintest.NewCA(t)}
			plugintest.InstallPair(t, a.Node.Dir(), old)
			if s := a.Node.Load(); !s.Foreign || s.Due == "" {
				t.Fatalf("foreign %v, due %q", s.Foreign, s.Due)
			}
			if err := a.Work(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(api.Filed, c.filed) {
				t.Errorf("filed with %q, want %q", api.Filed, c.filed)
			}
			s := a.Node.Load()
			if s.Pair == nil || s.Foreign || s.Due != "" || (s.Pair.Fingerprint() == old.Fingerprint()) != (c.filed == nil) {
				t.Errorf("after it: foreign %v, due %q, lack %v", s.Foreign, s.Due, s.Problem)
			}
		})
	}
}

// A denial that speaks against the node's own certificate does not take the node down while a
// bootstrap credential is at hand.
func TestWorkAfterTheOwnCertificateIsDenied(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason, bootstrap string // the reason of the denials of either credential
		refuses           []string
		without           bool // there is no bootstrap credential
		filed             []string
		failure           reason.Reason
		says              []string
	}{
		"as unknown":              {reason: attestation.ReasonUnknownCredential, filed: []string{"certificate", "token"}},
		"as one that may not":     {reason: attestation.ReasonRequesterNotAllowed, filed: []string{"certificate", "token"}},
		"for what the machine is": {reason: "EKReplaced", filed: []string{"certificate"}, failure: reason.RequestDenied, says: []string{"EKReplaced"}},
		"and there is no other credential": {reason: attestation.ReasonUnknownCredential, without: true, filed: []string{"certificate"}, failure: reason.RequestDenied,
			says: []string{"UnknownCredential", "no such file", "becomes NotReady at 2026-11-20T12:05:00Z"}},
		"and so is the bootstrap credential": {reason: attestation.ReasonUnknownCredential, bootstrap: "NodeAlreadyRegistered", filed: []string{"certificate", "token"}, failure: reason.RequestDenied,
			says: []string{"NodeAlreadyRegistered", "UnknownCredential"}},
		"and the token has run out": {reason: attestation.ReasonUnknownCredential, refuses: []string{"token"}, filed: []string{"certificate", "token"}, failure: reason.BootstrapRefused,
			says: []string{"UnknownCredential", "b.conf"}},
	} {
		t.Run(name, func(t *testing.T) {
			api := &plugintest.APIServer{Refuses: c.refuses, Denies: map[string]string{"certificate": c.reason, "token": c.bootstrap}, Decide: func(object *certificatesv1.CertificateSigningRequest) {
				object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
			}}
			a := enrolling(t, api)
			old := plugintest.NewPair(t, plugintest.DueSoon)
			plugintest.InstallPair(t, a.Node.Dir(), old)
			if c.without {
				a.Node.Access.Bootstrap += ".none"
			}
			err := a.Work(t.Context())
			if !slices.Equal(api.Filed, c.filed) {
				t.Errorf("filed with %q, want %q", api.Filed, c.filed)
			}
			if pending, err := a.Node.Dir().Pending(); pending != nil || err != nil {
				t.Errorf("the next worker goes on with what was denied: %v", err)
			}
			s := a.Node.Load()
			if c.failure == "" {
				if err != nil || s.Pair == nil || s.Pair.Fingerprint() == old.Fingerprint() {
					t.Errorf("no new certificate: %v", err)
				}
				return
			}
			failure := plugintest.WantFailure(t, err, c.failure)
			for _, says := range c.says {
				if !strings.Contains(failure.Error(), says) {
					t.Errorf("it does not say %q: %v", says, failure)
				}
			}
			if c.without && !strings.Contains(failure.Hint, "bootstrap kubeconfig") {
				t.Errorf("hint %q", failure.Hint)
			}
			if s.Pair == nil || s.Rejected || s.Pair.Fingerprint() != old.Fingerprint() {
				t.Error("the old certificate is not served any more")
			}
			state, err := a.Node.Dir().State()
			if err != nil || state.NextAttempt.Sub(plugintest.Noon) < reason.BackOffLater.Delay(1, 0, 0) {
				t.Errorf("requests were denied, and the next worker starts soon: %+v, %v", state, err)
			}
		})
	}
}

func TestWorkBacksOffAfterARefusal(t *testing.T) {
	t.Parallel()
	set := func(kind certificatesv1.RequestConditionType) func(*certificatesv1.CertificateSigningRequest) {
		return func(object *certificatesv1.CertificateSigningRequest) {
			object.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: kind, Status: corev1.ConditionTrue, Reason: "Policy", Message: "no\n\x1b[2Jway"}}
		}
	}
	for name, c := range map[string]struct {
		decide func(*certificatesv1.CertificateSigningRequest)
		want   reason.Reason
	}{
		"denied": {set(certificatesv1.CertificateDenied), reason.RequestDenied},
		"failed": {set(certificatesv1.CertificateFailed), reason.RequestFailed},
		"unusable": {func(object *certificatesv1.CertificateSigningRequest) {
			object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), plugintest.OfNode("b"))
		}, reason.CertificateUnusable},
	} {
		t.Run(name, func(t *testing.T) {
			api := &plugintest.APIServer{Decide: c.decide}
			a := enrolling(t, api)
			now := plugintest.Noon
			a.Node.Now = func() time.Time { return now }
			var pauses []time.Duration
			for range 7 {
				plugintest.MustFail(t, a.Work(t.Context()), c.want)
				state, err := a.Node.Dir().State()
				if err != nil {
					t.Fatal(err)
				}
				pauses = append(pauses, state.NextAttempt.Sub(now))
				// a worker is a process that has ended by now
				plugintest.Put(t, a.Node.Dir(), cache.LockFile, nil, 0o600)
				plugintest.MustFail(t, a.Work(t.Context()), c.want)
				if pending, err := a.Node.Dir().Pending(); pending != nil || err != nil {
					t.Errorf("a request that is settled is still pending: %v", err)
				}
				now = state.NextAttempt
			}
			if len(api.Filed) != 7 {
				t.Errorf("%d requests were filed by seven workers", len(api.Filed))
			}
			for i, first := 0, 30*time.Second; i < len(pauses); i, first = i+1, min(2*first, 10*time.Minute) {
				if pauses[i] < first || pauses[i] > first*3/2 {
					t.Errorf("pause %d is %v, want %v to %v", i, pauses[i], first, first*3/2)
				}
			}
		})
	}
}

func TestThereIsOneWorker(t *testing.T) {
	t.Parallel()
	a := testEnroller(t)
	lock, err := a.Node.Dir().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	// would panic if it came to anything
	a.Provider = nil
	// it would wait for LockWait
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	plugintest.MustFail(t, a.Work(ctx), reason.WorkerUnavailable)
	if left, err := filepath.Glob(a.Node.Dir().File("*")); err != nil || len(left) != 1 {
		t.Errorf("it wrote: %q, %v", left, err)
	}
}

// registry is an API server that keeps what is filed.
type registry struct {
	t *testing.T
	// refusePost and refuseGet are HTTP codes to refuse with, 0 to refuse nothing; slow leaves
	// pending what is filed.
	refusePost, refuseGet int
	slow                  bool

	mu      sync.Mutex
	objects map[string]*certificatesv1.CertificateSigningRequest
	posts   []string
}

// add keeps an object, and issues its certificate if it is to be.
func (r *registry) add(object *certificatesv1.CertificateSigningRequest, uid types.UID, issues bool) {
	object.UID = uid
	if issues {
		object.Status.Certificate = plugintest.Sign(r.t, plugintest.PKCS10Of(r.t, object.Spec.Request), nil)
	}
	if r.objects == nil {
		r.objects = map[string]*certificatesv1.CertificateSigningRequest{}
	}
	r.objects[object.Name] = object
}

func (r *registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, _ := io.ReadAll(request.Body)
	if request.URL.Query().Get("watch") != "" {
		<-request.Context().Done()
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	refuse := func(code int) {
		reason := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 409: metav1.StatusReasonAlreadyExists, 422: metav1.StatusReasonInvalid, 500: metav1.StatusReasonInternalError}[code]
		plugintest.AnswerStatus(code, reason, "refused")(w, request)
	}
	name := path.Base(request.URL.Path)
	switch {
	case request.Method == http.MethodPost:
		var object certificatesv1.CertificateSigningRequest
		if err := json.Unmarshal(body, &object); err != nil {
			r.t.Error(err)
		}
		r.posts = append(r.posts, object.Name)
		switch {
		case r.refusePost != 0:
			refuse(r.refusePost)
			return
		case r.objects[object.Name] != nil:
			refuse(409)
			return
		}
		uid := "uid"
		if n := len(r.posts); n > 1 {
			uid = fmt.Sprintf("uid-%d", n)
		}
		r.add(&object, types.UID(uid), !r.slow)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(object)
	case r.refuseGet != 0:
		refuse(r.refuseGet)
	case r.objects[name] == nil:
		refuse(404)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(r.objects[name])
	}
}

// A worker may be killed, and the network may fail, at any point. The next worker must neither file
// a request twice nor wait for one that does not exist.
func TestWorkCarriesOnWithAPendingRequest(t *testing.T) {
	filed := func(r *registry, p *cache.Pending, change func(*certificatesv1.CertificateSigningRequest), issues bool) {
		object := csr.Object(p.Last().Name, p.SignerName, p.Last().Request, nil, nil)
		if change != nil {
			change(object)
		}
		r.add(object, "uid", issues)
	}
	const none, own, another = "no file", "the same request", "another request"
	for name, c := range map[string]struct {
		prepare func(r *registry, p *cache.Pending)
		posts   []string // own or another
		failure reason.Reason
		pending string
	}{
		"never filed": {
			func(*registry, *cache.Pending) {},
			[]string{own}, "", none,
		},
		"filed, the answer was lost": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, true) },
			[]string{own}, "", none,
		},
		"filed, issued meanwhile": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, true); p.Last().UID = "uid" },
			nil, "", none,
		},
		"filed, deleted meanwhile": {
			func(_ *registry, p *cache.Pending) { p.Last().UID = "uid" },
			[]string{another}, "", none,
		},
		"filed, and pending": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, false); p.Last().UID = "uid" },
			nil, reason.WaitingForSigner, own,
		},
		// its UID is noted: should it be deleted, nobody posts the same again
		"never filed, and then pending": {
			func(r *registry, _ *cache.Pending) { r.slow = true },
			[]string{own}, reason.WaitingForSigner, own,
		},
		"filed, the answer was lost, and pending": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, false) },
			[]string{own}, reason.WaitingForSigner, own,
		},
		"its name was taken": {
			func(r *registry, p *cache.Pending) {
				filed(r, p, func(o *certificatesv1.CertificateSigningRequest) {
					o.Spec.Request = append([]byte{'\n'}, o.Spec.Request...)
				}, false)
			},
			[]string{own, another}, "", none,
		},
		"its name was taken later": {
			func(r *registry, p *cache.Pending) {
				filed(r, p, func(o *certificatesv1.CertificateSigningRequest) { o.Spec.Request = []byte("x") }, false)
				p.Last().UID = "uid"
			},
			[]string{another}, "", none,
		},
		"may not file": { // and would not the next time: a request that was never there is not kept
			func(r *registry, _ *cache.Pending) { r.refusePost = 403 },
			[]string{own}, reason.APIRefused, none,
		},
		"is refused as invalid": {
			func(r *registry, _ *cache.Pending) { r.refusePost = 422 },
			[]string{own}, reason.APIRefused, none,
		},
		"the API server is broken": {
			func(r *registry, _ *cache.Pending) { r.refusePost = 500 },
			[]string{own}, reason.APIUnreachable, own,
		},
		"filed, may not get": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, true); p.Last().UID, r.refuseGet = "uid", 403 },
			nil, reason.APIRefused, own,
		},
		"filed, the answer was lost, may not get": {
			func(r *registry, p *cache.Pending) { filed(r, p, nil, true); r.refuseGet = 403 },
			[]string{own}, reason.APIRefused, own,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := &registry{t: t}
			server, ca := plugintest.TLSServer(t, api, nil)
			a := testEnroller(t)
			a.Node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(server.URL, ca), "token: abc"))
			pending, _, err := a.requestBuilder().first(t.Context(), "a", cache.Origin{Server: server.URL, CertificateAuthorityData: ca}, "", "")
			if err != nil {
				t.Fatal(err)
			}
			c.prepare(api, pending)
			lock, err := a.Node.Dir().TryLock()
			if err != nil {
				t.Fatal(err)
			}
			err = lock.SetPending(pending)
			lock.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			plugintest.Put(t, a.Node.Dir(), "."+cache.CurrentFile+".tmp-1", []byte("left by a crash"), 0o600)
			enough := 10 * time.Second
			if c.failure == reason.WaitingForSigner { // nothing answers
				enough = 3 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), enough)
			defer cancel()
			err = a.Work(ctx)
			if c.failure != "" {
				plugintest.MustFail(t, err, c.failure)
			} else if s := a.Node.Load(); err != nil || s.Pair == nil {
				t.Errorf("%v, lack %v", err, s.Problem)
			}
			which := func(name string) string {
				if name == pending.Last().Name {
					return own
				}
				return another
			}
			var posts []string
			for _, name := range api.posts {
				posts = append(posts, which(name))
			}
			if !slices.Equal(posts, c.posts) {
				t.Errorf("posted %q, want %q", posts, c.posts)
			}
			left := none
			if p, err := a.Node.Dir().Pending(); err != nil {
				t.Error(err)
			} else if p != nil {
				left = which(p.Last().Name)
				wantUID := pending.Last().UID
				if c.failure == reason.WaitingForSigner {
					wantUID = "uid"
				}
				if p.Last().UID != wantUID || !bytes.Equal(p.Key, pending.Key) || !bytes.Equal(p.Last().Request, pending.Last().Request) {
					t.Errorf("UID %q, want %q, or another key or request", p.Last().UID, wantUID)
				}
			}
			if left != c.pending {
				t.Errorf("pending is %s, want %s", left, c.pending)
			}
			state, err := a.Node.Dir().State()
			if err != nil || state.Last == nil || state.Last.Reason != string(c.failure) || state.NextAttempt.IsZero() != (c.failure == "" || c.failure == reason.WaitingForSigner) {
				t.Errorf("state %+v, %v", state, err)
			}
			if rest, err := filepath.Glob(a.Node.Dir().File(".*")); err != nil || len(rest) > 0 {
				t.Errorf("left behind: %q, %v", rest, err)
			}
		})
	}
}

// What a worker asks for is what the operator set.
func TestRequestIsWhatTheOperatorSet(t *testing.T) {
	a := testEnroller(t)
	seconds := int32(7200)
	a.ExpirationSeconds, a.ProviderID, a.SignerName = &seconds, "x://y", "example.com/other"
	var seen certificatesv1.CertificateSigningRequestSpec
	api := &plugintest.APIServer{Decide: func(object *certificatesv1.CertificateSigningRequest) {
		seen = object.Spec
		object.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, object.Spec.Request), nil)
	}}
	there := enrolling(t, api)
	a.Node.Access.Bootstrap = there.Node.Access.Bootstrap
	a.Node.Access.Asked = there.Node.Access.Asked
	asked := &askedProvider{Provider: plugintest.Provider{CanRenew: true}}
	a.use(asked)
	if err := a.Work(t.Context()); err != nil {
		t.Fatal(err)
	}
	if seen.SignerName != "example.com/other" || seen.ExpirationSeconds == nil || *seen.ExpirationSeconds != 7200 {
		t.Errorf("filed %+v", seen)
	}
	content, err := attestation.Parse(seen.Request)
	if err != nil || content.Provider != "fake" || string(content.Data) != `{"version":"fake/v1"}` {
		t.Errorf("evidence %+v, %v", content, err)
	}
	parsed, err := x509.ParseCertificateRequest(content.PKCS10)
	if err != nil || parsed.Subject.CommonName != "system:node:a" || len(parsed.Extensions) != 1 || !bytes.Contains(parsed.Extensions[0].Value, []byte("x://y")) {
		t.Errorf("request %+v, %v", parsed, err)
	}
	// Evidence is bound to the request: the provider has to be told of all of it.
	if got := asked.request; !bytes.Equal(got.PKCS10, content.PKCS10) || got.NodeName != "a" || got.ProviderID != "x://y" || got.SignerName != "example.com/other" ||
		got.ExpirationSeconds == nil || *got.ExpirationSeconds != 7200 || got.Name == "" {
		t.Errorf("the provider was asked for %+v", got)
	}
}

// askedProvider remembers what it was asked for.
type askedProvider struct {
	plugintest.Provider
	request provider.Request
}

func (p *askedProvider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	p.request = request
	return p.Provider.Evidence(ctx, request)
}

// The run that started it, and the back-off of the worker before it, may be long past when a worker
// gets the lock.
func TestWorkerThatQueuedWaitsLikeTheOthers(t *testing.T) {
	api := &plugintest.APIServer{Decide: func(*certificatesv1.CertificateSigningRequest) { t.Error("it filed a request") }}
	a := enrolling(t, api)
	plugintest.WriteState(t, a.Node.Dir(), &cache.State{Failures: 1, Last: &cache.Result{Reason: string(reason.RequestDenied), Message: "denied", Hint: "ask"}, NextAttempt: plugintest.Noon.Add(time.Minute)})
	plugintest.MustFail(t, a.Work(t.Context()), reason.RequestDenied)
	if state, err := a.Node.Dir().State(); err != nil || state.Failures != 1 {
		t.Errorf("it counts as a failure: %+v, %v", state, err)
	}
}

// During an outage of the API server, a renewal is delayed only if the certificate is due for its
// age alone.
func TestOnlyARenewalForAgeWaits(t *testing.T) {
	t.Parallel()
	const left = 130 * time.Minute
	for name, c := range map[string]struct {
		change func(a *Enroller, pair *cache.Pair)
		waits  bool
	}{
		"its age": {func(*Enroller, *cache.Pair) {}, true},
		"was read": {func(a *Enroller, _ *cache.Pair) {
			if err := os.Chmod(a.Node.Dir().File(cache.CurrentFile), 0o644); err != nil {
				t.Fatal(err)
			}
		}, false},
		"rejected":   {func(a *Enroller, pair *cache.Pair) { a.Node.Note = rejectedNote(a, pair) }, false},
		"no renewal": {func(a *Enroller, pair *cache.Pair) { announce(t, a, pair, plugintest.Noon.Add(time.Hour)) }, true},
		"a renewal":  {func(a *Enroller, pair *cache.Pair) { announce(t, a, pair, plugintest.Noon.Add(-time.Hour)) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			server, ca := plugintest.TLSServer(t, &registry{t: t, refusePost: 500}, nil)
			a := testEnroller(t)
			a.Node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(server.URL, ca), "token: abc"))
			a.Node.Access.Asked = &cache.Origin{Server: server.URL, CertificateAuthorityData: ca}
			pair := plugintest.NewPair(t, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = plugintest.Noon.Add(left-24*time.Hour), plugintest.Noon.Add(left)
			})
			plugintest.InstallPair(t, a.Node.Dir(), pair)
			c.change(a, pair)
			for range spreadFrom {
				plugintest.MustFail(t, a.Work(t.Context()), reason.APIUnreachable)
				plugintest.Put(t, a.Node.Dir(), cache.LockFile, nil, 0o600) // a worker is a process that has ended by now
				state, err := a.Node.Dir().State()
				if err != nil {
					t.Fatal(err)
				}
				if waits := state.NextAttempt.Sub(plugintest.Noon) >= left/spreadPart; waits != (c.waits && state.Failures == spreadFrom) {
					t.Errorf("after %d failures, the next attempt is after %s", state.Failures, state.NextAttempt.Sub(plugintest.Noon))
				}
				a.Node.Now = func() time.Time { return plugintest.Noon.Add(time.Minute) }
			}
		})
	}
}

// announce has the last check have found a renewal.
func announce(t *testing.T, a *Enroller, pair *cache.Pair, dueAt time.Time) {
	t.Helper()
	a.Node.CheckInterval = 15 * time.Minute
	plugintest.WriteState(t, a.Node.Dir(), &cache.State{Announcement: &cache.Announcement{
		Checked: plugintest.Noon, Answered: plugintest.Noon, Exists: true, Certificate: pair.Fingerprint(), Reported: pair.Fingerprint(),
		Renewal: &cache.Renewal{Name: "r", IssuedBefore: plugintest.Noon, DueAt: dueAt},
	}})
}

// rejectedNote says that the API server rejects the pair.
func rejectedNote(a *Enroller, pair *cache.Pair) nodestate.NoteFile {
	a.Node.Note.Write(nodestate.Note{Certificate: pair.Fingerprint(), Rejected: true})
	return a.Node.Note
}
