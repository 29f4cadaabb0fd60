// SPDX-License-Identifier: Apache-2.0

package decisionlog

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
)

const (
	// postTimeout bounds one batch, from the connection to the answer.
	postTimeout = 10 * time.Second
	// maxCredentialFile bounds each file that an Endpoint reads, in bytes.
	maxCredentialFile = 1 << 20
	// maxAnswer bounds what is read of an answer, in bytes.
	maxAnswer = 64 << 10
)

// EndpointConfig says where an Endpoint is, and how to authenticate. The files are read again for
// each batch, so that they can be rotated.
type EndpointConfig struct {
	// URL is an https URL.
	URL string
	// CAFile has the CAs in PEM that the server's certificate must chain to. Default: the system's.
	CAFile string
	// TokenFile has a bearer token. Optional.
	TokenFile string
	// CertificateFile and KeyFile are the client's certificate and key in PEM. Optional.
	CertificateFile, KeyFile string
}

// Endpoint is a sink that posts each batch as lines of JSON (application/x-ndjson). It always
// verifies the server's certificate. It follows no redirect, since a redirect could send the token
// to another server.
type Endpoint struct{ config EndpointConfig }

// NewEndpoint returns a sink. Its error names the field at fault.
func NewEndpoint(config EndpointConfig) (*Endpoint, error) {
	u, err := url.Parse(config.URL)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.Fragment != "":
		return nil, errors.New("url: must be https://host/path")
	case u.User != nil:
		return nil, errors.New("url: has a user; use tokenFile, or certificateFile and keyFile")
	case (config.CertificateFile == "") != (config.KeyFile == ""):
		return nil, errors.New("certificateFile and keyFile go together")
	}
	return &Endpoint{config}, nil
}

// Name returns "endpoint".
func (*Endpoint) Name() string { return "endpoint" }

// Write posts lines. The endpoint accepts all of them or none.
func (e *Endpoint) Write(ctx context.Context, lines [][]byte) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, postTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.config.URL, bytes.NewReader(bytes.Join(lines, nil)))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/x-ndjson")
	if err := e.authenticate(request); err != nil {
		return 0, err
	}
	transport, err := e.transport()
	if err != nil {
		return 0, err
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	answer, err := client.Do(request)
	if err != nil {
		// the text of the outer error has the URL, which may have a secret
		if failed, ok := errors.AsType[*url.Error](err); ok {
			err = failed.Err
		}
		return 0, fmt.Errorf("post: %w", err)
	}
	// only the status of the answer counts
	_, _ = io.Copy(io.Discard, io.LimitReader(answer.Body, maxAnswer))
	_ = answer.Body.Close()
	switch status := answer.StatusCode; {
	case status >= 200 && status < 300:
		return len(lines), nil
	case status == http.StatusBadRequest, status == http.StatusRequestEntityTooLarge, status == http.StatusUnsupportedMediaType, status == http.StatusUnprocessableEntity:
		return 0, &RefusedError{fmt.Errorf("the endpoint answers %d", status)}
	default:
		return 0, fmt.Errorf("the endpoint answers %d", status)
	}
}

// authenticate adds the bearer token.
func (e *Endpoint) authenticate(request *http.Request) error {
	if e.config.TokenFile == "" {
		return nil
	}
	data, err := bounded.ReadFile(e.config.TokenFile, maxCredentialFile)
	if err != nil {
		return fmt.Errorf("tokenFile: %w", err)
	}
	token := strings.TrimSpace(string(data))
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		// an error of net/http might quote the content
		return errors.New("tokenFile: holds no token")
	}
	request.Header.Set("Authorization", "Bearer "+token)
	return nil
}

// transport returns a transport for one batch.
func (e *Endpoint) transport() (*http.Transport, error) {
	verified := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.config.CAFile != "" {
		data, err := bounded.ReadFile(e.config.CAFile, maxCredentialFile)
		if err != nil {
			return nil, fmt.Errorf("caFile: %w", err)
		}
		verified.RootCAs = x509.NewCertPool()
		if !verified.RootCAs.AppendCertsFromPEM(data) {
			return nil, errors.New("caFile: holds no certificate in PEM")
		}
	}
	if e.config.CertificateFile != "" {
		certificate, err := bounded.ReadFile(e.config.CertificateFile, maxCredentialFile)
		if err != nil {
			return nil, fmt.Errorf("certificateFile: %w", err)
		}
		key, err := bounded.ReadFile(e.config.KeyFile, maxCredentialFile)
		if err != nil {
			return nil, fmt.Errorf("keyFile: %w", err)
		}
		pair, err := tls.X509KeyPair(certificate, key)
		if err != nil {
			return nil, fmt.Errorf("certificateFile and keyFile: %w", err)
		}
		verified.Certificates = []tls.Certificate{pair}
	}
	return &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: verified, MaxResponseHeaderBytes: maxAnswer}, nil
}

// Close does nothing: no connection outlives a batch.
func (*Endpoint) Close() error { return nil }
