// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// childSocket makes the test binary the process that TestKilledProcess kills.
const childSocket = "TPM_TEST_CHILD_SOCKET"

func TestMain(m *testing.M) {
	if socket := os.Getenv(childSocket); socket != "" {
		_, err := Run(context.Background(), Options{Device: socket, LockDir: os.Getenv("TPM_TEST_CHILD_DIR")}, func(t *TPM) (struct{}, error) {
			return struct{}{}, t.SelfTest("", func(SelfTestResult) {})
		})
		panic(err) // the proxy hangs it, so it does not come here
	}
	unittest.Main(m)
}

// with runs f against the TPM at a socket, and fails the test if that fails.
func with[T any](t *testing.T, socket string, f func(*TPM) (T, error)) T {
	t.Helper()
	v, err := Run(t.Context(), Options{Device: socket, LockDir: t.TempDir()}, f)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// keys are what a hello tells.
type keys struct {
	ek EK
	ak []byte
}

func hello(remembered string) func(*TPM) (keys, error) {
	return func(t *TPM) (keys, error) {
		ek, err := t.ChooseEK("", remembered)
		if err != nil {
			return keys{}, err
		}
		ak, err := t.AK()
		return keys{ek, ak}, err
	}
}

var (
	secret = []byte("0123456789abcdef0123456789abcdef")
	// pcrs are all of them, not in order.
	pcrs = []int{23, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11}
)

// challenge plays the controller.
func challenge(t *testing.T, k keys) Challenge {
	t.Helper()
	blob, encrypted, err := makeCredential(k.ek.Public, k.ak, secret)
	if err != nil {
		t.Fatal(err)
	}
	return Challenge{
		EKTemplate: k.ek.Template, EKPublic: k.ek.Public, AKPublic: k.ak,
		CredentialBlob: blob, EncryptedSecret: encrypted,
		PCRBank: tpm2.TPMAlgSHA256, PCRs: slices.Clone(pcrs),
	}
}

func mac(key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte("transcript"))
	return h.Sum(nil)
}

func prove(c Challenge) func(*TPM) (Quote, error) {
	return func(t *TPM) (Quote, error) { return t.Prove(c, mac) }
}

// checkQuote plays the controller, who need not have seen the secret's way.
func checkQuote(t *testing.T, k keys, c Challenge, q Quote) {
	t.Helper()
	if err := verifyQuote(k.ak, q, mac(secret)); err != nil {
		t.Error(err)
	}
	attest, err := tpm2.Unmarshal[tpm2.TPMSAttest](q.Attest)
	if err != nil {
		t.Fatal(err)
	}
	info, err := attest.Attested.Quote()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(info.PCRDigest.Buffer, digestOf(c.PCRs, q.PCRs)) {
		t.Error("the PCR values are not those quoted")
	}
	if want := selection(c.PCRBank, c.PCRs); !bytes.Equal(tpm2.Marshal(info.PCRSelect), tpm2.Marshal(want)) {
		t.Errorf("quoted %v", info.PCRSelect)
	}
	name, err := template.Name(k.ak)
	if err != nil {
		t.Fatal(err)
	}
	qualified := sha256.Sum256(append([]byte{0x40, 0, 0, 0x0b}, name...))
	if !bytes.Equal(attest.QualifiedSigner.Buffer, append([]byte{0, 0x0b}, qualified[:]...)) {
		t.Error("the AK is not a primary key of the endorsement hierarchy")
	}
}

// nothingLoaded fails the test if the TPM still holds an object or a session.
func nothingLoaded(t *testing.T, tpm *swtpm.TPM) {
	t.Helper()
	handles, err := tpm.Handles()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range handles {
		t.Errorf("still loaded: %#x", uint32(h))
	}
}

