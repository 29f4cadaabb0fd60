// SPDX-License-Identifier: Apache-2.0

// Package simulated is a platform for the provider Metal whose hosts are goroutines, for rollouts
// of many Machines. A host has a model of a TPM, and attests as the plugin does. Then it is a Node
// that is Ready, with the certificate that it got.
package simulated

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
)

// Options are a platform's.
type Options struct {
	// Dir is an empty folder for the machines' files.
	Dir string
	// Maker makes the TPMs.
	Maker *swtpm.CA
	// Cluster returns what kubeadm's discovery learns about an API server, without the token. The
	// argument is the host and port of a join configuration.
	Cluster func(apiServerEndpoint string) (fleet.Cluster, error)
	// Version is the kubelet's version in the status of the Nodes.
	Version string
	// Log gets a line about each failure of a host. Nil discards them.
	Log func(format string, args ...any)
}

// Hosts is the platform. Stop ends it.
type Hosts struct {
	options Options

	mu    sync.Mutex
	owned map[types.UID]*host
	hosts map[string]*host
	count int
}

var _ metal.Hosts = (*Hosts)(nil)

// host is one machine. The mutex of Hosts guards off, ended and times. The rest is set once.
type host struct {
	metal.Host

	machine *fleet.Machine
	owner   types.UID

	// off stops the host's goroutine, which then closes ended. Both are nil while the host is off.
	off   context.CancelFunc
	ended chan struct{}
	times fleet.Times
}

// New returns a platform without hosts.
func New(o Options) *Hosts {
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	return &Hosts{options: o, owned: map[types.UID]*host{}, hosts: map[string]*host{}}
}

// Allocate makes a host with a TPM, or returns the one that the owner has.
func (h *Hosts) Allocate(ctx context.Context, owner types.UID, name string) (metal.Host, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if one, ok := h.owned[owner]; ok {
		return one.Host, nil
	}
	h.count++
	id := fmt.Sprintf("simulated-%d", h.count)
	dir := filepath.Join(h.options.Dir, id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return metal.Host{}, err
	}
	machine, err := fleet.NewModel(name, dir, h.options.Maker)
	if err != nil {
		return metal.Host{}, err
	}
	machine.ID = "metal://" + id
	device, err := machine.Provider.(provider.Inspector).Identify(ctx)
	if err != nil {
		machine.Stop()
		return metal.Host{}, err
	}
	one := &host{machine: machine, owner: owner, Host: metal.Host{
		ID: id, EKs: device.(*tpm.Identity).EKFingerprints(),
		Addresses: []clusterv1.MachineAddress{
			{Type: clusterv1.MachineInternalIP, Address: fmt.Sprintf("10.64.%d.%d", h.count/256, h.count%256)},
		},
	}}
	h.owned[owner], h.hosts[id] = one, one
	return one.Host, nil
}

// PowerOn boots a host.
func (h *Hosts) PowerOn(_ context.Context, id string, metadata metal.Metadata, userData []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	one, ok := h.hosts[id]
	if !ok {
		return fmt.Errorf("there is no host %s", id)
	}
	if one.off != nil {
		return nil
	}
	join, err := joinConfiguration(userData)
	if err != nil {
		return err
	}
	cluster, err := h.options.Cluster(join.APIServerEndpoint)
	if err != nil {
		return err
	}
	cluster.Token = join.Token
	one.machine.Name = metadata.LocalHostname
	ctx, off := context.WithCancel(context.Background()) // until Release
	one.off, one.ended = off, make(chan struct{})
	go func() {
		defer close(one.ended)
		h.run(ctx, one, cluster)
	}()
	return nil
}

// Release ends a host.
func (h *Hosts) Release(_ context.Context, id string) error {
	h.mu.Lock()
	one, ok := h.hosts[id]
	if !ok {
		h.mu.Unlock()
		return nil
	}
	delete(h.hosts, id)
	delete(h.owned, one.owner)
	off := one.off
	h.mu.Unlock()
	if off != nil {
		off()
		<-one.ended
	}
	one.machine.Stop()
	return os.RemoveAll(one.machine.Dir)
}

// Stop ends all hosts.
func (h *Hosts) Stop() error {
	for _, id := range h.IDs("") {
		if err := h.Release(context.Background(), id); err != nil {
			return err
		}
	}
	return nil
}

// IDs returns the IDs of the hosts whose owner has that name, or of all hosts if name is empty.
func (h *Hosts) IDs(name string) (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, one := range h.hosts {
		if name == "" || one.machine.Name == name {
			ids = append(ids, id)
		}
	}
	return ids
}

