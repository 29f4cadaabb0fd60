// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"cmp"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// computer has a TPM.
type computer struct {
	dir      string
	chip     *swtpm.TPM
	provider provider.Challenger
	// ek is the SHA-256 of its endorsement key, in hex.
	ek string
}

// newComputer makes a computer. Use it from one goroutine at a time.
func newComputer(t *testing.T) *computer {
	t.Helper()
	return newComputerWith(t, swtpm.Options{Certified: []string{"ecc-p256"}, CA: shared.maker})
}

func newComputerWith(t *testing.T, options swtpm.Options) *computer {
	t.Helper()
	c := &computer{dir: t.TempDir(), chip: swtpm.Start(t, options)}
	made, err := tpm.Factory().New(provider.Settings{TPMDevice: c.chip.Socket(), RuntimeDir: c.dir})
	if err != nil {
		t.Fatal(err)
	}
	c.provider = made.(provider.Challenger)
	device, err := made.(provider.Inspector).Identify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.ek = device.(*tpm.Identity).EKs[0].Fingerprint
	return c
}

// machine is a computer that joins a cluster, with its Machine.
type machine struct {
	*computer
	*cluster
	name, providerID string
	// token is the bootstrap token that was made for it. With static, it uses another credential.
	token  string
	static func(*rest.Config)
	// object, infra and config are its objects in Cluster API. newMachine does not create an object
	// that its argument sets to nil, and that may be kept in late.
	object *clusterv1.Machine
	infra  *unstructured.Unstructured
	config *bootstrapv1.KubeadmConfig
	late   struct {
		object *clusterv1.Machine
		infra  *unstructured.Unstructured
		config *bootstrapv1.KubeadmConfig
	}
	// plugin is the program that it runs, and args are its flags. Default: the program of this
	// release.
	plugin string
	args   []string
	// certificate and key are the latest that attest got.
	certificate, key []byte
}

// newMachine makes a computer with a Machine that Cluster API is done with: provisioned, its
// bootstrap data made, its EK in its annotation. change may alter what is about to be created.
func (c *cluster) newMachine(t *testing.T, name string, change func(*machine)) *machine {
	t.Helper()
	return c.newMachineOf(t, newComputer(t), name, change)
}

// newMachineOf is newMachine with existing hardware.
func (c *cluster) newMachineOf(t *testing.T, hardware *computer, name string, change func(*machine)) *machine {
	t.Helper()
	m := &machine{computer: hardware, cluster: c, name: name, providerID: "test://" + name, token: c.newToken(t)}
	t.Cleanup(func() { harness.KillWorker(t, m.certs()) })
	m.draft()
	if change != nil {
		change(m)
	}
	m.put(t)
	return m
}

func (m *machine) draft() {
	m.infra = infraObject("TestMachine", m.namespace, m.name)
	m.infra.Object["spec"] = map[string]any{"providerID": m.providerID}
	m.infra.Object["status"] = map[string]any{
		"initialization": map[string]any{"provisioned": true},
		"addresses":      []any{map[string]any{"type": "InternalIP", "address": "192.0.2.1"}},
	}
	m.config = m.kubeadmConfig(m.name, m.token)
	m.object = &clusterv1.Machine{
		ObjectMeta: m.meta(m.name),
		Spec: clusterv1.MachineSpec{
			ClusterName: m.cluster.name, ProviderID: m.providerID,
			Bootstrap: clusterv1.Bootstrap{
				ConfigRef:      clusterv1.ContractVersionedObjectReference{APIGroup: bootstrapv1.GroupVersion.Group, Kind: "KubeadmConfig", Name: m.name},
				DataSecretName: &m.name,
			},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{
				APIGroup: m.infra.GroupVersionKind().Group, Kind: m.infra.GetKind(), Name: m.name,
			},
		},
		Status: clusterv1.MachineStatus{
			Initialization: clusterv1.MachineInitializationStatus{InfrastructureProvisioned: new(true), BootstrapDataSecretCreated: new(true)},
			Addresses:      clusterv1.MachineAddresses{{Type: clusterv1.MachineInternalIP, Address: "192.0.2.1"}},
			Phase:          string(clusterv1.MachinePhaseProvisioned),
		},
	}
	m.object.Annotations = map[string]string{attestation.AnnotationEK: m.ek}
}

