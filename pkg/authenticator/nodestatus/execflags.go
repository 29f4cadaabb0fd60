// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"fmt"
	"strings"
)

// ExecFlags are the flags that a command has taken from the exec user in the kubelet's kubeconfig.
type ExecFlags struct {
	// Kubeconfig is the path of the kubelet's kubeconfig.
	Kubeconfig string `json:"kubeconfig"`
	// Flags are the flags that were taken, each as "--name=value". A flag on the command line is
	// not taken from the file.
	Flags []string `json:"flags"`
	// Problem says why no flags could be taken, empty if they could.
	Problem string `json:"problem,omitempty"`
}

// String describes for people which flags were taken from which file.
func (f *ExecFlags) String() string {
	switch {
	case f.Problem != "":
		return fmt.Sprintf("none taken from %s: %s", f.Kubeconfig, f.Problem)
	case len(f.Flags) == 0:
		return "none to take from " + f.Kubeconfig
	}
	return fmt.Sprintf("%s, taken from %s", strings.Join(f.Flags, " "), f.Kubeconfig)
}
