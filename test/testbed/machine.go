// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// cgroupRoots are where systemd keeps its groups: on cgroup v1 in the first two, on v2 in the last.
var cgroupRoots = []string{"/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"}

// machineFiles are what every machine has. The links to /dev/null keep systemd from what a
// container has no use for.
var machineFiles = map[string]string{
	"/etc/os-release": "ID=debian\n",
	"/etc/machine-id": "",
	"/etc/systemd/system/testbed-sysctl.service": `[Unit]
Description=What a kubelet would change of the whole machine
Before=kubelet.service
[Service]
Type=oneshot
ExecStart=/bin/sh -e /opt/testbed/sysctl.sh
`,
	"/etc/systemd/system/testbed-reach@.service": "[Service]\nExecStart=/lib/systemd/systemd-socket-proxyd " + reachedSocket + "%i\n",
	"/opt/testbed/sysctl.sh":                     "cd /opt/testbed/sysctl\nfind . -type f | while read -r name; do mount --bind \"$name\" \"/proc/sys/$name\"; done\n",
}

var machineLinks = map[string]string{
	"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64",
	"/etc/systemd/system/default.target":                                  "/usr/lib/systemd/system/multi-user.target",
	"/etc/systemd/system/multi-user.target.wants/testbed-sysctl.service":  "../testbed-sysctl.service",
	"/etc/systemd/system/multi-user.target.wants/testbed-network.service": "../testbed-network.service",
	"/etc/systemd/system/systemd-udevd.service":                           "/dev/null",
	"/etc/systemd/system/systemd-logind.service":                          "/dev/null",
	"/etc/systemd/system/systemd-networkd.service":                        "/dev/null",
	"/etc/systemd/system/getty.target":                                    "/dev/null",
}

const (
	// MachineAddress is each machine's own, on its loopback device, and no loopback address: a node
	// with one has none, as the kubelet sees it.
	MachineAddress = "10.99.98.1"
	// reachedSocket with a number appended is the socket for one address that a machine reaches.
	reachedSocket = "/opt/testbed/reached/socket"
)

