// SPDX-License-Identifier: Apache-2.0

package sources

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

func newMachineList(merged *inventory.Inventory) *machineList {
	list := &machineList{inventory: merged, machines: make([]verifier.Machine, 0, merged.Len())}
	for _, m := range merged.All() {
		machine := verifier.Machine{
			Ref: verifier.MachineRef{Name: m.Name}, ProviderID: m.ProviderID, Ready: true, Disputed: m.Disputed,
			Addresses: verifier.Addresses{DNSNames: m.DNSNames, IPs: m.IPs},
		}
		if m.NodeName != "" {
			machine.Names = []verifier.NodeName{{Source: verifier.NameInventory, Value: m.NodeName}}
		}
		if !merged.Complete() { // the missing part may contradict this one, so no EK is replaced
			machine.UnavailableSources = []verifier.EKSource{verifier.EKInventory}
		}
		for _, ek := range m.EKs {
			machine.EKs = append(machine.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek.Fingerprint})
		}
		list.machines = append(list.machines, machine)
	}
	return list
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
// added, and that of a disputed machine may be another's.
func (l *machineList) token(id string) verifier.Token {
	machine, ok := l.inventory.ByToken(id)
	if !ok || machine.Disputed {
		return verifier.Token{}
	}
	return verifier.Token{Known: true, Machine: verifier.MachineRef{Name: machine.Name}}
}

// partBudget is how long decisions wait for the parts of an inventory. It is less than the time for
// which others use the value that was read before (lastgood.Refresher). A slower part is read on in
// the background, and its last good value is used meanwhile. The first time there is none, and
// decisions wait for readTimeout.
const partBudget = 1500 * time.Millisecond

// Inventory is an inventory of one or more parts: files, or entries of ConfigMaps. Each part has its
// own last good value, so a broken one takes no other part's machines away.
type Inventory struct {
	maxAge    time.Duration
	parts     []*inventoryPart
	refresher lastgood.Refresher
	list      atomic.Pointer[machineList]

	// The refresher guards what follows. merged are the values that list was made of, and started
	// says that the parts were read before.
	merged  []*inventory.Part
	started bool
}

// NewInventory returns the inventory in the file at path, which is read again once the last read is
// older than maxAge. It reads nothing yet.
func NewInventory(path string, maxAge time.Duration) *Inventory {
	return NewFileInventory([]string{path}, maxAge)
}

// NewFileInventory returns the inventory in several files, as NewInventory does for one.
func NewFileInventory(paths []string, maxAge time.Duration) *Inventory {
	i := &Inventory{maxAge: maxAge}
	for _, path := range paths {
		name := partName(path, len(paths))
		i.parts = append(i.parts, &inventoryPart{name: name, source: newPartFile(name, path)})
	}
	return i
}

// ConfigMapEntry is an entry of a ConfigMap.
type ConfigMapEntry struct {
	ConfigMap types.NamespacedName
	Key       string
}

// NewConfigMapInventory returns the inventory in entries of ConfigMaps. It reads nothing yet. The
// reader must not be a cache.
func NewConfigMapInventory(reader client.Reader, entries ...ConfigMapEntry) *Inventory {
	i := &Inventory{maxAge: maxAge}
	for _, entry := range entries {
		name := partName("configmap "+entry.ConfigMap.Name+"/"+entry.Key, len(entries))
		i.parts = append(i.parts, &inventoryPart{name: name, source: &partConfigMap{ConfigMapEntry: entry, name: name, reader: reader}})
	}
	return i
}

// partName returns the name of a part. The only part of an inventory has none.
func partName(name string, parts int) string {
	if parts == 1 {
		return ""
	}
	return name
}

// Latest returns the machines of all parts that are known. It fails if no part is.
func (i *Inventory) Latest(ctx context.Context, now time.Time) (*inventory.Inventory, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.inventory, nil
}

// Machines returns all machines, in a slice of the caller's own.
func (i *Inventory) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.owned(), nil
}

