// SPDX-License-Identifier: Apache-2.0

package records

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const namespace = "n"

// server is controller-runtime's fake client, with field selectors and a watch that can hang or
// fail.
type server struct {
	client.WithWatch
	mu sync.Mutex
	// lists counts the lists of decisions.
	lists int
	// hung is closed when the watch continues. It is nil if the watch does not hang.
	hung chan struct{}
	// refused is what the server answers to lists and watches.
	refused error
	// bookmarks makes the watch send bookmarks.
	bookmarks chan watch.Event
	// versions are the resource versions in the informer's lists.
	versions []string
}

// IsWatchListSemanticsUnSupported tells the informer that the fake client streams no first state.
func (*server) IsWatchListSemanticsUnSupported() bool { return true }

func newServer(t *testing.T) *server {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	s := &server{bookmarks: make(chan watch.Event)}
	builder := fake.NewClientBuilder().WithScheme(scheme)
	for field, value := range map[string]func(*v1alpha1.NodeAttestation) string{
		v1alpha1.FieldCluster: func(r *v1alpha1.NodeAttestation) string { return r.Spec.Cluster },
		v1alpha1.FieldMachine: func(r *v1alpha1.NodeAttestation) string { return r.Spec.Machine.Name },
		v1alpha1.FieldRequestUID: func(r *v1alpha1.NodeAttestation) string {
			if r.Status.Request == nil {
				return ""
			}
			return string(r.Status.Request.UID)
		},
		v1alpha1.FieldNodeName: func(r *v1alpha1.NodeAttestation) string { return r.Spec.NodeName },
		v1alpha1.FieldEK: func(r *v1alpha1.NodeAttestation) string {
			if r.Spec.EK == nil {
				return ""
			}
			return r.Spec.EK.Fingerprint
		},
	} {
		builder = builder.WithIndex(&v1alpha1.NodeAttestation{}, field, func(object client.Object) []string {
			return []string{value(object.(*v1alpha1.NodeAttestation))}
		})
	}
	s.WithWatch = interceptor.NewClient(builder.Build(), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			s.mu.Lock()
			refused, applied := s.refused, (&client.ListOptions{}).ApplyOptions(options)
			if applied.Raw == nil {
				s.lists++
			} else {
				s.versions = append(s.versions, applied.Raw.ResourceVersion)
			}
			s.mu.Unlock()
			if refused != nil {
				return refused
			}
			err := api.List(ctx, list, options...)
			list.SetResourceVersion("1") // the fake client's lists have none
			return err
		},
		Watch: s.watch,
	})
	return s
}

// watched is a watch that delays events while the server's watch hangs.
type watched struct {
	watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func (w *watched) ResultChan() <-chan watch.Event { return w.events }

func (w *watched) Stop() {
	w.once.Do(func() { close(w.stopped) })
	w.Interface.Stop()
}

func (s *server) watch(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) (watch.Interface, error) {
	s.mu.Lock()
	refused := s.refused
	s.mu.Unlock()
	if refused != nil {
		return nil, refused
	}
	events, err := api.Watch(ctx, list, options...)
	if err != nil {
		return nil, err
	}
	w := &watched{Interface: events, events: make(chan watch.Event), stopped: make(chan struct{})}
	go func() {
		defer close(w.events)
		for {
			var event watch.Event
			var open bool
			select {
			case event, open = <-events.ResultChan():
			case event, open = <-s.bookmarks:
			}
			if !open {
				return
			}
			s.mu.Lock()
			hung := s.hung
			s.mu.Unlock()
			if hung != nil {
				select {
				case <-hung:
				case <-w.stopped:
					return
				}
			}
			select {
			case w.events <- event:
			case <-w.stopped:
				return
			}
		}
	}()
	return w, nil
}

func (s *server) hang() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hung = make(chan struct{})
}

func (s *server) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.hung)
	s.hung = nil
}

func (s *server) refuse(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused = err
}

// listed returns the number of lists since the last call.
func (s *server) listed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.lists
	s.lists = 0
	return n
}

