// SPDX-License-Identifier: Apache-2.0

package revocation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

const namespace = "ns"

// world is a fake cluster with one node. It notes the order of writes.
type world struct {
	client.WithWatch
	mu      sync.Mutex
	written []string
	// refuse refuses writes of a kind.
	refuse string
	// unlistable fails each list of requests.
	unlistable bool
	record     v1alpha1.NodeAttestation
	minor      string
	applied    []Application
	events     *events.FakeRecorder
	// mirrored is the reason of the last mirrored Event.
	mirrored atomic.Pointer[string]
}

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	w := &world{minor: "36", events: events.NewFakeRecorder(100), record: record("a", issued("old", time.Hour))}
	objects = append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: attestation.AnnouncementNamespace, Name: attestation.AnnouncementName}})
	for number := int32(1); number <= PolicyCount; number++ {
		spec, err := RenderPolicy(v1alpha1.RevocationSliceSpec{}, signers)
		if err != nil {
			t.Fatal(err)
		}
		objects = append(objects, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: PolicyName(number)}, Spec: spec})
	}
	base := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(&v1alpha1.NodeRevocation{}, &corev1.Namespace{}).
		WithIndex(&v1alpha1.RevocationSlice{}, v1alpha1.FieldCluster, func(o client.Object) []string { return []string{o.(*v1alpha1.RevocationSlice).Spec.Cluster} }).Build()
	note := func(object client.Object) error {
		kind := strings.TrimPrefix(fmt.Sprintf("%T", object), "*")
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.refuse != "" && strings.Contains(kind, w.refuse) {
			return errors.New("no " + kind)
		}
		w.written = append(w.written, kind)
		return nil
	}
	w.WithWatch = interceptor.NewClient(base, interceptor.Funcs{
		List: w.listOfRequests,
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.CreateOption) error {
			if err := note(o); err != nil {
				return err
			}
			return c.Create(ctx, o, options...)
		},
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, options ...client.UpdateOption) error {
			if err := note(o); err != nil {
				return err
			}
			return c.Update(ctx, o, options...)
		},
	})
	return w
}

func (w *world) All(context.Context) ([]v1alpha1.NodeAttestation, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return []v1alpha1.NodeAttestation{*w.record.DeepCopy()}, nil
}

func (w *world) Write(_ context.Context, r *v1alpha1.NodeAttestation, _ time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written, w.record = append(w.written, "record"), *r.DeepCopy()
	return nil
}

func (w *world) InSync() bool { return true }

// IsWatchListSemanticsUnSupported has informers list, and then watch: the fake client sends no
// bookmarks.
func (*world) IsWatchListSemanticsUnSupported() bool { return true }

// enforcer returns an enforcer that does not run.
func (w *world) enforcer(t *testing.T) *Enforcer {
	t.Helper()
	e, err := New(Config{
		Cluster: "c", Namespace: namespace, SlicePrefix: "revoked", Signers: signers, Objects: w, Joined: w, Records: w, StatusNamespace: namespace,
		Version: func(context.Context) (*version.Info, error) { return &version.Info{Major: "1", Minor: w.minor}, nil },
		Events:  w.events, Mirror: func(_, reason, _ string) { w.mirrored.Store(&reason) }, Log: logr.Discard(), Now: func() time.Time { return noon },
		Applied: func(_ context.Context, a Application) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.applied = append(w.applied, a)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// starts runs an enforcer until the test ends.
func (w *world) starts(t *testing.T) *Enforcer {
	t.Helper()
	e := w.enforcer(t)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait() })
	return e
}

func (w *world) eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for began := time.Now(); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("not: %s; written: %q", what, w.written)
		}
	}
}

// reports waits for an Event with a reason.
func (w *world) reports(t *testing.T, reason string) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		select {
		case event := <-w.events.Events:
			if strings.Contains(event, reason) {
				return
			}
		case <-timeout:
			t.Fatalf("no Event %s", reason)
		}
	}
}

func (w *world) policy(t *testing.T) string {
	t.Helper()
	object := &admissionv1.ValidatingAdmissionPolicy{}
	if err := w.Get(t.Context(), client.ObjectKey{Name: PolicyName(1)}, object); err != nil {
		t.Fatal(err)
	}
	return object.Spec.MatchConditions[0].Expression
}

func revocationOf(mode v1alpha1.RevocationMode) *v1alpha1.NodeRevocation {
	r := revocation(mode, "a")
	r.Namespace, r.Spec.Cluster = namespace, "c"
	return &r
}

