// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// machine is a computer with a TPM of its own. It does what the plugin's worker does, or runs the plugin.
type machine struct {
	name, dir, token string
	chip             *swtpm.TPM
	provider         provider.Challenger
	// certificate and key are the latest that it got.
	certificate, key []byte
}

// newMachines makes machines, with one bootstrap token for all of them.
func newMachines(t *testing.T, prefix string, count int) []*machine {
	t.Helper()
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	maker, err := swtpm.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	all := make([]*machine, count)
	var wait sync.WaitGroup
	next := make(chan int)
	for range 4 {
		wait.Go(func() {
			for i := range next {
				all[i] = newMachine(t, fmt.Sprintf("%s-%03d", prefix, i), token, maker)
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	wait.Wait()
	for _, m := range all {
		if m == nil {
			t.FailNow() // newMachine has said why
		}
	}
	return all
}

// newMachine returns nil where it failed.
func newMachine(t *testing.T, name, token string, maker *swtpm.CA) *machine {
	m := &machine{name: name, dir: t.TempDir(), token: token}
	t.Cleanup(m.stopWorker)
	var err error
	if m.chip, err = swtpm.New(swtpm.Options{Certified: []string{"ecc-p256"}, CA: maker}); err != nil {
		t.Errorf("software TPM: %v", err)
		return nil
	}
	t.Cleanup(m.chip.Stop)
	made, err := tpm.Factory().New(provider.Settings{TPMDevice: m.chip.Socket(), RuntimeDir: m.dir})
	if err != nil {
		t.Error(err)
		return nil
	}
	m.provider = made.(provider.Challenger)
	return m
}

// inventoryOf is what an operator makes of the machines' own words.
func inventoryOf(t *testing.T, machines ...*machine) []byte {
	t.Helper()
	var all bytes.Buffer
	for _, m := range machines {
		device, err := m.provider.(provider.Inspector).Identify(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out, err := yaml.Marshal(map[string]any{"nodeName": m.name, "providerID": m.providerID(), "provider": tpm.Name, "device": device})
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString("---\n")
		all.Write(out)
	}
	return all.Bytes()
}

func (m *machine) providerID() string { return "test://" + m.name }

// credential is the machine's certificate, the bootstrap token where it has none yet.
func (m *machine) credential() *rest.Config {
	config := &rest.Config{Host: shared.ServerURL(), TLSClientConfig: rest.TLSClientConfig{CAData: shared.ServerCA()}, QPS: -1}
	if m.certificate == nil {
		config.BearerToken = m.token
	} else {
		config.CertData, config.KeyData = m.certificate, m.key
	}
	return config
}

// maxHellos is how often it begins, as the plugin: once, unless its challenge runs out.
const maxHellos = 3

var errExpired = errors.New("the challenge had expired")

// attest gets a certificate, and returns how long that took from the filing of the first hello on. It keeps watching what it has filed, whoever
// decides on it.
func (m *machine) attest(ctx context.Context) (time.Duration, error) {
	api, err := csr.NewClient(m.credential())
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for range maxHellos {
		if err = m.try(ctx, api); !errors.Is(err, errExpired) {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.name, err)
	}
	return time.Since(began), nil
}

// try files one hello and one proof, with a new key.
func (m *machine) try(ctx context.Context, api *csr.Client) error {
	key, keyPEM, err := csr.NewKey()
	if err != nil {
		return err
	}
	ask := provider.Request{
		Name: csr.NewName(), SignerName: tpm.SignerName, Version: attestation.VersionTPM, NodeName: m.name, ProviderID: m.providerID(),
	}
	if ask.PKCS10, err = csr.PKCS10(csr.Identity{NodeName: m.name, ProviderID: m.providerID()}, key); err != nil {
		return err
	}
	for _, usage := range csr.Usages(key.Public()) {
		ask.Usages = append(ask.Usages, string(usage))
	}
	document, _, err := m.provider.Hello(ctx, ask)
	if err != nil {
		return err
	}
	if ask.Challenge, err = m.greet(ctx, api, ask, key, document); err != nil {
		return err
	}
	ask.Name = csr.NewName()
	if document, err = m.provider.Evidence(ctx, ask); err != nil {
		return err
	}
	content, err := attestation.Request{PKCS10: ask.PKCS10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return err
	}
	proof, err := api.File(ctx, csr.Object(ask.Name, tpm.SignerName, content, key.Public(), nil))
	if err != nil {
		return err
	}
	decision, err := api.Wait(ctx, proof, csr.Classify)
	if err != nil {
		return fmt.Errorf("proof %s: %w", proof.Name, err)
	}
	if decision.Outcome == csr.Denied && decision.Reason == attestation.ReasonExpired {
		return errExpired
	}
	if decision.Outcome != csr.Issued {
		return fmt.Errorf("proof %s: %s: %s", proof.Name, decision.Reason, decision.Message)
	}
	if err := isFor(decision.Certificate, m.name, key); err != nil {
		return fmt.Errorf("proof %s: %w", proof.Name, err)
	}
	m.certificate, m.key = decision.Certificate, keyPEM
	return nil
}

// greet files a hello, and returns its challenge.
func (m *machine) greet(ctx context.Context, api *csr.Client, ask provider.Request, key crypto.Signer, document []byte) (*provider.Challenge, error) {
	content, err := attestation.Request{PKCS10: ask.PKCS10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	hello, err := api.File(ctx, csr.Object(ask.Name, attestation.HelloSignerName, content, key.Public(), nil))
	if err != nil {
		return nil, err
	}
	decision, err := api.Wait(ctx, hello, csr.ClassifyHello)
	if err != nil {
		return nil, fmt.Errorf("hello %s: %w", hello.Name, err)
	}
	if decision.Outcome != csr.Answered {
		return nil, fmt.Errorf("hello %s: %s: %s", hello.Name, decision.Reason, decision.Message)
	}
	return &provider.Challenge{
		HelloName: hello.Name, HelloUID: string(hello.UID), HelloRequest: content, Answer: []byte(decision.Challenge), Fresh: true,
	}, nil
}

// isFor checks that a certificate is the machine's, for the key that it asked with.
func isFor(certificate []byte, name string, key crypto.Signer) error {
	_, leaf, err := csr.ParseCertificates(certificate)
	if err != nil {
		return err
	}
	if leaf.Subject.CommonName != "system:node:"+name || !leaf.PublicKey.(*ecdsa.PublicKey).Equal(key.Public()) {
		return fmt.Errorf("the certificate is %s's, or has another key", leaf.Subject)
	}
	return leaf.CheckSignatureFrom(shared.ClientCA().Certificate())
}

// plug has the real plugin get the first certificate, as a kubelet does: it runs it again while there is none.
func (m *machine) plug(ctx context.Context) (time.Duration, error) {
	bootstrap := filepath.Join(m.dir, "bootstrap.kubeconfig")
	if err := os.WriteFile(bootstrap, shared.BootstrapKubeconfig(m.token), 0o600); err != nil {
		return 0, err
	}
	ask, err := json.Marshal(clientauthentication.ExecCredential{
		TypeMeta: metav1.TypeMeta{APIVersion: clientauthentication.SchemeGroupVersion.String(), Kind: "ExecCredential"},
		Spec: clientauthentication.ExecCredentialSpec{
			Cluster: &clientauthentication.Cluster{Server: shared.ServerURL(), CertificateAuthorityData: shared.ServerCA()},
		},
	})
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for {
		cmd := exec.CommandContext(ctx, shared.plugin, "--node-name="+m.name, "--provider-id="+m.providerID(), "--tpm-device="+m.chip.Socket(),
			"--cert-dir="+m.certs().Path(), "--runtime-dir="+m.dir, "--bootstrap-kubeconfig="+bootstrap)
		cmd.Env = append(os.Environ(), "KUBERNETES_EXEC_INFO="+string(ask))
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err = cmd.Run(); err == nil {
			break
		}
		if ctx.Err() != nil || cmd.ProcessState == nil {
			return 0, fmt.Errorf("%s: plugin: %w: %s", m.name, err, stderr.String())
		}
	}
	took := time.Since(began)
	pair, err := m.certs().Current()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.name, err)
	}
	m.certificate, m.key = pair.Chain, pair.Key
	return took, nil
}

func (m *machine) certs() cache.Dir { return cache.At(filepath.Join(m.dir, "certs")) }

// stopWorker ends what a plugin may have left running.
func (m *machine) stopWorker() {
	for worker := m.certs().Worker(); worker.Alive(); time.Sleep(5 * time.Millisecond) {
		_ = syscall.Kill(worker.PID, syscall.SIGKILL)
	}
}
