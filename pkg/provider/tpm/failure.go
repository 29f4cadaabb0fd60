// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/oserror"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
)

// refusal is what a TPM's response codes mean to an operator.
type refusal struct {
	codes []tpm2.TPMRC
	hint  string
}

// refusals is the one table of response codes (TPM 2.0 Library, part 2, "TPM_RC"). Error numbers of
// the kernel are in internal/oserror.
func refusals() []refusal {
	return []refusal{
		{[]tpm2.TPMRC{tpm2.TPMRCLockout},
			"too many wrong passwords locked the TPM: wait, or end the lockout with: tpm2_dictionarylockout --clear-lockout"},
		{[]tpm2.TPMRC{tpm2.TPMRCBadAuth, tpm2.TPMRCAuthFail, tpm2.TPMRCAuthMissing},
			"a password is set for the TPM's endorsement hierarchy, and this program uses the empty one: " +
				"remove it with tpm2_changeauth -c endorsement -p OLD, or clear the TPM"},
		{[]tpm2.TPMRC{tpm2.TPMRCHierarchy},
			"the TPM's endorsement hierarchy is off: switch it on in the firmware's settings, or restart the machine if software switched it off"},
		{[]tpm2.TPMRC{tpm2.TPMRCDisabled},
			"the TPM or a part of it is off: switch it on in the firmware's settings"},
		{[]tpm2.TPMRC{tpm2.TPMRCInitialize},
			"the firmware has not started the TPM (TPM2_Startup): restart the machine, or start a software TPM with: swtpm socket --flags startup-clear"},
		{[]tpm2.TPMRC{tpm2.TPMRCReboot},
			"the TPM wants a restart of the machine"},
		{[]tpm2.TPMRC{tpm2.TPMRCUpgrade},
			"an update of the TPM's firmware is unfinished: finish it, and restart the machine"},
		{[]tpm2.TPMRC{tpm2.TPMRCFailure, tpm2.TPMRCNeedsTest},
			"the TPM's test of itself has failed: switch the machine off and on, then try: kubelet-authenticator tpm selftest; " +
				"if it still fails, update the firmware or replace the TPM"},
		{[]tpm2.TPMRC{tpm2.TPMRCObjectMemory, tpm2.TPMRCObjectHandles, tpm2.TPMRCSessionMemory, tpm2.TPMRCSessionHandles, tpm2.TPMRCMemory,
			tpm2.TPMRCContextGap, tpm2.TPMRCTooManyContexts},
			"other programs fill the TPM's memory: use /dev/tpmrm0, end them, or flush what they left: tpm2_flushcontext -t, -l and -s"},
		{[]tpm2.TPMRC{tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting, tpm2.TPMRCNVRate, tpm2.TPMRCNVUnavailable},
			"the TPM has been busy for several seconds: try again, and see who else uses it with: fuser -v /dev/tpm0 /dev/tpmrm0"},
		{[]tpm2.TPMRC{tpm2.TPMRCCanceled},
			"the TPM's driver or another program cancelled the command: see the kernel's log, and who else uses the TPM with: fuser -v /dev/tpm0 /dev/tpmrm0"},
		{[]tpm2.TPMRC{
			tpm2.TPMRCReferenceH0, tpm2.TPMRCReferenceH1, tpm2.TPMRCReferenceH2, tpm2.TPMRCReferenceH3, tpm2.TPMRCReferenceH4, tpm2.TPMRCReferenceH5,
			tpm2.TPMRCReferenceH6, tpm2.TPMRCReferenceS0, tpm2.TPMRCReferenceS1, tpm2.TPMRCReferenceS2, tpm2.TPMRCReferenceS3, tpm2.TPMRCReferenceS4,
			tpm2.TPMRCReferenceS5, tpm2.TPMRCReferenceS6,
		},
			"a key or session was gone before its command: the TPM was reset, or another program flushed it; use /dev/tpmrm0, or see who else uses the TPM"},
		{[]tpm2.TPMRC{tpm2.TPMRCNVAuthorization, tpm2.TPMRCNVLocked, tpm2.TPMRCNVRange, tpm2.TPMRCNVSize, tpm2.TPMRCNVSpace,
			tpm2.TPMRCNVUninitialized, tpm2.TPMRCNVDefined},
			"the TPM refuses its NV memory: see the indices with tpm2_nvreadpublic, and which command fails with: kubelet-authenticator tpm selftest"},
		{[]tpm2.TPMRC{tpm2.TPMRCCommandCode, tpm2.TPMRCLocality},
			"the TPM lacks a command that attestation needs, or does not allow it to this machine: look for an update of its firmware"},
		{[]tpm2.TPMRC{tpm2.TPMRCAsymmetric, tpm2.TPMRCSymmetric, tpm2.TPMRCHash, tpm2.TPMRCKeySize, tpm2.TPMRCMode, tpm2.TPMRCType, tpm2.TPMRCKDF,
			tpm2.TPMRCScheme, tpm2.TPMRCCurve, tpm2.TPMRCValue, tpm2.TPMRCSize, tpm2.TPMRCAttributes},
			"the TPM does not support what it was asked for: see which command and key fail with: kubelet-authenticator tpm selftest"},
	}
}

