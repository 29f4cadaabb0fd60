// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

// The TPM is reset before a command of the plugin, or ends during one and starts again. The node
// gets its certificate by one hello and one proof. TestResetAtEachCommand of the package commands
// has every command.
func TestTPMIsResetMeanwhile(t *testing.T) {
	t.Parallel()
	every := reliability.Size(t, "tpm-renewals", 9, 1)
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n, old := begin(t, kind)
			n.settles(t, old, time.Minute)
			commands := n.proxy.Count()
			t.Logf("%d commands", commands)
			for index := 1; index < commands; index += every {
				for name, cut := range map[string]bool{"reset": false, "ends": true} {
					t.Run(fmt.Sprintf("%s-%d", name, index), func(t *testing.T) {
						t.Parallel()
						n, old := begin(t, kind)
						happened := false
						n.proxy.CallAt(index, func() {
							happened = true
							n.Chip.Crash()
							if err := n.Chip.Boot(); err != nil {
								t.Error(err)
							}
						})
						if cut {
							n.proxy.CutAt(index)
						}
						took := n.settles(t, old, time.Minute)
						t.Logf("certificate after %v, %d commands", took, n.proxy.Count())
						if !happened {
							t.Error("it did not happen")
						}
						n.filed(t, 1, 1)
						n.nothingLeft(t)
						if failed, err := n.Chip.LockoutCounter(); err != nil || failed != 0 {
							t.Errorf("lockout counter %d, %v", failed, err)
						}
					})
				}
			}
		})
	}
}

// A TPM in lockout is no obstacle to an enrolment, nor to a renewal, and neither prolongs it.
func TestTPMIsLockedOut(t *testing.T) {
	t.Parallel()
	reliability.Size(t, "tpm-renewals", 0, 0)
	n := newNode(t)
	wrong, err := n.Chip.LockOut()
	harness.Must(t, err)
	before, err := n.Chip.LockoutCounter()
	harness.Must(t, err)
	t.Logf("locked out after %d wrong passwords", wrong)
	n.settles(t, nil, time.Minute)
	n.settles(t, n.due(t), time.Minute)
	n.filed(t, 2, 2)
	if after, err := n.Chip.LockoutCounter(); err != nil || after != before {
		t.Errorf("lockout counter %d, %d before, %v", after, before, err)
	}
	n.nothingLeft(t)
}

// Warnings of a TPM, as the kubelet's user sees them. The worker repeats the command itself, or the
// user gets a reason that names command and code. There is a certificate once the TPM accepts the
// command again. TestEachWarningAtEachCommand of the package commands has every one.
func TestTPMWarns(t *testing.T) {
	t.Parallel()
	reliability.Size(t, "tpm-renewals", 0, 0)
	const forEver = 1 << 20
	for name, c := range map[string]struct {
		command tpm2.TPMCC
		code    tpm2.TPMRC
		times   int
		says    []string // nothing where the worker repeats the command
	}{
		"retry three times":        {tpm2.TPMCCQuote, tpm2.TPMRCRetry, 3, nil},
		"out of memory once":       {tpm2.TPMCCCreatePrimary, tpm2.TPMRCObjectMemory, 1, nil},
		"context gap for ever":     {tpm2.TPMCCStartAuthSession, tpm2.TPMRCContextGap, forEver, []string{"TPM2_StartAuthSession: TPM_RC_CONTEXT_GAP", "tpm2_flushcontext"}},
		"sessions for ever":        {tpm2.TPMCCStartAuthSession, tpm2.TPMRCSessionHandles, forEver, []string{"TPM2_StartAuthSession: TPM_RC_SESSION_HANDLES", "/dev/tpmrm0"}},
		"self-test for ever":       {tpm2.TPMCCActivateCredential, tpm2.TPMRCTesting, forEver, []string{"TPM2_ActivateCredential: TPM_RC_TESTING", "busy"}},
		"key flushed by others":    {tpm2.TPMCCQuote, tpm2.TPMRCReferenceH0, forEver, []string{"TPM2_Quote: TPM_RC_REFERENCE_H0", "another program flushed it"}},
		"cancelled by the driver":  {tpm2.TPMCCCreatePrimary, tpm2.TPMRCCanceled, forEver, []string{"TPM2_CreatePrimary: TPM_RC_CANCELED", "cancelled"}},
		"certificate is not there": {tpm2.TPMCCNVRead, tpm2.TPMRCNVUnavailable, forEver, []string{"TPM2_NV_Read: TPM_RC_NV_UNAVAILABLE", "busy"}},
	} {
		t.Run(label(name), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.proxy.Answer(c.command, c.code, c.times)
			if r := n.Run(t, cluster); c.says == nil {
				r.Want(t, 0)
			} else {
				wantReason(t, r, 15, c.says...)
			}
			n.nothingLeft(t)
			n.proxy.Reset()
			n.settles(t, nil, longestBackOff+slack)
			n.filed(t, 1, 1)
			n.nothingLeft(t)
		})
	}
}
