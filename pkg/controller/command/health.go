// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

const (
	// checkTimeout bounds a check. Probes wait a second.
	checkTimeout = 800 * time.Millisecond
	// maxReason bounds the text about a failed check, in bytes.
	maxReason = 400
	// clientTimeout bounds the time of a client to send a request, to read the answer, and to send
	// the next request.
	clientTimeout = 10 * time.Second
)

// check is a check of /readyz.
type check struct {
	name string
	run  func(context.Context) error
	kind checkKind
	// passed says that the check has passed once.
	passed *atomic.Bool
}

// checkKind says how a failed check affects readiness.
type checkKind int

const (
	// always: the replica is not ready.
	always checkKind = iota + 1
	// once: the replica is not ready until the check has passed once. So a rollout stops at a
	// replica that never had its inputs, and a replica that decides by last known good inputs stays
	// ready.
	once
	// never: the failure is only reported.
	never
)

// newCheck returns a check.
func newCheck(name string, kind checkKind, run func(context.Context) error) check {
	return check{name, run, kind, &atomic.Bool{}}
}

// result returns a line about the check, whether the check passed, and whether the replica may be
// ready.
func (c check) result(ctx context.Context) (line string, passed, ready bool) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	err := c.run(ctx)
	if err == nil {
		c.passed.Store(true)
		return "[+]" + c.name + " ok", true, true
	}
	why := text.Line(err.Error(), maxReason)
	if c.kind == never || c.kind == once && c.passed.Load() {
		return "[!]" + c.name + " failed, which does not end readiness: " + why, false, true
	}
	return "[-]" + c.name + " failed: " + why, false, false
}

// readyz answers /readyz as Kubernetes' components do: "ok" if all checks passed and the query has
// no "verbose". It adds the reason of each failed check. The query "exclude" leaves a check out.
//
// Everybody who reaches the port can read the answer. Errors of sources quote no secret.
type readyz []check

func (checks readyz) ServeHTTP(answer http.ResponseWriter, request *http.Request) {
	query := request.URL.Query()
	var lines []string
	passed, ready := true, true
	for _, c := range checks {
		if slices.Contains(query["exclude"], c.name) {
			lines = append(lines, "[+]"+c.name+" excluded: ok")
			continue
		}
		line, ok, may := c.result(request.Context())
		lines = append(lines, line)
		passed, ready = passed && ok, ready && may
	}
	answer.Header().Set("Content-Type", "text/plain; charset=utf-8")
	answer.Header().Set("X-Content-Type-Options", "nosniff")
	switch verbose := query.Has("verbose"); {
	case !ready:
		answer.WriteHeader(http.StatusInternalServerError)
		lines = append(lines, "readyz check failed\n")
	case passed && !verbose:
		lines = []string{"ok"}
	default:
		lines = append(lines, "readyz check passed\n")
	}
	_, _ = fmt.Fprint(answer, strings.Join(lines, "\n")) // fails only if the client has gone
}

// addHealthServer adds the server of /healthz and /readyz to a manager. controller-runtime's own
// server does not show the reasons.
func addHealthServer(m manager.Manager, address string, checks ...check) error {
	if address == "0" {
		return nil
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
	if err != nil {
		return fmt.Errorf("healthBindAddress: %w", err)
	}
	slices.SortFunc(checks, func(a, b check) int { return strings.Compare(a.name, b.name) })
	mux := http.NewServeMux()
	mux.Handle("/readyz", readyz(checks))
	for _, c := range checks {
		mux.Handle("/readyz/"+c.name, readyz{c})
	}
	mux.HandleFunc("/healthz", func(answer http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(answer, "ok") })
	return m.Add(&manager.Server{
		Name: "health probe", Listener: listener, ShutdownTimeout: new(time.Second),
		Server: &http.Server{Handler: mux, ReadTimeout: clientTimeout, WriteTimeout: clientTimeout, IdleTimeout: clientTimeout},
	})
}
