// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// formatText is the format for people. Those for programs are in package outputformat.
const formatText = "text"

// output is the flag --output.
type output struct {
	format  string
	formats []string
}

// outputFlag adds the flag to a command. The first format is the default.
func outputFlag(c *cobra.Command, formats ...string) *output {
	o := &output{formats: formats}
	c.Flags().StringVarP(&o.format, "output", "o", formats[0], strings.Join(formats, ", "))
	completeFlag(c, "output", formats)
	return o
}

// check returns an error for a format that the command does not support.
func (o *output) check() error {
	if !slices.Contains(o.formats, o.format) {
		return usage(fmt.Errorf("--output %q: must be one of %s", o.format, strings.Join(o.formats, ", ")))
	}
	return nil
}
