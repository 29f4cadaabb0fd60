// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	bootstrapv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/kubeconfig"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/act"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/signing"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// arena is a cluster with honest machines and others.
type arena struct {
	*cluster

	mu sync.Mutex
	// honest are the public keys that certificates may be for.
	honest map[string]bool
}

func newArena(t *testing.T, w *world, name string, change func(*cluster)) *arena {
	t.Helper()
	return &arena{cluster: w.newCluster(t, name, change), honest: map[string]bool{}}
}

// trusts notes that an honest machine has a certificate.
func (a *arena) trusts(t *testing.T, certificate []byte) {
	t.Helper()
	_, leaf, err := csr.ParseCertificates(certificate)
	if err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.honest[string(leaf.RawSubjectPublicKeyInfo)] = true
}

// attests gets a certificate for an honest machine.
func (a *arena) attests(t *testing.T, m *machine) {
	t.Helper()
	m.attests(t)
	a.trusts(t, m.certificate)
}

// enrols is attests with the plugin.
func (a *arena) enrols(t *testing.T, m *machine) {
	t.Helper()
	m.enrols(t)
	a.trusts(t, m.certificate)
}

// noOthers checks that only honest machines have a certificate.
func (a *arena) noOthers(t *testing.T) {
	t.Helper()
	issued := 0
	for _, r := range a.requests(t) {
		if len(r.Status.Certificate) == 0 {
			continue
		}
		issued++
		_, leaf, err := csr.ParseCertificates(r.Status.Certificate)
		if err != nil {
			t.Fatal(err)
		}
		if !a.honest[string(leaf.RawSubjectPublicKeyInfo)] {
			t.Errorf("%s, filed by %s, has a certificate for %s", r.Name, r.Spec.Username, leaf.Subject)
		}
	}
	if issued == 0 {
		t.Error("nobody has a certificate")
	}
}

// refused waits until a request is refused for a reason.
func (c *cluster) refused(t *testing.T, object *certificatesv1.CertificateSigningRequest, reason string) {
	t.Helper()
	var got *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, harness.Soon, "refused: "+object.Name, func() bool {
		got = c.get(t, object.Name)
		return reasonOf(got) != "" || len(got.Status.Certificate) > 0
	})
	if reasonOf(got) != reason || len(got.Status.Certificate) > 0 {
		t.Errorf("%d bytes of certificate, reason %q, want %q: %+v", len(got.Status.Certificate), reasonOf(got), reason, got.Status.Conditions)
	}
}

// refuses checks that a peer's attempt is refused for a reason.
func (c *cluster) refuses(t *testing.T, p *peer, want verifier.Reason) {
	t.Helper()
	if reason := c.refusesTry(t, p); reason != string(want) {
		t.Errorf("%s as %s: refused for %s, not %s", p.ask.ProviderID, p.ask.NodeName, reason, want)
	}
}

// waits checks that requests are not decided for a while, and that their annotations have the
// reason.
func (c *cluster) waits(t *testing.T, why verifier.Reason, requests ...*certificatesv1.CertificateSigningRequest) {
	t.Helper()
	for _, r := range requests {
		harness.Eventually(t, harness.Soon, "it is said that it waits: "+r.Name, func() bool { return c.said(t, r.Name, why) })
	}
	time.Sleep(2 * time.Second) // it is looked at again meanwhile
	for _, r := range requests {
		if got := c.get(t, r.Name); isAnswered(got) {
			t.Errorf("it does not wait: %v %+v", got.Annotations, got.Status)
		}
	}
}

// said reports whether there is an Event on a request.
func (c *cluster) said(t *testing.T, name string, reason verifier.Reason) bool {
	t.Helper()
	list := &eventsv1.EventList{}
	if err := c.workload.client.List(t.Context(), list, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool { return e.Regarding.Name == name && e.Reason == string(reason) })
}

// impostor is another computer that has everything of a machine except its TPM.
func (m *machine) impostor(t *testing.T) *machine {
	t.Helper()
	thief := &machine{computer: newComputer(t), cluster: m.cluster, name: m.name, providerID: m.providerID, token: m.token}
	t.Cleanup(func() { harness.KillWorker(t, thief.certs()) })
	return thief
}

// denied runs a plugin that must not get a certificate.
func (m *machine) denied(t *testing.T, reason verifier.Reason) {
	t.Helper()
	if r := m.run(t); r.Code != 21 || !strings.Contains(r.Stderr, string(reason)) {
		t.Errorf("exit code %d, want %s: %s", r.Code, reason, r.Stderr)
	}
}

// helloOf returns the document of a peer's hello.
func helloOf(t *testing.T, p *peer) *attestation.Hello {
	t.Helper()
	ask := p.ask
	ask.Name = csr.NewName()
	data, _, err := p.hardware.provider.Hello(t.Context(), ask)
	if err != nil {
		t.Fatal(err)
	}
	document, err := attestation.ParseHello(data)
	if err != nil {
		t.Fatal(err)
	}
	return document
}

// request makes a request from the peer's key and a document, and does not file it.
func (p *peer) request(t *testing.T, signer string, document interface{ Marshal() ([]byte, error) }) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	data, err := document.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	object, err := p.object(csr.NewName(), signer, data)
	if err != nil {
		t.Fatal(err)
	}
	return object
}

