// SPDX-License-Identifier: Apache-2.0

// Package install runs the commands of docs/quickstart.md and docs/adopting.md. It uses a control
// plane with the real kubeadm, a machine with the real kubelet, and the controller's image as a
// container. All of that runs in namespaces of its own.
package install

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/container"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	// patience is how long a command may take.
	patience = 2 * time.Minute
	// patienceToBuild is how long the command may take that builds image and package, on a new
	// machine.
	patienceToBuild = 15 * time.Minute
)

// built is what the tests start.
var built struct {
	dir     string // goes when all tests have ended
	kubeadm string
	kubelet compile.KubeletComponents
}

func TestMain(m *testing.M) {
	// the documents say how the product is built
	nothing := func(context.Context, string) error { return nil }
	os.Exit(testbed.MainIsolated(m, 4, nothing, func(ctx context.Context, dir string) (err error) {
		built.dir = dir
		if built.kubelet, err = compile.Kubelet(ctx, os.Stderr); err != nil {
			return err
		}
		if built.kubeadm, err = compile.Kubeadm(ctx, os.Stderr); err != nil {
			return err
		}
		return fetchTools(ctx)
	}))
}

// fetchTools builds the tools of "make packages image" here, since the tests have no way to the
// module proxy.
func fetchTools(ctx context.Context) error {
	for _, tool := range []string{"ko", "nfpm"} {
		cmd := exec.CommandContext(ctx, "go", "tool", "-modfile=tools/"+tool+"/go.mod", "-n", tool)
		cmd.Dir = module
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w\n%s", tool, err, out)
		}
	}
	return nil
}

// document is a guide: its text, and the commands in it.
type document struct {
	text     string
	commands []string
}

func read(t *testing.T, name string) document {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(module, "docs", name))
	harness.Must(t, err)
	d := document{text: string(data)}
	for _, rest := range strings.Split(d.text, "```sh\n")[1:] {
		block, _, _ := strings.Cut(rest, "```")
		d.commands = append(d.commands, block)
	}
	return d
}

// startRegistry starts one with an empty base image, which ends with this program, and returns its
// address and the base's name.
func startRegistry(t *testing.T) (host, base string) {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	host = strings.TrimPrefix(server.URL, "http://")
	digest, err := container.PushBase(t.Context(), host+"/base:nonroot")
	harness.Must(t, err)
	return host, digest.Name()
}

// operator is a person at a shell on the control plane, in a checkout, as the documents want it.
type operator struct {
	dir, lower string
	env        []string
	patience   time.Duration // how long a command of this operator may take
}

// once is what all operators share: a checkout in which command 1 of the quickstart was typed, and
// the registry to which that has pushed.
var once struct {
	sync.Once
	checkout string
	env      []string
}

// build has the first operator build image, package and kubectl's plugin.
func build(t *testing.T) {
	t.Helper()
	once.Do(func() {
		registry, base := startRegistry(t)
		once.env = []string{"REGISTRY=" + registry + "/project", "BASE_IMAGE=" + base}
		// a make above this one would pass its variables on
		env := append(os.Environ(), append(once.env, "MAKEFLAGS=", "MAKELEVEL=")...)
		o := &operator{dir: built.dir, env: env, patience: patienceToBuild}
		o.types(t, read(t, "quickstart.md").commands[0])
		once.checkout = o.upper(checkoutOf(t))
	})
	if once.checkout == "" {
		t.Fatal("another test has failed to build")
	}
}

func checkoutOf(t *testing.T) string {
	t.Helper()
	checkout, err := filepath.Abs(module)
	harness.Must(t, err)
	return checkout
}

// newOperator returns one who has built what command 1 builds, and has root on the machine.
func newOperator(t *testing.T, c *cluster, machine *testbed.Machine) *operator {
	t.Helper()
	build(t)
	o := &operator{dir: t.TempDir(), lower: once.checkout + ":", patience: patience}
	key, err := c.ClientCA().KeyPEM()
	harness.Must(t, err)
	for path, content := range map[string][]byte{
		"/kubernetes/pki/ca.crt": c.ClientCA().CertPEM(), "/kubernetes/pki/ca.key": key, "/kubernetes/admin.conf": c.AdminKubeconfig(),
	} {
		path = filepath.Join(o.upper("/etc"), path)
		harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		harness.Must(t, os.WriteFile(path, content, 0o600))
	}
	bin := filepath.Join(o.dir, "bin")
	harness.Must(t, os.Mkdir(bin, 0o755))
	enter := strings.Join(machine.Command(t.Context(), "env", "-i").Args, " ") +
		` PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root sh -c "cd /root; $*"`
	for program, script := range map[string]string{
		"ssh": `[ "$1" = root@` + worker + ` ] || { echo "ssh: no such host: $1" >&2; exit 255; }` + "\nshift\nexec " + enter + "\n",
		"scp": `[ "$2" = root@` + worker + `: ] || { echo "scp: no such host: $2" >&2; exit 255; }` + "\nexec cp \"$1\" " + machine.Path("/root") + "/\n",
	} {
		harness.Must(t, os.WriteFile(filepath.Join(bin, program), []byte("#!/bin/sh -eu\n"+script), 0o755))
	}
	// As the documents set it: kubectl finds its plugin in the checkout.
	path := strings.Join([]string{bin, filepath.Join(checkoutOf(t), "bin"), filepath.Dir(c.Kubectl()), filepath.Dir(built.kubeadm), os.Getenv("PATH")}, ":")
	o.env = append(append(os.Environ(), once.env...), "PATH="+path, "KUBECONFIG=/etc/kubernetes/admin.conf", "WORKER="+worker)
	return o
}

// upper is where what the operator writes to a folder is.
func (o *operator) upper(folder string) string {
	return filepath.Join(o.dir, "upper"+strings.ReplaceAll(folder, "/", "-"))
}

// mounts is a script that gives the operator a checkout and an /etc of his own.
func (o *operator) mounts(t *testing.T) string {
	t.Helper()
	checkout := checkoutOf(t)
	var script strings.Builder
	for folder, lower := range map[string]string{checkout: o.lower + checkout, "/etc": "/etc"} {
		upper := o.upper(folder)
		work := upper + "-work"
		harness.Must(t, os.MkdirAll(upper, 0o755))
		harness.Must(t, os.MkdirAll(work, 0o700))
		fmt.Fprintf(&script, "mount -t overlay overlay -o lowerdir=%s,upperdir=%s,workdir=%s %s\n", lower, upper, work, folder)
	}
	return script.String() + "cd " + checkout + "\n"
}

// types has the operator type a command, and returns all that is printed.
func (o *operator) types(t *testing.T, command string) string {
	t.Helper()
	began := time.Now()
	out, err := o.try(t, command)
	if err != nil {
		t.Fatalf("%v\n$ %s\n%s", err, command, out)
	}
	t.Logf("$ %s\n%s(%s)", strings.TrimSpace(command), out, time.Since(began).Round(10*time.Millisecond))
	return out
}

func (o *operator) try(t *testing.T, command string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), o.patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--kill-child", "--fork", "--mount", "--propagation=private", "bash", "-e", "-u", "-o", "pipefail", "-c", o.mounts(t)+command)
	cmd.Env, cmd.WaitDelay = o.env, time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}
