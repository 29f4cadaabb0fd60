// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/tpmprovider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// stolenGap is the longest time between two renewals of the Lease of a node whose certificate is
// revoked. It covers the next check, the enrolment, and the calls of the kubelet around them. Below
// 40 s nobody takes the node for lost.
const stolenGap = 40 * time.Second

var dryRun = []string{metav1.DryRunAll}

// tryWrite sends an API server a renewal of the node's Lease as a dry run.
func tryWrite(ctx context.Context, api kubernetes.Interface, node string) error {
	_, err := api.CoordinationV1().Leases(corev1.NamespaceNodeLease).Patch(ctx, node, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{DryRun: dryRun})
	return err
}

// writes are what a node may write, as dry runs.
var writes = map[string]func(ctx context.Context, api kubernetes.Interface, node string) error{
	"Lease": tryWrite,
	"Node": func(ctx context.Context, api kubernetes.Interface, node string) error {
		_, err := api.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{DryRun: dryRun})
		return err
	},
	"status of the Node": func(ctx context.Context, api kubernetes.Interface, node string) error {
		_, err := api.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{DryRun: dryRun}, "status")
		return err
	},
	"Event": func(ctx context.Context, api kubernetes.Interface, node string) error {
		_, err := api.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "test-", Namespace: metav1.NamespaceDefault}, InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: node},
		}, metav1.CreateOptions{DryRun: dryRun})
		return err
	},
	"CSINode": func(ctx context.Context, api kubernetes.Interface, node string) error {
		_, err := api.StorageV1().CSINodes().Patch(ctx, node, types.MergePatchType, []byte(`{}`), metav1.PatchOptions{DryRun: dryRun})
		if apierrors.IsNotFound(err) { // this kubelet has made none yet
			_, err = api.StorageV1().CSINodes().Create(ctx, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{}}}, metav1.CreateOptions{DryRun: dryRun})
		}
		return err
	},
	"mirror pod": func(ctx context.Context, api kubernetes.Interface, node string) error {
		object, err := api.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		controller := true
		_, err = api.CoreV1().Pods(metav1.NamespaceDefault).Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "mirror-" + node, Namespace: metav1.NamespaceDefault, Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "x"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node, UID: object.UID, Controller: &controller}},
			},
			Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{DryRun: dryRun})
		return err
	},
}

// thief uses a stolen credential at one API server, until each write is refused.
type thief struct {
	name    string
	api     kubernetes.Interface
	refused map[string]time.Time // the first refusal after the last success
	problem error
}

