// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// fakeChallenger is a Challenger of which each test replaces what it is about.
type fakeChallenger struct {
	plugintest.Provider
	versions attestation.Versions
	hello    func(context.Context, provider.Request) (document []byte, remember string, err error)
	evidence func(context.Context, provider.Request) ([]byte, error)

	// hellos and proofs are what it was asked for.
	hellos, proofs []provider.Request
}

func (p *fakeChallenger) Versions() attestation.Versions { return p.versions }

func (p *fakeChallenger) Hello(ctx context.Context, request provider.Request) ([]byte, string, error) {
	p.hellos = append(p.hellos, request)
	return p.hello(ctx, request)
}

func (p *fakeChallenger) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	p.proofs = append(p.proofs, request)
	return p.evidence(ctx, request)
}

// newChallenger returns one that accepts fake/v3 to fake/v1 and has no trouble.
func newChallenger() *fakeChallenger {
	return &fakeChallenger{
		Provider: plugintest.Provider{CanRenew: true, Signer: "example.com/signer"},
		versions: attestation.Versions{"fake/v3", "fake/v2", "fake/v1"},
		hello: func(_ context.Context, request provider.Request) ([]byte, string, error) {
			return fmt.Appendf(nil, `{"version":%q,"kind":"hello"}`, request.Version), "ek", nil
		},
		evidence: func(_ context.Context, request provider.Request) ([]byte, error) {
			return fmt.Appendf(nil, `{"version":%q,"kind":"proof","name":%q}`, request.Version, request.Name), nil
		},
	}
}

// csrObject is short for what the tests are about.
type csrObject = certificatesv1.CertificateSigningRequest

// controller is an API server with a controller, which decides on a request once it is watched.
type controller struct {
	registry
	// hello and proof decide on the nth hello and proof, n from 1. If one sets a deletion
	// timestamp, the object is deleted.
	hello, proof func(n int, o *csrObject)
	// shed is set if the nth call is to be answered with 429, n from 1.
	shed  func(n int) bool
	calls int
	// refuse is set if the nth post is to be refused, n from 1 (403).
	refuse func(n int) bool
	// lose is set if the answer to the nth post is to be lost, n from 1.
	lose func(n int) bool
	// stalled is called a while after a request has been watched that nothing has become of.
	stalled func()

	filed   []*csrObject // in their order, the deleted ones included
	decided map[string]bool
}