// start returns a store whose informer runs, until the test ends.
func (s *server) start(t *testing.T, owned *Owned, log logr.Logger) *Store {
	t.Helper()
	store := NewStore(s, namespace, owned)
	source, err := store.Watch(log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		synctest.Wait() // an event that arrives meanwhile would block watch.Filter for ever
		stop()
		synctest.Wait()
	})
	if err := source.Start(ctx, nil); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return store
}

// recordNamed is the record of a machine, with that node name and EK.
func recordNamed(name, node, ek string) *v1alpha1.NodeAttestation {
	r := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)}}
	r.Spec = v1alpha1.NodeAttestationSpec{Cluster: "c", NodeName: node, Machine: v1alpha1.MachineReference{Name: name}}
	if ek != "" {
		r.Spec.EK = &v1alpha1.EndorsementKey{Fingerprint: ek}
	}
	return r
}

func (s *server) write(t *testing.T, records ...*v1alpha1.NodeAttestation) {
	t.Helper()
	for _, r := range records {
		if err := NewStore(s, namespace, nil).Write(t.Context(), r, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}

func namesOf(records []v1alpha1.NodeAttestation) (names []string) {
	for _, r := range records {
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// The server and the cache find the same records by each field.
func TestFind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		store := s.start(t, nil, logr.Discard())
		s.write(t, recordNamed("a", "node-1", "ek-1"), recordNamed("b", "node-2", "ek-1"), recordNamed("c", "node-1", ""))
		synctest.Wait()
		for _, c := range []struct {
			field, value string
			want         []string
		}{
			{v1alpha1.FieldNodeName, "node-1", []string{"a", "c"}},
			{v1alpha1.FieldMachine, "b", []string{"b"}},
			{v1alpha1.FieldEK, "ek-1", []string{"a", "b"}},
			{v1alpha1.FieldEK, "ek-2", nil},
		} {
			live, err := store.Find(t.Context(), c.field, c.value)
			if got := namesOf(live); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%s=%s: %q, %v", c.field, c.value, got, err)
			}
			cached, err := store.FindCached(c.field, c.value)
			if got := namesOf(cached); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%s=%s, cached: %q, %v", c.field, c.value, got, err)
			}
		}
		if _, err := store.FindCached("spec.other", "x"); err == nil {
			t.Error("a field that is no index is found by")
		}
		s.listed()
		all, err := store.All(t.Context())
		if got := namesOf(all); err != nil || !slices.Equal(got, []string{"a", "b", "c"}) || s.listed() != 0 {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// An AK is found in the cache while a record has it.
func TestHasAK(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		if NewStore(s, namespace, nil).HasAK("ak") {
			t.Error("found without a watch")
		}
		store := s.start(t, nil, logr.Discard())
		record := recordNamed("a", "node-1", "ek-1")
		record.Spec.AKName = "ak"
		s.write(t, record, recordNamed("b", "node-2", "ek-2"))
		synctest.Wait()
		if !store.HasAK("ak") || store.HasAK("another") || store.HasAK("") {
			t.Error("not that of the record alone is found")
		}
		if err := s.Delete(t.Context(), record); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if store.HasAK("ak") {
			t.Error("it outlives its record")
		}
	})
}

// Without a watch, and after errors of the watch, records are read from the server.
func TestWithoutAWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		store := NewStore(s, namespace, nil)
		s.write(t, recordNamed("a", "node-1", "ek-1"))
		if store.InSync() || store.KeepsUp() {
			t.Error("there is no cache, and it is in sync")
		}
		all, err := store.All(t.Context())
		if got := namesOf(all); err != nil || !slices.Equal(got, []string{"a"}) || s.listed() != 1 {
			t.Errorf("%q, %v", got, err)
		}
		s.refuse(errors.New("away"))
		if _, err := store.All(t.Context()); !errors.Is(err, s.refused) {
			t.Error(err)
		}
		if _, err := store.FindRivals(t.Context(), recordNamed("a", "node-1", "")); !errors.Is(err, s.refused) {
			t.Error(err)
		}
	})
}

