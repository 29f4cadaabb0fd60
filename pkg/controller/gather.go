// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// found is what a decision is made from.
type found struct {
	input    verifier.Input
	provider Provider
	// challenger is the provider, if it is one of two rounds.
	challenger Challenger
	// ek is the EK claimed, and named says that an authority names it.
	ek    string
	named bool
	// isHello says what the request is, and reading by what it is judged.
	isHello bool
	reading reading
	// known is what this reading found, and those before.
	known *known
	// unreadable says that a hello is none.
	unreadable bool
	// records are the objects behind input.Records.
	records []v1alpha1.NodeAttestation
	// node is the Node of the name claimed, nil if there is none.
	node *metav1.PartialObjectMetadata
}

// gather reads what the rules ask for, as far as a reading goes.
func (c *Controller) gather(ctx context.Context, object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, from reading, known *known) (*found, error) {
	f := &found{provider: c.providers[claim.Provider], isHello: claim.Hello, reading: from, known: known}
	f.challenger, _ = f.provider.(Challenger)
	f.input = verifier.Input{Now: now, Request: object, Node: verifier.Absent}
	type step = func(context.Context, *found, verifier.Claim) error
	steps := []step{c.findNode, c.findRecords, c.findEvidence, c.findMachineRecords, c.findOpen}
	switch from {
	case unjudged:
		steps = []step{c.findUnreadable, c.findNode, c.findRecords, c.findEvidence, c.findMachineRecords}
	case whileWaiting:
		steps = []step{c.findRecords, c.findEvidence, c.findMachineRecords, c.findOpen}
	}
	for _, find := range steps {
		if err := find(ctx, f, claim); err != nil {
			return nil, err
		}
		if f.unreadable {
			return f, nil
		}
	}
	if c.Owned != nil && (f.provider != nil || claim.Serving) { // machines are known
		f.markOrphans()
	}
	return f, nil
}

// known is what was found about one request while it is decided on, and need not be found again.
type known struct {
	// node is the Node, once looked says that it was looked for.
	node   *metav1.PartialObjectMetadata
	looked bool
	// evidence is what was made of the evidence.
	evidence map[judgement]verifier.Evidence
}

// judgement is by what evidence is judged.
type judgement struct {
	named bool
	hello types.UID
}

func (k *known) judge(ctx context.Context, provider Provider, q Question) verifier.Evidence {
	about := judgementOf(q)
	evidence, ok := k.evidence[about]
	if !ok {
		evidence = provider.Judge(ctx, q)
		k.evidence[about] = evidence
	}
	return evidence
}

func judgementOf(q Question) judgement {
	of := judgement{named: q.Named}
	if q.Hello != nil {
		of.hello = q.Hello.UID
	}
	return of
}

// findUnreadable judges a hello that names no EK: its document is none.
func (c *Controller) findUnreadable(ctx context.Context, f *found, _ verifier.Claim) error {
	if f.challenger.EK(f.input.Request, nil) != "" {
		return nil
	}
	f.input.Evidence = f.known.judge(ctx, f.provider, Question{Request: f.input.Request, Now: f.input.Now})
	f.unreadable = isVerdict(f.input.Evidence.Err) && !f.input.Evidence.EKUntrusted
	return nil
}

// markOrphans marks the records of machines that are gone.
func (f *found) markOrphans() {
	there := map[verifier.MachineRef]bool{}
	for i := range f.input.Machines {
		there[f.input.Machines[i].Ref] = true
	}
	for i := range f.input.Records {
		f.input.Records[i].Orphaned = !there[f.input.Records[i].Machine]
	}
}

