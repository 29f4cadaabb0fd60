// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/pem"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

const builtinSigner = "kubernetes.io/kube-apiserver-client-kubelet"

// approveOnly has the controller leave the signing to another: it issues nothing that lives for
// less than ten minutes itself.
func approveOnly(c *config.Config) {
	c.Signing = config.Signing{Mode: config.ApproveOnly}
	c.Signers = []config.Signer{{Name: builtinSigner, Shared: true}}
}

// signer stands in for kube-controller-manager's. It issues every approved request, for a time as
// short as tests need.
type signer struct {
	*cluster
	lifetime time.Duration
	away     atomic.Bool
}

// newSigner runs one until the test ends.
func (c *cluster) newSigner(t *testing.T, lifetime time.Duration) *signer {
	t.Helper()
	s := &signer{cluster: c, lifetime: lifetime}
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

func (s *signer) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.issueAll(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

func (s *signer) issueAll(ctx context.Context) error {
	if s.away.Load() {
		return nil
	}
	list, err := s.Client().CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + builtinSigner})
	if err != nil {
		return err
	}
	for _, item := range list.Items {
		if len(item.Status.Certificate) > 0 || !approved(item) {
			continue
		}
		block, _ := pem.Decode(item.Spec.Request)
		now := time.Now()
		issued, err := s.ClientCA().SignCSR(block.Bytes, now, now.Add(s.lifetime))
		if err != nil {
			return fmt.Errorf("%s: %w", item.Name, err)
		}
		if err := s.SetCertificate(ctx, item.Name, issued); err != nil {
			return err
		}
	}
	return nil
}

func approved(csr certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(csr.Status.Conditions, func(c certificatesv1.CertificateSigningRequestCondition) bool {
		return c.Type == certificatesv1.CertificateApproved
	})
}
