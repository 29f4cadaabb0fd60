// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

func (d *demo) prepareCluster(ctx context.Context) error {
	if err := d.BindKubeadmBootstrap(ctx); err != nil {
		return err
	}
	if err := d.StartControllerManager(ctx); err != nil {
		return err
	}
	if err := controllerprocess.Install(ctx, d.ControlPlane, module); err != nil {
		return err
	}
	if err := controllerprocess.InstallRevocation(ctx, d.ControlPlane, module); err != nil {
		return err
	}
	title("control plane at %s: etcd, kube-apiserver, kube-controller-manager", d.ServerURL())
	say("with the bindings that kubeadm makes, by which kube-controller-manager approves without attestation: they are left in place")
	say("applied from packaging/kubernetes: %s; and packaging/kubernetes-revocation", strings.Join(controllerprocess.Manifests, ", "))
	var err error
	if d.token, err = d.CreateBootstrapToken(ctx, time.Hour); err != nil {
		return err
	}
	return d.WriteKubeconfig(d.admin, d.AdminUser())
}

// configureController has the controller trust the maker of both TPMs.
func (d *demo) configureController(maker *swtpm.CA) (err error) {
	roots := filepath.Join(d.dir, "roots.pem")
	intermediates := filepath.Join(d.dir, "intermediates.pem")
	for path, der := range map[string][]byte{roots: maker.Root.Raw, intermediates: maker.Intermediate.Raw} {
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			return err
		}
	}
	dir := filepath.Join(d.dir, "controller")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	d.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: d.ControlPlane, Dir: dir, Binary: d.binary,
		Configure: func(c *config.Config) {
			c.TPM.RootsFile, c.TPM.IntermediatesFile = roots, intermediates
			c.Revocation.Enabled = true
		},
	})
	return err
}

func (d *demo) startController(ctx context.Context) error {
	title("node-attestation-controller, with a token of its service account and this configuration")
	content, err := os.ReadFile(d.controller.ConfigFile())
	if err != nil {
		return err
	}
	shown(string(content))
	// Operators' tools read it there, as from the manifests.
	if _, err := d.RunKubectl(ctx, d.admin, "create", "configmap", controllerprocess.Account, "--namespace="+controllerprocess.Namespace, "--from-file=config.yaml="+d.controller.ConfigFile()); err != nil {
		return err
	}
	began := time.Now()
	if err := d.controller.Start(ctx); err != nil {
		return err
	}
	if err := d.controller.Ready(ctx); err != nil {
		return err
	}
	fmt.Printf("(%s is good after %s)\n", d.controller.ReadyURL(), time.Since(began).Round(time.Millisecond))
	return nil
}

func (d *demo) stopController(context.Context) error {
	title("SIGTERM to node-attestation-controller")
	if err := d.controller.Stop(); err != nil {
		return err
	}
	fmt.Println("(exit code 0)")
	return nil
}

// impostorWithoutTPM asks as kubelets do that do not attest. kube-controller-manager would approve
// that at once, by kubeadm's binding.
func (d *demo) impostorWithoutTPM(ctx context.Context) error {
	title("an impostor without a TPM asks kube-controller-manager for a certificate as %s, with the bootstrap token", node)
	name, err := d.askUnattested(ctx)
	if err != nil {
		return err
	}
	fmt.Println("$ kubectl certificate approve", name)
	_, err = d.RunKubectl(ctx, d.admin, "certificate", "approve", name)
	if err == nil || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'node-attestation-approval'") {
		return fmt.Errorf("the policy has not kept the administrator from approving request %s: %w", name, err)
	}
	_, reason, _ := strings.Cut(err.Error(), "\n")
	shown(reason)
	request, err := d.Client().CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if len(request.Status.Conditions) > 0 || len(request.Status.Certificate) > 0 {
		return fmt.Errorf("request %s was decided on: %v", name, request.Status.Conditions)
	}
	say("(the same policy kept kube-controller-manager from it: the request is pending)")
	d.outcomes = append(d.outcomes, outcome{
		who: "impostor without a TPM", has: "the token",
		why: "the admission policy node-attestation-approval refused every approval, an administrator's too",
	})
	return nil
}

func (d *demo) askUnattested(ctx context.Context) (string, error) {
	credential, err := clientcmd.RESTConfigFromKubeConfig(d.BootstrapKubeconfig(d.token))
	if err != nil {
		return "", err
	}
	client, err := csr.NewClient(credential)
	if err != nil {
		return "", err
	}
	key, _, err := csr.NewKey()
	if err != nil {
		return "", err
	}
	der, err := csr.PKCS10(csr.Identity{NodeName: node}, key)
	if err != nil {
		return "", err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	object := csr.Object(csr.NewName(), certificatesv1.KubeAPIServerClientKubeletSignerName, content, key.Public(), nil)
	_, err = client.Create(ctx, object, false)
	return object.Name, err
}

// showRecord shows what has become of it all: requests, the record, and the count of decisions.
func (d *demo) showRecord(ctx context.Context) error {
	title("kubectl get csr: a hello ends as denied, whoever filed it, since nobody ever approves one")
	requests, err := d.RunKubectl(ctx, d.admin, "get", "csr")
	if err != nil {
		return err
	}
	shown(requests)
	title("kubectl get nodeattestations -n %s", controllerprocess.Namespace)
	records, err := d.RunKubectl(ctx, d.admin, "get", "nodeattestations", "-n", controllerprocess.Namespace)
	if err != nil {
		return err
	}
	shown(records)
	if !strings.Contains(records, node) {
		return errors.New("there is no record of the node")
	}
	title("%s: node_attestation_decisions_total", d.controller.MetricsURL())
	metrics, err := d.controller.Metrics(ctx)
	if err != nil {
		return err
	}
	decision := regexp.MustCompile(`(?m)^node_attestation_decisions_total\{.*outcome="(\w+)",reason="(\w*)",signer="([^"]*)"\} (\d+)$`)
	rows := [][]string{{"OUTCOME", "REASON", "COUNT", "SIGNER"}}
	for _, m := range decision.FindAllStringSubmatch(metrics, -1) {
		rows = append(rows, []string{m[1], m[2], m[4], m[3]})
	}
	if table(rows); len(rows) == 1 {
		return errors.New("the controller counts no decision")
	}
	return nil
}

// showOutcomes says what has become of everybody, once it is clear that only the node got
// certificates: the first one, and the one after the revocation.
func (d *demo) showOutcomes(ctx context.Context) error {
	requests, err := d.requests(ctx)
	if err != nil {
		return err
	}
	issued := 0
	for _, request := range requests {
		if len(request.Status.Certificate) > 0 {
			issued++
		}
	}
	title("who got in as %s, who did not, and why: %d requests, %d certificates", node, len(requests), issued)
	if issued != 2 {
		return fmt.Errorf("%d certificates were issued, not two", issued)
	}
	for _, o := range d.outcomes {
		in := paint(red, "no")
		if o.gotIn {
			in = paint(green, "yes")
		}
		fmt.Println(o.who)
		table([][]string{{"  has", o.has}, {"  got in", in}, {"  why", o.why}})
	}
	return nil
}
