// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// cloudInitScript makes the layer in the folder $1.
//
// The layer lies over this machine's /usr, so apt fetches only packages that are not installed
// here. With --reinstall it fetches cloud-init itself in any case, for the files in /etc. Nothing
// is installed here. preset-all makes the links that the package's postinst makes. Python must not
// compare compiled files with their sources: an overlay file system may change the sources' times.
const cloudInitScript = `
debs=$(mktemp -d)
trap 'rm -r "$debs"' EXIT
mkdir "$debs/partial"
fetch() {
	apt-get install -qq -y --reinstall --download-only --no-install-recommends -o Debug::NoLocking=1 -o APT::Sandbox::User=root \
		-o Dir::Cache::archives="$debs" cloud-init
}
fetch || { apt-get update -qq && fetch; } # the lists may be missing or old
cd "$1"
mkdir -p etc usr/bin usr/sbin usr/lib
for name in bin sbin lib; do ln -s "usr/$name" "$name"; done
for deb in "$debs"/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" >"$debs/data.tar"
	tar -x --keep-directory-symlink -f "$debs/data.tar"
done
rm bin sbin lib
systemctl --root="$1" preset-all
python3 -m compileall -q --invalidation-mode unchecked-hash -s "$1" -p / usr/lib/python3
test -x usr/bin/cloud-init
`

// CloudInit returns a layer (see MachineOptions) with the distribution's own cloud-init, and those
// of its dependencies that are not installed here. The first time it downloads the packages. This
// needs apt, and root if apt's lists are not there.
func CloudInit(ctx context.Context, progress io.Writer) (string, error) {
	// apt downloads only packages that are not installed.
	installed, err := os.ReadFile("/var/lib/dpkg/status")
	if err != nil {
		return "", fmt.Errorf("cloud-init is taken from the packages of Debian or Ubuntu: %w", err)
	}
	return compile.Cached(ctx, "cloud-init", append(installed, cloudInitScript...), progress, func(folder string) error {
		_, _ = fmt.Fprintln(progress, "downloading the distribution's cloud-init ...")
		cmd := exec.CommandContext(ctx, "/bin/sh", "-euc", cloudInitScript, "sh", folder) //nolint:gosec // G204: our own script
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("download cloud-init with apt-get (as root, if apt-get update has not been run): %w\n%s", err, out)
		}
		return nil
	})
}

// cloudInitConfig is the configuration in /etc/cloud of an image for this platform: the datasource,
// and no users.
const cloudInitConfig = `datasource_list: [NoCloud, None]
locale: C.UTF-8
users: {}
ssh_deletekeys: false
ssh_genkeytypes: [ed25519]
`

// CloudInitSeed returns files for cloud-init: metadata and user data in the folder of the
// datasource NoCloud, and a configuration with no other datasource. hostname is the name that
// cloud-init gives the machine.
func CloudInitSeed(instanceID, hostname string, userData []byte) (map[string]string, error) {
	// which is YAML, too
	metadata, err := json.Marshal(map[string]string{"instance-id": instanceID, "local-hostname": hostname})
	if err != nil {
		return nil, err
	}
	const seed = "/var/lib/cloud/seed/nocloud/"
	return map[string]string{
		"/etc/cloud/cloud.cfg.d/90-testbed.cfg": cloudInitConfig,
		"/etc/default/locale":                   "LANG=C.UTF-8\n", // else cloud-init sets it
		seed + "meta-data":                      string(metadata) + "\n",
		seed + "user-data":                      string(userData),
	}, nil
}

// CloudInitLog returns the output of cloud-init and of the user data's commands, and cloud-init's
// own warnings, for the message of a failed test.
func (m *Machine) CloudInitLog() string {
	var all strings.Builder
	for _, name := range []string{"cloud-init-output.log", "cloud-init.log"} {
		content, err := os.ReadFile(m.Path("/var/log/" + name))
		if err != nil {
			fmt.Fprintf(&all, "%v\n", err)
			continue
		}
		for line := range strings.Lines(string(content)) {
			if name == "cloud-init-output.log" || strings.Contains(line, "[WARNING]") || strings.Contains(line, "[ERROR]") {
				all.WriteString(line)
			}
		}
	}
	return all.String()
}
