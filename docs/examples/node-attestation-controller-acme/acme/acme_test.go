// SPDX-License-Identifier: Apache-2.0

package acme

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"path/filepath"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	node "github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/kubelet-authenticator-acme/acme"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// now is when requests are filed.
var now = time.Unix(1_800_000_000, 0)

var platformKey = key(1)

func key(seed byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
}

func public(private ed25519.PrivateKey) ed25519.PublicKey {
	return private.Public().(ed25519.PublicKey)
}

// fleet is a source of machines.
type fleet struct {
	machines []verifier.Machine
	err      error
}

func (f fleet) Machines(context.Context, time.Time) ([]verifier.Machine, error) {
	return f.machines, f.err
}

func machine(name, instance string) verifier.Machine {
	return verifier.Machine{Ref: verifier.MachineRef{Name: name}, ProviderID: "acme://" + instance}
}

// signer knows the platform, and instance i-1 as worker-1.
func signer() Signer {
	return Signer{public(platformKey), fleet{machines: []verifier.Machine{machine("worker-2", "i-2"), machine("worker-1", "i-1")}}}
}

func newPKCS10(t *testing.T) []byte {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: "worker-1", ProviderID: "acme://i-1"}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pkcs10
}

// evidence is what the node's half makes of a platform's service on a socket.
func evidenceOf(t *testing.T, service platform.Service, ask provider.Request) []byte {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "identity.sock")
	stop, err := service.Serve(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stop() }()
	document, err := node.Provider{Socket: socket}.Evidence(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	return document
}

// filed is a request as the API server holds it.
func filed(t *testing.T, name, signerName, provider string, pkcs10, document []byte) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	content, err := attestation.Request{PKCS10: pkcs10, Provider: provider, Data: document}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(now)},
		Spec:       certificatesv1.CertificateSigningRequestSpec{SignerName: signerName, Request: content},
	}
}

const (
	name   = "node-csr-honest"
	copied = "node-csr-copied"
)

// Each row has one fault; without it the same request passes.
func TestPair(t *testing.T) {
	pkcs10, other := newPKCS10(t), newPKCS10(t)
	at := func(when time.Time, instance string, key ed25519.PrivateKey) []byte {
		return evidenceOf(t, platform.Service{Instance: instance, Key: key, Now: func() time.Time { return when }},
			provider.Request{Name: name, SignerName: identity.SignerName, PKCS10: pkcs10})
	}
	document := at(now, "i-1", platformKey)
	// resigned is a document that the platform signs for a client that asks otherwise than the
	// node's half does.
	resigned := func(change func(*identity.Statement)) []byte {
		_, says, err := identity.Parse(document)
		if err != nil {
			t.Fatal(err)
		}
		change(&says)
		data, err := identity.Sign(platformKey, says)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	file := func(name, signerName string, pkcs10, document []byte) *certificatesv1.CertificateSigningRequest {
		return filed(t, name, signerName, identity.Provider, pkcs10, document)
	}
	honest := func(document []byte) *certificatesv1.CertificateSigningRequest {
		return file(name, identity.SignerName, pkcs10, document)
	}
	for what, c := range map[string]struct {
		request *certificatesv1.CertificateSigningRequest
		reason  verifier.Reason // empty: it passes
	}{
		"honest":                        {honest(document), ""},
		"nine minutes old when filed":   {honest(at(now.Add(-9*time.Minute), "i-1", platformKey)), ""},
		"platform's clock is ahead":     {honest(at(now.Add(30*time.Second), "i-1", platformKey)), ""},
		"copied under another name":     {file(copied, identity.SignerName, pkcs10, document), ReasonRequest},
		"copied with another key":       {file(name, identity.SignerName, other, document), ReasonRequest},
		"copied under another signer":   {file(name, identity.SignerName+"-2", pkcs10, document), ReasonRequest},
		"made for another audience":     {honest(resigned(func(s *identity.Statement) { s.Audience = "billing" })), ReasonRequest},
		"of another platform":           {honest(at(now, "i-1", key(2))), ReasonSignature},
		"signature of another document": {honest(mixed(t, document, at(now, "i-2", platformKey))), ReasonSignature},
		"expired":                       {honest(at(now.Add(-11*time.Minute), "i-1", platformKey)), ReasonAge},
		"of the future":                 {honest(at(now.Add(2*time.Minute), "i-1", platformKey)), ReasonAge},
		"trailing byte":                 {honest(append(bytes.Clone(document), '\n')), ReasonMalformed},
		"second document":               {honest(append(bytes.Clone(document), document...)), ReasonMalformed},
		"doubled key":                   {honest(bytes.Replace(document, []byte(`{`), []byte(`{"version":"acme/v1",`), 1)), ReasonMalformed},
		"doubled key in another case":   {honest(bytes.Replace(document, []byte(`}`), []byte(`,"Signature":"AA=="}`), 1)), ReasonMalformed},
		"another version":               {honest(bytes.Replace(document, []byte("acme/v1"), []byte("acme/v2"), 1)), ReasonMalformed},
		"doubled key in the statement":  {honest(doubled(t, document)), ReasonMalformed},
		"instance in another spelling":  {honest(resigned(func(s *identity.Statement) { s.Instance = "I-1" })), ReasonMalformed},
		"too long":                      {honest(resigned(func(s *identity.Statement) { s.Nonce = make([]byte, identity.MaxSize) })), ReasonMalformed},
		"another provider's":            {filed(t, name, identity.SignerName, "insecure", pkcs10, document), ReasonMalformed},
		"no request of ours":            {&certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}}, ReasonMalformed},
	} {
		t.Run(what, func(t *testing.T) {
			err := signer().VerifyClientAttestationData(t.Context(), c.request)
			machine, nameErr := signer().MachineName(t.Context(), c.request)
			if c.reason == "" {
				if err != nil || nameErr != nil || machine != "worker-1" {
					t.Errorf("machine %q: %v, %v", machine, err, nameErr)
				}
				return
			}
			for _, err := range []error{err, nameErr} {
				refusals, ok := errors.AsType[verifier.Refusals](err)
				if !ok || len(refusals) != 1 || refusals.Reason() != c.reason || machine != "" {
					t.Errorf("machine %q: %v, want %s", machine, err, c.reason)
				}
			}
		})
	}
}

