// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// FormatText is the format for people. Those for programs are in package outputformat.
const FormatText = "text"

// OutputFlag adds the flag --output to a command. The first format is the default.
func OutputFlag(c *cobra.Command, format *string, formats ...string) {
	*format = formats[0]
	addOutput(c, format, strings.Join(formats, ", "), formats)
}

// OptionalOutputFlag adds the flag --output to a command. Without it the format is empty, for text.
func OptionalOutputFlag(c *cobra.Command, format *string, usage string, formats ...string) {
	*format = ""
	addOutput(c, format, usage, formats)
}

func addOutput(c *cobra.Command, format *string, usage string, formats []string) {
	c.Flags().VarP(&outputValue{format, formats}, "output", "o", usage)
	CompleteFlag(c, "output", formats)
}

// outputValue is a pflag.Value that refuses formats that the command does not support.
type outputValue struct {
	format  *string
	formats []string
}

func (v *outputValue) String() string { return *v.format }
func (v *outputValue) Type() string   { return "string" }

func (v *outputValue) Set(format string) error {
	// the default may be given, also the empty one
	if format != *v.format && !slices.Contains(v.formats, format) {
		return fmt.Errorf("must be one of %s", strings.Join(v.formats, ", "))
	}
	*v.format = format
	return nil
}

// CompleteFlag registers shell completion for the values of a command's flag.
func CompleteFlag(c *cobra.Command, flag string, values []string) {
	// It fails only for a flag that does not exist, or was registered before.
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}
