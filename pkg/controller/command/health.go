// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// checkTimeout bounds one run of the checks. The kubelet's probes wait for one second.
	checkTimeout = 800 * time.Millisecond
	// readinessAge is how long all callers of /readyz share one result.
	readinessAge = 3 * time.Second
	// unreadyAge is the same while the replica is not ready. It is short, since a rollout waits.
	unreadyAge = 250 * time.Millisecond
	// maxReason bounds the text about a failed check, in bytes.
	maxReason = 400
	// clientTimeout bounds how long a client may take to send a request, to read the answer, and
	// to send the next request.
	clientTimeout = 10 * time.Second
)

// check is a check of /readyz.
type check struct {
	name string
	run  func(context.Context) error
	kind checkKind
	// passed says that the check has passed once.
	passed bool
}

// checkKind says how a failed check affects readiness.
type checkKind int

const (
	// always: the replica is not ready.
	always checkKind = iota + 1
	// once: the replica is not ready until the check has passed once. So a rollout stops at a
	// replica that never had its inputs. A replica stays ready while it uses last known good
	// inputs.
	once
)

// newCheck returns a check.
func newCheck(name string, kind checkKind, run func(context.Context) error) check {
	return check{name: name, kind: kind, run: run}
}

// readyz answers /readyz with "ok" and the status 200, or with "not ready" and 500. The kubelet
// needs only the status. The log has the reasons.
//
// Anyone who reaches the port may send requests, without a credential. So the checks run at most
// once per readinessAge (unreadyAge) for all callers together, whatever a request has and when it
// ends.
type readyz struct {
	log klog.Logger

	mu      sync.Mutex
	checks  []check
	checked time.Time
	// blocking are the names of the checks that kept the replica from being ready in the last run.
	blocking []string
}

// newReadyz returns the handler of /readyz.
func newReadyz(log klog.Logger, checks ...check) *readyz {
	return &readyz{log: log, checks: checks}
}

func (r *readyz) ServeHTTP(answer http.ResponseWriter, _ *http.Request) {
	if !r.ready() {
		http.Error(answer, "not ready", http.StatusInternalServerError)
		return
	}
	_, _ = fmt.Fprint(answer, "ok") // fails only if the client has gone
}

// ready returns the last result. It runs the checks first if that result is too old. It logs the
// first result, and each result with other blocking checks than the one before.
func (r *readyz) ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.checked.IsZero()
	isReady, age := len(r.blocking) == 0, readinessAge
	if !isReady {
		age = unreadyAge
	}
	if !first && time.Since(r.checked) < age {
		return isReady
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout) // the result is for all callers
	defer cancel()
	failures := make([]error, len(r.checks))
	var running sync.WaitGroup
	for i, c := range r.checks {
		running.Go(func() { failures[i] = c.run(ctx) })
	}
	running.Wait()
	r.checked = time.Now()
	var blocking, reasons []string
	for i := range r.checks {
		c := &r.checks[i]
		c.passed = c.passed || failures[i] == nil
		if failures[i] == nil || c.kind == once && c.passed {
			continue
		}
		blocking = append(blocking, c.name)
		reasons = append(reasons, c.name+": "+text.Line(failures[i].Error(), maxReason))
	}
	if first || !slices.Equal(blocking, r.blocking) {
		r.log.Info("readiness", "ready", len(blocking) == 0, "blocking", blocking, "reasons", reasons)
	}
	r.blocking = blocking
	return len(blocking) == 0
}

// addHealthServer adds a server for /healthz and /readyz to a manager. controller-runtime has one,
// but that server runs the checks for each request, and does not log why a check failed.
func addHealthServer(m manager.Manager, address string, checks ...check) error {
	if address == "0" {
		return nil
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
	if err != nil {
		return fmt.Errorf("healthBindAddress: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("/readyz", newReadyz(m.GetLogger(), checks...))
	mux.HandleFunc("/healthz", func(answer http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(answer, "ok") })
	return m.Add(&manager.Server{
		Name: "health probe", Listener: listener, ShutdownTimeout: new(time.Second),
		Server: &http.Server{Handler: mux, ReadTimeout: clientTimeout, WriteTimeout: clientTimeout, IdleTimeout: clientTimeout},
	})
}
