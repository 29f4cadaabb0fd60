// SPDX-License-Identifier: Apache-2.0

package nspawn

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
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
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// joining is user data as Cluster API's bootstrap provider makes it, of a template with one file,
// for a cluster with a token.
const joining = `## template: jinja
#cloud-config

write_files:
-   path: /etc/kubelet-authenticator/config.yaml
    owner: root:root
    permissions: '0600'
    content: |
      apiVersion: authenticator.cluster.x-k8s.io/v1alpha1
      kind: KubeletAuthenticatorConfiguration
      provider: tpm
      providerID: metal://{{ ds.meta_data.instance_id }}
-   path: /run/kubeadm/kubeadm-join-config.yaml
    owner: root:root
    permissions: '0640'
    content: |
      ---
      apiVersion: kubeadm.k8s.io/v1beta4
      discovery:
        bootstrapToken:
          apiServerEndpoint: %[1]s
          caCertHashes:
          - sha256:%[2]s
          token: %[3]s
      kind: JoinConfiguration
      nodeRegistration:
        criSocket: unix:///run/fakecri.sock
        ignorePreflightErrors:
        - all
        kubeletExtraArgs:
        - name: provider-id
          value: metal://{{ ds.meta_data.instance_id }}
        name: '{{ ds.meta_data.local_hostname }}'
-   path: /run/cluster-api/placeholder
    owner: root:root
    permissions: '0640'
    content: "This placeholder file is used to create the /run/cluster-api sub directory in a way that is compatible with both Linux and Windows (mkdir -p /run/cluster-api does not work with Windows)"
runcmd:
  - kubeadm join --config /run/kubeadm/kubeadm-join-config.yaml  && echo success > /run/cluster-api/bootstrap-success.complete
`

// newCluster starts a control plane that machines can join as kubeadm makes it, with our controller
// and policies, and returns the user data for it.
func newCluster(t *testing.T) (cp *testbed.ControlPlane, address, userData string) {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, cp.BindGroup(t.Context(), "bootstrap", "system:node-bootstrapper", testbed.BootstrapGroup))
	harness.Must(t, controllerprocess.Install(t.Context(), cp, module))
	c, err := controllerprocess.New(controllerprocess.Options{ControlPlane: cp, Dir: t.TempDir(), Binary: controller})
	if err != nil {
		t.Fatal(err)
	}
	harness.Must(t, c.Start(t.Context()))
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.LogTail())
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	harness.Must(t, c.Ready(t.Context()))
	harness.Must(t, cp.StartControllerManager(t.Context()))
	token, err := cp.KubeadmInit(t.Context(), programs.Kubeadm())
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(cp.ServerCA())
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	pin := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
	address = strings.TrimPrefix(cp.ServerURL(), "https://")
	return cp, address, fmt.Sprintf(joining, address, hex.EncodeToString(pin[:]), token)
}

