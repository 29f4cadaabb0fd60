// SPDX-License-Identifier: Apache-2.0

package nspawn

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// ekTemplate is the EK that the plugin uses by default.
	ekTemplate = "ecc-p256"
	// tpmDevice is a path that the plugin tries by default, and where it accepts a socket. At
	// /dev/tpmrm0 it would expect the kernel's resource manager.
	tpmDevice = "/dev/tpm0"
)

// Hosts is the platform. Its methods are safe for concurrent use.
type Hosts struct {
	image *Image
	ca    *swtpm.CA

	mu      sync.Mutex
	hosts   map[string]*host // by ID
	reaches []string
	count   int // of hosts that were ever made
}

var _ metal.Hosts = (*Hosts)(nil)

// host is one machine. Its TPM stays the same for as long as it has its owner.
type host struct {
	metal.Host

	owner   types.UID
	name    string // of the owner
	address string
	tpm     *swtpm.TPM
	boot    *boot      // nil while it is off; of Hosts.mu
	power   sync.Mutex // held by Release and Reboot
}

// boot is a machine that is on, or about to be.
type boot struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed when the two below are set
	machine *testbed.Machine
	err     error
}

// New returns a platform whose hosts have that image, and reach the API servers at these addresses.
func New(image *Image, reaches ...string) (*Hosts, error) {
	ca, err := swtpm.NewCA()
	if err != nil {
		return nil, fmt.Errorf("make the CA of the hosts' TPMs: %w", err)
	}
	return &Hosts{image: image, ca: ca, hosts: map[string]*host{}, reaches: reaches}, nil
}

// Reach adds an address for hosts that are powered on for the first time after the call.
func (h *Hosts) Reach(address string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reaches = append(h.reaches, address)
}

// TPMRoot is the root certificate of the CA that certifies all hosts' EKs.
func (h *Hosts) TPMRoot() *x509.Certificate { return h.ca.Root }

// Allocate returns the host of an owner, the same one each time.
func (h *Hosts) Allocate(_ context.Context, owner types.UID, name string) (metal.Host, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, host := range h.hosts {
		if host.owner == owner {
			return host.Host, nil
		}
	}
	chip, err := swtpm.New(swtpm.Options{Certified: []string{ekTemplate}, CA: h.ca})
	if err != nil {
		return metal.Host{}, fmt.Errorf("allocate a host: %w", err)
	}
	ek, err := fingerprint(chip)
	if err != nil {
		chip.Stop()
		return metal.Host{}, fmt.Errorf("allocate a host: %w", err)
	}
	h.count++
	made := &host{owner: owner, name: name, tpm: chip, address: fmt.Sprintf("10.99.%d.%d", 100+h.count/250, 1+h.count%250)}
	made.Host = metal.Host{
		ID: "host-" + strings.ToLower(rand.Text())[:10], EKs: []string{ek},
		Addresses: []clusterv1.MachineAddress{{Type: clusterv1.MachineInternalIP, Address: made.address}},
	}
	h.hosts[made.ID] = made
	return made.Host, nil
}

// fingerprint returns the SHA-256 of the EK, which it reads from the TPM.
func fingerprint(chip *swtpm.TPM) (string, error) {
	area, err := chip.EK(ekTemplate)
	if err != nil {
		return "", err
	}
	key, err := template.PublicKey(area)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}

// unknownError says that there is no such host.
type unknownError struct{ id string }

func (e *unknownError) Error() string { return "no host " + e.id }

func (h *Hosts) host(id string) (*host, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if found, ok := h.hosts[id]; ok {
		return found, nil
	}
	return nil, &unknownError{id}
}

// PowerOn boots a host with its user data. It does not wait for the boot, and does nothing if the
// host is on. If an earlier boot failed, it returns that error.
func (h *Hosts) PowerOn(ctx context.Context, id string, metadata metal.Metadata, userData []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	host, ok := h.hosts[id]
	if !ok {
		return &unknownError{id}
	}
	if host.boot != nil {
		select {
		case <-host.boot.done:
			return host.boot.err
		default:
			return nil
		}
	}
	options, err := h.options(host, metadata, userData)
	if err != nil {
		return fmt.Errorf("power on host %s: %w", id, err)
	}
	// A caller's context is that of one call: the machine outlives it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bootLimit)
	started := &boot{cancel: cancel, done: make(chan struct{})}
	host.boot = started
	go func() {
		defer close(started.done)
		defer cancel()
		started.machine, started.err = testbed.StartMachine(ctx, options)
	}()
	return nil
}

