// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/container"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	configFolder = "/etc/node-attestation-controller"
	startTimeout = time.Minute
	pollInterval = 50 * time.Millisecond
)

func newContainer(t *testing.T) *container.Container {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, THE IMAGE WAS NOT RUN: only root can change the root folder")
	}
	img := pull(t, "project")
	root := t.TempDir()
	pristine, _ := unpack(t)
	commandIn(t, ".", "cp", "--recursive", "--link", pristine+"/.", root)
	// TempDir's parents are root's, and closed; within the root there is nothing secret but what a
	// pod would have.
	for _, dir := range []string{root, filepath.Dir(root)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c, err := container.Of(img, root)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Without a configuration, a cluster, or anything else, the program says which release it is, and
// what is missing.
func TestRunsAlone(t *testing.T) {
	t.Parallel()
	c := newContainer(t)
	run := func(args ...string) (string, error) {
		command := c.Command(nil, args...)
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

// The image gets the arguments of the deployment, a configuration, and a service account's token
// where a pod has it. It becomes ready on a real API server, leads, and ends on a signal.
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
	if err := c.Mount(configFolder, map[string][]byte{"config.yaml": []byte(read(t, settings.ConfigFile()))}); err != nil {
		t.Fatal(err)
	}
	env, err := c.MountAccount(t.Context(), cp, controllerprocess.Namespace, controllerprocess.Account)
	if err != nil {
		t.Fatal(err)
	}

	command := c.Command(env, "--config="+configFolder+"/config.yaml")
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
