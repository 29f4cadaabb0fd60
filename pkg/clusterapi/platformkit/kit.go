// SPDX-License-Identifier: Apache-2.0

// Package platformkit implements clusterapi.EKTrust for a platform whose API names the endorsement
// keys of its machines. An adapter implements Platform: three methods that ask the platform. The
// kit does the rest: it decides when to ask, and which answers count.
//
// docs/providers.md shows how to write an adapter. Package platformkittest tests it.
package platformkit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/clusterapi"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// Platform asks one platform's API. Its methods run concurrently. They must not retry, because the
// kit does.
type Platform interface {
	// Location returns where the platform has the machine, as its provider ID says. Find gets this
	// text. Location makes no call. An error refuses the machine until its object changes, such as
	// for the provider ID of another platform. Parse strictly, with Match.
	Location(m clusterapi.PlatformMachine) (string, error)
	// Find returns the instances that exist at the locations of machines of one Cluster, by as few
	// calls as the API allows. A location without an instance is left out. With an error, the
	// returned instances count nevertheless, and the other locations keep their last answers.
	Find(ctx context.Context, cluster types.NamespacedName, locations []string) ([]Instance, error)
	// EndorsementKeys returns the fingerprints of all endorsement keys of an instance, at most 16,
	// or an error: a node may show any of them. An empty list says that the instance has no TPM.
	// Never return it for keys that could not be read. A nil list is an error.
	EndorsementKeys(ctx context.Context, instance Instance) ([]tpm.Fingerprint, error)
}

// Instance is a machine of the platform, as Find found it.
type Instance struct {
	// Location is the one that Find was asked for.
	Location string
	// ID is immutable, and unique on this platform. An instance that replaces this one at the same
	// location has another ID. EKs are cached by ID.
	ID string
	// Version changes when the EKs may have changed. They are then read again at once. Optional.
	Version string
	// Domain is where no two instances may have the same EK, such as a tenant's namespace. A tenant
	// who copies an EK of another domain takes away no answer there. Default: the whole platform.
	Domain string
	// Refused is why this instance must not name the EKs of the machines at its location. They
	// wait, and their last answers are dropped. If it is set, only Location must be set, too.
	Refused error
	// ProviderID is the machine's provider ID, for platforms where it follows from the location
	// (clusterapi.ProviderIDs). Optional.
	ProviderID string
	// Addresses are for instances of MachinePools (clusterapi.PlatformAnswer).
	Addresses clusterv1.MachineAddresses
	// Data passes what Find has read to EndorsementKeys. Optional.
	Data any
}

// Options configure a Kit. The zero value has the defaults.
type Options struct {
	// Concurrency limits the calls of Platform.EndorsementKeys that one call of
	// Kit.EndorsementKeys runs at a time. Default: 8.
	Concurrency int
	// ReadTimeout limits one call of EndorsementKeys. Default: 10 s.
	ReadTimeout time.Duration
	// Patience limits how long machines with an answer wait for others. If no read begins or
	// ends for this time, Kit.EndorsementKeys returns, and the reads continue. Default: 3 s.
	Patience time.Duration
	// Refresh is how old EKs may be before they are read again. Default: 1 h.
	Refresh time.Duration
}

const (
	// findTimeout limits Find. The rest of the 30 s is for reads of what it found.
	findTimeout = 20 * time.Second
	// readWindow is how long one call of Kit.EndorsementKeys starts reads. The next call starts the
	// rest.
	readWindow = 20 * time.Second
	// maxReaders limits the calls of EndorsementKeys that run at a time for all Clusters. More of
	// them would spend the budget on first calls of reads, and time out before their second ones.
	maxReaders = 16
	// pausedRetry is how long a read waits if there are too many calls.
	pausedRetry = time.Second
	// firstRetry and maxRetry bound the exponential back-off of an instance whose EKs cannot be
	// read. A new Version ends the back-off early, at most once in versionRetry.
	firstRetry, maxRetry, versionRetry = 15 * time.Second, 10 * time.Minute, time.Minute
	// expiry is when an instance is dropped that no Cluster asks about. Until then another instance
	// with one of its EKs is a copy.
	expiry = 10 * time.Minute
)

