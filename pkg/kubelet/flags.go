// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"strconv"
	"strings"
)

// Flags are the flags of a kubelet that decide how it gets its credential.
type Flags struct {
	Kubeconfig, BootstrapKubeconfig string
	// Config is the kubelet's configuration file. Flags override it.
	Config           string
	HostnameOverride string
	CertDir          string
	// RotateCertificates is nil if the command line does not set it. Then the configuration
	// file decides; the default is false.
	RotateCertificates *bool
}

// ParseFlags reads a kubelet's command line, the program's name included, as the kubelet does: the
// last flag of a kind wins, and "_" equals "-".
func ParseFlags(args []string) Flags {
	var f Flags
	values := map[string]*string{
		"kubeconfig": &f.Kubeconfig, "bootstrap-kubeconfig": &f.BootstrapKubeconfig, "config": &f.Config,
		"hostname-override": &f.HostnameOverride, "cert-dir": &f.CertDir,
	}
	for i := 1; i < len(args); i++ {
		name, isFlag := strings.CutPrefix(args[i], "--")
		if !isFlag {
			continue
		}
		if name == "" {
			break
		}
		name, value, given := strings.Cut(name, "=")
		name = strings.ReplaceAll(name, "_", "-")
		if name == "rotate-certificates" {
			on, err := strconv.ParseBool(value)
			on = on || !given
			if err == nil || !given {
				f.RotateCertificates = &on
			}
			continue
		}
		into := values[name]
		if into == nil {
			continue
		}
		if !given && i+1 < len(args) {
			i++
			value = args[i]
		}
		*into = value
	}
	return f
}
