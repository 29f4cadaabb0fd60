// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/telemetry"
)

// healthInterval is how often the sources are asked for problems.
const healthInterval = 5 * time.Second

// Health logs the problems of sources when they change. The last good content stays in use, so
// nobody would notice otherwise.
type Health struct {
	sources      map[string]interface{ Problem() error }
	log          logr.Logger
	lastReported map[string]string
}

// NewHealth returns the health of named sources. A source counts that has the method Problem, which
// returns what keeps its latest content from being used.
func NewHealth(sources map[string]any, log logr.Logger) *Health {
	h := &Health{sources: map[string]interface{ Problem() error }{}, log: log, lastReported: map[string]string{}}
	for name, source := range sources {
		if s, ok := source.(interface{ Problem() error }); ok {
			h.sources[name] = s
		}
	}
	return h
}

// Start asks the sources until ctx ends. A manager runs it.
func (h *Health) Start(ctx context.Context) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			h.check()
		}
	}
}

// NeedLeaderElection has replicas that stand by log problems, too.
func (*Health) NeedLeaderElection() bool { return false }

func (h *Health) check() {
	for name, source := range h.sources {
		problem := ""
		if err := source.Problem(); err != nil {
			problem = text.Line(err.Error(), telemetry.MaxLogged)
		}
		if problem == h.lastReported[name] {
			continue
		}
		if problem == "" {
			h.log.Info(fmt.Sprintf("%s: in use again", name))
		} else {
			h.log.Info(fmt.Sprintf("%s: is invalid or cannot be read; the last good one is used, if there is one", name), "problem", problem)
		}
		h.lastReported[name] = problem
	}
}
