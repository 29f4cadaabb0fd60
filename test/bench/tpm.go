// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/protocol"
)

// attested is a software TPM with one kind of EK, and the times of its attestations.
type attested struct {
	ek                   string
	machine              *protocol.Machine
	greet, prove, verify []time.Duration
}

// benchTPM compares the kinds of EK, in turns. A chip takes a hundred times as long as a software TPM; the ratios say which part of it
// is the EK's.
func benchTPM(ctx context.Context, rounds int) error {
	var all []*attested
	for _, ek := range []string{"ecc-p256", "ecc-p384-high", "rsa-2048"} {
		chip, err := swtpm.New(swtpm.Options{Certified: []string{ek}})
		if err != nil {
			return err
		}
		defer chip.Stop()
		lockDir, err := os.MkdirTemp("", "bench-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(lockDir) }()
		machine, err := protocol.New(chip.Socket(), lockDir, verifier.Config{
			Roots: []*x509.Certificate{chip.CA.Root}, Intermediates: []*x509.Certificate{chip.CA.Intermediate},
		})
		if err != nil {
			return err
		}
		all = append(all, &attested{ek: ek, machine: machine})
	}
	for i := range rounds + 3 {
		for _, a := range all {
			attestation, err := a.machine.Attest(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", a.ek, err)
			}
			if i >= 3 {
				a.greet = append(a.greet, attestation.Greet)
				a.prove = append(a.prove, attestation.Prove)
				a.verify = append(a.verify, attestation.Verify)
			}
		}
	}
	fmt.Printf("\n%-32s %10s %10s %10s %8s\n", "attestation, software TPM", "hello", "proof", "verifier", "ratio")
	var base time.Duration
	for _, a := range all {
		greet, prove, verify := median(a.greet), median(a.prove), median(a.verify)
		if base == 0 {
			base = greet + prove
		}
		fmt.Printf("%-32s %7.2f ms %7.2f ms %7.2f ms %8.2f\n", a.ek, milliseconds(greet), milliseconds(prove), milliseconds(verify), float64(greet+prove)/float64(base))
	}
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func median(times []time.Duration) time.Duration {
	sorted := slices.Clone(times)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}
