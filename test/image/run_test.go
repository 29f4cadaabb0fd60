// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	configFolder  = "/etc/node-attestation-controller"
	accountFolder = "/var/run/secrets/kubernetes.io/serviceaccount"
	startTimeout  = time.Minute
	pollInterval  = 50 * time.Millisecond
)

// enter does what a container runtime does, as far as the program can see: it starts it from the image alone, read-only, as the image's user, without
// privileges or a way to get any, and with the image's environment. $1 is the root, $2 the user, the rest the program and its arguments. There is less than
// in a container: no /proc, no /dev, no /sys, no /etc/resolv.conf. The shell is the first process of its namespace: if the tests die, so do both, though the
// change of user has taken the program's own tie to its parent.
const enter = `
mount --bind "$1" "$1"
mount -o remount,bind,ro,nosuid,nodev "$1"
root=$1 user=$2
shift 2
setpriv --no-new-privs --bounding-set=-all,+sys_chroot,+setuid,+setgid chroot --userspec="$user" --groups= "$root" "$@" &
wait $!
`

// container is the image, unpacked as a container's root.
type container struct {
	root, user, program string
	env                 []string
}

func newContainer(t *testing.T) container {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, THE IMAGE WAS NOT RUN: only root can change the root folder")
	}
	img := pull(t, "project")
	root := t.TempDir()
	pristine, _ := unpack(t)
	commandIn(t, ".", "cp", "--recursive", "--link", pristine+"/.", root)
	// TempDir's parents are root's, and closed; within the root there is nothing secret but what a pod would have.
	for _, dir := range []string{root, filepath.Dir(root)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return container{root: root, user: cf.Config.User, program: cf.Config.Entrypoint[0], env: cf.Config.Env}
}

// mount puts files where a pod has volumes, readable by its group (fsGroup) only.
func (c container) mount(t *testing.T, folder string, files map[string][]byte) {
	t.Helper()
	dir := filepath.Join(c.root, folder)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var uid, gid int
	if _, err := fmt.Sscanf(c.user, "%d:%d", &uid, &gid); err != nil {
		t.Fatalf("user %q: %v", c.user, err)
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o640); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, 0, gid); err != nil {
			t.Fatal(err)
		}
	}
}

// command is that which starts the program in there.
func (c container) command(env []string, args ...string) []string {
	command := []string{"unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "sh", "-ec", enter, "sh", c.root, c.user}
	// The tools around it need their PATH. The program starts no others.
	outside := append([]string{"env", "-i"}, slices.Concat(c.env, env, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"})...)
	return slices.Concat(outside, command, []string{c.program}, args)
}

// Without a configuration, a cluster, or anything else, the program says which release it is, and what is missing.
func TestRunsAlone(t *testing.T) {
	t.Parallel()
	c := newContainer(t)
	run := func(args ...string) (string, error) {
		command := c.command(nil, args...)
		out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput()
		return string(out), err
	}
	if out, err := run("version"); err != nil || !strings.Contains(out, version) || !strings.Contains(out, shared.commit) {
		t.Errorf("version: %v: %s", err, out)
	}
	if out, err := run("--config=" + configFolder + "/config.yaml"); err == nil || !strings.Contains(out, configFolder+"/config.yaml") {
		t.Errorf("without a configuration: %v: %s", err, out)
	}
}

// With the arguments of the deployment, a configuration and a service account's token where a pod has them, it becomes ready on a real API server, leads,
// and ends when it is told to.
func TestRunsInACluster(t *testing.T) {
	t.Parallel()
	c := newContainer(t)
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := controllerprocess.Install(t.Context(), cp, module); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	settings, err := controllerprocess.New(controllerprocess.Options{ControlPlane: cp, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	c.mount(t, configFolder, map[string][]byte{"config.yaml": []byte(read(t, settings.ConfigFile()))})
	env := c.mountAccount(t, cp)

	command := c.command(env, "--config="+configFolder+"/config.yaml")
	process, err := testbed.StartProcess(testbed.Command{Path: command[0], Args: command[1:], LogFile: filepath.Join(dir, "log")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Kill() })
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	harness.EventuallyOf(t, process, startTimeout, "it is ready", func() bool { return answersOK(ctx, settings.ReadyURL()) })
	harness.EventuallyOf(t, process, startTimeout, "it leads", func() bool {
		lease, err := cp.Client().CoordinationV1().Leases(controllerprocess.Namespace).Get(ctx, program, metav1.GetOptions{})
		return err == nil && lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != ""
	})
	if err := syscall.Kill(-process.PID(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-process.Done():
		if err := process.Err(); err != nil {
			t.Error(err)
		}
	case <-ctx.Done():
		t.Errorf("it does not end: %v\n%s", ctx.Err(), process.LogTail())
	}
}

// mountAccount gives the container what a pod has of its service account, and returns the environment that says where the API server is.
func (c container) mountAccount(t *testing.T, cp *testbed.ControlPlane) []string {
	t.Helper()
	content, err := controllerprocess.Kubeconfig(t.Context(), cp)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(content)
	if err != nil {
		t.Fatal(err)
	}
	c.mount(t, accountFolder, map[string][]byte{
		"token": []byte(config.BearerToken), "ca.crt": cp.ServerCA(), "namespace": []byte(controllerprocess.Namespace),
	})
	server, err := url.Parse(cp.ServerURL())
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(server.Host)
	if err != nil {
		t.Fatal(err)
	}
	return []string{"KUBERNETES_SERVICE_HOST=" + host, "KUBERNETES_SERVICE_PORT=" + port}
}

func answersOK(ctx context.Context, address string) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return false
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false
	}
	_ = response.Body.Close()
	return response.StatusCode == http.StatusOK
}
