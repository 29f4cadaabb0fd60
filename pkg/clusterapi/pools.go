// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/annotations"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const (
	// maxInstances limits the instances of one MachinePool: as many as Cluster API allows.
	maxInstances = 10000
	// instanceDigits is how many hex digits identify an instance of a pool.
	instanceDigits = 16
)

// listPools returns all MachinePools of the namespace, those of other Clusters too.
func (s *machineSource) listPools(ctx context.Context) ([]clusterv1.MachinePool, error) {
	list := &clusterv1.MachinePoolList{}
	if err := s.Reader.List(ctx, list, client.InNamespace(s.Cluster.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("machine pools of cluster %s: %w", s.Cluster, err)
	}
	return list.Items, nil
}

// instancesOf returns the instances of a MachinePool without Machines. If the infrastructure
// provider makes Machines for its pools, an instance counts once its Machine exists, and as that
// Machine.
//
// Only its provider ID identifies an instance. So only an inventory or the platform can name its
// EKs and its node name. The inventory's name has the source verifier.NameInventory, and the
// platform's addresses have their types. Without a node name it waits. It has no time of creation,
// so there is no trust on first use: a pool's token was made for none of its instances.
func instancesOf(p *clusterv1.MachinePool) []machineEntry {
	machine := verifier.Machine{
		Ready: isTrue(p.Status.Initialization.BootstrapDataSecretCreated) && isTrue(p.Status.Initialization.InfrastructureProvisioned) &&
			!annotations.HasPaused(p),
	}
	if p.DeletionTimestamp != nil {
		machine.Deleted = p.DeletionTimestamp.Time
	}
	list := p.Spec.ProviderIDList
	seen := map[string]bool{"": true}
	var instances []machineEntry
	for _, id := range list[:min(len(list), maxInstances)] {
		if seen[id] {
			continue
		}
		seen[id] = true
		machine.Ref = verifier.MachineRef{Name: instanceName(p.Name, id), UID: string(p.UID)}
		machine.ProviderID = id
		instances = append(instances, machineEntry{machine: machine, owner: p.Name, pool: true, infra: p.Spec.Template.Spec.InfrastructureRef})
	}
	return instances
}

// instanceName returns the name of a pool's instance. No object's name has a slash.
func instanceName(pool, providerID string) string {
	sum := sha256.Sum256([]byte(providerID))
	return pool + "/" + hex.EncodeToString(sum[:])[:instanceDigits]
}
