// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

const (
	// attemptTimeout bounds one hello and one proof. A worker of the plugin ends after two minutes,
	// but the next one goes on with the same requests. A machine that files new ones instead makes
	// an overload longer.
	attemptTimeout = 15 * time.Minute
	// firstPause and mostPause are those of the plugin where nothing was created.
	firstPause, mostPause = time.Second, 15 * time.Second
	// mostAtOnce bounds how many machines are at it: each has connections of its own.
	mostAtOnce = 4000
	// partSize is how many machines are in one ConfigMap.
	partSize = 5000
	// fillers is how many records are written at a time.
	fillers = 8
	// validity is that of the certificates that machines begin with.
	validity = 7 * 24 * time.Hour
)

// machine is one of the fleet.
type machine struct {
	*fleet.Machine
	// ek and ak are what an inventory and a record say of its TPM.
	ek, ak string
	// kept says that its bootstrap credential was not removed after it had joined.
	kept bool

	// busy is held by the code that uses the following fields, or the embedded machine.
	busy sync.Mutex

	renewed atomic.Int64 // when it got its latest certificate, in nanoseconds
}

// makeMachines makes all machines, and what the cluster knows of those that have joined.
func (c *campaign) makeMachines() error {
	maker, err := swtpm.NewCA()
	if err != nil {
		return err
	}
	began := time.Now()
	made := func(prefix string, count int) (all []*machine, err error) {
		all = make([]*machine, count)
		err = fleet.Each(count, func(i int) (err error) {
			all[i], err = c.makeMachine(fmt.Sprintf("%s-%05d", prefix, i), maker)
			return err
		})
		return all, err
	}
	for _, group := range []struct {
		of     *[]*machine
		prefix string
		count  int
	}{{&c.machines, "n", c.size.machines}, {&c.joiners, "j", c.size.joiners}, {&c.attackers, "attacker", 2}, {&c.strangers, "stranger", 2}} {
		if *group.of, err = made(group.prefix, group.count); err != nil {
			return err
		}
	}
	c.log.say("%d TPMs were made in %s", len(c.machines)+len(c.joiners)+len(c.attackers)+len(c.strangers), time.Since(began).Round(time.Second))
	began = time.Now()
	if err := c.recordThem(slices.Concat(c.machines, c.attackers)); err != nil {
		return err
	}
	c.members = slices.Clone(c.machines)
	c.log.say("Nodes and records were written in %s", time.Since(began).Round(time.Second))
	return nil
}