// lonely makes a proof that is well-formed and proves nothing.
func (p *peer) lonely(t *testing.T, signer, hello string) *certificatesv1.CertificateSigningRequest {
	t.Helper()
	document, err := oddrequest.Proof(hello)
	if err != nil {
		t.Fatal(err)
	}
	object, err := p.object(csr.NewName(), signer, document)
	if err != nil {
		t.Fatal(err)
	}
	return object
}

// under returns a request under another name.
func under(name string, object *certificatesv1.CertificateSigningRequest) *certificatesv1.CertificateSigningRequest {
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: *object.Spec.DeepCopy()}
}

// issued waits until a request has its certificate.
func (c *cluster) issued(t *testing.T, object *certificatesv1.CertificateSigningRequest) []byte {
	t.Helper()
	var got *certificatesv1.CertificateSigningRequest
	harness.Eventually(t, harness.Soon, "issued: "+object.Name, func() bool {
		got = c.get(t, object.Name)
		if reason := reasonOf(got); reason != "" {
			t.Fatalf("%s: %s", reason, got.Status.Conditions[len(got.Status.Conditions)-1].Message)
		}
		return len(got.Status.Certificate) > 0
	})
	return got.Status.Certificate
}

// version returns the version of a machine's record, "" if there is none.
func (m *machine) version(t *testing.T) string {
	t.Helper()
	if record := m.record(t, m.name); record != nil {
		return record.ResourceVersion
	}
	return ""
}

// sharedSigner is a signer that other controllers use, too.
const sharedSigner = "example.test/shared"

// attackable adds a shared signer, and roots for EK certificates. So a thief's TPM is as genuine as
// any other.
func attackable(t *testing.T) func(map[string]any) {
	t.Helper()
	roots, intermediates := makerFiles(t, shared.maker)
	return func(file map[string]any) {
		of := file["tpm"].(map[string]any)
		of["rootsFile"], of["intermediatesFile"] = roots, intermediates
		file["signers"] = []any{map[string]any{"name": tpm.SignerName}, map[string]any{"name": sharedSigner, "shared": true}}
	}
}

// makerFiles writes the CAs of a maker of TPMs.
func makerFiles(t *testing.T, maker *swtpm.CA) (roots, intermediates string) {
	t.Helper()
	write := func(name string, certificate *x509.Certificate) string {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Raw}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("roots.pem", maker.Root), write("intermediates.pem", maker.Intermediate)
}

// The attacks of test/controller on a controller with an inventory, and the attacks that Machine
// objects make possible. All of them run in one cluster at once. In the end, only machines that
// have proven their TPM have a certificate.
func TestAttacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	a, flooded := newArena(t, w, "workload", nil), newArena(t, w, "flooded", func(c *cluster) { c.kubeconfig = nil })
	user := flooded.administratorOf(t)
	user.Impersonate, user.ImpersonateUID, user.ImpersonateGroups = "system:admin", "0", []string{"system:masters"}
	user.ImpersonateUserExtra = map[string][]string{"example.test/extra": {"value"}}
	flooded.kubeconfigOf(t, user)
	mark, err := flooded.workload.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	c := w.start(t, attackable(t))
	t.Run("attack", func(t *testing.T) {
		for name, attack := range map[string]func(*testing.T, *arena){
			"stolen token":                         stolenToken,
			"another's EK in the hello":            anothersEK,
			"every request is copied":              everyRequestIsCopied,
			"proofs are replayed":                  proofsAreReplayed,
			"approved by an administrator":         approvedByAnAdministrator,
			"requests of others":                   requestsOfOthers,
			"two proofs for one hello":             twoProofsForOneHello,
			"odd requests":                         oddRequests,
			"token of another Machine":             tokenOfAnotherMachine,
			"token of a MachinePool":               tokenOfAPool,
			"one EK for two Machines":              oneEKForTwoMachines,
			"the victim's EK on one's own Machine": victimsEK,
			"what a node writes":                   whatANodeWrites,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				attack(t, a)
			})
		}
		t.Run("floods", func(t *testing.T) {
			t.Parallel()
			floods(t, flooded)
		})
		t.Run("kubeconfigs", func(t *testing.T) {
			t.Parallel()
			hostileKubeconfigs(t, a, c)
		})
	})
	a.noOthers(t)
	flooded.noOthers(t)
	// its kubeconfig has an identity of its own to act as, which nobody becomes
	flooded.actedAsUser(t, mark)
}

// The thief has another genuine TPM of the same maker. It does not matter who is first.
func stolenToken(t *testing.T, a *arena) {
	victim := a.newMachine(t, "stolen-from", nil)
	thief := victim.impostor(t)
	thief.denied(t, verifier.ReasonNodeNameMismatch)
	if version := victim.version(t); version != "" {
		t.Error("there is a record")
	}
	a.enrols(t, victim)
	before := victim.remembered(t).ResourceVersion
	thief.removeState(t)
	thief.denied(t, verifier.ReasonIdentityBound)
	if after := victim.version(t); after != before {
		t.Error("the record was written")
	}
	victim.removeState(t)
	a.enrols(t, victim)
}

