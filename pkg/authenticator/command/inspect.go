// SPDX-License-Identifier: Apache-2.0

package command

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

func (i *invocation) identifyCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "identify",
		Short: "Print what an inventory needs to know of this machine",
		Example: example(i.Name, `
# all that is known of this machine, as an inventory of its own
{} identify > machine.yaml

# its entry for the list of machines in an inventory: the fingerprints alone
{} identify --output=entry

# the fingerprint of its endorsement key
{} identify --output=json | jq -r '.device.eks[].fingerprint'`),
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := i.load()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), i.deadline())
			defer cancel()
			identity, err := a.Identify(ctx)
			if err != nil {
				return err
			}
			out, err := encodeIdentity(format, identity)
			if err != nil {
				return err
			}
			_, err = i.Stdout.Write(out)
			return err
		},
	}
	cli.OutputFlag(c, &format, outputformat.YAML, outputformat.JSON, formatEntry)
	return c
}

// formatEntry is an entry of an inventory.
const formatEntry = "entry"

func encodeIdentity(format string, identity *authenticator.Identity) ([]byte, error) {
	if format != formatEntry {
		return outputformat.Encode(format, identity)
	}
	device, ok := identity.Device.(provider.EKDevice)
	if !ok {
		return nil, cli.Usage(fmt.Errorf("--output %s: provider %s has no endorsement keys", formatEntry, identity.Provider))
	}
	entry := machineentry.Machine{NodeName: identity.NodeName, ProviderID: identity.ProviderID, EKs: device.EKFingerprints()}
	return []byte(entry.String()), nil
}

// deviceCommand is the command with the name of a provider that has a device.
func (i *invocation) deviceCommand(name string) *cobra.Command {
	c := &cobra.Command{
		Use:   name,
		Short: "Show the device of provider " + name,
		Args:  cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cli.Usage(fmt.Errorf("%s needs a command", c.CommandPath()))
		},
	}
	c.AddCommand(i.selfTestCommand(name))
	return c
}

// SelfTest is the output of a provider's self-test in JSON and YAML.
type SelfTest struct {
	// Passed is set if each check passed.
	Passed bool            `json:"passed"`
	Checks []SelfTestCheck `json:"checks"`
}

// SelfTestCheck is one step of a self-test.
type SelfTestCheck struct {
	Name string `json:"name"`
	// Milliseconds is how long it took.
	Milliseconds float64 `json:"milliseconds"`
	// Error says why it failed, empty if it passed.
	Error string `json:"error,omitempty"`
}

func (i *invocation) selfTestCommand(name string) *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:     "selftest",
		Short:   "Try each operation that the provider needs from its device, and report failures and times",
		Example: example(i.Name, "{} "+name+" selftest"),
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := i.root.PersistentFlags().Set("provider", name); err != nil {
				return err
			}
			a, err := i.load()
			if err != nil {
				return err
			}
			// a self-test holds the TPM's lock, so its time is bounded
			ctx, cancel := context.WithTimeout(cmd.Context(), i.deadline())
			defer cancel()
			if format == cli.FormatText {
				return a.SelfTest(ctx, i.printCheck)
			}
			return i.encodeSelfTest(ctx, a, format)
		},
	}
	cli.OutputFlag(c, &format, cli.FormatText, outputformat.JSON, outputformat.YAML)
	return c
}

// printCheck prints a step as soon as it is done: a TPM can take seconds for one.
func (i *invocation) printCheck(check provider.Check) {
	outcome := "ok"
	if check.Err != nil {
		outcome = "FAILED: " + text.Line(check.Err.Error(), cli.MaxLine)
	}
	_, _ = fmt.Fprintf(i.Stdout, "%-44s %9.1f ms  %s\n", check.Name, milliseconds(check.Took), outcome)
}

// encodeSelfTest prints all steps in one document.
func (i *invocation) encodeSelfTest(ctx context.Context, a *authenticator.Authenticator, format string) error {
	report := SelfTest{Checks: []SelfTestCheck{}}
	failure := a.SelfTest(ctx, func(check provider.Check) {
		c := SelfTestCheck{Name: check.Name, Milliseconds: milliseconds(check.Took)}
		if check.Err != nil {
			c.Error = text.Line(check.Err.Error(), cli.MaxLine)
		}
		report.Checks = append(report.Checks, c)
	})
	report.Passed = failure == nil
	out, err := outputformat.Encode(format, report)
	if err == nil {
		_, err = i.Stdout.Write(out)
	}
	return cmp.Or(err, failure)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
