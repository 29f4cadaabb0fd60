// SPDX-License-Identifier: Apache-2.0

// Package commands has a TPM misbehave at each single command of an enrolment and a renewal. There
// is no API server: the provider and the verifier talk to each other over the TPM. The commands are
// those of a recorded run.
package commands

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-tpm/tpm2"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
	verifier "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/protocol"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

// bench is a TPM behind a proxy, with the provider and the verifier. No API server is between them.
type bench struct {
	chip    *swtpm.TPM
	proxy   *swtpm.Proxy
	machine *protocol.Machine
	// persistent names the templates of the keys that are persistent.
	persistent []string
	// commands are those of one renewal, as recorded.
	commands []tpm2.TPMCC
}

// chips are TPMs that between them use each command of the provider.
var chips = map[string]swtpm.Options{
	"policy by branches": {Certified: []string{"ecc-p384-high"}, Chain: true},
	"persistent key":     {Certified: []string{"rsa-2048"}, Persistent: []string{"rsa-2048"}},
}

func newBench(t *testing.T, o swtpm.Options) *bench {
	t.Helper()
	chip := swtpm.Start(t, o)
	b := &bench{chip: chip, proxy: swtpm.NewProxy(t, chip), persistent: o.Persistent}
	var err error
	config := verifier.Config{Roots: []*x509.Certificate{chip.CA.Root}}
	if !o.Chain { // else the TPM itself has the intermediate CA, and the hello has to show it
		config.Intermediates = []*x509.Certificate{chip.CA.Intermediate}
	}
	if b.machine, err = protocol.New(b.proxy.Socket(), t.TempDir(), config); err != nil {
		t.Fatal(err)
	}
	if err := b.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, e := range b.proxy.Exchanges() {
		b.commands = append(b.commands, e.Code)
	}
	b.proxy.Reset()
	return b
}

// renew makes what a renewal makes: a hello, a proof, and the annotation that shows the origin of a
// request. The verifier accepts the proof. An enrolment makes no annotation.
func (b *bench) renew(ctx context.Context) error {
	ctx = klog.NewContext(ctx, klog.Logger{}) // thousands would log which key they choose
	if _, err := b.machine.Attest(ctx); err != nil {
		return err
	}
	_, err := b.machine.Provider.(provider.Originator).Origin(ctx, "hello", []byte("request"))
	return err
}

// nothingLeft checks that the TPM is as it was found: nothing is loaded, and nothing counts towards
// lockout.
func (b *bench) nothingLeft(t *testing.T, after string) {
	t.Helper()
	if handles, err := b.chip.Handles(); err != nil || len(handles) > 0 {
		t.Errorf("%s: left in the TPM: %x, %v", after, handles, err)
	}
	if failed, err := b.chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("%s: lockout counter %d, %v", after, failed, err)
	}
}

// names are the commands of the provider (TPM 2.0 Library, part 3).
var names = map[tpm2.TPMCC]string{
	tpm2.TPMCCGetCapability: "TPM2_GetCapability", tpm2.TPMCCNVReadPublic: "TPM2_NV_ReadPublic", tpm2.TPMCCNVRead: "TPM2_NV_Read",
	tpm2.TPMCCCreatePrimary: "TPM2_CreatePrimary", tpm2.TPMCCReadPublic: "TPM2_ReadPublic",
	tpm2.TPMCCStartAuthSession: "TPM2_StartAuthSession", tpm2.TPMCCPolicySecret: "TPM2_PolicySecret", tpm2.TPMCCPolicyOR: "TPM2_PolicyOR",
	tpm2.TPMCCActivateCredential: "TPM2_ActivateCredential", tpm2.TPMCCQuote: "TPM2_Quote", tpm2.TPMCCPCRRead: "TPM2_PCR_Read",
	tpm2.TPMCCFlushContext: "TPM2_FlushContext",
}

// isClear reports whether an error names the command and has a hint of its own.
func isClear(err error, command tpm2.TPMCC) bool {
	var known *provider.Error
	return errors.As(err, &known) && known.Hint != "" && !strings.HasPrefix(known.Hint, "see what the TPM refuses") &&
		names[command] != "" && strings.Contains(err.Error(), names[command])
}

// warning is a code of the format RC_WARN (TPM 2.0 Library, part 2, "TPM_RC").
type warning struct {
	code tpm2.TPMRC
	// again is set if the specification says that the command may be sent again, later.
	again bool
	// full is set if the TPM lacks room, which a program can make.
	full bool
}