// A host joins by its user data alone, attests with its TPM, and is Ready. After a reboot it is
// Ready again, and joins nothing. One whose EK is not in the inventory starts, and does not get in.
func TestJoin(t *testing.T) {
	testbed.Full(t)
	cp, address, userData := newCluster(t)
	h := newHosts(t, address)
	host, err := h.Allocate(t.Context(), "one-uid", "one")
	if err != nil {
		t.Fatal(err)
	}
	harness.Must(t, controllerprocess.SetInventory(t.Context(), cp, fmt.Appendf(nil, "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\n"+
		"kind: MachineInventory\nmachines:\n- {nodeName: one, providerID: \"metal://%s\", eks: [{fingerprint: %s}]}\n", host.ID, host.EKs[0])))

	before := available(t)
	began := time.Now()
	mustBoot(t, h, "one", userData)
	m := mustStart(t, h, host.ID)
	t.Logf("up after %s", since(began))
	harness.Eventually(t, 2*time.Minute, "the host joins", func() bool {
		_, err := m.Run(t.Context(), "test", "-e", "/run/cluster-api/bootstrap-success.complete")
		return err == nil
	})
	t.Logf("joined after %s", since(began))
	node := mustBeReady(t, cp, "one", began)
	t.Logf("Ready after %s; %d MB less memory available, %s", since(began), (before-available(t))>>20, memory(t, m))
	if node.Spec.ProviderID != "metal://"+host.ID || node.Status.Addresses[0].Address != host.Addresses[0].Address {
		t.Errorf("provider ID %s, addresses %v", node.Spec.ProviderID, node.Status.Addresses)
	}
	record := mustHaveRecord(t, cp, "one")
	if len(record.Status.Certificates) != 1 {
		t.Errorf("the record has other certificates: %+v", record.Status)
	}

	t.Run("reboot", func(t *testing.T) {
		began := metav1.Now()
		harness.Must(t, h.Reboot(t.Context(), host.ID))
		mustBeReady(t, cp, "one", began.Time)
		t.Logf("Ready after %s", since(began.Time))
		if again := mustHaveRecord(t, cp, "one"); len(again.Status.Certificates) != 1 {
			t.Errorf("the host has attested again: %+v", again.Status)
		}
		m := mustStart(t, h, host.ID)
		mustFinish(t, m)
		if _, err := m.Run(t.Context(), "test", "-e", "/run/cluster-api/bootstrap-success.complete"); err == nil {
			t.Error("the host has joined again")
		}
	})
	t.Run("impostor", func(t *testing.T) {
		impostor, err := h.Allocate(t.Context(), "impostor-uid", "impostor")
		if err != nil {
			t.Fatal(err)
		}
		// With all that the host was given.
		harness.Must(t, h.PowerOn(t.Context(), impostor.ID, metal.Metadata{InstanceID: host.ID, LocalHostname: "one"}, []byte(userData)))
		harness.Eventually(t, time.Minute, "the impostor is denied", func() bool {
			hellos, _ := harness.Requests(t, cp, "one")
			return slices.ContainsFunc(hellos, func(r certificatesv1.CertificateSigningRequest) bool {
				return slices.ContainsFunc(r.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
					return c.Type == certificatesv1.CertificateDenied && strings.Contains(c.Message, "another endorsement key")
				})
			})
		})
		if _, err := mustStart(t, h, impostor.ID).Run(t.Context(), "test", "-e", filepath.Join(cache.DefaultPath, cache.CurrentFile)); err == nil {
			t.Error("the impostor has a certificate")
		}
		if again := mustHaveRecord(t, cp, "one"); len(again.Status.Certificates) != 1 {
			t.Errorf("the record has other certificates: %+v", again.Status)
		}
	})
}

// mustBeReady waits until the Node's kubelet has said that it is ready, after that time.
func mustBeReady(t *testing.T, cp *testbed.ControlPlane, name string, after time.Time) *corev1.Node {
	t.Helper()
	var node *corev1.Node
	harness.Eventually(t, 2*time.Minute, "node "+name+" is ready", func() bool {
		var err error
		if node, err = cp.Client().CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return false
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady {
				return c.Status == corev1.ConditionTrue && c.LastHeartbeatTime.After(after.Truncate(time.Second))
			}
		}
		return false
	})
	return node
}

func mustHaveRecord(t *testing.T, cp *testbed.ControlPlane, name string) *v1alpha1.NodeAttestation {
	t.Helper()
	scheme := runtime.NewScheme()
	harness.Must(t, v1alpha1.AddToScheme(scheme))
	records, err := client.New(cp.AdminConfig(), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	record := &v1alpha1.NodeAttestation{}
	harness.Must(t, records.Get(t.Context(), client.ObjectKey{Namespace: controllerprocess.Namespace, Name: name}, record))
	return record
}

// available is the memory that is available on this machine, in bytes.
func available(t *testing.T) (bytes int64) {
	t.Helper()
	content, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(content)) {
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &bytes); n == 1 {
			return bytes << 10
		}
	}
	t.Fatal("no MemAvailable")
	return 0
}

// memory is the processes' own, with their part of what they share.
func memory(t *testing.T, m *testbed.Machine) string {
	t.Helper()
	out, err := m.Run(context.WithoutCancel(t.Context()), "sh", "-c",
		`for p in /proc/[0-9]*; do k=$(awk '/^Pss:/ {print $2}' $p/smaps_rollup 2>/dev/null) && echo "$k $(cat $p/comm)"; done | sort -rn |
		awk '{s+=$1; if (NR<6) l=l" "$2"="int($1/1024)} END {print int(s/1024) " MB in all:" l}'`)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}