func (c *controller) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	c.mu.Lock()
	c.calls++
	shed := c.shed != nil && c.shed(c.calls)
	c.mu.Unlock()
	if shed {
		w.Header().Set("Retry-After", "40")
		http.Error(w, "Too many requests, please try again later.", http.StatusTooManyRequests)
		return
	}
	if request.URL.Query().Get("watch") != "" {
		c.watched(w, request)
		return
	}
	if request.Method == http.MethodPost && c.refuse != nil && c.refuse(len(c.posts)+1) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"no","code":403}`)
		return
	}
	c.registry.ServeHTTP(w, request)
	c.mu.Lock()
	defer c.mu.Unlock()
	if request.Method != http.MethodPost {
		return
	}
	n := len(c.posts)
	if o := c.objects[c.posts[n-1]]; o != nil && !slices.Contains(c.filed, o) {
		c.filed = append(c.filed, o)
	}
	if c.lose != nil && c.lose(n) {
		panic(http.ErrAbortHandler)
	}
}

// watched decides on the request and shows it; then nothing ever happens to it.
func (c *controller) watched(w http.ResponseWriter, request *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	c.mu.Lock()
	if o := c.objects[strings.TrimPrefix(request.URL.Query().Get("fieldSelector"), "metadata.name=")]; o != nil {
		c.decide(o)
		kind := "MODIFIED"
		if o.DeletionTimestamp != nil {
			kind = "DELETED"
		} else if pending := classify(o).Outcome == csr.Pending; pending && c.stalled != nil {
			time.AfterFunc(100*time.Millisecond, c.stalled)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
	}
	c.mu.Unlock()
	_ = http.NewResponseController(w).Flush()
	<-request.Context().Done()
}

func classify(o *csrObject) csr.Decision {
	switch {
	case attestation.IsRehearsalSigner(o.Spec.SignerName):
		return csr.ClassifyRehearsal(o)
	case attestation.IsHelloSigner(o.Spec.SignerName):
		return csr.ClassifyHello(o)
	}
	return csr.Classify(o)
}

// decide has the controller decide on a request, once.
func (c *controller) decide(o *csrObject) {
	if c.decided[o.Name] {
		return
	}
	c.decided[o.Name] = true
	hellos, proofs := c.split()
	if n := slices.Index(hellos, o); n >= 0 {
		c.hello(n+1, o)
	} else {
		c.proof(slices.Index(proofs, o)+1, o)
	}
	if o.DeletionTimestamp != nil {
		delete(c.objects, o.Name)
	}
}

// decideAll has it decide while nobody watches.
func (c *controller) decideAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.filed {
		c.decide(o)
	}
}

func (c *controller) split() (hellos, proofs []*csrObject) {
	for _, o := range c.filed {
		if attestation.IsHelloSigner(o.Spec.SignerName) {
			hellos = append(hellos, o)
		} else {
			proofs = append(proofs, o)
		}
	}
	return hellos, proofs
}

// The decisions there are.

func challenge(n int, o *csrObject) {
	annotate(o, attestation.AnnotationChallenge, fmt.Sprintf("challenge %d", n))
}

func annotate(o *csrObject, key, value string) {
	if o.Annotations == nil {
		o.Annotations = map[string]string{}
	}
	o.Annotations[key] = value
}

func set(kind certificatesv1.RequestConditionType, reason string) func(int, *csrObject) {
	return func(_ int, o *csrObject) {
		o.Status.Conditions = append(o.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: corev1.ConditionTrue, Reason: reason, Message: "so it is"})
	}
}

func deny(reason string) func(int, *csrObject) { return set(certificatesv1.CertificateDenied, reason) }

func remove(_ int, o *csrObject) { o.DeletionTimestamp = &metav1.Time{Time: plugintest.Noon} }

// testNode is node "a" with a provider that is challenged, before an API server with a controller.
// The controller has no objections.
type testNode struct {
	*Enroller
	t    testing.TB
	api  *controller
	tpm  *fakeChallenger
	time time.Time
}

func newNode(t *testing.T) *testNode {
	t.Helper()
	n := &testNode{Enroller: testEnroller(t), t: t, tpm: newChallenger(), time: plugintest.Noon}
	n.api = &controller{registry: registry{t: t, slow: true}, decided: map[string]bool{}, hello: challenge, proof: n.issue}
	server, ca := plugintest.TLSServer(t, n.api, nil)
	seconds := int32(7200)
	n.ExpirationSeconds, n.ProviderID = &seconds, "x://y"
	n.use(n.tpm)
	n.Node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "b.conf", plugintest.Kubeconfig(plugintest.OnServer(server.URL, ca), "token: abc"))
	n.Node.Now = func() time.Time { return n.time }
	return n
}

// issue issues a certificate that lives for an hour.
func (n *testNode) issue(_ int, o *csrObject) {
	o.Status.Certificate = plugintest.Sign(n.t, plugintest.PKCS10Of(n.t, o.Spec.Request), func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = n.time.Add(-time.Minute), n.time.Add(time.Hour)
	})
}

// work is one worker. It ends when it has nothing to do but to wait.
func (n *testNode) work() error {
	n.t.Helper()
	ctx, cancel := n.untilItStalls()
	defer cancel()
	return n.Work(ctx)
}

// untilItStalls returns a context that ends when a request stays without an answer.
func (n *testNode) untilItStalls() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	n.api.mu.Lock()
	defer n.api.mu.Unlock()
	n.api.stalled = cancel
	return ctx, cancel
}

// later is when no back-off holds any more, and the certificate is due.
func (n *testNode) later() { n.time = n.time.Add(57 * time.Minute) }

// errKilled is what a worker panics with that is killed.
var errKilled = errors.New("killed")

// workUntil is a worker that is killed when it enters its nth step, n from 0. It reports which step
// that was, "" if it got to its end.
func (n *testNode) workUntil(nth int) (killed Step, err error) {
	n.t.Helper()
	defer func() {
		n.Step = func(Step) {}
		if r := recover(); r != nil && r != any(errKilled) {
			panic(r)
		}
	}()
	i := 0
	n.Step = func(s Step) {
		if i++; i > nth {
			killed = s
			panic(errKilled)
		}
	}
	return "", n.work()
}

// pending returns the pending file, which has to be good.
func (n *testNode) pending() *cache.Pending {
	n.t.Helper()
	pending, err := n.Node.Dir().Pending()
	if err != nil {
		n.t.Fatal(err)
	}
	return pending
}

// pendingFile is pending for goroutines that may not fail the test.
func (n *testNode) pendingFile() *cache.Pending {
	pending, err := n.Node.Dir().Pending()
	if err != nil {
		return nil
	}
	return pending
}

// wantFiled checks how many hellos and proofs there are, that each has a name of its own, and that
// each name was posted once.
func (n *testNode) wantFiled(hellos, proofs int) {
	n.t.Helper()
	gotHellos, gotProofs := n.api.split()
	if len(gotHellos) != hellos || len(gotProofs) != proofs {
		n.t.Errorf("%d hellos and %d proofs were filed, want %d and %d", len(gotHellos), len(gotProofs), hellos, proofs)
	}
	if names := slices.Compact(slices.Sorted(slices.Values(n.api.posts))); len(names) != len(n.api.posts) {
		n.t.Errorf("a name was posted twice: %q", n.api.posts)
	}
}

// wantState checks how the last worker ended: with a pause of this kind.
func (n *testNode) wantState(why reason.Reason, pause reason.BackOff) *cache.State {
	n.t.Helper()
	state, err := n.Node.Dir().State()
	if err != nil || state.Last == nil {
		n.t.Fatalf("state %+v, %v", state, err)
	}
	if state.Last.Reason != string(why) {
		n.t.Errorf("reason %s, want %s: %s", state.Last.Reason, why, state.Last.Message)
	}
	if problem := plugintest.NotOneLine(state.Last.Message); problem != "" {
		n.t.Errorf("the message %s: %.200q", problem, state.Last.Message)
	}
	least, most := pause.Delay(1, 0, 0), pause.Delay(100, 0, 0)*3/2
	if state.NextAttempt.IsZero() != (pause == reason.BackOffNone) || pause != reason.BackOffNone && (state.NextAttempt.Before(n.time.Add(least)) || state.NextAttempt.After(n.time.Add(most))) {
		n.t.Errorf("now %s, next attempt %s", n.time, state.NextAttempt)
	}
	return state
}

// wantInstalled checks that the certificate of the last proof is there and that nothing is pending.
func (n *testNode) wantInstalled() {
	n.t.Helper()
	_, proofs := n.api.split()
	s := n.Node.Load()
	if s.Pair == nil || len(proofs) == 0 || !bytes.Equal(s.Pair.Chain, proofs[len(proofs)-1].Status.Certificate) {
		n.t.Fatalf("not installed: lack %v", s.Problem)
	}
	if _, err := os.Lstat(n.Node.Dir().File(cache.PendingFile)); !errors.Is(err, os.ErrNotExist) {
		n.t.Errorf("a second copy of the key is left behind: %v", err)
	}
}

// wantNothingInstalled checks that there is no certificate.
func (n *testNode) wantNothingInstalled() {
	n.t.Helper()
	if _, err := os.Lstat(n.Node.Dir().File(cache.CurrentFile)); !errors.Is(err, os.ErrNotExist) {
		n.t.Errorf("a certificate was installed: %v", err)
	}
}

// The proof is bound to all of the hello and all of itself: the provider has to be told exactly
// what is filed.
func TestProviderGetsFiledRequest(t *testing.T) {
	n := newNode(t)
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	n.wantFiled(1, 1)
	n.wantInstalled()
	n.wantState("", reason.BackOffNone)
	hello, proof := n.api.filed[0], n.api.filed[1]
	if hello.Spec.SignerName != attestation.HelloSignerName || proof.Spec.SignerName != "example.com/signer" {
		t.Errorf("filed under %s and %s", hello.Spec.SignerName, proof.Spec.SignerName)
	}
	usages := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}
	for _, o := range []*csrObject{hello, proof} {
		if !slices.Equal(o.Spec.Usages, usages) || o.Spec.ExpirationSeconds == nil || *o.Spec.ExpirationSeconds != 7200 {
			t.Errorf("usages %q, expirationSeconds %v", o.Spec.Usages, o.Spec.ExpirationSeconds)
		}
		if len(o.Annotations) > 1 || !strings.HasPrefix(o.Name, "node-csr-") || len(o.Labels) > 0 {
			t.Errorf("metadata %+v", o.ObjectMeta)
		}
	}
	helloContent, helloErr := attestation.Parse(hello.Spec.Request)
	proofContent, proofErr := attestation.Parse(proof.Spec.Request)
	if err := errors.Join(helloErr, proofErr); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(helloContent.PKCS10, proofContent.PKCS10) || helloContent.Provider != "fake" || proofContent.Provider != "fake" {
		t.Error("hello and proof are not for the same certificate")
	}
	if got := string(helloContent.Data); got != `{"version":"fake/v3","kind":"hello"}` {
		t.Errorf("hello %s", got)
	}
	if got := string(proofContent.Data); got != fmt.Sprintf(`{"version":"fake/v3","kind":"proof","name":%q}`, proof.Name) {
		t.Errorf("proof %s", got)
	}

	seconds := int32(7200)
	want := provider.Request{
		PKCS10: helloContent.PKCS10, NodeName: "a", ProviderID: "x://y", Name: hello.Name, SignerName: "example.com/signer",
		Usages: []string{"digital signature", "client auth"}, ExpirationSeconds: &seconds, Version: "fake/v3",
	}
	if got := n.tpm.hellos; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("for the hello it was told %+v, want %+v", got, want)
	}
	want.Name = proof.Name
	want.Challenge = &provider.Challenge{
		HelloName: hello.Name, HelloUID: "uid", HelloRequest: hello.Spec.Request, Answer: []byte("challenge 1"), Fresh: true,
	}
	if got := n.tpm.proofs; len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("for the proof it was told %+v, want %+v of %+v", got, want, want.Challenge)
	}
}

// A worker may be killed at any step, and the controller may act before the next worker. A node
// still files one hello and one proof, under the recorded names.
func TestWorkerMayBeKilledAtAnyStep(t *testing.T) {
	all := newNode(t)
	var steps []Step
	all.Step = func(s Step) { steps = append(steps, s) }
	if err := all.work(); err != nil {
		t.Fatal(err)
	}
	if want := []Step{
		StepLock, StepTidy, StepPrepare, StepSave, StepFile, StepSaveUID, StepChallenge,
		StepProve, StepSave, StepFile, StepSaveUID, StepWait, StepCheck, StepInstall, stepRecord, stepForget,
	}; !slices.Equal(steps, want) {
		t.Fatalf("the steps are %q, want %q", steps, want)
	}
	for nth, step := range steps {
		for _, meanwhile := range []bool{false, true} {
			t.Run(fmt.Sprintf("%02d %s, decided meanwhile %v", nth, step, meanwhile), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				if killed, err := n.workUntil(nth); killed != step {
					t.Fatalf("killed at %q, %v", killed, err)
				}
				left := n.pending()
				posted := len(n.api.posts)
				if meanwhile {
					n.api.decideAll()
				}
				if err := n.work(); err != nil {
					t.Fatal(err)
				}
				if hellos, proofs := n.api.split(); len(hellos) != 1 || len(proofs) != 1 {
					t.Fatalf("%d hellos and %d proofs", len(hellos), len(proofs))
				}
				n.wantInstalled()
				for i, posted := range n.api.filed {
					if left != nil && i < len(left.Requests) && (left.Requests[i].Name != posted.Name || !bytes.Equal(left.Requests[i].Request, posted.Spec.Request)) {
						t.Errorf("request %d was written down as %s and filed as %s, or with other bytes", i, left.Requests[i].Name, posted.Name)
					}
				}
				// Only a post that is not known to have arrived is repeated.
				again := step == StepSaveUID
				if got := len(n.api.posts); got != 2 && !again || got != 3 && again {
					t.Errorf("posted %q, %d of them before", n.api.posts, posted)
				}
				// The proof that is filed was made for the hello that is filed, and
				// for that name.
				last := n.tpm.proofs[len(n.tpm.proofs)-1]
				hello, proof := n.api.filed[0], n.api.filed[1]
				if last.Name != proof.Name || last.Challenge.HelloName != hello.Name || last.Challenge.HelloUID != string(hello.UID) ||
					!bytes.Equal(last.Challenge.HelloRequest, hello.Spec.Request) || string(last.Challenge.Answer) != "challenge 1" {
					t.Errorf("the proof is for %+v of %+v", last, last.Challenge)
				}
				// no answer was there before: it came while a worker waited
				before := map[bool]int{false: 7, true: 5}[meanwhile]
				for i, asked := range n.tpm.proofs {
					// The first proof of a worker that had waited is fresh; one
					// made by the next worker is not.
					fresh := nth < before || nth > 7 && i == 0
					if asked.Challenge.Fresh != fresh {
						t.Errorf("proof %d of %d is for a fresh answer: %v, want %v", i+1, len(n.tpm.proofs), asked.Challenge.Fresh, fresh)
					}
				}
				if want := map[bool]int{false: 1, true: 2}[nth == 8]; len(n.tpm.proofs) != want {
					t.Errorf("%d proofs were made, want %d", len(n.tpm.proofs), want)
				}
				if want := map[bool]int{false: 1, true: 2}[nth == 3]; len(n.tpm.hellos) != want {
					t.Errorf("%d hellos were made, want %d", len(n.tpm.hellos), want)
				}
			})
		}
	}
}

// Each worker is killed a few steps after the last one was: all of them together file one hello and
// one proof.
func TestWorkersMayBeKilledOverAndOver(t *testing.T) {
	n := newNode(t)
	for nth := 0; ; nth++ {
		killed, err := n.workUntil(nth)
		if err != nil || nth > 30 {
			t.Fatal(nth, killed, err)
		}
		if killed == "" {
			break
		}
	}
	hellos, proofs := n.api.split()
	if len(hellos) != 1 || len(proofs) != 1 {
		t.Errorf("%d hellos and %d proofs", len(hellos), len(proofs))
	}
	if s := n.Node.Load(); s.Pair == nil || !bytes.Equal(s.Pair.Chain, proofs[0].Status.Certificate) {
		t.Errorf("not installed: %v", s.Problem)
	}
}

// A post that arrived, and whose answer did not, is not made again under another name.
func TestAnswerToAPostIsLost(t *testing.T) {
	for name, nth := range map[string]int{"the hello's": 1, "the proof's": 2} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.api.lose = func(post int) bool { return post == nth }
			plugintest.MustFail(t, n.work(), reason.APIUnreachable)
			n.wantState(reason.APIUnreachable, reason.BackOffSoon)
			left := n.pending()
			if left == nil || len(left.Requests) != nth || left.Last().UID != "" {
				t.Fatalf("pending %+v", left)
			}
			n.time = n.time.Add(time.Minute)
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantInstalled()
			if len(n.api.filed) != 2 || len(n.api.posts) != 3 || n.api.posts[nth-1] != n.api.posts[nth] || n.api.posts[nth-1] != left.Last().Name {
				t.Errorf("posted %q", n.api.posts)
			}
			if got := n.tpm.proofs; len(got) != 1 || got[0].Challenge.HelloUID != string(n.api.filed[0].UID) {
				t.Errorf("%d proofs", len(got))
			}
		})
	}
}

// To approve a hello, or to sign what is in it, attests nothing.
func TestHelloIsNoWayToACertificate(t *testing.T) {
	approve := set(certificatesv1.CertificateApproved, "AutoApproved")
	for name, decide := range map[string]func(n *testNode, i int, o *csrObject){
		"approved":         func(_ *testNode, i int, o *csrObject) { approve(i, o) },
		"issued":           func(n *testNode, i int, o *csrObject) { n.issue(i, o) },
		"approved, issued": func(n *testNode, i int, o *csrObject) { approve(i, o); n.issue(i, o) },
		"issued, for the wrong node": func(n *testNode, i int, o *csrObject) {
			o.Status.Certificate = plugintest.Sign(n.t, plugintest.PKCS10Of(n.t, o.Spec.Request), plugintest.OfNode("b"))
		},
		"issued, with an empty challenge": func(n *testNode, i int, o *csrObject) {
			n.issue(i, o)
			annotate(o, attestation.AnnotationChallenge, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.api.hello = func(i int, o *csrObject) { decide(n, i, o) }
			failure := plugintest.WantFailure(t, n.work(), reason.WaitingForSigner)
			if !strings.Contains(failure.Error(), attestation.HelloSignerName) || !strings.Contains(failure.Error(), "challenge") || !strings.Contains(failure.Hint, n.api.posts[0]) {
				t.Errorf("%v (%s)", failure, failure.Hint)
			}
			n.wantState(reason.WaitingForSigner, reason.BackOffNone)
			// Nor does the next worker take it, which finds it so.
			plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
			n.wantFiled(1, 0)
			n.wantNothingInstalled()
			if pending := n.pending(); pending == nil || pending.Last().UID != "uid" || pending.Last().Name != n.api.posts[0] {
				t.Errorf("pending %+v", pending)
			}
			// It still is what the challenge will come for. What was issued for it is
			// not installed even if the proof is denied.
			n.api.mu.Lock()
			challenge(1, n.api.filed[0])
			n.api.proof = deny("Policy")
			n.api.mu.Unlock()
			plugintest.MustFail(t, n.work(), reason.RequestDenied)
			n.wantFiled(1, 1)
			n.wantNothingInstalled()
		})
	}
}

// After a refusal the node files nothing until its back-off is over, except if another hello may
// succeed. Even then, one worker files at most three hellos.
func TestRefusalsOfHelloAndProof(t *testing.T) {
	stale := func(ctx context.Context, _ provider.Request) ([]byte, error) {
		return nil, fmt.Errorf("wrapped: %w", &provider.Error{Class: provider.Stale, Hint: "look at the clock", Err: errors.New("too old")})
	}
	first := func(what func(int, *csrObject), then func(int, *csrObject)) func(int, *csrObject) {
		return func(n int, o *csrObject) {
			if n == 1 {
				what(n, o)
				return
			}
			then(n, o)
		}
	}
	for name, c := range map[string]struct {
		change         func(n *testNode)
		hellos, proofs int
		failure        reason.Reason
		pause          reason.BackOff
		says           string
	}{
		"hello denied": {func(n *testNode) { n.api.hello = deny("UnknownEK") }, 1, 0, reason.RequestDenied, reason.BackOffLater, `"UnknownEK: `},
		"hello denied, answered": {func(n *testNode) {
			n.api.hello = func(i int, o *csrObject) { challenge(i, o); deny("UnknownEK")(i, o) }
		}, 1, 0, reason.RequestDenied, reason.BackOffLater, `"UnknownEK: `},
		"hello failed": {func(n *testNode) { n.api.hello = set(certificatesv1.CertificateFailed, "Broken") }, 1, 0, reason.RequestFailed, reason.BackOffLater, `"Broken: `},
		"hello failed, answered": {func(n *testNode) {
			n.api.hello = func(i int, o *csrObject) { challenge(i, o); set(certificatesv1.CertificateFailed, "Broken")(i, o) }
		}, 1, 0, reason.RequestFailed, reason.BackOffLater, `"Broken: `},
		"hello denied for a Node":                         {func(n *testNode) { n.api.hello = deny(attestation.ReasonNodeRegistered) }, 1, 0, reason.RequestDenied, reason.BackOffLater, attestation.ReasonNodeRegistered},
		"hello denied for a suspended machine":            {func(n *testNode) { n.api.hello = deny(attestation.ReasonSuspended) }, 1, 0, reason.MachineSuspended, reason.BackOffLater, attestation.ReasonSuspended},
		"proof denied for a suspended machine":            {func(n *testNode) { n.api.proof = deny(attestation.ReasonSuspended) }, 1, 1, reason.MachineSuspended, reason.BackOffLater, attestation.ReasonSuspended},
		"hello completed by another proof":                {func(n *testNode) { n.api.hello = first(deny(attestation.ReasonCompleted), challenge) }, 2, 1, "", reason.BackOffNone, ""},
		"hellos completed by other proofs":                {func(n *testNode) { n.api.hello = deny(attestation.ReasonCompleted) }, 3, 0, reason.RequestDenied, reason.BackOffLater, "another proof"},
		"proof denied as a hello that is done":            {func(n *testNode) { n.api.proof = deny(attestation.ReasonCompleted) }, 1, 1, reason.RequestDenied, reason.BackOffLater, attestation.ReasonCompleted},
		"hello denied as expired":                         {func(n *testNode) { n.api.hello = deny(attestation.ReasonExpired) }, 1, 0, reason.RequestDenied, reason.BackOffLater, attestation.ReasonExpired},
		"hello deleted once":                              {func(n *testNode) { n.api.hello = first(remove, challenge) }, 2, 1, "", reason.BackOffNone, ""},
		"hellos deleted":                                  {func(n *testNode) { n.api.hello = remove }, 3, 0, reason.RequestFailed, reason.BackOffLater, "deleted"},
		"proof denied":                                    {func(n *testNode) { n.api.proof = deny("Policy") }, 1, 1, reason.RequestDenied, reason.BackOffLater, `"Policy: `},
		"proof failed":                                    {func(n *testNode) { n.api.proof = set(certificatesv1.CertificateFailed, "Broken") }, 1, 1, reason.RequestFailed, reason.BackOffLater, `"Broken: `},
		"hello with a condition of no type that there is": {func(n *testNode) { n.api.hello = set("approved", "Odd") }, 1, 0, reason.RequestFailed, reason.BackOffLater, `\"approved\"`},
		"proof with a condition of no type that there is": {func(n *testNode) { n.api.proof = set("Approved ", "Odd") }, 1, 1, reason.RequestFailed, reason.BackOffLater, `\"Approved \"`},
		"proof failed as expired":                         {func(n *testNode) { n.api.proof = set(certificatesv1.CertificateFailed, attestation.ReasonExpired) }, 1, 1, reason.RequestFailed, reason.BackOffLater, ""},
		"proof deleted once":                              {func(n *testNode) { n.api.proof = first(remove, n.issue) }, 2, 2, "", reason.BackOffNone, ""},
		"proofs deleted":                                  {func(n *testNode) { n.api.proof = remove }, 3, 3, reason.RequestFailed, reason.BackOffLater, "deleted"},
		"proof expired once":                              {func(n *testNode) { n.api.proof = first(deny(attestation.ReasonExpired), n.issue) }, 2, 2, "", reason.BackOffNone, ""},
		"proofs expired":                                  {func(n *testNode) { n.api.proof = deny(attestation.ReasonExpired) }, 3, 3, reason.ChallengeUnanswered, reason.BackOffLater, "expired"},
		"proof nearly expired":                            {func(n *testNode) { n.api.proof = deny(attestation.ReasonExpired + "d") }, 1, 1, reason.RequestDenied, reason.BackOffLater, ""},
		"proof expired, issued": {func(n *testNode) {
			n.api.proof = func(i int, o *csrObject) { n.issue(i, o); deny(attestation.ReasonExpired)(i, o) }
		}, 3, 3, reason.ChallengeUnanswered, reason.BackOffLater, ""},
		"proof denied for versions": {func(n *testNode) { n.api.proof = denyVersion("fake/v1") }, 1, 1, reason.RequestDenied, reason.BackOffLater, attestation.ReasonVersion},
		"stale once": {func(n *testNode) {
			evidence := n.tpm.evidence
			n.tpm.evidence = func(ctx context.Context, r provider.Request) ([]byte, error) {
				if len(n.tpm.proofs) == 1 {
					return stale(ctx, r)
				}
				return evidence(ctx, r)
			}
		}, 2, 1, "", reason.BackOffNone, ""},
		"stale": {func(n *testNode) { n.tpm.evidence = stale }, 3, 0, reason.ChallengeUnanswered, reason.BackOffLater, "too old"},
		"deleted, expired, stale": {func(n *testNode) {
			n.api.hello = first(remove, challenge)
			n.api.proof = deny(attestation.ReasonExpired)
			evidence := n.tpm.evidence
			n.tpm.evidence = func(ctx context.Context, r provider.Request) ([]byte, error) {
				if len(n.tpm.proofs) == 2 {
					return stale(ctx, r)
				}
				return evidence(ctx, r)
			}
		}, 3, 1, reason.ChallengeUnanswered, reason.BackOffLater, "too old"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c.change(n)
			err := n.work()
			n.wantFiled(c.hellos, c.proofs)
			n.wantState(c.failure, c.pause)
			if c.failure == "" {
				if err != nil {
					t.Fatal(err)
				}
				n.wantInstalled()
			} else {
				failure := plugintest.WantFailure(t, err, c.failure)
				if !strings.Contains(failure.Error(), c.says) || !strings.Contains(failure.Error(), n.api.posts[len(n.api.posts)-1]) {
					t.Errorf("%v", failure)
				}
				if strings.HasSuffix(c.says, "old") && failure.Hint != "look at the clock" {
					t.Errorf("hint %q", failure.Hint)
				}
				n.wantNothingInstalled()
			}
			if pending := n.pending(); pending != nil {
				t.Errorf("a request that is settled is still pending: %q", pending.Last().Name)
			}
			// Starting over is starting afresh: one key for two hellos would tie a
			// proof to either of them.
			keys := map[string]bool{}
			for _, asked := range n.tpm.hellos {
				keys[string(asked.PKCS10)] = true
			}
			if len(keys) != c.hellos {
				t.Errorf("%d keys for %d hellos", len(keys), c.hellos)
			}
			for i, asked := range n.tpm.proofs {
				if !asked.Challenge.Fresh {
					t.Errorf("the answer for proof %d is not fresh", i+1)
				}
			}
			if c.failure != "" {
				plugintest.MustFail(t, n.work(), c.failure) // it is too early for another
				n.wantFiled(c.hellos, c.proofs)
			}
		})
	}
}

