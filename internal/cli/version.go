// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
)

// BuildInfo is the output of the command version.
type BuildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// GoVersion is filled in by PrintVersion.
	GoVersion string `json:"goVersion"`
	// ExecAPI are the versions of client-go's exec API that are answered.
	ExecAPI []string `json:"execAPIVersions,omitempty"`
	// Protocols are the versions of the evidence document, by provider.
	Protocols map[string][]string `json:"protocolVersions"`
}

// VersionCommand returns the command version of the program of that name.
func (p Process) VersionCommand(name string, info BuildInfo) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "version",
		Short: "Print version, commit, Go version and protocol versions",
		Args:  NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return p.PrintVersion(name, info, output)
		},
	}
	OptionalOutputFlag(c, &output, "json or yaml prints all of it", outputformat.JSON, outputformat.YAML)
	return c
}

// PrintVersion prints one line for the program of that name. In a format it prints all of it.
func (p Process) PrintVersion(name string, info BuildInfo, format string) error {
	info.GoVersion = runtime.Version()
	if format != "" {
		return p.Print(format, info)
	}
	_, err := fmt.Fprintf(p.Stdout, "%s %s (commit %s, %s)\n", name, info.Version, info.Commit, info.GoVersion)
	return err
}
