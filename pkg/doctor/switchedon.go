// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// unitDirs are the directories of drop-ins for the kubelet's unit (systemd.unit(5)).
var unitDirs = []string{
	"/etc/systemd/system/kubelet.service.d", "/run/systemd/system/kubelet.service.d",
	"/usr/local/lib/systemd/system/kubelet.service.d", "/usr/lib/systemd/system/kubelet.service.d",
}

// switchOnRemedy says how this program is switched on.
const switchOnRemedy = "to switch it on, install the drop-in for kubelet.service and write the configuration file; to examine other files, name them with flags"

// whyNotSwitchedOn returns what is missing on a machine without any configuration of this program.
// It returns "" if any part exists, or this user may not read it: then the checks run.
func (e *examination) whyNotSwitchedOn() string {
	if e.Explicit || e.ConfigErr != nil || exists(e.ConfigFile) {
		return ""
	}
	if e.dropIn() != "" {
		return ""
	}
	switch conf := kubelet.ReadKubeconfig(e.Config.KubeletKubeconfig, ""); {
	case conf.Kind == kubelet.Unreadable, conf.NamesThisProgram():
		return ""
	case !isEmpty(e.dir):
		return ""
	}
	return fmt.Sprintf("there is no configuration file %s, no drop-in for kubelet.service, and nothing in the certificate directory %s; %s does not name this program",
		e.ConfigFile, e.dir.Path(), e.Config.KubeletKubeconfig)
}

// dropIn returns the path of an installed drop-in of this program for kubelet.service, or "".
func (e *examination) dropIn() string {
	for _, dir := range e.UnitDirs {
		// the pattern is valid; an error of the file system counts as no match
		if dropIns, _ := filepath.Glob(filepath.Join(dir, "*kubelet-authenticator*.conf")); len(dropIns) > 0 {
			return dropIns[0]
		}
	}
	return ""
}

// isUnconfigured reports whether the drop-in is installed, and neither a configuration file nor the
// kubelet's kubeconfig configures this program. Then the drop-in changes nothing.
func (e *examination) isUnconfigured() bool {
	return e.dropIn() != "" && !exists(e.ConfigFile) && !kubelet.ReadKubeconfig(e.Config.KubeletKubeconfig, "").NamesThisProgram()
}

// exists reports whether a file exists. It returns true if this user may not see it.
func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// isEmpty reports whether the certificate directory is empty or missing. systemd-tmpfiles creates
// it.
func isEmpty(dir cache.Dir) bool {
	entries, err := os.ReadDir(dir.Path())
	return errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0
}

// notSwitchedOn returns the report for a machine without any configuration. One check fails, and
// the others are skipped.
func notSwitchedOn(why string) Report {
	checks := Checks()
	results := make([]checkup.Result, len(checks))
	for i := range checks {
		results[i] = skipped("not switched on: see %s", checks[0].Name)
	}
	results[0] = failure(switchOnRemedy, "not switched on: %s", why)
	r := report(checks, results)
	r.NotSwitchedOn = true
	return r
}

// textNotSwitchedOn returns the report in two lines.
func (r Report) textNotSwitchedOn() string {
	first := r.Checks[0]
	return fmt.Sprintf("%s\nremedy: %s\n", strings.TrimSpace(first.Message), first.Remedy)
}