// denyVersion denies a hello for its version and says which ones are served, nothing if that is
// empty.
func denyVersion(served string) func(int, *csrObject) {
	return func(n int, o *csrObject) {
		deny(attestation.ReasonVersion)(n, o)
		if served != "" {
			annotate(o, attestation.AnnotationVersions, served)
		}
	}
}

func TestVersionIsNegotiated(t *testing.T) {
	four := attestation.Versions{"fake/v4", "fake/v3", "fake/v2", "fake/v1"}
	serves := func(list string) func(int, *csrObject) {
		return func(n int, o *csrObject) {
			content, err := attestation.Parse(o.Spec.Request)
			if err != nil {
				panic(err)
			}
			for version := range strings.SplitSeq(list, ",") {
				if bytes.Contains(content.Data, []byte(`"`+version+`"`)) {
					challenge(n, o)
					return
				}
			}
			denyVersion(list)(n, o)
		}
	}
	inTurn := func(lists ...string) func(int, *csrObject) {
		return func(n int, o *csrObject) { denyVersion(lists[min(n, len(lists))-1])(n, o) }
	}
	for name, c := range map[string]struct {
		accepts attestation.Versions // nil: fake/v3 to fake/v1
		hello   func(int, *csrObject)
		hellos  []attestation.Version
		// names is what the failure has to say of the controller's list; "issued" if there
		// is none.
		names string
	}{
		"the newest":                      {nil, serves("fake/v3"), []attestation.Version{"fake/v3"}, "issued"},
		"newer ones as well":              {nil, serves("fake/v5,fake/v4,fake/v3"), []attestation.Version{"fake/v3"}, "issued"},
		"an older one":                    {nil, serves("fake/v2"), []attestation.Version{"fake/v3", "fake/v2"}, "issued"},
		"the oldest":                      {nil, serves("fake/v1"), []attestation.Version{"fake/v3", "fake/v1"}, "issued"},
		"two older ones":                  {nil, serves("fake/v2,fake/v1"), []attestation.Version{"fake/v3", "fake/v2"}, "issued"},
		"newer ones, and an older one":    {nil, serves("fake/v9,fake/v1"), []attestation.Version{"fake/v3", "fake/v1"}, "issued"},
		"newer ones only":                 {nil, serves("fake/v5,fake/v4"), []attestation.Version{"fake/v3"}, `"fake/v5,fake/v4"`},
		"older than this plugin's":        {attestation.Versions{"fake/v3", "fake/v2"}, serves("fake/v1"), []attestation.Version{"fake/v3"}, `"fake/v1"`},
		"another provider's":              {nil, serves("real/v2,real/v1"), []attestation.Version{"fake/v3"}, `"real/v2,real/v1"`},
		"one that it denies":              {nil, inTurn("fake/v3"), []attestation.Version{"fake/v3"}, `"fake/v3"`},
		"one and the other":               {nil, inTurn("fake/v2", "fake/v3"), []attestation.Version{"fake/v3", "fake/v2"}, `"fake/v3"`},
		"all, and denies all":             {nil, inTurn("fake/v3,fake/v2,fake/v1"), []attestation.Version{"fake/v3", "fake/v2", "fake/v1"}, `"fake/v3,fake/v2,fake/v1"`},
		"more, and denies more":           {four, inTurn(four.String()), []attestation.Version{"fake/v4", "fake/v3", "fake/v2"}, `fake/v4,fake/v3,fake/v2,fake/v1`},
		"nothing that it says":            {nil, inTurn(""), []attestation.Version{"fake/v3"}, `""`},
		"one twice":                       {nil, inTurn("fake/v2,fake/v2"), []attestation.Version{"fake/v3"}, `"fake/v2,fake/v2"`},
		"in the wrong order":              {nil, inTurn("fake/v1,fake/v2"), []attestation.Version{"fake/v3"}, `"fake/v1,fake/v2"`},
		"with white space":                {nil, inTurn("fake/v2, fake/v1"), []attestation.Version{"fake/v3"}, `"fake/v2, fake/v1"`},
		"garbage":                         {nil, inTurn("\x1b[2J\nfake/v2\u202e"), []attestation.Version{"fake/v3"}, `"\\u001b[2J fake/v2\\u202e"`},
		"garbage without end":             {nil, inTurn(strings.Repeat("fake/v2,", 32<<10)), []attestation.Version{"fake/v3"}, `"fake/v2,fake/v2,`},
		"garbage that grows when quoted":  {nil, inTurn(strings.Repeat("\"\\", 128<<10)), []attestation.Version{"fake/v3"}, `\"\\\"\\`},
		"an older one, and then its mind": {nil, inTurn("fake/v2", "fake/v1", ""), []attestation.Version{"fake/v3", "fake/v2", "fake/v1"}, `""`},
		"an older one, and then deletes it": {nil, func(n int, o *csrObject) {
			map[bool]func(int, *csrObject){true: denyVersion("fake/v2"), false: remove}[n == 1](n, o)
		}, []attestation.Version{"fake/v3", "fake/v2", "fake/v2"}, "deleted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if c.accepts != nil {
				n.tpm.versions = c.accepts
			}
			n.api.hello = c.hello
			err := n.work()
			var hellos []attestation.Version
			for _, asked := range n.tpm.hellos {
				hellos = append(hellos, asked.Version)
			}
			if !slices.Equal(hellos, c.hellos) {
				t.Errorf("hellos %q, want %q", hellos, c.hellos)
			}
			last := c.hellos[len(c.hellos)-1]
			switch c.names {
			case "issued":
				if err != nil {
					t.Fatal(err)
				}
				n.wantFiled(len(c.hellos), 1)
				n.wantInstalled()
				if got := n.tpm.proofs[0].Version; got != last {
					t.Errorf("the proof is of %s", got)
				}
				return
			case "deleted":
				plugintest.MustFail(t, err, reason.RequestFailed)
				return
			}
			failure := plugintest.WantFailure(t, err, reason.RequestDenied)
			n.wantFiled(len(c.hellos), 0)
			n.wantState(reason.RequestDenied, reason.BackOffLater)
			accepts := n.tpm.versions.String()
			if !strings.Contains(failure.Error(), c.names) || !strings.Contains(failure.Error(), accepts) || !strings.Contains(failure.Error(), n.api.posts[len(n.api.posts)-1]) || failure.Hint == "" {
				t.Errorf("%v (%s)", failure, failure.Hint)
			}
			if n.pending() != nil {
				t.Error("a hello that is settled is still pending")
			}
		})
	}
}

