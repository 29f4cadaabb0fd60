// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// suspend creates a NodeSuspension, as kubectl attest does.
func suspend(t *testing.T, ek string) *v1alpha1.NodeSuspension {
	t.Helper()
	s := &v1alpha1.NodeSuspension{ObjectMeta: metav1.ObjectMeta{Name: "ek-" + ek, Namespace: controllerprocess.Namespace}}
	s.Spec = v1alpha1.NodeSuspensionSpec{EK: ek, Reason: "the machine was stolen"}
	if err := shared.client.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(shared.client.Delete(context.WithoutCancel(t.Context()), s)); err != nil {
			t.Error(err)
		}
	})
	return s
}

// mustBeDenied fails the test unless a request of the machine with the bootstrap token is denied,
// since it is suspended.
func mustBeDenied(t *testing.T, m *fleet.Machine) {
	t.Helper()
	fresh := *m
	fresh.Certificate, fresh.Key = nil, nil
	var denied *fleet.RefusedError
	if err := (&node{&fresh}).attest(t.Context()); !errors.As(err, &denied) || denied.Decision.Reason != attestation.ReasonSuspended {
		t.Errorf("%s: %v", m.Name, err)
	}
}

// A machine is stolen, with its TPM, and suspended. Neither its certificate nor a bootstrap token
// gets it in. Its record is deleted, and it is entered into the inventory again, under another
// name: still out. It is resumed, and attests.
func TestSuspendedMachine(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "suspended", 2)
	victim, other := nodes[0], nodes[1]
	victim.joins(t)
	other.joins(t)
	stolen, record := victim.credential(), victim.record(t)
	thief := append(encodings(t, stolen), stolen)

	s := suspend(t, record.Spec.EK.Fingerprint)
	t.Logf("refused after %s", stolen.RefusedWithin(t, refusedIn, attestation.MessageSuspended))
	time.Sleep(refusedIn) // the second API server
	mustBeRefused(t, attestation.MessageSuspended, thief...)
	other.credential().MustWrite(t)
	hello, err := newForger(t, victim).object(attestation.HelloSignerName, []byte("{}"))
	harness.Must(t, err)
	for _, c := range thief {
		_, err := c.Client(t).CertificatesV1().CertificateSigningRequests().Create(t.Context(), hello, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if !harness.IsRefused(err, attestation.MessageSuspended) {
			t.Errorf("it may file a hello: %v", err)
		}
	}
	if err := victim.attest(t.Context()); !harness.IsRefused(err, attestation.MessageSuspended) {
		t.Errorf("it may ask for a new certificate with its own: %v", err)
	}
	mustBeDenied(t, victim.Machine)

	// A revocation does not turn the suspension into less.
	revoke(t, v1alpha1.RevokeImmediately, nil, victim)
	time.Sleep(time.Second)
	mustBeRefused(t, attestation.MessageSuspended, thief...)

	if err := shared.client.Delete(t.Context(), record); err != nil {
		t.Fatal(err)
	}
	mustBeDenied(t, victim.Machine)
	renamed := *victim.Machine
	renamed.Name, renamed.ID = "suspended-renamed", "test://renamed"
	setInventory(t, other.Machine, &renamed)
	time.Sleep(3 * time.Second) // the inventory is read again
	mustBeDenied(t, &renamed)
	mustBeRefused(t, attestation.MessageSuspended, thief...)

	if err := shared.client.Delete(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	// What was suspended stays revoked. With evidence the machine is in again.
	stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	time.Sleep(refusedIn) // the second API server
	mustBeRefused(t, attestation.MessageRevoked, thief...)
	renamed.Certificate, renamed.Key = nil, nil
	back := &node{&renamed}
	if err := back.attest(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c := back.record(t); c.Status.Suspension != nil {
		t.Errorf("%+v", c.Status.Suspension)
	}
}
