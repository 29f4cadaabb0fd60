// SPDX-License-Identifier: Apache-2.0

package swtpm

import (
	"bytes"
	"crypto/x509"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

func readNV(t *testing.T, tpm *TPM, index uint32) []byte {
	t.Helper()
	public, err := tpm2.NVReadPublic{NVIndex: tpm2.TPMHandle(index)}.Execute(tpm.Transport())
	if err != nil {
		t.Fatalf("NV %#x: %v", index, err)
	}
	contents, err := public.NVPublic.Contents()
	if err != nil {
		t.Fatal(err)
	}
	handle := tpm2.AuthHandle{Handle: tpm2.TPMHandle(index), Name: public.NVName, Auth: tpm2.PasswordAuth(nil)}
	var data []byte
	for len(data) < int(contents.DataSize) {
		rsp, err := tpm2.NVRead{
			AuthHandle: handle, NVIndex: handle, Offset: uint16(len(data)), Size: min(1024, contents.DataSize-uint16(len(data))),
		}.Execute(tpm.Transport())
		if err != nil {
			t.Fatalf("NV %#x: %v", index, err)
		}
		data = append(data, rsp.Data.Buffer...)
	}
	return data
}

// certified returns the leaf at the template's index after it has been checked to certify the TPM's
// EK and to be the CA's.
func certified(t *testing.T, tpm *TPM, name string) *x509.Certificate {
	t.Helper()
	e, _ := template.EKByName(name)
	cert, err := x509.ParseCertificate(readNV(t, tpm, e.Certificate))
	if err != nil {
		t.Fatal(err)
	}
	made, err := tpm.EK(name)
	if err != nil {
		t.Fatal(err)
	}
	want, err := e.PublicArea(cert.PublicKey)
	if err != nil || !bytes.Equal(tpm2.Marshal(want), tpm2.Marshal(made)) {
		t.Fatalf("%s: the TPM makes another EK than the certificate's: %v", name, err)
	}
	if len(cert.UnhandledCriticalExtensions) != 1 {
		t.Errorf("%s: unhandled extensions %v, want the critical alternative name", name, cert.UnhandledCriticalExtensions)
	}
	if err := errors.Join(cert.CheckSignatureFrom(tpm.CA.Intermediate), tpm.CA.Intermediate.CheckSignatureFrom(tpm.CA.Root)); err != nil {
		t.Errorf("%s: %v", name, err)
	}
	return cert
}

func TestEachTemplateCanBeCertified(t *testing.T) {
	var names []string
	for _, e := range template.EKs() {
		names = append(names, e.Name)
	}
	start := time.Now()
	tpm := Start(t, Options{Certified: names, Chain: true})
	t.Logf("made and started in %v", time.Since(start))
	for _, name := range names {
		certified(t, tpm, name)
	}
	if !bytes.Equal(readNV(t, tpm, chainIndex), tpm.CA.Intermediate.Raw) {
		t.Error("no intermediate in NV")
	}
	if handles, err := tpm.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left loaded: %v, %v", handles, err)
	}
	if n, err := tpm.LockoutCounter(); err != nil || n > 0 {
		t.Errorf("lockout counter %d, %v", n, err)
	}
}

// Somebody else's reading of the EK Credential Profile: swtpm certifies the EK that our template
// makes.
func TestSetupCertifiesOurTemplates(t *testing.T) {
	start := time.Now()
	tpm := Start(t, Options{Setup: true})
	t.Logf("made and started in %v", time.Since(start))
	certified(t, tpm, "rsa-2048")
	certified(t, tpm, "ecc-p384-high")
}

func TestWhatChangesTheEK(t *testing.T) {
	tpm := Start(t, Options{Certified: []string{"ecc-p256"}, Padding: []byte{0xff, 0xff}})
	ek := func() []byte {
		public, err := tpm.EK("ecc-p256")
		if err != nil {
			t.Fatal(err)
		}
		return tpm2.Marshal(public)
	}
	first := ek()
	for name, same := range map[string]func() error{
		"reboot": tpm.Reboot, "TPM2_Clear": tpm.Clear, "power cut": func() error { tpm.Crash(); return tpm.Boot() },
	} {
		if err := same(); err != nil || !bytes.Equal(ek(), first) {
			t.Errorf("%s changes the EK: %v", name, err)
		}
	}
	if err := tpm.ChangeEPS(); err != nil || bytes.Equal(ek(), first) {
		t.Errorf("TPM2_ChangeEPS does not change the EK: %v", err)
	}
	if e, _ := template.EKByName("ecc-p256"); !bytes.HasSuffix(readNV(t, tpm, e.Certificate), []byte{0xff, 0xff}) {
		t.Error("certificate lost, or not padded")
	}
}

func TestProxy(t *testing.T) {
	p := NewProxy(t, Start(t, Options{}))
	through := dial(p.Socket())
	read := func() error {
		_, err := tpm2.ReadClock{}.Execute(through)
		return err
	}
	if err := read(); err != nil || p.Count(tpm2.TPMCCReadClock) != 1 || p.Count() != 1 || len(p.Exchanges()[0].Response) < 10 {
		t.Fatalf("%v, %d recorded", err, p.Count())
	}
	p.Answer(tpm2.TPMCCReadClock, tpm2.TPMRCTesting, 1)
	if err := read(); !errors.Is(err, tpm2.TPMRCTesting) {
		t.Errorf("answered with %v", err)
	}
	p.Reset()
	p.CutAt(0)
	if err := read(); err == nil {
		t.Error("not cut")
	}
	p.Reset()
	p.Delay(50*time.Millisecond, tpm2.TPMCCReadClock)
	start := time.Now()
	if err := read(); err != nil || time.Since(start) < 50*time.Millisecond {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	p.Reset()
	release := p.Hang(tpm2.TPMCCReadClock)
	done := make(chan error)
	go func() { done <- read() }()
	select {
	case <-done:
		t.Error("does not hang")
	case <-time.After(50 * time.Millisecond):
	}
	release()
	if err := <-done; err != nil || !slices.ContainsFunc(p.Exchanges(), func(e Exchange) bool { return e.Response != nil }) {
		t.Error(err)
	}
}

func TestProxyAtACommand(t *testing.T) {
	p := NewProxy(t, Start(t, Options{}))
	through := dial(p.Socket())
	read := func() error {
		_, err := tpm2.ReadClock{}.Execute(through)
		return err
	}
	p.AnswerFrom(1, tpm2.TPMRCLocality, 2)
	for i, want := range []error{nil, tpm2.TPMRCLocality, tpm2.TPMRCLocality, nil} {
		if err := read(); !errors.Is(err, want) {
			t.Errorf("command %d: %v", i, err)
		}
	}
	p.Reset()
	called := false
	p.CallAt(1, func() { called = true })
	for i, want := range []bool{false, true} {
		if err := read(); err != nil || called != want {
			t.Errorf("command %d: %v, called: %v", i, err, called)
		}
	}
	p.Reset()
	arrived := make(chan struct{})
	release := p.HangAt(0, func() { close(arrived) })
	done := make(chan error)
	go func() { done <- read() }()
	<-arrived
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestLockOut(t *testing.T) {
	tpm := Start(t, Options{})
	wrong, err := tpm.LockOut()
	if err != nil {
		t.Fatal(err)
	}
	failed, err := tpm.LockoutCounter()
	if err != nil || failed == 0 || int(failed) > wrong {
		t.Errorf("counter %d after %d wrong passwords, %v", failed, wrong, err)
	}
	if tpm.PID() == 0 {
		t.Error("no process")
	}
	if handles, err := tpm.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("left: %x, %v", handles, err)
	}
}
