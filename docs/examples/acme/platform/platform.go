// SPDX-License-Identifier: Apache-2.0

// Package platform imitates the services of the platform Acme, for the tests of the example. There
// is a service in each of its instances, and an API about all of them.
package platform

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
)

// Service is that of one instance.
type Service struct {
	Instance string
	// Key is the platform's. It never gets into an instance: behind a real socket is the
	// hypervisor.
	Key ed25519.PrivateKey
	// Now is the platform's clock.
	Now func() time.Time
}

// Serve answers on a Unix socket until the function that it returns is called.
func (s Service) Serve(socket string) (stop func() error, err error) {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", socket)
	if err != nil {
		return nil, err
	}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: time.Second}
	go func() { _ = server.Serve(listener) }() // it ends with Close
	return server.Close, nil
}

func (s Service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/instance", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s.Instance) })
	mux.HandleFunc("POST /v1/identity", s.identity)
	return mux
}

// identity signs for whom and what the caller says; which instance it is, the platform knows.
func (s Service) identity(w http.ResponseWriter, r *http.Request) {
	var ask struct {
		Audience string `json:"audience"`
		Nonce    []byte `json:"nonce"`
	}
	err := json.NewDecoder(io.LimitReader(r.Body, identity.MaxSize)).Decode(&ask)
	if err != nil || ask.Audience == "" || len(ask.Nonce) != sha256.Size {
		http.Error(w, "wanted are an audience and a nonce of 32 bytes", http.StatusBadRequest)
		return
	}
	document, err := identity.Sign(s.Key, identity.Statement{
		Audience: ask.Audience, Instance: s.Instance, Nonce: ask.Nonce, IssuedAt: s.Now().Unix(),
	})
	if err != nil {
		http.Error(w, "it could not be signed", http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(document)
}
