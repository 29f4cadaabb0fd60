// SPDX-License-Identifier: Apache-2.0

package controller

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
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// found is what a decision is made from.
type found struct {
	input    verifier.Input
	provider Provider
	// challenger is the provider, if it is one of two rounds.
	challenger Challenger
	// named says that an authority names the EK claimed.
	named bool
	// records are the objects behind input.Records.
	records []v1alpha1.NodeAttestation
	// node is the Node of the name claimed, nil if there is none.
	node *metav1.PartialObjectMetadata
}

// gather reads all that the rules ask for, from the API server itself. In passing, for a request that was waiting when it was last looked
// at, it does with somewhat older records and asks for no Node: what is still waited for is found out so, and nothing is decided on it.
func (c *Controller) gather(ctx context.Context, object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time, inPassing bool) (*found, error) {
	f := &found{provider: c.providers[claim.Provider]}
	f.challenger, _ = f.provider.(Challenger)
	f.input = verifier.Input{Now: now, Request: object, Node: verifier.Absent}
	var err error
	if f.records, err = c.records.list(ctx, now, inPassing); err != nil {
		return nil, err
	}
	for i := range f.records {
		f.input.Records = append(f.input.Records, recordOf(&f.records[i]))
	}
	if claim.NodeName != "" && !inPassing {
		if err := c.findNode(ctx, f, claim.NodeName); err != nil {
			return nil, err
		}
	}
	if f.provider == nil {
		return f, nil // the rules refuse it, or leave the node alone
	}
	if f.input.Machines, err = c.Machines.Machines(ctx, now); err != nil {
		return nil, fmt.Errorf("machines: %w", err)
	}
	if err := c.findToken(ctx, f); err != nil {
		return nil, err
	}
	if c.CA != nil {
		_, err := c.CA.CA(ctx, now)
		f.input.NoSigner = err != nil // whoever keeps it says why
	}
	ek := ""
	if f.challenger != nil {
		if !claim.Hello {
			if f.input.Hello, err = helloOf(ctx, c.live, f.challenger, object); err != nil {
				return nil, err
			}
		}
		ek = f.challenger.EK(object, f.input.Hello)
		f.named = namesEK(f.input.Machines, ek) || ek != "" && slices.ContainsFunc(f.input.Records, func(r verifier.Record) bool { return r.EK == ek })
	}
	if err := c.findOpen(ctx, f, claim, ek); err != nil {
		return nil, err
	}
	f.input.Evidence = f.provider.Judge(ctx, Question{Request: object, Hello: f.input.Hello, Named: f.named, Now: now})
	return f, nil
}

// helloOf reads the hello that a proof refers to, by the name in it; the rules see to it that it is the right one. It is nil where it is
// not there.
func helloOf(ctx context.Context, reader client.Reader, provider Challenger, proof *certificatesv1.CertificateSigningRequest) (*certificatesv1.CertificateSigningRequest, error) {
	name, err := provider.HelloOf(proof)
	if err != nil || name == "" {
		return nil, nil //nolint:nilerr // whoever judges the evidence says what is wrong with it
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
func (c *Controller) findNode(ctx context.Context, f *found, name string) error {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	err := c.live.Get(ctx, types.NamespacedName{Name: name}, node)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("node %s: %w", name, err)
	}
	f.node, f.input.Node = node, verifier.Present
	return nil
}

// findToken finds out which machine the bootstrap token was made for.
func (c *Controller) findToken(ctx context.Context, f *found) error {
	tokens, known := c.Machines.(TokenSource)
	id, token := verifier.TokenID(f.input.Request.Spec.Username)
	if !known || !token {
		return nil
	}
	var err error
	if f.input.Token, err = tokens.Token(ctx, id, f.input.Now); err != nil {
		return fmt.Errorf("bootstrap token: %w", err)
	}
	return nil
}

// findOpen finds out, of each record that may be this machine's, whether the proof which it names is still on its way.
func (c *Controller) findOpen(ctx context.Context, f *found, claim verifier.Claim, ek string) error {
	if claim.Hello {
		return nil
	}
	for i := range f.input.Records {
		r := &f.input.Records[i]
		mine := r.NodeName == claim.NodeName || ek != "" && r.EK == ek
		if !mine || !r.AwaitsCertificate() || r.ProofUID == string(f.input.Request.UID) {
			continue
		}
		proof, err := getRequest(ctx, c.live, f.records[i].Status.Request.Name)
		if err != nil {
			return err
		}
		r.Open = proof != nil && string(proof.UID) == r.ProofUID && stateOf(proof) != done
	}
	return nil
}

// recent are the records as they were read last: many requests that wait share one reading.
type recent struct {
	reader    client.Reader
	namespace string

	mu    sync.Mutex
	at    time.Time
	items []v1alpha1.NodeAttestation
}

// list returns the records as they are, or, in passing, as they were within lookAgain. The caller does not change them.
func (r *recent) list(ctx context.Context, now time.Time, inPassing bool) ([]v1alpha1.NodeAttestation, error) {
	if inPassing {
		r.mu.Lock()
		defer r.mu.Unlock()
		if age := now.Sub(r.at); age >= 0 && age < lookAgain {
			return r.items, nil
		}
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := r.reader.List(ctx, list, client.InNamespace(r.namespace)); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	if inPassing {
		r.at, r.items = now, list.Items
	}
	return list.Items, nil
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
		if recordOf(&f.records[i]).Machine == machine {
			return f.records[i].DeepCopy()
		}
	}
	return nil
}