// Kit is a clusterapi.EKTrust for a Platform. Each of its calls asks which instances exist. It
// reads EKs once for each instance, and again hourly.
//
// The last known EKs count until others are read, or the instance is gone. They have no limit of
// age, so that a platform that is down stops no renewal.
type Kit struct {
	platform Platform
	options  Options

	// readers has an element for each call of EndorsementKeys that runs.
	readers chan struct{}

	mu        sync.Mutex
	instances map[string]*cachedKeys // by Instance.ID
	ids       map[string]string      // of instances, by location
	owners    map[ownedEK]map[string]bool
}

var _ clusterapi.EKTrust = (*Kit)(nil)

// cachedKeys are the EKs of an instance.
type cachedKeys struct {
	location, domain string
	// used is when a Cluster last asked about the instance.
	used time.Time
	// eks are valid if known is set. due is when they are read again.
	eks   []tpm.Fingerprint
	known bool
	due   time.Time
	// version and began are Instance.Version and the time at the start of the last read. reading
	// says that it has not ended.
	version string
	began   time.Time
	reading bool
	// err is why the last read failed. failures counts the reads that failed since the last one
	// that succeeded.
	err      error
	failures int
}

// dueRead is an instance whose EKs are to be read into cached.
type dueRead struct {
	instance Instance
	cached   *cachedKeys
}

// ownedEK is an EK in a domain, where it must belong to one instance only.
type ownedEK struct {
	domain string
	ek     tpm.Fingerprint
}

// New returns a Kit for a platform.
func New(platform Platform, options Options) *Kit {
	options.Concurrency = cmp.Or(options.Concurrency, 8)
	options.ReadTimeout = cmp.Or(options.ReadTimeout, 10*time.Second)
	options.Patience = cmp.Or(options.Patience, 3*time.Second)
	options.Refresh = cmp.Or(options.Refresh, time.Hour)
	return &Kit{
		platform: platform, options: options, readers: make(chan struct{}, maxReaders),
		instances: map[string]*cachedKeys{}, ids: map[string]string{}, owners: map[ownedEK]map[string]bool{},
	}
}

// EndorsementKeys implements clusterapi.EKTrust.
func (k *Kit) EndorsementKeys(ctx context.Context, machines []clusterapi.PlatformMachine) (map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer, error) {
	answers := make(map[clusterapi.PlatformMachine]clusterapi.PlatformAnswer, len(machines))
	var problems text.Problems
	if len(machines) == 0 {
		return answers, nil
	}

	// 1. Where is each machine?
	at := map[string][]clusterapi.PlatformMachine{}
	for _, m := range machines {
		location, err := k.platform.Location(m)
		if err != nil {
			answers[m] = clusterapi.PlatformAnswer{Unknown: true}
			problems.Set("machine "+m.Name, err)
			continue
		}
		at[location] = append(at[location], m)
	}

	// 2. Which of them exist? One call, or a few, for all.
	locations := slices.Sorted(maps.Keys(at))
	found, gone := k.find(ctx, machines[0].Cluster, locations, &problems)
	k.forget(locations, found, gone)

	// 3. Read the EKs that are not known yet, are old, or may have changed.
	k.read(ctx, k.due(found))

	// 4. Answer for each machine, or leave it out: then its last answer counts.
	for location, of := range at {
		answer := clusterapi.PlatformAnswer{Unknown: true}
		if instance, exists := found[location]; exists {
			var err error
			if answer, err = k.answer(instance); err != nil {
				problems.Set("machine "+of[0].Name, err)
			}
		} else if !gone[location] {
			continue
		}
		for _, m := range of {
			answers[m] = answer
		}
	}
	return answers, problems.Err()
}