// A hello that an older plugin filed is one of its version, and a worker that takes it up knows
// that this was tried.
func TestVersionIsNegotiatedForAHelloThatWasTakenUp(t *testing.T) {
	for name, c := range map[string]struct {
		served string
		hellos []attestation.Version // all that the second worker makes
	}{
		"a newer one":        {"fake/v3", []attestation.Version{"fake/v3"}},
		"another":            {"fake/v1", []attestation.Version{"fake/v1"}},
		"that very one":      {"fake/v2", nil},
		"none that it knows": {"fake/v4", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.tpm.versions = attestation.Versions{"fake/v2"}
			n.api.hello = func(int, *csrObject) {}
			plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
			n.tpm = newChallenger()
			n.use(n.tpm)
			n.api.mu.Lock()
			denyVersion(c.served)(1, n.api.filed[0])
			n.api.hello = challenge
			n.api.mu.Unlock()
			err := n.work()
			var hellos []attestation.Version
			for _, asked := range n.tpm.hellos {
				hellos = append(hellos, asked.Version)
			}
			if !slices.Equal(hellos, c.hellos) {
				t.Errorf("hellos %q, want %q", hellos, c.hellos)
			}
			if c.hellos == nil {
				plugintest.MustFail(t, err, reason.RequestDenied)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// What a provider says of its device decides on the exit code. While it proves, the hello and its
// challenge stay good for the next try.
func TestProvidersErrors(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		want  reason.Reason
		hint  string
		stale bool // in the second round: a new hello is worth it
	}{
		"no device":                 {&provider.Error{Class: provider.NoDevice, Hint: "switch it on", Err: errors.New("broken thing")}, reason.TPMAbsent, "switch it on", false},
		"the device failed":         {&provider.Error{Class: provider.DeviceFailed, Hint: "try selftest", Err: errors.New("broken thing")}, reason.TPMError, "try selftest", false},
		"the device failed, deeper": {fmt.Errorf("prove: %w", &provider.Error{Class: provider.DeviceFailed, Hint: "try selftest", Err: errors.New("broken thing")}), reason.TPMError, "try selftest", false},
		"its directory is shared":   {&provider.Error{Class: provider.DirectoryRefused, Hint: "chmod it", Err: errors.New("broken thing")}, reason.DirectoryRefused, "chmod it", false},
		"its directory is full":     {&provider.Error{Class: provider.DirectoryNotWritable, Hint: "free space", Err: errors.New("broken thing")}, reason.DirectoryNotWritable, "free space", false},
		"without a hint":            {&provider.Error{Class: provider.DeviceFailed, Err: errors.New("broken thing")}, reason.TPMError, "", false},
		"of no class":               {&provider.Error{Hint: "guess", Err: errors.New("broken thing")}, reason.AttestationFailed, "guess", false},
		"of a class to come":        {&provider.Error{Class: 99, Err: errors.New("broken thing")}, reason.AttestationFailed, "", false},
		"any other":                 {errors.New("broken thing"), reason.AttestationFailed, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check := func(n *testNode) {
				t.Helper()
				failure := plugintest.WantFailure(t, n.work(), c.want)
				state := n.wantState(c.want, reason.BackOffSoon)
				if failure.Hint != c.hint || state.Last.Hint != c.hint || !strings.Contains(failure.Error(), "broken thing") || !strings.Contains(failure.Error(), "fake") || !errors.Is(failure, c.err) {
					t.Errorf("%v (%s)", failure, failure.Hint)
				}
			}
			t.Run("hello", func(t *testing.T) {
				n := newNode(t)
				n.tpm.hello = func(context.Context, provider.Request) ([]byte, string, error) { return nil, "new", c.err }
				check(n)
				if n.pending() != nil || len(n.api.posts) > 0 {
					t.Errorf("something was filed: %q", n.api.posts)
				}
			})
			t.Run("proof", func(t *testing.T) {
				n := newNode(t)
				works := n.tpm.evidence
				n.tpm.evidence = func(context.Context, provider.Request) ([]byte, error) { return nil, c.err }
				check(n)
				left := n.pending()
				if left == nil || len(left.Requests) != 1 || left.Last().UID != "uid" || left.Last().Name != n.api.posts[0] {
					t.Fatalf("pending %+v", left)
				}
				n.time = n.time.Add(time.Minute)
				check(n) // as often as it takes
				n.time = n.time.Add(time.Minute)
				n.tpm.evidence = works
				if err := n.work(); err != nil {
					t.Fatal(err)
				}
				n.wantFiled(1, 1)
				n.wantInstalled()
				if len(n.tpm.hellos) != 1 || len(n.tpm.proofs) != 3 {
					t.Fatalf("asked for %d hellos and %d proofs", len(n.tpm.hellos), len(n.tpm.proofs))
				}
				names := map[string]bool{}
				for i, asked := range n.tpm.proofs {
					names[asked.Name] = true
					if string(asked.Challenge.Answer) != "challenge 1" || asked.Challenge.HelloUID != "uid" || asked.Challenge.HelloName != left.Last().Name || asked.Challenge.Fresh != (i == 0) {
						t.Errorf("proof %d is for %+v", i, asked.Challenge)
					}
				}
				// A name whose evidence was never seen is as good as a new one;
				// what counts is that none is used for two proofs.
				if len(names) != 3 {
					t.Errorf("names %v", slices.Sorted(maps.Keys(names)))
				}
			})
		})
	}
}

// What cannot be filed is not, and costs no second hello.
func TestDocumentsThatCannotBeFiled(t *testing.T) {
	t.Parallel()
	for name, document := range map[string][]byte{"empty": nil, "too large": bytes.Repeat([]byte("x"), attestation.MaxRequestSize)} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			hello, evidence := n.tpm.hello, n.tpm.evidence
			n.tpm.hello = func(context.Context, provider.Request) ([]byte, string, error) { return document, "", nil }
			plugintest.MustFail(t, n.work(), reason.AttestationFailed)
			n.wantFiled(0, 0)
			n.later()
			n.tpm.hello = hello
			n.tpm.evidence = func(context.Context, provider.Request) ([]byte, error) { return document, nil }
			plugintest.MustFail(t, n.work(), reason.AttestationFailed)
			n.wantFiled(1, 0)
			n.later()
			n.tpm.evidence = evidence
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(1, 1)
		})
	}
}