func (h *Hosts) options(host *host, metadata metal.Metadata, userData []byte) (testbed.MachineOptions, error) {
	files, err := testbed.CloudInitSeed(metadata.InstanceID, metadata.LocalHostname, userData)
	if err != nil {
		return testbed.MachineOptions{}, err
	}
	if files["/etc/os-release"], err = release(); err != nil {
		return testbed.MachineOptions{}, err
	}
	files["/etc/hostname"] = "localhost\n" // as in an image: cloud-init sets the name
	// Instead of the platform's DNS: the kubelet looks up its own address by the host's name.
	files["/etc/hosts"] = "127.0.0.1 localhost\n" + host.address + " " + metadata.LocalHostname + "\n"
	return testbed.MachineOptions{
		Name: host.ID, Files: files, Layers: h.image.layers, Enabled: []string{"kubelet.service", "fakecri.service"},
		Binds: map[string]string{tpmDevice: host.tpm.Socket()}, ReadOnlyBinds: h.image.programs,
		AlsoReaches: slices.Clone(h.reaches), Address: host.address,
		// This target is reached before user data runs, so a host that cannot join starts, too.
		StartedWith: "basic.target",
	}, nil
}

// Release powers a host off and wipes it. It returns when that is done; an unknown ID is no error.
func (h *Hosts) Release(_ context.Context, id string) error {
	host, err := h.host(id)
	if err != nil {
		return nil // it is gone already
	}
	host.power.Lock()
	defer host.power.Unlock()
	h.mu.Lock()
	on := host.boot
	_, there := h.hosts[id]
	delete(h.hosts, id) // PowerOn fails from now on
	h.mu.Unlock()
	if !there {
		return nil
	}
	if on != nil {
		on.cancel()
		<-on.done
		if on.machine != nil {
			err = on.machine.Remove()
		}
	}
	host.tpm.Stop()
	if err != nil {
		return fmt.Errorf("release host %s: %w", id, err)
	}
	return nil
}

// Close releases all hosts.
func (h *Hosts) Close() error {
	var errs []error
	for _, id := range h.IDs("") {
		errs = append(errs, h.Release(context.Background(), id))
	}
	return errors.Join(errs...)
}

// IDs returns the IDs of the hosts whose owner has that name, or of all hosts if name is empty.
func (h *Hosts) IDs(name string) (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, host := range h.hosts {
		if name == "" || host.name == name {
			ids = append(ids, id)
		}
	}
	return ids
}

// Machine returns the machine of a host that was powered on, once it has started, to run commands
// on it.
func (h *Hosts) Machine(ctx context.Context, id string) (*testbed.Machine, error) {
	host, err := h.host(id)
	if err != nil {
		return nil, err
	}
	return h.machine(ctx, host)
}

func (h *Hosts) machine(ctx context.Context, host *host) (*testbed.Machine, error) {
	h.mu.Lock()
	on := host.boot
	h.mu.Unlock()
	if on == nil {
		return nil, fmt.Errorf("host %s is off", host.ID)
	}
	select {
	case <-on.done:
		return on.machine, on.err
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for host %s: %w", host.ID, ctx.Err())
	}
}

// Reboot shuts a host down cleanly, and powers it on again with the same disk and TPM. The caller
// must run nothing on it meanwhile.
func (h *Hosts) Reboot(ctx context.Context, id string) error {
	host, err := h.host(id)
	if err != nil {
		return err
	}
	host.power.Lock()
	defer host.power.Unlock()
	m, err := h.machine(ctx, host)
	if err != nil {
		return err
	}
	if err := m.PowerOff(ctx); err != nil {
		return fmt.Errorf("reboot host %s: %w", id, err)
	}
	if err := host.tpm.Reboot(); err != nil {
		return fmt.Errorf("reboot the TPM of host %s: %w", id, err)
	}
	return m.PowerOn(ctx)
}

// Logs returns a host's logs for the message of a failed test: cloud-init's output, and the
// kubelet's journal, which has the plugin's messages.
func (h *Hosts) Logs(ctx context.Context, id string) string {
	m, err := h.Machine(ctx, id)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("--- cloud-init of %[1]s ---\n%[2]s--- kubelet of %[1]s ---\n%[3]s", id, m.CloudInitLog(), m.Journal(ctx, "kubelet"))
}