// Times returns the times of each finished enrolment, by node name.
func (h *Hosts) Times() map[string]fleet.Times {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[string]fleet.Times{}
	for _, one := range h.hosts {
		if one.times.CertificateSeen > 0 {
			all[one.machine.Name] = one.times
		}
	}
	return all
}

const (
	// retryInterval is the time between two attempts, as with kubeadm and the kubelet. heartbeat is
	// the time between two renewals of the Node's Lease, as with the kubelet.
	retryInterval = time.Second
	heartbeat     = 10 * time.Second
)

// run is the host while it is on: it gets a certificate, registers its Node, and keeps that alive.
func (h *Hosts) run(ctx context.Context, one *host, cluster fleet.Cluster) {
	var client kubernetes.Interface
	h.until(ctx, one, "attest", func() error {
		times, err := one.machine.Attest(ctx, cluster)
		if err != nil {
			return err
		}
		h.mu.Lock()
		one.times = times
		h.mu.Unlock()
		client, err = kubernetes.NewForConfig(one.machine.Credential(cluster))
		return err
	})
	h.until(ctx, one, "register", func() error { return h.register(ctx, client, one) })
	// Without a renewal kube-controller-manager sets the Node to not Ready after 40 s.
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := renewLease(ctx, client, one.machine.Name); err != nil && ctx.Err() == nil {
			h.options.Log("%s: lease: %v", one.machine.Name, err)
		}
	}, heartbeat)
}

// until calls try until it succeeds or the host is powered off.
func (h *Hosts) until(ctx context.Context, one *host, what string, try func() error) {
	_ = wait.PollUntilContextCancel(ctx, retryInterval, true, func(context.Context) (bool, error) {
		err := try()
		if err != nil && ctx.Err() == nil {
			h.options.Log("%s: %s: %v", one.machine.Name, what, err)
		}
		return err == nil, nil
	})
}

// register creates the Node under the host's certificate. Cluster API finds it by its provider ID.
// The Node needs no taint: Cluster API removes its own taint, but does not require it.
func (h *Hosts) register(ctx context.Context, client kubernetes.Interface, one *host) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	node, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: one.machine.Name}, Spec: corev1.NodeSpec{ProviderID: one.machine.ProviderID()},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		node, err = client.CoreV1().Nodes().Get(ctx, one.machine.Name, metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	now := metav1.Now()
	node.Status.NodeInfo.KubeletVersion = h.options.Version
	node.Status.Conditions = nil
	for _, condition := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeReady} {
		status := corev1.ConditionFalse
		if condition == corev1.NodeReady {
			status = corev1.ConditionTrue
		}
		node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{
			Type: condition, Status: status, Reason: "Simulated", LastHeartbeatTime: now, LastTransitionTime: now,
		})
	}
	_, err = client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	return err
}

func renewLease(ctx context.Context, client kubernetes.Interface, name string) error {
	leases := client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := ptr.To(metav1.NowMicro())
	lease, err := leases.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: &name, LeaseDurationSeconds: ptr.To[int32](40), RenewTime: now, //nolint:mnd // the kubelet's
		}}, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	lease.Spec.RenewTime = now
	_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}

// joinFile is where the kubeadm bootstrap provider has cloud-init put the join configuration.
const joinFile = "/run/kubeadm/kubeadm-join-config.yaml"

// joinConfiguration returns token and API server of the join configuration in a cloud-config.
func joinConfiguration(userData []byte) (*bootstrapv1.BootstrapTokenDiscovery, error) {
	config := struct {
		WriteFiles []struct{ Path, Content string } `json:"write_files"`
	}{}
	if err := yaml.Unmarshal(userData, &config); err != nil {
		return nil, fmt.Errorf("user data: %w", err)
	}
	for _, file := range config.WriteFiles {
		if file.Path != joinFile {
			continue
		}
		// All versions of kubeadm's configuration have these fields.
		join := struct {
			Discovery struct {
				BootstrapToken bootstrapv1.BootstrapTokenDiscovery `json:"bootstrapToken"`
			} `json:"discovery"`
		}{}
		// The configuration is the first document.
		documents := slices.DeleteFunc(strings.Split(file.Content, "---\n"), func(s string) bool { return strings.TrimSpace(s) == "" })
		if len(documents) == 0 {
			continue
		}
		if err := yaml.Unmarshal([]byte(documents[0]), &join); err != nil {
			return nil, fmt.Errorf("user data: %s: %w", joinFile, err)
		}
		if token := &join.Discovery.BootstrapToken; token.Token != "" && token.APIServerEndpoint != "" {
			return token, nil
		}
	}
	return nil, fmt.Errorf("user data: no %s with a bootstrap token", joinFile)
}
