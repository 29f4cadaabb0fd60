// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

const (
	namespace = "ns"
	// patience bounds waits. It is long, since machines that run tests are busy.
	patience = 2 * time.Minute
)

// world is a fake API server.
type world struct {
	client.WithWatch
	t *testing.T
	// isDown fails each call, and silent drops the events of watches.
	isDown, silent atomic.Bool
	reads          atomic.Int32
	mu             sync.Mutex
	log            []string
}

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	base := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithIndex(&v1alpha1.NodeAttestation{}, v1alpha1.FieldNodeName, func(o client.Object) []string { return []string{o.(*v1alpha1.NodeAttestation).Spec.NodeName} }).Build()
	w := &world{t: t}
	w.WithWatch = interceptor.NewClient(base, interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if w.isDown.Load() {
				return errors.New("the API server is down")
			}
			if o := (&client.ListOptions{}).ApplyOptions(options); o.FieldSelector != nil && strings.Contains(o.FieldSelector.String(), v1alpha1.FieldNodeName) {
				w.reads.Add(1)
			}
			return c.List(ctx, list, options...)
		},
		Watch: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) (watch.Interface, error) {
			if w.isDown.Load() {
				return nil, errors.New("the API server is down")
			}
			events, err := c.Watch(ctx, list, options...)
			if err != nil {
				return nil, err
			}
			return watch.Filter(events, func(e watch.Event) (watch.Event, bool) { return e, !w.silent.Load() }), nil
		},
	})
	return w
}

// IsWatchListSemanticsUnSupported has informers list, and then watch: the fake client sends no
// bookmarks.
func (*world) IsWatchListSemanticsUnSupported() bool { return true }

// start runs an authorizer with its state file in dir. stop ends it.
func (w *world) start(dir string, change func(*Config)) (a *Authorizer, stop func()) {
	w.t.Helper()
	c := Config{
		Namespace: namespace, StateFile: filepath.Join(dir, "state.json"), Strict: StrictOff,
		Connect: func() (client.WithWatch, error) { return w, nil },
		Log: funcr.New(func(_, line string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.log = append(w.log, line)
		}, funcr.Options{}),
	}
	if change != nil {
		change(&c)
	}
	a, err := New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() { a.Run(ctx) })
	stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	w.t.Cleanup(stop)
	return a, stop
}

func (w *world) logged(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Count(strings.Join(w.log, "\n"), text)
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	if err := w.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

func awaitLive(t *testing.T, a *Authorizer) {
	t.Helper()
	eventually(t, "the lists are read", a.isLive)
}

// denies reports whether a node's read is denied.
func denies(t *testing.T, a *Authorizer, node string, credentials ...int) bool {
	t.Helper()
	return deniesRequest(t, a, asks(node, "get /secrets apps/password", credentials...))
}

func deniesRequest(t *testing.T, a *Authorizer, r Request) bool {
	t.Helper()
	extra := map[string]authorizationv1.ExtraValue{}
	if len(r.Credentials) > 0 {
		extra[revocation.ExtraCredentialIDs] = r.Credentials
	}
	status := a.Authorize(t.Context(), authorizationv1.SubjectAccessReviewSpec{User: r.User, Groups: r.Groups, Extra: extra, ResourceAttributes: r.Resource})
	if status.Allowed || status.EvaluationError != "" || status.Denied != (status.Reason != "") {
		t.Errorf("%+v", status)
	}
	return status.Denied
}

func slice(number int32, certificates []v1alpha1.RevokedCertificate, current ...v1alpha1.CurrentCertificate) *v1alpha1.RevocationSlice {
	return &v1alpha1.RevocationSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("revoked-%02d", number)},
		Spec:       v1alpha1.RevocationSliceSpec{Cluster: "c", Number: number, Certificates: certificates, Current: current},
	}
}

// record is the record of a node with certificates that end in a week.
func record(node string, certificates ...int) *v1alpha1.NodeAttestation {
	r := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: node}, Spec: v1alpha1.NodeAttestationSpec{
		Cluster: "c", NodeName: node, EK: &v1alpha1.EndorsementKey{Fingerprint: "ek-" + node},
	}}
	for _, n := range certificates {
		r.Status.Certificates = append(r.Status.Certificates, v1alpha1.IssuedCertificate{SHA256: sum(n), NotAfter: metav1.NewTime(time.Now().Add(7 * 24 * time.Hour)), RequestUID: "u", Noted: true})
	}
	return r
}