// hintOf returns the hint for the response code that err wraps, empty if there is none.
func hintOf(err error) string {
	for _, r := range refusals() {
		if slices.ContainsFunc(r.codes, func(code tpm2.TPMRC) bool { return errors.Is(err, code) }) {
			return r.hint
		}
	}
	return ""
}

const trySelfTest = "see what the TPM refuses with: kubelet-authenticator tpm selftest"

// classifyError adds class and hint to an error of the TPM, or of the connection to it. It returns
// nil for no error.
func classifyError(err error) error { return classify(err, trySelfTest) }

// ClassifyError adds class and hint to an error of package tpm, for other providers that use the
// TPM. It returns nil for no error.
func ClassifyError(err error) error { return classifyError(err) }

// classify is classifyError with another hint for errors that have no hint of their own.
func classify(err error, otherwise string) error {
	var untrusted *tpm.UntrustedLockError
	var lock *tpm.LockError
	var locked *tpm.LockTimeoutError
	var open *tpm.OpenError
	var bank *tpm.BankError
	var lacks *tpm.TemplateError
	as := func(class provider.Class, hint string) error {
		return &provider.Error{Class: class, Hint: hint, Err: err}
	}
	failed := func(hint string) error { return as(provider.DeviceFailed, hint) }
	switch {
	case err == nil:
		return nil
	case errors.As(err, &untrusted):
		return as(provider.DirectoryRefused, "make the runtime directory root's, with mode 0700, or name another with --runtime-dir")
	case errors.As(err, &lock):
		return as(provider.DirectoryNotWritable, cmp.Or(oserror.Directory(err, "--runtime-dir"),
			"see what is at that path, or name another directory with --runtime-dir"))
	case errors.As(err, &locked):
		return failed("find who holds it with: fuser -v " + locked.Path)
	case errors.As(err, &open):
		return classifyOpen(open, as)
	case errors.As(err, &lacks):
		return failed("set --ek-template to auto, or to a template that the TPM makes")
	case errors.As(err, &bank):
		return failed("have the controller's policy name another bank, or switch that one on in the firmware's settings")
	case errors.Is(err, tpm.ErrOtherKeys): // it may wrap a response code, so it comes before these
		return as(provider.Stale, "the TPM's endorsement seed changed, or the challenge was made for another machine")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return failed("the TPM was too slow, or hangs, or another program keeps the one connection of a software TPM (ss -xp): " +
			"see how long each command takes with: kubelet-authenticator tpm selftest")
	case errors.Is(err, tpm.ErrReset):
		return failed("the TPM lost its keys during a command: see what resets it in the kernel's log, or whether the software TPM was started again")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return failed("the TPM was reset, or the software TPM ended, during a command: see the kernel's log, or start the software TPM again")
	}
	device, _ := oserror.Device(err)
	return failed(cmp.Or(hintOf(err), device, otherwise))
}

// classifyOpen decides whether there is no TPM, or a TPM that could not be opened. An error without
// an errno has no hint. Then the path leads to something that is not a TPM.
func classifyOpen(err *tpm.OpenError, as func(provider.Class, string) error) error {
	hint, absent := oserror.Device(err)
	if absent || hint == "" {
		return as(provider.NoDevice, cmp.Or(hint, "name the TPM's device, or the socket of a software TPM, with --tpm-device"))
	}
	return as(provider.DeviceFailed, hint)
}
