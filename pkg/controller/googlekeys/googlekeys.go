// SPDX-License-Identifier: Apache-2.0

// Package googlekeys fetches the public keys of Google's identity tokens. It caches nothing and
// judges nothing: package verifier/gce parses the answer, and the caller keeps the last known good
// one.
package googlekeys

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

// DefaultURL is where Google publishes the keys, as a JWK Set (RFC 7517).
const DefaultURL = "https://www.googleapis.com/oauth2/v3/certs"

const (
	// timeout bounds a fetch.
	timeout = 10 * time.Second
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 64 << 10
	// MinAge is the shortest time for which an answer may be cached: else a server would be asked
	// too often.
	MinAge = time.Minute
	// MaxAge is the longest time: else a key that Google withdrew would live too long.
	MaxAge = 24 * time.Hour
)

// Config says where the keys are.
type Config struct {
	// URL has the scheme https. Default: DefaultURL.
	URL string
	// RootCAs are the CAs of a mirror. Default: those of the host.
	RootCAs *x509.CertPool
}

// Client fetches the keys. It may be used concurrently.
type Client struct {
	url       string
	transport *http.Transport
	timeout   time.Duration
}

// New checks the configuration. It opens nothing.
func New(c Config) (*Client, error) {
	if c.URL == "" {
		c.URL = DefaultURL
	}
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.Fragment != "" {
		return nil, fmt.Errorf("URL of Google's keys: %.128q is not an https URL without user and fragment", c.URL)
	}
	transport := &http.Transport{
		Proxy:             http.ProxyFromEnvironment,
		TLSClientConfig:   &tls.Config{RootCAs: c.RootCAs, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true,
		DisableKeepAlives: true, // hours pass between two fetches
	}
	return &Client{url: c.URL, transport: transport, timeout: timeout}, nil
}

// Fetch returns the key set as the server sent it, at most 64 KiB, and for how long it may be
// cached: MinAge to MaxAge. It follows no redirect: the keys decide who gets into the cluster, so
// they come from the configured URL or not at all.
func (c *Client) Fetch(ctx context.Context) (keySet []byte, maxAge time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url, nil)
	if err != nil {
		return nil, 0, err
	}
	response, err := c.transport.RoundTrip(request) // follows no redirect
	if err != nil {
		return nil, 0, fmt.Errorf("keys of Google at %s: %w", c.url, err)
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		return nil, 0, fmt.Errorf("keys of Google at %s: status %d", c.url, response.StatusCode)
	}
	keySet, err = bounded.ReadAll(response.Body, maxAnswer)
	if err == nil && len(keySet) == 0 {
		err = errors.New("the answer is empty")
	}
	if err != nil {
		return nil, 0, fmt.Errorf("keys of Google at %s: %w", c.url, err)
	}
	return keySet, freshness(response.Header), nil
}

// freshness returns for how long an answer stays fresh: its max-age (RFC 9111, section 5.2.2.1)
// less the time that it was in caches on its way (section 5.1).
func freshness(header http.Header) time.Duration {
	var lifetime time.Duration
	for directive := range strings.SplitSeq(strings.Join(header.Values("Cache-Control"), ","), ",") {
		if value, ok := strings.CutPrefix(strings.ToLower(strings.TrimSpace(directive)), "max-age="); ok {
			lifetime = seconds(value)
		}
	}
	return min(max(lifetime-seconds(header.Get("Age")), MinAge), MaxAge)
}

// seconds parses a number of seconds, 0 if it is none. More than 2^31 count as 2^31 (RFC 9111,
// section 1.2.2).
func seconds(text string) time.Duration {
	n, _ := strconv.ParseInt(text, 10, 64) // 0 or the largest number if it fails
	return time.Duration(min(max(n, 0), 1<<31)) * time.Second
}