// The hello says what any node can read in a hello: the victim's EK, and its AK or the thief's.
func anothersEK(t *testing.T, a *arena) {
	thief, victim := a.newMachine(t, "claims-an-ek", nil), a.newMachine(t, "whose-ek-is-claimed", nil)
	for name, ak := range map[string]*machine{"and AK": victim, "with own AK": thief} {
		document := helloOf(t, victim.peer(t))
		document.AKPublic = helloOf(t, a.newPeer(t, ak.computer, a.asToken(victim.token), victim.name, victim.providerID)).AKPublic
		attacker := a.newPeer(t, thief.computer, a.asToken(victim.token), victim.name, victim.providerID)
		hello := attacker.challenged(t, attacker.file(t, attacker.request(t, attestation.HelloSignerName, document)))
		// The thief's TPM cannot open the challenge. It answers one of its own, and says that it
		// was this.
		own := thief.peer(t)
		content, err := attestation.Parse(own.proof(t, own.challenged(t, own.hello(t))).Spec.Request)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := attestation.ParseProof(content.Data)
		if err != nil {
			t.Fatal(err)
		}
		answer.HelloName, answer.HelloUID = hello.Name, string(hello.UID)
		proof := attacker.file(t, attacker.request(t, tpm.SignerName, answer))
		harness.Eventually(t, harness.Soon, "the proof is denied", func() bool { return reasonOf(a.get(t, proof.Name)) != "" })
		if got := a.get(t, proof.Name); !strings.HasPrefix(reasonOf(got), "Attestation") {
			t.Errorf("%s: %+v", name, got.Status.Conditions)
		}
		if reason := reasonOf(a.get(t, hello.Name)); reason != "" {
			t.Errorf("%s: the hello was touched: %s", name, reason)
		}
	}
	a.attests(t, thief)
	a.attests(t, victim)
}

