// SPDX-License-Identifier: Apache-2.0

// Package sts sends to AWS STS what nodes signed. It caches nothing and judges nothing: package
// verifier/ec2role makes the call and judges the answer.
package sts

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/ec2role"
)

// timeout bounds a call.
const timeout = 10 * time.Second

// Client sends calls. It may be used concurrently. The zero value refuses: use NewClient.
type Client struct {
	// Transport sends one request. It must verify the server's certificate.
	Transport http.RoundTripper
}

// NewClient returns a client that trusts the CAs of the host, and uses the proxy of the
// environment. It opens nothing.
func NewClient() Client {
	return Client{&http.Transport{
		Proxy:              http.ProxyFromEnvironment,
		TLSClientConfig:    &tls.Config{MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2:  true,
		DisableCompression: true, // the bound is on the bytes that are read
		IdleConnTimeout:    time.Minute,
	}}
}

// Send sends a call, and returns STS's answer of at most ec2role.MaxAnswer bytes. It follows no
// redirect: the answer decides who gets into the cluster, so it comes from STS itself or not at
// all. Any error means that there is no answer.
func (c Client) Send(ctx context.Context, call *ec2role.Call) (status int, body []byte, err error) {
	if c.Transport == nil {
		return 0, nil, errors.New("STS: the client has no transport")
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, call.Method, call.URL, strings.NewReader(call.Body))
	if err != nil {
		return 0, nil, err
	}
	host := request.URL.Host
	if request.URL.Scheme != "https" {
		return 0, nil, fmt.Errorf("STS at %s: the scheme is not https", host)
	}
	request.Header = call.Header.Clone()
	response, err := c.Transport.RoundTrip(request) // follows no redirect
	if err != nil {
		return 0, nil, fmt.Errorf("STS at %s: %w", host, err)
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode/100 == 3 {
		return 0, nil, fmt.Errorf("STS at %s: status %d, a redirect", host, response.StatusCode)
	}
	body, err = bounded.ReadAll(response.Body, ec2role.MaxAnswer)
	if err != nil {
		return 0, nil, fmt.Errorf("STS at %s: %w", host, err)
	}
	return response.StatusCode, body, nil
}