// mixed is one document's statement under the other's signature.
func mixed(t *testing.T, statement, signature []byte) []byte {
	t.Helper()
	_, says, err := identity.Parse(statement)
	if err != nil {
		t.Fatal(err)
	}
	own, err := identity.Sign(platformKey, says)
	if err != nil {
		t.Fatal(err)
	}
	cut := bytes.Index(own, []byte(`,"signature"`))
	return append(bytes.Clone(own[:cut]), signature[bytes.Index(signature, []byte(`,"signature"`)):]...)
}

// doubled has a key twice in the statement; whether it is signed does not matter, since it is not
// read so far.
func doubled(t *testing.T, document []byte) []byte {
	t.Helper()
	var d identity.Document
	if err := json.Unmarshal(document, &d); err != nil {
		t.Fatal(err)
	}
	d.Statement = bytes.Replace(d.Statement, []byte(`{`), []byte(`{"instance":"i-2",`), 1)
	data, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Which machine it is follows from what an authority says of machines, and is waited for.
func TestMachineName(t *testing.T) {
	pkcs10 := newPKCS10(t)
	service := platform.Service{Instance: "i-1", Key: platformKey, Now: func() time.Time { return now }}
	request := filed(t, name, identity.SignerName, identity.Provider, pkcs10,
		evidenceOf(t, service, provider.Request{Name: name, SignerName: identity.SignerName, PKCS10: pkcs10}))
	away := errors.New("away")
	for what, c := range map[string]struct {
		known  fleet
		reason verifier.Reason // of a refusal
		err    error           // otherwise
		want   string
	}{
		"known":                 {known: fleet{machines: []verifier.Machine{machine("worker-1", "i-1")}}, want: "worker-1"},
		"instance was replaced": {known: fleet{machines: []verifier.Machine{machine("worker-1", "i-9")}}},
		"longer ID":             {known: fleet{machines: []verifier.Machine{machine("worker-1", "i-11")}}},
		"two of one instance":   {known: fleet{machines: []verifier.Machine{machine("a", "i-1"), machine("b", "i-1")}}, reason: verifier.ReasonAmbiguousMachine},
		"nobody knows":          {known: fleet{err: away}, err: away},
	} {
		t.Run(what, func(t *testing.T) {
			got, err := Signer{public(platformKey), c.known}.MachineName(t.Context(), request)
			refusals, refused := errors.AsType[verifier.Refusals](err)
			if got != c.want || refused != (c.reason != "") || refused && refusals.Reason() != c.reason || !refused && !errors.Is(err, c.err) {
				t.Errorf("machine %q: %v", got, err)
			}
		})
	}
}

// What the operator left out is no verdict on a node: it waits.
func TestWithoutAKeyNothingIsJudged(t *testing.T) {
	request := filed(t, name, identity.SignerName, identity.Provider, newPKCS10(t), []byte("{}"))
	for what, key := range map[string]ed25519.PublicKey{"none": nil, "short": make([]byte, 31)} {
		err := Signer{PlatformKey: key}.VerifyClientAttestationData(t.Context(), request)
		if _, refused := errors.AsType[verifier.Refusals](err); err == nil || refused {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestServingIsRefused(t *testing.T) {
	err := signer().VerifyServingAttestationData(t.Context(), &certificatesv1.CertificateSigningRequest{})
	if _, refused := errors.AsType[verifier.Refusals](err); !refused {
		t.Error(err)
	}
}
