// SPDX-License-Identifier: Apache-2.0

package ec2

import (
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	imitation "github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/nitrotpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/cloud"
	verifierec2 "github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2"
)

const (
	someID     = "i-0123456789abcdef0"
	clusterUID = "some-cluster"
	// vendorCommand is AWS's.
	vendorCommand tpm2.TPMCC = 0x20000001
	// index is the NV index of this program.
	index tpm2.TPMHandle = 0x01b5a37e
)

// theMaker is of one instance, for all tests.
var theMaker = sync.OnceValues(func() (*imitation.Maker, error) { return imitation.New(someID, "eu-west-1", time.Now()) })

// instance is an EC2 instance: a software TPM, the imitation before it, and a proxy that can fail
// commands before that.
type instance struct {
	*swtpm.Proxy
	chip  *swtpm.TPM
	nitro *imitation.TPM
}

func newInstance(t testing.TB) instance {
	t.Helper()
	maker, err := theMaker()
	if err != nil {
		t.Fatal(err)
	}
	chip := swtpm.Start(t, swtpm.Options{})
	nitro, err := imitation.Open(chip, maker)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nitro.Close)
	return instance{swtpm.NewProxy(t, nitro), chip, nitro}
}

// defined reports whether the NV index is there.
func (i instance) defined(t testing.TB) bool {
	t.Helper()
	_, err := tpm2.NVReadPublic{NVIndex: index}.Execute(i.chip.Transport())
	if err != nil && !errors.Is(err, tpm2.TPMRCHandle) {
		t.Fatal(err)
	}
	return err == nil
}

func (i instance) provider(t testing.TB) Provider {
	t.Helper()
	made, err := Factory().New(provider.Settings{TPMDevice: i.Socket(), RuntimeDir: t.TempDir(), ClusterUID: clusterUID})
	if err != nil {
		t.Fatal(err)
	}
	return made.(Provider)
}

func someRequest() provider.Request {
	lifetime := int32(86400)
	return provider.Request{
		PKCS10: []byte("PKCS#10"), Name: "node-csr-a", SignerName: SignerName,
		Usages: []string{"client auth", "digital signature"}, ExpirationSeconds: &lifetime,
	}
}

func wantError(t *testing.T, err error, class provider.Class, hint string) {
	t.Helper()
	failed, ok := errors.AsType[*provider.Error](err)
	if !ok || failed.Class != class || !strings.Contains(failed.Hint, hint) {
		t.Errorf("got %v (%+v), want class %d with a hint of %q", err, failed, class, hint)
	}
}

// The controller's half accepts what the node's half makes, and nothing of it for another request.
func TestEvidenceIsAccepted(t *testing.T) {
	machine, maker := newInstance(t), must(theMaker())
	request := someRequest()
	data, err := machine.provider(t).Evidence(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	if machine.defined(t) {
		t.Error("the NV index was left")
	}
	if n := machine.Count(vendorCommand); n != 1 {
		t.Errorf("%d vendor commands", n)
	}
	v, err := verifierec2.New(verifierec2.Config{
		ClusterUID: clusterUID, Roots: []*x509.Certificate{maker.Root()}, PCRValues: map[int][][]byte{7: {maker.PCRs[7]}},
	})
	if err != nil {
		t.Fatal(err)
	}
	filed := verifier.Filed{
		Name: request.Name, SignerName: request.SignerName, Usages: request.Usages, ExpirationSeconds: request.ExpirationSeconds, Created: time.Now(),
	}
	if filed.Request, err = (attestation.Request{PKCS10: request.PKCS10, Provider: Name, Data: data}).Marshal(); err != nil {
		t.Fatal(err)
	}
	verified, err := v.Verify(filed)
	if err != nil {
		t.Fatal(err)
	}
	if verified.Instance.ID != someID || !verified.HasProviderID("aws:///eu-west-1a/"+someID) {
		t.Errorf("verified %v", verified.Instance)
	}
	for name, change := range map[string]func(*verifier.Filed){
		"another name":     func(f *verifier.Filed) { f.Name = "node-csr-b" },
		"another signer":   func(f *verifier.Filed) { f.SignerName += "-role" },
		"another lifetime": func(f *verifier.Filed) { f.ExpirationSeconds = nil },
	} {
		copied := filed
		change(&copied)
		_, err := v.Verify(copied)
		if refusals, ok := errors.AsType[verifier.Refusals](err); !ok || refusals[0].Reason != cloud.ReasonRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Each command fails in turn. Then there is an error, and no NV index is left, unless the command
// was the one that removes it.
func TestEachCommandMayFail(t *testing.T) {
	machine := newInstance(t)
	p := machine.provider(t)
	if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
		t.Fatal(err)
	}
	all := machine.Exchanges()
	for i, e := range all {
		if e.Code == tpm2.TPMCCFlushContext { // its error is not the caller's: the next run makes room
			continue
		}
		machine.Reset()
		machine.AnswerAt(i, tpm2.TPMRCFailure)
		_, err := p.Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "")
		if left := machine.defined(t); left != (e.Code == tpm2.TPMCCNVUndefineSpace) {
			t.Errorf("command %d (%v) fails: NV index left: %t", i, e.Code, left)
		}
	}
	machine.Reset()
	if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
		t.Errorf("after an index was left: %v", err)
	}
	if machine.defined(t) {
		t.Error("the NV index was left")
	}
}

