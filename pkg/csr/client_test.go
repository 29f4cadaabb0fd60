// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

func TestMain(m *testing.M) { unittest.Main(m) }

const (
	objectName = "node-csr-abcdefghijklmnopqrstuvwxyz"
	resource   = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
)

// object is a CertificateSigningRequest of our name.
func object(uid types.UID, version string, change func(*certificatesv1.CertificateSigningRequest)) *certificatesv1.CertificateSigningRequest {
	o := Object(objectName, "example.com/signer", []byte("our request"), nil, nil)
	o.UID, o.ResourceVersion = uid, version
	if change != nil {
		change(o)
	}
	return o
}

func issued(o *certificatesv1.CertificateSigningRequest) {
	o.Status.Certificate = []byte("certificate")
}

func denied(o *certificatesv1.CertificateSigningRequest) {
	o.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{condition(certificatesv1.CertificateDenied, corev1.ConditionTrue, "No", "no")}
}

// api is a fake API server. A call that has no answer, or another path or selector than it should,
// is an error of the test.
type api struct {
	create, get answers
	list, watch answers

	mu      sync.Mutex
	calls   []string // "create", "get", "list", "watch <resource version>"
	bodies  [][]byte
	queries []string
	wrong   []string
}

// answers are given in order. The last one is repeated.
type answers []func(w http.ResponseWriter, r *http.Request)

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	selected := query.Get("fieldSelector") == "metadata.name="+objectName
	var call, shown string
	var answer answers
	ok := r.URL.Path == resource
	switch {
	case r.Method == http.MethodPost:
		call, answer = "create", a.create
	case r.URL.Path == resource+"/"+objectName:
		call, answer, ok = "get", a.get, true
	case query.Get("watch") != "":
		call, answer, shown, ok = "watch", a.watch, " "+query.Get("resourceVersion"), ok && selected && query.Get("timeoutSeconds") != ""
	default:
		call, answer, ok = "list", a.list, ok && selected
	}
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	n := 0
	for _, earlier := range a.calls {
		if strings.HasPrefix(earlier, call) {
			n++
		}
	}
	a.calls = append(a.calls, call+shown)
	a.bodies = append(a.bodies, body)
	a.queries = append(a.queries, r.URL.RawQuery)
	if !ok || len(answer) == 0 {
		a.wrong = append(a.wrong, r.Method+" "+r.URL.String())
	}
	a.mu.Unlock()
	if len(answer) == 0 {
		http.Error(w, "not expected", http.StatusNotImplemented)
		return
	}
	answer[min(n, len(answer)-1)](w, r)
}

// made returns the calls so far, and fails the test for unexpected ones.
func (a *api) made(t *testing.T) []string {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, call := range a.wrong {
		t.Errorf("unexpected call: %s", call)
	}
	return slices.Clone(a.calls)
}

// start returns a client of the API server over TLS.
func (a *api) start(t *testing.T) *Client {
	t.Helper()
	server := httptest.NewUnstartedServer(a)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	config := &rest.Config{Host: server.URL, BearerToken: "abc", TLSClientConfig: rest.TLSClientConfig{
		CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	}}
	client, err := NewClient(config)
	if err != nil {
		t.Fatal(err)
	}
	if config.APIPath != "" || config.GroupVersion != nil || config.NegotiatedSerializer != nil {
		t.Error("the caller's config was changed")
	}
	return client
}

func write(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body)
}

func show(o *certificatesv1.CertificateSigningRequest) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { write(w, http.StatusOK, o) }
}

// status is the Status object that goes with an HTTP error.
func status(code int32, reason metav1.StatusReason) metav1.Status {
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: code, Reason: reason, Message: string(reason),
	}
}

func refuse(code int32, reason metav1.StatusReason) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) { write(w, int(code), status(code, reason)) }
}

var (
	unauthorized = refuse(http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
	forbidden    = refuse(http.StatusForbidden, metav1.StatusReasonForbidden)
	broken       = refuse(http.StatusInternalServerError, metav1.StatusReasonInternalError)
	expired      = refuse(http.StatusGone, metav1.StatusReasonExpired)
	exists       = refuse(http.StatusConflict, metav1.StatusReasonAlreadyExists)
	notFound     = refuse(http.StatusNotFound, metav1.StatusReasonNotFound)
)

func lists(items ...*certificatesv1.CertificateSigningRequest) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		list := certificatesv1.CertificateSigningRequestList{
			TypeMeta: metav1.TypeMeta{APIVersion: "certificates.k8s.io/v1", Kind: "CertificateSigningRequestList"},
			ListMeta: metav1.ListMeta{ResourceVersion: "99"},
			Items:    []certificatesv1.CertificateSigningRequest{},
		}
		for _, item := range items {
			list.Items = append(list.Items, *item)
		}
		write(w, http.StatusOK, list)
	}
}

