// SPDX-License-Identifier: Apache-2.0

// Package listwatch lets informers list and watch through a controller-runtime client, which may
// impersonate a user and limit its rate.
package listwatch

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// New returns a ListerWatcher for the objects of a list that match the options. note is called with
// the error of each call, nil after a success, and returns it.
//
// Lists come from etcd: the API server's watch cache may lack what another replica has just
// written.
func New(api client.WithWatch, list client.ObjectList, note func(error) error, options ...client.ListOption) toolscache.ListerWatcher {
	calls := &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			if raw.ResourceVersion == "0" {
				raw.ResourceVersion = ""
			}
			into := list.DeepCopyObject().(client.ObjectList)
			err := api.List(ctx, into, append(options[:len(options):len(options)], &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue})...)
			return into, note(err)
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			events, err := api.Watch(ctx, list.DeepCopyObject().(client.ObjectList), append(options[:len(options):len(options)], &client.ListOptions{Raw: &raw})...)
			return events, note(err)
		},
	}
	return toolscache.ToListWatcherWithWatchListSemantics(calls, api)
}
