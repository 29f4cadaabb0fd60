// SPDX-License-Identifier: Apache-2.0

package metal

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
)

// Hosts is the platform: it boots and powers off machines.
//
// An ID comes from the spec of a MetalMachine. A user who may create MetalMachines, rather than
// Machines and templates alone, chooses the ID. A platform with several tenants has to know the
// tenant of each host, and to refuse the IDs of others' hosts.
type Hosts interface {
	// Allocate returns the host of an owner, the same one each time.
	Allocate(ctx context.Context, owner types.UID, name string) (Host, error)
	// PowerOn boots a host with its user data. It does not wait for the boot, and does nothing if
	// the host is on.
	PowerOn(ctx context.Context, id string, metadata Metadata, userData []byte) error
	// Release powers a host off and wipes it, and returns when that is done. An unknown ID is no
	// error: Release is called again after a crash.
	Release(ctx context.Context, id string) error
}

// Host is one machine of the platform. EKs has the SHA-256 of each EK's SubjectPublicKeyInfo, in
// lower-case hex, as the platform knows them. Never take them from the host itself.
type Host struct {
	ID        string
	EKs       []string
	Addresses []clusterv1.MachineAddress
}

// Metadata goes into cloud-init's meta-data file (datasource NoCloud).
type Metadata struct {
	InstanceID, LocalHostname string
}
