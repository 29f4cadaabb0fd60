// SPDX-License-Identifier: Apache-2.0

// Package acme shows what an infrastructure provider implements on the node. Here the evidence is
// an identity document that the platform signs for this request. A service of the platform, on a
// Unix socket in each instance, signs one for any nonce.
package acme

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/docs/examples/acme/identity"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// DefaultSocket is where the platform's service listens. Only root may connect: a process that may
// connect is this machine.
const DefaultSocket = "/run/acme/identity.sock"

// timeout bounds one call of the service; it is local, and a worker has two minutes for everything.
const timeout = 5 * time.Second

// Factory makes the provider.
func Factory() provider.Factory {
	return provider.Factory{
		Name:     identity.Provider,
		Versions: []string{identity.Version},
		New:      func(provider.Settings) (provider.Provider, error) { return Provider{Socket: DefaultSocket}, nil },
	}
}

// Provider is the node's half.
type Provider struct {
	// Socket is the Unix socket of the platform's service.
	Socket string
}

var _ provider.Provider = Provider{}

// Name returns "acme".
func (Provider) Name() string { return identity.Provider }

// SignerName returns the signer that is asked.
func (Provider) SignerName() string { return identity.SignerName }

// Renews is true: each renewal comes with evidence of its own.
func (Provider) Renews() bool { return true }

// Caution is empty: there is evidence.
func (Provider) Caution() string { return "" }

// ProviderID asks the service which instance this is.
func (p Provider) ProviderID(ctx context.Context) (string, error) {
	instance, err := p.call(ctx, http.MethodGet, "/v1/instance", nil)
	if err != nil {
		return "", err
	}
	return identity.ProviderID(string(instance)), nil
}

// Evidence has the service sign a document for this request, and no other: every node can read it
// in the request.
func (p Provider) Evidence(ctx context.Context, request provider.Request) ([]byte, error) {
	nonce := identity.Nonce(request.SignerName, request.Name, request.PKCS10)
	ask, err := json.Marshal(map[string]any{"audience": identity.Audience, "nonce": nonce})
	if err != nil {
		return nil, err
	}
	document, err := p.call(ctx, http.MethodPost, "/v1/identity", ask)
	if err != nil {
		return nil, err
	}
	// A document that would be denied is not sent: here its fault can be told to the one who can
	// mend it.
	_, says, err := identity.Parse(document)
	if err == nil && (says.Audience != identity.Audience || !bytes.Equal(says.Nonce, nonce)) {
		err = errors.New("identity document: it is for another request")
	}
	if err != nil {
		return nil, p.failed(err)
	}
	return document, nil
}

// call asks the service, and takes no more from it than a document may have.
func (p Provider) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, "http://acme"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	response, err := p.transport().RoundTrip(request) // follows no redirect
	if failed, ok := errors.AsType[*net.OpError](err); ok && failed.Op == "dial" && ctx.Err() == nil {
		return nil, &provider.Error{
			Class: provider.NoDevice, Hint: "is this an instance of Acme, does acme-agent.service run, and is this process root?",
			Err: fmt.Errorf("identity service %s: %w", p.Socket, err),
		}
	}
	if err != nil {
		return nil, p.failed(err)
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		return nil, p.failed(fmt.Errorf("%s %s: status %d", method, path, response.StatusCode))
	}
	answer, err := io.ReadAll(io.LimitReader(response.Body, identity.MaxSize+1))
	if err == nil && len(answer) > identity.MaxSize {
		err = fmt.Errorf("%s %s: answers with more than %d bytes", method, path, identity.MaxSize)
	}
	if err != nil {
		return nil, p.failed(err)
	}
	return answer, nil
}

// transport connects to the socket for every address, and asks no proxy.
func (p Provider) transport() *http.Transport {
	return &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", p.Socket)
		},
	}
}

func (p Provider) failed(err error) error {
	return &provider.Error{
		Class: provider.DeviceFailed, Hint: "see the log of acme-agent.service",
		Err: fmt.Errorf("identity service %s: %w", p.Socket, err),
	}
}