// watchEvent is one line of a watch. A nil object stands for a watch that stays open from here on.
type watchEvent struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
}

var staysOpen = watchEvent{}

// watched sends events and then closes.
func watched(events ...watchEvent) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		for _, e := range events {
			if e.Object == nil {
				<-r.Context().Done()
				return
			}
			_ = json.NewEncoder(w).Encode(e)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// cutShort breaks the connection in the middle of an event.
func cutShort(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusOK)
	_, _ = io.WriteString(w, `{"type":"MODIFIED","object":{"kind":"Cert`)
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

func TestWaitSeesWhatBecomesOfTheRequest(t *testing.T) {
	t.Parallel()
	ours := func(version string, change func(*certificatesv1.CertificateSigningRequest)) *certificatesv1.CertificateSigningRequest {
		return object("ours", version, change)
	}
	another := func(change func(*certificatesv1.CertificateSigningRequest)) *certificatesv1.CertificateSigningRequest {
		return object("another", "50", change)
	}
	for name, c := range map[string]struct {
		list, watch answers
		want        Outcome
		calls       []string
		atLeast     time.Duration // a server in trouble is not asked more often than this
	}{
		"issued": {
			watch: answers{watched(watchEvent{"ADDED", ours("10", nil)}, watchEvent{"MODIFIED", ours("11", nil)}, watchEvent{"MODIFIED", ours("12", issued)}, staysOpen)},
			want:  Issued, calls: []string{"watch 10"},
		},
		"denied": {
			watch: answers{watched(watchEvent{"MODIFIED", ours("11", denied)}, staysOpen)},
			want:  Denied, calls: []string{"watch 10"},
		},
		"deleted": {
			watch: answers{watched(watchEvent{"DELETED", ours("11", nil)}, staysOpen)},
			want:  Deleted, calls: []string{"watch 10"},
		},
		"issued, and deleted before it was seen": {
			watch: answers{watched(watchEvent{"DELETED", ours("11", issued)}, staysOpen)},
			want:  Issued, calls: []string{"watch 10"},
		},
		"a bookmark before": {
			watch: answers{watched(watchEvent{"BOOKMARK", &certificatesv1.CertificateSigningRequest{TypeMeta: ours("", nil).TypeMeta, ObjectMeta: metav1.ObjectMeta{ResourceVersion: "20"}}}, watchEvent{"MODIFIED", ours("21", issued)}, staysOpen)},
			want:  Issued, calls: []string{"watch 10"},
		},
		"watching is refused": {
			watch: answers{forbidden}, list: answers{lists(ours("11", issued))},
			want: Issued, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"the version is too old, as an event": {
			watch: answers{watched(watchEvent{"ERROR", status(http.StatusGone, metav1.StatusReasonExpired)}), watched(watchEvent{"MODIFIED", ours("31", issued)}, staysOpen)},
			list:  answers{lists(ours("30", nil))},
			want:  Issued, calls: []string{"watch 10", "list", "watch 30"}, atLeast: firstPause,
		},
		"the version is too old, as an answer": {
			watch: answers{expired}, list: answers{lists(ours("30", denied))},
			want: Denied, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"the watch is closed": {
			watch: answers{watched()}, list: answers{lists(ours("11", issued))},
			want: Issued, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"the watch breaks in the middle": {
			watch: answers{cutShort}, list: answers{lists(ours("11", issued))},
			want: Issued, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"deleted while nobody watched": {
			watch: answers{watched()}, list: answers{lists()},
			want: Deleted, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"another took its name": {
			watch: answers{watched(watchEvent{"ADDED", another(issued)}, watchEvent{"DELETED", another(issued)})}, list: answers{lists(another(issued))},
			want: Deleted, calls: []string{"watch 10", "list"}, atLeast: firstPause,
		},
		"the list fails once": {
			watch: answers{watched()}, list: answers{broken, lists(ours("11", issued))},
			want: Issued, calls: []string{"watch 10", "list", "watch 10", "list"}, atLeast: 3 * firstPause,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := &api{list: c.list, watch: c.watch}
			client := server.start(t)
			ctx, cancel := context.WithTimeout(t.Context(), 8*firstPause)
			defer cancel()
			began := time.Now()
			got, err := client.Wait(ctx, ours("10", nil), Classify)
			if err != nil {
				t.Fatalf("after %v: %v", server.made(t), err)
			}
			if got.Outcome != c.want || c.want == Issued && string(got.Certificate) != "certificate" {
				t.Errorf("got %+v, want outcome %d", got, c.want)
			}
			if calls := server.made(t); !slices.Equal(calls, c.calls) {
				t.Errorf("calls %q, want %q", calls, c.calls)
			}
			if took := time.Since(began); took < c.atLeast-10*time.Millisecond {
				t.Errorf("took %v, want at least %v", took, c.atLeast)
			}
		})
	}
}

// Waiting for a hello ends with its challenge or a refusal. A certificate does not end it, nor does
// another object of its name.
func TestWaitForTheAnswerToAHello(t *testing.T) {
	t.Parallel()
	hello := func(uid types.UID, version string, changes ...func(*certificatesv1.CertificateSigningRequest)) *certificatesv1.CertificateSigningRequest {
		return object(uid, version, func(o *certificatesv1.CertificateSigningRequest) {
			o.Spec.SignerName = attestation.HelloSignerName
			for _, change := range changes {
				change(o)
			}
		})
	}
	answered := func(o *certificatesv1.CertificateSigningRequest) {
		o.Annotations = map[string]string{attestation.AnnotationChallenge: "challenge"}
	}
	others := func(o *certificatesv1.CertificateSigningRequest) {
		o.Annotations = map[string]string{"example.com/challenge": "x", attestation.AnnotationChallenge: ""}
	}
	unsupported := func(o *certificatesv1.CertificateSigningRequest) {
		denied(o)
		o.Annotations = map[string]string{attestation.AnnotationVersions: "x/v1"}
	}
	found := hello("ours", "10")
	for name, c := range map[string]struct {
		found       *certificatesv1.CertificateSigningRequest // as it is posted or found
		list, watch answers
		want        Decision
		calls       []string
	}{
		"answered before": {found: hello("ours", "10", answered), want: Decision{Outcome: Answered, Challenge: "challenge"}},
		"answered": {
			watch: answers{watched(watchEvent{"MODIFIED", hello("ours", "11", answered)}, staysOpen)},
			want:  Decision{Outcome: Answered, Challenge: "challenge"}, calls: []string{"watch 10"},
		},
		"issued before, then answered": {
			found: hello("ours", "10", issued),
			watch: answers{watched(watchEvent{"MODIFIED", hello("ours", "11", issued, answered)}, staysOpen)},
			want:  Decision{Outcome: Answered, Challenge: "challenge"}, calls: []string{"watch 10"},
		},
		"issued, annotated by others, then answered": {
			watch: answers{watched(watchEvent{"MODIFIED", hello("ours", "11", issued)}, watchEvent{"MODIFIED", hello("ours", "12", issued, others)}, watchEvent{"MODIFIED", hello("ours", "13", answered)}, staysOpen)},
			want:  Decision{Outcome: Answered, Challenge: "challenge"}, calls: []string{"watch 10"},
		},
		"another is answered, then it is": {
			watch: answers{watched(watchEvent{"MODIFIED", hello("another", "11", answered)}, watchEvent{"DELETED", hello("another", "12", answered)}, watchEvent{"MODIFIED", hello("ours", "13", denied)}, staysOpen)},
			want:  Decision{Outcome: Denied, Reason: "No", Message: "no"}, calls: []string{"watch 10"},
		},
		"denied for its version": {
			watch: answers{watched(watchEvent{"MODIFIED", hello("ours", "11", unsupported)}, staysOpen)},
			want:  Decision{Outcome: Denied, Reason: "No", Message: "no", Versions: "x/v1"}, calls: []string{"watch 10"},
		},
		"issued, and deleted": {
			watch: answers{watched(watchEvent{"DELETED", hello("ours", "11", issued)}, staysOpen)},
			want:  Decision{Outcome: Deleted}, calls: []string{"watch 10"},
		},
		"answered while nobody watched": {
			watch: answers{watched()}, list: answers{lists(hello("another", "11", denied), hello("ours", "12", issued, answered))},
			want: Decision{Outcome: Answered, Challenge: "challenge"}, calls: []string{"watch 10", "list"},
		},
		"issued while nobody watched": {
			watch: answers{watched(), watched(watchEvent{"MODIFIED", hello("ours", "12", answered)}, staysOpen)}, list: answers{lists(hello("ours", "11", issued))},
			want: Decision{Outcome: Answered, Challenge: "challenge"}, calls: []string{"watch 10", "list", "watch 11"},
		},
		"deleted while nobody watched": {
			watch: answers{watched()}, list: answers{lists(hello("another", "11", answered))},
			want: Decision{Outcome: Deleted}, calls: []string{"watch 10", "list"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.found == nil {
				c.found = found
			}
			server := &api{list: c.list, watch: c.watch}
			client := server.start(t)
			ctx, cancel := context.WithTimeout(t.Context(), 8*firstPause)
			defer cancel()
			got, err := client.Wait(ctx, c.found, ClassifyHello)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, %v, want %+v", got, err, c.want)
			}
			if calls := server.made(t); !slices.Equal(calls, c.calls) {
				t.Errorf("calls %q, want %q", calls, c.calls)
			}
		})
	}
	t.Run("never", func(t *testing.T) {
		t.Parallel()
		server := &api{watch: answers{watched(watchEvent{"MODIFIED", hello("ours", "11", issued, others)}, staysOpen)}}
		client := server.start(t)
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if got, err := client.Wait(ctx, found, ClassifyHello); !errors.Is(err, context.DeadlineExceeded) || got.Outcome != 0 {
			t.Errorf("got %+v, %v", got, err)
		}
	})
}

func TestWaitGivesUpOnARefusal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		list, watch, get answers
		is               func(error) bool
		calls            []string
	}{
		"401 to the watch":     {watch: answers{unauthorized}, is: apierrors.IsUnauthorized, calls: []string{"watch 10"}},
		"401 as an event":      {watch: answers{watched(watchEvent{"ERROR", status(http.StatusUnauthorized, metav1.StatusReasonUnauthorized)})}, is: apierrors.IsUnauthorized, calls: []string{"watch 10"}},
		"401 to the list":      {watch: answers{watched()}, list: answers{unauthorized}, is: apierrors.IsUnauthorized, calls: []string{"watch 10", "list"}},
		"403 to all":           {watch: answers{forbidden}, list: answers{forbidden}, get: answers{forbidden}, is: apierrors.IsForbidden, calls: []string{"watch 10", "list", "get"}},
		"401 after some while": {watch: answers{watched(), unauthorized}, list: answers{lists(object("ours", "12", nil))}, is: apierrors.IsUnauthorized, calls: []string{"watch 10", "list", "watch 12"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := &api{list: c.list, watch: c.watch, get: c.get}
			client := server.start(t)
			ctx, cancel := context.WithTimeout(t.Context(), 8*firstPause)
			defer cancel()
			decision, err := client.Wait(ctx, object("ours", "10", nil), Classify)
			if !c.is(err) || decision.Outcome != 0 {
				t.Errorf("got %+v, %v", decision, err)
			}
			if calls := server.made(t); !slices.Equal(calls, c.calls) {
				t.Errorf("calls %q, want %q", calls, c.calls)
			}
		})
	}
}

// shed is the answer of a server that sheds load. API Priority and Fairness answers in plain text.
func shed(code int, retryAfter string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		if retryAfter != "" {
			w.Header().Set("Retry-After", retryAfter)
		}
		http.Error(w, "Too many requests, please try again later.", code)
	}
}

// A server that sheds load gets each call once, and its answer is passed on.
func TestOverloadedServerIsCalledOnce(t *testing.T) {
	t.Parallel()
	wait := func(ctx context.Context, c *Client) error {
		_, err := c.Wait(ctx, object("ours", "10", nil), Classify)
		return err
	}
	create := func(ctx context.Context, c *Client) error {
		_, err := c.File(ctx, object("", "", nil))
		return err
	}
	get := func(ctx context.Context, c *Client) error {
		_, err := c.Get(ctx, objectName, []byte("our request"))
		return err
	}
	for name, answer := range map[string]struct {
		answer func(http.ResponseWriter, *http.Request)
		after  time.Duration
	}{
		"429":                  {shed(http.StatusTooManyRequests, ""), 0},
		"429 with Retry-After": {shed(http.StatusTooManyRequests, "7"), 7 * time.Second},
		"503":                  {shed(http.StatusServiceUnavailable, ""), 0},
		"503 with Retry-After": {shed(http.StatusServiceUnavailable, "7"), 7 * time.Second},
		"429 from the past":    {shed(http.StatusTooManyRequests, "-7"), 0},
		"429 with a Status":    {refuse(http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests), 0},
		"503 with a Status":    {refuse(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable), 0},
		"429 and no number":    {shed(http.StatusTooManyRequests, "soon"), 0},
		"503 from a load balancer": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "<html>no backend</html>")
		}, 0},
	} {
		for call, c := range map[string]struct {
			server *api
			do     func(context.Context, *Client) error
			calls  []string
		}{
			"create":             {&api{create: answers{answer.answer}}, create, []string{"create"}},
			"get":                {&api{get: answers{answer.answer}}, get, []string{"get"}},
			"watch":              {&api{watch: answers{answer.answer}}, wait, []string{"watch 10"}},
			"list":               {&api{watch: answers{watched()}, list: answers{answer.answer}}, wait, []string{"watch 10", "list"}},
			"the get for a list": {&api{watch: answers{watched()}, list: answers{forbidden}, get: answers{answer.answer}}, wait, []string{"watch 10", "list", "get"}},
		} {
			t.Run(name+" to "+call, func(t *testing.T) {
				t.Parallel()
				client := c.server.start(t)
				ctx, cancel := context.WithTimeout(t.Context(), 8*firstPause)
				defer cancel()
				err := c.do(ctx, client)
				if after, overloaded := IsOverloaded(err); !overloaded || after != answer.after {
					t.Errorf("retry after %v, overloaded %v: %v", after, overloaded, err)
				}
				if calls := c.server.made(t); !slices.Equal(calls, c.calls) {
					t.Errorf("calls %q, want %q", calls, c.calls)
				}
			})
		}
	}
	if _, overloaded := IsOverloaded(nil); overloaded {
		t.Error("no error is an overload")
	}
}