func (c *campaign) makeMachine(name string, maker *swtpm.CA) (*machine, error) {
	dir := filepath.Join(c.dir, name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	made, err := fleet.NewModel(name, dir, maker)
	if err != nil {
		return nil, err
	}
	c.t.Cleanup(made.Stop)
	said, err := made.Provider.(provider.Inspector).Identify(c.ctx)
	if err != nil {
		return nil, err
	}
	identity := said.(*tpm.Identity)
	return &machine{Machine: made, ek: identity.EKs[0].Fingerprint, ak: identity.AKName, kept: rand.IntN(2) == 0}, nil
}

// recordThem makes Node, certificate and record of machines, as the controller's own account.
func (c *campaign) recordThem(machines []*machine) error {
	kubeconfig, err := controllerprocess.Kubeconfig(c.ctx, c.ControlPlane)
	if err != nil {
		return err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	store := records.NewStore(api, controllerprocess.Namespace, nil)
	var next atomic.Int64
	var wait sync.WaitGroup
	var failed atomic.Pointer[error]
	for range fillers {
		wait.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(machines)) && failed.Load() == nil; i = next.Add(1) - 1 {
				if err := c.recordOne(store, machines[i]); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	wait.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func (c *campaign) recordOne(store *records.Store, m *machine) error {
	now := time.Now()
	pair, err := c.ClientCA().IssueClient("system:node:"+m.Name, []string{"system:nodes"}, now.Add(-time.Hour), now.Add(validity))
	if err != nil {
		return err
	}
	m.Certificate, m.Key = pair.CertPEM, pair.KeyPEM
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Name}, Spec: corev1.NodeSpec{ProviderID: m.ProviderID()}}
	if _, err := c.Client().CoreV1().Nodes().Create(c.ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	request := func(round string) *certificatesv1.CertificateSigningRequest {
		return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: "node-csr-" + round + "-" + m.Name, UID: types.UID(m.Name + "-" + round)}}
	}
	hello, proof := request("hello"), request("proof")
	sum := sha256.Sum256([]byte(m.Name))
	record := verifier.Record{
		Cluster: controllerprocess.ClusterUID, Machine: verifier.MachineRef{Name: m.Name}, Provider: tpm.Name, EK: m.ek, AK: m.ak, EKSource: verifier.EKInventory,
		ProviderID: m.ProviderID(), NodeName: m.Name, HelloUID: string(hello.UID), ProofUID: string(proof.UID), FirstProofUID: string(proof.UID),
		ProofSHA256: hex.EncodeToString(sum[:]),
	}
	object, err := store.New(record)
	if err != nil {
		return err
	}
	records.SetGrant(object, record, proof, hello, now)
	if _, err := records.AddCertificate(object, proof, m.Certificate, 0, now); err != nil {
		return err
	}
	return store.Write(c.ctx, object, now)
}

// inventoryName is the ConfigMap of a part.
func inventoryName(part int) string {
	if part == 0 {
		return controllerprocess.Inventory
	}
	return fmt.Sprintf("%s-%d", controllerprocess.Inventory, part)
}

// provideInventory lists all but the strangers, in as many ConfigMaps as that takes.
func (c *campaign) provideInventory() error {
	listed := slices.Concat(c.machines, c.joiners, c.attackers)
	for len(listed) > 0 {
		count := min(partSize, len(listed))
		var entries []any
		for _, m := range listed[:count] {
			entries = append(entries, map[string]any{"nodeName": m.Name, "providerID": m.ProviderID(), "eks": []any{map[string]any{"fingerprint": m.ek}}})
		}
		content, err := yaml.Marshal(map[string]any{"apiVersion": "authenticator.cluster.x-k8s.io/v1alpha1", "kind": "MachineInventory", "machines": entries})
		if err != nil {
			return err
		}
		c.inventories, listed = append(c.inventories, content), listed[count:]
	}
	// The Role names one ConfigMap: see docs/inventory.md, "Several parts".
	roles := c.Client().RbacV1().Roles(controllerprocess.Namespace)
	role, err := roles.Get(c.ctx, controllerprocess.Account, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for i, rule := range role.Rules {
		if len(rule.Resources) == 1 && rule.Resources[0] == "configmaps" {
			for part := range c.inventories {
				if part > 0 {
					role.Rules[i].ResourceNames = append(role.Rules[i].ResourceNames, inventoryName(part))
				}
			}
		}
	}
	if _, err := roles.Update(c.ctx, role, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return c.setInventory()
}

// setInventory writes each part, whether it is there or not.
func (c *campaign) setInventory() error {
	if err := controllerprocess.SetInventory(c.ctx, c.ControlPlane, c.inventories[0]); err != nil {
		return err
	}
	maps := c.Client().CoreV1().ConfigMaps(controllerprocess.Namespace)
	for part, content := range c.inventories[1:] {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: inventoryName(part + 1)}, Data: map[string]string{controllerprocess.InventoryKey: string(content)}}
		if err := maps.Delete(c.ctx, object.Name, metav1.DeleteOptions{}); client.IgnoreNotFound(err) != nil {
			return err
		}
		if _, err := maps.Create(c.ctx, object, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// stream has machines renew at the rate of the run, and some join.
func (c *campaign) stream(ctx context.Context) {
	tick := time.NewTicker(time.Minute / time.Duration(c.size.rate))
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		m := c.nextMachine(n%c.size.joins == 0)
		if m == nil {
			c.log.skipped.Add(1)
			continue
		}
		c.wait.Go(func() {
			defer m.busy.Unlock()
			c.attest(m)
		})
	}
}

// nextMachine returns the next machine, locked. It returns nil if too many attest already.
func (c *campaign) nextMachine(joiner bool) *machine {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) >= mostAtOnce {
		return nil
	}
	if joiner && c.joined < len(c.joiners) {
		m := c.joiners[c.joined]
		c.joined++
		m.busy.Lock() // nobody else has it
		c.pending[m] = time.Now()
		return m
	}
	for len(c.first) > 0 {
		m := c.first[0]
		c.first = c.first[1:]
		if m.busy.TryLock() {
			c.pending[m] = time.Now()
			return m
		}
	}
	for range c.members {
		m := c.members[c.next%len(c.members)]
		c.next++
		if m.busy.TryLock() {
			c.pending[m] = time.Now()
			return m
		}
	}
	return nil
}

// attest has a machine get a certificate, however often it has to begin. The plugin does the same:
// after a denial of its certificate it asks with its bootstrap credential, if it still has one.
func (c *campaign) attest(m *machine) {
	taken := enrolment{began: time.Now(), joined: m.Certificate == nil}
	cluster := c.cluster
	cluster.Wrap = c.oracle.wrap(filing{by: honest, name: m.Name})
	certificate, key, pause := m.Certificate, m.Key, firstPause
	for {
		ctx, cancel := context.WithTimeout(c.ctx, attemptTimeout)
		times, err := m.Attest(ctx, cluster)
		cancel()
		if err == nil {
			taken.took = time.Since(taken.began)
			break
		}
		if c.ctx.Err() != nil {
			return
		}
		taken.tries++
		wait := pause
		pause = min(2*pause, mostPause)
		var refused *fleet.RefusedError
		if errors.As(err, &refused) {
			wait, pause = c.size.refused, firstPause
			reason := refused.Decision.Reason
			c.log.refused(reason)
			if m.Certificate != nil && m.kept && (reason == attestation.ReasonUnknownCredential || reason == attestation.ReasonRequesterNotAllowed) {
				m.Certificate, m.Key = nil, nil
				continue
			}
		} else {
			c.log.failed(times, err)
		}
		m.Certificate, m.Key = certificate, key
		select {
		case <-time.After(wait + rand.N(wait/2+1)):
		case <-c.ctx.Done():
			return
		}
	}
	m.renewed.Store(time.Now().UnixNano())
	c.mu.Lock()
	delete(c.pending, m)
	if taken.joined {
		c.members = append(c.members, m)
	}
	c.mu.Unlock()
	c.log.note(taken)
}

// atIt returns how many machines are at it that began before a time.
func (c *campaign) atIt(before time.Time) (count int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, since := range c.pending {
		if since.Before(before) {
			count++
		}
	}
	return count
}

// renewedSince reports whether each machine has renewed since a time.
func (c *campaign) renewedSince(when time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !slices.ContainsFunc(c.members, func(m *machine) bool { return m.renewed.Load() < when.UnixNano() })
}

// checkRecords checks that each machine has one record, of its own TPM, that knows its certificate.
func (c *campaign) checkRecords() {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		c.t.Fatal(err)
	}
	api, err := client.New(c.AdminConfig(), client.Options{Scheme: scheme})
	if err != nil {
		c.t.Fatal(err)
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := api.List(c.ctx, list, client.InNamespace(controllerprocess.Namespace)); err != nil {
		c.t.Fatal(err)
	}
	byNode := map[string][]v1alpha1.NodeAttestation{}
	for _, record := range list.Items {
		byNode[record.Spec.NodeName] = append(byNode[record.Spec.NodeName], record)
	}
	wrong := 0
	for _, m := range c.members {
		own := byNode[m.Name]
		delete(byNode, m.Name)
		if len(own) != 1 || own[0].Spec.EK.Fingerprint != m.ek || own[0].Spec.AKName != m.ak || own[0].Spec.ProviderID != m.ProviderID() || !knows(own[0], m.Certificate) {
			if wrong++; wrong <= 10 {
				c.t.Errorf("%s has %d records, or not the right one: %+v", m.Name, len(own), own)
			}
		}
	}
	for _, m := range c.attackers { // theirs may be lost: they do not renew
		if own := byNode[m.Name]; len(own) > 1 || len(own) == 1 && own[0].Spec.EK.Fingerprint != m.ek {
			c.t.Errorf("%s has %d records, or not the right one: %+v", m.Name, len(own), own)
		}
		delete(byNode, m.Name)
	}
	for name := range byNode {
		c.t.Errorf("there is a record of %s", name)
	}
	c.log.say("%d of %d machines have one record, of their own TPM, that knows their certificate", len(c.members)-wrong, len(c.members))
}

func knows(record v1alpha1.NodeAttestation, certificate []byte) bool {
	block, _ := pem.Decode(certificate)
	if block == nil {
		return false
	}
	sum := sha256.Sum256(block.Bytes)
	for _, one := range record.Status.Certificates {
		if known, err := hex.DecodeString(one.SHA256); err == nil && bytes.Equal(known, sum[:]) {
			return true
		}
	}
	return false
}