// find returns the instance at each location, and the locations where there is none. The others are
// in neither: it is not known whether there is one, or which.
func (k *Kit) find(ctx context.Context, cluster types.NamespacedName, locations []string, problems *text.Problems) (found map[string]Instance, gone map[string]bool) {
	found, gone = map[string]Instance{}, map[string]bool{}
	if len(locations) == 0 {
		return found, gone
	}
	limited, end := context.WithTimeout(ctx, findTimeout)
	defer end()
	instances, err := k.platform.Find(limited, cluster, locations)
	if err != nil {
		problems.Set("find", err)
	} else {
		for _, location := range locations {
			gone[location] = true
		}
	}
	seen := map[string]bool{}
	for _, i := range instances {
		_, asked := slices.BinarySearch(locations, i.Location)
		delete(gone, i.Location)
		switch {
		case !asked:
			problems.Set("instance "+i.Location, errors.New("the platform's answer has it, and it was not asked for"))
		case seen[i.Location]:
			delete(found, i.Location)
			problems.Set("instance "+i.Location, errors.New("the platform's answer has it more than once"))
		case i.ID == "" && i.Refused == nil:
			problems.Set("instance "+i.Location, errors.New("the platform's answer does not say which instance it is"))
		default:
			found[i.Location] = i
		}
		seen[i.Location] = true
	}
	return found, gone
}

// forget drops the EKs of instances that are gone, and of those that no Cluster asks about.
func (k *Kit) forget(locations []string, found map[string]Instance, gone map[string]bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, location := range locations {
		id, cached := k.ids[location]
		switch instance, exists := found[location]; {
		case !cached:
		case gone[location], exists && (instance.Refused != nil || instance.ID != id):
			k.drop(id)
		default:
			k.instances[id].used = time.Now()
		}
	}
	for id, c := range k.instances {
		if time.Since(c.used) > expiry {
			k.drop(id)
		}
	}
}

func (k *Kit) drop(id string) {
	c := k.instances[id]
	k.own(id, c, nil)
	delete(k.instances, id)
	if k.ids[c.location] == id {
		delete(k.ids, c.location)
	}
}

// due returns the instances whose EKs have to be read, in random order, so that no instance is
// always last. It marks them as being read.
func (k *Kit) due(found map[string]Instance) []dueRead {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	var due []dueRead
	for _, i := range found {
		if i.Refused != nil {
			continue
		}
		c := k.instances[i.ID]
		if c == nil {
			c = &cachedKeys{domain: i.Domain}
			k.instances[i.ID] = c
		}
		if k.ids[c.location] == i.ID { // its location may have changed
			delete(k.ids, c.location)
		}
		c.location, k.ids[i.Location], c.used = i.Location, i.ID, now
		changed := i.Version != c.version && (c.failures == 0 || now.Sub(c.began) >= versionRetry)
		if !c.reading && (changed || !now.Before(c.due)) {
			c.reading, c.began, c.version = true, now, i.Version
			due = append(due, dueRead{i, c})
		}
	}
	rand.Shuffle(len(due), func(a, b int) { due[a], due[b] = due[b], due[a] }) //nolint:gosec // G404: an order
	return due
}

// read reads the EKs of instances. It returns before the last read has ended if some run, and none
// begins or ends for Options.Patience, or after readWindow. Reads that have begun continue, and the
// next call uses their results.
func (k *Kit) read(ctx context.Context, due []dueRead) {
	if len(due) == 0 {
		return
	}
	window, end := context.WithTimeout(ctx, readWindow)
	defer end()
	began, ended := make(chan struct{}, len(due)), make(chan bool, len(due)) // true: it began
	var readers errgroup.Group
	readers.SetLimit(k.options.Concurrency)
	go func() {
		for _, d := range due {
			readers.Go(func() error {
				ended <- k.readOne(window, d, began)
				return nil
			})
		}
	}()
	quiet := time.NewTimer(k.options.Patience)
	defer quiet.Stop()
	for waiting, running := len(due), 0; waiting > 0; {
		select {
		case <-began:
			running++
		case ran := <-ended:
			if waiting--; ran {
				running--
			}
		case <-quiet.C:
			if running > 0 {
				return
			}
			// all wait for reads of other Clusters
		case <-window.Done():
			return
		}
		quiet.Reset(k.options.Patience)
	}
}

