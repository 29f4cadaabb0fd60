// SPDX-License-Identifier: Apache-2.0

// demo starts a real control plane and software TPMs, has a node prove which machine it is and get its client certificate the way a
// kubelet does, and shows each stage. A stand-in plays the controller.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
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
	dir, plugin, certDir, admin, kubelet, bootstrap string
	flags                                           []string
	// genuine is the node's TPM, stranger one of the same make in another machine.
	genuine, stranger *swtpm.TPM
	attestor          *attestor.Attestor
}

func run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	d := &demo{
		dir: dir, plugin: filepath.Join(dir, "kubelet-authenticator"), certDir: filepath.Join(dir, "certs"),
		admin: filepath.Join(dir, "admin.conf"), kubelet: filepath.Join(dir, "kubelet.conf"), bootstrap: filepath.Join(dir, "bootstrap.kubeconfig"),
	}
	title("building the plugin, and the first time a Kubernetes control plane (some minutes)")
	if err := testbed.GoBuild(ctx, "..", d.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return err
	}
	if d.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Stop()) }()
	if d.genuine, err = swtpm.New(swtpm.Options{Certified: []string{"ecc-p256"}}); err != nil {
		return err
	}
	defer d.genuine.Stop()
	if d.stranger, err = swtpm.New(swtpm.Options{Certified: []string{"ecc-p256"}, CA: d.genuine.CA}); err != nil {
		return err
	}
	defer d.stranger.Stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, stage := range []func(context.Context) error{
		d.prepareCluster, d.prepareNode, d.identify, d.dryRun, d.impostor, d.firstCertificate, d.showRequest, d.fromCache, d.showDirectory,
	} {
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
	d.flags = d.flagsOf("node", d.certDir, d.genuine)
	kubelet := d.ExecKubeconfig("client.authentication.k8s.io/v1", d.plugin, d.flags, nil, true)
	if err := errors.Join(os.WriteFile(d.bootstrap, d.BootstrapKubeconfig(token), 0o600), os.WriteFile(d.kubelet, kubelet, 0o600)); err != nil {
		return err
	}
	title("the node has a bootstrap token, a TPM, and a kubeconfig whose user is the plugin")
	_, after, _ := strings.Cut(string(kubelet), "users:")
	fmt.Println("users:" + strings.TrimRight(after, "\n"))
	return nil
}

// flagsOf are those of a machine that claims the node's name.
func (d *demo) flagsOf(machine, certDir string, chip *swtpm.TPM) []string {
	return []string{
		"--node-name=" + node, "--provider-id=demo://" + node, "--tpm-device=" + chip.Socket(), "--cert-dir=" + certDir,
		"--runtime-dir=" + filepath.Join(d.dir, machine+"-run"), "--bootstrap-kubeconfig=" + d.bootstrap,
	}
}

// identify asks the machine which EK it has, as one does for an inventory, and has the stand-in trust that one alone.
func (d *demo) identify(ctx context.Context) error {
	title("kubelet-authenticator identify: what the inventory of machines needs")
	args := append([]string{"identify"}, d.flags...)
	if err := d.show(ctx, d.plugin, args...); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, d.plugin, append(args, "--output=json")...).Output() //nolint:gosec // G204: built above
	if err != nil {
		return fmt.Errorf("identify: %w", err)
	}
	var identity struct {
		Device tpm.Identity `json:"device"`
	}
	if err := json.Unmarshal(out, &identity); err != nil {
		return err
	}
	ek, err := verifier.ParseFingerprint(identity.Device.EKs[0].Fingerprint)
	if err != nil {
		return err
	}
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	judge, err := verifier.New(verifier.Config{
		AllowedEKs: []verifier.Fingerprint{ek},
		PCRs:       attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 1, 2, 3, 4, 5, 6, 7}},
		ClusterUID: "demo", Keys: verifier.Keys{Current: "k1", ByID: map[string][]byte{"k1": secret}},
	})
	if err != nil {
		return err
	}
	d.attestor = &attestor.Attestor{Cluster: d.ControlPlane, Verifier: judge, NodeName: node, Lifetime: time.Hour}
	go func() {
		if err := d.attestor.Run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "demo:", err)
		}
	}()
	return nil
}

// impostor has the bootstrap token, claims the node's name, and has a genuine TPM: another one. It comes first.
func (d *demo) impostor(ctx context.Context) error {
	title("an impostor with the same bootstrap token and another genuine TPM comes first")
	flags := d.flagsOf("impostor", filepath.Join(d.dir, "impostor"), d.stranger)
	cmd := exec.CommandContext(ctx, d.plugin, flags...) //nolint:gosec // G204: built above
	cmd.Stderr = os.Stdout
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) {
		return fmt.Errorf("the impostor was not refused: %w", err)
	}
	fmt.Printf("(exit code %d)\n", exit.ExitCode())
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
	title("the CertificateSigningRequests, the proof as filed, and the certificate")
	if err := d.show(ctx, d.Kubectl(), "--kubeconfig", d.admin, "get", "csr"); err != nil {
		return err
	}
	const shown = `{{range .items}}{{if .status.certificate}}{{.spec.request | base64decode}}{{.status.certificate | base64decode}}{{end}}{{end}}`
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
