// SPDX-License-Identifier: Apache-2.0

// Package collect reads what a decision is made from. A Pass says how fresh these Inputs must be
// (consistency.go). Nothing writes into Inputs afterwards.
package collect

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/intake"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	csrstate "github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Collector reads the inputs of decisions.
type Collector struct {
	Rules     *verifier.Rules
	Providers map[string]evidence.Provider
	Machines  evidence.MachineSource
	// Owned says that machines are objects that own their records.
	Owned bool
	// TrustUnnamed is Config.TrustUnnamed.
	TrustUnnamed bool
	// Cached reads requests from the cache, which may be stale. Live reads from the API server.
	Cached, Live client.Reader
	Records      *records.Store
	Retries      *fairqueue.Retries[WaitingEvidence]
	Intake       *intake.Intake
	LastWrites   LastWrites
	// Suspended returns the endorsement keys of suspended machines, from an informer.
	Suspended func() (map[string]bool, error)
	Issuer    signing.Issuer

	// indexMu is held while an index is made, so that concurrent workers do not make the same
	// index.
	indexMu sync.Mutex
	indexed indexedMachines
}

// collection is the inputs of one pass while they are collected.
type collection struct {
	in   Inputs
	pass Pass
	memo *Memo
	// index has all machines. It is nil if in.Machines has all of them.
	index *verifier.MachineIndex
}

// Memo caches inputs that the later passes of one decision can reuse: the Node and judged evidence.
type Memo struct {
	// node is zero until the Node is read.
	node     verifier.Presence
	evidence map[evidenceKey]verifier.Evidence
}

// NewMemo returns an empty Memo.
func NewMemo() *Memo { return &Memo{evidence: map[evidenceKey]verifier.Evidence{}} }

// evidenceKey has the inputs, beside the request, on which the judgement of its evidence depends.
// Judged evidence is reused only for the same key.
type evidenceKey struct {
	named bool
	hello types.UID
}

func evidenceKeyOf(q evidence.Question) evidenceKey {
	by := evidenceKey{named: q.Named}
	if q.Hello != nil {
		by.hello = q.Hello.UID
	}
	return by
}

func (m *Memo) verify(ctx context.Context, p evidence.Provider, q evidence.Question) verifier.Evidence {
	by := evidenceKeyOf(q)
	evidence, ok := m.evidence[by]
	if !ok {
		evidence = p.Verify(ctx, q)
		m.evidence[by] = evidence
	}
	return evidence
}

// WaitingEvidence is the remembered evidence of a waiting request. It is valid only for the same
// key.
type WaitingEvidence struct {
	By       evidenceKey
	evidence verifier.Evidence
}

// Remembered returns the evidence to remember for a waiting request, and false if it could not be
// judged. Nor is evidence remembered that may name a machine later: the provider looked at the
// machines of this decision.
func (in *Inputs) Remembered() (WaitingEvidence, bool) {
	err := in.Evidence.Err
	settled := err == nil && (in.Challenger != nil || in.Evidence.Machine != "")
	return WaitingEvidence{evidenceKeyOf(in.question()), in.Evidence}, settled || evidence.IsVerdict(err)
}

// Collect reads what the rules need for a pass, in order: a later step needs the earlier ones.
func (c *Collector) Collect(ctx context.Context, object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, p Pass, m *Memo) (*Inputs, error) {
	s := &collection{pass: p, memo: m, in: Inputs{
		Input: verifier.Input{Now: now, Request: object}, Claim: claim, Provider: c.Providers[claim.Provider],
	}}
	s.in.Challenger, _ = s.in.Provider.(evidence.Challenger)
	if p.evidence == assumed && c.addUnreadable(ctx, s) {
		return s.in.Complete(), nil
	}
	c.addSuspensions(s)
	steps := []func(context.Context, *collection) error{c.addRecordsOfName}
	// any other request is refused by the rules, or comes from an unattested node, and needs no
	// machines
	if s.in.Provider != nil || claim.Serving {
		steps = append(steps, c.addMachines, c.addSigner)
	}
	if s.in.Provider != nil { // a serving certificate is requested without evidence
		steps = append(steps, c.addRecordsOfNodeRefs, c.addToken, c.addHello)
	}
	steps = append(steps, c.addNode)
	if s.in.Provider != nil {
		steps = append(steps, c.addEvidence)
	}
	steps = append(steps, c.addRecordsOfMachines, c.addPendingProofs)
	for _, step := range steps {
		if err := step(ctx, s); err != nil {
			return nil, err
		}
		s.selectMachines()
	}
	if c.Owned && (s.in.Provider != nil || claim.Serving) { // the machines are known
		s.in.markOrphans()
	}
	return s.in.Complete(), nil
}

