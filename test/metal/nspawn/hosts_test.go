// SPDX-License-Identifier: Apache-2.0

package nspawn

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

func newHosts(t *testing.T, reaches ...string) *Hosts {
	t.Helper()
	began := time.Now()
	image, err := baked()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("image after %s", since(began))
	h, err := New(image, reaches...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, id := range h.IDs("") {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
				t.Log(h.Logs(ctx, id))
				cancel()
			}
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func since(began time.Time) time.Duration { return time.Since(began).Round(100 * time.Millisecond) }

// boot allocates a host for an owner of that name, and powers it on.
func mustBoot(t *testing.T, h *Hosts, name, userData string) metal.Host {
	t.Helper()
	host, err := h.Allocate(t.Context(), types.UID(name+"-uid"), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.PowerOn(t.Context(), host.ID, metal.Metadata{InstanceID: host.ID, LocalHostname: name}, []byte(userData)); err != nil {
		t.Fatal(err)
	}
	return host
}

func mustStart(t *testing.T, h *Hosts, id string) *testbed.Machine {
	t.Helper()
	m, err := h.Machine(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// mustFinish waits until cloud-init has run everything.
func mustFinish(t *testing.T, m *testbed.Machine) {
	t.Helper()
	harness.Eventually(t, time.Minute, "cloud-init ends", func() bool {
		_, err := m.Run(t.Context(), "test", "-e", "/run/cloud-init/result.json")
		return err == nil
	})
}

func mustRun(t *testing.T, m *testbed.Machine, args ...string) string {
	t.Helper()
	out, err := m.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The user data has what Cluster API's has: a template, files, and commands.
const ordinary = `## template: jinja
#cloud-config
write_files:
- path: /etc/example
  owner: root:root
  permissions: '0640'
  content: |
    metal://{{ ds.meta_data.instance_id }} {{ ds.meta_data.local_hostname }}
runcmd:
- 'cat /etc/example >>/root/ran'
- 'echo "said by the user data"'
`

// cloud-init runs the user data of two hosts at once, each with its own metadata, and the image is
// complete. A reboot runs nothing again, and keeps disk, TPM and name.
func TestUserData(t *testing.T) {
	testbed.Full(t)
	h := newHosts(t)
	began := time.Now()
	hosts := map[string]metal.Host{}
	for _, name := range []string{"one", "two"} {
		hosts[name] = mustBoot(t, h, name, ordinary)
	}
	for name, host := range hosts {
		m := mustStart(t, h, host.ID)
		t.Logf("%s is up after %s", name, since(began))
		mustFinish(t, m)
		t.Logf("cloud-init of %s has ended after %s", name, since(began))
		want := "metal://" + host.ID + " " + name + "\n"
		if ran := mustRun(t, m, "cat", "/root/ran"); ran != want {
			t.Errorf("the commands have seen %q, not %q", ran, want)
		}
		if is := mustRun(t, m, "hostname"); is != name+"\n" {
			t.Errorf("the host's name is %q, not %s", is, name)
		}
		if mode := mustRun(t, m, "stat", "--format=%a", "/etc/example"); mode != "640\n" {
			t.Errorf("the file's mode is %s", mode)
		}
		if log := h.Logs(t.Context(), host.ID); !strings.Contains(log, "said by the user data") {
			t.Errorf("the log does not have what a command has printed: %s", log)
		} else if strings.Contains(log, "Invalid cloud-config") {
			t.Errorf("cloud-init does not like the platform's settings, or the user data: %s", log)
		}
		mustHaveImage(t, m, host)
	}
	if hosts["one"].EKs[0] == hosts["two"].EKs[0] || hosts["one"].Addresses[0] == hosts["two"].Addresses[0] {
		t.Errorf("two hosts are one: %+v", hosts)
	}
	t.Run("reboot", func(t *testing.T) {
		host := hosts["one"]
		began := time.Now()
		if err := h.Reboot(t.Context(), host.ID); err != nil {
			t.Fatal(err)
		}
		m := mustStart(t, h, host.ID)
		mustFinish(t, m)
		t.Logf("rebooted after %s", since(began))
		if ran := mustRun(t, m, "cat", "/root/ran"); strings.Count(ran, "\n") != 1 {
			t.Errorf("the user data has run again: %q", ran)
		}
		if is := mustRun(t, m, "hostname"); is != "one\n" {
			t.Errorf("the host's name is %q", is)
		}
		mustHaveImage(t, m, host)
		again, err := h.Allocate(t.Context(), "one-uid", "one")
		if err != nil || again.ID != host.ID {
			t.Errorf("the owner has another host: %v, %+v", err, again)
		}
		if err := h.PowerOn(t.Context(), host.ID, metal.Metadata{InstanceID: "other"}, nil); err != nil {
			t.Errorf("power on a host that is on: %v", err)
		}
	})
}

// mustHaveImage checks that the role has baked the plugin in, and that it finds the TPM by itself.
func mustHaveImage(t *testing.T, m *testbed.Machine, host metal.Host) {
	t.Helper()
	if out := mustRun(t, m, "kubelet-authenticator", "identify", "--provider=tpm"); !strings.Contains(out, host.EKs[0]) {
		t.Errorf("the machine has another EK than %s: %s", host.EKs[0], out)
	}
	if out := mustRun(t, m, "systemctl", "cat", "kubelet"); !strings.Contains(out, "kubelet-authenticator prepare") {
		t.Errorf("the kubelet's unit lacks the drop-in: %s", out)
	}
}

// User data that fails can be seen in the log, and does not keep the host from starting.
func TestBadUserData(t *testing.T) {
	testbed.Full(t)
	h := newHosts(t)
	for name, bad := range map[string]struct{ userData, says string }{
		"command":  {"#cloud-config\nruncmd: ['echo before', 'no-such-command', 'exit 3']\n", "no-such-command: not found"},
		"yaml":     {"#cloud-config\nruncmd: [\n", "Failed loading yaml"},
		"template": {"## template: jinja\n#cloud-config\nruncmd: ['echo {{ ds.meta_data.no_such }} {% nonsense %}']\n", "Failed calling handler JinjaTemplatePartHandler"},
	} {
		t.Run(name, func(t *testing.T) {
			host := mustBoot(t, h, name, bad.userData)
			mustFinish(t, mustStart(t, h, host.ID))
			if log := h.Logs(t.Context(), host.ID); !strings.Contains(log, bad.says) {
				t.Errorf("the log lacks %q: %s", bad.says, log)
			}
		})
	}
}

// A host that is released leaves nothing behind, whether it has started, starts, or never did.
func TestRelease(t *testing.T) {
	testbed.Full(t)
	h := newHosts(t)
	for name, wait := range map[string]time.Duration{"off": -1, "at-once": 0, "early": 100 * time.Millisecond, "starting": time.Second, "started": time.Minute} {
		t.Run(name, func(t *testing.T) {
			host, err := h.Allocate(t.Context(), types.UID(name), name)
			if err != nil {
				t.Fatal(err)
			}
			tpm, machine := filepath.Dir(h.hosts[host.ID].tpm.Socket()), "none"
			before := orphans(t, nil)
			if wait >= 0 {
				mustBoot(t, h, name, ordinary)
				host, _ = h.Allocate(t.Context(), types.UID(name+"-uid"), name)
				tpm = filepath.Dir(h.hosts[host.ID].tpm.Socket())
				time.Sleep(min(wait, time.Second)) // the host starts meanwhile
			}
			if wait == time.Minute {
				machine = filepath.Dir(mustStart(t, h, host.ID).Path("/usr/"))
				if left := trace(t, host.ID, tpm, machine); len(left) < 5 {
					t.Errorf("a host that runs leaves too few traces to look for: %q", left)
				}
			}
			began := time.Now()
			if err := h.Release(t.Context(), host.ID); err != nil {
				t.Error(err)
			}
			t.Logf("released after %s", since(began))
			if left := append(trace(t, host.ID, tpm, machine), orphans(t, before)...); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
			if err := h.Release(t.Context(), host.ID); err != nil {
				t.Errorf("release a host that is gone: %v", err)
			}
		})
	}
}

// trace is what a host has of this machine: processes, mounts, control groups, folders. Other
// programs have machines, too, in other namespaces.
func trace(t *testing.T, id, tpm, machine string) (left []string) {
	t.Helper()
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/self/mountinfo"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				continue // it has ended
			}
			for line := range strings.Lines(string(content)) {
				if strings.Contains(line, "/tmp/machine-") || strings.Contains(line, id) || strings.Contains(line, tpm) {
					left = append(left, file+": "+strings.ReplaceAll(line, "\x00", " "))
				}
			}
		}
	}
	group := filepath.Base(machine)
	for _, pattern := range []string{tpm, machine, "/sys/fs/cgroup/testbed-" + group, "/sys/fs/cgroup/*/testbed-" + group} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, files...)
	}
	return left
}

// orphans are the control groups of machines whose folder is gone, but for those that were before.
// Of a machine that does not get far its name is unknown.
func orphans(t *testing.T, before []string) (found []string) {
	t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup/testbed-machine-*", "/sys/fs/cgroup/*/testbed-machine-*"} {
		groups, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, group := range groups {
			_, err := os.Stat(filepath.Join("/tmp", strings.TrimPrefix(filepath.Base(group), "testbed-")))
			if os.IsNotExist(err) && !slices.Contains(before, group) {
				found = append(found, group)
			}
		}
	}
	return found
}
