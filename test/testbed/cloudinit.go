// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// cloudInitScript makes the layer in the folder $1. It is the whole recipe: the layer's key covers it.
//
// apt says which packages the machine, which has this one's /usr, lacks. --reinstall has it fetch cloud-init itself in any case, for the files in /etc.
// Nothing is installed here. preset-all makes the links that the package's postinst makes. The compiled files are never compared with their sources,
// whose times an overlay file system may change.
const cloudInitScript = `
cd "$1"
mkdir -p debs/partial layer/etc layer/usr/bin layer/usr/sbin layer/usr/lib
fetch() {
	apt-get install -qq -y --reinstall --download-only --no-install-recommends -o Debug::NoLocking=1 -o APT::Sandbox::User=root \
		-o Dir::Cache::archives="$PWD/debs" cloud-init
}
fetch || { apt-get update -qq && fetch; } # the lists may be missing or old
for name in bin sbin lib; do ln -s "usr/$name" "layer/$name"; done
for deb in debs/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" >data.tar
	tar -x --keep-directory-symlink -C layer -f data.tar
done
rm -r debs data.tar layer/bin layer/sbin layer/lib
systemctl --root="$PWD/layer" preset-all
python3 -m compileall -q --invalidation-mode unchecked-hash -s "$PWD/layer" -p / layer/usr/lib/python3
test -x layer/usr/bin/cloud-init
`

// CloudInit returns the layer (see MachineOptions) with the distribution's own cloud-init, and what it needs that is not installed here. The first time it
// downloads the packages, which needs apt, and root if apt's lists are not there.
func CloudInit(ctx context.Context, progress io.Writer) (string, error) {
	base, err := cacheFolder()
	if err != nil {
		return "", err
	}
	// What is installed decides what has to be downloaded.
	installed, err := os.ReadFile("/var/lib/dpkg/status")
	if err != nil {
		return "", fmt.Errorf("cloud-init is taken from the packages of Debian or Ubuntu: %w", err)
	}
	sum := sha256.Sum256(append(installed, cloudInitScript...))
	folder := filepath.Join(base, "cloud-init-"+hex.EncodeToString(sum[:8]))
	if _, err := os.Stat(folder); err == nil {
		return folder, nil
	}
	if err := os.MkdirAll(base, 0o700); err != nil {
		return "", fmt.Errorf("make the components' cache: %w", err)
	}
	// Not the components' lock, which a build holds for minutes.
	unlock, err := lockFile(ctx, filepath.Join(base, "cloud-init.lock"), progress)
	if err != nil {
		return "", fmt.Errorf("lock cloud-init's part of the cache: %w", err)
	}
	defer unlock()
	if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) {
		return folder, err
	}
	return folder, makeCloudInit(ctx, base, folder, progress)
}

// makeCloudInit makes the layer beside the target and renames it, so that a folder with the right name is always complete.
func makeCloudInit(ctx context.Context, base, folder string, progress io.Writer) (err error) {
	partial := filepath.Join(base, "cloud-init.partial")
	if err := os.RemoveAll(partial); err != nil {
		return fmt.Errorf("remove an interrupted download of cloud-init: %w", err)
	}
	if err := os.Mkdir(partial, 0o755); err != nil { //nolint:gosec // G301: machines' users read below it
		return fmt.Errorf("make a folder for cloud-init: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(partial)) }()
	say(progress, "downloading the distribution's cloud-init into %s ...", folder)
	cmd := exec.CommandContext(ctx, "/bin/sh", "-euc", cloudInitScript, "sh", partial) //nolint:gosec // G204: our own script
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("download cloud-init with apt-get (as root, if apt-get update has not been run): %w\n%s", err, out)
	}
	return os.Rename(filepath.Join(partial, "layer"), folder)
}

// cloudInitConfig is what an image for this platform has in /etc/cloud: where the seed is, and nothing about users, whom nobody logs in as.
const cloudInitConfig = `datasource_list: [NoCloud, None]
locale: false
users: []
ssh_deletekeys: false
ssh_genkeytypes: []
`

// CloudInitSeed returns the files by which cloud-init finds its metadata and user data, as with a disk that a platform attaches (NoCloud), and the
// setting that it looks nowhere else. hostname is the name that cloud-init gives the machine.
func CloudInitSeed(instanceID, hostname string, userData []byte) (map[string]string, error) {
	metadata, err := json.Marshal(map[string]string{"instance-id": instanceID, "local-hostname": hostname}) // which is YAML, too
	if err != nil {
		return nil, err
	}
	const seed = "/var/lib/cloud/seed/nocloud/"
	return map[string]string{
		"/etc/cloud/cloud.cfg.d/90-testbed.cfg": cloudInitConfig,
		seed + "meta-data":                      string(metadata) + "\n",
		seed + "user-data":                      string(userData),
	}, nil
}

// CloudInitLog returns what cloud-init and the commands of the user data have printed, and cloud-init's own warnings, for the message of a failed test.
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
