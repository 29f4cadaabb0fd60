// SPDX-License-Identifier: Apache-2.0

package records

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilwait "k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// informer caches the records of one cluster, with an index of each field in valueOf. The API
// server has no such index, and goes through all records for each list.
type informer struct {
	toolscache.SharedIndexInformer
	// lastEvent is when the watch was last alive, zero after an error. lastMissed is when our own
	// write last failed to show up in time.
	lastEvent, lastMissed atomic.Value
}

const (
	// maxEventGap is the longest time without an event after which a watch counts as live. The API
	// server sends a bookmark each minute.
	maxEventGap = 3 * time.Minute
	// awaitTimeout bounds the wait until the informer shows our own write. If it does not, KeepsUp
	// is false for missedPause.
	awaitTimeout, missedPause = 2 * time.Second, 10 * time.Second
	// unwatchedRemind is the time between two log lines about a missing right to watch.
	unwatchedRemind = 10 * time.Minute
)

const unwatched = "records are read from the API server for each decision, which is slow: list and watch on nodeattestations are needed"

// valueOf has the indexed fields.
var valueOf = map[string]func(*v1alpha1.NodeAttestation) string{
	v1alpha1.FieldNodeName: func(r *v1alpha1.NodeAttestation) string { return r.Spec.NodeName },
	v1alpha1.FieldMachine:  func(r *v1alpha1.NodeAttestation) string { return r.Spec.Machine.Name },
	v1alpha1.FieldEK: func(r *v1alpha1.NodeAttestation) string {
		if r.Spec.EK == nil {
			return ""
		}
		return r.Spec.EK.Fingerprint
	},
}

// indexAK is the index of AKs. The API server has no such field selector.
const indexAK = "ak"

// newInformer returns the cache of a cluster's records. Its source starts it.
func newInformer(s *Store, log logr.Logger) (*informer, error) {
	i := &informer{}
	calls := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if options.ResourceVersion == "0" {
				// Without a version the API server answers from etcd. Its watch cache may lack
				// another leader's last writes.
				options.ResourceVersion = ""
			}
			list := &v1alpha1.NodeAttestationList{}
			page := &client.ListOptions{Raw: &options, Limit: options.Limit, Continue: options.Continue}
			err := s.api.List(ctx, list, append(s.scope(nil), page)...)
			return list, i.note(err)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := s.api.Watch(ctx, &v1alpha1.NodeAttestationList{}, append(s.scope(nil), &client.ListOptions{Raw: &options})...)
			if i.note(err) != nil {
				return nil, err
			}
			return watch.Filter(events, func(event watch.Event) (watch.Event, bool) {
				i.lastEvent.Store(time.Now())
				return event, true
			}), nil
		},
	}
	indexers := toolscache.Indexers{}
	for field, value := range valueOf {
		indexers[field] = func(object any) ([]string, error) { return []string{value(object.(*v1alpha1.NodeAttestation))}, nil }
	}
	indexers[indexAK] = func(object any) ([]string, error) {
		return []string{object.(*v1alpha1.NodeAttestation).Spec.AKName}, nil
	}
	i.SharedIndexInformer = toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(calls, s.api), &v1alpha1.NodeAttestation{}, 0, indexers)
	failures := &telemetry.WatchErrors{Log: log, Message: unwatched, Remind: unwatchedRemind}
	return i, errors.Join(i.SetTransform(trim), i.SetWatchErrorHandlerWithContext(failures.Handle))
}

// trim drops the managed fields, which nobody reads. An update without them does not change them.
func trim(object any) (any, error) {
	if record, ok := object.(*v1alpha1.NodeAttestation); ok {
		record.ManagedFields = nil
	}
	return object, nil
}

// note records that the watch got an event, or that it failed.
func (i *informer) note(err error) error {
	if err != nil {
		i.lastEvent.Store(time.Time{})
	} else {
		i.lastEvent.Store(time.Now())
	}
	return err
}

// source starts and ends the watch with a controller. The controller does not wait for the first
// sync: until then, records are read live.
func (i *informer) source() source.Source {
	return source.Func(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go i.RunWithContext(ctx)
		return nil
	})
}

func (i *informer) inSync() bool {
	// the version is empty without AtomicFIFO
	if i == nil || !i.HasSynced() || i.GetStore().LastStoreSyncResourceVersion() == "" {
		return false
	}
	lastEvent, _ := i.lastEvent.Load().(time.Time)
	return time.Since(lastEvent) < maxEventGap
}

func (i *informer) keepsUp() bool {
	if !i.inSync() {
		return false
	}
	lastMissed, _ := i.lastMissed.Load().(time.Time)
	return time.Since(lastMissed) >= missedPause
}

func (i *informer) find(field, value string) ([]v1alpha1.NodeAttestation, error) {
	found, err := i.GetIndexer().ByIndex(field, value)
	return recordsIn(found), err
}

func (i *informer) all() []v1alpha1.NodeAttestation { return recordsIn(i.GetStore().List()) }

// awaits waits until the cache shows our own write, and reports whether it did in time.
//
// Then the cache has all earlier writes, too: events arrive in order, and client-go keeps the order
// (InOrderInformers, AtomicFIFO). awaits compares versions for equality, since they restart after
// an etcd restore.
func (i *informer) awaits(ctx context.Context, written *v1alpha1.NodeAttestation) bool {
	err := utilwait.PollUntilContextTimeout(ctx, 2*time.Millisecond, awaitTimeout, true, func(context.Context) (bool, error) {
		item, _, err := i.GetStore().Get(written)
		cached, _ := item.(*v1alpha1.NodeAttestation)
		return cached != nil && cached.UID == written.UID && cached.ResourceVersion == written.ResourceVersion, err
	})
	if err != nil {
		i.lastMissed.Store(time.Now())
	}
	return err == nil
}

func recordsIn(items []any) []v1alpha1.NodeAttestation {
	records := make([]v1alpha1.NodeAttestation, len(items))
	for i := range items {
		records[i] = *items[i].(*v1alpha1.NodeAttestation)
	}
	return records
}
