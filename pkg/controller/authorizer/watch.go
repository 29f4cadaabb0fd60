// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/internal/listwatch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

const (
	// settle is the shortest time during which events are collected before the lists are made
	// again. In a large cluster it is settleFactor times as long as it took to make the lists, so
	// that a rotation of all certificates takes a fifth of a core at most.
	settle, settleFactor = 50 * time.Millisecond, 4
	// connectInterval is the time between two tries to make a client.
	connectInterval = 5 * time.Second
	// saveInterval is the shortest time between two writes of the state file. The file is written
	// each refreshInterval without a change, since it has the age of the lists.
	saveInterval, refreshInterval = time.Second, time.Minute
	remindInterval                = 10 * time.Minute
)

const unwatched = "cannot watch NodeAttestations, NodeSuspensions and RevocationSlices: the lists stay as they are"

// watches keep copies of the objects.
type watches struct {
	reader                       *recordReader
	slices, suspensions, records watched
	changed                      chan struct{}
}

// watched is the informer of one kind.
type watched struct {
	toolscache.SharedIndexInformer
	// isUp says that the last list or watch began without an error. A lost connection is an error
	// within a minute (client-go's health check), a closed one at once.
	isUp *atomic.Bool
}

func newWatches(api client.WithWatch, config *Config) (*watches, error) {
	w := &watches{reader: newRecordReader(api, config), changed: make(chan struct{}, 1)}
	in := []client.ListOption{client.InNamespace(config.Namespace)}
	ofCluster := in
	if config.Cluster != "" {
		ofCluster = append(in[:1:1], client.MatchingFields{v1alpha1.FieldCluster: config.Cluster})
	}
	failures := &telemetry.WatchErrors{Log: config.Log, Message: unwatched, See: "packaging/authorizer/rbac.yaml", Remind: remindInterval}
	for _, kind := range []struct {
		into   *watched
		list   client.ObjectList
		object client.Object
		in     []client.ListOption
	}{
		{&w.slices, &v1alpha1.RevocationSliceList{}, &v1alpha1.RevocationSlice{}, ofCluster},
		{&w.suspensions, &v1alpha1.NodeSuspensionList{}, &v1alpha1.NodeSuspension{}, in},
		{&w.records, &v1alpha1.NodeAttestationList{}, &v1alpha1.NodeAttestation{}, ofCluster},
	} {
		isUp := &atomic.Bool{}
		informer, err := listwatch.Informer{
			API: api, List: kind.list, Object: kind.object, In: kind.in, Trim: trim, Changed: w.wake, Failed: failures.Handle,
			Called: func(err error) { isUp.Store(err == nil) },
		}.New()
		if err != nil {
			return nil, err
		}
		*kind.into = watched{informer, isUp}
	}
	return w, nil
}

// trim drops fields that nobody reads: a cluster can have many records.
func trim(object any) (any, error) {
	if o, ok := object.(client.Object); ok {
		o.SetManagedFields(nil)
	}
	if record, ok := object.(*v1alpha1.NodeAttestation); ok {
		record.Annotations = nil
		record.Status = v1alpha1.NodeAttestationStatus{Certificates: record.Status.Certificates}
	}
	return object, nil
}

func (w *watches) wake() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *watches) all() []watched { return []watched{w.slices, w.suspensions, w.records} }

func (w *watches) hasSynced() bool {
	for _, one := range w.all() {
		if !one.HasSynced() {
			return false
		}
	}
	return true
}

// isLive reports whether the lists are up to date, but for what the API server sends right now.
// Lists without an invalid slice are not.
func (a *Authorizer) isLive() bool {
	w, lists := a.watches.Load(), a.lists.Load()
	if w == nil || lists.recorded == nil || lists.problem != nil {
		return false
	}
	for _, one := range w.all() {
		if !one.HasSynced() || !one.isUp.Load() {
			return false
		}
	}
	return true
}

