// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/sources"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/null"
)

// listed writes an inventory of machines by their bootstrap tokens.
func (f *fleet) listed(t *testing.T, tokens map[string]string) {
	t.Helper()
	list := fmt.Sprintf("apiVersion: %s\nkind: %s\nmachines:\n", inventory.APIVersion, inventory.Kind)
	for name, token := range tokens {
		id, _, _ := strings.Cut(token, ".")
		list += fmt.Sprintf("- {nodeName: %s, providerID: \"test://%s\", bootstrapTokenID: %q}\n", name, name, id)
	}
	harness.WriteFile(t, f.inventory, []byte(list))
}

// newToken makes a bootstrap token.
func (f *fleet) newToken(t *testing.T) string {
	t.Helper()
	token, err := f.CreateBootstrapToken(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// oneRound is a request with a document that no challenge precedes.
func (f *fleet) oneRound(t *testing.T, credential *csr.Client, provider, signer, document, nodeName, idOf string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	key, _, err := csr.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: "test://" + idOf}, key)
	if err != nil {
		t.Fatal(err)
	}
	content, err := attestation.Request{PKCS10: pkcs10, Provider: provider, Data: []byte(document)}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	filed, err := credential.Create(t.Context(), csr.Object(csr.NewName(), signer, content, key.Public(), nil), false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}

func (f *fleet) clientOf(t *testing.T, token string) *csr.Client {
	t.Helper()
	c, err := csr.NewClient(f.asToken(token))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The always-allow signer goes by the token alone, and obeys every other rule.
func TestInsecureSigner(t *testing.T) {
	f := newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.InsecureSigner = verifier.InsecureSignerName
		machines := f.config.Machines.(*sources.Inventory)
		f.more = []evidence.Provider{evidence.FromSigner(verifier.InsecureProvider, evidence.InsecureSigner{Tokens: machines})}
	})
	mine, others, nobodys := f.newToken(t), f.newToken(t), f.newToken(t)
	f.listed(t, map[string]string{"insecure-1": mine, "insecure-2": others})
	const document = `{"version":"insecure/v1"}`
	ask := func(token, signer, document, name, idOf string) *certificatesv1.CertificateSigningRequest {
		return f.oneRound(t, f.clientOf(t, token), insecure.Name, signer, document, name, idOf)
	}
	f.refused(t, ask(others, insecure.SignerName, document, "insecure-1", "insecure-1"), string(verifier.ReasonProviderIDMismatch))
	f.refused(t, ask(others, insecure.SignerName, document, "insecure-1", "insecure-2"), string(verifier.ReasonNodeNameMismatch))
	f.refused(t, ask(mine, insecure.SignerName, `{"version":"insecure/v2"}`, "insecure-1", "insecure-1"), string(verifier.ReasonMalformedRequest))
	f.refused(t, ask(mine, tpm.SignerName, document, "insecure-1", "insecure-1"), string(verifier.ReasonProviderMismatch))
	waits := ask(nobodys, insecure.SignerName, document, "insecure-3", "insecure-3")

	f.issued(t, ask(mine, insecure.SignerName, document, "insecure-1", "insecure-1"), "insecure-1")
	// once
	f.refused(t, ask(mine, insecure.SignerName, document, "insecure-1", "insecure-1"), string(verifier.ReasonIdentityBound))
	if got := f.get(t, waits.Name); reasonOf(got) != "" || len(got.Status.Conditions) > 0 {
		t.Errorf("a token that nobody has listed yet: %+v", got.Status)
	}
	f.listed(t, map[string]string{"insecure-1": mine, "insecure-2": others, "insecure-3": nobodys})
	f.issued(t, waits, "insecure-3")
	if n := f.records(t); n != 2 {
		t.Errorf("%d records", n)
	}
}

// A provider out of the tree says what evidence is worth, and no more: machine, name, requester and
// record are judged as for every other.
func TestProviderOutOfTheTree(t *testing.T) {
	f := newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.Providers = append(p.Providers, verifier.Provider{Name: null.Name})
		p.Signers = append(p.Signers, verifier.Signer{Name: null.SignerName, Providers: []string{null.Name}})
		f.more = []evidence.Provider{evidence.FromSigner(null.Name, null.Signer{})}
	})
	token := f.newToken(t)
	f.listed(t, map[string]string{"null-1": token})
	ask := func(name, idOf string) *certificatesv1.CertificateSigningRequest {
		return f.oneRound(t, f.clientOf(t, token), null.Name, null.SignerName, "anything", name, idOf)
	}
	f.refused(t, ask("null-1", "null-2"), string(verifier.ReasonProviderIDMismatch))
	unknown := ask("null-2", "null-2")
	first := f.issued(t, ask("null-1", "null-1"), "null-1")
	again := f.issued(t, ask("null-1", "null-1"), "null-1")
	if bytes.Equal(first, again) || f.record(t, "null-1").Spec.Provider != null.Name {
		t.Error("the same certificate, or another provider's record")
	}
	if got := f.get(t, unknown.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("a machine that nobody knows: %+v", got.Status)
	}
}

// What TPMSigner says of a proof is what the controller decides by.
func TestTPMSigner(t *testing.T) {
	f := newFleet(t, nil)
	m := f.newMachine(t, "asked-about")
	f.inventoried(t, m)
	signer := tpmprovider.Signer{Provider: f.tpm, Requests: f.client, Machines: f.config.Machines}
	p := f.newPeer(t, m.chip, f.asToken(m.token), m.name, m.name)
	_, proof := p.attests(t)
	if err := signer.VerifyClientAttestationData(t.Context(), proof); err != nil {
		t.Error(err)
	}
	if name, err := signer.MachineName(t.Context(), proof); err != nil || name != m.name {
		t.Errorf("machine %q: %v", name, err)
	}
	renamed := proof.DeepCopy()
	renamed.Name = csr.NewName()
	var refusals verifier.Refusals
	if err := signer.VerifyClientAttestationData(t.Context(), renamed); !errors.As(err, &refusals) {
		t.Errorf("a copy: %v", err)
	}
	lonely := f.lonelyProof(t, "node-csr-nowhere")
	filed := p.object(t, tpm.SignerName, lonely)
	filed.UID = "as-the-api-server-has-it"
	if err := signer.VerifyClientAttestationData(t.Context(), filed); err == nil || errors.As(err, &refusals) {
		t.Errorf("a proof whose hello is not there: %v", err)
	}
	if err := signer.VerifyServingAttestationData(t.Context(), proof); err == nil {
		t.Error("it vouches for serving certificates")
	}
	f.listed(t, map[string]string{"another": f.newToken(t)})
	if name, err := signer.MachineName(t.Context(), proof); err != nil || name != "" {
		t.Errorf("no machine has its EK: %q, %v", name, err)
	}
}
