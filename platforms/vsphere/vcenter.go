// SPDX-License-Identifier: Apache-2.0

// Package vsphere gets the endorsement keys of virtual machines from vCenter, which gives each one
// its virtual TPM. docs/platforms/vsphere.md says how to use it.
package vsphere

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vmware/govmomi/property"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
	"golang.org/x/sync/errgroup"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi/platformkit"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

const (
	// lookUpWindow is how long one call of Find looks up UUIDs. The next call looks up the rest.
	lookUpWindow = 15 * time.Second
	// lookUps is the number of UUIDs that are looked up at a time.
	lookUps = 8
	// machinesPerCall limits the machines that one call asks about.
	machinesPerCall = 1000
	// refExpiry is when a reference is dropped that no Cluster asks about.
	refExpiry = time.Hour
)

// Properties of a virtual machine.
const (
	propUUID         = "config.uuid"
	propInstanceUUID = "config.instanceUuid"
	propTemplate     = "config.template"
	propVersion      = "config.changeVersion"
	propDevices      = "config.hardware.device"
)

// providerID is the form that the infrastructure provider writes, with the BIOS UUID.
var providerID = regexp.MustCompile(`^vsphere://([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$`)

// Config says how to reach a vCenter.
type Config struct {
	// Server is the host name or address, with a port if it is not 443.
	Server string
	// Roots are the CAs of its certificate. Default: those of the system.
	Roots *x509.CertPool
	// UserFile and PasswordFile have the user's name and password, each in one line. They are read
	// at each login.
	UserFile, PasswordFile string
	// Budget limits the calls. Required.
	Budget *platformkit.Budget
}

// VCenter implements platformkit.Platform.
type VCenter struct {
	session *session

	mu   sync.Mutex
	refs map[string]*references // by BIOS UUID
}

// references are those of the virtual machines with one BIOS UUID: usually one.
type references struct {
	refs []types.ManagedObjectReference
	used time.Time
}

// New returns a vCenter. It makes no call.
func New(c Config) (*VCenter, error) {
	sdk, err := platformkit.ParseEndpoint("https://" + c.Server)
	if err != nil || sdk.Path != "" {
		return nil, errors.New("VSPHERE_SERVER: it is not a host name or an address, with or without a port")
	}
	sdk = sdk.JoinPath(vim25.Path)
	if _, err := readLine(c.UserFile); err != nil {
		return nil, fmt.Errorf("VSPHERE_USER_FILE: %w", err)
	}
	if _, err := readLine(c.PasswordFile); err != nil {
		return nil, fmt.Errorf("VSPHERE_PASSWORD_FILE: %w", err)
	}
	return &VCenter{
		session: &session{
			url: sdk, transport: strict{c.Budget.Transport(newTransport(c.Roots))},
			userFile: c.UserFile, passwordFile: c.PasswordFile, lock: make(chan struct{}, 1),
		},
		refs: map[string]*references{},
	}, nil
}

// Logout ends the session. The next call begins another one.
func (v *VCenter) Logout(ctx context.Context) { v.session.Logout(ctx) }

// Location implements platformkit.Platform. It returns the BIOS UUID.
func (v *VCenter) Location(m clusterapi.PlatformMachine) (string, error) {
	parts, err := platformkit.Match(m.ProviderID, providerID)
	if err != nil {
		return "", err
	}
	return parts[0], nil
}

// Find implements platformkit.Platform. A BIOS UUID needs one call of its own, until its virtual
// machine is found. Machines whose references are known are asked about in one call.
func (v *VCenter) Find(ctx context.Context, _ kubetypes.NamespacedName, uuids []string) ([]platformkit.Instance, error) {
	// 1. Ask about the virtual machines that are known. They come first: UUIDs that belong to no
	// virtual machine cannot use up their calls.
	known, unknown := v.known(uuids)
	found, gone, errKnown := v.describe(ctx, known)

	// 2. Look up the others: first those that were known and are gone, then the rest in random
	// order. If the time is not enough, it is an error, and the next call continues.
	rand.Shuffle(len(unknown), func(a, b int) { unknown[a], unknown[b] = unknown[b], unknown[a] }) //nolint:gosec // G404: an order
	lookedUp, errLookUp := v.lookUp(ctx, append(gone, unknown...))

	// 3. Ask about those, too: the UUID must be the machine's own.
	fresh, vanished, errFresh := v.describe(ctx, lookedUp)
	var errVanished error
	if len(vanished) > 0 {
		errVanished = fmt.Errorf("%d virtual machines were found and are gone, or have another BIOS UUID, such as %s", len(vanished), vanished[0])
	}
	return append(found, fresh...), text.JoinLine([]error{errKnown, errLookUp, errFresh, errVanished})
}