// kubeadmConfig returns a KubeadmConfig with a token.
func (c *cluster) kubeadmConfig(name, token string) *bootstrapv1.KubeadmConfig {
	return &bootstrapv1.KubeadmConfig{
		ObjectMeta: c.meta(name),
		Spec: bootstrapv1.KubeadmConfigSpec{JoinConfiguration: bootstrapv1.JoinConfiguration{Discovery: bootstrapv1.Discovery{
			BootstrapToken: bootstrapv1.BootstrapTokenDiscovery{Token: token, APIServerEndpoint: c.object.Spec.ControlPlaneEndpoint.String(), UnsafeSkipCAVerification: new(true)},
		}}},
		Status: bootstrapv1.KubeadmConfigStatus{
			Initialization: bootstrapv1.KubeadmConfigInitializationStatus{DataSecretCreated: new(true)}, DataSecretName: name,
		},
	}
}

// put creates the drafted objects: the Cluster owns the Machine, and the Machine owns the rest.
func (m *machine) put(t *testing.T) {
	t.Helper()
	if m.object == nil {
		return
	}
	m.object.OwnerReferences = []metav1.OwnerReference{m.cluster.owner()}
	status := m.object.Status
	m.create(t, m.object)
	updateStatus(t, m.client, m.object, func(object *clusterv1.Machine) { object.Status = status })
	if m.infra != nil {
		m.putInfra(t)
	}
	if m.config != nil {
		m.putConfig(t, m.config, m.owner())
	}
}

// putInfra creates the infrastructure machine.
func (m *machine) putInfra(t *testing.T) {
	t.Helper()
	status := m.infra.Object["status"]
	owner := m.owner()
	owner.Controller = new(true)
	m.infra.SetOwnerReferences([]metav1.OwnerReference{owner})
	m.infra.SetLabels(m.object.Labels)
	m.create(t, m.infra)
	updateStatus(t, m.client, m.infra, func(infra *unstructured.Unstructured) { infra.Object["status"] = status })
}

// putConfig creates a KubeadmConfig, and the Secret with the data that was made of it.
func (c *cluster) putConfig(t *testing.T, config *bootstrapv1.KubeadmConfig, owner metav1.OwnerReference) {
	t.Helper()
	status := config.Status
	config.OwnerReferences = []metav1.OwnerReference{owner}
	c.create(t, config)
	updateStatus(t, c.client, config, func(object *bootstrapv1.KubeadmConfig) { object.Status = status })
	data := &corev1.Secret{ObjectMeta: c.meta(config.Name), Type: clusterv1.ClusterSecretType, StringData: map[string]string{"value": "#cloud-config"}}
	data.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: bootstrapv1.GroupVersion.String(), Kind: "KubeadmConfig", Name: config.Name, UID: config.UID, Controller: new(true)},
	}
	c.create(t, data)
}

// owner returns a reference to the Machine.
func (m *machine) owner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: m.object.Name, UID: m.object.UID}
}

// registered creates the Node that the kubelet would create, and sets the Machine's nodeRef, as
// Cluster API does by the provider ID.
func (m *machine) registered(t *testing.T) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name}, Spec: corev1.NodeSpec{ProviderID: m.providerID}}
	if err := m.workload.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	updateStatus(t, m.client, m.object, func(object *clusterv1.Machine) {
		object.Status.NodeRef.Name, object.Status.Phase = m.name, string(clusterv1.MachinePhaseRunning)
	})
}

// plug returns the computer with the plugin and its current settings.
func (m *machine) plug() *harness.Machine {
	p := harness.MachineOf(m.dir, m.chip, cmp.Or(m.plugin, shared.plugin), m.name)
	p.ProviderID, p.Args = m.providerID, m.args
	return p
}

func (m *machine) certs() cache.Dir { return m.plug().Certs() }

// removeState removes everything that the plugin remembers.
func (m *machine) removeState(t *testing.T) {
	t.Helper()
	m.plug().RemoveState(t)
}

// run runs the plugin once, as a kubelet does.
func (m *machine) run(t *testing.T, extra ...string) harness.Result {
	t.Helper()
	harness.Must(t, shared.built())
	p := m.plug()
	harness.WriteFile(t, p.Bootstrap, m.workload.BootstrapKubeconfig(m.token))
	return p.Run(t, m.workload.ControlPlane, extra...)
}

// enrols runs the plugin until it prints a certificate: a new one, or the one that it has.
func (m *machine) enrols(t *testing.T) harness.Result {
	t.Helper()
	r := m.run(t)
	if r.Code != 0 || r.Leaf.Subject.CommonName != "system:node:"+m.name {
		t.Fatalf("%s: exit code %d: %s", m.name, r.Code, r.Stderr)
	}
	if err := r.Leaf.CheckSignatureFrom(m.workload.ClientCA().Certificate()); err != nil {
		t.Fatalf("%s: %v", m.name, err)
	}
	pair, err := m.certs().Current()
	if err != nil {
		t.Fatal(err)
	}
	m.certificate, m.key = pair.Chain, pair.Key
	return r
}
