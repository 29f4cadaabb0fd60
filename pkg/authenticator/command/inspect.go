// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

func (i *invocation) identifyCommand() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "identify",
		Short: "Print what an inventory needs to know of this machine",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "json" && output != "yaml" {
				return usage(fmt.Errorf("--output %q: is json or yaml", output))
			}
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
			var out []byte
			if output == "json" {
				out, err = json.MarshalIndent(identity, "", "  ")
				out = append(out, '\n')
			} else {
				out, err = yaml.Marshal(identity)
			}
			if err != nil {
				return err
			}
			_, err = i.Stdout.Write(out)
			return err
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "yaml", "json or yaml")
	return c
}

// deviceCommand is the command with the name of a provider that has a device.
func (i *invocation) deviceCommand(name string) *cobra.Command {
	c := &cobra.Command{
		Use:   name,
		Short: "Look into the device of provider " + name,
		Args:  noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return usage(fmt.Errorf("%s needs a command", c.CommandPath()))
		},
	}
	c.AddCommand(&cobra.Command{
		Use:   "selftest",
		Short: "Try each thing that the provider needs of its device, and say what is refused and how long each takes",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := i.root.PersistentFlags().Set("provider", name); err != nil {
				return err
			}
			a, err := i.load()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), i.deadline()) // it holds the TPM's lock
			defer cancel()
			return a.SelfTest(ctx, func(check provider.Check) {
				outcome := "ok"
				if check.Err != nil {
					outcome = "FAILED: " + text.Line(check.Err.Error(), maxLine)
				}
				_, _ = fmt.Fprintf(i.Stdout, "%-44s %9.1f ms  %s\n", check.Name, float64(check.Took)/float64(time.Millisecond), outcome)
			})
		},
	})
	return c
}
