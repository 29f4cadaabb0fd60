// SPDX-License-Identifier: Apache-2.0

// demo starts a real control plane, has a node get its client certificate the way a kubelet does, and shows each stage.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const node = "demo-node"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		stop()
		os.Exit(1)
	}
}

// demo is what the stages share.
type demo struct {
	*testbed.ControlPlane
	dir, plugin, certDir, admin, kubelet string
	flags                                []string
}

func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	d := &demo{
		dir: dir, plugin: filepath.Join(dir, "kubelet-authenticator"), certDir: filepath.Join(dir, "certs"),
		admin: filepath.Join(dir, "admin.conf"), kubelet: filepath.Join(dir, "kubelet.conf"),
	}
	title("building the plugin, and the first time a Kubernetes control plane (some minutes)")
	if err := testbed.GoBuild(ctx, "..", d.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if d.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Stop()) }()
	for _, stage := range []func(context.Context) error{d.prepareCluster, d.prepareNode, d.dryRun, d.firstCertificate, d.showRequest, d.fromCache, d.showDirectory} {
		if err := stage(ctx); err != nil {
			return err
		}
	}
	title("done; stopping everything")
	return nil
}

func (d *demo) prepareCluster(ctx context.Context) error {
	if err := d.BindKubeadmBootstrap(ctx); err != nil {
		return err
	}
	if err := d.StartControllerManager(ctx); err != nil {
		return err
	}
	title("control plane at %s: etcd, kube-apiserver, kube-controller-manager with kubeadm's bootstrap bindings", d.ServerURL())
	return d.WriteKubeconfig(d.admin, d.AdminUser())
}

func (d *demo) prepareNode(ctx context.Context) error {
	token, err := d.CreateBootstrapToken(ctx, time.Hour)
	if err != nil {
		return err
	}
	bootstrap := filepath.Join(d.dir, "bootstrap.kubeconfig")
	d.flags = []string{
		"--provider=insecure", "--node-name=" + node, "--provider-id=demo://" + node,
		"--signer-name=kubernetes.io/kube-apiserver-client-kubelet",
		"--cert-dir=" + d.certDir, "--runtime-dir=" + filepath.Join(d.dir, "run"), "--bootstrap-kubeconfig=" + bootstrap,
	}
	kubelet := d.ExecKubeconfig("client.authentication.k8s.io/v1", d.plugin, d.flags, nil, true)
	if err := errors.Join(os.WriteFile(bootstrap, d.BootstrapKubeconfig(token), 0o600), os.WriteFile(d.kubelet, kubelet, 0o600)); err != nil {
		return err
	}
	title("the node has a bootstrap token, and a kubeconfig whose user is the plugin")
	_, after, _ := strings.Cut(string(kubelet), "users:")
	fmt.Println("users:" + strings.TrimRight(after, "\n"))
	return nil
}

func (d *demo) dryRun(ctx context.Context) error {
	title("kubelet-authenticator --dry-run: what it would send")
	return d.show(ctx, d.plugin, append(d.flags, "--dry-run")...)
}

func (d *demo) firstCertificate(ctx context.Context) error {
	title("kubectl --kubeconfig kubelet.conf auth whoami: client-go runs the plugin, the plugin gets a certificate")
	began := time.Now()
	if err := d.show(ctx, d.Kubectl(), "--kubeconfig", d.kubelet, "auth", "whoami"); err != nil {
		return err
	}
	fmt.Printf("(%s)\n", time.Since(began).Round(time.Millisecond))
	return nil
}

func (d *demo) showRequest(ctx context.Context) error {
	title("the CertificateSigningRequest, as filed and issued")
	if err := d.show(ctx, d.Kubectl(), "--kubeconfig", d.admin, "get", "csr"); err != nil {
		return err
	}
	const shown = `{{range .items}}{{.spec.request | base64decode}}{{.status.certificate | base64decode}}{{end}}`
	return d.show(ctx, d.Kubectl(), "--kubeconfig", d.admin, "get", "csr", "-o", "go-template="+shown)
}

func (d *demo) fromCache(ctx context.Context) error {
	title("the second run is served from the certificate directory")
	began := time.Now()
	out, err := exec.CommandContext(ctx, d.plugin, d.flags...).Output() //nolint:gosec // G204: built above
	took := time.Since(began)
	if err != nil {
		return fmt.Errorf("second run: %w", err)
	}
	fmt.Printf("an ExecCredential of %d bytes after %s\n", len(out), took.Round(10*time.Microsecond))
	return d.show(ctx, d.Kubectl(), "--kubeconfig", d.kubelet, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}{\"\\n\"}")
}

func (d *demo) showDirectory(ctx context.Context) error {
	title("the certificate directory")
	return d.show(ctx, "ls", "-l", d.certDir)
}

// show runs a command and lets it print.
func (d *demo) show(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // G204: the demo's own commands
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(name), err)
	}
	return nil
}

func title(format string, args ...any) {
	fmt.Printf("\n=== %s\n", fmt.Sprintf(format, args...))
}
