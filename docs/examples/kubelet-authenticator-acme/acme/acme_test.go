// SPDX-License-Identifier: Apache-2.0

package acme

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/platform"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

var request = provider.Request{Name: "node-csr-a", SignerName: identity.SignerName, PKCS10: []byte("DER")}

// serve answers on a socket as handler says.
func serve(t *testing.T, handler http.HandlerFunc) Provider {
	t.Helper()
	p := Provider{Socket: filepath.Join(t.TempDir(), "identity.sock")}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", p.Socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return p
}

func TestEvidence(t *testing.T) {
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	p := Provider{Socket: filepath.Join(t.TempDir(), "identity.sock")}
	stop, err := platform.Service{Instance: "i-1", Key: key, Now: time.Now}.Serve(p.Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop() })
	if id, err := p.ProviderID(t.Context()); err != nil || id != "acme://i-1" {
		t.Errorf("provider ID %q: %v", id, err)
	}
	data, err := p.Evidence(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	document, says, err := identity.Parse(data)
	if err != nil || !document.SignedBy(key.Public().(ed25519.PublicKey)) || says.Instance != "i-1" {
		t.Errorf("%s: %+v, %v", data, says, err)
	}
	if !bytes.HasPrefix(data, []byte(`{"version":"acme/v1",`)) {
		t.Errorf("the version does not come first: %s", data)
	}
}

// What the service does wrong is an error that names it; nothing of it is sent to the API server.
func TestEvidenceFails(t *testing.T) {
	key := ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	wrong := func(audience, name string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			data, _ := identity.Sign(key, identity.Statement{
				Audience: audience, Instance: "i-1", Nonce: identity.Nonce(identity.SignerName, name, request.PKCS10),
			})
			_, _ = w.Write(data)
		}
	}
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		says    string
	}{
		"status":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }, "POST /v1/identity: status 418"},
		"redirect": {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/other", http.StatusFound) }, "status 302"},
		"too long": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat(" ", identity.MaxSize+1))
		}, "more than 4096 bytes"},
		"no document":      {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "sorry") }, "not the JSON"},
		"another request":  {wrong(identity.Audience, "node-csr-b"), "another request"},
		"another audience": {wrong("somebody", request.Name), "another request"},
		"hangs":            {func(http.ResponseWriter, *http.Request) { <-hang }, context.DeadlineExceeded.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			p := serve(t, c.handler)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			data, err := p.Evidence(ctx, request)
			failed, ok := errors.AsType[*provider.Error](err)
			if data != nil || !ok || failed.Class != provider.DeviceFailed || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), p.Socket) {
				t.Errorf("%s: %v", data, err)
			}
		})
	}
}

func TestServiceIsDown(t *testing.T) {
	p := Provider{Socket: filepath.Join(t.TempDir(), "identity.sock")}
	for what, call := range map[string]func() error{
		"evidence":    func() error { _, err := p.Evidence(t.Context(), request); return err },
		"provider ID": func() error { _, err := p.ProviderID(t.Context()); return err },
	} {
		err := call()
		failed, ok := errors.AsType[*provider.Error](err)
		if !ok || failed.Class != provider.NoDevice || failed.Hint == "" || !strings.Contains(err.Error(), p.Socket) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