// Shared returns all machines. They stay the same slice until the inventory changes, and nobody may
// change them.
func (i *Inventory) Shared(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.machines, nil
}

// Token returns the machine that has this bootstrap token.
func (i *Inventory) Token(ctx context.Context, id string, now time.Time) (verifier.Token, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return verifier.Token{}, err
	}
	return list.token(id), nil
}

// Problem returns what keeps the latest content of a part from being used, nil if all is in use.
func (i *Inventory) Problem() error {
	var problems []error
	for _, p := range i.parts {
		problems = append(problems, p.Problem())
	}
	return errors.Join(problems...)
}

// States returns the state of each part, and whether entries contradict each other.
func (i *Inventory) States() []State {
	conflicts := State{Name: NameConflicts}
	var all []State
	for _, p := range i.parts {
		s := State{Name: NameInventory, Problem: p.Problem(), LastRead: p.source.LastRead()}
		if p.name != "" {
			s.Name += " " + p.name
		}
		if s.LastRead.After(conflicts.LastRead) {
			conflicts.LastRead = s.LastRead
		}
		all = append(all, s)
	}
	if list := i.list.Load(); list != nil {
		conflicts.Problem = conflictsOf(list.inventory)
	}
	return append(all, conflicts)
}

// conflictsOf returns an error that names contradictions between entries, nil if there is none.
func conflictsOf(merged *inventory.Inventory) error {
	const named = 3
	conflicts := merged.Conflicts()
	var problems []string
	for _, conflict := range conflicts[:min(len(conflicts), named)] {
		problems = append(problems, conflict.String())
	}
	switch more := len(conflicts) - named; {
	case len(conflicts) == 0:
		return nil
	case more > 0:
		problems = append(problems, fmt.Sprintf("and %d more conflicts", more))
	}
	return errors.New(strings.Join(problems, "; "))
}

func (i *Inventory) latest(ctx context.Context, now time.Time) (*machineList, error) {
	i.refresher.Refresh(now, i.maxAge, func() { i.refresh(ctx) })
	if list := i.list.Load(); list != nil {
		return list, nil
	}
	if err := i.Problem(); err != nil {
		return nil, err
	}
	return nil, errors.New("inventory: there is none yet")
}

// refresh reads all parts at once, and merges them if one has changed.
func (i *Inventory) refresh(ctx context.Context) {
	if len(i.parts) == 1 {
		i.parts[0].read(ctx) // it delays no other part
	} else {
		i.readAll(ctx)
	}
	parts, known := make([]*inventory.Part, len(i.parts)), false
	for n, p := range i.parts {
		parts[n] = p.latest.Load()
		known = known || parts[n] != nil
	}
	if known && (i.merged == nil || !slices.Equal(parts, i.merged)) {
		i.merged = parts
		i.list.Store(newMachineList(inventory.Merge(parts...)))
	}
}

// readAll reads all parts, and waits for them within the budget.
func (i *Inventory) readAll(ctx context.Context) {
	limit := partBudget
	if !i.started {
		limit, i.started = readTimeout, true
	}
	budget, end := context.WithTimeout(ctx, limit)
	defer end()
	var began []<-chan struct{}
	for _, p := range i.parts {
		if p.reading.CompareAndSwap(false, true) { // else an earlier read is still running, and nobody waits for it
			done := make(chan struct{})
			began = append(began, done)
			go func() {
				defer close(done)
				p.read(context.WithoutCancel(ctx)) // others use what this decision reads
				p.reading.Store(false)
			}()
		}
	}
	for _, done := range began {
		select {
		case <-done:
		case <-budget.Done():
		}
	}
	for _, p := range i.parts {
		p.slow.Store(p.reading.Load())
	}
}

// inventoryPart is a part of an inventory.
type inventoryPart struct {
	// name is empty if there is one part only.
	name   string
	source partSource
	// latest is the last good value, nil while there is none.
	latest atomic.Pointer[inventory.Part]
	// reading says that a read is under way, and slow that it takes longer than the budget.
	reading, slow atomic.Bool
}