// After other errors, the pauses between calls grow.
func TestWaitPausesLongerEachTime(t *testing.T) {
	t.Parallel()
	server := &api{watch: answers{broken}, list: answers{broken}}
	client := server.start(t)
	var pauses []time.Duration
	client.sleep = func(_ context.Context, pause time.Duration) error {
		if pauses = append(pauses, pause); len(pauses) == 8 {
			return context.DeadlineExceeded
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour) // for a watch of an hour
	defer cancel()
	if _, err := client.Wait(ctx, object("ours", "10", nil), Classify); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	server.made(t)
	// 2 to 3 s, 4 to 6 s, 8 to 12 s, until mostPause
	for i, least := 0, firstPause; i < len(pauses); i, least = i+1, min(2*least, mostPause) {
		if pauses[i] < least || pauses[i] >= least*3/2 {
			t.Errorf("pause %d: %s, not from %s on", i, pauses[i], least)
		}
	}
}

// An API server's warnings are not logged, and its messages are one printable line each.
func TestHostileTextInTheNodesLog(t *testing.T) {
	t.Parallel()
	failure := status(http.StatusInternalServerError, metav1.StatusReasonInternalError)
	failure.Message = strings.Repeat(hostiletext.For("message"), 1000)
	server := &api{
		create: answers{func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Warning", `299 - "`+strings.Repeat("\u202e", 1000)+`"`)
			show(object("ours", "10", nil))(w, r)
		}},
		watch: answers{watched(watchEvent{"ERROR", failure})},
		list: answers{
			func(w http.ResponseWriter, _ *http.Request) { write(w, http.StatusInternalServerError, failure) },
			lists(object("ours", "11", issued)),
		},
	}
	client, out := server.start(t), &bytes.Buffer{}
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(out), textlogger.Verbosity(2))))
	ours, err := client.Create(ctx, object("", "", nil), false)
	if err != nil || out.Len() > 0 {
		t.Fatalf("%v: %.300s", err, out)
	}
	if decision, err := client.Wait(ctx, ours, Classify); err != nil || decision.Outcome != Issued {
		t.Errorf("%+v, %v", decision, err)
	}
	for _, problem := range hostiletext.Find(out.String()) {
		t.Error(problem)
	}
	if lines := strings.Count(out.String(), "\n"); lines != 3 || out.Len() > 4096 {
		t.Errorf("%d lines, %d bytes: %.2000s", lines, out.Len(), out)
	}
}