// A cluster's records are those with its UID, and machines own them.
func TestOwnedRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		owner := metav1.OwnerReference{Name: "m", UID: "machine"}
		var failed error
		owned := &Owned{Source: "cluster-api", Cluster: "c", Labels: map[string]string{"l": "v"}, Owner: func(verifier.MachineRef) (metav1.OwnerReference, error) {
			return owner, failed
		}}
		store := s.start(t, owned, logr.Discard())
		foreign := recordNamed("foreign", "node-1", "ek-1")
		foreign.Spec.Cluster = "another"
		mine := recordNamed("mine", "node-1", "ek-1")
		mine.Spec.Machine.UID, mine.OwnerReferences = "in the spec", []metav1.OwnerReference{owner}
		s.write(t, foreign, mine)
		found, err := store.Find(t.Context(), v1alpha1.FieldNodeName, "node-1")
		if got := namesOf(found); err != nil || !slices.Equal(got, []string{"mine"}) {
			t.Errorf("%q, %v", got, err)
		}
		if got := store.Record(mine).Machine; got != (verifier.MachineRef{Name: "mine", UID: "machine"}) {
			t.Errorf("it is of %+v", got)
		}
		for _, owners := range [][]metav1.OwnerReference{nil, {owner, owner}} {
			mine.OwnerReferences = owners
			if got := store.Record(mine).Machine.UID; got == "machine" || got == "in the spec" || got == "" {
				t.Errorf("with %d owners it is of %q", len(owners), got)
			}
		}
		if got := NewStore(s, namespace, nil).Record(mine).Machine.UID; got != "in the spec" {
			t.Errorf("unowned, it is of %q", got)
		}

		of := verifier.Record{Machine: verifier.MachineRef{Name: "m", UID: "machine"}}
		made, err := store.New(of)
		if err != nil || made.Name != "m" || made.Namespace != namespace || !reflect.DeepEqual(made.OwnerReferences, []metav1.OwnerReference{owner}) ||
			made.Spec.Machine != (v1alpha1.MachineReference{Source: "cluster-api", Name: "m"}) {
			t.Errorf("%+v, %v", made, err)
		}
		owner.UID = "its successor"
		if _, err := store.New(of); err == nil {
			t.Error("a record of a machine that was replaced is owned by the next one")
		}
		failed = errors.New("away")
		if _, err := store.New(of); !errors.Is(err, failed) {
			t.Error(err)
		}
		made, err = NewStore(s, namespace, nil).New(verifier.Record{Machine: verifier.MachineRef{Name: "Not/A Name", UID: "u"}})
		if err != nil || !strings.HasPrefix(made.Name, "machine-") || made.Spec.Machine != (v1alpha1.MachineReference{Source: SourceInventory, Name: "Not/A Name", UID: "u"}) {
			t.Errorf("%+v, %v", made, err)
		}
	})
}

// If two writers update one version, the second gets a conflict. If two create, the second gets
// AlreadyExists.
func TestWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		store := NewStore(s, namespace, nil)
		first := recordNamed("a", "node-1", "")
		s.write(t, first)
		if err := store.Write(t.Context(), recordNamed("a", "node-1", ""), time.Now()); !apierrors.IsAlreadyExists(err) {
			t.Error(err)
		}
		second, before := first.DeepCopy(), first.ResourceVersion
		if err := store.Write(t.Context(), first, time.Now()); err != nil || first.ResourceVersion == before {
			t.Errorf("%s, %v", first.ResourceVersion, err)
		}
		if err := store.Write(t.Context(), second, time.Now()); !apierrors.IsConflict(err) {
			t.Error(err)
		}
	})
}