// A certificate that a policy has is on a list at all times. The record comes last.
func TestOrderOfWrites(t *testing.T) {
	t.Parallel()
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
	w.starts(t)
	w.eventually(t, "the record says so", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.record.Status.Revocation != nil && len(w.applied) == 1
	})
	if !strings.Contains(w.policy(t), "'system:node:a'") {
		t.Error("the policy does not have it")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	order := []int{}
	for _, kind := range []string{"v1alpha1.RevocationSlice", "v1.ValidatingAdmissionPolicy", "v1.ConfigMap", "record"} {
		order = append(order, slices.Index(w.written, kind))
	}
	if !slices.IsSorted(order) || order[0] < 0 {
		t.Errorf("written: %q", w.written)
	}
	if a := w.applied[0]; a.Action != Revoked || a.Reason != "leaked" || len(a.Certificates) != 1 {
		t.Errorf("%+v", a)
	}
}

// If its list cannot be written, no certificate is revoked, and the condition says so.
func TestListsThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
	w.refuse = "RevocationSlice"
	e := w.starts(t)
	w.reports(t, ReasonNotInForce)
	if got := e.UntilAccepted("a", digits("new")); got != unwrittenDelay {
		t.Errorf("a new certificate is published after %s", got)
	}
	w.mu.Lock()
	if w.record.Status.Revocation != nil || w.record.Status.Certificates[0].Revoked {
		t.Error("the record says that it is revoked")
	}
	w.mu.Unlock()
	if strings.Contains(w.policy(t), "system:node:a") {
		t.Error("a policy has a certificate that is on no list")
	}
	w.mu.Lock()
	w.refuse = ""
	w.mu.Unlock()
	w.reports(t, ReasonInForce)
	if !strings.Contains(w.policy(t), "system:node:a") {
		t.Error("it is not made up for")
	}
}

// The report that policies are full says which nodes are not enforced.
func TestFullPoliciesNameNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := plan{}
	for i := range 23 {
		p.unenforced = append(p.unenforced, fmt.Sprintf("worker-%02d", i))
	}
	w.enforcer(t).conclude(t.Context(), p, nil)
	if event := <-w.events.Events; !strings.Contains(event, ReasonListsFull) || !strings.Contains(event, "23: worker-00, worker-01") || !strings.Contains(event, "worker-19 and 3 more") {
		t.Error(event)
	}
}

// A steady stream of events does not keep rounds from running.
func TestRoundsAmongManyEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately))
	e := w.starts(t)
	ctx, stop := context.WithCancel(t.Context())
	var waking sync.WaitGroup
	defer func() { stop(); waking.Wait() }()
	waking.Go(func() {
		for ctx.Err() == nil {
			e.wake()
			time.Sleep(settle / 10)
		}
	})
	w.eventually(t, "the policy has the node", func() bool { return strings.Contains(w.policy(t), "'system:node:a'") })
}

func TestTooOldAPIServer(t *testing.T) {
	t.Parallel()
	s := suspension(digits("ek"))
	s.Namespace = namespace
	w := newWorld(t, revocationOf(v1alpha1.RevokeImmediately), &s)
	w.minor = "31"
	e := w.starts(t)
	w.reports(t, ReasonAPIServerTooOld)
	w.eventually(t, "the management cluster gets it, too", func() bool {
		reason := w.mirrored.Load()
		return reason != nil && *reason == ReasonAPIServerTooOld
	})
	w.eventually(t, "requests of suspended machines are denied all the same", func() bool {
		eks, err := e.Suspended()
		return err == nil && eks[digits("ek")]
	})
	if len(w.written) > 0 {
		t.Errorf("written: %q", w.written)
	}
	if got := e.UntilAccepted("a", digits("new")); got != 0 {
		t.Errorf("certificates are published after %s", got)
	}
}

func TestNamesCredentials(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"1.31": false, "1.32": true, "1.32+": true, "1.36": true, "2.0": true, "1.": false, ".": false, "0.99": false, "1.x": false} {
		major, minor, _ := strings.Cut(text, ".")
		if got := namesCredentials(&version.Info{Major: major, Minor: minor}); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}

// Of an announcement that is too long the first renewals remain.
func TestLongAnnouncement(t *testing.T) {
	t.Parallel()
	var a attestation.Announcement
	if text, err := marshalAnnouncement(a); text != "" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	for i := range 3 {
		r := attestation.Renewal{Name: fmt.Sprintf("r%d", i), IssuedBefore: noon, Start: noon}
		for n := range 1000 {
			r.Nodes = append(r.Nodes, fmt.Sprintf("%0120d", n))
		}
		a.Renewals = append(a.Renewals, r)
	}
	text, err := marshalAnnouncement(a)
	if err == nil || !strings.Contains(err.Error(), "1 of 3") {
		t.Errorf("%v", err)
	}
	got, parseErr := attestation.ParseAnnouncement([]byte(text))
	if parseErr != nil || len(got.Renewals) != 2 || got.Renewals[0].Name != "r0" {
		t.Errorf("%d renewals, %v", len(got.Renewals), parseErr)
	}
}