// A revocation takes effect by the watch, and a node that attested again may work by its record,
// before a list has its new certificate.
func TestRevocationByTheWatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1))
	a, _ := w.start(t.TempDir(), nil)
	awaitLive(t, a)
	if denies(t, a, "a", 1) {
		t.Error("denied before")
	}
	w.create(slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	eventually(t, "the revoked certificate is denied", func() bool { return denies(t, a, "a", 1) })
	if !denies(t, a, "a", 2) || w.reads.Load() != 1 {
		t.Errorf("a certificate that no record names: %d live reads", w.reads.Load())
	}
	again := record("a", 1, 3)
	again.ResourceVersion = ""
	if err := errors.Join(w.Delete(t.Context(), record("a"))); err != nil {
		t.Fatal(err)
	}
	again.Status.Certificates[0].Revoked = true
	w.create(again)
	eventually(t, "the new certificate passes", func() bool { return !denies(t, a, "a", 3) })
	if !denies(t, a, "a", 1) {
		t.Error("the old certificate passes")
	}
	w.create(&v1alpha1.NodeSuspension{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "s"}, Spec: v1alpha1.NodeSuspensionSpec{EK: "ek-a"}})
	token := authorizationv1.SubjectAccessReviewSpec{User: "system:serviceaccount:a:b", Extra: map[string]authorizationv1.ExtraValue{revocation.ExtraNodeNames: {"a"}}}
	eventually(t, "a token of the suspended node is denied", func() bool { return a.Authorize(t.Context(), token).Reason == revocation.MessageSuspendedToken })
	if w.logged("denied") == 0 || w.logged(`"cause"="revoked"`) > 4 {
		t.Errorf("%d lines", w.logged("denied"))
	}
}

// A watch can be silent without an error for a while. One live read finds the certificate of a node
// that came back, and all requests with that certificate share the read.
func TestNodeComesBackWhileTheWatchIsSilent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1), slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, _ := w.start(t.TempDir(), nil)
	awaitLive(t, a)
	w.silent.Store(true)
	if err := w.Delete(t.Context(), record("a")); err != nil {
		t.Fatal(err)
	}
	again := record("a", 1, 2, 4)
	again.Status.Certificates[2].Revoked = true
	w.create(again)
	if !denies(t, a, "a", 4) {
		t.Error("a certificate that the record names as revoked passes")
	}
	var asking sync.WaitGroup
	for range 50 {
		asking.Go(func() {
			if denies(t, a, "a", 2) {
				t.Error("the node is locked out")
			}
			if !denies(t, a, "a", 1) {
				t.Error("the revoked certificate passes")
			}
		})
	}
	asking.Wait()
	if reads := w.reads.Load(); reads < 1 || reads > 3 {
		t.Errorf("%d live reads", reads)
	}
}

// After a restart without an API server, the lists of a day ago hold: a revoked certificate is
// denied, and a certificate that they do not know is not, since the node may have come back.
func TestRestartWithoutAPIServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWorld(t, record("a", 1), record("b", 5), slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, stop := w.start(dir, nil)
	awaitLive(t, a)
	eventually(t, "the state file", func() bool {
		_, err := os.Stat(a.StateFile)
		return err == nil
	})
	if a.age() != 0 {
		t.Errorf("age %s while it is live", a.age())
	}
	stop()
	w.isDown.Store(true)
	a, _ = w.start(dir, func(c *Config) {
		c.Strict = StrictOn
		c.Now = func() time.Time { return time.Now().Add(24 * time.Hour) }
	})
	if age := a.age(); age < 24*time.Hour || age > 25*time.Hour {
		t.Errorf("age %s", age)
	}
	for range 2 {
		if !denies(t, a, "a", 1) {
			t.Error("the revoked certificate passes")
		}
		if denies(t, a, "a", 2) || denies(t, a, "b", 5) || denies(t, a, "b", 6) || denies(t, a, "c", 7) {
			t.Error("a node that may have come back is locked out")
		}
		// then with a client, whose calls fail
		eventually(t, "a client", func() bool { return a.watches.Load() != nil })
	}
	w.isDown.Store(false)
	awaitLive(t, a)
	eventually(t, "the record is read again after an error", func() bool { return denies(t, a, "a", 2) })
	if !denies(t, a, "a", 2) || !denies(t, a, "c", 7) || denies(t, a, "b", 5) {
		t.Error("once the lists are read, records decide")
	}
}