// A provider that hangs ends with the worker, and the next worker begins where this one was stuck.
func TestProviderThatHangs(t *testing.T) {
	for _, round := range []string{"hello", "proof"} {
		t.Run(round, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			hello, evidence := n.tpm.hello, n.tpm.evidence
			began := make(chan struct{}, 1)
			n.tpm.hello = func(ctx context.Context, r provider.Request) ([]byte, string, error) {
				if round == "hello" {
					began <- struct{}{}
					<-ctx.Done()
					return nil, "", ctx.Err()
				}
				return hello(ctx, r)
			}
			n.tpm.evidence = func(ctx context.Context, _ provider.Request) ([]byte, error) {
				began <- struct{}{}
				<-ctx.Done()
				return nil, &provider.Error{Class: provider.DeviceFailed, Err: ctx.Err()}
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- n.Work(ctx) }()
			<-began
			cancel()
			select {
			case err := <-ended:
				plugintest.MustFail(t, err, map[string]reason.Reason{"hello": reason.AttestationFailed, "proof": reason.TPMError}[round])
			case <-time.After(time.Minute):
				t.Fatal("the worker hangs with it")
			}
			n.wantState(map[string]reason.Reason{"hello": reason.AttestationFailed, "proof": reason.TPMError}[round], reason.BackOffSoon)
			n.wantFiled(map[string]int{"hello": 0, "proof": 1}[round], 0)
			n.later()
			n.tpm.hello, n.tpm.evidence = hello, evidence
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(1, 1)
			n.wantInstalled()
		})
	}
}

// The deadline that counts is the worker's own: nobody ends its context for it.
func TestDeadlineReachesTheProvider(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.Deadline = 4 * time.Second
	n.tpm.evidence = func(ctx context.Context, _ provider.Request) ([]byte, error) {
		select {
		case <-ctx.Done():
		case <-time.After(time.Minute):
			t.Error("the deadline passed unnoticed")
		}
		return nil, ctx.Err()
	}
	plugintest.MustFail(t, n.work(), reason.AttestationFailed)
	if pending := n.pending(); pending == nil || len(pending.Requests) != 1 {
		t.Errorf("pending %+v", pending)
	}
}

// A worker that ends while the controller takes its time has failed in nothing: the next one waits
// on.
func TestWaitingForTheController(t *testing.T) {
	for name, c := range map[string]struct {
		change func(n *testNode)
		says   string
		proofs int
	}{
		"for a challenge":   {func(n *testNode) { n.api.hello = func(int, *csrObject) {} }, "has not sent a challenge yet", 0},
		"for a certificate": {func(n *testNode) { n.api.proof = func(int, *csrObject) {} }, "has not issued a certificate yet", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			c.change(n)
			for range 3 {
				failure := plugintest.WantFailure(t, n.work(), reason.WaitingForSigner)
				last := n.api.filed[len(n.api.filed)-1]
				if !strings.Contains(failure.Error(), c.says) || !strings.Contains(failure.Error(), last.Name) || !strings.Contains(failure.Error(), last.Spec.SignerName) || !strings.Contains(failure.Hint, last.Name) {
					t.Errorf("%v (%s)", failure, failure.Hint)
				}
				if state := n.wantState(reason.WaitingForSigner, reason.BackOffNone); state.Failures != 0 {
					t.Errorf("%d failures", state.Failures)
				}
				n.wantFiled(1, c.proofs)
				if pending := n.pending(); pending == nil || pending.Last().UID != string(last.UID) || pending.Last().Name != last.Name {
					t.Errorf("pending %+v", pending)
				}
			}
			n.api.mu.Lock()
			n.api.hello, n.api.proof = challenge, n.issue
			clear(n.api.decided)
			n.api.mu.Unlock()
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(1, 1)
			n.wantInstalled()
		})
	}
}