// machineCopies are this machine's, without which programs in /usr do not work. Some are not there
// on every distribution.
var machineCopies = []string{"passwd", "group", "shadow", "nsswitch.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "pam.d", "alternatives", "ssl"}

// MachineOptions configure the content of a machine's disk.
type MachineOptions struct {
	Name string
	// Files are written, those below /usr too: path to content.
	Files map[string]string
	// Programs are copied, and executable: path there to path here.
	Programs map[string]string
	// Enabled are units of Files that systemd starts with the machine.
	Enabled []string
	// Binds are files or folders of ours that the machine sees, such as sockets: path there to path
	// here.
	Binds map[string]string
	// ReadOnlyBinds are like Binds, mounted read-only.
	ReadOnlyBinds map[string]string
	// Reaches is a TCP address on our loopback device, such as an API server's: the machine reaches
	// it at the same address, and nothing else.
	Reaches string
	// AlsoReaches are further addresses like Reaches.
	AlsoReaches []string
	// Layers are folders with a part of a disk each. Machines share their /usr read-only, and copy
	// the rest. A later layer overrides an earlier one. The other fields override all layers.
	Layers []string
	// Address is the machine's own, MachineAddress if it is empty.
	Address string
	// StartedWith is a unit, such as basic.target. StartMachine returns when it is active. If it is
	// empty, StartMachine waits for all enabled units.
	StartedWith string
}

// Machine is a machine with a systemd of its own, in systemd-nspawn. It has this machine's /usr,
// with what Files and Programs add, an /etc that is nearly empty, and a network of its own. Its
// methods are for one goroutine at a time.
type Machine struct {
	options MachineOptions
	dir     string
	cgroups []string
	process *Process
	leader  string // the PID of its systemd
	reached []net.Listener
}

// StartMachine starts a machine, and returns when its systemd has started all enabled units. It
// works in a program that Isolate has started.
func StartMachine(ctx context.Context, options MachineOptions) (_ *Machine, err error) {
	if !Isolated() {
		return nil, errors.New("start a machine: not in namespaces of its own, see Isolate")
	}
	m := &Machine{options: options}
	if m.dir, err = os.MkdirTemp("/tmp", "machine-"); err != nil {
		return nil, fmt.Errorf("make the machine's folder: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Remove())
		}
	}()
	if err := m.makeDisk(options); err != nil {
		return nil, fmt.Errorf("make the disk of machine %s: %w", options.Name, err)
	}
	if err := m.reach(); err != nil {
		return nil, fmt.Errorf("make the network of machine %s: %w", options.Name, err)
	}
	return m, m.PowerOn(ctx)
}

// PowerOn starts the machine after PowerOff, and returns when its systemd has started all enabled
// units.
func (m *Machine) PowerOn(ctx context.Context) error {
	if err := m.makeCgroups(); err != nil {
		return fmt.Errorf("make the control groups of machine %s: %w", m.options.Name, err)
	}
	if err := m.boot(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return pollWhile(ctx, m.process, "machine "+m.options.Name, m.booted)
}

// PowerOff shuts the machine down in good order. Its disk does not change. Files in memory, such as
// those in /run, are lost. PowerOn may follow.
func (m *Machine) PowerOff(ctx context.Context) error {
	m.process.stopping.Store(true)
	if _, err := m.Run(ctx, "systemctl", "poweroff", "--no-block"); err != nil {
		return err
	}
	select {
	case <-m.process.Done():
	case <-time.After(startTimeout):
		return fmt.Errorf("machine %s does not end\n%s", m.options.Name, m.process.LogTail())
	}
	return m.removeCgroups()
}

func (m *Machine) makeDisk(options MachineOptions) error {
	for _, dir := range []string{"root/usr", "root/var/lib", "root/var/log", "root/tmp", "root/root", "root/run", "usr", "reached"} {
		if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil { //nolint:gosec // G301: as on any machine
			return err
		}
	}
	for _, layer := range options.Layers {
		if err := m.copyLayer(layer); err != nil {
			return err
		}
	}
	for _, name := range machineCopies {
		from := filepath.Join("/etc", name)
		if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := m.makeParent("/etc/" + name); err != nil {
			return err
		}
		if out, err := exec.Command("cp", "-a", from, m.Path("/etc/"+name)).CombinedOutput(); err != nil { //nolint:gosec // G204: our own arguments
			return fmt.Errorf("copy %s: %w: %s", from, err, out)
		}
	}
	for name, value := range kubeletSysctls {
		if err := m.WriteFile("/opt/testbed/sysctl/"+name, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
	}
	links := map[string]string{}
	network := map[string]string{"/etc/systemd/system/testbed-network.service": `[Unit]
Before=kubelet.service
[Service]
Type=oneshot
ExecStart=ip address add ` + cmp.Or(options.Address, MachineAddress) + `/32 dev lo
`}
	for i, address := range options.reaches() {
		unit := fmt.Sprintf("testbed-reach%d.socket", i)
		network["/etc/systemd/system/"+unit] = fmt.Sprintf("[Socket]\nListenStream=%s\nService=testbed-reach@%d.service\n", address, i)
		links["/etc/systemd/system/sockets.target.wants/"+unit] = "../" + unit
	}
	names := map[string]string{"/etc/hostname": options.Name + "\n", "/etc/hosts": "127.0.0.1 localhost " + options.Name + "\n"}
	for _, files := range []map[string]string{machineFiles, names, network, options.Files} {
		for path, content := range files {
			if err := m.WriteFile(path, []byte(content), 0o644); err != nil {
				return err
			}
		}
	}
	for path, from := range options.Programs {
		program, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := m.WriteFile(path, program, 0o755); err != nil {
			return err
		}
	}
	for _, unit := range options.Enabled {
		links["/etc/systemd/system/multi-user.target.wants/"+unit] = "../" + unit
	}
	for _, all := range []map[string]string{machineLinks, links} {
		for path, target := range all {
			if err := m.makeParent(path); err != nil {
				return err
			}
			if err := os.Symlink(target, m.Path(path)); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyLayer copies what a layer has outside of /usr.
func (m *Machine) copyLayer(layer string) error {
	entries, err := os.ReadDir(layer)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Name() == "usr" {
			continue
		}
		if out, err := exec.Command("cp", "-a", filepath.Join(layer, entry.Name()), filepath.Join(m.dir, "root")).CombinedOutput(); err != nil { //nolint:gosec // G204: our own arguments
			return fmt.Errorf("copy layer %s: %w: %s", layer, err, out)
		}
	}
	return nil
}

// reaches are all addresses that the machine reaches.
func (o MachineOptions) reaches() []string {
	all := slices.Clone(o.AlsoReaches)
	if o.Reaches != "" {
		all = append(all, o.Reaches)
	}
	return all
}

// Path is where a file of the machine is for us. File systems that the machine itself has mounted,
// such as /run, are not visible.
func (m *Machine) Path(path string) string {
	if rest, ok := strings.CutPrefix(path, "/usr/"); ok {
		return filepath.Join(m.dir, "usr", rest)
	}
	return filepath.Join(m.dir, "root", path)
}

func (m *Machine) makeParent(path string) error {
	return os.MkdirAll(filepath.Dir(m.Path(path)), 0o755) //nolint:gosec // G301: as on any machine
}

// WriteFile writes a file of the machine, and makes its folder. One below /usr has to be written
// before the machine starts: see Options.
func (m *Machine) WriteFile(path string, content []byte, mode os.FileMode) error {
	if err := m.makeParent(path); err != nil {
		return err
	}
	return os.WriteFile(m.Path(path), content, mode) //nolint:gosec // G703: the test says where
}

// reach forwards what comes through the machine's sockets, until the machine is removed.
func (m *Machine) reach() error {
	for i, address := range m.options.reaches() {
		listener, err := net.Listen("unix", filepath.Join(m.dir, "reached", filepath.Base(reachedSocket)+strconv.Itoa(i)))
		if err != nil {
			return err
		}
		m.reached = append(m.reached, listener)
		go func() {
			for {
				from, err := listener.Accept()
				if err != nil {
					return
				}
				go forward(from, address)
			}
		}()
	}
	return nil
}

// forward copies both ways until both have ended.
func forward(from net.Conn, address string) {
	defer func() { _ = from.Close() }()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return // as if no process listened
	}
	defer func() { _ = to.Close() }()
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		both.Go(func() {
			_, _ = io.Copy(way[1], way[0])
			if w, ok := way[1].(interface{ CloseWrite() error }); ok {
				_ = w.CloseWrite()
			}
		})
	}
	both.Wait()
}

// makeCgroups makes a control group for the machine, so that two do not get into each other's way.
func (m *Machine) makeCgroups() error {
	for _, root := range cgroupRoots {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		dir := filepath.Join(root, "testbed-"+filepath.Base(m.dir))
		if err := os.Mkdir(dir, 0o755); err != nil { //nolint:gosec // G301: as systemd does
			return err
		}
		m.cgroups = append(m.cgroups, dir)
	}
	if len(m.cgroups) == 0 {
		return errors.New("there are none")
	}
	return nil
}

func (m *Machine) boot() (err error) {
	var script strings.Builder
	for _, group := range m.cgroups {
		script.WriteString("echo $$ >" + group + "/cgroup.procs && ")
	}
	script.WriteString(`exec systemd-nspawn "$@"`)
	usr := []string{"/usr"} // the lowest first
	for _, layer := range m.options.Layers {
		usr = append(usr, filepath.Join(layer, "usr"))
	}
	usr = append(usr, filepath.Join(m.dir, "usr"), "/usr")
	args := []string{
		"-c", script.String(), "sh",
		"--directory=" + filepath.Join(m.dir, "root"), "--overlay=" + strings.Join(usr, ":"),
		"--machine=" + m.options.Name, "--register=no", "--keep-unit", "--console=pipe",
		"--private-network", "--bind=" + filepath.Join(m.dir, "reached") + ":" + filepath.Dir(reachedSocket),
		"--bind=/dev/null:/dev/kmsg", // the kubelet wants to read it
	}
	for there, here := range m.options.Binds {
		args = append(args, "--bind="+here+":"+there)
	}
	for there, here := range m.options.ReadOnlyBinds {
		args = append(args, "--bind-ro="+here+":"+there)
	}
	var env []string
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		env = append(env, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=0")
	}
	m.process, err = StartProcess(Command{Path: "/bin/sh", Args: append(args, "--boot"), Env: env, LogFile: filepath.Join(m.dir, "nspawn.log")})
	return err
}

// booted returns an error while systemd is still starting units.
func (m *Machine) booted(ctx context.Context) error {
	all, err := m.children()
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("systemd-nspawn has no child")
	}
	m.leader = all[0]
	if unit := m.options.StartedWith; unit != "" {
		state, err := m.Command(ctx, "systemctl", "is-active", unit).Output()
		if strings.TrimSpace(string(state)) == "active" {
			return nil
		}
		return fmt.Errorf("systemctl says of %s %q: %w", unit, state, err)
	}
	state, err := m.Command(ctx, "systemctl", "is-system-running").Output()
	switch strings.TrimSpace(string(state)) {
	case "running", "degraded":
		// degraded: a unit has failed, such as the kubelet, which has no configuration yet
		return nil
	}
	return fmt.Errorf("systemctl says %q: %w", state, err)
}

// children returns the PIDs of systemd-nspawn's children: the machine's systemd, or before that
// starts, the process that sets up the machine.
func (m *Machine) children() ([]string, error) {
	pid := fmt.Sprint(m.process.PID())
	all, err := os.ReadFile(filepath.Join("/proc", pid, "task", pid, "children"))
	return strings.Fields(string(all)), err
}

// Command returns a command that is run on the machine, as root.
func (m *Machine) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--target=" + m.leader, "--all", "--"}, args...)...) //nolint:gosec // G204: the purpose
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"}
	cmd.Dir = "/"
	return cmd
}

// Run runs a command on the machine. The error has all that it printed.
func (m *Machine) Run(ctx context.Context, args ...string) (string, error) {
	out, err := m.Command(ctx, args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// Journal returns what a unit has logged, for the message of a failed test.
func (m *Machine) Journal(ctx context.Context, unit string) string {
	out, err := m.Run(ctx, "journalctl", "--no-pager", "--output=cat", "--unit="+unit)
	if err != nil {
		return err.Error()
	}
	return out
}

// Remove switches the machine off, hard, and removes every trace.
func (m *Machine) Remove() error {
	var errs []error
	if m.process != nil {
		errs = append(errs, m.powerOff())
	}
	for _, listener := range m.reached {
		errs = append(errs, listener.Close())
	}
	return errors.Join(append(errs, m.removeCgroups(), os.RemoveAll(m.dir))...)
}

func (m *Machine) removeCgroups() error {
	var errs []error
	for _, group := range m.cgroups {
		errs = append(errs, removeCgroup(group))
	}
	m.cgroups = nil
	return errors.Join(errs...)
}

// powerOff kills the machine's systemd, with which the kernel kills all of its processes.
// systemd-nspawn then cleans up and ends. If it is killed, its machine goes on. A starting machine
// may have no systemd yet: each child of systemd-nspawn is killed until systemd-nspawn ends.
func (m *Machine) powerOff() error {
	if m.process.ended() {
		return m.process.Err()
	}
	m.process.stopping.Store(true)
	for deadline := time.After(effectTimeout); ; {
		children, _ := m.children() // it may have ended
		for _, child := range children {
			pid, err := strconv.Atoi(child)
			if err != nil {
				return fmt.Errorf("find the machine's systemd: %w", err)
			}
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill the machine's systemd: %w", err)
			}
		}
		select {
		case <-m.process.Done():
			return nil
		case <-deadline:
			return errors.Join(errors.New("systemd-nspawn outlives its machine"), m.process.Kill())
		case <-time.After(pollInterval):
		}
	}
}

// removeCgroup removes a control group and those below it. Processes that were just killed are in
// them for a moment.
func removeCgroup(group string) error {
	var all []string
	err := filepath.WalkDir(group, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			all = append(all, path)
		}
		return err
	})
	if err != nil {
		return err
	}
	slices.Reverse(all) // children first
	for _, dir := range all {
		for deadline := time.Now().Add(effectTimeout); ; time.Sleep(pollInterval) {
			err := syscall.Rmdir(dir)
			if err == nil {
				break
			}
			if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
				return fmt.Errorf("remove control group %s: %w", dir, err)
			}
		}
	}
	return nil
}