// The timeout of a watch is the remaining time.
func TestWatchLastsAsLongAsItsContext(t *testing.T) {
	t.Parallel()
	for _, left := range []time.Duration{time.Minute, time.Hour} {
		server := &api{watch: answers{watched(watchEvent{"MODIFIED", object("ours", "11", issued)}, staysOpen)}}
		client := server.start(t)
		ctx, cancel := context.WithTimeout(t.Context(), left)
		defer cancel()
		if _, err := client.Wait(ctx, object("ours", "10", nil), Classify); err != nil {
			t.Fatal(err)
		}
		query, err := url.ParseQuery(server.queries[0])
		if err != nil {
			t.Fatal(err)
		}
		if seconds, err := strconv.Atoi(query.Get("timeoutSeconds")); err != nil || time.Duration(seconds)*time.Second < left-10*time.Second || time.Duration(seconds)*time.Second > left+time.Second {
			t.Errorf("a watch for %q s, want %v", query.Get("timeoutSeconds"), left)
		}
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for name, server := range map[string]*api{
		"while watching": {watch: answers{watched(watchEvent{"ADDED", object("ours", "10", nil)}, staysOpen)}},
		"between lists":  {watch: answers{forbidden}, list: answers{lists(object("ours", "10", nil))}},
		"while listing":  {watch: answers{forbidden}, list: answers{func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			budget := 500 * time.Millisecond
			if name == "while listing" {
				budget += 2 * firstPause
			}
			client := server.start(t)
			ctx, cancel := context.WithTimeout(t.Context(), budget)
			defer cancel()
			began := time.Now()
			decision, err := client.Wait(ctx, object("ours", "10", nil), Classify)
			if !errors.Is(err, context.DeadlineExceeded) || decision.Outcome != 0 {
				t.Errorf("got %+v, %v", decision, err)
			}
			if late := time.Since(began) - budget; late > time.Second {
				t.Errorf("ended %v late", late)
			}
			server.made(t)
		})
	}
}

func TestWaitAsksNobodyAboutADecidedRequest(t *testing.T) {
	t.Parallel()
	server := &api{}
	client := server.start(t)
	decision, err := client.Wait(t.Context(), object("ours", "10", issued), Classify)
	if err != nil || decision.Outcome != Issued || len(server.made(t)) > 0 {
		t.Errorf("got %+v, %v", decision, err)
	}
}

func TestFile(t *testing.T) {
	t.Parallel()
	foreign := func(o *certificatesv1.CertificateSigningRequest) { o.Spec.Request = []byte("our request\n") }
	for name, c := range map[string]struct {
		create, get answers
		is          func(error) bool // nil: it is filed
		calls       []string
	}{
		"filed":               {create: answers{show(object("ours", "10", nil))}, calls: []string{"create"}},
		"filed before":        {create: answers{exists}, get: answers{show(object("ours", "10", nil))}, calls: []string{"create", "get"}},
		"another has it":      {create: answers{exists}, get: answers{show(object("another", "10", foreign))}, is: func(err error) bool { return errors.Is(err, ErrNotOurs) }, calls: []string{"create", "get"}},
		"another without any": {create: answers{exists}, get: answers{show(object("another", "10", func(o *certificatesv1.CertificateSigningRequest) { o.Spec.Request = nil }))}, is: func(err error) bool { return errors.Is(err, ErrNotOurs) }, calls: []string{"create", "get"}},
		"gone in between":     {create: answers{exists}, get: answers{notFound}, is: apierrors.IsNotFound, calls: []string{"create", "get"}},
		"401":                 {create: answers{unauthorized}, is: apierrors.IsUnauthorized, calls: []string{"create"}},
		"403":                 {create: answers{forbidden}, is: apierrors.IsForbidden, calls: []string{"create"}},
		"401 to the get":      {create: answers{exists}, get: answers{unauthorized}, is: apierrors.IsUnauthorized, calls: []string{"create", "get"}},
		"another conflict":    {create: answers{refuse(http.StatusConflict, metav1.StatusReasonConflict)}, is: apierrors.IsConflict, calls: []string{"create"}},
		"500":                 {create: answers{broken}, is: apierrors.IsInternalError, calls: []string{"create"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := &api{create: c.create, get: c.get}
			client := server.start(t)
			got, err := client.File(t.Context(), object("", "", nil))
			if c.is == nil && (err != nil || got == nil || got.UID != "ours") {
				t.Errorf("got %+v, %v", got, err)
			}
			if c.is != nil && (!c.is(err) || got != nil) {
				t.Errorf("got %+v, %v", got, err)
			}
			if calls := server.made(t); !slices.Equal(calls, c.calls) {
				t.Errorf("calls %q, want %q", calls, c.calls)
			}
			var sent certificatesv1.CertificateSigningRequest
			if err := json.Unmarshal(server.bodies[0], &sent); err != nil || !bytes.Equal(sent.Spec.Request, []byte("our request")) || sent.Name != objectName || sent.GenerateName != "" {
				t.Errorf("posted %s, %v", server.bodies[0], err)
			}
			if strings.Contains(server.queries[0], "dryRun") {
				t.Errorf("filed with %q", server.queries[0])
			}
		})
	}
}

func TestDryRunIsOneCallAndSaysSo(t *testing.T) {
	t.Parallel()
	server := &api{create: answers{exists}}
	client := server.start(t)
	if _, err := client.Create(t.Context(), object("", "", nil), true); !apierrors.IsAlreadyExists(err) {
		t.Errorf("got %v", err)
	}
	if calls := server.made(t); !slices.Equal(calls, []string{"create"}) || server.queries[0] != "dryRun=All" {
		t.Errorf("calls %q with %q", calls, server.queries)
	}
}

func TestGetTakesOnlyOurs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		get  answers
		ours []byte
		is   func(error) bool
	}{
		"ours":         {get: answers{show(object("ours", "10", nil))}, ours: []byte("our request")},
		"a byte more":  {get: answers{show(object("ours", "10", nil))}, ours: []byte("our request."), is: func(err error) bool { return errors.Is(err, ErrNotOurs) }},
		"a byte less":  {get: answers{show(object("ours", "10", nil))}, ours: []byte("our reques"), is: func(err error) bool { return errors.Is(err, ErrNotOurs) }},
		"gone":         {get: answers{notFound}, is: apierrors.IsNotFound},
		"unauthorised": {get: answers{unauthorized}, is: apierrors.IsUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := &api{get: c.get}
			got, err := server.start(t).Get(t.Context(), objectName, c.ours)
			if c.is == nil && (err != nil || got.UID != "ours") || c.is != nil && (!c.is(err) || got != nil) {
				t.Errorf("got %+v, %v", got, err)
			}
			server.made(t)
		})
	}
}

