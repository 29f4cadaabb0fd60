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
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// machineList is an inventory, and its machines converted for the rules.
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
		// the missing part may contradict this one, so no EK must be replaced
		if !merged.Complete() {
			machine.UnavailableSources = []verifier.EKSource{verifier.EKInventory}
		}
		for _, ek := range m.EKs {
			machine.EKs = append(machine.EKs, verifier.NamedEK{Source: verifier.EKInventory, EK: ek.Fingerprint})
		}
		list.machines = append(list.machines, machine)
	}
	return list
}

// owned returns a deep copy of the machines, which the caller may change.
func (l *machineList) owned() []verifier.Machine {
	own := slices.Clone(l.machines)
	for i := range own {
		m := &own[i]
		m.Names, m.EKs = slices.Clone(m.Names), slices.Clone(m.EKs)
		m.Addresses.DNSNames, m.Addresses.IPs = slices.Clone(m.Addresses.DNSNames), slices.Clone(m.Addresses.IPs)
	}
	return own
}

// token returns the machine that a bootstrap token was made for. It returns the zero value for an
// unlisted token, which may be added later. It also returns the zero value for a disputed machine's
// token, since the token may belong to another machine.
func (l *machineList) token(id string) verifier.Token {
	machine, ok := l.inventory.ByToken(id)
	if !ok || machine.Disputed {
		return verifier.Token{}
	}
	return verifier.Token{Known: true, Machine: verifier.MachineRef{Name: machine.Name}}
}

// partBudget bounds how long decisions wait for the parts of an inventory. It is less than the time
// for which others use the previous value (lastgood.Refresher). The read of a slower part continues
// in the background. Its last known good value is used meanwhile. At the first read there is none,
// so decisions wait for up to readTimeout.
const partBudget = 1500 * time.Millisecond

// Inventory is an inventory of one or more parts: files, or entries of ConfigMaps. Each part has
// its own last known good value, so a broken part does not remove the machines of others.
type Inventory struct {
	maxAge    time.Duration
	parts     []*inventoryPart
	refresher lastgood.Refresher
	list      atomic.Pointer[machineList]

	// The refresher guards the fields below. merged are the parts that list was made from. started
	// says that the parts were read before.
	merged  []*inventory.Part
	started bool
}

// NewInventory returns the inventory in the file at path. A call reads the file again if the last
// read is older than maxAge. NewInventory itself reads nothing.
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

// partName returns the name of a part, "" for the only part of an inventory.
func partName(name string, parts int) string {
	if parts == 1 {
		return ""
	}
	return name
}

// Latest returns the machines of all known parts. It fails if no part is known.
func (i *Inventory) Latest(ctx context.Context, now time.Time) (*inventory.Inventory, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.inventory, nil
}

// Machines returns all machines, in a slice that the caller may change.
func (i *Inventory) Machines(ctx context.Context, now time.Time) ([]verifier.Machine, error) {
	list, err := i.latest(ctx, now)
	if err != nil {
		return nil, err
	}
	return list.owned(), nil
}

// Shared returns all machines. It returns the same slice until the inventory changes. The caller
// must not change it.
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

// Problem returns why the latest content of a part is not used, nil if the latest content of all
// parts is.
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
		problems = append(problems, "and "+text.Count(more, "more conflict"))
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
		i.parts[0].read(ctx) // the only part cannot delay another one
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
		// otherwise an earlier read is still running, and no decision waits for it
		if p.reading.CompareAndSwap(false, true) {
			done := make(chan struct{})
			began = append(began, done)
			go func() {
				defer close(done)
				p.read(context.WithoutCancel(ctx)) // other decisions use the result, too
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
	// latest is the last known good value, nil while there is none.
	latest atomic.Pointer[inventory.Part]
	// reading says that a read is running. slow says that it takes longer than the budget.
	reading, slow atomic.Bool
}

// partSource reads a part.
type partSource interface {
	// read reads the part, and returns its last known good value, nil if there is none.
	read(ctx context.Context) *inventory.Part
	Problem() error
	LastRead() time.Time
}

func (p *inventoryPart) read(ctx context.Context) {
	if part := p.source.read(ctx); part != nil {
		p.latest.Store(part)
	}
}

// Problem returns why the part's latest content is not used, nil if it is.
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
	// Problem returns the error; without a maximum age the time does not matter
	part, _ := f.Get(time.Time{})
	return part
}

// partConfigMap is a part in an entry of a ConfigMap.
type partConfigMap struct {
	ConfigMapEntry
	name   string
	reader client.Reader
	value  lastgood.Value[*inventory.Part]
	// seen is the version of the ConfigMap that was last read, at the time fullRead. sum is the
	// digest of its entry.
	seen, sum string
	fullRead  time.Time
}

// fullReadInterval is the time after which a ConfigMap is read whole although its version is the
// same. After an etcd restore, other content may have the same version by chance.
const fullReadInterval = time.Minute

// Problem returns why the latest content is not used, nil if it is.
func (c *partConfigMap) Problem() error { return c.value.Problem() }

// LastRead returns the time when valid content was last read, zero if never.
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
			_ = c.offer(c.sum, nil) // the same content, whose verdict is known
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
	_ = c.offer(string(sum[:]), []byte(content)) // Problem returns the error
	c.seen, c.sum, c.fullRead = identityOf(object), string(sum[:]), time.Now()
	return nil
}

func (c *partConfigMap) offer(sum string, content []byte) error {
	return c.value.Offer(sum, func() (*inventory.Part, error) { return inventory.ParsePart(c.name, content) })
}

// identityOf identifies the content of an object, also after it was deleted and created again.
func identityOf(object client.Object) string {
	return string(object.GetUID()) + "/" + object.GetResourceVersion()
}
