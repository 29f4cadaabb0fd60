// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// signer approves and signs each request for a signer's name, as fast as the API server lets it.
type signer struct {
	name    string
	cluster *testbed.ControlPlane
	// until returns the end of a certificate that is signed now.
	until func() time.Time
	// signed counts certificates.
	signed atomic.Int64
}

// anHour is how long certificates live unless a test says otherwise.
func anHour() time.Time { return time.Now().Add(time.Hour) }

// startSigner starts a signer, which ends with the test.
func startSigner(t testing.TB, name string, until func() time.Time) *signer {
	t.Helper()
	s := &signer{name: name, cluster: shared.ControlPlane, until: until}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	began := make(chan struct{})
	go func() { ended <- s.run(ctx, began) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("signer: %v", err)
		}
	})
	select {
	case <-began:
	case err := <-ended:
		t.Fatal(err)
	}
	return s
}

func (s *signer) run(ctx context.Context, began chan<- struct{}) error {
	requests := s.cluster.Client().CertificatesV1().CertificateSigningRequests()
	ours := fields.OneTermEqualSelector("spec.signerName", s.name).String()
	list, err := requests.List(ctx, metav1.ListOptions{FieldSelector: ours})
	if err != nil {
		return err
	}
	seen, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = ours
			return requests.Watch(ctx, options)
		},
	})
	if err != nil {
		return err
	}
	defer seen.Stop()
	close(began)
	for event := range seen.ResultChan() {
		object, ok := event.Object.(*certificatesv1.CertificateSigningRequest)
		if !ok || event.Type != watch.Added {
			continue
		}
		if err := s.issue(ctx, object); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

func (s *signer) issue(ctx context.Context, object *certificatesv1.CertificateSigningRequest) error {
	content, err := attestation.Parse(object.Spec.Request)
	if err != nil {
		return err
	}
	certificate, err := s.cluster.ClientCA().SignCSR(content.PKCS10, time.Now().Add(-5*time.Minute), s.until())
	if err != nil {
		return err
	}
	requests := s.cluster.Client().CertificatesV1().CertificateSigningRequests()
	object.Status.Conditions = append(object.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test",
	})
	if object, err = requests.UpdateApproval(ctx, object.Name, object, metav1.UpdateOptions{}); err != nil {
		return err
	}
	object.Status.Certificate = certificate
	_, err = requests.UpdateStatus(ctx, object, metav1.UpdateOptions{})
	s.signed.Add(1)
	return err
}

// forget deletes the requests that claim a node's name, and returns how many there were.
func forget(t testing.TB, node string) int {
	t.Helper()
	hellos, others := harness.Requests(t, shared.ControlPlane, node)
	for _, r := range append(hellos, others...) {
		harness.Must(t, shared.Client().CertificatesV1().CertificateSigningRequests().Delete(t.Context(), r.Name, metav1.DeleteOptions{}))
	}
	return len(hellos) + len(others)
}
