// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

// versionInfo is what the version command prints.
type versionInfo struct {
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"goVersion"`
	// ExecAPI are the versions of client-go's exec API that are answered.
	ExecAPI []string `json:"execAPIVersions"`
	// Protocols are the versions of the evidence document, by provider.
	Protocols map[string][]string `json:"protocolVersions"`
}

func (i *invocation) versionCommand() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "version",
		Short: "Print version, commit, Go version and protocol versions",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			info := versionInfo{
				Version: i.Version, Commit: i.Commit, GoVersion: runtime.Version(),
				ExecAPI: authenticator.ExecAPIVersions(), Protocols: map[string][]string{},
			}
			for _, p := range i.Providers {
				info.Protocols[p.Name] = p.Versions
			}
			switch output {
			case "":
				_, err := fmt.Fprintf(i.Stdout, "%s %s (commit %s, %s)\n", i.Name, info.Version, info.Commit, info.GoVersion)
				return err
			case "json":
				encoder := json.NewEncoder(i.Stdout)
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
