// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
)

func (i *invocation) doctorCommand() *cobra.Command {
	o := doctor.Options{}
	var format string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Examine the node: TPM, files, clock, API server, signer, and the running kubelet",
		Long: `Examine the node for anything that keeps it from getting, or from using, an attested certificate. No request is filed. Nothing on
disk is changed, except that the TPM's lock file, and the runtime directory for it, are created if they are missing.
It works without root, and says what it could not see. It takes the flags that the kubelet's kubeconfig gives the plugin, unless
--config is given, and names them. A flag on the command line wins.

It exits with 31 if a check failed, and also on a machine without any configuration. Otherwise, even with warnings, it exits with 0.`,
		Example: example(i.Name, `
{} doctor

# the names of the checks that failed
{} doctor --output=json | jq -r '.checks[] | select(.status == "failure") | .name'`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Timeout <= 0 {
				return cli.Usage(fmt.Errorf("--timeout %s: must be more than 0", o.Timeout))
			}
			o.Explicit = i.givesSetting()
			_, o.ExecFlags = i.takeExecFlags()
			o.Config, o.ConfigErr = i.settings()
			if _, err := i.newAuthenticator(o.Config, o.ConfigErr, ""); err != nil {
				o.ConfigErr = err
			}
			o.ConfigFile, o.Providers, o.Choose, o.UserAgent = i.file, i.Providers, i.Choose, i.userAgent()
			return i.printDoctor(doctor.Run(cmd.Context(), o), format)
		},
	}
	cli.OutputFlag(c, &format, cli.FormatText, outputformat.JSON, outputformat.YAML)
	c.Flags().DurationVar(&o.Timeout, "timeout", doctor.DefaultTimeout, "longest time for all checks together")
	c.Flags().StringVar(&o.Proc, "proc", "/proc", "where the proc file system is")
	c.Flags().StringVar(&o.Manifests, "manifests", "", "directory of static pods (default: kubeadm's)")
	for _, name := range []string{"proc", "manifests"} {
		c.Flags().Lookup(name).Hidden = true
	}
	return c
}

// printDoctor prints the report, and fails if a check did.
func (i *invocation) printDoctor(report doctor.Report, format string) error {
	out := []byte(report.Text())
	if format != cli.FormatText {
		var err error
		if out, err = outputformat.Encode(format, report); err != nil {
			return err
		}
	}
	if _, err := i.Stdout.Write(out); err != nil {
		return err
	}
	if report.NotSwitchedOn {
		return &reason.Failure{
			Reason: reason.NodeUnhealthy, Hint: "write " + i.file + ", or name the settings that are to be examined with flags",
			Err: errors.New("this program is not switched on here"),
		}
	}
	if err := report.Checks.Err(); err != nil {
		return &reason.Failure{
			Reason: reason.NodeUnhealthy, Hint: "each check above names its remedy; kubelet-authenticator(8), docs/node.md, has all of them", Err: err,
		}
	}
	return nil
}
