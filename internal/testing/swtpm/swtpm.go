// SPDX-License-Identifier: Apache-2.0

// Package swtpm runs software TPMs for tests, with EK certificates like those of a maker of chips.
// It needs swtpm in PATH, and swtpm_setup for Options.Setup. Without them it fails instead of
// skipping.
package swtpm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"github.com/google/go-tpm/tpm2/transport/linuxudstpm"
)

// Options are the content of a new TPM.
type Options struct {
	// Certified names the EK templates (package template) that have a certificate in NV.
	Certified []string
	// Persistent names the EK templates whose key has a persistent handle, like the RSA EK of many
	// chips. The handles start at 0x81010001 (TCG TPM v2.0 Provisioning Guidance).
	Persistent []string
	// Issue may change a certificate before it is signed. It is called once for each.
	Issue CertificateOption
	// Chain puts the certificate of the intermediate CA into NV at 0x01c00100.
	Chain bool
	// Wrapped puts each EK certificate into the header of the TCG PC Client specification.
	Wrapped bool
	// Compressed compresses each EK certificate with zlib, below the header if there is one.
	Compressed bool
	// Padding follows each certificate in NV: chips pad with 0x00 or 0xff.
	Padding []byte
	// CA issues the certificates, so that several TPMs can have one maker. Nil makes a new one.
	CA *CA
	// Setup makes swtpm_setup write the certificates, with a CA of its own, for rsa-2048 and
	// ecc-p384-high. All options above are ignored.
	Setup bool
	// SetupArguments are more arguments for swtpm_setup.
	SetupArguments []string
}

// TPM is a software TPM. Its methods are for one goroutine at a time.
type TPM struct {
	Chip

	dir string
	cmd *exec.Cmd
}

// TB is what Start needs of a testing.TB.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// Start returns a running TPM, which ends with the test.
func Start(t TB, o Options) *TPM {
	t.Helper()
	tpm, err := New(o)
	if err != nil {
		t.Fatalf("software TPM: %v", err)
	}
	t.Cleanup(tpm.Stop)
	return tpm
}

// New returns a running TPM. The caller stops it.
func New(o Options) (_ *TPM, err error) {
	// not TMPDIR: the path of a socket has at most 107 bytes
	dir, err := os.MkdirTemp("/tmp", "swtpm-")
	if err != nil {
		return nil, err
	}
	t := &TPM{dir: dir}
	t.Chip = Chip{CA: o.CA, TPM: dial(t.Socket())}
	defer func() {
		if err != nil {
			t.Stop()
		}
	}()
	if err := os.Mkdir(t.state(), 0o700); err != nil {
		return nil, err
	}
	if o.Setup {
		if t.CA, err = setup(t.dir, t.state(), o.SetupArguments); err != nil {
			return nil, err
		}
		return t, t.start()
	}
	if t.CA == nil {
		if t.CA, err = NewCA(); err != nil {
			return nil, err
		}
	}
	if err := t.start(); err != nil {
		return nil, err
	}
	if err := t.Manufacture(o); err != nil {
		return nil, err
	}
	// as a chip comes: with no trace of its making in lockout counter or memory
	return t, t.Reboot()
}

// Socket is the path of the Unix socket for TPM commands. It serves one connection after the other.
func (t *TPM) Socket() string { return filepath.Join(t.dir, "tpm") }

func (t *TPM) state() string { return filepath.Join(t.dir, "state") }

// PowerOnly switches a TPM off and on without TPM2_Startup.
func (t *TPM) PowerOnly() error {
	t.Crash()
	if err := t.launch("not-need-init"); err != nil {
		return err
	}
	return t.await(tpm2.TPMRCInitialize)
}

// start starts the process on the present state: power on, and TPM2_Startup(CLEAR).
func (t *TPM) start() error {
	if err := t.launch("not-need-init,startup-clear"); err != nil {
		return err
	}
	return t.await(tpm2.TPMRCSuccess)
}

// launch starts the process.
func (t *TPM) launch(flags string) error {
	//nolint:gosec // the arguments are this package's own
	cmd := exec.Command("swtpm", "socket", "--tpm2", "--server", "type=unixio,path="+t.Socket(), "--ctrl", "type=unixio,path="+t.Socket()+".ctrl",
		"--flags", flags, "--tpmstate", "dir="+t.state(), "--log", "file="+t.log()+",level=1,truncate")
	// a test that is killed leaves none behind
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	t.cmd = cmd
	return nil
}

func (t *TPM) log() string { return filepath.Join(t.dir, "log") }

// await waits until the process answers, with that response code.
func (t *TPM) await(code tpm2.TPMRC) error {
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if _, err = t.Capability(tpm2.TPMCapTPMProperties, uint32(tpm2.TPMPTManufacturer), 1); err == nil && code == tpm2.TPMRCSuccess || errors.Is(err, code) {
			return nil
		}
	}
	said, _ := os.ReadFile(t.log())
	return fmt.Errorf("swtpm does not answer: %w; it says %q", err, said)
}

// PID is the process of the TPM, 0 if it is off.
func (t *TPM) PID() int {
	if t.cmd == nil {
		return 0
	}
	return t.cmd.Process.Pid
}

// Stop ends the TPM and deletes its state.
func (t *TPM) Stop() {
	t.Crash()
	_ = os.RemoveAll(t.dir)
}

// Crash cuts the power.
func (t *TPM) Crash() {
	if t.cmd != nil {
		_ = t.cmd.Process.Kill()
		_ = t.cmd.Wait()
		t.cmd = nil
	}
	_ = os.Remove(t.Socket())
}

// Boot switches a TPM on after Crash.
func (t *TPM) Boot() error { return t.start() }

// Reboot is an orderly reboot of the machine, as its TPM sees it: TPM2_Shutdown(CLEAR), reset,
// TPM2_Startup(CLEAR).
func (t *TPM) Reboot() error {
	if _, err := (tpm2.Shutdown{ShutdownType: tpm2.TPMSUClear}).Execute(t.Transport()); err != nil {
		return err
	}
	t.Crash()
	return t.start()
}

// dial speaks to the TPM behind a socket, with a connection for each command.
func dial(socket string) transport.TPM {
	return sender(func(command []byte) ([]byte, error) {
		conn, err := linuxudstpm.Open(socket)
		if err != nil {
			return nil, err
		}
		response, err := conn.Send(command)
		return response, errors.Join(err, conn.Close())
	})
}

type sender func([]byte) ([]byte, error)

func (s sender) Send(command []byte) ([]byte, error) { return s(command) }
