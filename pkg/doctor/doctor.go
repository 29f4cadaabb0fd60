// SPDX-License-Identifier: Apache-2.0

// Package doctor examines a node for problems with getting, or using, an attested certificate. It
// files no request and shows no secret. It changes nothing on disk, except that the provider may
// create the TPM's lock file and its directory. Without the lock, doctor would disturb a worker.
// docs/node.md has the checks.
package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
)

// Report is the outcome of all checks.
type Report struct {
	// Status is Failure if a check failed, else Warning if one warned, else OK.
	Status checkup.Status `json:"status"`
	// NotSwitchedOn is set on a machine without any configuration of this program. Then the
	// first check failed, and the others are skipped.
	NotSwitchedOn bool `json:"notSwitchedOn,omitempty"`
	// ExecFlags are the flags from the kubelet's kubeconfig. They are nil if its exec user is not
	// this program, or if the command line has --config.
	ExecFlags *nodestatus.ExecFlags `json:"execFlags,omitempty"`
	// Checks are in the order of Checks.
	Checks checkup.Results `json:"checks"`
}

func ok(format string, args ...any) checkup.Result {
	return checkup.Result{Status: checkup.OK, Message: fmt.Sprintf(format, args...)}
}
func skipped(format string, args ...any) checkup.Result {
	return checkup.Result{Status: checkup.Skipped, Message: fmt.Sprintf(format, args...)}
}
func warning(remedy, format string, args ...any) checkup.Result {
	return checkup.Result{Status: checkup.Warning, Message: fmt.Sprintf(format, args...), Remedy: remedy}
}
func failure(remedy, format string, args ...any) checkup.Result {
	return checkup.Result{Status: checkup.Failure, Message: fmt.Sprintf(format, args...), Remedy: remedy}
}

// maxFlags bounds the line about the kubelet's flags, in bytes: the kubeconfig is not trusted.
const maxFlags = 1024

// grace is how long after the deadline a check may still report what it waited for.
const grace = 500 * time.Millisecond

// Run runs all checks at the same time. It returns when they have ended or the timeout has passed.
// A check that panics or hangs fails alone, and hides no other. On a machine without
// any configuration it runs none, and returns a report that says so.
func Run(ctx context.Context, o Options) Report {
	e := newExamination(ctx, o)
	if why := e.whyNotSwitchedOn(); why != "" {
		return notSwitchedOn(why)
	}
	r := run(ctx, o.timeout(), Checks(), e)
	r.ExecFlags = o.ExecFlags
	return r
}

func run(ctx context.Context, timeout time.Duration, checks []Check, e *examination) Report {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	e.ctx = ctx
	type numbered struct {
		index int
		checkup.Result
	}
	done := make(chan numbered, len(checks))
	for i, check := range checks {
		go func() { done <- numbered{i, guarded(ctx, check, e)} }()
	}
	results := make([]checkup.Result, len(checks))
	for i := range results {
		results[i] = failure("set a longer --timeout, or check the TPM, the file systems and the network", "not finished within %s", timeout)
	}
	late := time.NewTimer(timeout + grace)
	defer late.Stop()
collect:
	for range checks {
		select {
		case n := <-done:
			results[n.index] = n.Result
		case <-late.C:
			break collect
		}
	}
	return report(checks, results)
}

// guarded converts a panic into a failure of this check only.
func guarded(ctx context.Context, check Check, e *examination) (f checkup.Result) {
	defer func() {
		if p := recover(); p != nil {
			// The value of the panic may hold a secret, so only its type is shown.
			f = failure("report this as a bug", "this check itself failed, with a panic (%T)", p)
		}
	}()
	return check.run(ctx, e)
}

func report(checks []Check, results []checkup.Result) Report {
	var r Report
	for i, result := range results {
		r.Checks.Add(checks[i].Name, result)
	}
	r.Status = r.Checks.Status()
	return r
}

// Text returns the report for a terminal.
func (r Report) Text() string {
	switch {
	case r.NotSwitchedOn:
		return r.textNotSwitchedOn()
	case r.ExecFlags != nil:
		return "flags: " + text.Line(r.ExecFlags.String(), maxFlags) + "\n\n" + r.Checks.Text(false)
	}
	return r.Checks.Text(false)
}