// warnings are all of them.
var warnings = []warning{
	{code: tpm2.TPMRCContextGap}, {code: tpm2.TPMRCLocality}, {code: tpm2.TPMRCCanceled}, {code: tpm2.TPMRCLockout},
	{code: tpm2.TPMRCObjectMemory, full: true}, {code: tpm2.TPMRCSessionMemory, full: true}, {code: tpm2.TPMRCMemory, full: true},
	{code: tpm2.TPMRCSessionHandles, full: true}, {code: tpm2.TPMRCObjectHandles, full: true},
	{code: tpm2.TPMRCYielded, again: true}, {code: tpm2.TPMRCTesting, again: true}, {code: tpm2.TPMRCRetry, again: true},
	{code: tpm2.TPMRCNVRate, again: true}, {code: tpm2.TPMRCNVUnavailable, again: true},
	{code: tpm2.TPMRCReferenceH0}, {code: tpm2.TPMRCReferenceH1}, {code: tpm2.TPMRCReferenceH2}, {code: tpm2.TPMRCReferenceH3},
	{code: tpm2.TPMRCReferenceH4}, {code: tpm2.TPMRCReferenceH5}, {code: tpm2.TPMRCReferenceH6},
	{code: tpm2.TPMRCReferenceS0}, {code: tpm2.TPMRCReferenceS1}, {code: tpm2.TPMRCReferenceS2}, {code: tpm2.TPMRCReferenceS3},
	{code: tpm2.TPMRCReferenceS4}, {code: tpm2.TPMRCReferenceS5}, {code: tpm2.TPMRCReferenceS6},
}

const (
	// forEver is more often than any command is sent.
	forEver = 1 << 20
	// longestRefusal is how long one command may be repeated.
	longestRefusal = 6 * time.Second
	// longestFlushing is how long a renewal may take if no handle can be flushed: it goes on.
	longestFlushing = 90 * time.Second
)

// Each warning at each command, once, three times, and for ever. The renewal succeeds if the TPM
// asks for another try or for room, or fails with a reason that names command and code. It ends in
// time and leaves nothing in the TPM, and the next one succeeds.
func TestEachWarningAtEachCommand(t *testing.T) {
	every := reliability.Size(t, "tpm-renewals", 23, 1) // prime to 28 and 3, so that no pair of both is left out
	for name, o := range chips {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, o)
			combination, tried := 0, 0
			for index, command := range b.commands {
				for _, w := range warnings {
					for _, times := range []int{1, 3, forEver} {
						if combination++; combination%every != 0 {
							continue
						}
						tried++
						today := time.Now()
						synctest.Test(t, func(t *testing.T) {
							time.Sleep(time.Until(today)) // synctest begins in the year 2000
							b.warn(t, index, command, w, times)
						})
					}
				}
			}
			t.Logf("%d commands, %d warnings: %d of %d combinations", len(b.commands), len(warnings), tried, combination)
		})
	}
}

// warn has the TPM answer the command number index with a warning, so many times. Pauses pass at
// once, as time is synctest's.
func (b *bench) warn(t *testing.T, index int, command tpm2.TPMCC, w warning, times int) {
	what := fmt.Sprintf("command %d, %s: %d times %v", index, names[command], times, w.code)
	b.proxy.Reset()
	b.proxy.AnswerFrom(index, w.code, times)
	began := time.Now()
	err := b.renew(t.Context())
	took := time.Since(began)
	flush := command == tpm2.TPMCCFlushContext
	limit := longestRefusal
	if flush {
		limit = longestFlushing
	}
	if took > limit {
		t.Errorf("%s: it took %v", what, took)
	}
	passes := times != forEver && (w.again || w.full && times == 1 || flush)
	switch {
	case err != nil && (passes || !isClear(err, command) || !errors.Is(err, w.code)):
		t.Errorf("%s: %#v", what, err)
	case err == nil && !passes && !flush: // what cannot be flushed now is flushed later
		t.Errorf("%s: no error", what)
	}
	b.proxy.Reset()
	if flush && times == forEver {
		b.flushed(t)
	}
	b.nothingLeft(t, what)
	for range 2 { // what was injected and not used up is gone, too
		if err := b.renew(t.Context()); err != nil {
			t.Errorf("%s: the next one: %v", what, err)
		}
	}
	b.nothingLeft(t, what+", and the next one")
}

// flushed empties a TPM that refused to flush, as its next reset does. Without one, it is emptied
// when it is full (TestLeftOverHandlesAreFlushed).
func (b *bench) flushed(t *testing.T) {
	t.Helper()
	handles, err := b.chip.Handles()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range handles {
		if _, err := (tpm2.FlushContext{FlushHandle: h}).Execute(b.chip.Transport()); err != nil {
			t.Error(err)
		}
	}
}

// A command that never returns, each in its turn: the call returns when its context ends, and names
// that command. Nobody else gets the TPM meanwhile. When the TPM wakes up, what it loaded is
// flushed, and the next renewal succeeds.
func TestEachCommandHangs(t *testing.T) {
	every := reliability.Size(t, "tpm-renewals", 4, 1)
	for name, o := range chips {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, o)
			for index := 0; index < len(b.commands); index += every {
				b.hang(t, index)
			}
		})
	}
}

