// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal/infrav1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// An impostor is a host with a Machine's user data, bootstrap token and metadata. It has a genuine
// TPM of the same vendor. It boots before the Machine's host, at the same time, or after that host
// has joined. A source names the Machine's EK, so the impostor is always denied, and the Machine's
// host always joins.
func TestImpostor(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, nil)
	c := s.newCluster(t, "one")

	boot := s.hosts.delayBoot(t, "early")
	early := c.newMachineDeployment(t, "early", nil)
	early.scale(t, 1)
	first := early.awaitProvisioned(t, 1)[0]
	t.Run("before", func(t *testing.T) {
		i := c.newImpostor(t, &first)
		i.boot(t)
		i.awaitRefused(t, verifier.ReasonNodeNameMismatch)
		boot()
		early.awaitRunning(t, 1)
		early.mustBeOwnHosts(t)
		i.mustHaveNoCertificate(t)
	})
	boot = s.hosts.delayBoot(t, "racing")
	racing := c.newMachineDeployment(t, "racing", nil)
	racing.scale(t, 1)
	second := racing.awaitProvisioned(t, 1)[0]
	t.Run("during", func(t *testing.T) {
		i := c.newImpostor(t, &second)
		i.boot(t)
		boot()
		racing.awaitRunning(t, 1)
		i.awaitRefused(t, verifier.ReasonNodeNameMismatch)
		racing.mustBeOwnHosts(t)
	})
	t.Run("after", func(t *testing.T) {
		i := c.newImpostor(t, &first)
		i.boot(t)
		i.awaitRefused(t, verifier.ReasonNodeNameMismatch)
		early.mustBeOwnHosts(t)
	})
	t.Run("an attested node", func(t *testing.T) { c.attestedNodeTries(t, &second, &first) })
	early.mustBeOwnHosts(t)
	racing.mustBeOwnHosts(t)
}

// attestedNodeTries plays root on an attested Node, who claims another Machine's name or provider
// ID. The requests use that Node's own TPM and kubelet certificate.
func (c *cluster) attestedNodeTries(t *testing.T, thief, victim *clusterv1.Machine) {
	t.Helper()
	const credential, scratch = "/root/own.kubeconfig", "/root/theft-"
	host := c.hosts.IDs(thief.Name)[0]
	m, err := c.hosts.Machine(t.Context(), host)
	harness.Must(t, err)
	pair := filepath.Join(cache.DefaultPath, cache.CurrentFile)
	harness.Must(t, m.WriteFile(credential, c.workload.Kubeconfig(&clientcmdapi.AuthInfo{ClientCertificate: pair, ClientKey: pair}), 0o600))
	ek := c.endorsementKey(t, thief)
	for _, tries := range []struct {
		what             string
		name, providerID string
		want             verifier.Reason
	}{
		{"name", victim.Name, thief.Spec.ProviderID, verifier.ReasonRequesterNotAllowed},
		{"name-and-id", victim.Name, victim.Spec.ProviderID, verifier.ReasonRequesterNotAllowed},
		{"id", thief.Name, victim.Spec.ProviderID, verifier.ReasonProviderIDMismatch},
	} {
		t.Run(tries.what, func(t *testing.T) {
			out := c.asks(t, m, tries.name, tries.providerID, scratch+tries.what, credential)
			if !strings.Contains(out, string(tries.want)) {
				t.Errorf("the request with EK %s is not denied with %s: %s", ek, tries.want, out)
			}
		})
	}
}

// asks runs the plugin on a host, with a name, a provider ID, a folder and a credential. The plugin
// must fail, and must not get a certificate. asks returns its output.
func (c *cluster) asks(t *testing.T, m *testbed.Machine, name, providerID, folder, credential string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := m.Run(ctx, "env", harness.ExecInfo(c.workload.ServerURL(), c.workload.ServerCA()), "kubelet-authenticator",
		"--node-name="+name, "--provider-id="+providerID, "--cert-dir="+folder, "--bootstrap-kubeconfig="+credential)
	if err == nil || strings.Contains(out, "BEGIN CERTIFICATE") {
		t.Errorf("the plugin got a certificate for %s, or exited with 0: %s", name, out)
	}
	harness.Must(t, isAbsent(t.Context(), m, filepath.Join(folder, cache.CurrentFile)))
	return out
}

