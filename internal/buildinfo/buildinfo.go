// SPDX-License-Identifier: Apache-2.0

// Package buildinfo is the version command that all programs have.
package buildinfo

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
)

// Info is the output of the version command.
type Info struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// GoVersion is filled in by Print.
	GoVersion string `json:"goVersion"`
	// ExecAPI are the versions of client-go's exec API that are answered.
	ExecAPI []string `json:"execAPIVersions,omitempty"`
	// Protocols are the versions of the evidence document, by provider.
	Protocols map[string][]string `json:"protocolVersions"`
}

// Command returns the command of a program. usage makes the error for a wrong command line.
func Command(name string, info Info, stdout io.Writer, args cobra.PositionalArgs, usage func(error) error) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "version",
		Short: "Print version, commit, Go version and protocol versions",
		Args:  args,
		RunE: func(*cobra.Command, []string) error {
			if output != "" && !outputformat.Valid(output) {
				return usage(fmt.Errorf("--output %q: must be json or yaml", output))
			}
			return info.Print(stdout, name, output)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "json or yaml prints all of it")
	return c
}

// Print prints one line for the program of that name. As "json" or "yaml" it prints all of it.
func (i Info) Print(stdout io.Writer, name, output string) error {
	i.GoVersion = runtime.Version()
	if output == "" {
		_, err := fmt.Fprintf(stdout, "%s %s (commit %s, %s)\n", name, i.Version, i.Commit, i.GoVersion)
		return err
	}
	out, err := outputformat.Encode(output, i)
	if err != nil {
		return err
	}
	_, err = stdout.Write(out)
	return err
}