// The connection ends at each command, as if the process was killed there. The next run removes
// what was left.
func TestKilledAtEachCommand(t *testing.T) {
	machine := newInstance(t)
	p := machine.provider(t)
	if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
		t.Fatal(err)
	}
	left := 0
	for i := range machine.Exchanges() {
		machine.Reset()
		machine.CutAt(i)
		_, err := p.Evidence(t.Context(), someRequest())
		if err == nil {
			t.Logf("command %d is not needed for the answer", i)
		}
		if machine.defined(t) {
			left++
		}
		machine.Reset()
		if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
			t.Errorf("after command %d: %v", i, err)
		}
		if machine.defined(t) {
			t.Errorf("after command %d: the NV index was left", i)
		}
	}
	if left == 0 {
		t.Error("no cut left an index: the test shows nothing")
	}
}

// The context ends during the vendor command. The index is removed, once that command has returned.
func TestContextEnds(t *testing.T) {
	machine := newInstance(t)
	p := machine.provider(t)
	ctx, cancel := context.WithCancel(t.Context())
	release := machine.Hang(vendorCommand)
	go func() {
		for machine.Count(vendorCommand) == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	_, err := p.Evidence(ctx, someRequest())
	wantError(t, err, provider.DeviceFailed, "")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	release()
	deadline := time.Now().Add(10 * time.Second)
	for machine.defined(t) && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if machine.defined(t) {
		t.Error("the NV index was left")
	}
	// It waits for the lock, which the first run releases last.
	machine.Reset()
	if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
		t.Error(err)
	}
}

func TestForeignIndexIsKept(t *testing.T) {
	machine := newInstance(t)
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: index, NameAlg: tpm2.TPMAlgSHA512, DataSize: 100, Attributes: tpm2.TPMANV{AuthRead: true, AuthWrite: true},
		}),
	}).Execute(machine.chip.Transport()); err != nil {
		t.Fatal(err)
	}
	_, err := machine.provider(t).Evidence(t.Context(), someRequest())
	wantError(t, err, provider.DeviceFailed, "tpm2_nvundefine 0x01b5a37e")
	if !machine.defined(t) {
		t.Error("another program's NV index was removed")
	}
}

func TestNotANitroTPM(t *testing.T) {
	t.Run("image without TpmSupport", func(t *testing.T) {
		machine := newInstance(t)
		machine.nitro.Maker = nil
		_, err := machine.provider(t).Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "TpmSupport v2.0")
		if machine.defined(t) {
			t.Error("the NV index was left")
		}
	})
	t.Run("the kernel does not pass the command on", func(t *testing.T) {
		machine := newInstance(t)
		machine.Answer(vendorCommand, 0xb0000|tpm2.TPMRCCommandCode, 1)
		_, err := machine.provider(t).Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "TpmSupport v2.0")
	})
	t.Run("another TPM, with smaller indices", func(t *testing.T) {
		machine := newInstance(t)
		machine.Proxy = swtpm.NewProxy(t, machine.chip)
		_, err := machine.provider(t).Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "TpmSupport v2.0")
	})
	t.Run("no TPM", func(t *testing.T) {
		p := Provider{Devices: []string{filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")}, RuntimeDir: t.TempDir()}
		_, err := p.Evidence(t.Context(), someRequest())
		wantError(t, err, provider.NoDevice, "")
	})
	t.Run("the owner has a password", func(t *testing.T) {
		machine := newInstance(t)
		machine.Answer(tpm2.TPMCCNVDefineSpace, tpm2.TPMRCBadAuth, 1)
		_, err := machine.provider(t).Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "tpm2_changeauth -c owner")
	})
	t.Run("NV memory is full", func(t *testing.T) {
		machine := newInstance(t)
		machine.Answer(tpm2.TPMCCNVDefineSpace, tpm2.TPMRCNVSpace, 1)
		_, err := machine.provider(t).Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "NV memory is full")
	})
}

