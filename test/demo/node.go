// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

func (d *demo) newMachine(name string, maker *swtpm.CA) (*machine, error) {
	chip, err := swtpm.New(swtpm.Options{Certified: []string{"ecc-p256"}, CA: maker})
	if err != nil {
		return nil, err
	}
	certs := filepath.Join(d.dir, name+"-certs")
	return &machine{chip: chip, certs: certs, flags: []string{
		"--node-name=" + node, "--provider-id=demo://" + node, "--tpm-device=" + chip.Socket(), "--cert-dir=" + certs,
		"--runtime-dir=" + filepath.Join(d.dir, name+"-run"), "--bootstrap-kubeconfig=" + d.bootstrap,
	}}, nil
}

func (d *demo) prepareNode(context.Context) error {
	kubelet := d.ExecKubeconfig("client.authentication.k8s.io/v1", d.plugin, d.node.flags, nil, true)
	if err := errors.Join(os.WriteFile(d.bootstrap, d.BootstrapKubeconfig(d.token), 0o600), os.WriteFile(d.kubelet, kubelet, 0o600)); err != nil {
		return err
	}
	title("the node has a bootstrap token, a TPM, and a kubeconfig whose user is the plugin")
	_, after, _ := strings.Cut(string(kubelet), "users:")
	shown("users:" + after)
	return nil
}

// identify asks the machine which EK it has: that is the inventory.
func (d *demo) identify(ctx context.Context) error {
	title("kubelet-authenticator identify: becomes the inventory of machines, a ConfigMap")
	out, err := d.plug(ctx, append([]string{"identify"}, d.node.flags...)...)
	if err != nil {
		return err
	}
	shown(out)
	return controllerprocess.SetInventory(ctx, d.ControlPlane, []byte(out))
}

func (d *demo) dryRun(ctx context.Context) error {
	title("kubelet-authenticator --dry-run: what it would send")
	out, err := d.plug(ctx, append([]string{"--dry-run"}, d.node.flags...)...)
	shown(out)
	return err
}

// impostorComesFirst: no record binds the name yet, but the inventory says whose it is.
func (d *demo) impostorComesFirst(ctx context.Context) error {
	title("an impostor with the bootstrap token and another genuine TPM of the same maker comes first, as %s", node)
	return d.refused(ctx, "impostor with another TPM, before the node", verifier.ReasonNodeNameMismatch)
}

func (d *demo) impostorComesAgain(ctx context.Context) error {
	title("the impostor again, after the node")
	if err := os.RemoveAll(d.impostor.certs); err != nil { // it would pause after a denial
		return err
	}
	return d.refused(ctx, "impostor with another TPM, after the node", verifier.ReasonIdentityBound)
}

// refused runs the impostor's plugin, which has to end with the code for a denial, and to have got
// no certificate.
func (d *demo) refused(ctx context.Context, who string, want verifier.Reason) error {
	before, err := d.requests(ctx)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, d.plugin, d.impostor.flags...) //nolint:gosec // G204: built above
	var printed, said strings.Builder
	cmd.Stdout, cmd.Stderr = &printed, &said
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		return err
	}
	shown(said.String())
	say("(exit code %d)", cmd.ProcessState.ExitCode())
	if code := reason.RequestDenied.Code(); cmd.ProcessState.ExitCode() != code {
		return fmt.Errorf("the impostor's plugin ended with %s, not exit code %d", cmd.ProcessState, code)
	}
	if printed.Len() > 0 {
		return fmt.Errorf("the impostor's plugin printed a credential of %d bytes", printed.Len())
	}
	after, err := d.requests(ctx)
	if err != nil {
		return err
	}
	denied := 0
	for name, request := range after {
		if _, old := before[name]; old {
			continue
		}
		if len(request.Status.Certificate) > 0 {
			return fmt.Errorf("the impostor got a certificate for its request %s", name)
		}
		for _, c := range request.Status.Conditions {
			say("%s: %s: %s", name, c.Type, c.Message)
			if c.Type == certificatesv1.CertificateDenied && strings.Contains(c.Message, string(want)+": ") {
				denied++
				d.outcomes = append(d.outcomes, outcome{who: who, has: "the token, a genuine TPM", why: c.Message})
			}
		}
	}
	if denied != 1 {
		return fmt.Errorf("%d requests of the impostor were denied for %s, not one", denied, want)
	}
	return nil
}

// requests are all there are, by name.
func (d *demo) requests(ctx context.Context) (map[string]certificatesv1.CertificateSigningRequest, error) {
	list, err := d.Client().CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	requests := map[string]certificatesv1.CertificateSigningRequest{}
	for _, r := range list.Items {
		requests[r.Name] = r
	}
	return requests, nil
}

func (d *demo) firstCertificate(ctx context.Context) error {
	title("kubectl --kubeconfig kubelet.conf auth whoami: client-go runs the plugin; hello, challenge, proof, certificate")
	began := time.Now()
	out, err := d.whoami(ctx)
	shown(out)
	if err != nil {
		return err
	}
	fmt.Printf("(%s)\n", time.Since(began).Round(time.Millisecond))
	requests, err := d.requests(ctx)
	if err != nil {
		return err
	}
	for _, request := range requests {
		for _, c := range request.Status.Conditions {
			if c.Type == certificatesv1.CertificateApproved {
				d.outcomes = append(d.outcomes, outcome{
					who: "the node", has: "the token, the TPM in the inventory", gotIn: true, why: c.Reason + ": " + c.Message,
				})
			}
		}
	}
	return nil
}

func (d *demo) fromCache(ctx context.Context) error {
	title("the second run is served from the certificate directory")
	before, err := d.requests(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	out, err := d.plug(ctx, d.node.flags...)
	if err != nil {
		return err
	}
	fmt.Printf("an ExecCredential of %d bytes after %s\n", len(out), time.Since(began).Round(10*time.Microsecond))
	if _, err := d.whoami(ctx); err != nil {
		return err
	}
	after, err := d.requests(ctx)
	if err == nil && len(after) != len(before) {
		err = fmt.Errorf("there are %d requests, %d before", len(after), len(before))
	}
	return err
}

// whoami asks the API server as the kubelet would.
func (d *demo) whoami(ctx context.Context) (string, error) {
	out, err := d.RunKubectl(ctx, d.kubelet, "auth", "whoami")
	if err == nil && !strings.Contains(out, " system:node:"+node+"\n") {
		err = fmt.Errorf("the API server does not take the node for system:node:%s: %s", node, out)
	}
	return out, err
}

func (d *demo) showDirectory(context.Context) error {
	title("the certificate directory")
	entries, err := os.ReadDir(d.node.certs)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return err
		}
		fmt.Printf("%s %6d %s\n", info.Mode(), info.Size(), entry.Name())
	}
	return nil
}

// plug runs the plugin and returns what it prints.
func (d *demo) plug(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.plugin, args...) //nolint:gosec // G204: built above
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w", filepath.Base(d.plugin), err)
	}
	return string(out), nil
}