// goesOn writes until each kind of write was refused, or ctx ends.
func (s *thief) goesOn(ctx context.Context, node string) {
	for len(s.refused) < len(writes) && ctx.Err() == nil && s.problem == nil {
		for what, write := range writes {
			switch err := write(ctx, s.api, node); {
			case err == nil:
				if _, was := s.refused[what]; was {
					s.problem = fmt.Errorf("%s: %s is allowed again", s.name, what)
				}
			case harness.IsRefused(err, attestation.MessageRevoked):
				if _, was := s.refused[what]; !was {
					s.refused[what] = time.Now()
				}
			default:
				s.problem = fmt.Errorf("%s: %s: %w", s.name, what, err)
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// The key of a real kubelet is stolen, and revoked by the command. The thief loses every write at
// each API server. The node is back with a new certificate by its evidence, without a token. The
// thief is not.
func TestStolenKeyOfKubelet(t *testing.T) {
	t.Parallel()
	n := newNode(t, "stolen")
	stolen, before := n.Credential(t), n.Pair(t)
	thieves := []*thief{
		{name: "first API server", api: stolen.Client(t), refused: map[string]time.Time{}},
		{name: "second API server", api: stolen.At(shared.second.URL()).Client(t), refused: map[string]time.Time{}},
	}
	encodings, err := shared.ClientCA().ReencodeConfig(stolen.Config)
	harness.Must(t, err)
	for name, config := range encodings {
		other := harness.Credential{Node: n.Name, Config: config}
		thieves = append(thieves, &thief{name: "second API server, encoded with " + name, api: other.At(shared.second.URL()).Client(t), refused: map[string]time.Time{}})
	}
	for _, s := range thieves {
		for what, write := range writes {
			if err := write(t.Context(), s.api, n.Name); err != nil {
				t.Fatalf("%s, before anything is revoked: %s: %v", s.name, what, err)
			}
		}
	}
	hellos, proofs := harness.Requests(t, shared.ControlPlane, n.Name)
	p := harness.WatchNode(t, shared.Client(), n.Name)
	harness.Eventually(t, 45*time.Second, "the Lease is renewed", func() bool { return p.Count() > 0 })

	harness.NextSecond()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var wait sync.WaitGroup
	for _, s := range thieves {
		wait.Go(func() { s.goesOn(ctx, n.Name) })
	}
	began := time.Now()
	created := harness.KubectlAttest(t, shared.ControlPlane, built.Commands, "created", "revoke", n.Name, "--reason=key stolen", "--yes", "--wait=false")
	wait.Wait()
	var everywhere time.Time // when each API server refused each write
	for _, s := range thieves {
		if s.problem != nil {
			t.Fatal(s.problem)
		}
		var last time.Time
		for what := range writes {
			at, was := s.refused[what]
			if !was {
				t.Fatalf("%s: %s is not refused", s.name, what)
			}
			if at.After(last) {
				last = at
			}
		}
		if last.After(everywhere) {
			everywhere = last
		}
		t.Logf("%s: each write refused %s after the command had created the NodeRevocation, %s after the command began", s.name, round(last.Sub(created)), round(last.Sub(began)))
		if last.Sub(created) > refusedIn+slack {
			t.Errorf("%s: that is more than %s", s.name, refusedIn+slack)
		}
	}

	filed := n.isAskedForBy(t, stolen, before.Key)

	harness.Eventually(t, time.Minute, "the Lease is renewed after the revocation", func() bool {
		at, renewed := p.FirstAfter(everywhere)
		if renewed {
			t.Logf("the Lease is renewed %s after the command began", round(at.Sub(began)))
		}
		return renewed
	})
	if n.Pair(t).Fingerprint() == before.Fingerprint() {
		t.Error("the node has the revoked certificate")
	}
	n.mustHaveRenewedWith(t, before.Fingerprint(), len(hellos)+len(proofs))
	for _, s := range thieves {
		for what, write := range writes {
			if err := write(t.Context(), s.api, n.Name); !harness.IsRefused(err, attestation.MessageRevoked) {
				t.Errorf("%s: %s after the node is back: %v", s.name, what, err)
			}
		}
	}
	mustNotBeApproved(t, filed)
	p.Stop()
	p.Steady(t, stolenGap, time.Now())
}

// mustHaveRenewedWith checks that the node filed its requests since, one hello and one proof, with
// the revoked certificate, and so without a token.
func (n *node) mustHaveRenewedWith(t *testing.T, fingerprint string, since int) {
	t.Helper()
	hellos, proofs := harness.Requests(t, shared.ControlPlane, n.Name)
	issued := 0
	for _, r := range append(hellos, proofs...) {
		with := r.Spec.Extra["authentication.kubernetes.io/credential-id"]
		if len(with) != 1 || with[0] != "X509SHA256="+fingerprint {
			continue
		}
		if r.Spec.Username != "system:node:"+n.Name {
			t.Errorf("%s is by %s", r.Name, r.Spec.Username)
		}
		if len(r.Status.Certificate) > 0 {
			issued++
			if (tpmprovider.Provider{}).OriginAK(r.Annotations[attestation.AnnotationOrigin], &r) == "" {
				t.Errorf("%s does not show which TPM it comes from: %q", r.Name, r.Annotations)
			}
			if now, _ := pem.Decode(n.Pair(t).Chain); now == nil || !bytes.Contains(r.Status.Certificate, pem.EncodeToMemory(now)) {
				t.Errorf("%s: the certificate that was issued is not the node's", r.Name)
			}
		}
	}
	if issued != 1 || len(hellos)+len(proofs) <= since {
		t.Errorf("%d certificates were issued for the revoked one, not 1", issued)
	}
}

// isAskedForBy has a thief ask for a certificate with the stolen key: without a TPM, and with one
// of his own. It returns the names of his requests.
func (n *node) isAskedForBy(t *testing.T, stolen harness.Credential, keyPEM []byte) []string {
	t.Helper()
	key, err := csr.ParseKey(keyPEM)
	harness.Must(t, err)
	api := stolen.Client(t).CertificatesV1().CertificateSigningRequests()
	file := func(signer string, content []byte) string {
		r := csr.Object(csr.NewName(), signer, content, key.Public(), nil)
		if _, err := api.Create(t.Context(), r, metav1.CreateOptions{}); err != nil {
			t.Logf("refused at once, %s: %v", signer, err)
			return ""
		}
		return r.Name
	}
	bare, err := csr.PKCS10(csr.Identity{NodeName: n.Name, ProviderID: n.ProviderID}, key)
	harness.Must(t, err)
	withoutEvidence, err := attestation.Request{PKCS10: bare, Provider: tpm.Name, Data: []byte("{}")}.Marshal()
	harness.Must(t, err)
	hellos, _ := harness.Requests(t, shared.ControlPlane, n.Name)
	if len(hellos) == 0 {
		t.Fatal("there is no hello to file again")
	}
	filed := []string{
		file(attestation.HelloSignerName, withoutEvidence), file(tpm.SignerName, withoutEvidence),
		// the node's own, which every node may read
		file(attestation.HelloSignerName, hellos[0].Spec.Request),
	}
	if name := file(certificatesv1.KubeAPIServerClientKubeletSignerName, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: bare})); name != "" {
		t.Errorf("%s: a revoked certificate may ask another signer", name)
	}

	maker, err := swtpm.NewCA()
	harness.Must(t, err)
	m, err := fleet.NewModel(n.Name, t.TempDir(), maker)
	harness.Must(t, err)
	defer m.Stop()
	m.ID, m.Certificate, m.Key = n.ProviderID, stolen.Config.CertData, keyPEM
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	times, err := m.Attest(ctx, fleet.Cluster{URL: shared.ServerURL(), CA: shared.ServerCA(), Issuer: shared.ClientCA().Certificate()})
	if err == nil {
		t.Error("a thief with a TPM of his own got a certificate")
	}
	t.Logf("a thief with a TPM of his own: %v", err)

	return append(filed, times.Hello, times.Proof)
}

// mustNotBeApproved checks that none of a thief's requests is approved, or has a certificate.
func mustNotBeApproved(t *testing.T, names []string) {
	t.Helper()
	for _, name := range names {
		if name == "" {
			continue
		}
		r, err := shared.Client().CertificatesV1().CertificateSigningRequests().Get(t.Context(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue // was never filed
		}
		harness.Must(t, err)
		t.Logf("%s of the thief: %+v", r.Spec.SignerName, r.Status.Conditions)
		if len(r.Status.Certificate) > 0 {
			t.Errorf("%s of the thief has a certificate", name)
		}
		for _, c := range r.Status.Conditions {
			if c.Type == certificatesv1.CertificateApproved {
				t.Errorf("%s of the thief is approved", name)
			}
		}
	}
}
