// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// TestMain keeps what workers log for operators out of the tests' output, and lets tests that wait
// do so together on machines with few CPUs.
func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	unittest.Main(m)
}

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

var asker = process.ID{PID: 4711, Start: 1234}

// newCertificate returns a self-signed certificate and its key, both in PEM.
func newCertificate(t testing.TB, template *x509.Certificate) (leaf *x509.Certificate, certificate, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if template.SerialNumber == nil {
		template.SerialNumber = big.NewInt(1)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	if leaf, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return leaf, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

// newPair returns the certificate of node "a", valid for a day around noon, after change.
func newPair(t testing.TB, change func(*x509.Certificate)) *cache.Pair {
	t.Helper()
	template := &x509.Certificate{
		Subject:     pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:a"},
		NotBefore:   noon.Add(-12 * time.Hour),
		NotAfter:    noon.Add(12 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	leaf, certificate, key := newCertificate(t, template)
	return &cache.Pair{Chain: certificate, Key: key, Leaf: leaf}
}

// newCA returns a certificate in PEM to tell clusters apart by.
func newCA(t testing.TB) []byte {
	t.Helper()
	_, ca, _ := newCertificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true})
	return ca
}

// fakeProvider is a provider for tests of what surrounds it.
type fakeProvider struct {
	renews bool
	signer string
}

func (fakeProvider) Name() string                               { return "fake" }
func (p fakeProvider) SignerName() string                       { return p.signer }
func (p fakeProvider) Renews() bool                             { return p.renews }
func (fakeProvider) Caution() string                            { return "" }
func (fakeProvider) ProviderID(context.Context) (string, error) { return "", nil }
func (fakeProvider) Evidence(context.Context, provider.Request) ([]byte, error) {
	return []byte(`{"version":"fake/v1"}`), nil
}

// testAuthenticator is that of node "a" at noon, asked by nobody, with a provider that renews and
// nothing on disk.
func testAuthenticator(t testing.TB) *Authenticator {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	return &Authenticator{
		provider: fakeProvider{renews: true, signer: "example.com/signer"}, signerName: "example.com/signer",
		nodeName: "a", dir: cache.At(certs),
		bootstrapKubeconfig: filepath.Join(t.TempDir(), "none"), kubeletBootstrap: kubelet.BootstrapFile,
		waitTimeout: 10 * time.Second, renewalWait: 10 * time.Second, reviewTimeout: time.Minute,
		note:      newNoteFile(filepath.Join(t.TempDir(), "run"), certs),
		now:       func() time.Time { return noon },
		step:      func(Step) {},
		userAgent: "test/1",
		// a run kills workers that outlive it, and here they are this very process
		workerDeadline: 24 * time.Hour,
		startWorker: func() (process.ID, error) {
			return process.ID{}, errors.New("no worker was to be started")
		},
	}
}

// put writes a file of the certificate directory, which it makes.
func put(t testing.TB, d cache.Dir, name string, data []byte, mode fs.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(d.Path(), 0o700), os.WriteFile(d.File(name), data, mode), os.Chmod(d.File(name), mode)); err != nil {
		t.Fatal(err)
	}
}

// installPair puts a pair into the certificate directory.
func installPair(t testing.TB, d cache.Dir, pair *cache.Pair) {
	t.Helper()
	data, err := pair.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	put(t, d, cache.CurrentFile, data, 0o600)
}

// snapshot describes a tree: what it holds, and what that holds.
func snapshot(t testing.TB, root string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path == root {
			out.WriteString("nothing\n")
			return nil
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintf(&out, "%s %s", path, info.Mode())
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			_, _ = fmt.Fprintf(&out, " %x %s", sha256.Sum256(data), info.ModTime())
		}
		out.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// tlsServer starts an HTTPS server and returns it with the CA that vouches for it.
func tlsServer(t testing.TB, handler http.Handler, change func(*httptest.Server)) (server *httptest.Server, ca []byte) {
	t.Helper()
	server = httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	if change != nil {
		change(server)
	}
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
}

// hang never answers. It waits until the client goes away, which the server only notices once it
// has read the request. A handler that returns answers 200, and net/http's client takes an answer
// that arrives while it closes the connection.
func hang(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// wantFailure returns the Failure in err if it has that reason and its text fits on one line of a
// log.
func wantFailure(t testing.TB, err error, reason Reason) *Failure {
	t.Helper()
	var failure *Failure
	if !errors.As(err, &failure) {
		t.Fatalf("got %v, want a Failure with reason %s", err, reason)
	}
	if failure.Reason != reason {
		t.Errorf("reason %s, want %s: %v", failure.Reason, reason, err)
	}
	for what, text := range map[string]string{"error": failure.Error(), "hint": failure.Hint} {
		if problem := notOneLine(text); problem != "" {
			t.Errorf("the %s %s: %.200q", what, problem, text)
		}
	}
	return failure
}

// mustFail is wantFailure for those who want no more of it.
func mustFail(t testing.TB, err error, reason Reason) {
	t.Helper()
	_ = wantFailure(t, err, reason)
}

// notOneLine says why text cannot be shown on one line of a terminal or log, empty if it can.
func notOneLine(text string) string {
	switch {
	case strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || 0x80 <= r && r < 0xa0 || r == 0x2028 || r == 0x2029 }):
		return "holds line breaks or control characters"
	case len(text) > 1500:
		return fmt.Sprintf("is %d bytes long", len(text))
	}
	return ""
}
