// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

const (
	// waitingTokens file what waits, each its part: a token has a rate of its own.
	waitingTokens = 4
	// waitingTimeout bounds how long it takes until the controller has looked at all of it.
	waitingTimeout = 6 * time.Minute
)

// growthPending has machines enrol beside hellos that wait for their machine to appear in the
// inventory.
func growthPending(ctx context.Context, b *bench) error {
	c := newCurve("requests that wait", "enrolment, median", "slowest", "controller CPU", "idle CPU, 1/1000", "API server's idle", "RSS, MiB")
	err := b.withSite(ctx, siteOptions{machines: 2}, func(s *site) error {
		unknown, err := s.unknownHello(ctx)
		if err != nil {
			return err
		}
		waiting := 0
		for _, count := range []int{0, 1_000, 10_000} {
			if count > 0 {
				count = b.sized(count)
			}
			s.note("%d requests wait", count)
			if err := s.wait(ctx, unknown, waiting, count); err != nil {
				return err
			}
			waiting = count
			controller, apiServer, err := s.idle(ctx, idleFor)
			if err != nil {
				return err
			}
			expense, err := s.expenseOf(ctx, 20)
			if err != nil {
				return err
			}
			rss, err := memory(s.controller.Process(), "VmRSS")
			if err != nil {
				return err
			}
			c.add(count, quantile(expense.took, .5), slowest(expense.took), expense.controller, controller, apiServer, rss)
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.finish()
	return nil
}

// unknownHello returns what a machine files that nobody has put into the inventory.
func (s *site) unknownHello(ctx context.Context) (*certificatesv1.CertificateSigningRequest, error) {
	dir, err := s.folder("stranger")
	if err != nil {
		return nil, err
	}
	maker, err := swtpm.NewCA()
	if err != nil {
		return nil, err
	}
	stranger, err := fleet.NewSwtpm("stranger", filepath.Clean(dir), maker)
	if err != nil {
		return nil, err
	}
	defer stranger.Stop()
	return helloOf(ctx, stranger)
}

// helloOf returns what a machine files first, without a name.
func helloOf(ctx context.Context, m *fleet.Machine) (*certificatesv1.CertificateSigningRequest, error) {
	key, _, err := csr.NewKey()
	if err != nil {
		return nil, err
	}
	pkcs10, err := csr.PKCS10(csr.Identity{NodeName: m.Name, ProviderID: m.ProviderID()}, key)
	if err != nil {
		return nil, err
	}
	document, _, err := m.Provider.(provider.Challenger).Hello(ctx, provider.Request{
		Name: csr.NewName(), SignerName: tpm.SignerName, Version: attestation.VersionTPM, NodeName: m.Name, ProviderID: m.ProviderID(), PKCS10: pkcs10,
	})
	if err != nil {
		return nil, err
	}
	request, err := attestation.Request{PKCS10: pkcs10, Provider: tpm.Name, Data: document}.Marshal()
	if err != nil {
		return nil, err
	}
	return csr.Object("", attestation.HelloSignerName, request, key.Public(), nil), nil
}

// wait files copies of a request, from one number to another, and returns when the controller has
// looked at each.
func (s *site) wait(ctx context.Context, request *certificatesv1.CertificateSigningRequest, from, to int) error {
	before, err := readController(ctx, s.controller)
	if err != nil {
		return err
	}
	var parts [waitingTokens][]*certificatesv1.CertificateSigningRequest
	for i := from; i < to; i++ {
		another := request.DeepCopy()
		another.Name = csr.NewName()
		parts[i%waitingTokens] = append(parts[i%waitingTokens], another)
	}
	for _, part := range parts {
		if len(part) == 0 {
			continue
		}
		token, err := s.cp.CreateBootstrapToken(ctx, time.Hour)
		if err != nil {
			return err
		}
		if err := s.file(ctx, s.withToken(token), slices.Values(part)); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, waitingTimeout)
	defer cancel()
	for {
		now, err := readController(ctx, s.controller)
		if err != nil {
			return err
		}
		looked := now.minus(before).sum("node_attestation_decisions_total", `outcome="Wait"`)
		if looked >= float64(to-from) {
			return nil
		}
		if err := sleep(ctx, time.Second/4); err != nil {
			return fmt.Errorf("%.0f of %d requests wait: %w", looked, to-from, err)
		}
	}
}
