// SPDX-License-Identifier: Apache-2.0

// Package attestor replaces node-attestation-controller in tests. It challenges hellos and issues
// certificates for proofs, with the controller's verifier of evidence and without its rules.
package attestor

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	verifiertpm "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Attestor answers requests for the TPM's signers until its context ends.
type Attestor struct {
	Cluster  *testbed.ControlPlane
	Verifier *verifiertpm.Verifier
	// NodeName is the one node whose requests are answered.
	NodeName string
	// AnyEK makes an authoritative source name the EK of each hello, for every EK.
	AnyEK bool
	// Lifetime is that of the certificates.
	Lifetime time.Duration
	// BeforeChallenge and BeforeIssue, if set, are called with the name of the request and may
	// change the world.
	BeforeChallenge, BeforeIssue func(name string)

	mu       sync.Mutex
	hellos   int
	refused  []error
	answered map[string]bool
}

// Start answers the requests of a node with that chip until the test ends. Its certificates are
// valid for an hour.
func Start(t testing.TB, cluster *testbed.ControlPlane, nodeName string, chip *swtpm.TPM) {
	t.Helper()
	New(t, cluster, nodeName, chip).RunUntilEnd(t)
}

// New returns an attestor for a node with that chip. Its certificates are valid for an hour.
func New(t testing.TB, cluster *testbed.ControlPlane, nodeName string, chip *swtpm.TPM) *Attestor {
	t.Helper()
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	v, err := verifiertpm.New(verifiertpm.Config{
		Roots: []*x509.Certificate{chip.CA.Root}, Intermediates: []*x509.Certificate{chip.CA.Intermediate},
		PCRs: attestation.PCRSelection{Bank: "sha256", Indexes: []int{0, 7}}, ClusterUID: "0e4a9a4c-3a4e-4b1f-9f0b-6c2b1f6d2a11",
		Keys: verifiertpm.Keys{Current: "k1", ByID: map[string][]byte{"k1": key}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &Attestor{Cluster: cluster, Verifier: v, NodeName: nodeName, Lifetime: time.Hour}
}

// RunUntilEnd answers requests until the test ends.
func (a *Attestor) RunUntilEnd(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("attestor: %v", err)
		}
	})
}

// Hellos returns how many hellos were challenged.
func (a *Attestor) Hellos() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.hellos
}

// Refused returns why requests were denied.
func (a *Attestor) Refused() []error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]error(nil), a.refused...)
}

// Run answers requests until ctx ends. An error is one of the API server.
func (a *Attestor) Run(ctx context.Context) error {
	a.answered = map[string]bool{}
	for ctx.Err() == nil {
		if err := a.follow(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// follow answers the requests that there are, and then those that a watch shows, until ctx or the
// watch ends.
func (a *Attestor) follow(ctx context.Context) error {
	requests := a.Cluster.Client().CertificatesV1().CertificateSigningRequests()
	list, err := requests.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range list.Items {
		if err := a.answer(ctx, &list.Items[i]); err != nil {
			return err
		}
	}
	seen, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return requests.Watch(ctx, options)
		},
	})
	if err != nil {
		return err
	}
	defer seen.Stop()
	for event := range seen.ResultChan() {
		object, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
		if !ok {
			return nil // the version is too old: list again
		}
		if event.Type == watch.Deleted {
			continue
		}
		if err := a.answer(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

func (a *Attestor) answer(ctx context.Context, object *certificatesv1.CertificateSigningRequest) error {
	ours := object.Spec.SignerName == attestation.HelloSignerName || object.Spec.SignerName == tpm.SignerName
	if !ours || a.answered[string(object.UID)] || len(object.Status.Conditions) > 0 || !a.isOfNode(object) {
		return nil
	}
	a.answered[string(object.UID)] = true
	var refusal, err error
	if object.Spec.SignerName == attestation.HelloSignerName {
		refusal, err = a.challenge(ctx, object)
	} else {
		refusal, err = a.issue(ctx, object)
	}
	if refusal == nil || err != nil {
		return err
	}
	a.mu.Lock()
	a.refused = append(a.refused, refusal)
	a.mu.Unlock()
	return a.Cluster.Deny(ctx, object.Name, reasonOf(refusal), refusal.Error())
}

// isOfNode reports whether the request claims the node's name.
func (a *Attestor) isOfNode(object *certificatesv1.CertificateSigningRequest) bool {
	block, _ := pem.Decode(object.Spec.Request) // the API server has seen to it that there is one
	request, err := x509.ParseCertificateRequest(block.Bytes)
	return err == nil && request.Subject.CommonName == "system:node:"+a.NodeName
}

func reasonOf(refusal error) string {
	var refusals verifier.Refusals
	errors.As(refusal, &refusals)
	return string(refusals.Reason())
}

func (a *Attestor) challenge(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (refusal, err error) {
	request, now := RequestOf(object), time.Now()
	var named []verifiertpm.Fingerprint
	if a.AnyEK {
		ek, err := verifiertpm.ClaimedEK(request)
		if err != nil {
			return err, nil
		}
		named = append(named, ek)
	}
	claim, err := a.Verifier.VerifyHello(request, named, now)
	if err != nil {
		return err, nil
	}
	challenge, err := a.Verifier.Challenge(rand.Reader, claim, now)
	if err != nil {
		return nil, err
	}
	annotation, err := challenge.Marshal()
	if err != nil {
		return nil, err
	}
	if a.BeforeChallenge != nil {
		a.BeforeChallenge(object.Name)
	}
	// Before it is answered: the test may count as soon as the node has the answer.
	a.mu.Lock()
	a.hellos++
	a.mu.Unlock()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{attestation.AnnotationChallenge: string(annotation)}}})
	if err != nil {
		return nil, err
	}
	_, err = a.Cluster.Client().CertificatesV1().CertificateSigningRequests().Patch(ctx, object.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return nil, err
}

func (a *Attestor) issue(ctx context.Context, object *certificatesv1.CertificateSigningRequest) (refusal, err error) {
	content, err := attestation.Parse(object.Spec.Request)
	if err != nil {
		return err, nil
	}
	proof, err := attestation.ParseProof(content.Data)
	if err != nil {
		return err, nil
	}
	hello, err := a.Cluster.Client().CertificatesV1().CertificateSigningRequests().Get(ctx, proof.HelloName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var named []verifiertpm.Fingerprint
	if a.AnyEK {
		ek, err := verifiertpm.ClaimedEK(RequestOf(hello))
		if err != nil {
			return err, nil
		}
		named = append(named, ek)
	}
	if _, err := a.Verifier.VerifyProof(RequestOf(object), RequestOf(hello), named, time.Now()); err != nil {
		return err, nil
	}
	if a.BeforeIssue != nil {
		a.BeforeIssue(object.Name)
	}
	certificate, err := a.Cluster.ClientCA().SignCSR(content.PKCS10, time.Now().Add(-5*time.Minute), time.Now().Add(a.Lifetime))
	if err != nil {
		return nil, err
	}
	if err := a.Cluster.Approve(ctx, object.Name); err != nil {
		return nil, err
	}
	return nil, a.Cluster.SetCertificate(ctx, object.Name, certificate)
}

// RequestOf returns the verifier's input for an object.
func RequestOf(object *certificatesv1.CertificateSigningRequest) verifiertpm.Request {
	usages := make([]string, 0, len(object.Spec.Usages))
	for _, usage := range object.Spec.Usages {
		usages = append(usages, string(usage))
	}
	return verifiertpm.Request{
		Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName,
		Request: object.Spec.Request, Usages: usages, ExpirationSeconds: object.Spec.ExpirationSeconds,
	}
}