// known returns the references that were found for these UUIDs, and the UUIDs without one.
func (v *VCenter) known(uuids []string) (known map[string][]types.ManagedObjectReference, unknown []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	known = map[string][]types.ManagedObjectReference{}
	for _, uuid := range uuids {
		if r := v.refs[uuid]; r != nil {
			r.used = time.Now()
			known[uuid] = r.refs
		} else {
			unknown = append(unknown, uuid)
		}
	}
	for uuid, r := range v.refs {
		if time.Since(r.used) > refExpiry {
			delete(v.refs, uuid)
		}
	}
	return known, unknown
}

// remember replaces the references of a UUID. With an empty list the UUID stays known, and Find
// looks it up again before UUIDs that were never found.
func (v *VCenter) remember(uuid string, refs []types.ManagedObjectReference) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.refs[uuid] = &references{refs, time.Now()}
}

// forget drops a UUID without a virtual machine.
func (v *VCenter) forget(uuid string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.refs, uuid)
}

// lookUp returns the references of the virtual machines with these BIOS UUIDs. UUIDs without a
// virtual machine are left out. After the first error it starts no more calls.
func (v *VCenter) lookUp(ctx context.Context, uuids []string) (map[string][]types.ManagedObjectReference, error) {
	window, end := context.WithTimeout(ctx, lookUpWindow)
	defer end()
	var callers errgroup.Group
	callers.SetLimit(lookUps)
	var stop atomic.Bool
	var mu sync.Mutex
	found, done := map[string][]types.ManagedObjectReference{}, 0
	for _, uuid := range uuids {
		if stop.Load() {
			break
		}
		callers.Go(func() error {
			refs, err := v.findAll(window, uuid)
			if err != nil {
				stop.Store(true)
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			if done++; len(refs) == 0 {
				v.forget(uuid)
				return nil
			}
			v.remember(uuid, refs)
			found[uuid] = refs
			return nil
		})
	}
	if err := callers.Wait(); err != nil {
		return found, fmt.Errorf("%d of %d BIOS UUIDs were not looked up: %w", len(uuids)-done, len(uuids), err)
	}
	return found, nil
}

// findAll returns the virtual machines and templates with a BIOS UUID that the user may see.
func (v *VCenter) findAll(ctx context.Context, uuid string) (refs []types.ManagedObjectReference, err error) {
	err = v.session.Do(ctx, func(c *vim25.Client) error {
		if c.ServiceContent.SearchIndex == nil {
			return errors.New("the server has no SearchIndex")
		}
		answer, err := methods.FindAllByUuid(ctx, c, &types.FindAllByUuid{This: *c.ServiceContent.SearchIndex, Uuid: uuid, VmSearch: true, InstanceUuid: new(false)})
		if err == nil {
			refs = answer.Returnval
		}
		return err
	})
	return refs, err
}

// describe returns the instances at these references, and the UUIDs that have no virtual machine
// there. It returns several instances for a UUID that several virtual machines have. It leaves
// templates out.
func (v *VCenter) describe(ctx context.Context, asked map[string][]types.ManagedObjectReference) (instances []platformkit.Instance, gone []string, err error) {
	machines, err := v.retrieve(ctx, slices.Concat(slices.Collect(maps.Values(asked))...), propUUID, propInstanceUUID, propTemplate, propVersion)
	if err != nil {
		return nil, nil, err
	}
	unreadable, example := 0, ""
	for uuid, refs := range asked {
		var there []types.ManagedObjectReference
		var of []platformkit.Instance
		hidden := 0
		for _, ref := range refs {
			machine, exists := machines[ref]
			id, readable := machine.identity()
			switch {
			case !exists || readable && id.uuid != uuid:
				continue
			case !readable:
				hidden++
				example = fmt.Sprintf("%s (%s)", ref.Value, machine.missing)
			case !id.template:
				of = append(of, platformkit.Instance{Location: uuid, ID: id.unique(ref), Version: id.version, Data: ref})
			}
			there = append(there, ref)
		}
		v.remember(uuid, there)
		if len(there) == 0 {
			gone = append(gone, uuid)
		}
		// A machine that cannot be read may be a second one with this UUID.
		if unreadable += hidden; hidden == 0 {
			instances = append(instances, of...)
		}
	}
	if unreadable > 0 {
		err = fmt.Errorf("the user cannot read %s of %d virtual machines, such as %s", propUUID, unreadable, example)
	}
	return instances, gone, err
}

// machine has the requested properties of a virtual machine. missing is the fault of one that
// cannot be read.
type machine struct {
	properties map[string]any
	missing    string
}

// identity is which virtual machine it is.
type identity struct {
	uuid, instanceUUID, version string
	template                    bool
}

// identity is false if vCenter does not show all of it.
func (m machine) identity() (i identity, readable bool) {
	uuid, okUUID := m.properties[propUUID].(string)
	instanceUUID, okInstance := m.properties[propInstanceUUID].(string)
	template, okTemplate := m.properties[propTemplate].(bool)
	version, _ := m.properties[propVersion].(string)
	return identity{strings.ToLower(uuid), instanceUUID, version, template}, okUUID && okInstance && okTemplate && uuid != "" && instanceUUID != ""
}

// unique returns an ID that no other virtual machine has. vCenter gives a new reference to one that
// is registered again.
func (i identity) unique(ref types.ManagedObjectReference) string {
	return i.instanceUUID + "/" + ref.Value
}

// retrieve returns the properties of virtual machines. Those that are gone are left out.
func (v *VCenter) retrieve(ctx context.Context, refs []types.ManagedObjectReference, paths ...string) (map[types.ManagedObjectReference]machine, error) {
	machines := map[types.ManagedObjectReference]machine{}
	for chunk := range slices.Chunk(refs, machinesPerCall) {
		filter := types.PropertyFilterSpec{
			PropSet:                       []types.PropertySpec{{Type: "VirtualMachine", PathSet: paths}},
			ReportMissingObjectsInResults: new(true),
		}
		for _, ref := range chunk {
			filter.ObjectSet = append(filter.ObjectSet, types.ObjectSpec{Obj: ref})
		}
		var objects []types.ObjectContent
		err := v.session.Do(ctx, func(c *vim25.Client) error {
			answer, err := property.DefaultCollector(c).RetrieveProperties(ctx, types.RetrieveProperties{SpecSet: []types.PropertyFilterSpec{filter}})
			if err != nil {
				return err
			}
			objects = answer.Returnval
			return sessionEnded(objects)
		})
		if err != nil {
			return nil, err
		}
		for _, o := range objects {
			m := machine{properties: map[string]any{}}
			for _, p := range o.PropSet {
				m.properties[p.Name] = p.Val
			}
			for _, p := range o.MissingSet {
				m.missing = faultName(p.Fault.Fault)
			}
			machines[o.Obj] = m
		}
	}
	return machines, nil
}

// sessionEnded returns an error if properties are missing because the session has ended.
func sessionEnded(objects []types.ObjectContent) error {
	for _, o := range objects {
		for _, p := range o.MissingSet {
			if _, ended := p.Fault.Fault.(*types.NotAuthenticated); ended {
				return soap.WrapVimFault(p.Fault.Fault)
			}
		}
	}
	return nil
}

// EndorsementKeys implements platformkit.Platform.
func (v *VCenter) EndorsementKeys(ctx context.Context, i platformkit.Instance) ([]tpm.Fingerprint, error) {
	ref, ok := i.Data.(types.ManagedObjectReference)
	if !ok {
		return nil, errors.New("the instance is not one of vSphere")
	}
	machines, err := v.retrieve(ctx, []types.ManagedObjectReference{ref}, propUUID, propInstanceUUID, propTemplate, propDevices)
	if err != nil {
		return nil, err
	}
	machine, exists := machines[ref]
	if !exists {
		return nil, fmt.Errorf("%s is gone", ref.Value)
	}
	devices, readable := machine.properties[propDevices].(types.ArrayOfVirtualDevice)
	id, identified := machine.identity()
	switch {
	case !identified || !readable || len(devices.VirtualDevice) == 0:
		return nil, fmt.Errorf("the user cannot read the devices of %s (%s)", ref.Value, machine.missing)
	case id.uuid != i.Location || id.unique(ref) != i.ID:
		return nil, fmt.Errorf("%s has become another virtual machine", ref.Value)
	}
	return endorsementKeys(devices.VirtualDevice)
}

// endorsementKeys returns the endorsement keys of a virtual machine with these devices. Each
// virtual TPM has at least one certificate. It may be self-signed and say CA:FALSE: the API vouches
// for the key.
func endorsementKeys(devices []types.BaseVirtualDevice) ([]tpm.Fingerprint, error) {
	eks := []tpm.Fingerprint{}
	for _, device := range devices {
		chip, ok := device.(*types.VirtualTPM)
		if !ok {
			continue
		}
		if len(chip.EndorsementKeyCertificate) == 0 {
			return nil, errors.New("the virtual TPM has no endorsement key certificate")
		}
		for _, encoded := range chip.EndorsementKeyCertificate {
			certificate, err := parseCertificate(encoded)
			if err != nil {
				return nil, fmt.Errorf("endorsement key certificate: %w", err)
			}
			ek, err := clusterapi.EKFingerprint(certificate.PublicKey)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(eks, ek) {
				eks = append(eks, ek)
			}
		}
	}
	return eks, nil
}

// parseCertificate reads a certificate as govmomi has it: the base64 text of vCenter's answer, or
// its bytes. DER of a certificate begins with 0x30, and base64 of that with M.
func parseCertificate(encoded []byte) (*x509.Certificate, error) {
	const sequence = 0x30
	if len(encoded) > 0 && encoded[0] == sequence {
		return x509.ParseCertificate(encoded)
	}
	der, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(encoded)))
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
