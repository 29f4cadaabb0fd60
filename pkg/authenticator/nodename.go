// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// KubeadmFlagsFile is where kubeadm writes the kubelet's flags, --hostname-override among them.
const KubeadmFlagsFile = "/var/lib/kubelet/kubeadm-flags.env"

// nodeName is the name of this machine's Node.
type nodeName struct {
	Name string
	// Derived is set when it is the host's name, which can change while the kubelet lives on under the old one.
	Derived bool
}

// findNodeName returns the name that the operator gave, else the one that kubeadm gave the kubelet, else the one that the
// kubelet derives: the host's name, trimmed, in lower case.
func findNodeName(given, kubeadmFlags string) (nodeName, error) {
	name := nodeName{Name: given}
	if name.Name == "" {
		data, err := os.ReadFile(kubeadmFlags)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nodeName{}, fmt.Errorf("node name: %w", err)
		}
		name.Name = hostnameOverride(string(data))
	}
	if name.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return nodeName{}, fmt.Errorf("node name: %w", err)
		}
		name = nodeName{Name: host, Derived: true}
	}
	if given == "" {
		name.Name = strings.ToLower(strings.TrimSpace(name.Name)) // as the kubelet does
	}
	return name, checkNodeName(name.Name)
}

// checkNodeName returns an error unless name may be a Node's.
func checkNodeName(name string) error {
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fmt.Errorf("node name %.253q: not a DNS-1123 subdomain", name)
	}
	return nil
}

// hostnameOverride finds the flag in a file like KUBELET_KUBEADM_ARGS="--a=b --hostname-override=name"; the last one wins, as on the
// kubelet's command line.
func hostnameOverride(env string) string {
	const flag = "--hostname-override"
	found := ""
	for line := range strings.Lines(env) {
		// As systemd reads an EnvironmentFile (systemd.exec(5)): both marks begin a comment, white space around a value is nothing.
		line = strings.TrimSpace(line)
		_, value, ok := strings.Cut(line, "=")
		if !ok || strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		words := strings.Fields(strings.Trim(strings.TrimSpace(value), `"'`))
		for i, word := range words {
			if rest, ok := strings.CutPrefix(word, flag+"="); ok {
				found = strings.Trim(rest, `"'`)
			} else if word == flag && i+1 < len(words) {
				found = strings.Trim(words[i+1], `"'`)
			}
		}
	}
	return found
}