// Run keeps the lists and the state file up to date until ctx ends. It returns no error: without an
// API server, Authorize answers with the lists that it has. After its end it may be called again.
func (a *Authorizer) Run(ctx context.Context) {
	w := a.connect(ctx)
	if w == nil {
		return
	}
	var running sync.WaitGroup
	defer running.Wait()
	for _, one := range w.all() {
		running.Go(func() { one.RunWithContext(ctx) })
	}
	running.Go(func() { a.save(ctx) })
	a.watches.Store(w)
	defer a.watches.Store(nil) // so that nobody takes them for live
	for took := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-w.changed:
		case <-time.After(refreshInterval): // certificates end without an event
		}
		if !pause(ctx, max(settle, settleFactor*took)) {
			return
		}
		if w.hasSynced() {
			began := time.Now()
			a.update(w)
			took = time.Since(began)
		} else {
			w.wake() // an empty list is no event
		}
	}
}

// connect returns the watches, nil if ctx ended before.
func (a *Authorizer) connect(ctx context.Context) *watches {
	for {
		api, err := a.Connect()
		if err == nil {
			w, failed := newWatches(api, &a.Config)
			if failed == nil {
				w.wake()
				return w
			}
			err = failed
		}
		cause := text.Line(err.Error(), telemetry.MaxLogged)
		if a.reported.MarkReported("connect", cause, a.Now(), remindInterval) {
			a.Log.Error(nil, "cannot make a client of the API server: the lists stay as they are", "cause", cause)
		}
		if !pause(ctx, connectInterval) {
			return nil
		}
	}
}

// pause waits, and reports whether ctx is still valid.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// update makes the lists from the watched objects. Only the controller writes these, so they are
// valid. If a slice is not, the others count.
func (a *Authorizer) update(w *watches) {
	before := a.lists.Load()
	lists := newLists(objects{
		slices: stored[v1alpha1.RevocationSlice](w.slices), suspensions: stored[v1alpha1.NodeSuspension](w.suspensions), records: stored[v1alpha1.NodeAttestation](w.records),
	}, before, a.Now())
	a.lists.Store(lists)
	if lists.problem == nil {
		a.reported.Forget("lists")
	} else if cause := text.Line(lists.problem.Error(), telemetry.MaxLogged); a.reported.MarkReported("lists", cause, a.Now(), remindInterval) {
		a.Log.Error(nil, "a RevocationSlice is invalid: the lists are without it", "cause", cause)
	}
	if len(lists.remembered) == 0 && a.Strict != StrictOff && a.reported.MarkReported("records", "", a.Now(), remindInterval) {
		a.Log.Error(nil, "there is no record: strict mode denies nothing. Check --namespace and --cluster", "namespace", a.Namespace, "cluster", a.Cluster)
	}
	if before.recorded == nil {
		a.Log.Info("read the lists from the API server", "nodesWithRevokedCertificates", len(lists.byUser), "suspendedNodes", len(lists.suspendedNodes), "certificates", len(lists.remembered))
	}
}

func stored[T any](informer toolscache.SharedIndexInformer) (all []T) {
	for _, item := range informer.GetStore().List() {
		if object, ok := item.(*T); ok {
			all = append(all, *object)
		}
	}
	return all
}

// save writes the state file after each change of the lists, and each refreshInterval while they
// are live.
func (a *Authorizer) save(ctx context.Context) {
	var saved *Lists
	var savedAt time.Time
	for running := true; running; {
		running = pause(ctx, saveInterval)
		now, lists := a.Now(), a.lists.Load()
		if a.isLive() {
			a.upToDateAt.Store(now.UnixNano())
		}
		if lists.recorded == nil || lists == saved && (!a.isLive() || now.Sub(savedAt).Abs() < refreshInterval) {
			continue
		}
		err := writeState(a.StateFile, lists, time.Unix(0, a.upToDateAt.Load()))
		if err == nil {
			saved, savedAt = lists, now
			a.reported.Forget("state file")
		} else if cause := text.Line(err.Error(), telemetry.MaxLogged); a.reported.MarkReported("state file", cause, now, remindInterval) {
			a.Log.Error(nil, "cannot write the state file: after a restart, the lists are older", "file", a.StateFile, "cause", cause)
		}
	}
}
