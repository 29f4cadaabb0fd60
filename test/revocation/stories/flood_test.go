// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"crypto"
	"math"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

const (
	// headStart is how long a flood lasts before the node asks for a certificate.
	headStart = 3 * time.Second
	// backIn is how long the node may then take. Without its annotation it waits for the backlog,
	// which grows.
	backIn = 20 * time.Second
)

// A revoked key may still file hellos and proofs. A thief files them as fast as the API server
// accepts them, in the node's name. He copies all that can be copied of the node's requests. The
// node comes back all the same.
func TestNodeComesBackThroughAFlood(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "flooded", 2)
	victim, other := nodes[0], nodes[1]
	victim.joins(t)
	stolen := victim.credential()
	revoke(t, v1alpha1.RevokeImmediately, nil, victim)
	stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)

	thief := newForger(t, victim)
	own, others := hello(t, victim.Machine), hello(t, other.Machine)
	otherAK := own
	otherAK.AKPublic = others.AKPublic
	for _, c := range []struct {
		title string
		flood func(t *testing.T) func(int) (*certificatesv1.CertificateSigningRequest, error)
	}{
		{"hellos of another machine", thief.hellos(others)},
		{"copies of its hello", thief.hellos(own)},
		{"its hello with another AK", thief.hellos(otherAK)},
		{"proofs for a copy of its hello", thief.proofs(stolen.Config, own)},
	} {
		t.Run(c.title, func(t *testing.T) {
			request := c.flood(t)
			ctx, cancel := context.WithCancel(t.Context())
			filed := 0
			var filing sync.WaitGroup
			filing.Go(func() { filed = harness.Flood(ctx, t, stolen.Config, math.MaxInt, request) })
			defer func() {
				cancel()
				filing.Wait()
				harness.Must(t, shared.client.DeleteAllOf(context.WithoutCancel(ctx), &certificatesv1.CertificateSigningRequest{}))
			}()
			time.Sleep(headStart)
			began := time.Now()
			harness.Must(t, victim.attest(t.Context()))
			took := time.Since(began)
			cancel()
			filing.Wait()
			t.Logf("back after %s, beside %d requests", took.Round(10*time.Millisecond), filed)
			if took > backIn {
				t.Errorf("the node was kept out for %s", took)
			}
			victim.credential().MustWrite(t)
			stolen.RefusedWithin(t, 0, attestation.MessageRevoked)
		})
	}
}

// hello returns what a machine says in a hello.
func hello(t *testing.T, m *fleet.Machine) attestation.Hello {
	t.Helper()
	document, _, err := m.Provider.(provider.Challenger).Hello(t.Context(), provider.Request{SignerName: tpm.SignerName, Version: attestation.VersionTPM})
	harness.Must(t, err)
	parsed, err := attestation.ParseHello(document)
	harness.Must(t, err)
	return *parsed
}

// forger makes requests for its own key, in the name of a node.
type forger struct {
	key    crypto.Signer
	pkcs10 []byte
}

func newForger(t *testing.T, victim *node) forger {
	t.Helper()
	key, _, err := csr.NewKey()
	harness.Must(t, err)
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: victim.Name, ProviderID: victim.ProviderID()}, key)
	harness.Must(t, err)
	return forger{key, pkcs10}
}

func (f forger) object(signer string, document []byte) (*certificatesv1.CertificateSigningRequest, error) {
	content, err := attestation.Request{PKCS10: f.pkcs10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	return csr.Object(csr.NewName(), signer, content, f.key.Public(), nil), nil
}

func (f forger) hellos(h attestation.Hello) func(*testing.T) func(int) (*certificatesv1.CertificateSigningRequest, error) {
	return func(t *testing.T) func(int) (*certificatesv1.CertificateSigningRequest, error) {
		document, err := h.Marshal()
		harness.Must(t, err)
		return func(int) (*certificatesv1.CertificateSigningRequest, error) {
			return f.object(attestation.HelloSignerName, document)
		}
	}
}

// proofs are for a hello that is filed with the same credential.
func (f forger) proofs(credential *rest.Config, h attestation.Hello) func(*testing.T) func(int) (*certificatesv1.CertificateSigningRequest, error) {
	return func(t *testing.T) func(int) (*certificatesv1.CertificateSigningRequest, error) {
		filed, err := f.hellos(h)(t)(0)
		harness.Must(t, err)
		api, err := csr.NewClient(credential)
		harness.Must(t, err)
		_, err = api.Create(t.Context(), filed, false)
		harness.Must(t, err)
		document, err := oddrequest.Proof(filed.Name)
		harness.Must(t, err)
		return func(int) (*certificatesv1.CertificateSigningRequest, error) {
			return f.object(tpm.SignerName, document)
		}
	}
}
