// SPDX-License-Identifier: Apache-2.0

// Package fleet makes machines that enrol without a plugin process. Each has a connection of its
// own, and a TPM unless a cloud vouches for it. It files the same requests as the plugin's worker,
// and waits for the same answers.
//
//	m, err := fleet.NewSwtpm("node-a", dir, ca)
//	defer m.Stop()
//	inventory, err := fleet.Inventory(ctx, m)
//	times, err := m.Attest(ctx, fleet.Cluster{URL: url, CA: ca, Token: token, Issuer: issuer})
package fleet

import (
	"fmt"
	"sync"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/tpmmodel"
)

// Chip is a TPM behind a Unix socket.
type Chip interface {
	// Socket is the path that provider.Settings takes.
	Socket() string
	// Stop ends it.
	Stop()
}

// Machine is a computer. Its methods are for one goroutine at a time.
type Machine struct {
	// Name is its Node's.
	Name string
	// ID is its provider ID; empty stands for test:// and its name.
	ID string
	// Dir is where its files are, such as the TPM's lock.
	Dir string
	// Chip is its TPM; nil if it has none.
	Chip Chip
	// Provider makes its evidence: a provider.Challenger if it has a TPM.
	Provider provider.Provider
	// Certificate and Key are the latest that it got, in PEM; empty before.
	Certificate, Key []byte
}

// New returns a machine with a TPM, which ends with it. dir exists, and is no other machine's.
func New(name, dir string, chip Chip) (*Machine, error) {
	made, err := tpm.Factory().New(provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: dir})
	if err != nil {
		return nil, err
	}
	return &Machine{Name: name, Dir: dir, Chip: chip, Provider: made}, nil
}

// NewSwtpm returns a machine with a process of swtpm whose EK, an ecc-p256, has a certificate of
// that maker's.
func NewSwtpm(name, dir string, maker *swtpm.CA) (*Machine, error) {
	chip, err := swtpm.New(swtpm.Options{Certified: []string{certified}, CA: maker})
	if err != nil {
		return nil, fmt.Errorf("%s: software TPM: %w", name, err)
	}
	m, err := New(name, dir, chip)
	if err != nil {
		chip.Stop()
	}
	return m, err
}

// NewModel returns the same with a model of a TPM in this process, of which there may be thousands.
func NewModel(name, dir string, maker *swtpm.CA) (*Machine, error) {
	chip, err := tpmmodel.NewChip(swtpm.Options{Certified: []string{certified}, CA: maker})
	if err != nil {
		return nil, fmt.Errorf("%s: model of a TPM: %w", name, err)
	}
	m, err := New(name, dir, chip)
	if err != nil {
		chip.Stop()
	}
	return m, err
}

// certified is the kind of EK that a machine's TPM has a certificate for.
const certified = "ecc-p256"

// ProviderID is the machine's.
func (m *Machine) ProviderID() string {
	if m.ID != "" {
		return m.ID
	}
	return "test://" + m.Name
}

// Stop switches the TPM off.
func (m *Machine) Stop() {
	if m.Chip != nil {
		m.Chip.Stop()
	}
}

// Make calls a function for 0 to count-1, a few at a time, and returns what it made, in order.
// After an error nothing that was made is left.
func Make(count int, one func(i int) (*Machine, error)) ([]*Machine, error) {
	all := make([]*Machine, count)
	err := Each(count, func(i int) (err error) {
		all[i], err = one(i)
		return err
	})
	if err != nil {
		Stop(all...)
		return nil, err
	}
	return all, nil
}

// Stop stops machines. Nil is none.
func Stop(machines ...*Machine) {
	for _, m := range machines {
		if m != nil {
			m.Stop()
		}
	}
}

// atOnce is how many machines are made, or asked, at a time.
const atOnce = 4

// Each calls f for 0 to count-1, some at a time, and returns its first error. After that it begins
// no more.
func Each(count int, f func(i int) error) error {
	var mu sync.Mutex
	var failed error
	next := 0
	take := func() (i int, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		i, ok = next, next < count && failed == nil
		next++
		return i, ok
	}
	var wait sync.WaitGroup
	for range min(atOnce, count) {
		wait.Go(func() {
			for i, ok := take(); ok; i, ok = take() {
				if err := f(i); err != nil {
					mu.Lock()
					if failed == nil {
						failed = err
					}
					mu.Unlock()
				}
			}
		})
	}
	wait.Wait()
	return failed
}
