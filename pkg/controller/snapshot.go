// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/fairqueue"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// collector reads the inputs of decisions.
type collector struct {
	*Config
	providers map[string]Provider
	// cached reads requests from the cache, which may be stale. live reads from the API server.
	cached, live client.Reader
	records      *records.Store
	retries      *fairqueue.Retries[waitingEvidence]
	intake       *intake
	lastWrites   lastWrites
	// suspended returns the endorsement keys of suspended machines, from an informer. It is nil if
	// revocation is off.
	suspended func() (map[string]bool, error)

	// indexMu is held while an index is made, so that concurrent workers do not make the same
	// index.
	indexMu sync.Mutex
	indexed indexedMachines
}

// snapshot has the inputs of a decision: the Input of the rules, and the objects that acting on the
// decision needs.
type snapshot struct {
	input    verifier.Input
	claim    verifier.Claim
	provider Provider
	// challenger is the provider, if it has two rounds, else nil.
	challenger Challenger
	// ek is the claimed EK. ekNamed says that a source or a record names it, or that it is trusted
	// on first use.
	ek      string
	ekNamed bool
	// consistency is that of records.
	consistency Consistency
	// described caches the result of subject. It is nil until the first call.
	described *Subject
	// index has all machines. It is nil if input.Machines has all of them.
	index *verifier.MachineIndex
	// records are the objects behind input.Records.
	records []v1alpha1.NodeAttestation
	// approvalWarnings are the warnings of the approval that preceded this decision in the same
	// call. issued is the certificate that was published. Both go into the decision record.
	approvalWarnings verifier.Refusals
	issued           []byte
	// publishLater says that a certificate was issued, and that a later call publishes it.
	publishLater bool
}

// memo caches inputs that the later passes of one decision can reuse: the Node and judged evidence.
type memo struct {
	// node is zero until the Node is read.
	node     verifier.Presence
	evidence map[evidenceKey]verifier.Evidence
}

// evidenceKey has the inputs, beside the request, on which the judgement of its evidence depends.
// Judged evidence is reused only for the same key.
type evidenceKey struct {
	named bool
	hello types.UID
}

func evidenceKeyOf(q Question) evidenceKey {
	by := evidenceKey{named: q.Named}
	if q.Hello != nil {
		by.hello = q.Hello.UID
	}
	return by
}

func (m *memo) judge(ctx context.Context, provider Provider, q Question) verifier.Evidence {
	by := evidenceKeyOf(q)
	evidence, ok := m.evidence[by]
	if !ok {
		evidence = provider.Judge(ctx, q)
		m.evidence[by] = evidence
	}
	return evidence
}

// collect reads what the rules need for a pass, in order: a later step needs the earlier ones.
func (c *collector) collect(ctx context.Context, object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, p pass, m *memo) (*snapshot, error) {
	s := &snapshot{claim: claim, provider: c.providers[claim.Provider], consistency: p.consistency}
	s.challenger, _ = s.provider.(Challenger)
	s.input = verifier.Input{Now: now, Request: object}
	if p.evidence == assumed && c.addUnreadable(ctx, s, m) {
		return s, nil
	}
	c.addSuspensions(s)
	steps := []func(context.Context, *snapshot) error{c.addRecordsOfName}
	// any other request is refused by the rules, or comes from an unattested node, and needs no
	// machines
	if s.provider != nil || claim.Serving {
		steps = append(steps, c.addMachines, c.addSigner)
	}
	if s.provider != nil { // a serving certificate is requested without evidence
		steps = append(steps, c.addRecordsOfNodeRefs, c.addToken, c.addEK)
	}
	steps = append(steps, func(ctx context.Context, s *snapshot) error { return c.addNode(ctx, s, p.evidence, m) })
	if s.provider != nil {
		steps = append(steps, func(ctx context.Context, s *snapshot) error { c.addEvidence(ctx, s, p.evidence, m); return nil })
	}
	steps = append(steps, c.addRecordsOfMachines, c.addPendingProofs)
	for _, step := range steps {
		if err := step(ctx, s); err != nil {
			return nil, err
		}
		s.selectMachines()
	}
	if c.Owned != nil && (s.provider != nil || claim.Serving) { // the machines are known
		s.markOrphans()
	}
	return s, nil
}

