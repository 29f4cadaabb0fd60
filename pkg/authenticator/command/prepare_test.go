// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

const bootstrapConf = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1", tls-server-name: kubernetes}}]
users: [{name: u, user: {token: abcdef.0123456789abcdef}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

// A full /run keeps the kubelet from starting: without its environment file it would join without
// attestation. So the exit code is that of prepare, and the hint that of the file system.
func TestFullRunIsAFailureOfPrepare(t *testing.T) {
	for number, says := range map[syscall.Errno]string{
		syscall.ENOSPC: "free space", syscall.EROFS: "read-write", syscall.EACCES: "run this as root", syscall.EISDIR: "who owns the file",
	} {
		for _, err := range []error{&cache.WriteError{Path: "/run/x", Err: number}, &kubelet.UnpreparedError{Err: &cache.WriteError{Path: "/run/x", Err: number}}} {
			var failure *reason.Failure
			if err := notWritten(err); !errors.As(err, &failure) || failure.Reason != reason.KubeletNotPrepared ||
				!strings.Contains(failure.Hint, says) || strings.Contains(failure.Hint, "--") {
				t.Errorf("%v: %+v", number, failure)
			}
		}
	}
}

// joining is a node in the hands of kubeadm, and the command line of prepare for it.
func joining(t *testing.T) (n node, prepare []string) {
	t.Helper()
	n = newNode(t)
	if err := os.Mkdir(filepath.Join(n.root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	n.write(t, "etc/bootstrap-kubelet.conf", bootstrapConf)
	n.flags = []string{
		"--config=" + n.write(t, "config.yaml", configHead), "--provider=insecure", "--node-name=a", "--cert-dir=" + n.certs, "--runtime-dir=" + n.root + "/run",
		"--kubelet-kubeconfig=" + n.root + "/etc/kubelet.conf", "--kubelet-bootstrap-kubeconfig=" + n.root + "/etc/bootstrap-kubelet.conf", "--prepare-wait=100ms",
	}
	return n, append(append([]string{"prepare"}, n.flags...), "--env-file="+n.root+"/run/kubelet.env", "--manifests="+n.root+"/etc/manifests")
}

// said checks the exit code and that each line begins with the program's name.
func (o callResult) said(t *testing.T, code int, says string) {
	t.Helper()
	if o.code != code || o.stdout != "" || !strings.Contains(o.stderr, says) {
		t.Errorf("exit code %d, not %d; %q, not %q", o.code, code, o.stderr, says)
	}
	for line := range strings.Lines(o.stderr) {
		if !strings.HasPrefix(line, "kubelet-authenticator-test: ") && !strings.HasPrefix(line, "hint: ") {
			t.Errorf("not a line of ours: %q", line)
		}
	}
}

func TestPrepareWithoutAConfigurationFile(t *testing.T) {
	n, prepare := joining(t)
	if err := os.Remove(filepath.Join(n.root, "config.yaml")); err != nil {
		t.Fatal(err)
	}
	before := tree(t, n.root)
	call(t, "", prepare...).said(t, 0, "there is no configuration file "+n.root+"/config.yaml: the kubelet starts without kubelet-authenticator\n")
	if after := tree(t, n.root); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
}

// A broken file may name other paths than those looked at. But a file that evidently belongs to
// somebody else is left alone, with any content.
func TestPrepareWithABrokenConfigurationFile(t *testing.T) {
	n, prepare := joining(t)
	n.write(t, "config.yaml", "{")
	bootstrap := filepath.Join(n.root, "etc/bootstrap-kubelet.conf")
	call(t, "", prepare...).said(t, 10, "wrote "+n.root+"/run/kubelet.env")
	enrolled(t, n.certs)
	call(t, "", prepare...).said(t, 0, "config.yaml")

	for _, path := range []string{bootstrap, n.certs, n.root + "/etc/kubelet.conf"} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	call(t, "", prepare...).said(t, 10, "the configuration file is invalid: the kubelet does not start")
	n.write(t, "etc/kubelet.conf", bootstrapConf)
	call(t, "", prepare...).said(t, 0, "is not changed")
}

// What goes into the kubelet's environment file and onto its command line is looked at before
// anything is written.
func TestPrepareWithPathsThatAreNotPlain(t *testing.T) {
	n, prepare := joining(t)
	before := tree(t, n.root)
	for _, flag := range []string{"--kubelet-kubeconfig=" + n.root + "/etc/kubelet.conf --v=9", "--cert-dir=certs", "--env-file=kubelet.env"} {
		call(t, "", append(slices.Clone(prepare), flag)...).said(t, 10, "must be an absolute path")
	}
	if after := tree(t, n.root); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	n.write(t, "config.yaml", configHead+"kubeletKubeconfig: '"+n.root+"/etc/a b'\n{")
	prepare = slices.DeleteFunc(prepare, func(arg string) bool { return strings.HasPrefix(arg, "--kubelet-kubeconfig=") })
	call(t, "", prepare...).said(t, 10, "kubeletKubeconfig")
	if _, err := os.Stat(n.root + "/run/kubelet.env"); err == nil {
		t.Error("there is an environment file")
	}
}

func TestPrepareFails(t *testing.T) {
	n, prepare := joining(t)
	call(t, "", append(prepare, "--config=config.yaml")...).failed(t, 3, "--config")
	call(t, "", append(prepare, "--command=kubelet-authenticator")...).failed(t, 3, "--command")
	call(t, "", append(prepare, "more")...).failed(t, 3, "more")
	n.write(t, "file", "")
	call(t, "", append(prepare, "--env-file="+n.root+"/file/kubelet.env")...).said(t, 30, "hint: see who owns")
	// Nothing listens there.
	got := call(t, "", append(prepare, "--prepare-wait=3s")...)
	got.said(t, 19, "waiting up to 3s")
	// When it comes up, and at the end, unless an attempt is under way then.
	if n := strings.Count(got.stderr, "connection refused"); n < 1 || n > 2 || strings.Count(got.stderr, "no evidence") != 1 {
		t.Errorf("the reason is said again and again: %s", got.stderr)
	}
}

func TestKubeconfigCommand(t *testing.T) {
	n, _ := joining(t)
	args := func(more ...string) []string { return append(append([]string{"kubeconfig"}, n.flags...), more...) }
	got := call(t, "", args("--command=/opt/kubelet-authenticator-acme")...)
	var config struct {
		Clusters []struct{ Cluster map[string]string }
		Users    []struct {
			User struct {
				Exec map[string]any
			}
		}
	}
	data, err := yaml.YAMLToJSON([]byte(got.stdout))
	if err != nil || json.Unmarshal(data, &config) != nil || got.code != 0 || len(config.Users) != 1 || len(config.Clusters) != 1 {
		t.Fatalf("%v %+v", err, got)
	}
	if want := map[string]string{"server": "https://127.0.0.1:1", "tls-server-name": "kubernetes"}; !reflect.DeepEqual(config.Clusters[0].Cluster, want) {
		t.Errorf("cluster %q", config.Clusters[0].Cluster)
	}
	exec := config.Users[0].User.Exec
	var given []string
	for _, arg := range exec["args"].([]any) {
		given = append(given, arg.(string))
	}
	if len(given) != len(n.flags) {
		t.Errorf("arguments %q, not %q", given, n.flags)
	}
	for _, flag := range n.flags {
		if !strings.Contains(strings.Join(given, "\n")+"\n", flag+"\n") {
			t.Errorf("%s is not among the arguments %q", flag, given)
		}
	}
	if exec["command"] != "/opt/kubelet-authenticator-acme" || exec["interactiveMode"] != "Never" || exec["provideClusterInfo"] != true || exec["installHint"] == "" {
		t.Errorf("exec %v", exec)
	}
	if strings.Contains(got.stdout, "abcdef") {
		t.Error("the token is in it")
	}
	if got := call(t, "", args()...); !strings.Contains(got.stdout, "command: "+mustReadlink(t)+"\n") {
		t.Errorf("%+v", got)
	}

	call(t, "", args("--proxy-url=http://p")...).failed(t, 3, "--server")
	call(t, "", args("--server=http://10.0.0.1")...).failed(t, 3, "https")
	call(t, "", args("--server=https://10.0.0.1", "--certificate-authority="+n.root+"/none")...).failed(t, 3, "certificate-authority")
	call(t, "", args("--server=https://10.0.0.1", "--certificate-authority="+n.root+"/config.yaml")...).failed(t, 3, "no certificate")
	call(t, "", args("--bootstrap-kubeconfig="+n.root+"/none")...).failed(t, 17, n.root+"/none")
	call(t, "", args("--bootstrap-kubeconfig="+n.root+"/config.yaml")...).failed(t, 10, "config.yaml")
	call(t, "", args("--provider=none")...).failed(t, 10, "provider")
	n.write(t, "etc/kubelet.conf", bootstrapConf)
	call(t, "", args("--write="+n.root+"/etc/kubelet.conf")...).failed(t, 29, "is not changed")
	call(t, "", args("--write="+n.root+"/none/kubelet.conf")...).failed(t, 30, "none/kubelet.conf")
}

func mustReadlink(t *testing.T) string {
	t.Helper()
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	return self
}

func TestResetCommand(t *testing.T) {
	n, _ := joining(t)
	enrolled(t, n.certs)
	reset := append(append([]string{"reset"}, n.flags...), "--env-file="+n.root+"/run/kubelet.env", "--yes")

	n.write(t, "config.yaml", "{")
	before := tree(t, n.root)
	call(t, "", reset...).failed(t, 10, "config.yaml")
	if after := tree(t, n.root); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	n.write(t, "config.yaml", configHead)

	if err := os.Chmod(n.certs, 0o777); err != nil {
		t.Fatal(err)
	}
	call(t, "", reset...).failed(t, 12, n.certs)
	if err := os.Chmod(n.certs, 0o700); err != nil {
		t.Fatal(err)
	}
	call(t, "", reset...).said(t, 0, "removed "+filepath.Join(n.certs, cache.CurrentFile))
	if _, err := os.Lstat(n.certs); err == nil {
		t.Error("the directory is still there")
	}
	call(t, "", reset...).said(t, 0, "there is nothing to remove")
	if _, err := os.Lstat(n.certs); err == nil {
		t.Error("the directory has been made again")
	}
}