// A connection can break after the lists were read. Then they may be old, too.
func TestBrokenWatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1), slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, _ := w.start(t.TempDir(), nil)
	awaitLive(t, a)
	w.isDown.Store(true)
	if !a.isLive() || denies(t, a, "a", 2) || !denies(t, a, "a", 1) {
		t.Error("a read fails before the watches are known to be broken: the node may have come back")
	}
	for _, one := range a.watches.Load().all() {
		one.isUp.Store(false) // as the next list or watch notes it
	}
	if denies(t, a, "a", 2) || !denies(t, a, "a", 1) || a.isLive() {
		t.Error("a broken watch")
	}
	for n := range 2 * readBurst { // then the limit is reached
		if denies(t, a, "a", 1000+n) {
			t.Fatal("the lists may be old")
		}
	}
	if w.logged("the lists may be old") != 1 {
		t.Errorf("%d lines", w.logged("the lists may be old"))
	}
}

// An invalid slice costs only its own certificates, and the lists count as old until it is valid.
func TestInvalidSlice(t *testing.T) {
	t.Parallel()
	var later atomic.Int64
	invalid := slice(2, []v1alpha1.RevokedCertificate{{NodeName: "A'", SHA256: sum(2)}})
	w := newWorld(t, slice(1, []v1alpha1.RevokedCertificate{revokedCertificate("a", 1)}))
	a, _ := w.start(t.TempDir(), func(c *Config) { c.Now = func() time.Time { return time.Now().Add(time.Duration(later.Load())) } })
	awaitLive(t, a)
	eventually(t, "the state file", func() bool { return a.upToDateAt.Load() != 0 })
	w.create(invalid)
	eventually(t, "the slice is skipped", func() bool { return !a.isLive() })
	w.create(slice(3, []v1alpha1.RevokedCertificate{revokedCertificate("c", 3)}))
	eventually(t, "a later slice", func() bool { return denies(t, a, "c", 3) })
	later.Store(int64(time.Hour))
	if !denies(t, a, "a", 1) || a.age() < 59*time.Minute || w.logged("a RevocationSlice is invalid") != 1 {
		t.Errorf("age %s, %v", a.age(), w.log)
	}
	if err := w.Delete(t.Context(), invalid); err != nil {
		t.Fatal(err)
	}
	awaitLive(t, a)
	if a.age() != 0 {
		t.Errorf("age %s", a.age())
	}
}

// More live reads than the limit are not made. Each node is denied meanwhile: the watches are live.
func TestReadsAreLimited(t *testing.T) {
	t.Parallel()
	w := newWorld(t, record("a", 1))
	a, _ := w.start(t.TempDir(), strict)
	awaitLive(t, a)
	began := time.Now()
	const asked = 3000
	for n := range asked {
		if !denies(t, a, fmt.Sprintf("invented-%d", n), 1000+n) {
			t.Fatal("passes")
		}
	}
	most := readBurst + readsPerSecond*int32(time.Since(began).Seconds()+1)
	if reads := w.reads.Load(); reads > most || reads == 0 {
		t.Errorf("%d live reads, %d at most", reads, most)
	}
	if denies(t, a, "a", 1) {
		t.Error("a recorded certificate needs no read")
	}
}

// While an API server hangs, a live read ends by itself.
func TestReadsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hanging := interceptor.NewClient(w.WithWatch, interceptor.Funcs{List: func(ctx context.Context, _ client.WithWatch, _ client.ObjectList, _ ...client.ListOption) error {
		<-ctx.Done()
		return ctx.Err()
	}})
	r := newRecordReader(hanging, &Config{Namespace: namespace})
	waiting, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	if _, err := r.isNamed(waiting, "a", []string{id(1)}); err == nil || waiting.Err() != nil {
		t.Errorf("it ended with %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.isNamed(ended, "b", nil); err == nil {
		t.Error("the question has ended")
	}
	<-r.shared("b", nil).done
}

// An API server waits for a live read, with time to spare, and not for a hung authorizer.
func TestAPIServerWaitsForReads(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile("../../../packaging/authorizer/authorization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(content), "\n    timeout: ")
	line, _, _ := strings.Cut(after, "\n")
	if timeout, err := time.ParseDuration(line); err != nil || timeout > 500*time.Millisecond || timeout-readTimeout < 200*time.Millisecond {
		t.Errorf("an API server waits %q, and a read takes up to %s (%v)", line, readTimeout, err)
	}
}

// By the reason of a denial, a node learns that it has to attest.
func TestReasonsTellTheNode(t *testing.T) {
	t.Parallel()
	for cause, message := range map[Cause]string{
		Revoked: attestation.MessageRevoked, Suspended: attestation.MessageSuspended, Unrecorded: attestation.MessageUnrecorded, SuspendedToken: revocation.MessageSuspendedToken, TooLong: messageTooLong,
	} {
		if cause.message() != message {
			t.Errorf("%s: %s", cause, cause.message())
		}
	}
}
