// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
)

// KubeadmFlagsFile is where kubeadm writes the kubelet's flags, --hostname-override among them.
const KubeadmFlagsFile = "/var/lib/kubelet/kubeadm-flags.env"

// NodeName is the name of this machine's Node.
type NodeName struct {
	Name string
	// Derived is set if it is the host's name, which can change while the kubelet keeps the old
	// one.
	Derived bool
}

// FindNodeName returns the configured name, else the name that kubeadm gave the kubelet, else the
// name that the kubelet derives from the host's name.
func FindNodeName(given string) (NodeName, error) { return findNodeName(given, KubeadmFlagsFile) }

func findNodeName(given, kubeadmFlags string) (NodeName, error) {
	name := NodeName{Name: given}
	if name.Name == "" {
		data, err := trustedfile.Read(kubeadmFlags)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return NodeName{}, fmt.Errorf("node name: %w", err)
		}
		name.Name = hostnameOverride(string(data))
	}
	if name.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return NodeName{}, fmt.Errorf("node name: %w", err)
		}
		name = NodeName{Name: host, Derived: true}
	}
	if given == "" {
		name.Name = Canonical(name.Name)
	}
	return name, CheckNodeName(name.Name)
}

// Canonical returns a host's name, or the value of --hostname-override, as the kubelet uses it.
func Canonical(name string) string { return strings.ToLower(strings.TrimSpace(name)) }

// CheckNodeName returns an error unless name may be a Node's.
func CheckNodeName(name string) error {
	if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
		return fmt.Errorf("node name %.253q: not a DNS-1123 subdomain", name)
	}
	return nil
}

// hostnameOverride finds the flag in a file like KUBELET_KUBEADM_ARGS="--hostname-override=name".
// The last one wins, as on the kubelet's command line.
func hostnameOverride(env string) string {
	const flag = "--hostname-override"
	found := ""
	for line := range strings.Lines(env) {
		// As systemd reads an EnvironmentFile (systemd.exec(5)): "#" and ";" begin a
		// comment, and white space around a value is dropped.
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
