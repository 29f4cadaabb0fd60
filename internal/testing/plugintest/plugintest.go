// SPDX-License-Identifier: Apache-2.0

// Package plugintest has certificates, files and servers for tests of the plugin.
package plugintest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
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

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Noon is the time of these tests.
var Noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// Asker is a process that runs the plugin.
var Asker = process.ID{PID: 4711, Start: 1234}

// OfNode makes a certificate that of a node.
func OfNode(name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.Subject.CommonName = "system:node:" + name }
}

// NewCertificate returns a self-signed certificate and its key, both in PEM.
func NewCertificate(t testing.TB, template *x509.Certificate) (leaf *x509.Certificate, certificate, key []byte) {
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

// NewPair returns the certificate of node "a", valid for a day around noon, after change.
func NewPair(t testing.TB, change func(*x509.Certificate)) *cache.Pair {
	t.Helper()
	template := &x509.Certificate{
		Subject:     pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:a"},
		NotBefore:   Noon.Add(-12 * time.Hour),
		NotAfter:    Noon.Add(12 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	leaf, certificate, key := NewCertificate(t, template)
	return &cache.Pair{Chain: certificate, Key: key, Leaf: leaf}
}

// NewCA returns a certificate in PEM to tell clusters apart by.
func NewCA(t testing.TB) []byte {
	t.Helper()
	_, ca, _ := NewCertificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true})
	return ca
}

// Provider is a provider for tests of what surrounds it.
type Provider struct {
	CanRenew bool
	Signer   string
}

// Name implements provider.Provider.
func (Provider) Name() string { return "fake" }

// SignerName implements provider.Provider.
func (p Provider) SignerName() string { return p.Signer }

// Renews implements provider.Provider.
func (p Provider) Renews() bool { return p.CanRenew }

// Caution implements provider.Provider.
func (Provider) Caution() string { return "" }

// ProviderID implements provider.Provider.
func (Provider) ProviderID(context.Context) (string, error) { return "", nil }

// Evidence implements provider.Provider.
func (Provider) Evidence(context.Context, provider.Request) ([]byte, error) {
	return []byte(`{"version":"fake/v1"}`), nil
}

// Put writes a file of the certificate directory, which it makes.
func Put(t testing.TB, d cache.Dir, name string, data []byte, mode fs.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(d.Path(), 0o700), os.WriteFile(d.File(name), data, mode), os.Chmod(d.File(name), mode)); err != nil {
		t.Fatal(err)
	}
}

// InstallPair puts a pair into the certificate directory.
func InstallPair(t testing.TB, d cache.Dir, pair *cache.Pair) {
	t.Helper()
	data, err := pair.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	Put(t, d, cache.CurrentFile, data, 0o600)
}

// Snapshot describes a tree: what it holds, and what that holds.
func Snapshot(t testing.TB, root string) string {
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
			data, err := os.ReadFile(path) //nolint:gosec // a directory of the test
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

// TLSServer starts an HTTPS server and returns it with the CA that vouches for it.
func TLSServer(t testing.TB, handler http.Handler, change func(*httptest.Server)) (server *httptest.Server, ca []byte) {
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

// Hang never answers. It waits until the client goes away, which the server only notices once it
// has read the request. A handler that returns answers 200, and net/http's client takes an answer
// that arrives while it closes the connection.
func Hang(_ http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// NotOneLine says why text cannot be shown on one line of a terminal or log, empty if it can.
func NotOneLine(text string) string {
	switch {
	case strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f || 0x80 <= r && r < 0xa0 || r == 0x2028 || r == 0x2029 }):
		return "holds line breaks or control characters"
	case len(text) > 1500:
		return fmt.Sprintf("is %d bytes long", len(text))
	}
	return ""
}

// Kubeconfig returns one with those lines in its cluster and its user.
func Kubeconfig(cluster, user string) string {
	indent := func(lines string) string {
		return "    " + strings.ReplaceAll(strings.TrimSpace(lines), "\n", "\n    ") + "\n"
	}
	return "apiVersion: v1\nkind: Config\ncurrent-context: x\ncontexts:\n- name: x\n  context: {cluster: x, user: x}\n" +
		"clusters:\n- name: x\n  cluster:\n" + indent(cluster) +
		"users:\n- name: x\n  user:\n" + indent(user)
}

func base64Of(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

// OnServer is a cluster's description in a Kubeconfig.
func OnServer(server string, ca []byte) string {
	return fmt.Sprintf("server: %s\ncertificate-authority-data: %s", server, base64Of(ca))
}

// WriteFile writes a file that others cannot read, and returns its path.
func WriteFile(t testing.TB, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}

// AnswerCode answers with a status code and a body.
func AnswerCode(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

// DueSoon makes a certificate that is due at noon.
func DueSoon(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = Noon.Add(-95*time.Minute), Noon.Add(5*time.Minute)
}

// Someone is the answer to a review of the certificate of node "a".
const Someone = `{"status":{"userInfo":{"username":"system:node:a"}}}`

// WriteState replaces the state file.
func WriteState(t testing.TB, d cache.Dir, state *cache.State) {
	t.Helper()
	lock, err := d.TryLock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := lock.SetState(state); err != nil {
		t.Fatal(err)
	}
}

// PutRecord writes a state or a pending file.
func PutRecord(t testing.TB, d cache.Dir, record any) {
	t.Helper()
	name := cache.StateFile
	switch r := record.(type) {
	case *cache.State:
		r.Version = 1
	case *cache.Pending:
		r.Version, name = 1, cache.PendingFile
	}
	data, err := json.Marshal(record)
	if err != nil {
		t.Fatal(err)
	}
	Put(t, d, name, data, 0o600)
}

// PendingSince is a request that was named at a time. An empty uid means that it was not filed.
func PendingSince(at time.Time, uid string) *cache.Pending {
	return &cache.Pending{
		Provider: "fake", NodeName: "a", SignerName: "example.com/signer", Cluster: cache.Origin{Server: "https://cluster.example.com", ProxyURL: "http://hunter2@proxy"},
		Key: []byte("hunter2"), Requests: []cache.PendingRequest{{Name: "node-csr-x", UID: uid, Request: []byte("hunter2"), FiledAt: at}},
	}
}