// No source names a Machine's EK, so the first host with the Machine's bootstrap token is trusted.
// This host gets the access that docs/threat-model.md describes, and no more.
func TestImpostorOnFirstUse(t *testing.T) {
	full(t)
	t.Parallel()
	s := newStory(t, func(file map[string]any) {
		clusterAPI := file["clusterAPI"].(map[string]any)
		delete(clusterAPI, "ekSources")
		clusterAPI["trustOnFirstUse"], clusterAPI["trustAnyTPM"] = true, true
	})
	c := s.newCluster(t, "one")
	boot := s.hosts.delayBoot(t, "trusted")
	d := c.newMachineDeployment(t, "trusted", nil)
	d.scale(t, 1)
	taken := d.awaitProvisioned(t, 1)[0]
	s.hosts.delayBoot(t, "other")
	other := c.newMachineDeployment(t, "other", nil)
	other.scale(t, 1)
	untouched := other.awaitProvisioned(t, 1)[0]

	// The impostor is faster: it joins as the Machine, and the Machine's own host is denied.
	i := c.newImpostor(t, &taken)
	i.boot(t)
	d.awaitRunning(t, 1)
	if record := d.record(t, taken.Name); record.Spec.EK.Fingerprint != i.ek {
		t.Errorf("the record has EK %s, want that of the impostor, %s", record.Spec.EK.Fingerprint, i.ek)
	}
	boot()
	c.awaitRefusal(t, taken.Name, c.endorsementKey(t, &taken), verifier.ReasonIdentityBound)
	m, err := s.hosts.Machine(t.Context(), s.hosts.IDs(taken.Name)[0])
	harness.Must(t, err)
	harness.Must(t, hasNoCertificate(t.Context(), m))

	// The remedy is to delete the Machine. Its replacement joins, and the impostor cannot.
	harness.Must(t, s.client.Delete(t.Context(), &taken))
	harness.Eventually(t, goneLimit, "the Machine is replaced", func() bool {
		return !slices.ContainsFunc(d.machines(t), func(m clusterv1.Machine) bool { return m.Name == taken.Name }) && len(d.machines(t)) == 1
	})
	next := d.awaitRunning(t, 1)[0]
	d.mustBeOwnHosts(t)

	// An impostor that is slower is denied, because a record exists.
	late := c.newImpostor(t, &next)
	late.boot(t)
	late.awaitRefused(t, verifier.ReasonIdentityBound)
	d.mustBeOwnHosts(t)

	// The token of one Machine does not work for another Machine, even one that has not joined.
	token := filepath.Join(cache.DefaultPath, "bootstrap.kubeconfig")
	if out := c.asks(t, late.machine(t), untouched.Name, untouched.Spec.ProviderID, "/root/other", token); !strings.Contains(out, string(verifier.ReasonTokenNotForMachine)) {
		t.Errorf("the name of another Machine is not denied with %s: %s", verifier.ReasonTokenNotForMachine, out)
	}
	if records := s.records(t); len(records) != 1 {
		t.Errorf("there are %d records, want 1", len(records))
	}
}

// impostor is a host with a Machine's user data and metadata, and with another TPM.
type impostor struct {
	*cluster
	victim *clusterv1.Machine
	id, ek string
}

func (c *cluster) newImpostor(t *testing.T, victim *clusterv1.Machine) *impostor {
	t.Helper()
	host, err := c.hosts.Allocate(t.Context(), types.UID(rand.Text()), "impostor")
	harness.Must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if t.Failed() {
			t.Log("impostor:", c.hosts.Logs(ctx, host.ID))
		}
		if err := c.hosts.Release(ctx, host.ID); err != nil {
			t.Error(err)
		}
	})
	return &impostor{c, victim, host.ID, host.EKs[0]}
}

// boot boots the impostor with the Machine's unchanged bootstrap Secret and its instance metadata.
func (i *impostor) boot(t *testing.T) {
	t.Helper()
	secret := &corev1.Secret{}
	harness.Must(t, i.client.Get(t.Context(), client.ObjectKey{Namespace: i.namespace, Name: *i.victim.Spec.Bootstrap.DataSecretName}, secret))
	metadata := metal.Metadata{InstanceID: strings.TrimPrefix(i.victim.Spec.ProviderID, "metal://"), LocalHostname: i.victim.Name}
	harness.Must(t, i.hosts.Hosts.PowerOn(t.Context(), i.id, metadata, secret.Data["value"]))
}

func (i *impostor) machine(t *testing.T) *testbed.Machine {
	t.Helper()
	m, err := i.hosts.Machine(t.Context(), i.id)
	harness.Must(t, err)
	return m
}

// awaitRefused waits until a request of the impostor is denied with the reason. The impostor must
// have no certificate.
func (i *impostor) awaitRefused(t *testing.T, want verifier.Reason) {
	t.Helper()
	i.awaitRefusal(t, i.victim.Name, i.ek, want)
	i.mustHaveNoCertificate(t)
}

func (i *impostor) mustHaveNoCertificate(t *testing.T) {
	t.Helper()
	harness.Must(t, hasNoCertificate(t.Context(), i.machine(t)))
}

func hasNoCertificate(ctx context.Context, m *testbed.Machine) error {
	return isAbsent(ctx, m, filepath.Join(cache.DefaultPath, cache.CurrentFile))
}

