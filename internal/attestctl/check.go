// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// checkState is the result of a check. Its names are part of the output.
type checkState string

const (
	stateOK      checkState = "ok"
	stateWarning checkState = "warning"
	stateFailure checkState = "failure"
	// stateUnknown is a check that could not be made. Its message names the missing part, such as a
	// right.
	stateUnknown checkState = "unknown"
)

// Result is the result of one check.
type Result struct {
	Name    string     `json:"name"`
	Status  checkState `json:"status"`
	Message string     `json:"message"`
	// Remedy is what can be done, or empty.
	Remedy string `json:"remedy,omitempty"`
}

// Report is the output of the command check.
type Report struct {
	// Status is failure if a check failed, else unknown if one could not be made, else warning if
	// one warned, else ok.
	Status checkState `json:"status"`
	Checks []Result   `json:"checks"`
}

// named returns the names of the checks in a state.
func (r *Report) named(s checkState) (names []string) {
	for _, c := range r.Checks {
		if c.Status == s {
			names = append(names, c.Name)
		}
	}
	return names
}

// finding is a Result without the check's name.
type finding struct {
	state           checkState
	message, remedy string
}

func ok(format string, arguments ...any) finding {
	return finding{state: stateOK, message: sprintf(format, arguments...)}
}

func warning(remedy, format string, arguments ...any) finding {
	return finding{stateWarning, sprintf(format, arguments...), remedy}
}

func failed(remedy, format string, arguments ...any) finding {
	return finding{stateFailure, sprintf(format, arguments...), remedy}
}

func unknown(remedy, format string, arguments ...any) finding {
	return finding{stateUnknown, sprintf(format, arguments...), remedy}
}

// unread returns the finding of a check that cannot read an object. An object that the user may not
// read is unknown, never ok. missing is the remedy if the object does not exist.
func unread(err error, missing string) finding {
	switch {
	case apierrors.IsForbidden(err):
		return unknown("have somebody with that right run it, or bind node-attestation-viewer (packaging/kubernetes/optional/operators.yaml)", "%v", err)
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return failed(missing, "%v", err)
	}
	return unknown("", "%v", reached(err))
}

func (i *invocation) checkCommand() *cobra.Command {
	var format *output
	c := &cobra.Command{
		Use:   "check",
		Short: "Check policies, bindings, CA, controller, inventory and sources of endorsement keys",
		Long: `Check what attestation in a cluster depends on, and say what can be done. Nothing is changed. What the user may not read is unknown.

It exits with 0 if nothing failed, 31 if a check failed, and 33 if none failed and one is unknown.`,
		Example: `  kubectl attest check
  kubectl attest check -o json | jq -r '.checks[] | select(.status == "failure") | .name'`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			a, err := i.open(c.Context())
			if err != nil {
				return err
			}
			report, err := (&examination{access: a, now: i.now}).run(c.Context())
			if err != nil {
				return err
			}
			return i.printReport(report, format.format)
		},
	}
	format = outputFlag(c)
	return c
}

// run runs the checks one after the other: each is a call or two.
func (e *examination) run(ctx context.Context) (*Report, error) {
	r := &Report{Status: stateOK}
	worse := []checkState{stateOK, stateWarning, stateUnknown, stateFailure}
	rank := func(s checkState) int {
		for i := range worse {
			if worse[i] == s {
				return i
			}
		}
		return len(worse)
	}
	for _, check := range e.checks() {
		f := check.run(ctx)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r.Checks = append(r.Checks, Result{check.name, f.state, text.Line(f.message, maxMessage), text.Line(f.remedy, maxMessage)})
		if rank(f.state) > rank(r.Status) {
			r.Status = f.state
		}
	}
	return r, nil
}

func (i *invocation) printReport(r *Report, format string) error {
	out := r.text(i.colors())
	if format != "" {
		if err := i.print(format, r); err != nil {
			return err
		}
	} else if _, err := i.Stdout.Write([]byte(out)); err != nil {
		return err
	}
	const hint = "each check above names its remedy; docs/kubectl-attest.md has all of them"
	if names := r.named(stateFailure); len(names) > 0 {
		return &failure{codeCheckFailed, hint, fmt.Errorf("%s failed: %s", text.Count(len(names), "check"), strings.Join(names, ", "))}
	}
	if names := r.named(stateUnknown); len(names) > 0 {
		return &failure{codeCheckUnknown, hint, errors.New("not known: " + strings.Join(names, ", "))}
	}
	return nil
}

// text lays a report out as `kubelet-authenticator doctor` does.
func (r *Report) text(colors bool) string {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var out strings.Builder
	for _, c := range r.Checks {
		state := fmt.Sprintf("%-7s", c.Status)
		if colors {
			state = map[checkState]string{stateOK: green, stateWarning: yellow, stateUnknown: yellow, stateFailure: red}[c.Status] + state + plain
		}
		_, _ = fmt.Fprintf(&out, "%s  %-*s  %s\n", state, width, c.Name, c.Message)
		if c.Remedy != "" {
			_, _ = fmt.Fprintf(&out, "%-7s  %-*s  remedy: %s\n", "", width, "", c.Remedy)
		}
	}
	return out.String()
}
