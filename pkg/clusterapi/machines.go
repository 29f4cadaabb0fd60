// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	// maxAddresses limits the addresses that are read of one machine, to the limit of Cluster API.
	maxAddresses = 256
	// readInterval is how long the Machines that were read last serve other decisions, too.
	readInterval = 100 * time.Millisecond
	// moveTolerance bounds the time between the creation of a Cluster and of its Machine by a move
	// or a restored backup.
	moveTolerance = time.Hour
)

// machineSourceConfig configures newMachineSource.
type machineSourceConfig struct {
	// Reader reads the Machines, MachinePools and KubeadmConfigs of the Cluster's namespace from a
	// cache of the management cluster. The caller must not change the result, so nothing is copied.
	Reader client.Reader
	// Cluster is the workload Cluster.
	Cluster types.NamespacedName
	// Annotations makes the EK annotation count.
	Annotations bool
	// Infra reads the EK annotation of InfraMachines, too. Default: only that of Machines counts.
	Infra *infraAnnotations
	// platformPoller is asked for EKs. Default: there is none.
	Platform *platformPoller
	// Inventory has EKs by provider ID. All Clusters share it. Default: there is none.
	Inventory *sources.Inventory
	// ServingAddresses are the types of addresses that count for serving certificates: those that
	// no guest reports. They hold for a Machine, and for an instance as the platform describes it.
	// Addresses in an inventory always count. Default: none.
	ServingAddresses []clusterv1.MachineAddressType
	// MovedAt is when the Cluster's object was made, if the cluster is older: by a move, or from a
	// backup. Machines made at about that time are older, too. Default: it was not moved.
	MovedAt time.Time
}

// machineSource has the machines of one workload Cluster, by the objects of the management cluster:
// Machines, and the instances of MachinePools without Machines. It uses nothing that a node can
// write, except that a nodeRef is set.
type machineSource struct {
	machineSourceConfig

	// readMu is held while sources are read. Others who want the same wait for it.
	readMu sync.Mutex
	// objectMemo are the objects read last, by UID.
	memo map[types.UID]objectMemo
	// readAt is when shared was made.
	readAt time.Time
	shared []verifier.Machine

	tokens tokenCache

	mu sync.Mutex
	// problem is the error in EK annotations. annotated is the last time without an error.
	problem   error
	annotated time.Time
}

// objectMemo is what an object says at one resourceVersion.
type objectMemo struct {
	version string
	entries []machineEntry
}

// machineEntry is a machine before it goes to the rules, with what the sources of EKs need to find
// it.
type machineEntry struct {
	machine verifier.Machine
	// owner is the Machine's name, or the MachinePool's.
	owner string
	// pool says that it is an instance of a MachinePool.
	pool bool
	// bootstrapped says that only its infrastructure may keep it from being ready.
	bootstrapped bool
	// withoutTPM says that the platform knows that it has no TPM.
	withoutTPM bool
	// infra is the infrastructure provider's object for it.
	infra clusterv1.ContractVersionedObjectReference
	// annotation is the Machine's own.
	annotation ekAnnotation
}

// markUnavailable notes that a source cannot say now which EKs the machine has. It copies the list,
// which other entries may share.
func (m *machineEntry) markUnavailable(source verifier.EKSource) {
	m.machine.UnavailableSources = append(slices.Clone(m.machine.UnavailableSources), source)
}

// newMachineSource returns the machines of a Cluster. It reads nothing yet.
func newMachineSource(config machineSourceConfig) *machineSource {
	return &machineSource{machineSourceConfig: config, memo: map[types.UID]objectMemo{}}
}

// Machines returns all machines, at most a tenth of a second old. The caller must not change them.
//
// A machine has no time of creation, so it is not trusted on first use, in three cases: one of the
// sources cannot name its EKs now, the platform says that it has no TPM, or a move created its
// object again.
func (s *machineSource) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	// now may be before readAt: this call may have waited for the lock during another call's read.
	if s.shared != nil && now.Sub(s.readAt).Abs() < readInterval {
		return slices.Clone(s.shared), nil
	}
	entries, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	var problems text.Problems
	if s.Annotations {
		s.addAnnotated(ctx, entries, now, &problems)
	}
	if s.Platform != nil {
		s.addPlatform(entries) // before the inventory, which needs the provider IDs
	}
	if s.Inventory != nil {
		s.addInventoried(ctx, entries, now)
	}
	machines := make([]verifier.Machine, 0, len(entries))
	for i := range entries {
		m := &entries[i]
		if len(m.machine.UnavailableSources) > 0 || m.withoutTPM || s.createdByMove(m.machine.Created) {
			m.machine.Created = time.Time{}
		}
		machines = append(machines, m.machine)
	}
	s.readAt, s.shared = now, machines
	s.mu.Lock()
	if s.problem = problems.Err(); s.problem == nil {
		s.annotated = now
	}
	s.mu.Unlock()
	return slices.Clone(machines), nil
}

