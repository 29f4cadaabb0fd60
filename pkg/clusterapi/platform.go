// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// EKTrust is a platform's API, such as vCenter's, EC2's or Compute's, that knows which TPM it gave a machine. An infrastructure provider
// implements it in a binary of its own. What it answers is a root of trust: it must come from the platform itself, and never be anything that a
// guest can write, such as guest properties, tags that the instance may set, or what an agent in it reports.
type EKTrust interface {
	// EndorsementKeys returns what the platform says of machines of one Cluster, under the very value that it was asked with. A machine that it
	// does not know, or not yet, is absent, and asked about again. With an error what is returned counts all the same, and of the others their
	// last answers stay. Calls for different Clusters overlap; each has 30 s, by its context, and the next for the same Cluster waits for its end.
	EndorsementKeys(ctx context.Context, machines []PlatformMachine) (map[PlatformMachine]PlatformAnswer, error)
}

// PlatformMachine is a machine that a platform is asked about: a Machine, or an instance of a MachinePool that has no Machines.
type PlatformMachine struct {
	// Cluster is the workload Cluster. All that is of it is in its namespace.
	Cluster types.NamespacedName
	// Name and UID are the Machine's, or the MachinePool's if that is set: then only the provider ID tells its instances apart.
	Name        string
	UID         types.UID
	MachinePool bool
	// ProviderID is never empty: a machine without one is not asked about.
	ProviderID string
	// Infrastructure is what the infrastructure provider made of it: an InfraMachine, or the InfraMachinePool.
	Infrastructure clusterv1.ContractVersionedObjectReference
}

// PlatformAnswer is what a platform says of one machine.
type PlatformAnswer struct {
	// EKs are the machine's endorsement keys, at most 16. Machines mostly have one of each kind of key, and a node shows one of them: give all.
	// None is an answer, too: the machine has no TPM.
	EKs []tpm.Fingerprint
	// Addresses are, for an instance of a MachinePool, those that a Machine has in its status; for others they do not count. The operator
	// says of which type node names are (clusterAPI.nodeNames), and for which nodes get serving certificates (clusterAPI.servingAddresses).
	Addresses clusterv1.MachineAddresses
}

// EKFingerprint returns the fingerprint of an endorsement key, an *rsa.PublicKey or *ecdsa.PublicKey. Take the key from x509.ParsePKIXPublicKey
// or x509.ParseCertificate, and do not hash what the platform gave: one key has several encodings.
func EKFingerprint(key crypto.PublicKey) (tpm.Fingerprint, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return tpm.Fingerprint{}, fmt.Errorf("endorsement key: %w", err)
	}
	return tpm.FingerprintOf(der), nil
}

const (
	// defaultPlatformInterval is how often a platform is asked about all machines.
	defaultPlatformInterval = 30 * time.Second
	minPlatformInterval     = 5 * time.Second
	// platformMinPause is how soon after a call the next may be made for the same Cluster.
	platformMinPause = time.Second
	// platformTimeout is how long a call may take, and platformGrace how long after that it is said that it does not end.
	platformTimeout, platformGrace = 30 * time.Second, 10 * time.Second
	// platformExpiry is when a Cluster that nobody asks for any more is dropped, with its answers.
	platformExpiry = 10 * time.Minute
)

// platformPoller asks an EKTrust: about machines that are new at once, but not more than once a second for a Cluster, and about all at an interval. It
// asks about those machines that a Cluster's Machines had last. Nobody waits for an answer: Machines has what was answered last.
//
// Its Start is for a manager to run. All Clusters share it.
type platformPoller struct {
	trust    EKTrust
	interval time.Duration
	wake     chan struct{}

	mu       sync.Mutex
	clusters map[types.NamespacedName]*platformCluster
}

// platformCluster are the machines of one Cluster.
type platformCluster struct {
	machines map[PlatformMachine]platformState
	// used is when they were last wanted.
	used time.Time
	// called is when the last call began, polled when the last about all machines did; calling says that it has not ended.
	called, polled time.Time
	calling        bool
	problem        error
}

// platformState is what is known of a machine.
type platformState struct {
	// asked says that it was asked about, answered that the platform has said what there is to it.
	asked, answered bool
	eks             []string
	names           []verifier.NodeName
	addresses       []machineAddress
}

// newPlatformPoller returns a Platform. The interval is 5 s at least; 0 is DefaultPlatformInterval.
func newPlatformPoller(trust EKTrust, interval time.Duration) *platformPoller {
	if interval == 0 {
		interval = defaultPlatformInterval
	}
	return &platformPoller{
		trust: trust, interval: max(interval, minPlatformInterval), wake: make(chan struct{}, 1),
		clusters: map[types.NamespacedName]*platformCluster{},
	}
}

