// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm"
)

// wantHint checks class and hint of a provider.Error.
func wantHint(t *testing.T, what string, err error, class provider.Class, says string) {
	t.Helper()
	var known *provider.Error
	if !errors.As(err, &known) || known.Class != class || !strings.Contains(known.Hint, says) {
		t.Errorf("%s: class or hint is another: %#v", what, err)
	}
}

// tried is an error of opening these devices.
func tried(numbers ...syscall.Errno) error {
	var failed tpm.OpenError
	for i, number := range numbers {
		failed.Tried = append(failed.Tried, &fs.PathError{Op: "open", Path: fmt.Sprintf("/dev/tpm%d", i), Err: number})
	}
	return &failed
}

// What opening a TPM can fail with: only an absent TPM is absent.
func TestErrorsOfOpening(t *testing.T) {
	for what, c := range map[string]struct {
		err   error
		class provider.Class
		says  string
	}{
		"none":                        {tried(syscall.ENOENT, syscall.ENOENT), provider.NoDevice, "switch the TPM on"},
		"no such device":              {tried(syscall.ENOENT, syscall.ENXIO), provider.NoDevice, "load its driver"},
		"a driver without a TPM":      {tried(syscall.ENODEV), provider.NoDevice, "switch the TPM on"},
		"nobody listens":              {tried(syscall.ECONNREFUSED), provider.NoDevice, "start the software TPM"},
		"a file":                      {&tpm.OpenError{Tried: []error{errors.New("neither a character device nor a socket")}}, provider.NoDevice, "--tpm-device"},
		"too many open files":         {tried(syscall.EMFILE, syscall.EMFILE), provider.DeviceFailed, "LimitNOFILE="},
		"too many on the machine":     {tried(syscall.ENFILE), provider.DeviceFailed, "fs.file-max"},
		"no right":                    {tried(syscall.EACCES, syscall.EACCES), provider.DeviceFailed, "run this as root"},
		"no right to one, no other":   {tried(syscall.EPERM, syscall.ENOENT), provider.DeviceFailed, "run this as root"},
		"in use":                      {tried(syscall.ENOENT, syscall.EBUSY), provider.DeviceFailed, "fuser -v /dev/tpm0"},
		"the queue is full":           {tried(syscall.EAGAIN), provider.DeviceFailed, "too many programs wait"},
		"the driver gets no answer":   {tried(syscall.EIO), provider.DeviceFailed, "does not answer its driver"},
		"the driver waits for answer": {tried(syscall.ETIME), provider.DeviceFailed, "does not answer its driver"},
		"a read gets no answer":       {fmt.Errorf("TPM2_Quote: %w", &fs.PathError{Op: "read", Path: "/dev/tpm0", Err: syscall.ETIME}), provider.DeviceFailed, "does not answer its driver"},
		"the software TPM ends":       {fmt.Errorf("TPM2_Quote: %w", &net.OpError{Op: "write", Err: syscall.EPIPE}), provider.DeviceFailed, "ended during a command"},
		"the software TPM ended":      {fmt.Errorf("TPM2_Quote: %w", io.EOF), provider.DeviceFailed, "start the software TPM again"},
		"half a response":             {fmt.Errorf("TPM2_Quote: %w", io.ErrUnexpectedEOF), provider.DeviceFailed, "start the software TPM again"},
		"reset":                       {fmt.Errorf("TPM2_CreatePrimary: %w", tpm.ErrReset), provider.DeviceFailed, "lost its keys"},
		"hangs":                       {fmt.Errorf("TPM2_Quote: %w", context.DeadlineExceeded), provider.DeviceFailed, "too slow, or hangs"},
		"another error":               {errors.New("x"), provider.DeviceFailed, "tpm selftest"},
	} {
		wantHint(t, what, classifyError(fmt.Errorf("x: %w", c.err)), c.class, c.says)
	}
	if err := classifyError(nil); err != nil {
		t.Errorf("no error: %v", err)
	}
}