func TestProveWithEachEK(t *testing.T) {
	for _, e := range template.EKs() {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			tpm := swtpm.Start(t, swtpm.Options{Certified: []string{e.Name}, Chain: true})
			if err := tpm.Extend(23, []byte("something")); err != nil {
				t.Fatal(err)
			}
			p := swtpm.NewProxy(t, tpm)
			start := time.Now()
			k := with(t, p.Socket(), hello(""))
			if k.ek.Template != e.Name || len(k.ek.Certificates) != 2 || k.ek.Slow != e.IsRSA() || k.ek.Problem != "" {
				t.Fatalf("chose %s with %d certificates, slow %v, %s", k.ek.Template, len(k.ek.Certificates), k.ek.Slow, k.ek.Problem)
			}
			forHello := p.Count()
			c := challenge(t, k)
			q := with(t, p.Socket(), prove(c))
			checkQuote(t, k, c, q)
			t.Logf("%d commands for the hello, %d for the proof, %v", forHello, p.Count()-forHello, time.Since(start))
			if n := p.Count(); n > 30 {
				t.Errorf("%d commands", n)
			}
			for _, x := range p.Exchanges() {
				if bytes.Contains(x.Command, secret) || bytes.Contains(x.Response, secret) {
					t.Errorf("the secret is in the clear in command %#x", uint32(x.Code))
				}
			}
			nothingLoaded(t, tpm)
			for _, bank := range []tpm2.TPMAlgID{tpm2.TPMAlgSHA384, tpm2.TPMAlgSHA512} {
				c := challenge(t, k)
				c.PCRBank, c.PCRs = bank, []int{7}
				checkQuote(t, k, c, with(t, p.Socket(), prove(c)))
			}
			// Nothing of this counts towards lockout, even if the power is cut now.
			tpm.Crash()
			if err := tpm.Boot(); err != nil {
				t.Fatal(err)
			}
			if n, err := tpm.LockoutCounter(); err != nil || n != 0 {
				t.Errorf("lockout counter %d, %v", n, err)
			}
			if again := with(t, p.Socket(), hello("")); !bytes.Equal(again.ak, k.ak) || !bytes.Equal(again.ek.Public, k.ek.Public) {
				t.Error("other keys after a reboot")
			}
		})
	}
}

// The quote of an Origin has the extraData, is over no PCRs, and is that of the AK of the hello.
func TestOrigin(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	k := with(t, tpm.Socket(), hello(""))
	data := sha256.Sum256([]byte("name and request"))
	type origin struct {
		akPublic []byte
		Quote
	}
	got := with(t, tpm.Socket(), func(t *TPM) (o origin, err error) {
		o.akPublic, o.Quote, err = t.Origin(data[:])
		return o, err
	})
	if !bytes.Equal(got.akPublic, k.ak) {
		t.Error("by another AK")
	}
	if err := verifyQuote(k.ak, got.Quote, data[:]); err != nil {
		t.Error(err)
	}
	attest, err := tpm2.Unmarshal[tpm2.TPMSAttest](got.Attest)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := attest.Attested.Quote(); err != nil || len(info.PCRSelect.PCRSelections) > 0 || got.PCRs != nil {
		t.Errorf("%+v, %v", info, err)
	}
	nothingLoaded(t, tpm)
}

// An error of the TPM at any command ends the attempt, names the command and leaves nothing loaded.
func TestEachCommandMayFail(t *testing.T) {
	for _, o := range []swtpm.Options{
		{Certified: []string{"ecc-p384-high"}},
		{Certified: []string{"rsa-2048"}, Persistent: []string{"rsa-2048"}},
	} {
		t.Run(o.Certified[0], func(t *testing.T) {
			t.Parallel()
			tpm := swtpm.Start(t, o)
			p := swtpm.NewProxy(t, tpm)
			c := challenge(t, with(t, p.Socket(), hello("")))
			both := func(t *TPM) (Quote, error) {
				if _, err := hello("")(t); err != nil {
					return Quote{}, err
				}
				return t.Prove(c, mac)
			}
			p.Reset()
			with(t, p.Socket(), both)
			commands := p.Exchanges()
			for i, command := range commands {
				p.Reset()
				p.AnswerAt(i, tpm2.TPMRCFailure)
				_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, both)
				var named *commandError
				switch {
				case command.Code == tpm2.TPMCCFlushContext: // tried again
					if err != nil {
						t.Errorf("command %d, a flush: %v", i, err)
					}
				case !errors.As(err, &named) || !errors.Is(err, tpm2.TPMRCFailure) || !strings.HasPrefix(named.Command, "TPM2_"):
					t.Errorf("command %d, %#x: %v", i, uint32(command.Code), err)
				}
				nothingLoaded(t, tpm)
			}
		})
	}
}