// A machine's record pins its EK: what the provider chose is kept if and only if a certificate came
// of it.
func TestProviderGetsBackWhatLedToTheLastCertificate(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	remember := ""
	document := n.tpm.hello
	n.tpm.hello = func(ctx context.Context, r provider.Request) ([]byte, string, error) {
		data, _, err := document(ctx, r)
		return data, remember, err
	}
	evidence := n.tpm.evidence
	broken := func(context.Context, provider.Request) ([]byte, error) { return nil, errors.New("broken") }
	for i, c := range []struct {
		name     string
		remember string // what this hello returns
		change   func()
		failure  reason.Reason
		got      string // what this hello gets back
		kept     string // what is kept after it
	}{
		{"the first is denied", "a", func() { n.api.hello = deny("Policy") }, reason.RequestDenied, "", ""},
		{"its proof is denied", "b", func() { n.api.proof = deny("Policy") }, reason.RequestDenied, "", ""},
		{"it is of no use", "c", func() { n.api.proof = func(_ int, o *csrObject) { o.Status.Certificate = plugintest.NewCA(t) } }, reason.CertificateUnusable, "", ""},
		{"it is installed", "d", nil, "", "", "d"},
		{"the next is denied", "e", func() { n.api.proof = deny("Policy") }, reason.RequestDenied, "d", "d"},
		{"the provider fails", "f", func() { n.tpm.evidence = broken }, reason.AttestationFailed, "d", "d"},
		{"the next takes it up", "g", nil, "", "", "f"}, // the hello that is pending had returned f
		{"another is installed", "h", nil, "", "f", "h"},
		{"all are deleted", "i", func() { n.api.hello = remove }, reason.RequestFailed, "h", "h"},
		{"none is needed any more", "", nil, "", "h", ""},
	} {
		n.api.mu.Lock()
		n.api.hello, n.api.proof, n.tpm.evidence = challenge, n.issue, evidence
		if c.change != nil {
			c.change()
		}
		n.api.mu.Unlock()
		remember, n.tpm.hellos = c.remember, nil
		err := n.work()
		if c.failure != "" {
			plugintest.MustFail(t, err, c.failure)
		} else if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		for _, asked := range n.tpm.hellos {
			if asked.Remembered != c.got {
				t.Errorf("%d, %s: it got back %q, want %q", i, c.name, asked.Remembered, c.got)
			}
		}
		if state, err := n.Node.Dir().State(); err != nil || state.Remembered["fake"] != c.kept {
			t.Errorf("%d, %s: %q is kept, want %q, %v", i, c.name, state.Remembered["fake"], c.kept, err)
		}
		if c.name == "the next takes it up" && len(n.tpm.hellos) > 0 {
			t.Errorf("%s: another hello was made", c.name)
		}
		n.later()
	}
	// A worker that died is noted by the next run.
	state, err := n.Node.Dir().State()
	if err != nil {
		t.Fatal(err)
	}
	state.Remembered = map[string]string{"fake": "z"}
	plugintest.WriteState(t, n.Node.Dir(), state)
	lock, err := n.Node.Dir().TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := errors.Join(lock.NameWorker(plugintest.Asker), n.RecordDeath(lock, nodestate.ReadState(n.Node.Dir()))); err != nil {
		t.Fatal(err)
	}
	if state := n.wantState(reason.WorkerUnavailable, reason.BackOffNone); state.Remembered["fake"] != "z" {
		t.Errorf("%q is kept", state.Remembered)
	}
}

// The controller compares who asked: a hello that was filed with another credential is of no use.
func TestBothRoundsGoUnderOneCredential(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(*testing.T, *testNode)
		hellos int
	}{
		{"the same", func(*testing.T, *testNode) {}, 1},
		{"another token", func(t *testing.T, n *testNode) {
			data, err := os.ReadFile(n.Node.Access.Bootstrap)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(n.Node.Access.Bootstrap, bytes.Replace(data, []byte("token: abc"), []byte("token: abd"), 1), 0o600); err != nil {
				t.Fatal(err)
			}
		}, 2},
		{"a version that is not accepted any more", func(_ *testing.T, n *testNode) { n.tpm.versions = attestation.Versions{"fake/v2"} }, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			n.api.hello = func(int, *csrObject) {}
			plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
			c.change(t, n)
			n.api.mu.Lock()
			n.api.hello, n.api.decided = challenge, map[string]bool{}
			n.api.mu.Unlock()
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(c.hellos, 1)
			n.wantInstalled()
		})
	}
}

// A proof that is refused outright leaves the hello as good as it was: no object is filed again
// each time.
func TestProofThatIsRefusedKeepsTheHello(t *testing.T) {
	n := newNode(t)
	n.api.refuse = func(n int) bool { return n > 1 }
	for range 3 {
		plugintest.MustFail(t, n.work(), reason.APIRefused)
		if pending := n.pending(); len(pending.Requests) != 1 || !pending.Last().Hello {
			t.Fatalf("pending: %d requests", len(pending.Requests))
		}
		n.time = n.time.Add(time.Minute)
	}
	n.api.refuse = nil
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	n.wantFiled(1, 1)
	n.wantInstalled()
}

// fakeChooser is a challenger whose settings allow one choice.
type fakeChooser struct {
	*fakeChallenger
	allowed string
}

func (c fakeChooser) Allows(remember string) bool { return remember == c.allowed }

// A request under way with a choice that the operator has ruled out since is given up. One with an
// allowed choice goes on.
func TestRequestWithARuledOutChoiceIsGivenUp(t *testing.T) {
	t.Parallel()
	for allowed, hellos := range map[string]int{"ek": 0, "other": 1} {
		n := newNode(t)
		works := n.tpm.evidence
		n.tpm.evidence = func(context.Context, provider.Request) ([]byte, error) { return nil, errors.New("broken") }
		plugintest.MustFail(t, n.work(), reason.AttestationFailed)
		left := n.pending()
		if left == nil || left.Remember != "ek" {
			t.Fatalf("pending %+v", left)
		}
		n.later()
		n.tpm.evidence, n.tpm.hellos = works, nil
		n.use(fakeChooser{n.tpm, allowed})
		if err := n.work(); err != nil {
			t.Fatal(err)
		}
		if len(n.tpm.hellos) != hellos {
			t.Errorf("%s is allowed: %d other hellos", allowed, len(n.tpm.hellos))
		}
	}
}

// What the provider wants back is not lost with a worker that installed the certificate and came no
// further. The next worker there is comes when the certificate is due.
func TestKilledAfterInstallingStillRemembers(t *testing.T) {
	t.Parallel()
	for _, step := range []Step{stepRecord, stepForget} {
		var n *testNode
		for nth := 0; ; nth++ {
			n = newNode(t)
			killed, err := n.workUntil(nth)
			if err != nil || killed == "" {
				t.Fatalf("never came to %s: %v", step, err)
			}
			if killed == step {
				break
			}
		}
		n.later()
		n.tpm.hellos = nil
		n.api.hello = deny("Policy")
		plugintest.MustFail(t, n.work(), reason.RequestDenied)
		if got := n.tpm.hellos; len(got) != 1 || got[0].Remembered != "ek" {
			t.Errorf("killed before %s: the next hello got back %+v", step, got)
		}
		if state, err := n.Node.Dir().State(); err != nil || state.Remembered["fake"] != "ek" {
			t.Errorf("killed before %s: %q is kept, %v", step, state.Remembered, err)
		}
	}
}

// A state file with a field of another release still holds what the provider wants back, and that
// of another provider's.
func TestStateOfAnotherReleaseStillRemembers(t *testing.T) {
	n := newNode(t)
	plugintest.Put(t, n.Node.Dir(), cache.StateFile, []byte(`{"version":1,"remembered":{"fake":"ek","other":"x"},"added":true}`), 0o600)
	n.tpm.hello = func(context.Context, provider.Request) ([]byte, string, error) {
		return []byte(`{"version":"fake/v3"}`), "new", nil
	}
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	if got := n.tpm.hellos[0].Remembered; got != "ek" {
		t.Errorf("the hello got back %q", got)
	}
	if state, err := n.Node.Dir().State(); err != nil || state.Remembered["fake"] != "new" || state.Remembered["other"] != "x" {
		t.Errorf("%q is kept, %v", state.Remembered, err)
	}
}

