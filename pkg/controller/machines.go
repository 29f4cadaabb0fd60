// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// MachineSource knows the machines of the cluster, by authorities that no node can write.
type MachineSource interface {
	// Machines returns all of them, in a slice of the caller's own. An error means that it is not known now which there are: nothing is decided then.
	Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// lender is a MachineSource that has them at hand: a decision, which only reads them, spares the copy of all.
type lender interface {
	MachineSource
	// lend returns what Machines does. Nobody may change it.
	lend(ctx context.Context, now time.Time) ([]verifier.Machine, error)
}

// machines returns the machines of a source for a decision.
func machines(ctx context.Context, source MachineSource, now time.Time) ([]verifier.Machine, error) {
	if l, ok := source.(lender); ok {
		return l.lend(ctx, now)
	}
	return source.Machines(ctx, now)
}

// lent returns the machines of a source that lends them, which are the same ones until they change, nil of another.
func (c *Controller) lent(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	if l, ok := c.Machines.(lender); ok {
		return l.lend(ctx, now)
	}
	return nil, nil
}

// copied returns what was lent as somebody's own.
func copied(machines []verifier.Machine, err error) ([]verifier.Machine, error) {
	own := slices.Clone(machines)
	for i := range own {
		m := &own[i]
		m.Names, m.EKs = slices.Clone(m.Names), slices.Clone(m.EKs)
		m.Addresses.DNSNames, m.Addresses.IPs = slices.Clone(m.Addresses.DNSNames), slices.Clone(m.Addresses.IPs)
	}
	return own, err
}

// TokenSource knows which machine a bootstrap token was made for. A MachineSource may be one; without it no token is known, and where the
// policy requires one first requests wait in vain.
type TokenSource interface {
	// Token returns what is known of the token with this ID, the public part of it. The zero value: nothing yet.
	Token(ctx context.Context, id string, now time.Time) (verifier.Token, error)
}

// Inventory is the source of machines for fleets without Cluster API.
type Inventory struct {
	file *inventory.File
	told told
}

// NewInventory returns a source of the machines in a file.
func NewInventory(file *inventory.File) *Inventory { return &Inventory{file: file} }

// Machines returns those in the file.
func (i *Inventory) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	return copied(i.lend(ctx, now))
}

func (i *Inventory) lend(_ context.Context, now time.Time) ([]verifier.Machine, error) {
	known, err := i.file.Inventory(now)
	if err != nil {
		return nil, err
	}
	return i.told.of(known), nil
}

// Token returns the machine in the file that has this token.
func (i *Inventory) Token(_ context.Context, id string, now time.Time) (verifier.Token, error) {
	known, err := i.file.Inventory(now)
	if err != nil {
		return verifier.Token{}, err
	}
	return tokenOf(known, id), nil
}

// Problem returns what is wrong with what the file holds, nil if that is in use.
func (i *Inventory) Problem() error { return i.file.Problem() }

// told keeps what the rules are told of an inventory until there is another: each decision asks for all of it.
type told struct {
	mu       sync.Mutex
	known    *inventory.Inventory
	machines []verifier.Machine
}

// of returns the machines of an inventory, to be lent.
func (t *told) of(known *inventory.Inventory) []verifier.Machine {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known != known {
		t.known, t.machines = known, machinesOf(known)
	}
	return t.machines
}

// machinesOf returns what the rules are told of an inventory.
func machinesOf(known *inventory.Inventory) []verifier.Machine {
	all := known.All()
	machines := make([]verifier.Machine, 0, len(all))
	for _, m := range all {
		machine := verifier.Machine{
			Ref: verifier.MachineRef{Name: m.Name}, ProviderID: m.ProviderID, Ready: true,
			Names:     []verifier.NodeName{{Source: verifier.NameInventory, Value: m.NodeName}},
			Addresses: verifier.Addresses{DNSNames: m.DNSNames, IPs: m.IPs},
		}
		for _, ek := range m.EKs {
			machine.EKs = append(machine.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek.Fingerprint})
		}
		machines = append(machines, machine)
	}
	return machines
}

// tokenOf returns what an inventory knows of a token. One that no machine has may be added yet.
func tokenOf(known *inventory.Inventory, id string) verifier.Token {
	machine, ok := known.ByToken(id)
	return verifier.Token{Known: ok, Machine: verifier.MachineRef{Name: machine.Name}}
}
