// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
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
	// named says that an authority names the EK claimed.
	named bool
	// records are the objects behind input.Records.
	records []v1alpha1.NodeAttestation
}

// gather reads all that the rules ask for, from the API server itself.
func (c *Controller) gather(ctx context.Context, object *certificatesv1.CertificateSigningRequest, claim verifier.Claim, now time.Time) (*found, error) {
	f := &found{provider: c.providers[claim.Provider]}
	f.input = verifier.Input{Now: now, Request: object}
	var err error
	if f.input.Machines, err = c.Machines.Machines(ctx, now); err != nil {
		return nil, fmt.Errorf("machines: %w", err)
	}
	list := &v1alpha1.NodeAttestationList{}
	if err := c.live.List(ctx, list, client.InNamespace(c.Namespace)); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	f.records = list.Items
	for i := range f.records {
		f.input.Records = append(f.input.Records, recordOf(&f.records[i]))
	}
	if claim.NodeName != "" {
		if f.input.Node, err = c.nodePresence(ctx, claim.NodeName); err != nil {
			return nil, err
		}
	}
	if f.provider == nil {
		return f, nil // the rules refuse it
	}
	if err := c.findHello(ctx, f, claim); err != nil {
		return nil, err
	}
	ek := f.provider.EK(object, f.input.Hello)
	f.named = ek != "" && (slices.ContainsFunc(f.input.Machines, func(m verifier.Machine) bool {
		return slices.ContainsFunc(m.EKs, func(n verifier.NamedEK) bool { return n.EK == ek })
	}) || slices.ContainsFunc(f.input.Records, func(r verifier.Record) bool { return r.EK == ek }))
	f.input.Evidence = f.provider.Judge(object, f.input.Hello, f.named, now)
	return f, nil
}

// findHello reads the hello that a proof refers to, by the name in it; the rules see to it that it is the right one.
func (c *Controller) findHello(ctx context.Context, f *found, claim verifier.Claim) error {
	if claim.Hello {
		return nil
	}
	name, err := f.provider.HelloOf(f.input.Request)
	if err != nil || name == "" {
		return nil //nolint:nilerr // whoever judges the evidence says what is wrong with it
	}
	hello := &certificatesv1.CertificateSigningRequest{}
	err = c.live.Get(ctx, types.NamespacedName{Name: name}, hello)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	f.input.Hello = hello
	return nil
}

// nodePresence finds out whether a Node exists. Nothing else of it counts.
func (c *Controller) nodePresence(ctx context.Context, name string) (verifier.Presence, error) {
	node := &metav1.PartialObjectMetadata{}
	node.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	err := c.live.Get(ctx, types.NamespacedName{Name: name}, node)
	switch {
	case apierrors.IsNotFound(err):
		return verifier.Absent, nil
	case err != nil:
		return 0, fmt.Errorf("node %s: %w", name, err)
	}
	return verifier.Present, nil
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
