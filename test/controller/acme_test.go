// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	acmenode "github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/kubelet-authenticator-acme/acme"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/node-attestation-controller-acme/acme"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/evidence"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// instance is a machine of the platform Acme.
type instance struct {
	*fleet
	node     acmenode.Provider
	nodeName string
	token    string
	key      crypto.Signer
	pkcs10   []byte
}

// newInstance starts the platform's service of an instance. Its node calls itself nodeName.
func (f *fleet) newInstance(t *testing.T, platformKey ed25519.PrivateKey, id, nodeName string) *instance {
	t.Helper()
	i := &instance{fleet: f, node: acmenode.Provider{Socket: filepath.Join(t.TempDir(), "identity.sock")}, nodeName: nodeName, token: f.newToken(t)}
	stop, err := platform.Service{Instance: id, Key: platformKey, Now: time.Now}.Serve(i.node.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop() })
	providerID, err := i.node.ProviderID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if i.key, _, err = csr.NewKey(); err != nil {
		t.Fatal(err)
	}
	if i.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: nodeName, ProviderID: providerID}, i.key); err != nil {
		t.Fatal(err)
	}
	return i
}

// evidence returns the evidence of the node's half for a request with this name.
func (i *instance) evidence(t *testing.T, name string) []byte {
	t.Helper()
	document, err := i.node.Evidence(t.Context(), provider.Request{Name: name, SignerName: i.node.SignerName(), PKCS10: i.pkcs10})
	if err != nil {
		t.Fatal(err)
	}
	return document
}

// files a request with the instance's key and token.
func (i *instance) files(t *testing.T, name string, document []byte) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	return i.filesAs(t, i.clientOf(t, i.token), name, document)
}

func (i *instance) filesAs(t *testing.T, as *csr.Client, name string, document []byte) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	content, err := attestation.Request{PKCS10: i.pkcs10, Provider: i.node.Name(), Data: document}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	filed, err := as.Create(t.Context(), csr.Object(name, i.node.SignerName(), content, i.key.Public(), nil), false)
	if err != nil {
		t.Fatal(err)
	}
	return filed
}

// evidenceIn is the evidence in a request, as anybody who may get it reads it.
func evidenceIn(t *testing.T, object *certificatesv1.CertificateSigningRequest) []byte {
	t.Helper()
	content, err := attestation.Parse(object.Spec.Request)
	if err != nil {
		t.Fatal(err)
	}
	return content.Data
}

// acmeInventory writes an inventory with one machine of each instance, under the provider IDs
// given.
func (f *fleet) acmeInventory(t *testing.T, machines map[string]*instance) {
	t.Helper()
	var list strings.Builder
	fmt.Fprintf(&list, "apiVersion: %s\nkind: %s\nmachines:\n", inventory.APIVersion, inventory.Kind)
	for providerID, i := range machines {
		token, _, _ := strings.Cut(i.token, ".")
		fmt.Fprintf(&list, "- {nodeName: %s, providerID: %q, bootstrapTokenID: %q}\n", i.nodeName, providerID, token)
	}
	harness.WriteFile(t, f.inventory, []byte(list.String()))
}

