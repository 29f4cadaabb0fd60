// SPDX-License-Identifier: Apache-2.0

package gce_test

import (
	"crypto/x509"
	"errors"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/googlekeys"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	node "github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/gce"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/gce"
)

const clusterUID = "some-cluster"

// platform is an imitation of Google with one VM, and what the two sides see of it.
type platform struct {
	*google.Google
	metadata, keys *google.Service
	node           node.Provider
	client         *googlekeys.Client
	verifier       *gce.Verifier
}

func newPlatform(t *testing.T) *platform {
	t.Helper()
	p := &platform{Google: google.New("platform")}
	p.metadata = p.Metadata(google.VM{Project: "some-project", ProjectNumber: 12, Zone: "europe-west1-b", Name: "worker-0", ID: "28759494850740061"})
	p.keys = p.Keys()
	local := httptest.NewServer(p.metadata)
	t.Cleanup(local.Close)
	p.node = node.Provider{Metadata: metadata.Client{Address: local.Listener.Addr().String()}, ClusterUID: clusterUID}
	published := httptest.NewTLSServer(p.keys)
	t.Cleanup(published.Close)
	pool := x509.NewCertPool()
	pool.AddCert(published.Certificate())
	var err error
	if p.client, err = googlekeys.New(googlekeys.Config{URL: published.URL, RootCAs: pool}); err != nil {
		t.Fatal(err)
	}
	if p.verifier, err = gce.New(gce.Config{ClusterUID: clusterUID}); err != nil {
		t.Fatal(err)
	}
	return p
}

// file has the node make its evidence, and files it under its name.
func (p *platform) file(t *testing.T, name string) verifier.Filed {
	t.Helper()
	request := provider.Request{PKCS10: []byte("PKCS#10 of the node"), Name: name, SignerName: node.SignerName, Usages: []string{"client auth"}}
	data, err := p.node.Evidence(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	block, err := attestation.Request{PKCS10: request.PKCS10, Provider: p.node.Name(), Data: data}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return verifier.Filed{Name: name, SignerName: request.SignerName, Request: block, Usages: request.Usages, Created: time.Now()}
}

func (p *platform) fetch(t *testing.T) gce.KeySet {
	t.Helper()
	data, _, err := p.client.Fetch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	keys, err := gce.ParseKeySet(data)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// What the node makes, the controller accepts: each side computes the audience on its own.
func TestFromPlatformToVerdict(t *testing.T) {
	p := newPlatform(t)
	verified, err := p.verifier.Verify(p.file(t, "node-csr-a"), p.fetch(t))
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.node.ProviderID(t.Context())
	if err != nil || !verified.HasProviderID(id) || verified.Instance.ID != "28759494850740061" {
		t.Errorf("%q of %+v, %v", id, verified, err)
	}
}

// Another node reads the request, and files its evidence with a key of its own, or again after the
// request is deleted.
func TestImpostor(t *testing.T) {
	p := newPlatform(t)
	keys, filed := p.fetch(t), p.file(t, "node-csr-a")
	content, err := attestation.Parse(filed.Request)
	if err != nil {
		t.Fatal(err)
	}
	content.PKCS10 = []byte("PKCS#10 of the impostor")
	copied, replayed := filed, filed
	if copied.Request, err = content.Marshal(); err != nil {
		t.Fatal(err)
	}
	replayed.Name = "node-csr-b"
	for what, filed := range map[string]verifier.Filed{"copied": copied, "replayed": replayed} {
		verified, err := p.verifier.Verify(filed, keys)
		if refusals, ok := errors.AsType[verifier.Refusals](err); !ok || refusals.Reason() != cloud.ReasonRequest {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
}

// A service that uses other keys than Google gets nothing accepted, and nobody denied: the request
// waits for a key set that has its key.
func TestLyingServices(t *testing.T) {
	p := newPlatform(t)
	good := p.fetch(t)
	honest := p.file(t, "node-csr-a")
	p.metadata.Set(google.Lying)
	forged := p.file(t, "node-csr-b")
	p.keys.Set(google.Lying)
	lies := p.fetch(t)
	for what, c := range map[string]struct {
		filed verifier.Filed
		keys  gce.KeySet
	}{
		"the key set lies":          {honest, lies},
		"the metadata service lies": {forged, good},
	} {
		verified, err := p.verifier.Verify(c.filed, c.keys)
		if _, ok := errors.AsType[*gce.UnknownKeyError](err); !ok || verified != nil {
			t.Errorf("%s: %+v, %v", what, verified, err)
		}
	}
}

// Google rotates its keys between two fetches. A request from before is still accepted, and one
// from after it waits for the next fetch.
func TestRotationOverTheNetwork(t *testing.T) {
	p := newPlatform(t)
	before, old := p.fetch(t), p.file(t, "node-csr-a")
	p.Rotate()
	p.Rotate() // the key that signs now was not published at the first fetch
	young := p.file(t, "node-csr-b")
	_, err := p.verifier.Verify(young, before)
	if _, ok := errors.AsType[*gce.UnknownKeyError](err); !ok {
		t.Errorf("before the fetch: %v", err)
	}
	keys := p.fetch(t).Merge(before, time.Now().Add(time.Second)) // tokens have whole seconds
	for what, filed := range map[string]verifier.Filed{"old": old, "young": young} {
		if _, err := p.verifier.Verify(filed, keys); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
