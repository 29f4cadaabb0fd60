// SPDX-License-Identifier: Apache-2.0

// Package buildinfo is the version command that all programs have.
package buildinfo

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"
)

// Info is the output of the version command.
type Info struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// GoVersion is filled in by Command.
	GoVersion string `json:"goVersion"`
	// ExecAPI are the versions of client-go's exec API that are answered.
	ExecAPI []string `json:"execAPIVersions,omitempty"`
	// Protocols are the versions of the evidence document, by provider.
	Protocols map[string][]string `json:"protocolVersions"`
}

// Command returns the command of a program. usage makes the error for a wrong command line.
func Command(name string, info Info, stdout io.Writer, args cobra.PositionalArgs, usage func(error) error) *cobra.Command {
	info.GoVersion = runtime.Version()
	var output string
	c := &cobra.Command{
		Use:   "version",
		Short: "Print version, commit, Go version and protocol versions",
		Args:  args,
		RunE: func(*cobra.Command, []string) error {
			switch output {
			case "":
				_, err := fmt.Fprintf(stdout, "%s %s (commit %s, %s)\n", name, info.Version, info.Commit, info.GoVersion)
				return err
			case "json":
				encoder := json.NewEncoder(stdout)
				encoder.SetIndent("", "  ")
				return encoder.Encode(info)
			default:
				return usage(fmt.Errorf("--output %q: can only be json", output))
			}
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "json prints all of it")
	return c
}
