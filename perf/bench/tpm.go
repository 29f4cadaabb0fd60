// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/protocol"
)

// attested is a software TPM with one kind of EK, the times of its attestations, and how many
// commands they take.
type attested struct {
	ek                                        string
	chip                                      *swtpm.TPM
	machine                                   *protocol.Machine
	greet, prove, both, verify                []time.Duration
	helloCommands, proofCommands, allCommands int
}

// tpm compares the kinds of EK, in turns. A chip takes a hundred times as long as a software TPM.
// The commands are the same, so the ratios show which part of the time the EK takes.
func (b *bench) tpm(ctx context.Context) error {
	var all []*attested
	for _, ek := range []string{"ecc-p256", "ecc-p384-high", "rsa-2048"} {
		chip, err := swtpm.New(swtpm.Options{Certified: []string{ek}})
		if err != nil {
			return err
		}
		defer chip.Stop()
		a := &attested{ek: ek, chip: chip}
		if a.machine, err = b.machineOf(chip, chip.Socket(), ek); err != nil {
			return err
		}
		if err := b.countCommands(ctx, a); err != nil {
			return fmt.Errorf("%s: %w", ek, err)
		}
		all = append(all, a)
	}
	for i := range b.attestations + warmUps {
		for _, a := range all {
			attestation, err := a.machine.Attest(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", a.ek, err)
			}
			if i >= warmUps {
				a.greet = append(a.greet, attestation.Greet)
				a.prove = append(a.prove, attestation.Prove)
				a.both = append(a.both, attestation.Greet+attestation.Prove)
				a.verify = append(a.verify, attestation.Verify)
			}
		}
	}
	for _, a := range all {
		b.table.add(a.rows(all[0])...)
	}
	return nil
}

// rows compares one kind of EK with the first.
func (a *attested) rows(base *attested) (rows []row) {
	for _, phase := range []struct {
		name         string
		commands     int
		ours, theirs []time.Duration
	}{
		{"hello", a.helloCommands, a.greet, base.greet},
		{"proof", a.proofCommands, a.prove, base.prove},
		{"both", a.allCommands, a.both, base.both},
	} {
		what := fmt.Sprintf("TPM, %s: %s, %d commands", a.ek, phase.name, phase.commands)
		if a == base {
			rows = append(rows, row{what: what, figure: milliseconds(median(phase.ours))})
		} else {
			rows = append(rows, compared(what, phase.ours, base.ek, phase.theirs))
		}
	}
	return append(rows, compared(fmt.Sprintf("TPM, %s: the verifier's part", a.ek), a.verify, "both", a.both))
}

func (b *bench) machineOf(chip *swtpm.TPM, socket, name string) (*protocol.Machine, error) {
	lock, err := b.folder("tpm", name)
	if err != nil {
		return nil, err
	}
	return protocol.New(socket, lock, verifier.Config{
		Roots: []*x509.Certificate{chip.CA.Root}, Intermediates: []*x509.Certificate{chip.CA.Intermediate},
	})
}

// countCommands goes through an attestation behind a proxy that counts. The attestations whose time
// is measured do not use that proxy.
func (b *bench) countCommands(ctx context.Context, a *attested) error {
	proxy, err := swtpm.OpenProxy(a.chip)
	if err != nil {
		return err
	}
	defer proxy.Close()
	machine, err := b.machineOf(a.chip, proxy.Socket(), a.ek)
	if err != nil {
		return err
	}
	if _, _, err := machine.Provider.Hello(ctx, machine.Ask("hello")); err != nil {
		return err
	}
	a.helloCommands = proxy.Count()
	proxy.Reset()
	if _, err := machine.Attest(ctx); err != nil {
		return err
	}
	a.allCommands = proxy.Count()
	a.proofCommands = a.allCommands - a.helloCommands
	if a.helloCommands == 0 || a.proofCommands <= 0 {
		return fmt.Errorf("%d commands for a hello, %d with the proof", a.helloCommands, a.allCommands)
	}
	return nil
}
