// SPDX-License-Identifier: Apache-2.0

// Package metadata asks a cloud's metadata service, which each instance reaches at a link-local
// address over plain HTTP. Who answers there is decided by the instance's network alone.
package metadata

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// Address is that of the metadata service of EC2, Google Compute Engine and Azure, host:port.
const Address = "169.254.169.254:80"

const (
	// timeout bounds one call. The service is local, and a worker has two minutes for everything.
	timeout = 5 * time.Second
	// dialTimeout is how long a connection may take. It has to end before the call does: otherwise
	// a firewall that drops packets looks like a service that fails. One lost packet is sent again
	// after 1 s.
	dialTimeout = 2 * time.Second
	// maxAnswer bounds an answer in bytes.
	maxAnswer = 64 << 10
)

// Client asks a metadata service. The zero value asks at Address.
type Client struct {
	// Address is host:port, for tests. Default: Address.
	Address string
}

// StatusError is the error for an answer with another status than 200.
type StatusError struct {
	Method, Path string
	Status       int
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s %s: status %d", e.Method, e.Path, e.Status)
}

// Call sends one request, and returns the answer of a status 200. It uses no proxy and follows no
// redirect: the answer must come from the service itself. path may have a query. header may be nil.
// An error is a *provider.Error, or wraps one. If nothing listens at the address, or a firewall
// drops the packets, its class is provider.NoDevice.
func (c Client) Call(ctx context.Context, method, path string, header http.Header, body []byte) ([]byte, error) {
	answer, _, err := c.Exchange(ctx, method, path, header, body)
	return answer, err
}

// Exchange is Call, and returns the header of the answer, too. Some services identify themselves
// there.
func (c Client) Exchange(ctx context.Context, method, path string, header http.Header, body []byte) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	address := c.Address
	if address == "" {
		address = Address
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext}
	response, err := transport.RoundTrip(request) // follows no redirect
	if failed, ok := errors.AsType[*net.OpError](err); ok && failed.Op == "dial" {
		return nil, nil, &provider.Error{
			Class: provider.NoDevice, Hint: "is this an instance of that cloud, and may this process reach the metadata service?",
			Err: fmt.Errorf("metadata service %s: %w", address, err),
		}
	}
	if err != nil {
		return nil, nil, failure(address, err)
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		return nil, nil, failure(address, &StatusError{method, request.URL.Path, response.StatusCode})
	}
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	if err == nil && len(answer) > maxAnswer {
		err = fmt.Errorf("%s %s: answers with more than %d bytes", method, request.URL.Path, maxAnswer)
	}
	if err != nil {
		return nil, nil, failure(address, err)
	}
	return answer, response.Header, nil
}

func failure(address string, err error) error {
	return &provider.Error{Class: provider.DeviceFailed, Err: fmt.Errorf("metadata service %s: %w", address, err)}
}