// A TPM that hangs cannot be interrupted, but nobody waits for it, and what it loads is flushed
// when it wakes up.
func TestHangingTPM(t *testing.T) {
	for name, code := range map[string]tpm2.TPMCC{
		"CreatePrimary": tpm2.TPMCCCreatePrimary, "StartAuthSession": tpm2.TPMCCStartAuthSession,
		"ActivateCredential": tpm2.TPMCCActivateCredential, "Quote": tpm2.TPMCCQuote, "FlushContext": tpm2.TPMCCFlushContext,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tpm := swtpm.Start(t, swtpm.Options{})
			p := swtpm.NewProxy(t, tpm)
			c := challenge(t, with(t, p.Socket(), hello("")))
			release := p.Hang(code)
			o := Options{Device: p.Socket(), LockDir: t.TempDir()}
			// the command is sent by then
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			start := time.Now()
			if _, err := Run(ctx, o, prove(c)); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 5*time.Second {
				t.Errorf("after %v: %v", time.Since(start), err)
			}
			again, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			if _, err := Run(again, o, prove(c)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("the lock is free while a command is under way: %v", err)
			}
			release()
			if _, err := Run(t.Context(), o, prove(c)); err != nil {
				t.Error(err)
			}
			nothingLoaded(t, tpm)
		})
	}
}

func TestSlowTPM(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{Certified: []string{"rsa-2048"}})
	p := swtpm.NewProxy(t, tpm)
	p.Delay(500*time.Millisecond, tpm2.TPMCCCreatePrimary)
	k := with(t, p.Socket(), hello(""))
	c := challenge(t, k)
	checkQuote(t, k, c, with(t, p.Socket(), prove(c)))
	nothingLoaded(t, tpm)
}

func TestBusyTPMIsAskedAgain(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	k := with(t, p.Socket(), hello(""))
	c := challenge(t, k)
	for _, rc := range []tpm2.TPMRC{tpm2.TPMRCRetry, tpm2.TPMRCYielded, tpm2.TPMRCTesting, tpm2.TPMRCNVRate, tpm2.TPMRCNVUnavailable} {
		p.Reset()
		for _, code := range []tpm2.TPMCC{tpm2.TPMCCCreatePrimary, tpm2.TPMCCActivateCredential, tpm2.TPMCCQuote, tpm2.TPMCCFlushContext} {
			p.Answer(code, rc, 2)
		}
		checkQuote(t, k, c, with(t, p.Socket(), prove(c)))
		nothingLoaded(t, tpm)
	}

	p.Reset()
	p.Answer(tpm2.TPMCCQuote, tpm2.TPMRCRetry, 1000)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := Run(ctx, Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c)); !errors.Is(err, context.DeadlineExceeded) ||
		time.Since(start) > 5*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	p.Reset()
	p.Answer(tpm2.TPMCCQuote, tpm2.TPMRCRetry, 1000)
	_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c))
	var named *commandError
	if !errors.As(err, &named) || named.Command != "TPM2_Quote" || !errors.Is(err, tpm2.TPMRCRetry) || p.Count(tpm2.TPMCCQuote) != maxRetries+1 {
		t.Errorf("after %d times: %v", p.Count(tpm2.TPMCCQuote), err)
	}
	nothingLoaded(t, tpm)
}