// The second device is used if the first is absent, or does not pass the command on.
func TestSecondDevice(t *testing.T) {
	machine, mute := newInstance(t), newInstance(t)
	mute.nitro.Maker = nil
	for name, first := range map[string]string{"absent": filepath.Join(t.TempDir(), "none"), "does not pass it on": mute.Socket()} {
		p := machine.provider(t)
		p.Devices = []string{first, machine.Socket()}
		if _, err := p.Evidence(t.Context(), someRequest()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		// An error of a device that is there says more than the absence of the other.
		p.Devices = []string{mute.Socket(), filepath.Join(t.TempDir(), "none")}
		_, err := p.Evidence(t.Context(), someRequest())
		wantError(t, err, provider.DeviceFailed, "TpmSupport v2.0")
	}
}

// What the controller would deny is not filed.
func TestUnusableAnswers(t *testing.T) {
	machine, maker := newInstance(t), must(theMaker())
	p := machine.provider(t)
	document := func(change func(*nitrotpm.Document)) func([]byte) []byte {
		return func(answer []byte) []byte {
			signed, err := nitrotpm.Parse(must(nitrotpm.ParseResponse(answer)))
			if err != nil {
				t.Fatal(err)
			}
			change(&signed.Document)
			return nitrotpm.Answer(must(maker.Sign(signed.Document.Payload())))
		}
	}
	for _, test := range []struct {
		name, want string
		answer     func([]byte) []byte
	}{
		{"an error", "InvalidArgument", func([]byte) []byte { return []byte("\xa1\x65Error\x6fInvalidArgument") }},
		{"not CBOR", "malformed", func([]byte) []byte { return []byte{0xff, 0xff} }},
		{"the request unanswered", "malformed", func([]byte) []byte { return nil }},
		{"no document in it", "returns no document", func([]byte) []byte { return nitrotpm.Answer(nil) }},
		{"something else as document", "COSE_Sign1", func([]byte) []byte { return nitrotpm.Answer([]byte{0x80}) }},
		{"another nonce", "another request", document(func(d *nitrotpm.Document) { d.Nonce = make([]byte, 32) })},
		{"user data", "another request", document(func(d *nitrotpm.Document) { d.UserData = []byte("x") })},
		{"a public key", "another request", document(func(d *nitrotpm.Document) { d.PublicKey = []byte("x") })},
	} {
		t.Run(test.name, func(t *testing.T) {
			machine.nitro.Answer = test.answer
			_, err := p.Evidence(t.Context(), someRequest())
			wantError(t, err, provider.DeviceFailed, "")
			if err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestProviderID(t *testing.T) {
	serve := func(handler http.HandlerFunc) metadata.Client {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		return metadata.Client{Address: server.Listener.Addr().String()}
	}
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
	}
	instance := &aws.Instance{AWS: aws.New(t), Zone: "eu-west-1a", ID: someID}
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for _, test := range []struct {
		name   string
		client metadata.Client
		want   string
		fails  bool
	}{
		{"an instance", serve(instance.ServeHTTP), "aws:///eu-west-1a/" + someID, false},
		{"nothing listens", metadata.Client{Address: closed.Listener.Addr().String()}, "", false},
		{"switched off", serve(status(http.StatusForbidden)), "", false},
		{"another service", serve(status(http.StatusNotFound)), "", true},
		{"no session", serve(status(http.StatusOK)), "", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Provider{Metadata: test.client}.ProviderID(t.Context())
			if got != test.want || (err != nil) != test.fails {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

func TestFactory(t *testing.T) {
	f := Factory()
	if f.Name != "ec2" || !slices.Equal(f.Versions, []string{"ec2/v1"}) {
		t.Errorf("got %s, %v", f.Name, f.Versions)
	}
	if _, err := f.New(provider.Settings{ClusterUID: "a b"}); err == nil {
		t.Error("accepted a cluster UID with a space")
	}
	made, err := f.New(provider.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if p := made.(Provider); !slices.Equal(p.Devices, []string{"/dev/tpmrm0", "/dev/tpm0"}) || !p.Renews() || p.Caution() != "" {
		t.Errorf("got %+v", p)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