// createdByMove reports whether a move of the Cluster made an object, or may have made it.
func (s *machineSource) createdByMove(created time.Time) bool {
	return !s.MovedAt.IsZero() && created.Sub(s.MovedAt).Abs() < moveTolerance
}

// States returns the state of each source of EKs.
func (s *machineSource) States() (all []sources.State) {
	if s.Annotations {
		s.mu.Lock()
		all = append(all, sources.State{Name: sources.NameAnnotations, Problem: s.problem, LastRead: s.annotated})
		s.mu.Unlock()
	}
	if s.Inventory != nil {
		all = append(all, s.Inventory.States()...)
	}
	if s.Platform != nil {
		all = append(all, s.Platform.state(s.Cluster))
	}
	return all
}

// Owner returns the Machine or MachinePool that owns a machine's record.
func (s *machineSource) Owner(ref verifier.MachineRef) (metav1.OwnerReference, error) {
	owner := metav1.OwnerReference{APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: ref.Name, UID: types.UID(ref.UID)}
	if pool, _, instance := strings.Cut(ref.Name, "/"); instance {
		owner.Kind, owner.Name = "MachinePool", pool
	}
	if owner.Name == "" || owner.UID == "" {
		return metav1.OwnerReference{}, fmt.Errorf("machine %.253q of cluster %s: is no object", ref.Name, s.Cluster)
	}
	return owner, nil
}