// addUnreadable judges a hello whose document names no EK, and reports whether the document is
// malformed. A malformed hello is denied without further inputs.
func (c *Collector) addUnreadable(ctx context.Context, s *collection) bool {
	if s.in.Challenger.EK(s.in.Request, nil) != "" {
		return false
	}
	s.in.Evidence = s.memo.verify(ctx, s.in.Provider, s.in.question())
	return evidence.IsVerdict(s.in.Evidence.Err) && !s.in.Evidence.EKUntrusted
}

// addSuspensions adds the endorsement keys of suspended machines. They come from an informer and
// may be stale. If a decision missed a new suspension, the enforcer revokes the certificate
// afterwards.
func (c *Collector) addSuspensions(s *collection) {
	var err error
	s.in.SuspendedEKs, err = c.Suspended()
	s.in.SuspensionsUnknown = err != nil
}

// addMachines adds the machines.
func (c *Collector) addMachines(ctx context.Context, s *collection) error {
	machines, err := evidence.MachinesOf(ctx, c.Machines, s.in.Now)
	if err != nil {
		return fmt.Errorf("machines: %w", err)
	}
	s.in.Machines, s.index = machines, c.indexOf(machines)
	return nil
}

// selectMachines keeps only the machines that the decision can depend on, by the inputs collected
// so far.
func (s *collection) selectMachines() {
	if s.index != nil {
		s.in.Machines = s.index.Relevant(s.in.Claim, s.in.ek, s.in.Input)
	}
}

// addSigner adds whether a CA is available to sign. If none is, the CA's source reports why.
func (c *Collector) addSigner(ctx context.Context, s *collection) error {
	if c.Issuer.Issues() {
		_, err := c.Issuer.CA(ctx, s.in.Now)
		s.in.SignerUnavailable = err != nil
	}
	return nil
}

// addRecordsOfNodeRefs is for the machine with the claimed provider ID. It adds the records with
// the node name in that machine's nodeRef. Such a record may be another machine's.
func (c *Collector) addRecordsOfNodeRefs(ctx context.Context, s *collection) error {
	for i := range s.in.Machines {
		m := &s.in.Machines[i]
		if m.NodeRef == "" || m.NodeRef == s.in.Claim.NodeName || m.ProviderID != s.in.Claim.ProviderID {
			continue
		}
		if err := c.addRecords(ctx, s, v1alpha1.FieldNodeName, m.NodeRef); err != nil {
			return err
		}
	}
	return nil
}

// addToken adds the requester's bootstrap token, if the source knows it.
func (c *Collector) addToken(ctx context.Context, s *collection) error {
	tokens, ok := c.Machines.(evidence.TokenSource)
	if !ok {
		return nil
	}
	id, ok := verifier.TokenID(s.in.Request.Spec.Username)
	if !ok {
		return nil
	}
	token, err := tokens.Token(ctx, id, s.in.Now)
	if err != nil {
		return fmt.Errorf("bootstrap token: %w", err)
	}
	s.in.Token = token
	return nil
}

