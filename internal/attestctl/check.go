// SPDX-License-Identifier: Apache-2.0

package attestctl

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
)

// Report is the output of the command check.
type Report struct {
	// Status is failure if a check failed, else unknown if one could not be made, else warning if
	// one warned, else ok.
	Status checkup.Status  `json:"status"`
	Checks checkup.Results `json:"checks"`
}

func ok(format string, arguments ...any) checkup.Result {
	return checkup.Result{Status: checkup.OK, Message: sprintf(format, arguments...)}
}

func warning(remedy, format string, arguments ...any) checkup.Result {
	return checkup.Result{Status: checkup.Warning, Message: sprintf(format, arguments...), Remedy: remedy}
}

func failed(remedy, format string, arguments ...any) checkup.Result {
	return checkup.Result{Status: checkup.Failure, Message: sprintf(format, arguments...), Remedy: remedy}
}

func unknown(remedy, format string, arguments ...any) checkup.Result {
	return checkup.Result{Status: checkup.Unknown, Message: sprintf(format, arguments...), Remedy: remedy}
}

// unread returns the result of a check that cannot read an object. An object that the user may not
// read is unknown, never ok. missing is the remedy if the object does not exist.
func unread(err error, missing string) checkup.Result {
	switch {
	case apierrors.IsForbidden(err):
		return unknown("have somebody with that right run it, or bind node-attestation-viewer (packaging/kubernetes/optional/operators.yaml)", "%v", err)
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		return failed(missing, "%v", err)
	}
	return unknown("", "%v", reached(err))
}

func (i *invocation) checkCommand() *cobra.Command {
	var format string
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
			return i.printReport(report, format)
		},
	}
	outputFlag(c, &format)
	return c
}

// run runs the checks one after the other: each is a call or two.
func (e *examination) run(ctx context.Context) (*Report, error) {
	r := &Report{}
	for _, check := range e.checks() {
		result := check.run(ctx)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r.Checks.Add(check.name, result)
	}
	r.Status = r.Checks.Status()
	return r, nil
}

func (i *invocation) printReport(r *Report, format string) error {
	if format != "" {
		if err := i.Print(format, r); err != nil {
			return err
		}
	} else if _, err := i.Stdout.Write([]byte(r.Checks.Text(i.colors()))); err != nil {
		return err
	}
	const hint = "each check above names its remedy; docs/kubectl-attest.md has all of them"
	if err := r.Checks.Err(); err != nil {
		return cli.Fail(codeCheckFailed, hint, err)
	}
	if names := r.Checks.Named(checkup.Unknown); len(names) > 0 {
		return cli.Fail(codeCheckUnknown, hint, errors.New("not known: "+strings.Join(names, ", ")))
	}
	return nil
}