// A credential that may only create, get and watch still sees the decision on its request.
func TestWaitGetsWhereItMayNotList(t *testing.T) {
	t.Parallel()
	server := &api{watch: answers{watched()}, list: answers{forbidden}, get: answers{show(object("ours", "11", issued))}}
	decision, err := server.start(t).Wait(t.Context(), object("ours", "10", nil), Classify)
	if err != nil || decision.Outcome != Issued {
		t.Errorf("got %+v, %v", decision, err)
	}
}

// A redirect is not followed: client-go's transport would show the token to wherever it leads.
func TestCredentialIsNotShownToWhereARedirectLeads(t *testing.T) {
	t.Parallel()
	stolen := make(chan string, 1)
	thief := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { stolen <- r.Header.Get("Authorization") }))
	t.Cleanup(thief.Close)
	front := httptest.NewTLSServer(http.RedirectHandler(thief.URL, http.StatusTemporaryRedirect))
	t.Cleanup(front.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw})
	client, err := NewClient(&rest.Config{Host: front.URL, BearerToken: "secret", TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Create(t.Context(), Object(objectName, "example.com/signer", []byte("x"), nil, nil), false); err == nil {
		t.Error("a redirect counts as success")
	}
	select {
	case authorization := <-stolen:
		t.Errorf("the redirect was followed with %q", authorization)
	default:
	}
}

// An endless answer is cut off.
func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	front := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		for range 2 * maxAnswer / (1 << 16) {
			if _, err := w.Write(bytes.Repeat([]byte(" "), 1<<16)); err != nil {
				return
			}
		}
		_, _ = w.Write([]byte("{}"))
	}))
	t.Cleanup(front.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw})
	client, err := NewClient(&rest.Config{Host: front.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.Get(t.Context(), objectName, nil)
	var tooLarge *http.MaxBytesError
	if !errors.As(err, &tooLarge) {
		t.Errorf("got %v", err)
	}
}
