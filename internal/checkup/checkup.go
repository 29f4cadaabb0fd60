// SPDX-License-Identifier: Apache-2.0

// Package checkup has the results of checks that name a remedy: those of `kubelet-authenticator
// doctor` on a node, and those of `kubectl attest check` in a cluster.
package checkup

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/terminal"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// Status is the result of a check.
type Status string

// The statuses. Their names are part of the output.
const (
	OK      Status = "ok"
	Warning Status = "warning"
	Failure Status = "failure"
	// Skipped is a check that does not apply, or that this user cannot make. It is no problem.
	Skipped Status = "skipped"
	// Unknown is a check that could not be made. Its message names the missing part, such as a
	// right. The cluster may have a problem there.
	Unknown Status = "unknown"
)

// severity orders statuses, from the best to the worst.
func (s Status) severity() int {
	return slices.Index([]Status{Skipped, OK, Warning, Unknown, Failure}, s)
}

// Result is the result of one check. A check leaves the name empty: Add sets it.
type Result struct {
	Name    string `json:"name"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	// Remedy is what can be done, or empty.
	Remedy string `json:"remedy,omitempty"`
}

// Worst merges several results of one check: the status is the worst of them, and each problem is
// listed. Without a problem, the first result of that status represents all.
func Worst(results ...Result) Result {
	worst := results[0]
	for _, r := range results {
		if r.Status.severity() > worst.Status.severity() {
			worst = r
		}
	}
	if worst.Status.severity() < Warning.severity() {
		return worst
	}
	var messages, remedies []string
	for _, r := range results {
		if r.Status.severity() >= Warning.severity() {
			messages = append(messages, r.Message)
			if r.Remedy != "" && !slices.Contains(remedies, r.Remedy) {
				remedies = append(remedies, r.Remedy)
			}
		}
	}
	worst.Message, worst.Remedy = strings.Join(messages, "; "), strings.Join(remedies, "; ")
	return worst
}

// Results are the results of all checks, in their order.
type Results []Result

// maxText bounds a message or a remedy, in bytes: a peer may have written a part of it.
const maxText = 1024

// Add adds the result of the check of this name.
func (all *Results) Add(name string, r Result) {
	*all = append(*all, Result{name, r.Status, text.Line(r.Message, maxText), text.Line(r.Remedy, maxText)})
}

// Status returns the worst status, OK at the best.
func (all Results) Status() Status {
	status := OK
	for _, r := range all {
		if r.Status.severity() > status.severity() {
			status = r.Status
		}
	}
	return status
}

// Named returns the names of the checks with a status.
func (all Results) Named(s Status) (names []string) {
	for _, r := range all {
		if r.Status == s {
			names = append(names, r.Name)
		}
	}
	return names
}

// Err returns an error that names the checks that failed, nil if none did.
func (all Results) Err() error {
	names := all.Named(Failure)
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%s failed: %s", text.Count(len(names), "check"), strings.Join(names, ", "))
}

// colors are those of the statuses in a terminal.
var colors = map[Status]string{OK: terminal.Green, Warning: terminal.Yellow, Unknown: terminal.Yellow, Failure: terminal.Red}

// Text lays the results out for a person: a line for each check, and its remedy below.
func (all Results) Text(colored bool) string {
	width := 0
	for _, r := range all {
		width = max(width, len(r.Name))
	}
	var out strings.Builder
	for _, r := range all {
		status := fmt.Sprintf("%-7s", r.Status)
		if colored {
			status = colors[r.Status] + status + terminal.Plain
		}
		_, _ = fmt.Fprintf(&out, "%s  %-*s  %s\n", status, width, r.Name, r.Message)
		if r.Remedy != "" {
			_, _ = fmt.Fprintf(&out, "%-7s  %-*s  remedy: %s\n", "", width, "", r.Remedy)
		}
	}
	return out.String()
}