func newPlatform(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// newAcmeFleet returns a fleet whose controller has the providers acme and tpm, and acme's policy.
func newAcmeFleet(t *testing.T, platformKey ed25519.PrivateKey) *fleet {
	t.Helper()
	return newFleet(t, func(f *fleet, p *verifier.Policy) {
		p.Token = verifier.Required
		p.Providers = append(p.Providers, verifier.Provider{Name: identity.Provider})
		p.Signers = append(p.Signers, verifier.Signer{Name: identity.SignerName, Providers: []string{identity.Provider}})
		signer := acme.Signer{PlatformKey: platformKey.Public().(ed25519.PublicKey), Machines: f.config.Machines}
		f.more = []evidence.Provider{evidence.FromSigner(identity.Provider, signer)}
	})
}

// The example's two halves together. The honest node gets its certificate. A client that copies its
// evidence gets none, even if it is another node with a certificate of its own.
func TestAcmePair(t *testing.T) {
	platformKey := newPlatform(t)
	f := newAcmeFleet(t, platformKey)
	honest, thief := f.newInstance(t, platformKey, "i-1", "acme-1"), f.newInstance(t, platformKey, "i-2", "acme-2")
	f.acmeInventory(t, map[string]*instance{"acme://i-1": honest, "acme://i-2": thief})
	name := csr.NewName()
	first := honest.files(t, name, honest.evidence(t, name))
	certificate := f.issued(t, first, "acme-1")
	block, _ := pem.Decode(certificate)
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil || leaf.Subject.CommonName != "system:node:acme-1" {
		t.Errorf("%v, %v", leaf.Subject, err)
	}
	record := f.record(t, "acme-1")
	if record.Spec.Provider != identity.Provider || record.Spec.EK != nil || record.Spec.ProviderID != "acme://i-1" {
		t.Errorf("%+v", record.Spec)
	}

	// The thief has a copy of the first request, with the victim's own token even.
	stolen := evidenceIn(t, f.get(t, first.Name))
	// the victim's key under another name
	f.refused(t, honest.files(t, csr.NewName(), stolen), string(acme.ReasonRequest))
	posing := &instance{fleet: f, node: honest.node, nodeName: "acme-1", token: honest.token}
	if posing.key, _, err = csr.NewKey(); err != nil {
		t.Fatal(err)
	}
	if posing.pkcs10, err = csr.PKCS10(csr.Identity{NodeName: "acme-1", ProviderID: "acme://i-1"}, posing.key); err != nil {
		t.Fatal(err)
	}
	// a key of its own
	f.refused(t, posing.files(t, csr.NewName(), stolen), string(acme.ReasonRequest))
	// Under the name of the victim's request, after that request is deleted.
	if err := f.client.Delete(t.Context(), f.get(t, first.Name)); err != nil {
		t.Fatal(err)
	}
	f.refused(t, posing.files(t, name, stolen), string(acme.ReasonRequest))

	// Its own evidence is genuine, and says that it is another machine.
	posing.node = thief.node
	again := csr.NewName()
	f.refused(t, posing.files(t, again, posing.evidence(t, again)), string(verifier.ReasonTokenNotForMachine))
	posing.token, again = thief.token, csr.NewName()
	f.refused(t, posing.files(t, again, posing.evidence(t, again)), string(verifier.ReasonProviderIDMismatch))
	// The forger's own platform signs any statement.
	forger := f.newInstance(t, newPlatform(t), "i-1", "acme-1")
	forged := csr.NewName()
	f.refused(t, forger.filesAs(t, f.clientOf(t, honest.token), forged, forger.evidence(t, forged)), string(acme.ReasonSignature))

	// As itself it is welcome. With its own certificate it gets no further as another.
	own := csr.NewName()
	its := f.issued(t, thief.files(t, own, thief.evidence(t, own)), "acme-2")
	asNode, err := csr.NewClient(f.asNode(its, keyOf(t, thief.key)))
	if err != nil {
		t.Fatal(err)
	}
	f.refused(t, posing.filesAs(t, asNode, csr.NewName(), stolen), string(verifier.ReasonRequesterNotAllowed))
	itsBlock, _ := pem.Decode(its)
	itsLeaf, err := x509.ParseCertificate(itsBlock.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	f.onlyFor(t, leaf, itsLeaf)

	// Renewal: evidence again, and the certificate in the record.
	renewal := csr.NewName()
	f.issued(t, thief.filesAs(t, asNode, renewal, thief.evidence(t, renewal)), "acme-2")
	if n := len(f.record(t, "acme-2").Status.Certificates); n != 2 {
		t.Errorf("%d certificates are noted", n)
	}
}

// An instance that was replaced is no machine any more, and the one in its place is another, though
// it has its node name.
func TestAcmeInstanceIsReplaced(t *testing.T) {
	platformKey := newPlatform(t)
	f := newAcmeFleet(t, platformKey)
	old := f.newInstance(t, platformKey, "i-old", "acme-3")
	f.acmeInventory(t, map[string]*instance{"acme://i-old": old})
	name := csr.NewName()
	f.issued(t, old.files(t, name, old.evidence(t, name)), "acme-3")

	replacement := f.newInstance(t, platformKey, "i-new", "acme-3")
	f.acmeInventory(t, map[string]*instance{"acme://i-new": replacement})
	name = csr.NewName()
	f.refused(t, replacement.files(t, name, replacement.evidence(t, name)), string(verifier.ReasonIdentityBound))
	name = csr.NewName()
	waits := old.files(t, name, old.evidence(t, name))
	harness.Eventually(t, harness.Soon, "it is said what the old one waits for", func() bool {
		return f.said(t, waits, string(verifier.ReasonAttestationUnavailable))
	})
	if got := f.get(t, waits.Name); len(got.Status.Conditions) > 0 {
		t.Errorf("%+v", got.Status)
	}
	f.ahead.Store(int64(verifier.DefaultWaitDeadline))
	f.refused(t, waits, string(verifier.ReasonAttestationUnavailable))
	f.ahead.Store(0)

	// The operator says that it is another machine now.
	if err := f.client.Delete(t.Context(), f.record(t, "acme-3")); err != nil {
		t.Fatal(err)
	}
	name = csr.NewName()
	f.issued(t, replacement.files(t, name, replacement.evidence(t, name)), "acme-3")
}

func keyOf(t *testing.T, key crypto.Signer) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// What the example's program has in a cluster.
const (
	acmeManifests = "../../docs/examples/node-attestation-controller-acme/kubernetes"
	acmeNamespace = "node-attestation-acme-system"
	acmeAccount   = "node-attestation-controller-acme"
)

// The example's own program, as an infrastructure provider runs it, on the rights of its service
// account.
func TestAcmeProgram(t *testing.T) {
	platformKey := newPlatform(t)
	f := newFleet(t, nil) // its own controller takes no notice of this signer
	f.namespace = acmeNamespace
	kubeconfig := f.acmeIdentity(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "node-attestation-controller-acme")
	if err := compile.Program(t.Context(), "../..", path, "./docs/examples/node-attestation-controller-acme"); err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(platformKey.Public())
	if err != nil {
		t.Fatal(err)
	}
	publicKey := filepath.Join(dir, "platform.pem")
	harness.WriteFile(t, publicKey, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	honest, thief := f.newInstance(t, platformKey, "i-1", "acme-4"), f.newInstance(t, platformKey, "i-2", "acme-5")
	f.acmeInventory(t, map[string]*instance{"acme://i-1": honest, "acme://i-2": thief})
	process, err := testbed.StartProcess(testbed.Command{
		Path: path, LogFile: filepath.Join(dir, "log"), Args: []string{
			"--kubeconfig=" + kubeconfig, "--cluster-uid=" + f.cluster, "--inventory=" + f.inventory,
			"--ca-certificate=" + f.caCertificate, "--ca-key=" + f.caKey, "--platform-key=" + publicKey,
			"--metrics-bind-address=0", "--health-bind-address=0",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := process.Stop(20 * time.Second); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(process.LogTail())
		}
	})
	name := csr.NewName()
	first := honest.files(t, name, honest.evidence(t, name))
	f.issued(t, first, "acme-4")
	f.refused(t, thief.files(t, csr.NewName(), evidenceIn(t, f.get(t, first.Name))), string(acme.ReasonRequest))
	if err := f.client.Get(t.Context(), client.ObjectKey{Namespace: acmeNamespace, Name: acmeAccount}, &coordinationv1.Lease{}); err != nil {
		t.Error(err)
	}
	if log := process.LogTail(); strings.Contains(log, "forbidden") || strings.Contains(log, "cannot ") {
		t.Errorf("it has not the rights that it needs:\n%s", log)
	}
}

// acmeIdentity gives the example's program its rights, and returns the kubeconfig of its service
// account.
func (f *fleet) acmeIdentity(t *testing.T) string {
	t.Helper()
	manifest := filepath.Join(acmeManifests, "controller.yaml")
	if out, err := f.RunKubectl(t.Context(), f.admin(t), "apply", "-f", manifest); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := f.client.DeleteAllOf(context.WithoutCancel(t.Context()), &v1alpha1.NodeAttestation{}, client.InNamespace(acmeNamespace)); err != nil {
			t.Error(err)
		}
	})
	token, err := f.Client().CoreV1().ServiceAccounts(acmeNamespace).CreateToken(t.Context(), acmeAccount, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := f.WriteKubeconfig(path, &clientcmdapi.AuthInfo{Token: token.Status.Token}); err != nil {
		t.Fatal(err)
	}
	return path
}

// The example's overlay fits the policies as they are. The API server accepts them. Each names both
// controllers, and each list of signers has the example's signer.
func TestAcmePolicies(t *testing.T) {
	admin := shared.admin(t)
	rendered, err := shared.RunKubectl(t.Context(), admin, "kustomize", acmeManifests)
	if err != nil {
		t.Fatalf("%v: %s", err, rendered)
	}
	policies := 0
	for document := range strings.SplitSeq(rendered, "\n---\n") {
		if !strings.Contains(document, "\nkind: ValidatingAdmissionPolicy\n") {
			continue
		}
		policies++
		path := filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(path, []byte(document), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := shared.RunKubectl(t.Context(), admin, "apply", "--dry-run=server", "-o", "json", "-f", path)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		policy := &admissionv1.ValidatingAdmissionPolicy{}
		if err := json.Unmarshal([]byte(out), policy); err != nil {
			t.Fatal(err)
		}
		for _, v := range policy.Spec.Variables {
			controllers, signers := strings.Contains(v.Expression, ":"+acmeAccount+"'"), strings.Contains(v.Expression, "'"+identity.SignerName+"'")
			if controllers != (v.Name == "controllers") || signers != (v.Name == "signers") {
				t.Errorf("%s: %s: %s", policy.Name, v.Name, v.Expression)
			}
		}
	}
	if policies != 7 {
		t.Errorf("%d policies", policies)
	}
}
