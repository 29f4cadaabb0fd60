// SPDX-License-Identifier: Apache-2.0

// Package listwatch has informers that list and watch through a controller-runtime client, which
// may impersonate a user and limit its rate.
package listwatch

import (
	"context"
	"errors"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Informer says what an informer watches. A field is required unless its comment says optional.
type Informer struct {
	API client.WithWatch
	// List and Object are of the kind that is watched.
	List   client.ObjectList
	Object client.Object
	// In selects objects. Optional.
	In []client.ListOption
	// Trim drops fields of an object that nobody reads.
	Trim toolscache.TransformFunc
	// Changed is called after each event.
	Changed func()
	// Called gets the error of each call, nil after a success. Optional.
	Called func(error)
	// Failed reports a list or watch that failed.
	Failed toolscache.WatchErrorHandlerWithContext
}

// New returns the informer. Its Run starts it.
func (i Informer) New() (toolscache.SharedIndexInformer, error) {
	called := i.Called
	if called == nil {
		called = func(error) {}
	}
	informer := toolscache.NewSharedIndexInformer(listerWatcher(i.API, i.List, called, i.In), i.Object, 0, toolscache.Indexers{})
	_, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { i.Changed() }, UpdateFunc: func(any, any) { i.Changed() }, DeleteFunc: func(any) { i.Changed() },
	})
	return informer, errors.Join(err, informer.SetTransform(i.Trim), informer.SetWatchErrorHandlerWithContext(i.Failed))
}

// listerWatcher lists and watches the objects of a list that match the options.
//
// Lists come from etcd: the API server's watch cache may lack what another replica has just
// written.
func listerWatcher(api client.WithWatch, list client.ObjectList, called func(error), options []client.ListOption) toolscache.ListerWatcher {
	calls := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			if raw.ResourceVersion == "0" {
				raw.ResourceVersion = ""
			}
			into := list.DeepCopyObject().(client.ObjectList)
			err := api.List(ctx, into, append(options[:len(options):len(options)], &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue})...)
			called(err)
			return into, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			events, err := api.Watch(ctx, list.DeepCopyObject().(client.ObjectList), append(options[:len(options):len(options)], &client.ListOptions{Raw: &raw})...)
			called(err)
			return events, err
		},
	}
	return toolscache.ToListWatcherWithWatchListSemantics(calls, api)
}