// A client with a bootstrap token may watch requests. The attacker copies each as soon as he sees
// it, with the victim's token, and with that of a machine of his own.
func everyRequestIsCopied(t *testing.T, a *arena) {
	victim, other := a.newMachine(t, "copied", nil), a.newMachine(t, "copies", nil)
	id, _, _ := strings.Cut(victim.token, ".")
	thief, err := client.NewWithWatch(a.asToken(other.token), client.Options{Scheme: a.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watch, err := thief.Watch(ctx, &certificatesv1.CertificateSigningRequestList{})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	copiers := map[string]*csr.Client{}
	for of, token := range map[string]string{"same": victim.token, "other": other.token} {
		if copiers[of], err = csr.NewClient(a.asToken(token)); err != nil {
			t.Fatal(err)
		}
	}
	originals := make(chan *certificatesv1.CertificateSigningRequest, 10)
	go func() {
		defer close(originals)
		seen := map[string]bool{}
		for event := range watch.ResultChan() {
			original, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
			if !ok || original.Spec.Username != "system:bootstrap:"+id || seen[original.Name] || strings.HasPrefix(original.Name, "copy-") {
				continue
			}
			seen[original.Name] = true
			for of, api := range copiers {
				if _, err := api.Create(ctx, under("copy-"+of+"-"+original.Name, original), false); err != nil {
					t.Error(err)
				}
			}
			originals <- original
		}
	}()
	a.attests(t, victim)
	hello, proof := <-originals, <-originals
	if hello.Spec.SignerName != attestation.HelloSignerName || proof.Spec.SignerName != tpm.SignerName {
		t.Fatalf("copied: %s, %s", hello.Spec.SignerName, proof.Spec.SignerName)
	}
	a.refused(t, hello, string(act.ReasonCompleted))
	a.refused(t, under("copy-same-"+proof.Name, proof), string(verifiertpm.ReasonQuoteMAC))
	a.refused(t, under("copy-other-"+hello.Name, hello), string(verifier.ReasonTokenNotForMachine))
	a.refused(t, under("copy-other-"+proof.Name, proof), string(verifier.ReasonProofMismatch))
	a.attests(t, other)
}

// A proof is accepted for one request only: not under another name, and not for another hello.
func proofsAreReplayed(t *testing.T, a *arena) {
	m := a.newMachine(t, "replayed", nil)
	p := m.peer(t)
	hello := p.challenged(t, p.hello(t))
	proof := p.proof(t, hello)
	a.refused(t, p.file(t, under(csr.NewName(), proof)), string(verifiertpm.ReasonQuoteMAC))
	if reason := reasonOf(a.get(t, hello.Name)); reason != "" || m.version(t) != "" {
		t.Errorf("a denied proof touched its hello (%s) or the record", reason)
	}
	a.trusts(t, a.issued(t, p.file(t, proof)))
	a.refused(t, hello, string(act.ReasonCompleted))
	version := m.version(t)
	a.refused(t, p.file(t, under(csr.NewName(), proof)), string(verifiertpm.ReasonQuoteMAC))
	again := p.challenged(t, p.hello(t))
	a.refused(t, p.file(t, under(csr.NewName(), proof)), string(verifiertpm.ReasonQuoteMAC))
	if m.version(t) != version {
		t.Error("a replay wrote the record")
	}
	if reason := reasonOf(a.get(t, again.Name)); reason != "" {
		t.Errorf("a replay closed another hello: %s", reason)
	}
	a.attests(t, m)
}

// The policies of the workload cluster keep administrators from approving, and everybody from
// approving a hello. The first rule does not apply to the controller's user, which stands here for
// an administrator without the policies. Even so, an approval that the controller has not made
// gives no certificate.
func approvedByAnAdministrator(t *testing.T, a *arena) {
	m := a.newMachine(t, "approved", func(m *machine) { m.object.Annotations = nil })
	p := m.peer(t)
	hello, proof := p.hello(t), p.file(t, p.lonely(t, tpm.SignerName, "node-csr-nowhere"))
	config := a.workload.AdminConfig()
	config.Impersonate.UserName = controllerUser
	exempt, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"an administrator, a hello": approve(t.Context(), a.workload.Client(), hello),
		"an administrator, a proof": approve(t.Context(), a.workload.Client(), proof),
		"anybody, a hello":          approve(t.Context(), exempt, hello),
	} {
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := approve(t.Context(), exempt, proof); err != nil {
		t.Fatal(err)
	}
	a.refused(t, proof, string(verifier.ReasonApprovedWithoutAttestation))
	if m.version(t) != "" {
		t.Error("there is a record")
	}
	update(t, a.client, m.object, func(o *clusterv1.Machine) {
		metav1.SetMetaDataAnnotation(&o.ObjectMeta, attestation.AnnotationEK, m.ek)
	})
	a.attests(t, m)
}

// approve does what `kubectl certificate approve` does, by a patch: the controller's user has no
// right to update.
func approve(ctx context.Context, api kubernetes.Interface, request *certificatesv1.CertificateSigningRequest) error {
	for {
		got, err := api.CertificatesV1().CertificateSigningRequests().Get(ctx, request.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"resourceVersion": got.ResourceVersion},
			"status": map[string]any{"conditions": append(got.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
				Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "KubectlApprove",
			})},
		})
		if err != nil {
			return err
		}
		if _, err = api.CertificatesV1().CertificateSigningRequests().Patch(ctx, request.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "approval"); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// The controller does not touch requests of other signers, even if a proof names one as its hello.
func requestsOfOthers(t *testing.T, a *arena) {
	m := a.newMachine(t, "left-alone", nil)
	p := m.peer(t)
	bare := pem.EncodeToMemory(&pem.Block{Type: attestation.BlockRequest, Bytes: p.ask.PKCS10})
	foreign, err := attestation.Request{PKCS10: p.ask.PKCS10, Provider: "aws", Data: []byte("{}")}.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	hello := p.challenged(t, p.hello(t))
	untouched := []*certificatesv1.CertificateSigningRequest{hello}
	const otherSigner = "example.test/other"
	operator := *p // a machine may ask neither of the two signers
	if operator.api, err = csr.NewClient(a.workload.AdminConfig()); err != nil {
		t.Fatal(err)
	}
	for _, o := range []*certificatesv1.CertificateSigningRequest{
		csr.Object(csr.NewName(), sharedSigner, bare, p.key.Public(), nil),
		csr.Object(csr.NewName(), sharedSigner, foreign, p.key.Public(), nil),
		csr.Object(csr.NewName(), otherSigner, bare, p.key.Public(), nil),
		p.lonely(t, otherSigner, hello.Name),
	} {
		untouched = append(untouched, operator.file(t, o))
	}
	for _, target := range untouched {
		lonely := p.file(t, p.lonely(t, tpm.SignerName, target.Name))
		harness.Eventually(t, harness.Soon, "it is denied", func() bool { return reasonOf(a.get(t, lonely.Name)) != "" })
	}
	a.attests(t, m)
	time.Sleep(time.Second) // nothing may happen to the others
	for _, r := range untouched {
		if got := a.get(t, r.Name); got.ResourceVersion != r.ResourceVersion {
			t.Errorf("%s of %s was touched: %+v", got.Name, got.Spec.SignerName, got.Status.Conditions)
		}
	}
}

// Two concurrent proofs for one hello get at least one certificate. The record has each published
// one.
func twoProofsForOneHello(t *testing.T, a *arena) {
	m := a.newMachine(t, "two-proofs", nil)
	p := m.peer(t)
	for range 3 {
		hello := p.challenged(t, p.hello(t))
		var wait sync.WaitGroup
		proofs := []*certificatesv1.CertificateSigningRequest{p.proof(t, hello), p.proof(t, hello)}
		for _, proof := range proofs {
			wait.Go(func() {
				if _, err := p.api.Create(t.Context(), proof, false); err != nil {
					t.Error(err)
				}
			})
		}
		wait.Wait()
		issued := 0
		for _, proof := range proofs {
			harness.Eventually(t, harness.Soon, "each is done", func() bool {
				proof = a.get(t, proof.Name)
				return reasonOf(proof) != "" || len(proof.Status.Certificate) > 0
			})
			if len(proof.Status.Certificate) == 0 {
				continue
			}
			issued++
			a.trusts(t, proof.Status.Certificate)
			harness.Eventually(t, harness.Soon, "the certificate is noted", func() bool { return m.notes(t, proof.Status.Certificate) })
		}
		if issued == 0 {
			t.Error("none was issued")
		}
		a.refused(t, hello, string(act.ReasonCompleted))
	}
}

// What kube-controller-manager's own signer issues is denied under ours, though the TPM and the
// name are right.
func oddRequests(t *testing.T, a *arena) {
	m := a.newMachine(t, "odd", nil)
	p := m.peer(t)
	document, err := helloOf(t, p).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	nothing, err := oddrequest.Proof("node-csr-nowhere")
	if err != nil {
		t.Fatal(err)
	}
	odd, err := oddrequest.All(m.name, m.providerID)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range odd {
		for signer, data := range map[string][]byte{attestation.HelloSignerName: document, tpm.SignerName: nothing} {
			object, err := o.Object(signer, data)
			if err != nil {
				t.Fatal(err)
			}
			a.refused(t, p.file(t, object), string(o.Reason))
		}
	}
	a.attests(t, m)
}

// A token is valid for one Machine, even with the right TPM.
func tokenOfAnotherMachine(t *testing.T, a *arena) {
	m, other := a.newMachine(t, "with-anothers-token", nil), a.newMachine(t, "whose-token-it-is", nil)
	a.refuses(t, a.newPeer(t, m.computer, a.asToken(other.token), m.name, m.providerID), verifier.ReasonTokenNotForMachine)
	// A token in the configurations of two Machines belongs to neither.
	a.putConfig(t, a.kubeadmConfig("with-a-copied-token", other.token), m.owner())
	copied := a.newMachine(t, "with-a-copied-token", func(m *machine) { m.config = nil })
	a.catchesUp(t, nil)
	a.refuses(t, a.newPeer(t, copied.computer, a.asToken(other.token), copied.name, copied.providerID), verifier.ReasonTokenNotForMachine)
	a.refuses(t, other.peer(t), verifier.ReasonTokenNotForMachine)
	// The token belongs to no Machine.
	free := a.newToken(t)
	a.waits(t, verifier.ReasonTokenNotForMachine, a.newPeer(t, m.computer, a.asToken(free), m.name, m.providerID).hello(t))
	a.attests(t, m)
}

// A token in a MachinePool's boot data is on all its instances, so it belongs to none of them, and
// to no Machine.
func tokenOfAPool(t *testing.T, a *arena) {
	m := a.newMachine(t, "with-a-pools-token", nil)
	token := a.newToken(t)
	a.newPool(t, "pool", token, "test://instance-of-a-pool")
	a.refuses(t, a.newPeer(t, m.computer, a.asToken(token), m.name, m.providerID), verifier.ReasonTokenNotForMachine)
	a.attests(t, m)
}

// A MachineDeployment's template would give all its Machines the same annotation.
func oneEKForTwoMachines(t *testing.T, a *arena) {
	first := a.newMachine(t, "one-of-two", nil)
	second := a.newMachineOf(t, first.computer, "two-of-two", nil)
	a.catchesUp(t, nil) // else the first may be the only one
	a.waits(t, verifier.ReasonAmbiguousMachine, first.peer(t).hello(t), second.peer(t).hello(t))
	update(t, a.client, second.object, func(o *clusterv1.Machine) { delete(o.Annotations, attestation.AnnotationEK) })
	harness.Eventually(t, harness.Soon, "the first is known again", func() bool {
		_, err := first.attest(t.Context())
		return err == nil
	})
	a.trusts(t, first.certificate)
	// The record has the EK's machine. With the annotation on another Machine, neither gets a
	// certificate.
	a.refuses(t, second.peer(t), verifier.ReasonProviderIDMismatch)
}

// A user who may write a Machine names the victim's EK on it, and cannot prove that EK. The
// victim's record decides.
func victimsEK(t *testing.T, a *arena) {
	victim, thief := a.newMachine(t, "whose-ek-is-named", nil), a.newMachine(t, "names-anothers-ek", nil)
	a.attests(t, victim)
	a.attests(t, thief)
	before := victim.version(t)
	set := func(eks ...string) {
		update(t, a.client, thief.object, func(o *clusterv1.Machine) { o.Annotations[attestation.AnnotationEK] = strings.Join(eks, ",") })
	}
	set(victim.ek, thief.ek)
	a.catchesUp(t, nil)
	for _, try := range []struct {
		as         *rest.Config
		name, id   string
		refusedFor verifier.Reason
	}{
		{thief.credential(), victim.name, victim.providerID, verifier.ReasonRequesterNotAllowed},
		{a.asToken(thief.token), victim.name, victim.providerID, verifier.ReasonProviderIDMismatch},
		{a.asToken(victim.token), victim.name, victim.providerID, verifier.ReasonProviderIDMismatch},
		{a.asToken(victim.token), victim.name, thief.providerID, verifier.ReasonAmbiguousName},
		{a.asToken(thief.token), thief.name, victim.providerID, verifier.ReasonProviderIDMismatch},
	} {
		a.refuses(t, a.newPeer(t, thief.computer, try.as, try.name, try.id), try.refusedFor)
	}
	if victim.version(t) != before {
		t.Error("the victim's record was written")
	}
	a.attests(t, victim)
	victim.remembered(t)
}

// A node writes its Node's addresses. If a platform asks the guest for its name, the node also
// writes its Machine's addresses.
func whatANodeWrites(t *testing.T, a *arena) {
	victim, thief := a.newMachine(t, "written-about", nil), a.newMachine(t, "writes", nil)
	a.attests(t, thief)
	thief.claimsNode(t, victim.providerID)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thief.name}}
	kubelet, err := client.New(thief.credential(), client.Options{Scheme: a.client.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	updateStatus(t, kubelet, node, func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: victim.name}, {Type: corev1.NodeInternalIP, Address: "192.0.2.77"}}
	})
	updateStatus(t, a.client, thief.object, func(o *clusterv1.Machine) {
		o.Status.NodeRef.Name = victim.name
		o.Status.NodeInfo = &corev1.NodeSystemInfo{MachineID: victim.name}
		o.Status.Addresses = clusterv1.MachineAddresses{
			{Type: clusterv1.MachineHostName, Address: victim.name}, {Type: clusterv1.MachineInternalDNS, Address: victim.name},
		}
	})
	a.refuses(t, a.newPeer(t, thief.computer, a.asToken(thief.token), victim.name, thief.providerID), verifier.ReasonNodeNameMismatch)
	a.refuses(t, a.newPeer(t, thief.computer, a.asToken(victim.token), victim.name, victim.providerID), verifier.ReasonProviderIDMismatch)
	a.refuses(t, a.newPeer(t, thief.computer, thief.credential(), victim.name, victim.providerID), verifier.ReasonRequesterNotAllowed)
	a.attests(t, victim)
	victim.remembered(t)
}

