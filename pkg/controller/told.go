// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	utilwait "k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
)

// toldRecords are the records of one cluster as a watch tells of them: a moment old, and older where the watch hangs. The API server has no
// index of fields, and goes through all records for each List. What is decided by these is checked when it is carried out (reading.settles).
type toldRecords struct {
	informer toolscache.SharedIndexInformer
	// known is the informer's store and what was written here since.
	known toolscache.MutationCache
	// watched says that there was a watch when one was last asked for.
	watched atomic.Bool
}

// writtenFor is how long what was written here is known without the watch: one that was deleted since is, too.
const writtenFor = 15 * time.Second

// toldWithin is how long an own write is waited for to be told.
const toldWithin = time.Second

// fields are those by which records are found.
var fields = map[string]func(*v1alpha1.NodeAttestation) string{
	v1alpha1.FieldNodeName: func(r *v1alpha1.NodeAttestation) string { return r.Spec.NodeName },
	v1alpha1.FieldMachine:  func(r *v1alpha1.NodeAttestation) string { return r.Spec.Machine.Name },
	v1alpha1.FieldEK: func(r *v1alpha1.NodeAttestation) string {
		if r.Spec.EK == nil {
			return ""
		}
		return r.Spec.EK.Fingerprint
	},
}

// newToldRecords makes the watch of a cluster's records; its source starts it.
func newToldRecords(s *records, log logr.Logger) (*toldRecords, error) {
	t := &toldRecords{}
	calls := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			if options.ResourceVersion == "0" { // whatever an API server happens to remember: another leader has just written
				options.ResourceVersion = ""
			}
			list := &v1alpha1.NodeAttestationList{}
			page := &client.ListOptions{Raw: &options, Limit: options.Limit, Continue: options.Continue}
			err := s.api.List(ctx, list, append(s.scope(nil), page)...)
			return list, t.note(err)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := s.api.Watch(ctx, &v1alpha1.NodeAttestationList{}, append(s.scope(nil), &client.ListOptions{Raw: &options})...)
			return events, t.note(err)
		},
	}
	indexers := toolscache.Indexers{}
	for field, value := range fields {
		indexers[field] = func(object any) ([]string, error) { return []string{value(object.(*v1alpha1.NodeAttestation))}, nil }
	}
	t.informer = toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(calls, s.api), &v1alpha1.NodeAttestation{}, 0, indexers)
	t.known = toolscache.NewIntegerResourceVersionMutationCache(log, t.informer.GetStore(), t.informer.GetIndexer(), writtenFor, true)
	failures := &watchFailures{log: log, what: "records are read from the API server for each decision, which is slow: list and watch on nodeattestations are needed", remind: bindingsRemind}
	return t, errors.Join(t.informer.SetTransform(trimRecord), t.informer.SetWatchErrorHandlerWithContext(failures.handle))
}

// trimRecord drops what nobody reads; an update without it leaves it as it is.
func trimRecord(object any) (any, error) {
	if record, ok := object.(*v1alpha1.NodeAttestation); ok {
		record.ManagedFields = nil
	}
	return object, nil
}

func (t *toldRecords) note(err error) error {
	t.watched.Store(err == nil)
	return err
}

// source has the watch begin and end with a controller, which does not wait for it: until something was told records are read.
func (t *toldRecords) source() source.Source {
	return source.Func(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go t.informer.RunWithContext(ctx)
		return nil
	})
}

// has reports whether all records were told of, and others would be.
func (t *toldRecords) has() bool { return t != nil && t.informer.HasSynced() && t.watched.Load() }

// with returns the records that have a value in a field, those that were just written here included. The caller changes none.
func (t *toldRecords) with(field, value string) ([]v1alpha1.NodeAttestation, error) {
	return recordsOf(t.known.ByIndex(field, value))
}

// seen returns the records that have a value in a field by what was told alone.
func (t *toldRecords) seen(field, value string) ([]v1alpha1.NodeAttestation, error) {
	return recordsOf(t.informer.GetIndexer().ByIndex(field, value))
}

// until waits until everything was told that was written before a version, and reports whether it was: a watch tells in the order of versions, and
// client-go's store keeps it (InOrderInformers, AtomicFIFO).
func (t *toldRecords) until(ctx context.Context, version string) bool {
	err := utilwait.PollUntilContextTimeout(ctx, 2*time.Millisecond, toldWithin, true, func(context.Context) (bool, error) {
		order, err := resourceversion.CompareResourceVersion(t.informer.GetStore().LastStoreSyncResourceVersion(), version)
		return order >= 0, err
	})
	return err == nil
}

func recordsOf(found []any, err error) ([]v1alpha1.NodeAttestation, error) {
	items := make([]v1alpha1.NodeAttestation, len(found))
	for i := range found {
		items[i] = *found[i].(*v1alpha1.NodeAttestation)
	}
	return items, err
}

// wrote takes over a record that was just written.
func (t *toldRecords) wrote(record *v1alpha1.NodeAttestation) {
	if t != nil {
		t.known.Mutation(record.DeepCopy())
	}
}
