// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	toolscache "k8s.io/client-go/tools/cache"
)

// unwatchedRemind is how often it is said that something may not be watched.
const unwatchedRemind = 10 * time.Minute

// watchFailures says from time to time that something may not be watched, and leaves other failures to client-go. One watch alone uses it.
type watchFailures struct {
	log logr.Logger
	// what goes wrong without the right, and which right it is.
	what string
	// remind is how often it is said.
	remind time.Duration
	said   time.Time
}

func (w *watchFailures) handle(ctx context.Context, reflector *toolscache.Reflector, err error) {
	if !apierrors.IsForbidden(err) {
		toolscache.DefaultWatchErrorHandler(ctx, reflector, err)
		return
	}
	if now := time.Now(); w.said.IsZero() || now.Sub(w.said) >= w.remind {
		w.said = now
		w.log.Info(w.what+", see packaging/kubernetes/rbac.yaml", "cause", err.Error())
	}
}