// addUnreadable judges a hello whose document names no EK, and reports whether the document is
// malformed. A malformed hello is denied without further inputs.
func (c *collector) addUnreadable(ctx context.Context, s *snapshot, m *memo) bool {
	if s.challenger.EK(s.input.Request, nil) != "" {
		return false
	}
	s.input.Evidence = m.judge(ctx, s.provider, s.question())
	return isVerdict(s.input.Evidence.Err) && !s.input.Evidence.EKUntrusted
}

// addSuspensions adds the endorsement keys of suspended machines. They come from an informer and
// may be stale. If a decision missed a new suspension, the enforcer revokes the certificate
// afterwards.
func (c *collector) addSuspensions(s *snapshot) {
	if c.suspended == nil {
		return
	}
	var err error
	s.input.SuspendedEKs, err = c.suspended()
	s.input.SuspensionsUnknown = err != nil
}

// addMachines adds the machines.
func (c *collector) addMachines(ctx context.Context, s *snapshot) error {
	machines, err := machinesOf(ctx, c.Machines, s.input.Now)
	if err != nil {
		return fmt.Errorf("machines: %w", err)
	}
	s.input.Machines, s.index = machines, c.indexOf(machines)
	return nil
}

// selectMachines keeps only the machines that the decision can depend on, by the inputs collected
// so far.
func (s *snapshot) selectMachines() {
	if s.index != nil {
		s.input.Machines = s.index.Relevant(s.claim, s.ek, s.input)
	}
}

// addSigner adds whether a CA is available to sign. If none is, the CA's source reports why.
func (c *collector) addSigner(ctx context.Context, s *snapshot) error {
	if c.CA != nil {
		_, err := c.CA.CA(ctx, s.input.Now)
		s.input.SignerUnavailable = err != nil
	}
	return nil
}

// addRecordsOfNodeRefs is for the machine with the claimed provider ID. It adds the records with
// the node name in that machine's nodeRef. Such a record may be another machine's.
func (c *collector) addRecordsOfNodeRefs(ctx context.Context, s *snapshot) error {
	for i := range s.input.Machines {
		m := &s.input.Machines[i]
		if m.NodeRef == "" || m.NodeRef == s.claim.NodeName || m.ProviderID != s.claim.ProviderID {
			continue
		}
		if err := c.addRecords(ctx, s, v1alpha1.FieldNodeName, m.NodeRef); err != nil {
			return err
		}
	}
	return nil
}

// addToken adds the requester's bootstrap token, if the source knows it.
func (c *collector) addToken(ctx context.Context, s *snapshot) error {
	tokens, ok := c.Machines.(TokenSource)
	if !ok {
		return nil
	}
	id, ok := verifier.TokenID(s.input.Request.Spec.Username)
	if !ok {
		return nil
	}
	token, err := tokens.Token(ctx, id, s.input.Now)
	if err != nil {
		return fmt.Errorf("bootstrap token: %w", err)
	}
	s.input.Token = token
	return nil
}

// addEK is for providers with two rounds. It sets the claimed EK, and whether a source or a record
// names it. It also adds the EK's records and a proof's hello.
func (c *collector) addEK(ctx context.Context, s *snapshot) error {
	if s.challenger == nil {
		return nil
	}
	in := &s.input
	cached := c.cachedHello(ctx, s)
	if in.Hello = cached; cached == nil {
		if err := c.addLiveHello(ctx, s); err != nil {
			return err
		}
	}
	s.ek = s.challenger.EK(in.Request, in.Hello)
	if err := c.addRecords(ctx, s, v1alpha1.FieldEK, s.ek); err != nil {
		return err
	}
	// Accepting a proof sets LastAttested in the machine's record, before the hello is closed. If
	// no record in the snapshot was attested since the hello was filed, the snapshot shows no
	// accepted proof of it. If another replica accepted one meanwhile, writing the record causes a
	// conflict.
	if cached != nil && s.attestedSince(cached) {
		if err := c.addLiveHello(ctx, s); err != nil { // same UID, so the same spec and EK
			return err
		}
	}
	if s.ek == "" {
		return nil
	}
	s.selectMachines() // now also by the EK
	s.ekNamed = slices.ContainsFunc(in.Machines, func(m verifier.Machine) bool { return m.HasEK(s.ek) }) ||
		slices.ContainsFunc(in.Records, func(r verifier.Record) bool { return r.EK == s.ek })
	return c.trustOnFirstUse(ctx, s)
}