// findEvidence finds the machines, and has the evidence judged. Without a provider there is nothing to find: the rules refuse such a request,
// or leave the node alone.
func (c *Controller) findEvidence(ctx context.Context, f *found, claim verifier.Claim) error {
	if f.provider == nil && !claim.Serving {
		return nil
	}
	in := &f.input
	var err error
	if in.Machines, err = machinesOf(ctx, c.Machines, in.Now); err != nil {
		return fmt.Errorf("machines: %w", err)
	}
	if c.CA != nil {
		_, err := c.CA.CA(ctx, in.Now)
		in.SignerUnavailable = err != nil // whoever keeps it says why
	}
	if f.provider == nil {
		return nil // a serving certificate is asked for without evidence
	}
	if err := c.findNodeRefs(ctx, f, claim); err != nil {
		return err
	}
	if tokens, ok := c.Machines.(TokenSource); ok {
		if id, token := verifier.TokenID(in.Request.Spec.Username); token {
			if in.Token, err = tokens.Token(ctx, id, in.Now); err != nil {
				return fmt.Errorf("bootstrap token: %w", err)
			}
		}
	}
	if f.challenger != nil {
		if !claim.Hello {
			if in.Hello, err = FindHello(ctx, c.live, f.challenger, in.Request); err != nil {
				return err
			}
		}
		f.ek = f.challenger.EK(in.Request, in.Hello)
		if err := c.findRecordsOf(ctx, f, v1alpha1.FieldEK, f.ek); err != nil {
			return err
		}
		f.named = slices.ContainsFunc(in.Machines, func(m verifier.Machine) bool { return m.HasEK(f.ek) }) || f.ek != "" && slices.ContainsFunc(in.Records, func(r verifier.Record) bool { return r.EK == f.ek })
		if err := c.trustFirstUse(ctx, f); err != nil {
			return err
		}
	}
	before, ok := c.waits.evidence(f.question())
	switch {
	case f.reading == unjudged: // at best
		in.Evidence = verifier.Evidence{Provider: f.provider.Name(), EK: f.ek, Err: verifier.Refusals{{Reason: verifier.ReasonRefused}}, EKUntrusted: true}
	case f.reading == whileWaiting && ok:
		in.Evidence = before
	default:
		in.Evidence = f.known.judge(ctx, f.provider, f.question())
	}
	return nil
}

// findNodeRefs reads the record of the Node that the machine with the provider ID claimed refers
// to: it may be another machine's.
func (c *Controller) findNodeRefs(ctx context.Context, f *found, claim verifier.Claim) error {
	for i := range f.input.Machines {
		m := &f.input.Machines[i]
		if m.NodeRef == "" || m.NodeRef == claim.NodeName || m.ProviderID != claim.ProviderID {
			continue
		}
		if err := c.findRecordsOf(ctx, f, v1alpha1.FieldNodeName, m.NodeRef); err != nil {
			return err
		}
	}
	return nil
}

// question is what the provider is asked, once everything of it was found.
func (f *found) question() Question {
	return Question{Request: f.input.Request, Hello: f.input.Hello, Named: f.named, Now: f.input.Now}
}

// isVerdict reports whether an error of a Provider is about the evidence, and none that may pass.
func isVerdict(err error) bool {
	var refusals verifier.Refusals
	return err != nil && errors.As(err, &refusals)
}

// trustFirstUse has an EK count as named that the rules trust on first use, if nothing else has to vouch for it.
func (c *Controller) trustFirstUse(ctx context.Context, f *found) error {
	if f.named || !c.TrustUnnamed || f.ek == "" || !f.input.Token.Known {
		return nil
	}
	if err := c.findRecordsOf(ctx, f, v1alpha1.FieldMachine, f.input.Token.Machine.Name); err != nil {
		return err
	}
	_, f.named = c.Rules.TrustsOnFirstUse(f.input, f.ek)
	return nil
}

// findRecords reads the records with the node name that is claimed.
func (c *Controller) findRecords(ctx context.Context, f *found, claim verifier.Claim) error {
	return c.findRecordsOf(ctx, f, v1alpha1.FieldNodeName, claim.NodeName)
}

// findMachineRecords reads the records of each machine that the request may turn out to be of, and those of an EK that only its judge knew.
func (c *Controller) findMachineRecords(ctx context.Context, f *found, _ verifier.Claim) error {
	if ek := f.input.Evidence.EK; ek != f.ek {
		if err := c.findRecordsOf(ctx, f, v1alpha1.FieldEK, ek); err != nil {
			return err
		}
	}
	for _, m := range f.input.Machines {
		name := m.Ref.Name
		if !m.HasEK(f.ek) && name != f.input.Evidence.Machine && name != f.input.Token.Machine.Name {
			continue
		}
		if err := c.findRecordsOf(ctx, f, v1alpha1.FieldMachine, name); err != nil {
			return err
		}
	}
	return nil
}