// Rivals are the records of the same node name or EK. The cache answers once it shows the write. If
// it does not in time, the server does, and for ten seconds the cache does not keep up.
func TestFindRivals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		store := s.start(t, nil, logr.Discard())
		s.write(t, recordNamed("other", "node-3", "ek-3"))
		made := 0
		rivals := func(want ...string) (lists int, took time.Duration) {
			t.Helper()
			written := recordNamed("mine", "node-1", "ek-1")
			if err := s.Delete(t.Context(), written); client.IgnoreNotFound(err) != nil {
				t.Fatal(err)
			}
			made++
			written.UID = types.UID(fmt.Sprintf("uid-%d", made))
			s.write(t, written)
			s.listed()
			began := time.Now()
			found, err := store.FindRivals(t.Context(), written)
			if got := namesOf(found); err != nil || !slices.Equal(got, want) {
				t.Errorf("%q, %v", got, err)
			}
			return s.listed(), time.Since(began)
		}
		if lists, _ := rivals("mine"); lists != 0 || !store.KeepsUp() {
			t.Errorf("the cache shows the write, and there are %d lists", lists)
		}
		s.hang()
		s.write(t, recordNamed("by-name", "node-1", "ek-2"), recordNamed("by-ek", "node-2", "ek-1"))
		lists, took := rivals("by-ek", "by-name", "mine")
		if lists != 2 || took < awaitTimeout || store.KeepsUp() || !store.InSync() {
			t.Errorf("a write was missed: %d lists after %s", lists, took)
		}
		if lists, took = rivals("by-ek", "by-name", "mine"); lists != 2 || took > 0 {
			t.Errorf("soon after: %d lists after %s", lists, took)
		}
		s.goOn()
		time.Sleep(missedPause)
		if lists, _ = rivals("by-ek", "by-name", "mine"); lists != 0 || !store.KeepsUp() {
			t.Errorf("it keeps up again, and there are %d lists", lists)
		}
		// Another object of that name, or another version, is not the write.
		other := recordNamed("mine", "node-1", "ek-1")
		if err := s.Get(t.Context(), client.ObjectKeyFromObject(other), other); err != nil {
			t.Fatal(err)
		}
		uid := other.UID
		for _, change := range []func(){func() { other.UID = "another" }, func() { other.UID, other.ResourceVersion = uid, "77" }} {
			change()
			if store.informer.awaits(t.Context(), other) {
				t.Errorf("the cache shows %s of %s", other.ResourceVersion, other.UID)
			}
		}
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		if store.informer.awaits(cancelled, other) {
			t.Error("awaited by a decision that has ended")
		}
		if noNames, err := store.FindRivals(t.Context(), &v1alpha1.NodeAttestation{}); err != nil || len(noNames) > 0 {
			t.Errorf("%q, %v", namesOf(noNames), err)
		}
	})
}

// A watch without an event for three minutes is not trusted, nor one after an error. A bookmark
// shows that it is alive. Lists are not those of the API server's watch cache.
func TestInSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		var logged []string
		store := s.start(t, nil, funcr.New(func(_, line string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			logged = append(logged, line)
		}, funcr.Options{Verbosity: 1}))
		if !store.InSync() || !store.KeepsUp() {
			t.Fatal("it is not in sync at the start")
		}
		time.Sleep(maxEventGap - time.Second)
		if !store.InSync() {
			t.Error("it was silent for less than three minutes")
		}
		time.Sleep(time.Second)
		if store.InSync() || store.KeepsUp() {
			t.Error("it was silent for three minutes")
		}
		bookmark := recordNamed("", "", "")
		bookmark.ResourceVersion = "1"
		s.bookmarks <- watch.Event{Type: watch.Bookmark, Object: bookmark}
		synctest.Wait()
		if !store.InSync() {
			t.Error("a bookmark came")
		}
		forbidden := apierrors.NewForbidden(v1alpha1.Resource.GroupResource(), "", errors.New("no right"))
		s.refuse(forbidden)
		gone := apierrors.NewResourceExpired("too old").ErrStatus
		s.bookmarks <- watch.Event{Type: watch.Error, Object: &gone}
		time.Sleep(2 * time.Second)
		if store.InSync() {
			t.Error("the server refuses lists and watches")
		}
		s.mu.Lock()
		if !slices.ContainsFunc(logged, func(line string) bool { return strings.Contains(line, unwatched) }) {
			t.Errorf("the missing right is not logged: %q", logged)
		}
		s.mu.Unlock()
		s.refuse(nil)
		time.Sleep(2 * time.Minute)
		if !store.InSync() {
			t.Error("the server answers again")
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.versions) == 0 || slices.Contains(s.versions, "0") {
			t.Errorf("listed versions: %q", s.versions)
		}
	})
}

// The cache keeps no managed fields.
func TestTrim(t *testing.T) {
	record := recordNamed("a", "", "")
	record.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m"}}
	if got, err := trim(record); err != nil || len(got.(*v1alpha1.NodeAttestation).ManagedFields) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := trim("other"); got != "other" || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
}
