// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// machine enrols by the test's own steps, or with the plugin.
type machine struct {
	*fleet.Machine
	token string
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
	made, err := fleet.Make(count, func(i int) (*fleet.Machine, error) {
		return fleet.NewSwtpm(fmt.Sprintf("%s-%03d", prefix, i), t.TempDir(), maker)
	})
	if err != nil {
		t.Fatal(err)
	}
	all := make([]*machine, count)
	for i, m := range made {
		all[i] = &machine{m, token}
		t.Cleanup(m.Stop)
		t.Cleanup(func() { harness.KillWorker(t, all[i].certs()) })
	}
	return all
}

func inventoryOf(t *testing.T, machines ...*machine) []byte {
	t.Helper()
	bare := make([]*fleet.Machine, len(machines))
	for i, m := range machines {
		bare[i] = m.Machine
	}
	content, err := fleet.Inventory(t.Context(), bare...)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// attest gets a certificate, and returns the time from the start of the attempt.
func (m *machine) attest(ctx context.Context) (time.Duration, error) {
	times, err := m.Attest(ctx, fleet.Cluster{
		URL: shared.ServerURL(), CA: shared.ServerCA(), Token: m.token, Issuer: shared.ClientCA().Certificate(),
	})
	return times.CertificateSeen, err
}

// plug gets the first certificate with the real plugin. Like a kubelet, it runs the plugin again
// until there is a certificate.
func (m *machine) plug(ctx context.Context) (time.Duration, error) {
	bootstrap := filepath.Join(m.Dir, "bootstrap.kubeconfig")
	if err := os.WriteFile(bootstrap, shared.BootstrapKubeconfig(m.token), 0o600); err != nil {
		return 0, err
	}
	began := time.Now()
	for {
		cmd := exec.CommandContext(ctx, shared.plugin, "--node-name="+m.Name, "--provider-id="+m.ProviderID(), "--tpm-device="+m.Chip.Socket(),
			"--cert-dir="+m.certs().Path(), "--runtime-dir="+m.Dir, "--bootstrap-kubeconfig="+bootstrap)
		cmd.Env = harness.ExecEnv(shared.ControlPlane)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		err := cmd.Run()
		if err == nil {
			break
		}
		if ctx.Err() != nil || cmd.ProcessState == nil {
			return 0, fmt.Errorf("%s: plugin: %w: %s", m.Name, err, stderr.String())
		}
	}
	took := time.Since(began)
	pair, err := m.certs().Current()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", m.Name, err)
	}
	m.Certificate, m.Key = pair.Chain, pair.Key
	return took, nil
}

func (m *machine) certs() cache.Dir { return cache.At(filepath.Join(m.Dir, "certs")) }
