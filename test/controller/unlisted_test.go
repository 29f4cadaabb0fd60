// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// A machine is not in the inventory. Its operator finds cause and cure in what the node itself
// prints: the run that gave up, status, doctor, and prepare while it waits. The test follows the
// cure to the letter.
func TestUnlistedMachineFindsItsCure(t *testing.T) {
	f := newFleet(t, nil)
	listed, m := f.newMachine(t, "listed"), f.newMachine(t, "unlisted")
	f.inventoried(t, listed)

	const reason = string(verifier.ReasonMachineNotFound)
	cure := verifier.WaitingText(verifier.ReasonMachineNotFound)
	// The first run gives up as soon as the request says what it waits for; a busy machine may take
	// longer.
	harness.Eventually(t, harness.Soon, "a run that gives up says why", func() bool {
		r := m.run(t, "--wait-timeout=2s")
		// not yet: the worker has filed no request, or the API server was slow to answer
		if r.Code != 13 && r.Code != 19 {
			r.Want(t, 23)
		}
		return r.Code == 23 && strings.Contains(r.Stderr, reason) && strings.Contains(r.Stderr, "hint: "+cure)
	})
	m.tool(t, "status").Want(t, 43)
	for _, command := range []string{"status", "doctor"} {
		if r := m.tool(t, command); !strings.Contains(r.Stdout, reason) || !strings.Contains(r.Stdout, cure) {
			t.Errorf("%s does not say why: %s%s", command, r.Stdout, r.Stderr)
		}
	}

	hellos, _ := f.requests(t, m.name)
	if len(hellos) != 1 || waitsFor(&hellos[0]) != verifier.ReasonMachineNotFound {
		t.Fatalf("%d hellos", len(hellos))
	}
	about := "(node unlisted, provider ID test://unlisted, EK " + f.tpm.EK(&hellos[0], nil) + ", template ecc-p256, class first)"
	if events := f.eventsOf(t, hellos[0].Name, reason); len(events) != 1 || !strings.HasSuffix(events[0], about) {
		t.Errorf("the Event does not say which machine it is, %s: %q", about, events)
	}

	// prepare says it while it waits, and goes on once that is done.
	prepare, said := m.prepares(t)
	seen := ""
	for said.Scan() {
		if seen += said.Text() + "\n"; strings.Contains(seen, reason) && strings.Contains(seen, "hint: "+cure) {
			break
		}
	}
	command := regexp.MustCompile(`run "kubelet-authenticator (\w+)" on the node`).FindStringSubmatch(seen)
	if command == nil {
		t.Fatalf("prepare does not say what to do: %s", seen)
	}
	identity := m.tool(t, command[1])
	identity.Want(t, 0)
	before, err := os.ReadFile(f.inventory)
	harness.Must(t, err)
	harness.WriteFile(t, f.inventory, bytes.Join([][]byte{before, []byte(identity.Stdout)}, []byte("---\n")))
	for said.Scan() {
		seen += said.Text() + "\n"
	}
	if err := prepare.Wait(); err != nil || !strings.Contains(seen, "system:node:unlisted has a certificate") || strings.Count(seen, cure) != 1 {
		t.Errorf("%v: %s", err, seen)
	}
	if challenged := f.get(t, hellos[0].Name); challenged.Annotations[attestation.AnnotationWaiting] != "" {
		t.Errorf("it waits no more, and says %v", challenged.Annotations)
	}
	if r := m.tool(t, "status"); r.Code != 0 || strings.Contains(r.Stdout, reason) {
		t.Errorf("status still says why: %s", r.Stdout)
	}
}

// tool runs a command of the plugin with the machine's flags.
func (m *machine) tool(t *testing.T, command string) harness.Result {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), m.program, append([]string{command}, m.flags()...)...)
	cmd.Env = harness.ExecEnv(m.ControlPlane)
	return harness.Run(t, cmd)
}

// prepares starts prepare, and returns its process and what it says.
func (m *machine) prepares(t *testing.T) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	at := func(name string) string { return filepath.Join(m.dir, name) }
	harness.WriteFile(t, at("config.yaml"), []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"))
	harness.WriteFile(t, at("kubelet.yaml"), nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, m.program, append([]string{
		"prepare", "--config=" + at("config.yaml"), "--kubelet-kubeconfig=" + at("kubelet.conf"), "--kubelet-bootstrap-kubeconfig=" + at("bootstrap-kubelet.conf"),
		"--kubelet-config=" + at("kubelet.yaml"), "--env-file=" + at("kubelet.env"), "--manifests=" + at("manifests"), "--prepare-wait=50s",
	}, m.flags()...)...)
	stderr, err := cmd.StderrPipe()
	harness.Must(t, err)
	harness.Must(t, cmd.Start())
	return cmd, bufio.NewScanner(stderr)
}

// waitingRequests returns how many requests say what they wait for.
func (f *fleet) waitingRequests(t *testing.T) (n int) {
	t.Helper()
	list := &metav1.PartialObjectMetadataList{}
	list.SetGroupVersionKind(certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequestList"))
	harness.Must(t, f.client.List(t.Context(), list))
	for i := range list.Items {
		if list.Items[i].Annotations[attestation.AnnotationWaiting] != "" {
			n++
		}
	}
	return n
}