// readOne reads the EKs of one instance, unless the window is over, and reports whether it began. A
// read that has begun ends by its own timeout only.
func (k *Kit) readOne(window context.Context, d dueRead, begins chan<- struct{}) (began bool) {
	var eks []tpm.Fingerprint
	var err error
	select {
	case k.readers <- struct{}{}:
		if began = window.Err() == nil; began {
			begins <- struct{}{}
			eks, err = k.call(window, d.instance)
		}
		<-k.readers
	case <-window.Done():
	}

	k.mu.Lock()
	defer k.mu.Unlock()
	c, now := d.cached, time.Now()
	c.reading = false
	switch {
	case k.instances[d.instance.ID] != c: // it was dropped meanwhile
	case !began:
		c.due = now
	case errors.Is(err, ErrPaused): // the instance did not cause it, so no back-off
		c.err, c.due = err, now
	case err != nil:
		c.err, c.due = err, now.Add(min(firstRetry<<min(c.failures, 10), maxRetry))
		c.failures++
	default:
		k.own(d.instance.ID, c, slices.Clone(eks))
		c.known, c.err, c.failures = true, nil, 0
		// spread, so that instances that were found together are not read again together
		c.due = now.Add(k.options.Refresh - rand.N(k.options.Refresh/10+1)) //nolint:gosec // G404: a delay
	}
	return began
}

// call asks the platform for the EKs of an instance. While there are too many calls, it waits and
// tries again, until the window is over.
func (k *Kit) call(window context.Context, i Instance) ([]tpm.Fingerprint, error) {
	for {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(window), k.options.ReadTimeout)
		eks, err := k.platform.EndorsementKeys(ctx, i)
		cancel()
		switch {
		case err == nil && eks == nil:
			return nil, errors.New("the answer has no list of endorsement keys")
		case err == nil:
			return eks, clusterapi.CheckEKs(eks)
		case !errors.Is(err, ErrPaused):
			return nil, err
		}
		select {
		case <-time.After(pausedRetry):
		case <-window.Done():
			return nil, err
		}
	}
}

// own stores which EKs an instance has. It replaces the former ones.
func (k *Kit) own(id string, c *cachedKeys, eks []tpm.Fingerprint) {
	for _, ek := range c.eks {
		owned := ownedEK{c.domain, ek}
		if delete(k.owners[owned], id); len(k.owners[owned]) == 0 {
			delete(k.owners, owned)
		}
	}
	for _, ek := range eks {
		owned := ownedEK{c.domain, ek}
		if k.owners[owned] == nil {
			k.owners[owned] = map[string]bool{}
		}
		k.owners[owned][id] = true
	}
	c.eks = eks
}

// answer returns the answer for the machines of an instance, and the problem to report. If two
// instances have one EK, one is a copy. Neither has an answer, since nothing says which one the EK
// was made for.
func (k *Kit) answer(i Instance) (clusterapi.PlatformAnswer, error) {
	unknown := clusterapi.PlatformAnswer{Unknown: true}
	if i.Refused != nil {
		return unknown, i.Refused
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.instances[i.ID]
	switch {
	case c == nil: // another Cluster's call found another instance at the location meanwhile
		return unknown, nil
	case !c.known:
		return unknown, c.err
	}
	for _, ek := range c.eks {
		if owners := k.owners[ownedEK{c.domain, ek}]; len(owners) > 1 {
			return unknown, fmt.Errorf("the endorsement key %.16s belongs to %d instances, such as %s: a copied TPM identifies none of them",
				ek.String(), len(owners), slices.Sorted(maps.Keys(owners))[:2])
		}
	}
	return clusterapi.PlatformAnswer{EKs: slices.Clone(c.eks), ProviderID: i.ProviderID, Addresses: i.Addresses}, c.err
}