// A handle that is left takes room from others. So a flush is repeated after any warning.
func TestFlushIsRepeatedAfterAnyWarning(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	k := with(t, p.Socket(), hello(""))
	c := challenge(t, k)
	for _, rc := range []tpm2.TPMRC{tpm2.TPMRCCanceled, tpm2.TPMRCContextGap, tpm2.TPMRCMemory} {
		p.Reset()
		p.Answer(tpm2.TPMCCFlushContext, rc, 7) // more than there are handles
		checkQuote(t, k, c, with(t, p.Socket(), prove(c)))
		nothingLoaded(t, tpm)
	}
}

// A TPM that is reset between AK and EK gives the EK the handle of the AK. The EK must not be used
// in the place of the AK: by password, that counts towards lockout.
func TestResetBetweenTheKeys(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	k := with(t, p.Socket(), hello(""))
	c := challenge(t, k)
	p.Reset()
	with(t, p.Socket(), prove(c))
	made := 0
	for i, e := range p.Exchanges() {
		if e.Code == tpm2.TPMCCCreatePrimary {
			made = i
		}
	}
	p.Reset()
	p.CallAt(made, func() {
		if err := tpm.Reboot(); err != nil {
			t.Error(err)
		}
	})
	_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c))
	if !errors.Is(err, ErrReset) || !strings.HasPrefix(err.Error(), "TPM2_CreatePrimary: ") || p.Count(tpm2.TPMCCActivateCredential) > 0 {
		t.Errorf("%v", err)
	}
	nothingLoaded(t, tpm)
	tpm.Crash()
	if err := tpm.Boot(); err != nil {
		t.Fatal(err)
	}
	if n, err := tpm.LockoutCounter(); err != nil || n != 0 {
		t.Errorf("lockout counter %d, %v", n, err)
	}
	checkQuote(t, k, c, with(t, p.Socket(), prove(c)))
}

func TestLockoutIsNamedAndNotProlonged(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	c := challenge(t, with(t, p.Socket(), hello("")))
	p.Answer(tpm2.TPMCCActivateCredential, tpm2.TPMRCLockout, 1000)
	_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, prove(c))
	if !errors.Is(err, tpm2.TPMRCLockout) || !strings.HasPrefix(err.Error(), "TPM2_ActivateCredential: TPM_RC_LOCKOUT") ||
		p.Count(tpm2.TPMCCActivateCredential) != 1 {
		t.Errorf("after %d times: %v", p.Count(tpm2.TPMCCActivateCredential), err)
	}
}

// fill leaves as many objects and sessions as the TPM has room for.
func fill(t *testing.T, tpm *swtpm.TPM) {
	t.Helper()
	for range 3 {
		if _, err := (tpm2.CreatePrimary{
			PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
			InPublic:      tpm2.New2B(tpm2.ECCSRKTemplate),
		}).Execute(tpm.Transport()); err != nil {
			t.Fatal(err)
		}
		if _, _, err := tpm2.HMACSession(tpm.Transport(), tpm2.TPMAlgSHA256, 16); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLeftOverHandlesAreFlushed(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	fill(t, tpm)
	k := with(t, tpm.Socket(), hello(""))
	fill(t, tpm)
	c := challenge(t, k)
	checkQuote(t, k, c, with(t, tpm.Socket(), prove(c)))
	nothingLoaded(t, tpm)

	// Behind a resource manager they are somebody's.
	fill(t, tpm)
	dir, err := os.MkdirTemp("/tmp", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	managed := filepath.Join(dir, "tpmrm0")
	if err := os.Symlink(tpm.Socket(), managed); err != nil {
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), Options{Device: managed, LockDir: t.TempDir()}, hello("")); !errors.Is(err, tpm2.TPMRCObjectMemory) {
		t.Errorf("%v", err)
	}
	if handles, err := tpm.Handles(); err != nil || len(handles) != 6 {
		t.Errorf("%d handles left, %v", len(handles), err)
	}
}

func TestKilledProcess(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	p := swtpm.NewProxy(t, tpm)
	k := with(t, tpm.Socket(), hello(""))
	o := Options{Device: tpm.Socket(), LockDir: t.TempDir()}
	for range 3 { // the third time the TPM is full
		p.Reset()
		release := p.Hang(tpm2.TPMCCActivateCredential)
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), childSocket+"="+p.Socket(), "TPM_TEST_CHILD_DIR="+o.LockDir)
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(20 * time.Second); p.Count(tpm2.TPMCCActivateCredential) == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the child does nothing")
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := Run(ctx, o, hello("")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("two processes at a time: %v", err)
		}
		cancel()
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait()
		release()
	}
	c := challenge(t, k)
	q, err := Run(t.Context(), o, prove(c))
	if err != nil {
		t.Fatal(err)
	}
	checkQuote(t, k, c, q)
	nothingLoaded(t, tpm)
}