// addHello is for providers with two rounds. It sets the claimed EK, and whether a source or a
// record names it. It also adds the EK's records and a proof's hello.
func (c *Collector) addHello(ctx context.Context, s *collection) error {
	if s.in.Challenger == nil {
		return nil
	}
	in := &s.in
	cached := c.cachedHello(ctx, s)
	if in.Hello = cached; cached == nil {
		if err := c.addLiveHello(ctx, s); err != nil {
			return err
		}
	}
	s.in.ek = s.in.Challenger.EK(in.Request, in.Hello)
	if err := c.addRecords(ctx, s, v1alpha1.FieldEK, s.in.ek); err != nil {
		return err
	}
	// Accepting a proof sets LastAttested in the machine's record, before the hello is closed. If
	// no record of the inputs was attested since the hello was filed, the inputs show no
	// accepted proof of it. If another replica accepted one meanwhile, writing the record causes a
	// conflict.
	if cached != nil && s.in.attestedSince(cached) {
		if err := c.addLiveHello(ctx, s); err != nil { // same UID, so the same spec and EK
			return err
		}
	}
	if s.in.ek == "" {
		return nil
	}
	s.selectMachines() // now also by the EK
	s.in.EKNamed = slices.ContainsFunc(in.Machines, func(m verifier.Machine) bool { return m.HasEK(s.in.ek) }) ||
		slices.ContainsFunc(in.Records, func(r verifier.Record) bool { return r.EK == s.in.ek })
	return c.trustOnFirstUse(ctx, s)
}

// trustOnFirstUse sets EKNamed for an EK that the rules trust on first use, if Config.TrustUnnamed
// allows that.
func (c *Collector) trustOnFirstUse(ctx context.Context, s *collection) error {
	if s.in.EKNamed || !c.TrustUnnamed || !s.in.Token.Known {
		return nil
	}
	if err := c.addRecords(ctx, s, v1alpha1.FieldMachine, s.in.Token.Machine.Name); err != nil {
		return err
	}
	_, s.in.EKNamed = c.Rules.TrustsOnFirstUse(s.in.Input, s.in.ek)
	return nil
}

// addEvidence adds the evidence with the assessment that the pass requires.
func (c *Collector) addEvidence(ctx context.Context, s *collection) error {
	q := s.in.question()
	switch s.pass.evidence {
	case assumed:
		s.in.Evidence = verifier.Evidence{Provider: s.in.Provider.Name(), EK: s.in.ek, Err: verifier.Refusals{{Reason: verifier.ReasonRefused}}, EKUntrusted: true}
		return nil
	case remembered:
		if last, ok := c.Retries.Memo(q.Request.Name, q.Request.UID, q.Now); ok && last.By == evidenceKeyOf(q) {
			s.in.Evidence = last.evidence
			return nil
		}
	}
	s.in.Evidence = s.memo.verify(ctx, s.in.Provider, q)
	return nil
}

// addRecordsOfName adds the records with the claimed node name.
func (c *Collector) addRecordsOfName(ctx context.Context, s *collection) error {
	return c.addRecords(ctx, s, v1alpha1.FieldNodeName, s.in.Claim.NodeName)
}

// addRecordsOfMachines adds the records of each machine that may have filed the request, and those
// of an EK that only the provider knew.
func (c *Collector) addRecordsOfMachines(ctx context.Context, s *collection) error {
	if ek := s.in.Evidence.EK; ek != s.in.ek {
		if err := c.addRecords(ctx, s, v1alpha1.FieldEK, ek); err != nil {
			return err
		}
	}
	for i := range s.in.Machines {
		m := &s.in.Machines[i]
		if !s.in.hasEK(m) && m.Ref.Name != s.in.Evidence.Machine && m.Ref.Name != s.in.Token.Machine.Name {
			continue
		}
		if err := c.addRecords(ctx, s, v1alpha1.FieldMachine, m.Ref.Name); err != nil {
			return err
		}
	}
	return nil
}

// addRecords adds the records whose field has this value, each once.
func (c *Collector) addRecords(ctx context.Context, s *collection, field, value string) error {
	if value == "" {
		return nil
	}
	var items []v1alpha1.NodeAttestation
	var err error
	if s.pass.Consistency == Live {
		items, err = c.Records.Find(ctx, field, value)
	} else {
		items, err = c.Records.FindCached(field, value)
	}
	if err != nil {
		return err
	}
	for i := range items {
		if !s.in.Has(&items[i]) {
			s.in.set(&items[i], c.Records.Record(&items[i]))
		}
	}
	return nil
}