// A worker that gave a hello up and then fails has left an object behind. For any cause of the
// failure, the next worker waits longer each time.
func TestNoHellosWithoutEnd(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(*testNode){
		"the device fails": func(n *testNode) {
			n.tpm.evidence = func(_ context.Context, r provider.Request) ([]byte, error) {
				if !r.Challenge.Fresh { // as by a clock that is ahead
					return nil, &provider.Error{Class: provider.Stale, Err: errors.New("expired")}
				}
				return nil, &provider.Error{Class: provider.DeviceFailed, Err: errors.New("TPM2_Quote: no")}
			}
		},
		"the proof is refused": func(n *testNode) {
			evidence := n.tpm.evidence
			n.tpm.evidence = func(ctx context.Context, r provider.Request) ([]byte, error) {
				if !r.Challenge.Fresh {
					return nil, &provider.Error{Class: provider.Stale, Err: errors.New("expired")}
				}
				return evidence(ctx, r)
			}
			refused := map[int]bool{}
			n.api.refuse = func(nth int) bool {
				// Posts that are refused do not count, so each number is a hello's
				// or a proof's once.
				last := n.pendingFile()
				refused[nth] = last != nil && !last.Last().Hello
				return refused[nth]
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			then(n)
			start := n.time
			for range 30 {
				if err := n.work(); err == nil {
					t.Fatal("it came to something")
				}
				if state, err := n.Node.Dir().State(); err == nil && state.NextAttempt.After(n.time) {
					n.time = state.NextAttempt
				}
			}
			hellos, _ := n.api.split()
			if took := n.time.Sub(start); len(hellos) > 31 || took < 3*time.Hour {
				t.Errorf("%d hellos in %s", len(hellos), took)
			}
		})
	}
}

// logged is a log that goroutines of client-go may still write to.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// context returns one whose logger writes all that an operator has a use for, and more, to l.
func (l *logged) context(t testing.TB) context.Context {
	t.Helper()
	return klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(l), textlogger.Verbosity(5))))
}

// Other clients may annotate a request. What they wrote reaches the provider as it is, and people
// only as one short line.
func TestAnswerOfAnySortIsHandedOnAndNeverShown(t *testing.T) {
	for name, answer := range map[string]string{
		"control characters": "\x1b]0;owned\a\x1b[2J\r\nlevel=error\u2028\u202e\x00",
		"256 KiB":            strings.Repeat("A", 256<<10),
		"not JSON":           "{",
		"white space":        " ",
		"format verbs":       "%s%n%!d(MISSING)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.api.hello = func(_ int, o *csrObject) { annotate(o, attestation.AnnotationChallenge, answer) }
			n.tpm.evidence = func(_ context.Context, r provider.Request) ([]byte, error) {
				if string(r.Challenge.Answer) != answer {
					t.Errorf("the provider got %.40q of %d bytes", r.Challenge.Answer, len(r.Challenge.Answer))
				}
				return nil, &provider.Error{Class: provider.Stale, Err: errors.New("cannot be read")}
			}
			log := &logged{}
			failure := plugintest.WantFailure(t, n.Work(log.context(t)), reason.ChallengeUnanswered)
			n.wantState(reason.ChallengeUnanswered, reason.BackOffLater)
			shown := failure.Error() + failure.Hint + log.String()
			if trimmed := strings.TrimSpace(answer); len(trimmed) > 1 && strings.Contains(shown, trimmed[:min(len(trimmed), 100)]) || len(log.String()) > 8<<10 {
				t.Errorf("it is shown: %.2000s", shown)
			}
		})
	}
	// The text of a denial is shown, and of a hello's no less harmlessly than of a proof's.
	hostile := strings.Repeat("\x1b[2J\n\"\\%s\u202e", 20<<10)
	for name, change := range map[string]func(*testNode){
		"the hello's denial": func(n *testNode) { n.api.hello = deny(hostile) },
		"the proof's denial": func(n *testNode) { n.api.proof = deny(hostile) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			change(n)
			plugintest.MustFail(t, n.work(), reason.RequestDenied)
			n.wantState(reason.RequestDenied, reason.BackOffLater)
		})
	}
}

// Challenge, key, token and what the provider remembers must not be in a log, a state file or an
// error.
func TestNothingSecretIsShown(t *testing.T) {
	n := newNode(t)
	const secret, token, remembered = "c2VjcmV0LWNoYWxsZW5nZQ", "abc.hunter2hunter2", "remembered-handle"
	data, err := os.ReadFile(n.Node.Access.Bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	n.Node.Access.Bootstrap = plugintest.WriteFile(t, t.TempDir(), "c.conf", strings.ReplaceAll(string(data), "token: abc", "token: "+token))
	n.api.hello = func(_ int, o *csrObject) { annotate(o, attestation.AnnotationChallenge, secret) }
	evidence := n.tpm.evidence
	n.tpm.hello = func(context.Context, provider.Request) ([]byte, string, error) {
		return []byte("hello"), remembered, nil
	}
	n.tpm.evidence = func(ctx context.Context, r provider.Request) ([]byte, error) {
		switch len(n.tpm.proofs) {
		case 1:
			return nil, &provider.Error{Class: provider.Stale, Err: errors.New("cannot be read")}
		case 2:
			return nil, &provider.Error{Class: provider.DeviceFailed, Err: errors.New("no answer")}
		}
		return evidence(ctx, r)
	}
	log := &logged{}
	ctx := log.context(t)
	failure := plugintest.WantFailure(t, n.Work(ctx), reason.TPMError)
	left := n.pending()
	pendingFile, err := os.ReadFile(n.Node.Dir().File(cache.PendingFile))
	if err != nil {
		t.Fatal(err)
	}
	n.time = n.time.Add(time.Minute)
	if err := n.Work(ctx); err != nil {
		t.Fatal(err)
	}
	stateFile, err := os.ReadFile(n.Node.Dir().File(cache.StateFile))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), "another one may help") || !strings.Contains(log.String(), "installed") {
		t.Fatalf("the log has no trace of it all: %s", log.String())
	}
	key := strings.Split(string(left.Key), "\n")[1]
	for what, text := range map[string]string{"log": log.String(), "error": failure.Error() + failure.Hint, "state": string(stateFile), "pending": string(pendingFile)} {
		for _, private := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret)), token, key, base64.StdEncoding.EncodeToString(left.Key), remembered} {
			// The pending file is where the key is, and the two files are where the
			// provider's own is kept.
			if strings.Contains(text, private) && (what != "pending" || private != base64.StdEncoding.EncodeToString(left.Key) && private != remembered) && (what != "state" || private != remembered) {
				t.Errorf("%s holds %q:\n%s", what, private, text)
			}
		}
	}
}

// A plugin that has just been upgraded finds what the last one left: a request without a hello is
// seen through as it is.
func TestPendingFileOfTheEarlierFormat(t *testing.T) {
	t.Parallel()
	for name, uid := range map[string]string{"posted": "uid", "not posted": ""} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			challenged := n.Provider
			n.use(plugintest.Provider{CanRenew: true, Signer: "example.com/signer"})
			n.api.proof = func(int, *csrObject) {}
			plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
			old := n.pending()
			if uid == "" {
				n.api.objects, n.api.filed, n.api.posts = nil, nil, nil
				clear(n.api.decided)
			}
			type requestV1 struct {
				Name    string    `json:"name"`
				UID     string    `json:"uid,omitempty"`
				Request []byte    `json:"request"`
				FiledAt time.Time `json:"filed"`
			}
			data, err := json.Marshal(struct {
				Version           int          `json:"version"`
				Provider          string       `json:"provider"`
				NodeName          string       `json:"nodeName"`
				ProviderID        string       `json:"providerID,omitempty"`
				SignerName        string       `json:"signerName"`
				ExpirationSeconds *int32       `json:"expirationSeconds,omitempty"`
				Cluster           cache.Origin `json:"cluster"`
				Key               []byte       `json:"key"`
				Requests          []requestV1  `json:"requests"`
			}{1, old.Provider, old.NodeName, old.ProviderID, old.SignerName, old.ExpirationSeconds, old.Cluster, old.Key,
				[]requestV1{{old.Last().Name, uid, old.Last().Request, old.Last().FiledAt}}})
			if err != nil {
				t.Fatal(err)
			}
			plugintest.Put(t, n.Node.Dir(), cache.PendingFile, data, 0o600)
			n.use(challenged)
			n.api.mu.Lock()
			n.api.proof = n.issue
			clear(n.api.decided)
			n.api.mu.Unlock()
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(0, 1)
			n.wantInstalled()
			if n.api.filed[0].Name != old.Last().Name || len(n.tpm.hellos)+len(n.tpm.proofs) > 0 {
				t.Errorf("filed %s, want %s; asked for %d hellos and %d proofs", n.api.filed[0].Name, old.Last().Name, len(n.tpm.hellos), len(n.tpm.proofs))
			}
			// From here on there are hellos.
			n.later()
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(1, 2)
		})
	}
	// Denied for what ends a challenge, it had none: nothing would be better the next time.
	t.Run("denied as expired", func(t *testing.T) {
		n := newNode(t)
		n.use(plugintest.Provider{CanRenew: true, Signer: "example.com/signer"})
		n.api.proof = deny(attestation.ReasonExpired)
		plugintest.MustFail(t, n.work(), reason.RequestDenied)
		n.wantFiled(0, 1)
	})
}

// A dry run shows the hello that a worker would file, and leaves no trace.
func TestDryRunShowsTheHello(t *testing.T) {
	n := newNode(t)
	plugintest.WriteState(t, n.Node.Dir(), &cache.State{Remembered: map[string]string{"fake": "ek", "other": "x"}})
	before := plugintest.Snapshot(t, n.Node.Dir().Path())
	report := n.DryRun(t.Context(), time.Second)
	if report.Failure != nil {
		t.Fatal(report.Failure)
	}
	if !strings.HasPrefix(report.Verdict, "a run would succeed: ") || !strings.Contains(report.Verdict, "example.com/signer") {
		t.Errorf("verdict: %s", report.Verdict)
	}
	if report.Request.Spec.SignerName != attestation.HelloSignerName || report.Check != "accepted" || report.Request.Name != n.tpm.hellos[0].Name {
		t.Errorf("%+v", report)
	}
	if got := n.tpm.hellos; len(got) != 1 || got[0].Remembered != "ek" || got[0].Version != "fake/v3" || got[0].SignerName != "example.com/signer" || len(n.tpm.proofs) > 0 {
		t.Errorf("asked for %+v", got)
	}
	if after := plugintest.Snapshot(t, n.Node.Dir().Path()); after != before {
		t.Errorf("it wrote:\n%s\nbefore:\n%s", after, before)
	}
}

