// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/trustedfile"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// kubeletName is the name of the kubelet's process and program.
const kubeletName = "kubelet"

// errNoKubelet says that no kubelet runs.
var errNoKubelet = errors.New("no process named kubelet")

// kubeletProcess is a running kubelet.
type kubeletProcess struct {
	pid   int
	flags kubelet.Flags
	// configDir is its --config-dir.
	configDir string
	// cwd is the directory for relative paths in args, empty if that is not known.
	cwd string
	// started is the zero time if that is not known.
	started time.Time
}

// findKubelets searches a proc file system (proc(5)) and returns at least one kubelet, in the order
// of pids. A kubelet in a container has another mount namespace than this process, and is ignored.
func findKubelets(proc string) ([]*kubeletProcess, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	ours, boot := mountNamespace(proc, "self"), bootTime(proc)
	var found []*kubeletProcess
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		k := readProcess(filepath.Join(proc, entry.Name()), pid)
		theirs := mountNamespace(proc, entry.Name())
		if k == nil || ours != "" && theirs != "" && ours != theirs {
			continue
		}
		k.started = startTime(filepath.Join(proc, entry.Name()), boot)
		found = append(found, k)
	}
	if len(found) == 0 {
		return nil, errNoKubelet
	}
	slices.SortFunc(found, func(a, b *kubeletProcess) int { return a.pid - b.pid })
	return found, nil
}

// procFS is the proc file system (proc(5)).
const procFS = "/proc"

// KubeletsOf returns the process IDs of the kubelets that run with a kubeconfig. A kubelet in a
// container is not found.
func KubeletsOf(kubeconfig string) ([]int, error) {
	all, err := findKubelets(procFS)
	if errors.Is(err, errNoKubelet) || errors.Is(err, fs.ErrNotExist) { // without a proc file system, as in a chroot
		return nil, nil
	}
	var pids []int
	for _, k := range all {
		if k.flags.Kubeconfig != "" && isSameFile(k.path(k.flags.Kubeconfig), kubeconfig) {
			pids = append(pids, k.pid)
		}
	}
	return pids, err
}

// isSameFile reports whether two paths name the same file, or are equal.
func isSameFile(a, b string) bool {
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	return filepath.Clean(a) == filepath.Clean(b) || errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// bootTime returns when the machine booted, by its current clock, to the second.
func bootTime(proc string) time.Time {
	data, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return time.Time{}
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(line, "btime "); ok {
			if seconds, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64); err == nil {
				return time.Unix(seconds, 0)
			}
		}
	}
	return time.Time{}
}

// userHZ is the unit of times in /proc/<pid>/stat (USER_HZ): 100 per second on all of Go's
// platforms.
const userHZ = 100

// startTime returns when a process started.
func startTime(dir string, boot time.Time) time.Time {
	// The index counts from the third field. The second field, comm, is in parentheses and may have
	// any content.
	const starttime = 22 - 3
	data, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil || boot.IsZero() {
		return time.Time{}
	}
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) <= starttime {
		return time.Time{}
	}
	ticks, err := strconv.ParseInt(fields[starttime], 10, 64)
	if err != nil {
		return time.Time{}
	}
	return boot.Add(time.Duration(ticks) * (time.Second / userHZ))
}

// timeSlack allows for the precision of the boot time, which /proc gives in seconds. A file that
// was written at most this long after a process started does not count as unread.
const timeSlack = 2 * time.Second

// unread returns the files that were written after the process started. The kubelet reads them only
// when it starts.
func (k *kubeletProcess) unread(files ...string) []string {
	var newer []string
	for _, file := range files {
		if info, err := os.Stat(file); err == nil && !k.started.IsZero() && info.ModTime().After(k.started.Add(timeSlack)) {
			newer = append(newer, file)
		}
	}
	return newer
}

func mountNamespace(proc, pid string) string {
	link, err := os.Readlink(filepath.Join(proc, pid, "ns", "mnt"))
	if err != nil {
		return "" // this user may not read it
	}
	return link
}

// readProcess returns the process if it is a kubelet. It is nil if the process is another program,
// or has ended.
func readProcess(dir string, pid int) *kubeletProcess {
	comm, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return nil
	}
	line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil || len(line) == 0 {
		return nil // a zombie has no command line
	}
	var args []string
	for arg := range bytes.SplitSeq(bytes.TrimSuffix(line, []byte{0}), []byte{0}) {
		args = append(args, string(arg))
	}
	if strings.TrimSpace(string(comm)) != kubeletName && filepath.Base(args[0]) != kubeletName {
		return nil
	}
	cwd, _ := os.Readlink(filepath.Join(dir, "cwd")) // "" if this user may not read it
	return &kubeletProcess{pid: pid, flags: kubelet.ParseFlags(args), configDir: configDir(args), cwd: cwd}
}

// configDir returns the last --config-dir: kubelet.Flags does not have it.
func configDir(args []string) string {
	dir := ""
	for i, arg := range args {
		if arg == "--" {
			break
		}
		name, value, given := strings.Cut(arg, "=")
		if strings.ReplaceAll(name, "_", "-") != "--config-dir" {
			continue
		}
		if dir = value; !given && i+1 < len(args) {
			dir = args[i+1]
		}
	}
	return dir
}

// path returns the absolute path of a file on the command line.
func (k *kubeletProcess) path(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(k.cwd, name)
}

// rotates reports whether the kubelet rotates its certificate itself, and which setting decides. A
// flag overrides --config-dir, which overrides --config. The default is false
// (kubelet.config.k8s.io/v1beta1).
func (k *kubeletProcess) rotates() (rotates bool, source string, err error) {
	if on := k.flags.RotateCertificates; on != nil {
		return *on, fmt.Sprintf("--rotate-certificates=%t", *on), nil
	}
	source = "by default"
	paths, err := k.configFiles()
	if err != nil {
		return false, source, err
	}
	for _, path := range paths {
		data, err := trustedfile.Read(path)
		if err != nil {
			return false, source, err
		}
		var c struct {
			RotateCertificates *bool `json:"rotateCertificates"`
		}
		if err := yaml.Unmarshal(data, &c); err != nil {
			return false, source, fmt.Errorf("%s: not YAML", path)
		}
		if c.RotateCertificates != nil {
			rotates, source = *c.RotateCertificates, fmt.Sprintf("rotateCertificates: %t in %s", *c.RotateCertificates, path)
		}
	}
	return rotates, source, nil
}

// configFiles returns its configuration files. Each overrides those before it.
func (k *kubeletProcess) configFiles() ([]string, error) {
	var paths []string
	if k.flags.Config != "" {
		paths = append(paths, k.path(k.flags.Config))
	}
	if k.configDir == "" {
		return paths, nil
	}
	// As the kubelet does (cmd/kubelet/app/server.go, mergeKubeletConfigurations): in lexical
	// order, everything that is not a directory, links included.
	err := filepath.WalkDir(k.path(k.configDir), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && filepath.Ext(path) == ".conf" {
			paths = append(paths, path)
		}
		return err
	})
	return paths, err
}