// Start asks until the context ends.
func (p *platformPoller) Start(ctx context.Context) error {
	var calls sync.WaitGroup
	defer calls.Wait()
	tick := time.NewTicker(platformMinPause)
	defer tick.Stop()
	for {
		for cluster, machines := range p.dueBatches(time.Now()) {
			calls.Go(func() { p.call(ctx, cluster, machines) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-p.wake:
		}
	}
}

// Problem returns what was wrong with the last call for a Cluster, nil if nothing was.
func (p *platformPoller) Problem(cluster types.NamespacedName) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[cluster]
	switch {
	case c == nil:
		return nil
	case c.calling && time.Since(c.called) > platformTimeout+platformGrace:
		return fmt.Errorf("platform: a call made at %s does not end", c.called.UTC().Format(time.RFC3339))
	}
	return c.problem
}

// statesOf returns what is known of a Cluster's machines, and has these asked about, and no others.
func (p *platformPoller) statesOf(cluster types.NamespacedName, machines []PlatformMachine) map[PlatformMachine]platformState {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[cluster]
	if c == nil {
		c = &platformCluster{}
		p.clusters[cluster] = c
	}
	c.used = time.Now()
	current, fresh := make(map[PlatformMachine]platformState, len(machines)), false
	for _, m := range machines {
		current[m] = c.machines[m]
		fresh = fresh || !current[m].asked
	}
	if c.machines = current; fresh {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
	return maps.Clone(current)
}

// dueBatches returns whom to ask about now, by Cluster, and notes that they are.
func (p *platformPoller) dueBatches(now time.Time) map[types.NamespacedName][]PlatformMachine {
	p.mu.Lock()
	defer p.mu.Unlock()
	batches := map[types.NamespacedName][]PlatformMachine{}
	for name, c := range p.clusters {
		switch {
		case c.calling || now.Sub(c.called) < platformMinPause:
			continue
		case now.Sub(c.used) >= platformExpiry:
			delete(p.clusters, name)
			continue
		}
		all := now.Sub(c.polled) >= p.interval
		var batch []PlatformMachine
		for m, state := range c.machines {
			if all || !state.asked {
				state.asked = true
				c.machines[m] = state
				batch = append(batch, m)
			}
		}
		if len(batch) == 0 {
			continue
		}
		if c.called, c.calling = now, true; all {
			c.polled = now
		}
		slices.SortFunc(batch, func(a, b PlatformMachine) int {
			return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ProviderID, b.ProviderID))
		})
		batches[name] = batch
	}
	return batches
}

// call asks about some machines of a Cluster, and takes the answers.
func (p *platformPoller) call(ctx context.Context, cluster types.NamespacedName, machines []PlatformMachine) {
	limited, cancel := context.WithTimeout(ctx, platformTimeout)
	defer cancel()
	answers, err := p.trust.EndorsementKeys(limited, slices.Clone(machines))

	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[cluster] // it is not dropped while calling
	c.calling = false
	var problems problemSet
	if err != nil {
		problems.set("platform", err)
	}
	for _, m := range machines {
		if _, still := c.machines[m]; !still {
			continue
		}
		state := platformState{asked: true, answered: true}
		answer, ok := answers[m]
		if !ok && err != nil {
			continue
		}
		if err := state.update(answer); err != nil {
			problems.set("platform: machine "+m.Name, err)
			continue
		}
		c.machines[m] = state
	}
	c.problem = problems.err()
}

// update checks an answer.
func (s *platformState) update(answer PlatformAnswer) error {
	if len(answer.EKs) > maxEKs {
		return fmt.Errorf("it has more than %d EKs", maxEKs)
	}
	for _, ek := range answer.EKs {
		if ek == (tpm.Fingerprint{}) {
			return errors.New("an EK's fingerprint is all zeros")
		}
		if !slices.Contains(s.eks, ek.String()) {
			s.eks = append(s.eks, ek.String())
		}
	}
	s.addresses = readAddresses(answer.Addresses)
	s.names = namesOf(s.addresses)
	return nil
}

// addPlatform adds the EKs that the platform last said, and to instances of MachinePools their names and addresses.
func (s *machineSource) addPlatform(entries []machineEntry) {
	wanted := make([]PlatformMachine, len(entries))
	var asked []PlatformMachine
	for i := range entries {
		m := &entries[i]
		if m.machine.ProviderID == "" {
			continue
		}
		wanted[i] = PlatformMachine{
			Cluster: s.Cluster, Name: m.owner, UID: types.UID(m.machine.Ref.UID), MachinePool: m.pool,
			ProviderID: m.machine.ProviderID, Infrastructure: m.infra,
		}
		asked = append(asked, wanted[i])
	}
	states := s.Platform.statesOf(s.Cluster, asked)
	for i := range entries {
		m, state := &entries[i], states[wanted[i]]
		if !state.answered {
			m.markUnavailable(verifier.EKPlatform)
		}
		m.addEKs(verifier.EKPlatform, state.eks...)
		if m.pool {
			m.addNames(s.servingAddresses(state.addresses), state.names...)
		}
	}
}
