// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/attestor"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// What docs/integration/kubeadm.md has a person type is typed, on a machine with every file in its
// usual place, a TPM, and the documented configuration.
func TestKubeadmDocument(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("a mount namespace needs root")
	}
	document, err := os.ReadFile("../../docs/integration/kubeadm.md")
	if err != nil {
		t.Fatal(err)
	}
	guide, _, _ := strings.Cut(string(document), "\n## Nodes that join by exec\n")
	config, commands := blocks(guide, "yaml"), blocks(guide, "sh")
	want := []string{"kubelet-authenticator prepare", "kubelet-authenticator kubeconfig --write ", "kubectl --kubeconfig ", "kubelet-authenticator reset --kubeconfig"}
	if len(config) != 1 || len(commands) != len(want) {
		t.Fatalf("%d configurations, commands %q", len(config), commands)
	}
	for i, command := range commands {
		if !strings.HasPrefix(command, want[i]) {
			t.Fatalf("command %q, not %q", command, want[i])
		}
	}

	const name = "documented"
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	// Not every machine that runs tests has a system UUID.
	settings := strings.Replace(config[0], "providerIDScheme: metal", "providerID: metal://"+name, 1)
	d := newUsualPlaces(t, settings, chip.Socket(), name)
	answer(t, chip, name)

	r := d.run(commands[0])
	r.Want(t, 0, "copied "+kubelet.BootstrapFile, "wrote "+kubelet.KubeconfigFile, "wrote "+kubelet.EnvFile, "waiting up to 3m30s", "system:node:"+name+" has a certificate")
	if env, err := os.ReadFile(d.At(kubelet.EnvFile)); err != nil || string(env) != "KUBELET_KUBECONFIG_ARGS=--kubeconfig=/etc/kubernetes/kubelet.conf --rotate-certificates=false\n" {
		t.Errorf("%q %v", env, err)
	}
	d.run(commands[1]).Want(t, 0, "wrote /root/kubelet.conf")
	written, err := os.ReadFile(d.At("root/kubelet.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if ours, err := os.ReadFile(d.At(kubelet.KubeconfigFile)); err != nil || string(ours) != string(written) {
		t.Errorf("%v: prepare wrote\n%s\nkubeconfig\n%s", err, ours, written)
	}
	if r := d.run(commands[2]); r.Code != 0 || !strings.Contains(r.Stdout, "system:node:"+name) {
		t.Errorf("%+v", r)
	}
	d.run(commands[3]).Want(t, 0, "removed "+kubelet.KubeconfigFile, "removed "+kubelet.EnvFile, "removed "+cache.DefaultPath)
}

func blocks(document, language string) []string {
	var found []string
	for _, rest := range strings.Split(document, "```"+language+"\n")[1:] {
		block, _, _ := strings.Cut(rest, "```")
		found = append(found, block)
	}
	return found
}

// answer has the attestor answer the node's requests until the test ends.
func answer(t *testing.T, chip *swtpm.TPM, name string) {
	t.Helper()
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	v, err := verifier.New(verifier.Config{
		Roots: []*x509.Certificate{chip.CA.Root}, Intermediates: []*x509.Certificate{chip.CA.Intermediate},
		PCRs:       attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 7}},
		ClusterUID: "0e4a9a4c-3a4e-4b1f-9f0b-6c2b1f6d2a11",
		Keys:       verifier.Keys{Current: "k", ByID: map[string][]byte{"k": key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	a := &attestor.Attestor{Cluster: shared.ControlPlane, Verifier: v, NodeName: name, Lifetime: time.Hour}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("attestor: %v", err)
		}
	})
}

// usualPlaces is a machine whose files are where they are on any.
type usualPlaces struct {
	harness.Places
	t   *testing.T
	env []string
}

func newUsualPlaces(t *testing.T, config, tpm, name string) usualPlaces {
	t.Helper()
	d := usualPlaces{Places: harness.NewPlaces(t), t: t}
	token, err := shared.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{
		"/etc/kubelet-authenticator/config.yaml": config + "tpmDevice: " + tpm + "\n",
		kubelet.BootstrapFile:                    string(shared.BootstrapKubeconfig(token)),
		"/var/lib/kubelet/kubeadm-flags.env":     `KUBELET_KUBEADM_ARGS="--hostname-override=` + name + `"` + "\n",
	} {
		d.write(path, content)
	}
	return d
}

func (d usualPlaces) write(path, content string) {
	d.t.Helper()
	d.Write(d.t, path, content)
}

// run runs a program on the machine, which the shell finds, with variables before it if there are
// any.
func (d usualPlaces) run(command string) harness.Result {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.t.Context()), time.Minute)
	defer cancel()
	line := d.Command("exec env " + command)
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	path := filepath.Dir(shared.plugin) + ":" + filepath.Dir(shared.Kubectl()) + ":" + os.Getenv("PATH")
	cmd.Env = append(append(os.Environ(), "PATH="+path, "HOME=/root"), d.env...)
	return harness.Run(d.t, cmd)
}
