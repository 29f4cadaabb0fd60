// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"cmp"
	"context"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
)

// WatchErrors handles the errors of one informer. It logs a missing right from time to time, and
// leaves other errors to client-go.
type WatchErrors struct {
	Log logr.Logger
	// Message names the right, and what does not work without it.
	Message string
	// See is the file with the right. Default: packaging/kubernetes/rbac.yaml.
	See string
	// Remind is the time between two log lines about the missing right. Required.
	Remind time.Duration

	logged Once
}

// Handle is a client-go WatchErrorHandlerWithContext.
func (w *WatchErrors) Handle(ctx context.Context, reflector *toolscache.Reflector, err error) {
	if !apierrors.IsForbidden(err) {
		toolscache.DefaultWatchErrorHandler(ctx, reflector, err)
		return
	}
	if w.logged.MarkReported("", "", time.Now(), w.Remind) {
		w.Log.Error(nil, w.Message+", see "+cmp.Or(w.See, "packaging/kubernetes/rbac.yaml"), "cause", err.Error())
	}
}
