// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"os"
	"path/filepath"
	"testing"
)

// A second build gives the same artifacts. It is made in another folder, from files of other ages
// and modes, at another time. Its machine has another name, time zone and umask, and other settings
// of the tools.
func TestReproducible(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root gives a host another name")
	}
	elsewhere := filepath.Join(t.TempDir(), "a folder of another name")
	again := t.TempDir()
	// The repository comes along, without locks, which come and go: the time of its last commit is
	// that of the artifacts.
	commandIn(t, module, "sh", "-ec", `
		mkdir "$1"
		git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents --target-directory="$1"
		mkdir "$1/.git"
		tar --create --exclude='*.lock' --directory="$(git rev-parse --path-format=absolute --git-common-dir)" . | tar --extract --no-same-owner --directory="$1/.git"
		cd "$1"
		find . -exec touch --no-dereference --date 2001-02-03 {} +
		chmod -R go-rwx .
		mkdir -m 2777 tmp
		exec unshare --uts sh -ec '
			hostname elsewhere
			umask 077
			export TZ=Asia/Kathmandu LC_ALL=C.UTF-8 TMPDIR="$PWD/tmp" TAR_OPTIONS=--mode=0777 GOAMD64=v3 GOARM64=v9.0 MAKEFLAGS= MAKELEVEL=
			exec make --no-print-directory packages DIST="$0" VERSION="$1"
		' "$2" "$3"
	`, "sh", elsewhere, again, version)
	command(t, "diff", "--recursive", "--brief", dist, again)
	if sums := files(t, again); len(sums) != 2*len(artifacts)+1 {
		t.Errorf("there are %d files: %v", len(sums), sums)
	}
	_ = os.RemoveAll(elsewhere)
}