// read returns the Cluster's machines without EKs.
func (s *machineSource) read(ctx context.Context) ([]machineEntry, error) {
	machines, err := s.listMachines(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.listPools(ctx)
	if err != nil {
		return nil, err
	}
	memo := make(map[types.UID]objectMemo, len(s.memo))
	entries := make([]machineEntry, 0, len(machines))
	covered := map[string]bool{}         // provider IDs
	withMachines := map[types.UID]bool{} // pools
	for i := range machines {
		m := &machines[i]
		if m.Spec.ClusterName != s.Cluster.Name {
			continue
		}
		if m.Spec.ProviderID != "" {
			covered[m.Spec.ProviderID] = true
		}
		for _, owner := range m.OwnerReferences {
			withMachines[owner.UID] = true
		}
		entries = append(entries, s.memoize(memo, m, func() []machineEntry {
			of := entryOf(m)
			of.machine.Addresses = s.servingAddresses(readAddresses(m.Status.Addresses))
			return []machineEntry{of}
		})...)
	}
	for i := range pools {
		p := &pools[i]
		if p.Spec.ClusterName != s.Cluster.Name || withMachines[p.UID] {
			continue
		}
		for _, instance := range s.memoize(memo, p, func() []machineEntry { return instancesOf(p) }) {
			if !covered[instance.machine.ProviderID] {
				entries = append(entries, instance)
			}
		}
	}
	s.memo = memo
	return entries, nil
}

// memoize returns what an object says. It parses an object only if the object has changed.
func (s *machineSource) memoize(memo map[types.UID]objectMemo, object client.Object, parse func() []machineEntry) []machineEntry {
	uid, version := object.GetUID(), object.GetResourceVersion()
	entry, ok := s.memo[uid]
	if !ok || entry.version != version || version == "" {
		entry = objectMemo{version, parse()}
	}
	memo[uid] = entry
	return entry.entries
}

// listMachines returns all Machines of the namespace, those of other Clusters too.
func (s *machineSource) listMachines(ctx context.Context) ([]clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := s.Reader.List(ctx, list, client.InNamespace(s.Cluster.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("machines of cluster %s: %w", s.Cluster, err)
	}
	return list.Items, nil
}

// entryOf returns what a Machine's object says, without its serving addresses. A node can write
// nodeRef, nodeInfo and the conditions that follow from the Node. Only the existence of a nodeRef
// is used, since a nodeRef is only a reason to refuse.
func entryOf(m *clusterv1.Machine) machineEntry {
	ready := bootstrapped(m) && !annotations.HasPaused(m)
	machine := verifier.Machine{
		Ref:        verifier.MachineRef{Name: m.Name, UID: string(m.UID)},
		ProviderID: m.Spec.ProviderID,
		Names:      []verifier.NodeName{{Source: verifier.NameMachine, Value: m.Name}},
		Ready:      ready && isTrue(m.Status.Initialization.InfrastructureProvisioned),
		Created:    m.CreationTimestamp.Time,
		NodeRef:    m.Status.NodeRef.Name,
	}
	if m.DeletionTimestamp != nil {
		machine.Deleted = m.DeletionTimestamp.Time
	}
	machine.Names = append(machine.Names, namesOf(readAddresses(m.Status.Addresses))...)
	return machineEntry{machine: machine, owner: m.Name, bootstrapped: ready, infra: m.Spec.InfrastructureRef, annotation: annotationOf(m.Annotations)}
}

// bootstrapped reports whether a Machine's bootstrap data was made. If the data was given by name,
// as for Machines of MachinePools, Cluster API does not say so in the status.
func bootstrapped(m *clusterv1.Machine) bool {
	return isTrue(m.Status.Initialization.BootstrapDataSecretCreated) ||
		!m.Spec.Bootstrap.ConfigRef.IsDefined() && m.Spec.Bootstrap.DataSecretName != nil
}

func isTrue(b *bool) bool { return b != nil && *b }

// machineAddress is a name or an IP that a machine is said to have.
type machineAddress struct {
	kind clusterv1.MachineAddressType
	name string
	ip   netip.Addr
}

// readAddresses returns the addresses that are well-formed, with names in lower case as a kubelet
// has them. It drops names that every machine has, such as localhost: some platforms report what a
// guest says while it boots.
func readAddresses(list clusterv1.MachineAddresses) []machineAddress {
	var read []machineAddress
	for _, a := range list[:min(len(list), maxAddresses)] {
		switch a.Type {
		case clusterv1.MachineHostName, clusterv1.MachineInternalDNS, clusterv1.MachineExternalDNS:
			if name := strings.ToLower(a.Address); isName(name) {
				read = append(read, machineAddress{kind: a.Type, name: name})
			}
		case clusterv1.MachineInternalIP, clusterv1.MachineExternalIP:
			ip, err := netip.ParseAddr(a.Address)
			if ip = ip.Unmap(); err == nil && ip.IsGlobalUnicast() && ip.Zone() == "" {
				read = append(read, machineAddress{kind: a.Type, ip: ip})
			}
		}
	}
	return read
}

// namesOf returns the node names among addresses, by their types.
func namesOf(addresses []machineAddress) []verifier.NodeName {
	sources := map[clusterv1.MachineAddressType]verifier.NameSource{
		clusterv1.MachineHostName:    verifier.NameHostname,
		clusterv1.MachineInternalDNS: verifier.NameInternalDNS,
		clusterv1.MachineExternalDNS: verifier.NameExternalDNS,
	}
	var names []verifier.NodeName
	for _, a := range addresses {
		if named := (verifier.NodeName{Source: sources[a.kind], Value: a.name}); a.name != "" && !slices.Contains(names, named) {
			names = append(names, named)
		}
	}
	return names
}

// servingAddresses returns the addresses that a node may serve under.
func (s *machineSource) servingAddresses(addresses []machineAddress) verifier.Addresses {
	var served verifier.Addresses
	for _, a := range addresses {
		switch {
		case !slices.Contains(s.ServingAddresses, a.kind):
		case a.name == "":
			if !slices.Contains(served.IPs, a.ip) {
				served.IPs = append(served.IPs, a.ip)
			}
		case !slices.Contains(served.DNSNames, a.name):
			served.DNSNames = append(served.DNSNames, a.name)
		}
	}
	return served
}

func isName(name string) bool {
	return len(validation.IsDNS1123Subdomain(name)) == 0 &&
		name != "localhost" && name != "localhost.localdomain" && !strings.HasSuffix(name, ".localhost")
}