// cachedHello returns the cached hello of a proof that has just arrived, if the cached version has
// our challenge. It returns nil if the hello must be read live. A proof that waited reads its hello
// live, since the watch may have hung meanwhile.
func (c *Collector) cachedHello(ctx context.Context, s *collection) *certificatesv1.CertificateSigningRequest {
	proof := s.in.Request
	if s.in.Claim.Hello || s.pass.Consistency != Cached || c.Retries.Waits(proof.Name, proof.UID) {
		return nil
	}
	hello, err := evidence.FindHello(ctx, c.Cached, s.in.Challenger, proof)
	if err != nil || hello == nil || !c.LastWrites.isOurChallenge(hello) || c.Intake.IsDropped(hello) {
		return nil
	}
	return hello
}

// addLiveHello adds a proof's hello, read live.
func (c *Collector) addLiveHello(ctx context.Context, s *collection) (err error) {
	if s.in.Claim.Hello {
		return nil
	}
	s.in.Hello, err = evidence.FindHello(ctx, c.Live, s.in.Challenger, s.in.Request)
	return err
}

// addNode adds whether a Node of the claimed name exists, for rule M5. That rule is about first
// proofs, so a hello and a node's own request need no API call. Nor does a waiting request with
// remembered evidence, which can only go on waiting.
func (c *Collector) addNode(ctx context.Context, s *collection) error {
	if s.in.Claim.Hello || s.in.Claim.Serving || intake.ClassOf(s.in.Request.Spec.Username) == fairqueue.Nodes {
		return nil
	}
	// Absent also stands for "not read": then M5 refuses nothing, and report writes no Event on a
	// Node. With remembered evidence the decision can only be to wait.
	s.in.Node = verifier.Absent
	if s.pass.evidence == remembered || s.in.Claim.NodeName == "" {
		return nil
	}
	if s.memo.node == 0 {
		node, err := GetNode(ctx, c.Live, s.in.Claim.NodeName)
		if err != nil {
			return err
		}
		if s.memo.node = verifier.Absent; node != nil {
			s.memo.node = verifier.Present
		}
	}
	s.in.Node = s.memo.node
	return nil
}

// GetNode returns a Node's metadata, nil if there is no such Node.
func GetNode(ctx context.Context, live client.Reader, name string) (*metav1.PartialObjectMetadata, error) {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	err := live.Get(ctx, types.NamespacedName{Name: name}, node)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	return node, nil
}

// addPendingProofs adds, for each record that may be this machine's, whether the proof that it
// names is pending. A proof whose certificate is in the record stays pending until that certificate
// is published.
func (c *Collector) addPendingProofs(ctx context.Context, s *collection) error {
	if s.in.Claim.Hello || s.in.Claim.Serving {
		return nil
	}
	for i := range s.in.Records {
		r := &s.in.Records[i]
		mine := r.NodeName == s.in.Claim.NodeName || r.EK != "" && (r.EK == s.in.ek || r.EK == s.in.Evidence.EK)
		if !mine || r.ProofUID == "" || r.ProofUID == string(s.in.Request.UID) {
			continue
		}
		awaits := r.AwaitsCertificate()
		if !awaits && !c.mayLackCertificate(ctx, &s.in.Objects[i], s.in.Now) {
			continue
		}
		proof, err := evidence.GetRequest(ctx, c.Live, s.in.Objects[i].Status.Request.Name)
		if err != nil {
			return err
		}
		// A proof that another signer issued for is pending until its certificate is in the record.
		r.ProofPending = proof != nil && string(proof.UID) == r.ProofUID && (!csrstate.Of(proof).Finished() || awaits && len(proof.Status.Certificate) > 0)
	}
	return nil
}

// publishTimeout bounds the time until a certificate in the record is published, including all
// retries and a change of the leader.
const publishTimeout = 5 * time.Minute

// mayLackCertificate reports whether the certificate in a record may not be published yet in the
// proof that the record names. If another proof took over the record now, the first proof would
// fail only because a write was lost. If the cache shows the proof as finished, that is never
// stale: a finished proof stays finished.
func (c *Collector) mayLackCertificate(ctx context.Context, record *v1alpha1.NodeAttestation, now time.Time) bool {
	if attested := record.Status.LastAttested; attested == nil || now.Sub(attested.Time) > publishTimeout {
		return false
	}
	proof, err := evidence.GetRequest(ctx, c.Cached, record.Status.Request.Name)
	return err != nil || proof == nil || proof.UID != record.Status.Request.UID || !csrstate.Of(proof).Finished()
}
