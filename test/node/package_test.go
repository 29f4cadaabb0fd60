// SPDX-License-Identifier: Apache-2.0

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// packageFile is the deb on a machine.
const packageFile = "/root/kubelet-authenticator.deb"

// packaged returns the one artifact that "make packages" has made of a format.
func packaged(t *testing.T, pattern string) []byte {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(built.packages, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %q, %v", pattern, found, err)
	}
	content, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// mustRun runs a command on the machine, and returns all that it prints.
func (c *computer) mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.os.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// installPackage installs the deb on a machine whose own packages dpkg does not know.
func (c *computer) installPackage(t *testing.T) {
	t.Helper()
	if err := c.os.WriteFile(packageFile, packaged(t, "*.deb"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.mustRun(t, "mkdir", "-p", "/var/lib/dpkg/info", "/var/lib/dpkg/updates")
	c.mustRun(t, "touch", "/var/lib/dpkg/status")
	c.mustRun(t, "dpkg", "--install", packageFile)
}

// The package, and the one file that switches the plugin on.
func testPackage(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "packaged", image{bare: true, join: testbed.KubeadmJoin{Token: k.token}})
	k.admit(t, c.identity(t))
	c.installPackage(t)
	c.mustVerify(t)
	c.mustRun(t, "systemd-tmpfiles", "--create", "kubelet-authenticator.conf")
	if state := c.mustRun(t, "stat", "--format=%A %U:%G", cache.DefaultPath); state != "drwx------ root:root\n" {
		t.Errorf("%s: %s", cache.DefaultPath, state)
	}
	if err := c.os.WriteFile(configFile, []byte(c.config()), 0o600); err != nil {
		t.Fatal(err)
	}
	c.mustJoin(t)
	c.mustBeAttested(t, 1)
	c.mustDiagnose(t, nil)
}

// The image for systemd-sysext, unpacked, since nothing here can mount it: systemd merges it into
// /usr.
func testSysext(t *testing.T, k *kubeadmCluster) {
	const imageFile, merged = "/root/kubelet-authenticator.raw", "/var/lib/extensions/kubelet-authenticator"
	c := k.newComputer(t, "extended", image{bare: true, join: testbed.KubeadmJoin{Token: k.token}})
	k.admit(t, c.identity(t))
	if err := c.os.WriteFile(imageFile, packaged(t, "*.raw"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.mustRun(t, "mkdir", "-p", filepath.Dir(merged))
	c.mustRun(t, "unsquashfs", "-no-progress", "-dest", merged, imageFile)
	if c.has(t, pluginFile) {
		t.Fatal("the plugin is there already")
	}
	c.mustRun(t, "systemd-sysext", "merge")
	c.mustRun(t, "systemctl", "daemon-reload") // older systemd does not do it by itself
	if err := c.os.WriteFile(configFile, []byte(c.config()), 0o600); err != nil {
		t.Fatal(err)
	}
	c.mustJoin(t)
	c.mustBeAttested(t, 1)
}

// mustVerify checks that systemd finds no fault with the drop-in. It prints what systemd finds, for
// any exit code.
func (c *computer) mustVerify(t *testing.T) {
	t.Helper()
	verify := func() string {
		out, _ := c.os.Run(t.Context(), "systemd-analyze", "verify", "kubelet.service")
		return out
	}
	if out := verify(); strings.Contains(out, "kubelet-authenticator") {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	// It would say so: this one takes the place of the packaged one.
	broken := filepath.Join("/etc/systemd/system/kubelet.service.d", filepath.Base(dropInFile))
	if err := c.os.WriteFile(broken, []byte("[Service]\nExecStartPre=/usr/bin/kubelet-authenticator-is-not-here\nTimoutStartSec=5min\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := verify(); !strings.Contains(out, "TimoutStartSec") || !strings.Contains(out, "kubelet-authenticator-is-not-here") {
		t.Errorf("systemd-analyze verify of a broken one: %s", out)
	}
	if err := os.Remove(c.os.Path(broken)); err != nil {
		t.Fatal(err)
	}
}

// The package is installed, and taken away, under a kubelet that runs and has nothing to do with
// us. It goes on.
func testPackageUnderARunningKubelet(t *testing.T, k *kubeadmCluster) {
	c := k.newComputer(t, "running", image{bare: true, join: testbed.KubeadmJoin{Token: k.token}})
	c.mustJoin(t)
	// mustGoOn checks that what happens meanwhile does not restart the kubelet, and that systemd
	// has read its unit.
	mustGoOn := func(meanwhile func()) {
		t.Helper()
		started := c.mustRun(t, "systemctl", "show", "kubelet", "--property=MainPID,NRestarts,ExecMainStartTimestampMonotonic")
		meanwhile()
		if now := c.mustRun(t, "systemctl", "show", "kubelet", "--property=MainPID,NRestarts,ExecMainStartTimestampMonotonic"); now != started {
			t.Errorf("the kubelet was %s and is %s", started, now)
		}
		if out := c.mustRun(t, "systemctl", "show", "kubelet", "--property=NeedDaemonReload"); out != "NeedDaemonReload=no\n" {
			t.Error(out)
		}
	}
	timeout := func() string { return c.mustRun(t, "systemctl", "show", "kubelet", "--property=TimeoutStartUSec") }
	before := timeout()

	mustGoOn(func() { c.installPackage(t) })
	if out := timeout(); out != "TimeoutStartUSec=5min\n" || out == before {
		t.Errorf("what the drop-in changes by itself: %s, before %s", out, before)
	}
	c.mustRun(t, "systemctl", "restart", "kubelet")
	c.mustHavePrepared(t)
	c.mustBecomeReady(t)
	c.mustBeStock(t, k)

	mustGoOn(func() { c.mustRun(t, "dpkg", "--purge", "kubelet-authenticator") })
	if out := timeout(); out != before {
		t.Errorf("after the package is gone: %s", out)
	}
	if left := c.mustRun(t, "find", "/usr/bin", "/usr/lib", "/usr/share", "/etc", "/var/lib", "-xdev", "-name", "*kubelet-authenticator*"); left != "" {
		t.Errorf("left: %s", left)
	}
	c.mustHave(t, map[string]bool{kubelet.RotatedFile: true})
	harness.Eventually(t, time.Minute, "the node is ready", func() bool { return c.ready(t.Context()) == "" })
}
