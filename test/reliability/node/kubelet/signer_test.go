// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"encoding/pem"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// signer stands in for kube-controller-manager's. It issues one certificate that was approved, and
// then is away until issues is called again.
type signer struct {
	mu sync.Mutex
	// age and left are of the next certificate: how old it is already, and for how much longer it
	// is valid. There is none while left is 0.
	age, left time.Duration
}

// newSigner runs one until the test ends.
func newSigner(t *testing.T) *signer {
	t.Helper()
	s := &signer{}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("signer: %v", err)
		}
	})
	return s
}

// issues has it issue one more certificate.
func (s *signer) issues(age, left time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.age, s.left = age, left
}

func (s *signer) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.issueAll(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

func (s *signer) issueAll(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left == 0 {
		return nil
	}
	list, err := shared.Client().CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{
		FieldSelector: "spec.signerName=" + certificatesv1.KubeAPIServerClientKubeletSignerName,
	})
	if err != nil {
		return err
	}
	for _, item := range list.Items {
		approved := slices.ContainsFunc(item.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
			return c.Type == certificatesv1.CertificateApproved
		})
		if len(item.Status.Certificate) > 0 || !approved {
			continue
		}
		block, _ := pem.Decode(item.Spec.Request)
		now := time.Now()
		issued, err := shared.ClientCA().SignCSR(block.Bytes, now.Add(-s.age), now.Add(s.left))
		if err != nil {
			return fmt.Errorf("%s: %w", item.Name, err)
		}
		if err := shared.SetCertificate(ctx, item.Name, issued); err != nil {
			return err
		}
		s.left = 0
		break
	}
	return nil
}
