// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/lastgood"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// machineList is an inventory, and the machines in it as the rules need them.
type machineList struct {
	inventory *inventory.Inventory
	machines  []verifier.Machine
}

func parseInventory(content []byte) (*machineList, error) {
	parsed, err := inventory.Parse(content)
	if err != nil {
		return nil, err
	}
	list := &machineList{inventory: parsed}
	for _, m := range parsed.All() {
		machine := verifier.Machine{
			Ref: verifier.MachineRef{Name: m.Name}, ProviderID: m.ProviderID, Ready: true,
			Names:     []verifier.NodeName{{Source: verifier.NameInventory, Value: m.NodeName}},
			Addresses: verifier.Addresses{DNSNames: m.DNSNames, IPs: m.IPs},
		}
		for _, ek := range m.EKs {
			machine.EKs = append(machine.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek.Fingerprint})
		}
		list.machines = append(list.machines, machine)
	}
	return list, nil
}

// owned returns a copy of the machines that the caller may change.
func (l *machineList) owned() []verifier.Machine {
	own := slices.Clone(l.machines)
	for i := range own {
		m := &own[i]
		m.Names, m.EKs = slices.Clone(m.Names), slices.Clone(m.EKs)
		m.Addresses.DNSNames, m.Addresses.IPs = slices.Clone(m.Addresses.DNSNames), slices.Clone(m.Addresses.IPs)
	}
	return own
}

// token returns which machine a bootstrap token is for. A token that no machine has may yet be
// added.
func (l *machineList) token(id string) verifier.Token {
	machine, ok := l.inventory.ByToken(id)
	return verifier.Token{Known: ok, Machine: verifier.MachineRef{Name: machine.Name}}
}

// latest returns the current list of an inventory.
type latest func(ctx context.Context, now time.Time) (*machineList, error)

// Machines returns all machines, in a slice of the caller's own.
func (l latest) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	list, err := l(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.owned(), nil
}

// Shared returns all machines. They stay the same slice until the inventory changes, and nobody may
// change them.
func (l latest) Shared(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	list, err := l(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.machines, nil
}

// Token returns the machine that has this bootstrap token.
func (l latest) Token(ctx context.Context, id string, now time.Time) (verifier.Token, error) {
	list, err := l(ctx, now)
	if err != nil {
		return verifier.Token{}, err
	}
	return list.token(id), nil
}

// Inventory is the inventory in a file.
type Inventory struct {
	latest
	file *lastgood.File[*machineList]
}

// NewInventory returns the inventory in the file at path, which is read again once the last read is
// older than maxAge. It reads nothing yet.
func NewInventory(path string, maxAge time.Duration) *Inventory {
	file := &lastgood.File[*machineList]{Name: "inventory", Path: path, MaxSize: inventory.MaxSize, MaxAge: maxAge, Parse: parseInventory}
	return &Inventory{func(_ context.Context, now time.Time) (*machineList, error) { return file.Get(now) }, file}
}

// Problem returns what is wrong with the content of the file, nil if it is in use.
func (i *Inventory) Problem() error { return i.file.Problem() }

// ConfigMapInventory is the inventory in a ConfigMap.
type ConfigMapInventory struct {
	latest
	reader    client.Reader
	configMap types.NamespacedName
	key       string
	refresher lastgood.Refresher
	list      lastgood.Value[*machineList]
}

// NewConfigMapInventory returns the inventory in the entry key of a ConfigMap. It reads nothing yet.
// The reader must not be a cache.
func NewConfigMapInventory(reader client.Reader, configMap types.NamespacedName, key string) *ConfigMapInventory {
	c := &ConfigMapInventory{reader: reader, configMap: configMap, key: key}
	c.latest = c.get
	return c
}

// Problem returns what is wrong with the ConfigMap's entry, nil if it is in use.
func (c *ConfigMapInventory) Problem() error { return c.list.Problem() }

func (c *ConfigMapInventory) get(ctx context.Context, now time.Time) (*machineList, error) {
	c.refresher.Refresh(now, maxAge, func() { c.refresh(ctx) })
	if list, ok := c.list.Get(); ok {
		return list, nil
	}
	if err := c.list.Problem(); err != nil {
		return nil, err
	}
	return nil, errors.New("inventory: there is none yet")
}

func (c *ConfigMapInventory) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	object := &corev1.ConfigMap{}
	if err := c.reader.Get(ctx, c.configMap, object); err != nil {
		c.list.Fail(fmt.Errorf("inventory: configmap %s: %w", c.configMap, err))
		return
	}
	content, ok := object.Data[c.key]
	if !ok {
		c.list.Fail(fmt.Errorf("inventory: configmap %s has no entry %q", c.configMap, c.key))
		return
	}
	sum := sha256.Sum256([]byte(content))
	_ = c.list.Offer(string(sum[:]), func() (*machineList, error) { return parseInventory([]byte(content)) }) // Problem returns it
}