// trustOnFirstUse sets ekNamed for an EK that the rules trust on first use, if Config.TrustUnnamed
// allows that.
func (c *collector) trustOnFirstUse(ctx context.Context, s *snapshot) error {
	if s.ekNamed || !c.TrustUnnamed || !s.input.Token.Known {
		return nil
	}
	if err := c.addRecords(ctx, s, v1alpha1.FieldMachine, s.input.Token.Machine.Name); err != nil {
		return err
	}
	_, s.ekNamed = c.Rules.TrustsOnFirstUse(s.input, s.ek)
	return nil
}

// addEvidence adds the evidence with the assessment that the pass requires.
func (c *collector) addEvidence(ctx context.Context, s *snapshot, from assessment, m *memo) {
	q := s.question()
	switch from {
	case assumed:
		s.input.Evidence = verifier.Evidence{Provider: s.provider.Name(), EK: s.ek, Err: verifier.Refusals{{Reason: verifier.ReasonRefused}}, EKUntrusted: true}
		return
	case remembered:
		if last, ok := c.retries.Memo(q.Request.Name, q.Request.UID, q.Now); ok && last.by == evidenceKeyOf(q) {
			s.input.Evidence = last.evidence
			return
		}
	}
	s.input.Evidence = m.judge(ctx, s.provider, q)
}

// question returns the Question for the provider. It is complete after addEK.
func (s *snapshot) question() Question {
	return Question{Request: s.input.Request, Hello: s.input.Hello, Named: s.ekNamed, Now: s.input.Now}
}

// isVerdict reports whether a Provider's error is a verdict about the evidence. Any other error may
// be temporary.
func isVerdict(err error) bool {
	var refusals verifier.Refusals
	return err != nil && errors.As(err, &refusals)
}

// addRecordsOfName adds the records with the claimed node name.
func (c *collector) addRecordsOfName(ctx context.Context, s *snapshot) error {
	return c.addRecords(ctx, s, v1alpha1.FieldNodeName, s.claim.NodeName)
}

// addRecordsOfMachines adds the records of each machine that may have filed the request, and those
// of an EK that only the provider knew.
func (c *collector) addRecordsOfMachines(ctx context.Context, s *snapshot) error {
	if ek := s.input.Evidence.EK; ek != s.ek {
		if err := c.addRecords(ctx, s, v1alpha1.FieldEK, ek); err != nil {
			return err
		}
	}
	for i := range s.input.Machines {
		m := &s.input.Machines[i]
		if !m.HasEK(s.ek) && m.Ref.Name != s.input.Evidence.Machine && m.Ref.Name != s.input.Token.Machine.Name {
			continue
		}
		if err := c.addRecords(ctx, s, v1alpha1.FieldMachine, m.Ref.Name); err != nil {
			return err
		}
	}
	return nil
}

// addRecords adds the records whose field has this value, each once.
func (c *collector) addRecords(ctx context.Context, s *snapshot, field, value string) error {
	if value == "" {
		return nil
	}
	var items []v1alpha1.NodeAttestation
	var err error
	if s.consistency == Live {
		items, err = c.records.Find(ctx, field, value)
	} else {
		items, err = c.records.FindCached(field, value)
	}
	if err != nil {
		return err
	}
	for i := range items {
		if !s.has(&items[i]) {
			s.set(&items[i], c.records.Record(&items[i]))
		}
	}
	return nil
}