func (b *bench) hang(t *testing.T, index int) {
	command := b.commands[index]
	what := fmt.Sprintf("command %d, %s", index, names[command])
	b.proxy.Reset()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	release := b.proxy.HangAt(index, cancel)
	err := b.renew(ctx)
	if !errors.Is(err, context.Canceled) || !isClear(err, command) {
		t.Errorf("%s: %#v", what, err)
	}
	busy, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if err := b.renew(busy); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "TPM: lock") {
		t.Errorf("%s: another one meanwhile: %v", what, err)
	}
	release()
	if err := b.renew(t.Context()); err != nil {
		t.Errorf("%s: the next one: %v", what, err)
	}
	b.nothingLeft(t, what)
}

// The TPM is reset or cleared before each command in its turn, or the power fails. The renewal
// succeeds, or fails with a reason, and the next one succeeds. None of it counts towards lockout.
func TestResetAtEachCommand(t *testing.T) {
	every := reliability.Size(t, "tpm-renewals", 8, 1)
	for name, o := range chips {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, o)
			count := 0
			for index := range b.commands {
				for _, event := range []struct {
					what string
					do   func() error
				}{{"reset", b.chip.Reboot}, {"power cut", b.powerCut}, {"cleared", b.chip.Clear}} {
					if count++; count%every == 0 {
						b.interrupt(t, index, event.what, event.do)
					}
				}
			}
			t.Logf("%d of %d cases", count/every, count)
		})
	}
}

func (b *bench) powerCut() error {
	b.chip.Crash()
	return b.chip.Boot()
}

func (b *bench) interrupt(t *testing.T, index int, what string, event func() error) {
	cleared := what == "cleared"
	what = fmt.Sprintf("command %d, %s: %s", index, names[b.commands[index]], what)
	b.proxy.Reset()
	happened := false
	b.proxy.CallAt(index, func() {
		happened = true
		if err := event(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	})
	err := b.renew(t.Context())
	var known *provider.Error
	switch {
	case !happened:
		t.Errorf("%s: it did not happen", what)
	case err != nil && (!errors.As(err, &known) || known.Hint == "" || !strings.Contains(err.Error(), "TPM2_")):
		t.Errorf("%s: %#v", what, err)
	}
	b.nothingLeft(t, what)
	if err := b.renew(t.Context()); err != nil {
		t.Errorf("%s: the next one: %v", what, err)
	}
	b.nothingLeft(t, what+", and the next one")
	// TPM2_Clear has removed it, as it belongs to the owner.
	for i, name := range b.persistent {
		e, _ := template.EKByName(name)
		if at := tpm2.TPMHandle(0x81010001 + i); cleared {
			must(t, b.chip.Persist(e, at))
		}
	}
	must(t, b.powerCut())
	b.nothingLeft(t, what+", and a power cut")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A TPM that ends during a command and starts again, as a software TPM does: the reason says so.
func TestConnectionEndsAtEachCommand(t *testing.T) {
	b := newBench(t, chips["persistent key"])
	for index, command := range b.commands {
		what := fmt.Sprintf("command %d, %s", index, names[command])
		b.proxy.Reset()
		b.proxy.CutAt(index)
		err := b.renew(t.Context())
		// Without a flush it goes on, and the next command fails if there is one.
		if command != tpm2.TPMCCFlushContext && (err == nil || !isClear(err, command)) {
			t.Errorf("%s: %#v", what, err)
		}
		if err := b.chip.Reboot(); err != nil { // which flushes what no connection could
			t.Fatal(err)
		}
		if err := b.renew(t.Context()); err != nil {
			t.Errorf("%s: the next one: %v", what, err)
		}
		b.nothingLeft(t, what)
	}
}

// A TPM in lockout makes each kind of hello and proof, and they do not prolong it.
func TestLockoutIsNoObstacle(t *testing.T) {
	for _, e := range template.EKs() {
		for _, persistent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/persistent=%t", e.Name, persistent), func(t *testing.T) {
				t.Parallel()
				o := swtpm.Options{Certified: []string{e.Name}, Chain: true}
				if persistent {
					o.Persistent = o.Certified
				}
				b := newBench(t, o)
				wrong, err := b.chip.LockOut()
				if err != nil {
					t.Fatal(err)
				}
				before, err := b.chip.LockoutCounter()
				if err != nil {
					t.Fatal(err)
				}
				for range 2 {
					if err := b.renew(t.Context()); err != nil {
						t.Error(err)
					}
					if after, err := b.chip.LockoutCounter(); err != nil || after != before {
						t.Errorf("lockout counter %d, %d before, %v", after, before, err)
					}
				}
				t.Logf("locked out after %d wrong passwords, %d commands", wrong, b.proxy.Count())
			})
		}
	}
}
