// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
)

// EKTrust is a platform's API that knows which TPM each machine has, such as vCenter's, EC2's or
// Compute Engine's. platformkit.Kit is the usual implementation.
//
// Its answers are a root of trust. They must come from the platform itself. They must never be
// anything that a guest can write, such as guest properties, tags that the instance may set, or
// reports of an agent.
type EKTrust interface {
	// EndorsementKeys returns the platform's answers about machines of one Cluster, each under the
	// value that it was asked with. A machine that the platform does not know, or not yet, is
	// absent or Unknown, and asked about again.
	//
	// With an error, the returned answers count nevertheless, and absent machines keep their last
	// answers. Calls for different Clusters overlap. Each call has 30 s, by its context. The next
	// one for the same Cluster waits for its end.
	EndorsementKeys(ctx context.Context, machines []PlatformMachine) (map[PlatformMachine]PlatformAnswer, error)
}

// ProviderIDs is an EKTrust that also answers about Machines whose infrastructure provider has not
// set a provider ID: some set it only once the Node exists. Their answers say which one they have.
type ProviderIDs interface {
	EKTrust
	// KnowsProviderIDs marks the type. It is never called.
	KnowsProviderIDs()
}

// PlatformMachine is a machine that a platform is asked about: a Machine, or an instance of a
// MachinePool without Machines.
type PlatformMachine struct {
	// Cluster is the workload Cluster. All its objects are in its namespace.
	Cluster types.NamespacedName
	// Name and UID are the Machine's, or the MachinePool's if MachinePool is set. Only the provider
	// ID then identifies an instance.
	Name        string
	UID         types.UID
	MachinePool bool
	// ProviderID is the object's. It is empty for a Machine without one, which only a ProviderIDs
	// is asked about.
	ProviderID string
	// Infrastructure is the infrastructure provider's object: an InfraMachine, or the
	// InfraMachinePool.
	Infrastructure clusterv1.ContractVersionedObjectReference
}

// PlatformAnswer is a platform's answer about one machine.
type PlatformAnswer struct {
	// EKs are all endorsement keys of the machine, at most 16: a node may show any of them. An
	// empty list says that the machine has no TPM. Then it is not trusted on first use.
	EKs []tpm.Fingerprint
	// Unknown says that the platform does not know the machine, or not yet, or that it must not
	// have an answer. The machine waits, and is not trusted on first use.
	Unknown bool
	// ProviderID is the machine's provider ID if its object has none. Only a ProviderIDs sets it.
	// It also says that the machine is provisioned.
	ProviderID string
	// Addresses count for an instance of a MachinePool only. They are those that a Machine has in
	// its status. The operator says which types are node names (clusterAPI.nodeNames), and which
	// count for serving certificates (clusterAPI.servingAddresses).
	Addresses clusterv1.MachineAddresses
}

// EKFingerprint returns the fingerprint of an endorsement key, an *rsa.PublicKey or
// *ecdsa.PublicKey. Take the key from x509.ParsePKIXPublicKey or x509.ParseCertificate. Do not hash
// what the platform returned, since one key has several encodings.
func EKFingerprint(key crypto.PublicKey) (tpm.Fingerprint, error) {
	switch key.(type) {
	case *rsa.PublicKey, *ecdsa.PublicKey:
	default:
		return tpm.Fingerprint{}, fmt.Errorf("endorsement key: a %T is none", key)
	}
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return tpm.Fingerprint{}, fmt.Errorf("endorsement key: %w", err)
	}
	return tpm.FingerprintOf(der), nil
}

// EKFingerprintPEM returns the EKFingerprint of a key in PEM: exactly one block of type PUBLIC KEY
// (RFC 7468, section 13).
func EKFingerprintPEM(encoded string) (tpm.Fingerprint, error) {
	block, rest := pem.Decode([]byte(encoded))
	if block == nil || block.Type != "PUBLIC KEY" || len(bytes.TrimSpace(rest)) > 0 || !strings.HasPrefix(strings.TrimSpace(encoded), "-----BEGIN") {
		return tpm.Fingerprint{}, errors.New("endorsement key: it is not one PEM block of type PUBLIC KEY")
	}
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return tpm.Fingerprint{}, errors.New("endorsement key: it is not the SubjectPublicKeyInfo of an RSA or ECDSA key")
	}
	return EKFingerprint(key)
}

// CheckEKs returns an error for EKs that no PlatformAnswer may have: more than 16, or one that is
// all zeros.
func CheckEKs(eks []tpm.Fingerprint) error {
	switch {
	case len(eks) > maxEKs:
		return fmt.Errorf("it has more than %d EKs", maxEKs)
	case slices.Contains(eks, tpm.Fingerprint{}):
		return errors.New("an EK's fingerprint is all zeros")
	}
	return nil
}

const (
	// defaultPlatformInterval is how often a platform is asked about all machines.
	defaultPlatformInterval = 30 * time.Second
	minPlatformInterval     = 5 * time.Second
	// platformMinPause is the minimum time between the starts of two calls for the same Cluster.
	platformMinPause = time.Second
	// platformTimeout is how long a call may take. platformGrace after that, Problem reports that
	// the call does not end.
	platformTimeout, platformGrace = 30 * time.Second, 10 * time.Second
	// platformExpiry is when an unused Cluster is dropped, with its answers.
	platformExpiry = 10 * time.Minute
)