// partSource reads a part.
type partSource interface {
	// read reads the part, and returns its last good value, nil if there is none.
	read(ctx context.Context) *inventory.Part
	Problem() error
	LastRead() time.Time
}

func (p *inventoryPart) read(ctx context.Context) {
	if part := p.source.read(ctx); part != nil {
		p.latest.Store(part)
	}
}

// Problem returns what keeps the part's latest content from being used.
func (p *inventoryPart) Problem() error {
	if p.slow.Load() {
		return fmt.Errorf("inventory: %s: reading it takes long", p.name)
	}
	return p.source.Problem()
}

// partFile is a part in a file.
type partFile struct{ lastgood.File[*inventory.Part] }

func newPartFile(name, path string) *partFile {
	return &partFile{lastgood.File[*inventory.Part]{
		Name: "inventory", Path: path, MaxSize: inventory.MaxSize,
		Parse: func(content []byte) (*inventory.Part, error) { return inventory.ParsePart(name, content) },
	}}
}

func (f *partFile) read(context.Context) *inventory.Part {
	part, _ := f.Get(time.Time{}) // Problem returns the error; without a maximum age the time does not matter
	return part
}

// partConfigMap is a part in an entry of a ConfigMap.
type partConfigMap struct {
	ConfigMapEntry
	name   string
	reader client.Reader
	value  lastgood.Value[*inventory.Part]
	// seen is the ConfigMap's version that was read last, and sum the digest of the entry in it.
	// fullRead is when that was.
	seen, sum string
	fullRead  time.Time
}

// fullReadInterval is how often a ConfigMap is read whole although its version is the same. After a
// restore of etcd, the version of another content may be the same by chance.
const fullReadInterval = time.Minute

// Problem returns why the latest content is not in use.
func (c *partConfigMap) Problem() error { return c.value.Problem() }

// LastRead returns when the ConfigMap was last read and valid, zero if it never was.
func (c *partConfigMap) LastRead() time.Time { return c.value.LastRead() }

func (c *partConfigMap) read(ctx context.Context) *inventory.Part {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := c.refresh(ctx); err != nil {
		c.value.Fail(fmt.Errorf("inventory: configmap %s: %w", c.ConfigMap, err))
	}
	part, _ := c.value.Get()
	return part
}

// refresh reads the ConfigMap whole only if its metadata has changed: it may have a megabyte, and
// is read twice a second.
func (c *partConfigMap) refresh(ctx context.Context) error {
	if c.seen != "" && time.Since(c.fullRead) < fullReadInterval {
		metadata := &metav1.PartialObjectMetadata{}
		metadata.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
		if err := c.reader.Get(ctx, c.ConfigMap, metadata); err != nil {
			return err
		}
		if identityOf(metadata) == c.seen {
			_ = c.offer(c.sum, nil) // the verdict on it is known
			return nil
		}
	}
	object := &corev1.ConfigMap{}
	if err := c.reader.Get(ctx, c.ConfigMap, object); err != nil {
		return err
	}
	c.seen = ""
	content, ok := object.Data[c.Key]
	if !ok {
		return fmt.Errorf("it has no entry %q", c.Key)
	}
	sum := sha256.Sum256([]byte(content))
	_ = c.offer(string(sum[:]), []byte(content)) // Problem returns it
	c.seen, c.sum, c.fullRead = identityOf(object), string(sum[:]), time.Now()
	return nil
}

func (c *partConfigMap) offer(sum string, content []byte) error {
	return c.value.Offer(sum, func() (*inventory.Part, error) { return inventory.ParsePart(c.name, content) })
}

// identityOf identifies the content of an object, also if it was deleted and made anew.
func identityOf(object client.Object) string {
	return string(object.GetUID()) + "/" + object.GetResourceVersion()
}