// A hundred hellos in the victim's name, with its token: half of them by another TPM, half with the
// victim's own hello. And a hundred by a TPM that no machine is known of, and so wait.
func floods(t *testing.T, a *arena) {
	victim, honest := a.newMachine(t, "flooded", nil), a.newMachine(t, "beside-a-flood", nil)
	thief, stranger := victim.impostor(t), a.newInstance(t, "stranger")
	victim.args = append(victim.args, "--wait-timeout=1m") // as long as the bound below
	attacker, waiting := thief.peer(t), stranger.peer(t)
	var wait sync.WaitGroup
	flood := func(p, of *peer) {
		document, err := helloOf(t, of).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		for range 5 {
			wait.Go(func() {
				for range 10 {
					object, err := p.object(csr.NewName(), attestation.HelloSignerName, document)
					if err == nil {
						_, err = p.api.Create(t.Context(), object, false)
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	flood(attacker, attacker)
	flood(attacker, victim.peer(t))
	flood(waiting, waiting)
	flood(waiting, waiting)
	for what, gets := range map[string]func(){"the victim": func() { a.enrols(t, victim) }, "another": func() { a.attests(t, honest) }} {
		began := time.Now()
		gets()
		took := time.Since(began)
		t.Logf("%s has its certificate within %s", what, took.Round(time.Millisecond))
		// 9 s alone; each denial takes a busy API server several times as long
		if took > time.Minute {
			t.Error("that is too long")
		}
	}
	wait.Wait()
}

// notes reports whether the machine's record has a certificate.
func (m *machine) notes(t *testing.T, certificate []byte) bool {
	t.Helper()
	fingerprint, err := signing.Fingerprint(certificate)
	if err != nil {
		t.Fatal(err)
	}
	record := m.record(t, m.name)
	return record != nil && slices.ContainsFunc(record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool {
		return c.SHA256 == fingerprint && c.Noted
	})
}

// kubeconfigOf creates a cluster's kubeconfig Secret as a tenant writes it.
func (c *cluster) kubeconfigOf(t *testing.T, user *clientcmdapi.AuthInfo, options ...testbed.KubeconfigOption) {
	t.Helper()
	c.kubeconfig = kubeconfig.GenerateSecret(c.object, c.workload.Kubeconfig(user, append([]testbed.KubeconfigOption{testbed.WithServer(c.server)}, options...)...))
	c.create(t, c.kubeconfig)
}

// administratorOf is the user in Cluster API's kubeconfigs.
func (c *cluster) administratorOf(t *testing.T) *clientcmdapi.AuthInfo {
	t.Helper()
	pair, err := c.workload.ClientCA().IssueClient(administrator, []string{"system:masters"}, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	return testbed.CertificateUser(pair)
}

// A tenant who writes a cluster's kubeconfig cannot make the controller run a program, or send a
// secret that is not in the kubeconfig. Other clusters are still served.
func hostileKubeconfigs(t *testing.T, a *arena, c *controllerprocess.Controller) {
	var mu sync.Mutex
	seen := map[string]string{} // who is acted as, by credential
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen[r.Header.Get("Authorization")] = r.Header.Get("Impersonate-User")
		w.WriteHeader(http.StatusForbidden)
	}))
	defer server.Close()
	dir := t.TempDir()
	own, trace := filepath.Join(dir, "controllers-own"), filepath.Join(dir, "it-was-run")
	if err := os.WriteFile(own, []byte("the-controllers-own"), 0o600); err != nil {
		t.Fatal(err)
	}
	trusted := testbed.WithServerCA(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	tenant := func(name string, user *clientcmdapi.AuthInfo) {
		hostile := &cluster{world: a.world, workload: a.workload, name: "tenant-" + strings.ToLower(name), server: server.URL}
		hostile.draft(t)
		hostile.kubeconfig = nil
		provisioned := hostile.object.Status
		hostile.object.Status = clusterv1.ClusterStatus{}
		hostile.put(t)
		hostile.kubeconfigOf(t, user, trusted)
		updateStatus(t, a.client, hostile.object, func(o *clusterv1.Cluster) { o.Status = provisioned })
	}
	users := map[string]*clientcmdapi.AuthInfo{
		"tokenFile":          {TokenFile: own},
		"client-certificate": {ClientCertificate: own, ClientKeyData: []byte("key")},
		"client-key":         {ClientCertificateData: []byte("certificate"), ClientKey: own},
		"exec": {Exec: &clientcmdapi.ExecConfig{
			APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
			Command: "/bin/sh", Args: []string{"-c", "touch " + trace},
		}},
		"auth-provider": {AuthProvider: &clientcmdapi.AuthProviderConfig{Name: "oidc", Config: map[string]string{"idp-issuer-url": server.URL}}},
	}
	for name, user := range users {
		tenant(name, user)
	}
	for name := range users {
		harness.Eventually(t, harness.Soon, "the log has why it is not used: "+name, func() bool {
			return slices.ContainsFunc(logLines(t, c), func(line string) bool {
				return strings.Contains(line, "tenant-"+strings.ToLower(name)) && strings.Contains(line, "the kubeconfig ") && strings.Contains(line, name+"\"")
			})
		})
	}
	// A self-contained kubeconfig is used, but not with the user that it names for impersonation.
	tenant("good", &clientcmdapi.AuthInfo{Token: "all-in-itself", Impersonate: "system:admin", ImpersonateGroups: []string{"system:masters"}})
	harness.Eventually(t, harness.Soon, "the server is asked", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) > 0
	})
	mu.Lock()
	if len(seen) != 1 || seen["Bearer all-in-itself"] != controllerUser {
		t.Errorf("the server was shown: %v", seen)
	}
	mu.Unlock()
	if _, err := os.Stat(trace); !os.IsNotExist(err) {
		t.Errorf("a program was run: %v", err)
	}
	a.attests(t, a.newMachine(t, "beside-tenants", nil))
}

func logLines(t *testing.T, c *controllerprocess.Controller) []string {
	t.Helper()
	log, err := os.ReadFile(c.LogFile())
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(log), "\n")
}

// One controller serves several clusters, in one namespace and in two. Their machines have the same
// names, tokens and TPMs. What belongs to one cluster is not valid in another.
func TestAttacksBetweenClusters(t *testing.T) {
	t.Parallel()
	theirs := newWorld(t, shared.management)
	ours := newWorld(t, shared.management) // it ends first, and with it the controller
	a, b := newArena(t, ours, "ours", nil), newArena(t, theirs, "ours", nil)
	// Beside ours, in its namespace; its CA is that of the other one, which an operator may have
	// given to both.
	d := newArena(t, ours, "neighbour", func(c *cluster) { c.ca.Data = b.ca.Data })
	d.workload.trusts(t, d.workload.ClientCA(), b.workload.ClientCA())
	ours.start(t, func(file map[string]any) {
		clusterAPI(file)["namespaces"] = []any{ours.namespace, theirs.namespace}
		clusterAPI(file)["nodeNames"] = []any{"Hostname", "MachineName"}
	})
	for name, attack := range map[string]func(*testing.T, *arena, *arena, *arena){
		"replay":               replayedElsewhere,
		"one TPM":              oneTPMInThree,
		"tokens of one ID":     tokensOfOneID,
		"another's record":     anothersRecord,
		"what a guest reports": guestReportsHostname,
	} {
		t.Run(name, func(t *testing.T) { attack(t, a, b, d) })
	}
	for _, arena := range []*arena{a, b, d} {
		arena.noOthers(t)
	}
}

// The hello and the proof of a machine are filed in another cluster, under the same names. That
// cluster has a machine of the same names with the same TPM.
func replayedElsewhere(t *testing.T, a, b, _ *arena) {
	m := a.newMachine(t, "replayed", nil)
	n := b.newMachineOf(t, m.computer, "replayed", nil)
	p, q := m.peer(t), n.peer(t)
	hello := p.challenged(t, p.hello(t))
	proof := p.proof(t, hello)
	a.trusts(t, a.issued(t, p.file(t, proof)))
	copied := q.challenged(t, q.file(t, under(hello.Name, hello)))
	b.refused(t, q.file(t, under(proof.Name, proof)), string(verifiertpm.ReasonHelloMismatch))
	if reason := reasonOf(b.get(t, copied.Name)); reason != "" || n.version(t) != "" {
		t.Errorf("the replay touched its hello (%s) or the record", reason)
	}
	b.attests(t, n)
	n.remembered(t)
}

// An EK belongs to one machine of a cluster, and other clusters do not matter. A certificate also
// belongs to one cluster, even if two clusters have the same CA.
func oneTPMInThree(t *testing.T, a, b, d *arena) {
	m := a.newMachine(t, "one-tpm", nil)
	n, o := b.newMachineOf(t, m.computer, "one-tpm", nil), d.newMachineOf(t, m.computer, "one-tpm-too", nil)
	a.attests(t, m)
	b.attests(t, n)
	d.attests(t, o)
	for _, m := range []*machine{m, n, o} {
		m.remembered(t)
	}
	same := d.newMachineOf(t, newComputer(t), "one-ca", nil)
	there := b.newMachineOf(t, same.computer, "one-ca", nil)
	d.attests(t, same)
	b.attests(t, there)
	before := there.version(t)
	b.refuses(t, b.newPeer(t, same.computer, b.asNode(same.certificate, same.key), there.name, there.providerID), verifier.ReasonUnknownCredential)
	if there.version(t) != before {
		t.Error("the record was written")
	}
}

// Each cluster makes its own token IDs, and two clusters may have the same one.
func tokensOfOneID(t *testing.T, a, b, d *arena) {
	m := a.newMachine(t, "token", nil)
	b.newMachine(t, "token", func(n *machine) { n.config = n.kubeadmConfig(n.name, m.token) })
	a.attests(t, m) // another namespace is not looked at

	// A token for a machine of another cluster belongs to no machine here: the request waits.
	neighbour := d.newMachine(t, "neighbours-token", nil)
	free := a.newToken(t)
	update(t, d.client, neighbour.config, func(o *bootstrapv1.KubeadmConfig) { o.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = free })
	other := a.newMachine(t, "with-a-neighbours-token", nil)
	p := a.newPeer(t, other.computer, a.asToken(free), other.name, other.providerID)
	a.waits(t, verifier.ReasonTokenNotForMachine, p.hello(t))
	// A token of two machines belongs to neither.
	update(t, a.client, other.config, func(o *bootstrapv1.KubeadmConfig) { o.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = free })
	harness.Eventually(t, harness.Soon, "it is seen", func() bool { return a.refusesTry(t, p) == string(verifier.ReasonTokenNotForMachine) })
	update(t, d.client, neighbour.config, func(o *bootstrapv1.KubeadmConfig) { o.Spec.JoinConfiguration.Discovery.BootstrapToken.Token = "" })
	other.token = free
	harness.Eventually(t, harness.Soon, "it is one machine's", func() bool {
		_, err := other.attest(t.Context())
		return err == nil
	})
	a.trusts(t, other.certificate)
}

// A record of another cluster in the same namespace does not count here, with any content.
func anothersRecord(t *testing.T, a, _, d *arena) {
	victim := d.newMachine(t, "has-a-foreign-record", nil)
	thief := victim.impostor(t)
	a.catchesUp(t, nil) // once it is served it has its identity
	planted := &v1alpha1.NodeAttestation{
		ObjectMeta: d.meta("planted"),
		Spec: v1alpha1.NodeAttestationSpec{
			Cluster: a.identity(t), Machine: v1alpha1.MachineReference{Source: "cluster-api", Name: victim.name}, Provider: tpm.Name,
			ProviderID: victim.providerID, NodeName: victim.name, EK: &v1alpha1.EndorsementKey{Fingerprint: thief.ek},
		},
	}
	planted.OwnerReferences = []metav1.OwnerReference{victim.owner()}
	if err := d.client.Create(t.Context(), planted.DeepCopy()); !isPlanted(err) {
		t.Errorf("an administrator writes a record: %v", err)
	}
	// as if the policy had been missing
	if err := d.asController(t).Create(t.Context(), planted); err != nil {
		t.Fatal(err)
	}
	d.refuses(t, thief.peer(t), verifier.ReasonNodeNameMismatch)
	d.attests(t, victim)
	victim.remembered(t)
	if got := d.record(t, "planted"); got == nil || got.ResourceVersion != planted.ResourceVersion {
		t.Error("the other cluster's record was touched")
	}
}

// An operator who takes node names from what a platform reports takes them from guests, where the
// platform asks those. Two that have one name have none.
func guestReportsHostname(t *testing.T, a, _, _ *arena) {
	reports := func(name string) func(*machine) {
		return func(m *machine) {
			m.object.Status.Addresses = clusterv1.MachineAddresses{{Type: clusterv1.MachineHostName, Address: name}}
		}
	}
	victim, thief := a.newMachine(t, "named", reports("named.example.test")), a.newMachine(t, "reports-anothers-name", reports("named.example.test"))
	as := func(m *machine) *peer {
		return a.newPeer(t, m.computer, a.asToken(m.token), "named.example.test", m.providerID)
	}
	a.catchesUp(t, nil) // else one has the name for itself, or the other none yet
	a.refuses(t, as(thief), verifier.ReasonAmbiguousName)
	a.refuses(t, as(victim), verifier.ReasonAmbiguousName)
	reported := func(name string) {
		updateStatus(t, a.client, thief.object, func(o *clusterv1.Machine) { o.Status.Addresses[0].Address = name })
	}
	reported("thief.example.test")
	var certificate []byte
	harness.Eventually(t, harness.Soon, "the name is one machine's", func() bool {
		var err error
		certificate, err = as(victim).try(t.Context())
		return err == nil
	})
	a.trusts(t, certificate)
	reported("named.example.test")
	a.catchesUp(t, nil)
	a.refuses(t, as(thief), verifier.ReasonAmbiguousName) // and the record has it
	// A name that no Machine has, and whose Node exists, such as a control plane's.
	if err := a.workload.client.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "without-a-machine"}}); err != nil {
		t.Fatal(err)
	}
	reported("without-a-machine")
	p := a.newPeer(t, thief.computer, a.asToken(thief.token), "without-a-machine", thief.providerID)
	harness.Eventually(t, harness.Soon, "the Node is in the way", func() bool { return a.refusesTry(t, p) == string(verifier.ReasonNodeAlreadyRegistered) })
}
