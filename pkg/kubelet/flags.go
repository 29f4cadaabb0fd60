// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"strconv"
	"strings"
)

// Flags are those of a kubelet's that decide how it gets its credential.
type Flags struct {
	Kubeconfig, BootstrapKubeconfig string
	// Config is the kubelet's configuration file, which the flags beat.
	Config           string
	HostnameOverride string
	CertDir          string
	// RotateCertificates is nil where the command line does not say: then the configuration file does, false if it does not either.
	RotateCertificates *bool
}

// ParseFlags reads a kubelet's command line, the program's name included, as it reads it itself: the last one of a kind wins, "_" is "-".
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

// ParseEnv reads a file as systemd reads an EnvironmentFile of one line per variable (systemd.exec(5)): both marks begin a comment, a pair of quotes
// around a value is none of it.
func ParseEnv(data []byte) map[string]string {
	env := map[string]string{}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		name, value, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		value = strings.TrimSpace(value)
		if n := len(value); n > 1 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		env[strings.TrimSpace(name)] = value
	}
	return env
}
