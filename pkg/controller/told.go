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

// toldRecords are the records of one cluster as a watch tells of them: a moment old, and older where the watch hangs. The API server has no
// index of fields, and goes through all records for each List. What may be decided by these is said at the readings.
type toldRecords struct {
	informer toolscache.SharedIndexInformer
	// heard is when the watch was last heard of, the zero value if there was none when one was last asked for; untold is when an own write was last
	// waited for in vain.
	heard, untold atomic.Value
}

// unwatchedRemind is how often a missing right to watch records is logged.
const unwatchedRemind = 10 * time.Minute

const (
	// silence is how long a watch may say nothing: the API server sends a bookmark each minute.
	silence = 3 * time.Minute
	// toldWithin is how long is waited until an own write is told, and untoldFor how long nothing is granted by what is told after that was in vain.
	toldWithin, untoldFor = 2 * time.Second, 10 * time.Second
)

// valueOf are the fields by which records are found.
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
			if t.note(err) != nil {
				return nil, err
			}
			return watch.Filter(events, func(event watch.Event) (watch.Event, bool) {
				t.heard.Store(time.Now())
				return event, true
			}), nil
		},
	}
	indexers := toolscache.Indexers{}
	for field, value := range valueOf {
		indexers[field] = func(object any) ([]string, error) { return []string{value(object.(*v1alpha1.NodeAttestation))}, nil }
	}
	t.informer = toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(calls, s.api), &v1alpha1.NodeAttestation{}, 0, indexers)
	failures := &telemetry.WatchErrors{Log: log, Message: "records are read from the API server for each decision, which is slow: list and watch on nodeattestations are needed", Remind: unwatchedRemind}
	return t, errors.Join(t.informer.SetTransform(trimRecord), t.informer.SetWatchErrorHandlerWithContext(failures.Handle))
}

// trimRecord drops what nobody reads; an update without it leaves it as it is.
func trimRecord(object any) (any, error) {
	if record, ok := object.(*v1alpha1.NodeAttestation); ok {
		record.ManagedFields = nil
	}
	return object, nil
}

func (t *toldRecords) note(err error) error {
	if err != nil {
		t.heard.Store(time.Time{})
	} else {
		t.heard.Store(time.Now())
	}
	return err
}

// source has the watch begin and end with a controller, which does not wait for it: until something was told records are read.
func (t *toldRecords) source() source.Source {
	return source.Func(func(ctx context.Context, _ workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		go t.informer.RunWithContext(ctx)
		return nil
	})
}

// hears reports whether all records were told of, and others would be.
func (t *toldRecords) hears() bool {
	if t == nil || !t.informer.HasSynced() || t.informer.GetStore().LastStoreSyncResourceVersion() == "" { // empty without AtomicFIFO
		return false
	}
	heard, _ := t.heard.Load().(time.Time)
	return time.Since(heard) < silence
}

// inTime reports whether, moreover, no own write was waited for in vain just now.
func (t *toldRecords) inTime() bool {
	if !t.hears() {
		return false
	}
	untold, _ := t.untold.Load().(time.Time)
	return time.Since(untold) >= untoldFor
}

// with returns the records that have a value in a field. The caller changes none.
func (t *toldRecords) with(field, value string) ([]v1alpha1.NodeAttestation, error) {
	return recordsOf(t.informer.GetIndexer().ByIndex(field, value))
}

// tells waits until a record is told as it was just written, and reports whether it was. Then so is what was written before it: a watch tells in the
// order of versions, and client-go keeps it (InOrderInformers, AtomicFIFO). Not by comparing versions: they begin anew where etcd is restored, and a watch does not.
func (t *toldRecords) tells(ctx context.Context, written *v1alpha1.NodeAttestation) bool {
	err := utilwait.PollUntilContextTimeout(ctx, 2*time.Millisecond, toldWithin, true, func(context.Context) (bool, error) {
		item, _, err := t.informer.GetStore().Get(written)
		told, _ := item.(*v1alpha1.NodeAttestation)
		return told != nil && told.UID == written.UID && told.ResourceVersion == written.ResourceVersion, err
	})
	if err != nil {
		t.untold.Store(time.Now())
	}
	return err == nil
}

func recordsOf(found []any, err error) ([]v1alpha1.NodeAttestation, error) {
	items := make([]v1alpha1.NodeAttestation, len(found))
	for i := range found {
		items[i] = *found[i].(*v1alpha1.NodeAttestation)
	}
	return items, err
}