// An overloaded API server may refuse any call. The worker sends the call once, and ends. The next
// worker begins no sooner than the server asked for, and goes on with the same hello.
func TestOverloadEndsTheWorkerAndLosesNothing(t *testing.T) {
	calls := 0
	{
		n := newNode(t)
		if err := n.work(); err != nil {
			t.Fatal(err)
		}
		calls = n.api.calls
	}
	if calls != 4 { // create, watch, create, watch
		t.Fatalf("%d calls", calls)
	}
	for nth := 1; nth <= calls; nth++ {
		t.Run(fmt.Sprint("call ", nth), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.api.shed = func(i int) bool { return i == nth || i == nth+1 }
			for range 2 { // the second worker's first call is refused, too
				failure := plugintest.WantFailure(t, n.work(), reason.APIOverloaded)
				if !strings.Contains(failure.Error(), "Too many requests") && !strings.Contains(failure.Error(), "too many requests") || !strings.Contains(failure.Error(), "Retry-After: 40s") {
					t.Errorf("it does not say what the server answered: %v", failure)
				}
				if state := n.wantState(reason.APIOverloaded, reason.BackOffBusy); state.NextAttempt.Before(n.time.Add(40*time.Second)) || state.NextAttempt.After(n.time.Add(time.Minute)) {
					t.Errorf("now %s, next attempt %s", n.time, state.NextAttempt)
				} else {
					n.time = state.NextAttempt
				}
			}
			if n.api.calls != nth+1 {
				t.Errorf("%d calls by two workers, want %d", n.api.calls, nth+1)
			}
			if err := n.work(); err != nil {
				t.Fatal(err)
			}
			n.wantFiled(1, 1)
			n.wantInstalled()
		})
	}
}

// newDeniedNode is a node whose certificate is due, and whose first hello is denied for its
// credential. It has a bootstrap credential.
func newDeniedNode(t *testing.T) *testNode {
	t.Helper()
	n := newNode(t)
	n.api.hello = func(i int, o *csrObject) {
		if i == 1 {
			deny(attestation.ReasonUnknownCredential)(i, o)
		} else {
			challenge(i, o)
		}
	}
	plugintest.InstallPair(t, n.Node.Dir(), plugintest.NewPair(t, plugintest.DueSoon))
	n.Node.Access.Asked = execOf(t, n)
	return n
}

// A worker whose node's own certificate was denied waits with the bootstrap credential's request
// for the signer, and is killed. The next one goes on with that request, and asks for no other.
func TestBootstrapRequestAfterADenialIsTakenUp(t *testing.T) {
	t.Parallel()
	n := newDeniedNode(t)
	n.api.proof = func(int, *csrObject) {} // the signer is late
	plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
	n.wantFiled(2, 1)
	for range 2 {
		plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
	}
	n.wantFiled(2, 1)
	n.api.mu.Lock()
	_, proofs := n.api.split()
	n.issue(1, proofs[0])
	n.api.mu.Unlock()
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	n.wantFiled(2, 1)
	n.wantInstalled()
}

// As long as the proof is to be filed, it needs the hello's credential.
func TestHelloOfTheBootstrapCredentialIsTakenUp(t *testing.T) {
	t.Parallel()
	n := newDeniedNode(t)
	denies := n.api.hello
	n.api.hello = func(i int, o *csrObject) {
		if i == 1 { // the controller is late with the other
			denies(i, o)
		}
	}
	plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
	n.wantFiled(2, 0)
	n.api.mu.Lock()
	hellos, _ := n.api.split()
	challenge(2, hellos[1])
	n.api.mu.Unlock()
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	n.wantFiled(2, 1)
	n.wantInstalled()
}

// execOf is client-go's question of the cluster that the bootstrap kubeconfig names.
func execOf(t *testing.T, n *testNode) *cache.Origin {
	t.Helper()
	to, err := n.Node.Access.BootstrapAccess()
	if err != nil {
		t.Fatal(err)
	}
	return &cache.Origin{Server: to.Cluster.Server, CertificateAuthorityData: to.Cluster.CertificateAuthorityData}
}

// A clock that is evidently wrong takes no certificate away.
func TestCertificateThatIsEarly(t *testing.T) {
	t.Parallel()
	early := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = plugintest.Noon.Add(3*time.Hour), plugintest.Noon.Add(4*time.Hour)
	}
	for name, c := range map[string]struct {
		held  func(*x509.Certificate) // nil: there is none
		built time.Time
		taken bool
	}{
		"the first":               {nil, time.Time{}, true},
		"after one that is valid": {plugintest.DueSoon, plugintest.Noon.Add(-time.Hour), false},
		"after one that is early, too": {func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = plugintest.Noon.Add(time.Hour), plugintest.Noon.Add(2*time.Hour)
		}, time.Time{}, true},
		"the clock is before the build":         {plugintest.DueSoon, plugintest.Noon.Add(time.Hour), true},
		"the clock is a second after the build": {plugintest.DueSoon, plugintest.Noon.Add(-time.Second), false},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.Built = c.built
			n.api.proof = func(_ int, o *csrObject) {
				o.Status.Certificate = plugintest.Sign(t, plugintest.PKCS10Of(t, o.Spec.Request), early)
			}
			var held *cache.Pair
			if c.held != nil {
				held = plugintest.NewPair(t, c.held)
				plugintest.InstallPair(t, n.Node.Dir(), held)
				rejectedNote(n.Enroller, held) // so that it is to be replaced
			}
			err := n.work()
			s := n.Node.Load()
			if !c.taken {
				failure := plugintest.WantFailure(t, err, reason.ClockWrong)
				if !strings.Contains(failure.Error(), "2026-11-20T15:00:00Z") || !strings.Contains(failure.Error(), "2026-11-20T12:00:00Z") {
					t.Errorf("it does not name both times: %v", failure)
				}
				if s.Pair == nil || s.Pair.Fingerprint() != held.Fingerprint() {
					t.Error("the certificate that was held is gone")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			n.wantInstalled()
			if s.Remark == nil || !strings.Contains(s.Remark.Error(), "2026-11-20T15:00:00Z") || !strings.Contains(s.Remark.Error(), "2026-11-20T12:00:00Z") {
				t.Errorf("remark %v", s.Remark)
			}
		})
	}
}

// A certificate that has ended, and nothing to get another with: it may be the clock that is wrong.
func TestEndedCertificateNamesBothTimes(t *testing.T) {
	n := newNode(t)
	plugintest.InstallPair(t, n.Node.Dir(), plugintest.NewPair(t, func(c *x509.Certificate) { c.NotAfter = plugintest.Noon.Add(-time.Hour) }))
	n.Node.Access.Bootstrap += ".none"
	failure := plugintest.WantFailure(t, n.work(), reason.NoBootstrap)
	for _, says := range []string{"expired at 2026-11-20T11:00:00Z", "clock says 2026-11-20T12:00:00Z", "no bootstrap kubeconfig"} {
		if !strings.Contains(failure.Error(), says) {
			t.Errorf("it does not say %q: %v", says, failure)
		}
	}
	if !strings.Contains(failure.Hint, "clock") || !strings.Contains(failure.Hint, "kubeadm token create") {
		t.Errorf("hint %q", failure.Hint)
	}
}

// An API server's certificate that has not begun blames the clock if that is evidently wrong.
func TestClockBeforeTheBuildIsBlamed(t *testing.T) {
	expired := reason.ClassifyAPIError(x509.CertificateInvalidError{Reason: x509.Expired}, "whose")
	for built, want := range map[time.Time]reason.Reason{plugintest.Noon.Add(time.Hour): reason.ClockWrong, plugintest.Noon: reason.APIUntrusted, {}: reason.APIUntrusted} {
		a := testEnroller(t)
		a.Built = built
		plugintest.MustFail(t, reason.BlameClock(expired, a.Node.Now(), a.Built), want)
		plugintest.MustFail(t, reason.BlameClock(reason.APIUntrusted.Failure("", x509.UnknownAuthorityError{}), a.Node.Now(), a.Built), reason.APIUntrusted)
	}
}

// The bootstrap credential's certificate is issued, and its token ends. The node's own certificate
// may read it all the same.
func TestIssuedCertificateOutlivesTheToken(t *testing.T) {
	t.Parallel()
	n := newDeniedNode(t)
	n.api.proof = func(int, *csrObject) {} // the signer is late
	plugintest.MustFail(t, n.work(), reason.WaitingForSigner)
	n.api.mu.Lock()
	_, proofs := n.api.split()
	n.issue(1, proofs[0])
	n.api.mu.Unlock()
	n.Node.Access.Bootstrap += ".gone"
	if err := n.work(); err != nil {
		t.Fatal(err)
	}
	n.wantFiled(2, 1)
	n.wantInstalled()
}