// cachedHello returns the cached hello of a proof that has just arrived, if the cached version has
// our challenge. It returns nil if the hello must be read live. A proof that waited reads its hello
// live, since the watch may have hung meanwhile.
func (c *collector) cachedHello(ctx context.Context, s *snapshot) *certificatesv1.CertificateSigningRequest {
	proof := s.input.Request
	if s.claim.Hello || s.consistency != Cached || c.retries.Waits(proof.Name, proof.UID) {
		return nil
	}
	hello, err := FindHello(ctx, c.cached, s.challenger, proof)
	if err != nil || hello == nil || !c.lastWrites.isOurChallenge(hello) || c.intake.isDropped(hello) {
		return nil
	}
	return hello
}

// clockSkew is how far a replica's clock may be behind the API server's.
const clockSkew = 10 * time.Second

// attestedSince reports whether a record in the snapshot may have been attested since a hello was
// filed. Other writes of the record, such as its certificate, do not count.
func (s *snapshot) attestedSince(hello *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(s.records, func(r v1alpha1.NodeAttestation) bool {
		return r.Status.LastAttested == nil || r.Status.LastAttested.Add(clockSkew).After(hello.CreationTimestamp.Time)
	})
}

// addLiveHello adds a proof's hello, read live.
func (c *collector) addLiveHello(ctx context.Context, s *snapshot) (err error) {
	if s.claim.Hello {
		return nil
	}
	s.input.Hello, err = FindHello(ctx, c.live, s.challenger, s.input.Request)
	return err
}

// lastWrites has, by the UID of a hello, this replica's last write: the resource version of the
// challenge, or closedVersion. The cache may not show that write yet. An entry is removed when the
// cache shows that the hello is closed, or when there are too many.
type lastWrites struct{ versions *lru.Cache }

const (
	// maxLastWrites bounds the number of entries. Without its entry, a hello costs a few more API
	// calls.
	maxLastWrites = 20_000
	// closedVersion is no resource version.
	closedVersion = "closed"
)

func (l lastWrites) set(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, hello.ResourceVersion)
}

func (l lastWrites) isOurChallenge(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == hello.ResourceVersion
}

// setClosed says that this replica has closed a hello.
func (l lastWrites) setClosed(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Add(hello.UID, closedVersion)
}

func (l lastWrites) closed(hello *certificatesv1.CertificateSigningRequest) bool {
	version, ok := l.versions.Get(hello.UID)
	return ok && version == closedVersion
}

func (l lastWrites) forget(hello *certificatesv1.CertificateSigningRequest) {
	l.versions.Remove(hello.UID)
}

// FindHello reads the hello that a proof refers to, by its name. The proof is not trusted: the
// rules check that this is its hello. FindHello returns nil if there is none.
func FindHello(ctx context.Context, reader client.Reader, provider Challenger, proof *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	name, err := provider.HelloOf(proof)
	if err != nil || name == "" {
		return nil, nil //nolint:nilerr // Judge refuses such a proof
	}
	return getRequest(ctx, reader, name)
}

// getRequest returns nil if there is no such request.
func getRequest(ctx context.Context, reader client.Reader, name string) (*certificatesv1.CertificateSigningRequest, error) {
	object := &certificatesv1.CertificateSigningRequest{}
	err := reader.Get(ctx, types.NamespacedName{Name: name}, object)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", name, err)
	}
	return object, nil
}

// addNode adds whether a Node of the claimed name exists, for rule M5. That rule is about first
// proofs, so a hello and a node's own request need no API call. Nor does a waiting request with
// remembered evidence, which can only go on waiting.
func (c *collector) addNode(ctx context.Context, s *snapshot, from assessment, m *memo) error {
	if s.claim.Hello || s.claim.Serving || classOf(s.input.Request.Spec.Username) == fairqueue.Nodes {
		return nil
	}
	// Absent also stands for "not read": then M5 refuses nothing, and report writes no Event on a
	// Node. With remembered evidence the decision can only be to wait.
	s.input.Node = verifier.Absent
	if from == remembered || s.claim.NodeName == "" {
		return nil
	}
	if m.node == 0 {
		node, err := getNode(ctx, c.live, s.claim.NodeName)
		if err != nil {
			return err
		}
		if m.node = verifier.Absent; node != nil {
			m.node = verifier.Present
		}
	}
	s.input.Node = m.node
	return nil
}