func TestOneAtATime(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	o := Options{Device: tpm.Socket(), LockDir: t.TempDir()}
	var inside atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := Run(t.Context(), o, func(tpm *TPM) (Info, error) {
				defer inside.Add(-1)
				if inside.Add(1) > 1 {
					t.Error("two at a time")
				}
				return tpm.Info()
			}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func TestLockHasADeadline(t *testing.T) {
	dir := t.TempDir()
	unlock, err := lock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		_, err := lock(t.Context(), dir)
		var timeout *LockTimeoutError
		if !errors.As(err, &timeout) || timeout.Path != filepath.Join(dir, LockFile) || time.Since(start) != lockWait {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
	})
	unlock()
	if unlock, err = lock(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	unlock()
}

// A lock that others could take is refused, and one that cannot be made is another error: neither
// is the TPM's fault.
func TestLockIsOursAlone(t *testing.T) {
	dir := t.TempDir()
	put := func(name string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	shared, foreign, linked, taken := put("shared", 0o777), put("foreign", 0o755), put("linked", 0o700), put("taken", 0o700)
	if err := os.Chown(foreign, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "x"), filepath.Join(linked, LockFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(taken, LockFile), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, says := range map[string]string{
		shared: "others may write", foreign: "another user", linked: "symbolic link", file: "not a directory", filepath.Join(file, "x"): "not a directory",
	} {
		_, err := lock(t.Context(), path)
		var untrusted *UntrustedLockError
		if !errors.As(err, &untrusted) || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	for path, want := range map[string]error{taken: syscall.EISDIR, "/proc/nothing": syscall.ENOENT} {
		_, err := lock(t.Context(), path)
		var failed *LockError
		if !errors.As(err, &failed) || !errors.Is(err, want) || failed.Path != filepath.Join(path, LockFile) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// listen makes a socket whose queue holds few, and fills it. accept makes room.
func listen(t *testing.T) (path string, accept func()) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "") // a socket's path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, "tpm")
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}), syscall.Listen(fd, 1)); err != nil {
		t.Fatal(err)
	}
	for {
		waiting, err := net.Dial("unix", path)
		if errors.Is(err, syscall.EAGAIN) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = waiting.Close() })
	}
	return path, func() {
		client, _, err := syscall.Accept(fd)
		if err != nil {
			t.Error(err)
			return
		}
		_ = syscall.Close(client)
	}
}