// platformPoller asks an EKTrust. It queries new machines at once, but at most once a second for a
// Cluster. It queries all machines at an interval. A Cluster's machines are those of the last call
// to statesOf. Decisions do not wait: they use the last answers.
//
// A manager runs its Start. All Clusters share it.
type platformPoller struct {
	trust EKTrust
	// providerIDs says that trust is a ProviderIDs.
	providerIDs bool
	interval    time.Duration
	wake        chan struct{}

	mu       sync.Mutex
	clusters map[types.NamespacedName]*platformCluster
}

// platformCluster has the machines of one Cluster.
type platformCluster struct {
	machines map[PlatformMachine]platformState
	// used is when statesOf was last called.
	used time.Time
	// called is when the last call began, and polled when the last call about all machines began.
	// calling says that the last call has not ended.
	called, polled time.Time
	calling        bool
	problem        error
	// answered is when the last call without a problem ended.
	answered time.Time
}

// platformState is the platform's answer about a machine.
type platformState struct {
	// asked says that a call about the machine has begun. answered says that the platform knows the
	// machine, by its last answer.
	asked, answered bool
	eks             []string
	providerID      string
	names           []verifier.NodeName
	addresses       []machineAddress
}

// newPlatformPoller returns a platformPoller. The interval is at least 5 s. 0 is
// defaultPlatformInterval.
func newPlatformPoller(trust EKTrust, interval time.Duration) *platformPoller {
	if interval == 0 {
		interval = defaultPlatformInterval
	}
	_, providerIDs := trust.(ProviderIDs)
	return &platformPoller{
		trust: trust, providerIDs: providerIDs, interval: max(interval, minPlatformInterval), wake: make(chan struct{}, 1),
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

// Problem returns the error of the last call for a Cluster, nil if there was none.
func (p *platformPoller) Problem(cluster types.NamespacedName) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[cluster]
	switch {
	case c == nil:
		return nil
	case c.calling && time.Since(c.called) > platformTimeout+platformGrace:
		return fmt.Errorf("platform: a call that began at %s has not ended", c.called.UTC().Format(time.RFC3339))
	}
	return c.problem
}

// state returns the state of the platform as a source of a Cluster's EKs.
func (p *platformPoller) state(cluster types.NamespacedName) sources.State {
	s := sources.State{Name: sources.NamePlatform, Problem: p.Problem(cluster)}
	p.mu.Lock()
	defer p.mu.Unlock()
	if c := p.clusters[cluster]; c != nil {
		s.LastRead = c.answered
	}
	return s
}

// statesOf returns the states of a Cluster's machines. From then on the platform is asked about
// these machines, and no others of the Cluster.
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
		state, known := c.machines[m]
		if without := m; !known && m.ProviderID != "" {
			// The object has just got the provider ID that the platform gave it before.
			if without.ProviderID = ""; c.machines[without].providerID == m.ProviderID {
				state = c.machines[without]
				state.asked = false
			}
		}
		current[m] = state
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

// dueBatches returns the machines to ask about now, by Cluster, and marks them as asked.
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

// call asks about some machines of a Cluster, and stores the answers.
func (p *platformPoller) call(ctx context.Context, cluster types.NamespacedName, machines []PlatformMachine) {
	limited, cancel := context.WithTimeout(ctx, platformTimeout)
	defer cancel()
	answers, err := p.trust.EndorsementKeys(limited, slices.Clone(machines))

	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[cluster] // it is not dropped while calling
	c.calling = false
	var problems text.Problems
	for _, m := range machines {
		if _, still := c.machines[m]; !still {
			continue
		}
		answer, ok := answers[m]
		if !ok && err != nil {
			continue
		}
		state := platformState{asked: true, answered: ok && !answer.Unknown}
		if state.answered {
			if err := state.update(answer); err != nil {
				problems.Set("platform: machine "+m.Name, err)
				continue
			}
		}
		c.machines[m] = state
	}
	if err != nil {
		err = fmt.Errorf("platform: %w", err)
	}
	if c.problem = text.JoinLine([]error{err, problems.Err()}); c.problem == nil {
		c.answered = time.Now()
	}
}

// update checks an answer and stores it.
func (s *platformState) update(answer PlatformAnswer) error {
	if err := CheckEKs(answer.EKs); err != nil {
		return err
	}
	for _, ek := range answer.EKs {
		if !slices.Contains(s.eks, ek.String()) {
			s.eks = append(s.eks, ek.String())
		}
	}
	s.providerID = answer.ProviderID
	s.addresses = readAddresses(answer.Addresses)
	s.names = namesOf(s.addresses)
	return nil
}

// addPlatform adds the EKs of the platform's last answers. The answers also have the names and
// addresses of MachinePools' instances, and the provider IDs of Machines without one.
func (s *machineSource) addPlatform(entries []machineEntry) {
	wanted := make([]PlatformMachine, len(entries))
	var asked []PlatformMachine
	for i := range entries {
		m := &entries[i]
		if m.machine.ProviderID == "" && !s.Platform.providerIDs {
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
		if m.machine.ProviderID == "" && state.providerID != "" {
			m.machine.ProviderID = state.providerID
			m.machine.Ready = m.bootstrapped
		}
		if !state.answered {
			m.markUnavailable(verifier.EKPlatform)
		}
		m.withoutTPM = state.answered && len(state.eks) == 0
		m.addEKs(verifier.EKPlatform, state.eks...)
		if m.pool {
			m.addNames(s.servingAddresses(state.addresses), state.names...)
		}
	}
}
