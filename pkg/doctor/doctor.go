// SPDX-License-Identifier: Apache-2.0

// Package doctor examines a node for problems with getting, or using, an attested certificate. It
// files no request and shows no secret. It changes nothing on disk, except that the provider may
// create the TPM's lock file and its directory. Without the lock, doctor would disturb a worker.
// docs/doctor.md has the checks.
package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

// Status is the result of a check.
type Status string

// The statuses. Their names are part of the output.
const (
	OK      Status = "ok"
	Warning Status = "warning"
	Failure Status = "failure"
	// Skipped is a check that could not be made, or does not apply. Its message says why.
	Skipped Status = "skipped"
)

// severity orders statuses, from the best to the worst.
func (s Status) severity() int { return slices.Index([]Status{Skipped, OK, Warning, Failure}, s) }

// Result is the result of one check.
type Result struct {
	Name    string `json:"name"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	// Remedy is what can be done, or empty.
	Remedy string `json:"remedy,omitempty"`
}

// Report is the outcome of all checks.
type Report struct {
	// Status is Failure if a check failed, else Warning if one warned, else OK.
	Status Status `json:"status"`
	// NotSwitchedOn is set on a machine without any configuration of this program. Then the
	// first check failed, and the others are skipped.
	NotSwitchedOn bool `json:"notSwitchedOn,omitempty"`
	// ExecFlags are the flags from the kubelet's kubeconfig. They are nil if its exec user is not
	// this program, or if the command line has --config.
	ExecFlags *authenticator.ExecFlags `json:"execFlags,omitempty"`
	// Checks are in the order of Checks.
	Checks []Result `json:"checks"`
}

// Failed returns the names of the checks that failed.
func (r Report) Failed() []string {
	var names []string
	for _, check := range r.Checks {
		if check.Status == Failure {
			names = append(names, check.Name)
		}
	}
	return names
}

// finding is a Result without the check's name.
type finding struct {
	status          Status
	message, remedy string
}

func ok(format string, args ...any) finding {
	return finding{status: OK, message: fmt.Sprintf(format, args...)}
}
func skipped(format string, args ...any) finding {
	return finding{status: Skipped, message: fmt.Sprintf(format, args...)}
}
func warning(remedy, format string, args ...any) finding {
	return finding{Warning, fmt.Sprintf(format, args...), remedy}
}
func failure(remedy, format string, args ...any) finding {
	return finding{Failure, fmt.Sprintf(format, args...), remedy}
}

// worst merges several findings of one check: the status is the worst of them, and each problem is
// listed. Without a problem, the first finding of that status represents all.
func worst(findings ...finding) finding {
	result := findings[0]
	for _, f := range findings {
		if f.status.severity() > result.status.severity() {
			result = f
		}
	}
	if result.status.severity() < Warning.severity() {
		return result
	}
	var messages, remedies []string
	for _, f := range findings {
		if f.status.severity() >= Warning.severity() {
			messages = append(messages, f.message)
			if f.remedy != "" && !slices.Contains(remedies, f.remedy) {
				remedies = append(remedies, f.remedy)
			}
		}
	}
	result.message, result.remedy = strings.Join(messages, "; "), strings.Join(remedies, "; ")
	return result
}

// maxText bounds a message or a remedy, in bytes: a peer may have written a part of it.
const maxText = 1024

// grace is how long after the deadline a check may still report what it was waiting for.
const grace = 500 * time.Millisecond

// Run runs all checks at the same time. It returns when they have ended or the timeout has passed.
// A check that panics or hangs is a failure of its own, and hides no other. On a machine without
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
		finding
	}
	done := make(chan numbered, len(checks))
	for i, check := range checks {
		go func() { done <- numbered{i, guarded(ctx, check, e)} }()
	}
	findings := make([]finding, len(checks))
	for i := range findings {
		findings[i] = failure("set a longer --timeout, or find out what hangs: the TPM, a file system, or the network", "not finished within %s", timeout)
	}
	late := time.NewTimer(timeout + grace)
	defer late.Stop()
collect:
	for range checks {
		select {
		case n := <-done:
			findings[n.index] = n.finding
		case <-late.C:
			break collect
		}
	}
	return report(checks, findings)
}

// guarded converts a panic into a failure of this check only.
func guarded(ctx context.Context, check Check, e *examination) (f finding) {
	defer func() {
		if p := recover(); p != nil {
			// The value of the panic may hold a secret: only its type is shown.
			f = failure("report this as a bug", "this check itself failed, with a panic (%T)", p)
		}
	}()
	return check.run(ctx, e)
}

func report(checks []Check, findings []finding) Report {
	r := Report{Status: OK}
	for i, f := range findings {
		r.Checks = append(r.Checks, Result{checks[i].Name, f.status, text.Line(f.message, maxText), text.Line(f.remedy, maxText)})
		if f.status.severity() > r.Status.severity() {
			r.Status = f.status
		}
	}
	return r
}

// Text lays a report out for a terminal: a line for each check, and its remedy below.
func (r Report) Text() string {
	if r.NotSwitchedOn {
		return r.textNotSwitchedOn()
	}
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var out strings.Builder
	if r.ExecFlags != nil {
		out.WriteString("flags: " + text.Line(r.ExecFlags.String(), maxText) + "\n\n")
	}
	for _, c := range r.Checks {
		_, _ = fmt.Fprintf(&out, "%-7s  %-*s  %s\n", c.Status, width, c.Name, c.Message)
		if c.Remedy != "" {
			_, _ = fmt.Fprintf(&out, "%-7s  %-*s  remedy: %s\n", "", width, "", c.Remedy)
		}
	}
	return out.String()
}