// A software TPM with a full queue is there: a client waits for a place, and not for ever.
func TestFullQueueOfASoftwareTPM(t *testing.T) {
	t.Parallel()
	path, accept := listen(t)
	start := time.Now()
	_, err := dial(t.Context(), path, 200*time.Millisecond)
	if took := time.Since(start); !errors.Is(err, syscall.EAGAIN) || took < 200*time.Millisecond || took > 5*time.Second {
		t.Errorf("after %v: %v", took, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := dial(ctx, path, queueWait); !errors.Is(err, syscall.EAGAIN) || ctx.Err() == nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	done := make(chan error, 1)
	go func() {
		conn, err := dial(t.Context(), path, queueWait)
		if err == nil {
			err = conn.Close()
		}
		done <- err
	}()
	accept()
	if err := <-done; err != nil {
		t.Errorf("there is room: %v", err)
	}
}

// A software TPM that starts again is waited for. One that does not start is absent.
func TestSoftwareTPMStartsAgain(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("/tmp", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "tpm")
	bind := func() *net.UnixListener {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		return listener
	}
	_ = bind().Close()
	start := time.Now()
	if _, err := open(t.Context(), []string{path}); !errors.Is(err, syscall.ECONNREFUSED) || time.Since(start) < refusedWait {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
	done := make(chan error, 1)
	tried := make(chan struct{})
	go func() {
		close(tried)
		conn, err := dial(t.Context(), path, queueWait)
		if err == nil {
			err = conn.Close()
		}
		done <- err
	}()
	<-tried
	// The new socket replaces the old one at once: a path without a socket is another error.
	second := filepath.Join(dir, "second")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: second, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	if err := os.Rename(second, path); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("it listens again: %v", err)
	}
}

func TestNoTPM(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing")
	_, err := open(t.Context(), []string{missing, file})
	var failed *OpenError
	if !errors.As(err, &failed) || len(failed.Tried) != 2 || !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("%v", err)
	}
	if text := err.Error(); !strings.Contains(text, missing) || !strings.Contains(text, file) || strings.Contains(text, "\n") {
		t.Errorf("%q", text)
	}
	if _, err := Run(t.Context(), Options{Device: missing, LockDir: t.TempDir()}, hello("")); !errors.As(err, &failed) {
		t.Errorf("%v", err)
	}
	if c, err := open(t.Context(), []string{os.DevNull}); err != nil || c.managed {
		t.Errorf("a character device: %v", err)
	}
}

func TestInfo(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{})
	info := with(t, tpm.Socket(), (*TPM).Info)
	// What tpm2_getcap properties-fixed shows of libtpms.
	if info.Manufacturer != "IBM" || info.Vendor != "SW   TPM" || info.Firmware>>32 != 0x20191023 {
		t.Errorf("%+v", info)
	}
	if v := (Info{Firmware: 0x0001_0002_0003_ffff}).FirmwareString(); v != "1.2.3.65535" {
		t.Error(v)
	}
}

func TestSelfTest(t *testing.T) {
	t.Parallel()
	tpm := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	p := swtpm.NewProxy(t, tpm)
	test := func() (map[string]bool, error) {
		said := map[string]bool{}
		_, err := Run(t.Context(), Options{Device: p.Socket(), LockDir: t.TempDir()}, func(tpm *TPM) (struct{}, error) {
			return struct{}{}, tpm.SelfTest("", func(r SelfTestResult) {
				if key := r.EK + " " + r.Command; r.Err != nil || !said[key] {
					said[key] = r.Err == nil
				}
			})
		})
		return said, err
	}
	said, err := test()
	if err != nil {
		t.Error(err)
	}
	for _, ek := range []string{"ecc-p256", "rsa-2048"} {
		for _, command := range []string{
			"CreatePrimary", "StartAuthSession", "PolicySecret", "ActivateCredential", "Quote", "PCR_Read", "FlushContext",
		} {
			if !said[ek+" TPM2_"+command] {
				t.Errorf("nothing good said of %s, %s", ek, command)
			}
		}
	}
	p.Answer(tpm2.TPMCCPolicySecret, tpm2.TPMRCCommandCode, 1)
	said, err = test()
	if !errors.Is(err, tpm2.TPMRCCommandCode) || said["ecc-p256 TPM2_PolicySecret"] || !said["rsa-2048 TPM2_Quote"] {
		t.Errorf("%v, said %v", err, said)
	}
	nothingLoaded(t, tpm)
}

func TestEventLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if log, err := eventLog(path); log != nil || err != nil {
		t.Errorf("%d bytes, %v", len(log), err)
	}
	content := make([]byte, maxEventLog+1)
	_, _ = rand.Read(content)
	for size, ok := range map[int]bool{maxEventLog: true, maxEventLog + 1: false} {
		if err := os.WriteFile(path, content[:size], 0o600); err != nil {
			t.Fatal(err)
		}
		if log, err := eventLog(path); (err == nil) != ok || ok && !bytes.Equal(log, content[:size]) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}