// Each response code with a specific meaning has a specific hint, with or without the number of a
// handle, session or parameter.
func TestResponseCodes(t *testing.T) {
	want := map[tpm2.TPMRC]string{
		tpm2.TPMRCLockout: "tpm2_dictionarylockout",
		tpm2.TPMRCBadAuth: "a password is set", tpm2.TPMRCAuthFail: "a password is set", tpm2.TPMRCAuthMissing: "a password is set",
		tpm2.TPMRCHierarchy: "endorsement hierarchy is off", tpm2.TPMRCDisabled: "firmware's settings",
		tpm2.TPMRCInitialize: "TPM2_Startup", tpm2.TPMRCReboot: "restart of the machine", tpm2.TPMRCUpgrade: "update",
		tpm2.TPMRCFailure: "switch the machine off and on", tpm2.TPMRCNeedsTest: "switch the machine off and on",
		tpm2.TPMRCRetry: "busy", tpm2.TPMRCYielded: "busy", tpm2.TPMRCTesting: "busy", tpm2.TPMRCCanceled: "cancelled",
		tpm2.TPMRCNVRate: "busy", tpm2.TPMRCNVUnavailable: "busy",
		tpm2.TPMRCCommandCode: "lacks a command", tpm2.TPMRCLocality: "lacks a command",
	}
	for _, code := range []tpm2.TPMRC{tpm2.TPMRCObjectMemory, tpm2.TPMRCObjectHandles, tpm2.TPMRCSessionMemory, tpm2.TPMRCSessionHandles,
		tpm2.TPMRCMemory, tpm2.TPMRCContextGap, tpm2.TPMRCTooManyContexts} {
		want[code] = "/dev/tpmrm0"
	}
	for _, code := range []tpm2.TPMRC{tpm2.TPMRCNVAuthorization, tpm2.TPMRCNVLocked, tpm2.TPMRCNVRange, tpm2.TPMRCNVSize, tpm2.TPMRCNVSpace,
		tpm2.TPMRCNVUninitialized, tpm2.TPMRCNVDefined} {
		want[code] = "tpm2_nvreadpublic"
	}
	for _, code := range []tpm2.TPMRC{tpm2.TPMRCAsymmetric, tpm2.TPMRCSymmetric, tpm2.TPMRCHash, tpm2.TPMRCKeySize, tpm2.TPMRCMode, tpm2.TPMRCType,
		tpm2.TPMRCKDF, tpm2.TPMRCScheme, tpm2.TPMRCCurve, tpm2.TPMRCValue, tpm2.TPMRCSize, tpm2.TPMRCAttributes} {
		want[code] = "does not support"
	}
	for code := tpm2.TPMRCReferenceH0; code <= tpm2.TPMRCReferenceS6; code++ {
		if code != tpm2.TPMRCReferenceH6+1 { // unassigned
			want[code] = "another program flushed it"
		}
	}
	for code, says := range want {
		wantHint(t, code.Error(), classifyError(fmt.Errorf("TPM2_X: %w", code)), provider.DeviceFailed, says)
	}
	// TPM_RC_BAD_AUTH of session 1, TPM_RC_CURVE of parameter 2, TPM_RC_HIERARCHY of handle 1.
	for code, says := range map[tpm2.TPMRC]string{0x9a2: "a password is set", 0x2e6: "does not support", 0x185: "endorsement hierarchy is off"} {
		wantHint(t, code.Error(), classifyError(fmt.Errorf("TPM2_X: %w", code)), provider.DeviceFailed, says)
	}
	wantHint(t, "a code without a row", classifyError(fmt.Errorf("TPM2_X: %w", tpm2.TPMRCTicket)), provider.DeviceFailed, trySelfTest)
	wantHint(t, "for other keys", classifyError(fmt.Errorf("%w: %w", tpm.ErrOtherKeys, tpm2.TPMRCFailure)), provider.Stale, "seed")
	found := map[tpm2.TPMRC]bool{}
	for _, r := range refusals() {
		for _, code := range r.codes {
			if found[code] || want[code] == "" {
				t.Errorf("%v has two rows, or is not in the table of this test", code)
			}
			found[code] = true
		}
	}
}

// What real TPMs refuse has its hint in each call of the provider.
func TestRefusalsOfATPM(t *testing.T) {
	for what, c := range map[string]struct {
		arrange func(*swtpm.TPM) error
		says    string
	}{
		"a password": {func(chip *swtpm.TPM) error { return chip.SetPassword(tpm2.TPMRHEndorsement, "x") }, "a password is set"},
		"hierarchy":  {(func(chip *swtpm.TPM) error { return chip.DisableEndorsement() }), "endorsement hierarchy is off"},
		"no startup": {(*swtpm.TPM).PowerOnly, "TPM2_Startup"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			chip := swtpm.Start(t, swtpm.Options{})
			if err := c.arrange(chip); err != nil {
				t.Fatal(err)
			}
			p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
			_, err := p.Identify(t.Context())
			wantHint(t, "identify", err, provider.DeviceFailed, c.says)
			_, _, err = p.Hello(t.Context(), provider.Request{SignerName: SignerName, Version: attestation.VersionTPM})
			wantHint(t, "hello", err, provider.DeviceFailed, c.says)
			wantHint(t, "self-test", p.SelfTest(t.Context(), func(provider.Check) {}), provider.DeviceFailed, c.says)
		})
	}
}

// A runtime directory that is wrong is not the TPM's fault.
func TestRuntimeDirectoryThatIsWrong(t *testing.T) {
	shared := t.TempDir()
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, class := range map[string]provider.Class{
		shared: provider.DirectoryRefused, filepath.Join(file, "x"): provider.DirectoryRefused, "/proc/nothing": provider.DirectoryNotWritable,
	} {
		p := newProvider(t, provider.Settings{TPMDevice: "/nonexistent", RuntimeDir: dir})
		_, err := p.Identify(t.Context())
		wantHint(t, dir, err, class, "--runtime-dir")
		wantHint(t, dir, p.SelfTest(t.Context(), func(provider.Check) {}), class, "--runtime-dir")
	}
	for number, says := range map[syscall.Errno]string{syscall.ENOLCK: "no locks", syscall.ENOSPC: "free space", syscall.EROFS: "read-write", syscall.EISDIR: "at that path"} {
		wantHint(t, number.Error(), classifyError(&tpm.LockError{Path: "/x", Err: number}), provider.DirectoryNotWritable, says)
	}
}

// Many nodes may share one software TPM, which serves one client at a time.
func TestParallelClientsOfASoftwareTPM(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{})
	var all sync.WaitGroup
	for range 21 {
		p := newProvider(t, provider.Settings{TPMDevice: chip.Socket(), RuntimeDir: t.TempDir()})
		all.Go(func() {
			if _, err := p.Identify(t.Context()); err != nil {
				t.Error(err)
			}
			// All commands of an enrolment.
			if err := p.SelfTest(t.Context(), func(provider.Check) {}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}
