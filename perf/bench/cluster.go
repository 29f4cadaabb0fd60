// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// cluster is a control plane with node-attestation-controller and kube-controller-manager, and
// machines that the inventory lists.
type cluster struct {
	*testbed.ControlPlane
	controller *controllerprocess.Controller
	// token is a bootstrap token, and bootstrap the kubeconfig with it.
	token, bootstrap string
	machines         []*machine
}

// machine is a computer with a TPM, its plugin's directories and flags.
type machine struct {
	name  string
	chip  *swtpm.TPM
	certs cache.Dir
	flags []string
}

// withCluster starts a cluster with so many machines, calls use, and stops everything.
func (b *bench) withCluster(ctx context.Context, name string, machines int, use func(*cluster) error) (err error) {
	dir, err := b.folder(name)
	if err != nil {
		return err
	}
	c := &cluster{bootstrap: filepath.Join(dir, "bootstrap.kubeconfig")}
	if c.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	maker, err := swtpm.NewCA()
	if err != nil {
		return err
	}
	defer func() {
		for _, m := range c.machines {
			m.stopWorker()
			m.chip.Stop()
		}
	}()
	for i := range machines {
		if err := c.addMachine(filepath.Join(dir, fmt.Sprintf("node-%03d", i)), maker); err != nil {
			return err
		}
	}
	for _, step := range []func() error{
		func() error { return c.BindKubeadmBootstrap(ctx) },
		func() error { return c.StartControllerManager(ctx) },
		func() error { return controllerprocess.Install(ctx, c.ControlPlane, module) },
		func() error { return c.letOthersApprove(ctx) },
		func() error { return c.listMachines(ctx, b.plugin) },
		func() error { return c.makeToken(ctx) },
		func() error { return c.startController(ctx, filepath.Join(dir, "controller"), b.controller, maker) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, c.controller.Kill()) }()
	if err := use(c); err != nil {
		return fmt.Errorf("%w\n%s", err, c.controller.LogTail())
	}
	return nil
}

func (c *cluster) addMachine(dir string, maker *swtpm.CA) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	chip, err := swtpm.New(swtpm.Options{Certified: []string{"ecc-p256"}, CA: maker})
	if err != nil {
		return err
	}
	m := &machine{name: filepath.Base(dir), chip: chip, certs: cache.At(filepath.Join(dir, "certs"))}
	m.flags = []string{
		"--node-name=" + m.name, "--provider-id=bench://" + m.name, "--tpm-device=" + chip.Socket(), "--cert-dir=" + m.certs.Path(),
		"--runtime-dir=" + filepath.Join(dir, "run"), "--bootstrap-kubeconfig=" + c.bootstrap,
	}
	c.machines = append(c.machines, m)
	return nil
}

// approvalPolicy keeps everybody but node-attestation-controller from approving.
const approvalPolicy = "node-attestation-approval"

// letOthersApprove removes only the built-in signer for kubelets from the policy on approvals.
// kube-controller-manager's approver is the other side of the comparison, on the same API server
// and behind the same policies. Until that has taken effect the approver tries again; what is
// measured comes later.
func (c *cluster) letOthersApprove(ctx context.Context) error {
	policies := c.Client().AdmissionregistrationV1().ValidatingAdmissionPolicies()
	policy, err := policies.Get(ctx, approvalPolicy, metav1.GetOptions{})
	if err != nil {
		return err
	}
	i := slices.IndexFunc(policy.Spec.Variables, func(v admissionregistrationv1.Variable) bool { return v.Name == "signers" })
	const builtIn = "'kubernetes.io/kube-apiserver-client-kubelet'"
	if i < 0 || !strings.Contains(policy.Spec.Variables[i].Expression, builtIn) {
		return fmt.Errorf("policy %s has no variable signers with %s", approvalPolicy, builtIn)
	}
	without := strings.Replace(policy.Spec.Variables[i].Expression, builtIn, "'bench.invalid/none'", 1)
	patch, err := json.Marshal([]map[string]string{{"op": "replace", "path": fmt.Sprintf("/spec/variables/%d/expression", i), "value": without}})
	if err != nil {
		return err
	}
	_, err = policies.Patch(ctx, approvalPolicy, types.JSONPatchType, patch, metav1.PatchOptions{})
	return err
}

// listMachines makes the inventory of what the machines say of themselves.
func (c *cluster) listMachines(ctx context.Context, plugin string) error {
	var inventory bytes.Buffer
	for _, m := range c.machines {
		cmd := exec.CommandContext(ctx, plugin, append([]string{"identify"}, m.flags...)...) //nolint:gosec // G204: built above
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("identify %s: %w: %s", m.name, err, stderr.String())
		}
		inventory.WriteString("---\n")
		inventory.Write(out)
	}
	return controllerprocess.SetInventory(ctx, c.ControlPlane, inventory.Bytes())
}

func (c *cluster) makeToken(ctx context.Context) (err error) {
	if c.token, err = c.CreateBootstrapToken(ctx, time.Hour); err != nil {
		return err
	}
	return os.WriteFile(c.bootstrap, c.BootstrapKubeconfig(c.token), 0o600)
}

// startController starts it and waits until it is ready.
func (c *cluster) startController(ctx context.Context, dir, binary string, maker *swtpm.CA) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	roots, intermediates := filepath.Join(dir, "roots.pem"), filepath.Join(dir, "intermediates.pem")
	for path, der := range map[string][]byte{roots: maker.Root.Raw, intermediates: maker.Intermediate.Raw} {
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			return err
		}
	}
	var err error
	c.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: c.ControlPlane, Dir: dir, Binary: binary,
		Configure: func(s *config.Config) {
			s.TPM.RootsFile, s.TPM.IntermediatesFile = roots, intermediates
			s.Policies.Mode = "Warn" // letOthersApprove has changed one of them
		},
	})
	if err != nil {
		return err
	}
	if err := c.controller.Start(ctx); err != nil {
		return err
	}
	return c.controller.Ready(ctx)
}

// origin is the cluster as a certificate directory notes it.
func (c *cluster) origin() cache.Origin {
	return cache.Origin{Server: c.ServerURL(), CertificateAuthorityData: c.ServerCA()}
}

// stopWorker ends what a plugin may have left running.
func (m *machine) stopWorker() {
	for worker := m.certs.Worker(); worker.Alive(); time.Sleep(5 * time.Millisecond) {
		_ = syscall.Kill(worker.PID, syscall.SIGKILL)
	}
}