// findRecordsOf adds the records that have a value in a field; each comes once.
func (c *Controller) findRecordsOf(ctx context.Context, f *found, field, value string) error {
	if value == "" {
		return nil
	}
	var items []v1alpha1.NodeAttestation
	var err error
	if f.reading == fromAPIServer {
		items, err = c.records.Find(ctx, field, value)
	} else {
		items, err = c.records.FindCached(field, value)
	}
	if err != nil {
		return err
	}
	for i := range items {
		if !f.holds(&items[i]) {
			f.hold(&items[i], c.records.Record(&items[i]))
		}
	}
	return nil
}

// checkSole finds out whether the records that one which was written must agree with are those that were found before: of two that contradict each
// other, whoever wrote second sees the first one. The error is a conflict if they are not.
func (c *Controller) checkSole(ctx context.Context, f *found, record *v1alpha1.NodeAttestation) error {
	items, err := c.records.FindRivals(ctx, record)
	if err != nil {
		return err
	}
	for i := range items {
		if !f.holds(&items[i]) {
			return apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("nodeattestations").GroupResource(), record.Name,
				fmt.Errorf("the record %s was written meanwhile", items[i].Name))
		}
	}
	return nil
}

// FindHello reads the hello that a proof refers to, by its name. The rules check that it is the right
// one. It returns nil if there is none.
func FindHello(ctx context.Context, reader client.Reader, provider Challenger, proof *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	name, err := provider.HelloOf(proof)
	if err != nil || name == "" {
		return nil, nil //nolint:nilerr // Judge refuses such a proof without its hello
	}
	return getRequest(ctx, reader, name)
}

// getRequest returns nil where there is no such request.
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

// findNode finds out whether a Node exists. Nothing else of it counts.
func (c *Controller) findNode(ctx context.Context, f *found, claim verifier.Claim) error {
	name := claim.NodeName
	if name == "" {
		return nil
	}
	if !f.known.looked {
		node, err := c.getNode(ctx, name)
		if err != nil {
			return err
		}
		f.known.node, f.known.looked = node, true
	}
	if f.node = f.known.node; f.node != nil {
		f.input.Node = verifier.Present
	}
	return nil
}

// getNode returns a Node's metadata, nil where there is none of that name.
func (c *Controller) getNode(ctx context.Context, name string) (*metav1.PartialObjectMetadata, error) {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	err := c.live.Get(ctx, types.NamespacedName{Name: name}, node)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	return node, nil
}

// findOpen finds out, of each record that may be this machine's, whether the proof which it names is still on its way.
func (c *Controller) findOpen(ctx context.Context, f *found, claim verifier.Claim) error {
	if claim.Hello || claim.Serving {
		return nil
	}
	for i := range f.input.Records {
		r := &f.input.Records[i]
		mine := r.NodeName == claim.NodeName || f.ek != "" && r.EK == f.ek
		if !mine || !r.AwaitsCertificate() || r.ProofUID == string(f.input.Request.UID) {
			continue
		}
		proof, err := getRequest(ctx, c.live, f.records[i].Status.Request.Name)
		if err != nil {
			return err
		}
		// One that another signer has issued for is open until its certificate is noted.
		r.ProofPending = proof != nil && string(proof.UID) == r.ProofUID && (stateOf(proof) != done || len(proof.Status.Certificate) > 0)
	}
	return nil
}

// names reports whether a record was last written for this request.
func (f *found) names(object *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(f.records, func(r v1alpha1.NodeAttestation) bool {
		return r.Status.Request != nil && r.Status.Request.UID == object.UID
	})
}

// recordFor returns the object that holds the record of a machine, nil if there is none yet.
func (f *found) recordFor(machine verifier.MachineRef) *v1alpha1.NodeAttestation {
	for i := range f.records {
		if f.input.Records[i].Machine == machine {
			return f.records[i].DeepCopy()
		}
	}
	return nil
}

// holds reports whether a record is among those found, as it is.
func (f *found) holds(object *v1alpha1.NodeAttestation) bool {
	return slices.ContainsFunc(f.records, func(r v1alpha1.NodeAttestation) bool {
		return r.UID == object.UID && r.ResourceVersion == object.ResourceVersion
	})
}

// hold takes over a record as it is now.
func (f *found) hold(object *v1alpha1.NodeAttestation, record verifier.Record) {
	for i := range f.records {
		if f.records[i].UID == object.UID {
			f.records[i], f.input.Records[i] = *object, record
			return
		}
	}
	f.records, f.input.Records = append(f.records, *object), append(f.input.Records, record)
}
