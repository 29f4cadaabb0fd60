// SPDX-License-Identifier: Apache-2.0

// demo starts a real control plane, node-attestation-controller and software TPMs. Impostors ask
// for the node's certificate and are refused. The node attests, is revoked, and attests again. It
// shows each stage, and fails where one does not show what it should.
//
// With -keep everything runs on until it is interrupted, and the demo prints what to try.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = ".."
	node   = "demo-node"
)

func main() {
	keep := flag.Bool("keep", false, "leave everything running until it is interrupted")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *keep); err != nil {
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
	// bin is a folder with programs, plugin and binary are two of them, the others are files.
	dir, bin, plugin, binary, admin, bootstrap, kubelet string
	node, impostor                                      *machine
	outcomes                                            []outcome
}

// outcome is what became of somebody who asked for the node's certificate.
type outcome struct {
	who, has string
	gotIn    bool
	why      string
}

// machine is a computer with a TPM. All of the demo's claim the node's name.
type machine struct {
	chip  *swtpm.TPM
	certs string
	flags []string
}

func run(ctx context.Context, keep bool) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file := func(name string) string { return filepath.Join(dir, name) }
	d := &demo{
		dir: dir, bin: file("bin"), plugin: file("bin/kubelet-authenticator"), binary: file("bin/node-attestation-controller"),
		admin: file("admin.conf"), bootstrap: file("bootstrap.kubeconfig"), kubelet: file("kubelet.conf"),
	}
	introduce()
	if err := os.Mkdir(d.bin, 0o700); err != nil {
		return err
	}
	title("programs and control plane")
	if err := d.start(ctx); err != nil {
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
	if err := d.stages(ctx, keep); err != nil {
		return fmt.Errorf("%w\n%s", err, d.controller.LogTail())
	}
	return nil
}

// start builds the programs, which takes a second if they are up to date, and starts the control
// plane.
func (d *demo) start(ctx context.Context) error {
	if err := compile.Program(ctx, module, d.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if err := controllerprocess.Build(ctx, module, d.binary); err != nil {
		return err
	}
	if err := compile.Program(ctx, module, filepath.Join(d.bin, "kubectl-attest"), "./cmd/kubectl-attest"); err != nil {
		return err
	}
	var err error
	d.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr})
	return err
}

func (d *demo) stages(ctx context.Context, keep bool) error {
	began := time.Now()
	for _, stage := range []func(context.Context) error{
		d.prepareCluster, d.startController, d.prepareNode, d.identify, d.dryRun,
		d.impostorWithoutTPM, d.impostorComesFirst, d.firstCertificate, d.showRecord, d.impostorComesAgain,
		d.fromCache, d.revoke, d.comeBack, d.showDirectory, d.showOutcomes,
	} {
		if err := stage(ctx); err != nil {
			return err
		}
	}
	took := time.Since(began).Round(100 * time.Millisecond)
	if keep {
		if err := d.keep(ctx); err != nil {
			return err
		}
	}
	if err := d.stopController(ctx); err != nil {
		return err
	}
	title("done, %s after the control plane was up; stopping everything", took)
	return nil
}

// introduce says in a line each what the stages are about.
func introduce() {
	title("who is who")
	table([][]string{
		{"TPM", "a chip in a machine that keeps keys, and signs what the firmware has measured; here it is software"},
		{"EK", "endorsement key: the TPM's identity, which its maker has certified, and which never leaves it"},
		{"AK", "attestation key: made by the TPM, it signs the evidence"},
		{"bootstrap token", "a secret that all new machines share; who has it may ask for a certificate, for any node name"},
		{"the node", "a machine that shall become the node " + node + "; it has a TPM and the bootstrap token"},
		{"the impostors", "they have the same token, and want to be " + node + ": one has no TPM, the other one has a genuine TPM of the same maker"},
		{"plugin", "kubelet-authenticator, which the node's kubeconfig names: it asks for the node's certificate and proves which machine it is"},
		{"controller", "node-attestation-controller, which challenges, verifies, approves and signs"},
		{"inventory", "the operator's list of machines: which EK is which node"},
		{"hello, challenge, proof", "the three messages: which EK the machine has; a secret that only its TPM can open; what only that TPM can sign"},
		{"record", "a NodeAttestation: it ties the machine's EK to the node name from its first certificate on"},
		{"admission policies", "rules in the API server: nobody but the controller approves, signs and writes records"},
		{"revocation", "from then on the API server refuses every write with the node's key; the machine gets another one if it attests again"},
	})
}