// getNode returns a Node's metadata, nil if there is no such Node.
func getNode(ctx context.Context, live client.Reader, name string) (*metav1.PartialObjectMetadata, error) {
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
func (c *collector) addPendingProofs(ctx context.Context, s *snapshot) error {
	if s.claim.Hello || s.claim.Serving {
		return nil
	}
	for i := range s.input.Records {
		r := &s.input.Records[i]
		mine := r.NodeName == s.claim.NodeName || s.ek != "" && r.EK == s.ek
		if !mine || r.ProofUID == "" || r.ProofUID == string(s.input.Request.UID) {
			continue
		}
		awaits := r.AwaitsCertificate()
		if !awaits && !c.mayLackCertificate(ctx, &s.records[i], s.input.Now) {
			continue
		}
		proof, err := getRequest(ctx, c.live, s.records[i].Status.Request.Name)
		if err != nil {
			return err
		}
		// A proof that another signer issued for is pending until its certificate is in the record.
		r.ProofPending = proof != nil && string(proof.UID) == r.ProofUID && (stateOf(proof) != finished || awaits && len(proof.Status.Certificate) > 0)
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
func (c *collector) mayLackCertificate(ctx context.Context, record *v1alpha1.NodeAttestation, now time.Time) bool {
	if attested := record.Status.LastAttested; attested == nil || now.Sub(attested.Time) > publishTimeout {
		return false
	}
	proof, err := getRequest(ctx, c.cached, record.Status.Request.Name)
	return err != nil || proof == nil || proof.UID != record.Status.Request.UID || stateOf(proof) != finished
}

// markOrphans marks the records whose machine no longer exists.
func (s *snapshot) markOrphans() {
	exists := map[verifier.MachineRef]bool{}
	for i := range s.input.Machines {
		exists[s.input.Machines[i].Ref] = true
	}
	for i := range s.input.Records {
		s.input.Records[i].Orphaned = !exists[s.input.Records[i].Machine]
	}
}

// queueClaim returns the claim by which the queue orders the request.
func (s *snapshot) queueClaim() fairqueue.Claim {
	return fairqueue.Claim{EK: s.ek, Node: s.claim.NodeName, Proof: !s.claim.Hello}
}

// isRecorded reports whether status.request of a record is this request.
func (s *snapshot) isRecorded(object *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(s.records, func(r v1alpha1.NodeAttestation) bool {
		return r.Status.Request != nil && r.Status.Request.UID == object.UID
	})
}

// recordFor returns a copy of the object that holds a machine's record, nil if there is none yet.
func (s *snapshot) recordFor(machine verifier.MachineRef) *v1alpha1.NodeAttestation {
	for i := range s.records {
		if s.input.Records[i].Machine == machine {
			return s.records[i].DeepCopy()
		}
	}
	return nil
}

// has reports whether this version of a record is in the snapshot.
func (s *snapshot) has(object *v1alpha1.NodeAttestation) bool {
	return slices.ContainsFunc(s.records, func(r v1alpha1.NodeAttestation) bool {
		return r.UID == object.UID && r.ResourceVersion == object.ResourceVersion
	})
}

// set puts a record into the snapshot, in place of another version of it.
func (s *snapshot) set(object *v1alpha1.NodeAttestation, record verifier.Record) {
	for i := range s.records {
		if s.records[i].UID == object.UID {
			s.records[i], s.input.Records[i] = *object, record
			return
		}
	}
	s.records, s.input.Records = append(s.records, *object), append(s.input.Records, record)
}
