// SPDX-License-Identifier: Apache-2.0

// Package cli has the errors of command lines that do not parse, for all programs.
package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// NoArgs refuses arguments, and names the command that was probably meant. usage makes the error
// for a wrong command line.
func NoArgs(usage func(error) error) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		var names []string
		for _, below := range c.Commands() {
			if !below.Hidden {
				names = append(names, below.Name())
			}
		}
		return usage(fmt.Errorf("unknown command or argument %q for %s%s", args[0], c.CommandPath(), text.DidYouMean(args[0], "", names)))
	}
}

// FlagError adds to an error about an unknown flag the one that was probably meant.
func FlagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return fmt.Errorf("%w%s", err, text.DidYouMean(unknown.GetSpecifiedName(), "--", names))
}