func isAbsent(ctx context.Context, m *testbed.Machine, path string) error {
	_, err := m.Run(ctx, "test", "!", "-e", path)
	return err
}

// awaitRefusal waits until a request for the name and with the EK is denied with the reason.
func (c *cluster) awaitRefusal(t *testing.T, name, ek string, want verifier.Reason) {
	t.Helper()
	var all []attestctl.NodeStatus
	began := time.Now()
	for time.Since(began) < joinLimit {
		all = c.status(t)
		if slices.ContainsFunc(all, func(n attestctl.NodeStatus) bool {
			return n.Claimed && n.Node == name && n.EK == ek && n.Reason == string(want) && n.WaitingSince == nil
		}) {
			t.Logf("EK %s is denied with %s after %s", ek[:12], want, time.Since(began).Round(100*time.Millisecond))
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
	t.Fatalf("EK %s for node %s is not denied with %s: %+v", ek, name, want, all)
}

// status returns the output of kubectl attest status for the Cluster.
func (c *cluster) status(t *testing.T) []attestctl.NodeStatus {
	t.Helper()
	admin := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, c.WriteKubeconfig(admin, c.AdminUser()))
	out, err := attest(t.Context(), "status", "--output=json", "--kubeconfig="+admin, "--namespace="+c.namespace, "--workload-cluster="+c.name)
	harness.Must(t, err)
	var status attestctl.Status
	harness.Must(t, json.Unmarshal([]byte(out), &status))
	return status.Nodes
}

// attest runs kubectl attest. It returns stdout, or an error with stderr.
func attest(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	code := attestctl.Program{Version: "v0.0.0-test"}.Run(ctx, attestctl.Process{
		Args: args, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr, Getenv: os.Getenv,
	})
	if code != 0 {
		return "", fmt.Errorf("kubectl attest %v: exit code %d: %s", args, code, &stderr)
	}
	return stdout.String(), nil
}

// awaitProvisioned waits until there are count Machines, each with a host and user data.
func (d *machineDeployment) awaitProvisioned(t *testing.T, count int) (all []clusterv1.Machine) {
	t.Helper()
	harness.Eventually(t, goneLimit, fmt.Sprintf("%d Machines of %s have hosts and user data", count, d.object.Name), func() bool {
		all = d.machines(t)
		return len(all) == count && !slices.ContainsFunc(all, func(m clusterv1.Machine) bool {
			return m.Spec.ProviderID == "" || m.Spec.Bootstrap.DataSecretName == nil
		})
	})
	return all
}

// record returns the record of a Node.
func (c *cluster) record(t *testing.T, node string) *v1alpha1.NodeAttestation {
	t.Helper()
	for _, record := range c.records(t) {
		if record.Spec.NodeName == node {
			return &record
		}
	}
	t.Fatalf("%s has no record", node)
	return nil
}

// endorsementKey returns the EK fingerprint that a Machine's MetalMachine names.
func (c *cluster) endorsementKey(t *testing.T, m *clusterv1.Machine) string {
	t.Helper()
	infra := &infrav1.MetalMachine{}
	harness.Must(t, c.client.Get(t.Context(), client.ObjectKey{Namespace: m.Namespace, Name: m.Spec.InfrastructureRef.Name}, infra))
	return strings.TrimPrefix(infra.Annotations[attestation.AnnotationEK], "sha256:")
}

// mustBeOwnHosts checks that each Machine's Node is the Machine's own host. Exactly one client
// certificate may have been issued for the Node, to the EK of that host.
func (d *machineDeployment) mustBeOwnHosts(t *testing.T) {
	t.Helper()
	for _, m := range d.machines(t) {
		record := d.record(t, m.Name)
		if ek := d.endorsementKey(t, &m); record.Spec.EK.Fingerprint != ek || len(record.Status.Certificates) != 1 {
			t.Errorf("the host of %s has EK %s and should have one certificate, but the record is %+v", m.Name, ek, record)
		}
		_, others := harness.Requests(t, d.workload, m.Name)
		issued := 0
		for _, r := range others {
			if r.Spec.SignerName != certificatesv1.KubeletServingSignerName && len(r.Status.Certificate) > 0 {
				issued++
			}
		}
		if issued != 1 {
			t.Errorf("%d client certificates were issued for %s, want 1: %v", issued, m.Name, others)
		}
		node, err := d.workload.Client().CoreV1().Nodes().Get(t.Context(), m.Name, metav1.GetOptions{})
		harness.Must(t, err)
		if len(m.Status.Addresses) != 1 || node.Status.Addresses[0].Address != m.Status.Addresses[0].Address {
			t.Errorf("Machine %s has the addresses %v, its Node %v", m.Name, m.Status.Addresses, node.Status.Addresses)
		}
	}
}
