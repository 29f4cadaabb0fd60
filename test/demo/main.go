// SPDX-License-Identifier: Apache-2.0

// demo starts a real control plane, node-attestation-controller and software TPMs, has a node prove which machine it is and get its client
// certificate the way a kubelet does, and impostors try the same. It shows each stage, and fails where one does not show what it should.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = ".."
	node   = "demo-node"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
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
	controller *controllerprocess.Controller
	// token is the bootstrap token that the node has, and impostors have, too.
	token string
	// plugin and binary are programs, the others files.
	dir, plugin, binary, admin, bootstrap, kubelet string
	node, impostor                                 *machine
}

// machine is a computer with a TPM. All of the demo's claim the node's name.
type machine struct {
	chip  *swtpm.TPM
	certs string
	flags []string
}

func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := func(name string) string { return filepath.Join(dir, name) }
	d := &demo{
		dir: dir, plugin: file("kubelet-authenticator"), binary: file("node-attestation-controller"),
		admin: file("admin.conf"), bootstrap: file("bootstrap.kubeconfig"), kubelet: file("kubelet.conf"),
	}
	title("building plugin and controller, and the first time a Kubernetes control plane (some minutes)")
	if err := testbed.GoBuild(ctx, module, d.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if err := controllerprocess.Build(ctx, module, d.binary); err != nil {
		return err
	}
	if d.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Stop()) }()
	maker, err := swtpm.NewCA()
	if err != nil {
		return err
	}
	for name, m := range map[string]**machine{"node": &d.node, "impostor": &d.impostor} {
		if *m, err = d.newMachine(name, maker); err != nil {
			return err
		}
		defer (*m).chip.Stop()
	}
	if err := d.configureController(maker); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.controller.Kill()) }()
	if err := d.stages(ctx); err != nil {
		return fmt.Errorf("%w\n%s", err, d.controller.LogTail())
	}
	return nil
}

func (d *demo) stages(ctx context.Context) error {
	began := time.Now()
	for _, stage := range []func(context.Context) error{
		d.prepareCluster, d.startController, d.prepareNode, d.identify, d.dryRun,
		d.impostorWithoutTPM, d.impostorComesFirst, d.firstCertificate, d.showRecord, d.impostorComesAgain,
		d.oneCertificate, d.fromCache, d.showDirectory, d.stopController,
	} {
		if err := stage(ctx); err != nil {
			return err
		}
	}
	title("done, %s after the control plane was up; stopping everything", time.Since(began).Round(100*time.Millisecond))
	return nil
}

// title heads a stage.
func title(format string, args ...any) {
	fmt.Printf("\n=== %s\n", fmt.Sprintf(format, args...))
}

// shown is a command line's output as it is printed.
func shown(output string) {
	if output = strings.TrimRight(output, "\n"); output != "" {
		fmt.Println(output)
	}
}
