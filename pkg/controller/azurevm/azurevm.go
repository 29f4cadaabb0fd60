// SPDX-License-Identifier: Apache-2.0

// Package azurevm reads the vmId of a VM from Azure Resource Manager. Its identity is an
// application or a managed identity with a federated credential: the token that Kubernetes projects
// into the controller's pod is exchanged for one of Microsoft Entra. There is no secret to keep.
// The identity needs one right, Microsoft.Compute/virtualMachines/read, and
// Microsoft.Compute/virtualMachineScaleSets/virtualMachines/read for scale sets.
//
// The package caches nothing and tries nothing twice. The caller keeps tokens and answers.
package azurevm

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/bounded"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/cloudname"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/azure"
)

const (
	// timeout bounds one call.
	timeout = 10 * time.Second
	// maxAnswer bounds an answer, and maxAssertion the projected token, in bytes.
	maxAnswer, maxAssertion = 256 << 10, 16 << 10
	// maxToken bounds an access token, in bytes.
	maxToken = 16 << 10
	// maxLifetime bounds the lifetime that the token end point reports, in seconds.
	maxLifetime = 24 * 60 * 60
	// apiVersion is that of the compute resource provider.
	apiVersion = "2024-07-01"
)

// endpoints are where a cloud's services are.
type endpoints struct{ login, management string }

var endpointsOf = map[azure.Cloud]endpoints{
	"":                 {"https://login.microsoftonline.com", "https://management.azure.com"},
	azure.Public:       {"https://login.microsoftonline.com", "https://management.azure.com"},
	azure.USGovernment: {"https://login.microsoftonline.us", "https://management.usgovcloudapi.net"},
	azure.China:        {"https://login.partner.microsoftonline.cn", "https://management.chinacloudapi.cn"},
}

// Config is the identity, and where the services are.
type Config struct {
	// Cloud is the cloud of the VMs. Default: azure.Public.
	Cloud azure.Cloud
	// TenantID and ClientID are GUIDs in lower case.
	TenantID, ClientID string
	// TokenFile has the projected service account token, with the audience
	// api://AzureADTokenExchange. It is read for each token, since the kubelet replaces it.
	TokenFile string
	// LoginURL and ManagementURL replace the cloud's services, https://host[:port]. The token's
	// scope stays the cloud's.
	LoginURL, ManagementURL string
	// RootCAs are the CAs of these services. Default: those of the host.
	RootCAs *x509.CertPool
}

// Client asks Microsoft Entra and Azure Resource Manager. It may be used concurrently.
type Client struct {
	tokenURL, managementURL, scope string
	clientID, tokenFile            string
	transport                      *http.Transport
	timeout                        time.Duration
}

// New checks the configuration. It opens nothing.
func New(c Config) (*Client, error) {
	hosts, known := endpointsOf[c.Cloud]
	switch {
	case !known:
		return nil, fmt.Errorf("cloud %.64q: not one of Azure's", c.Cloud)
	case !cloudname.IsGUID(c.TenantID):
		return nil, fmt.Errorf("tenant ID %.64q: not a GUID in lower case", c.TenantID)
	case !cloudname.IsGUID(c.ClientID):
		return nil, fmt.Errorf("client ID %.64q: not a GUID in lower case", c.ClientID)
	case c.TokenFile == "":
		return nil, errors.New("token file: must not be empty")
	}
	login, err := origin(c.LoginURL, hosts.login)
	if err != nil {
		return nil, fmt.Errorf("login URL: %w", err)
	}
	management, err := origin(c.ManagementURL, hosts.management)
	if err != nil {
		return nil, fmt.Errorf("management URL: %w", err)
	}
	return &Client{
		tokenURL: login + "/" + c.TenantID + "/oauth2/v2.0/token", managementURL: management, scope: hosts.management + "/.default",
		clientID: c.ClientID, tokenFile: c.TokenFile, timeout: timeout,
		transport: &http.Transport{
			Proxy:             http.ProxyFromEnvironment,
			TLSClientConfig:   &tls.Config{RootCAs: c.RootCAs, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2: true,
			DisableKeepAlives: true, // a lookup is needed once for a VM
		},
	}, nil
}

// origin returns the URL of a service, without a path. It must be https.
func origin(configured, fallback string) (string, error) {
	if configured == "" {
		return fallback, nil
	}
	u, err := url.Parse(configured)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.String() != "https://"+u.Host {
		return "", fmt.Errorf("%.128q is not https://host[:port]", configured)
	}
	return configured, nil
}

// Token is an access token for Azure Resource Manager. It prints as nothing but its expiry.
type Token struct {
	secret string
	// Expires is when it ends, by this host's clock.
	Expires time.Time
}

// String returns no part of the token.
func (t Token) String() string {
	return "token that expires at " + t.Expires.UTC().Format(time.RFC3339)
}

// GoString is String, for %#v.
func (t Token) GoString() string { return t.String() }

// StatusError is the error for an answer with another status than 200. The text of the answer is
// left out: it is long, and the server chose it.
type StatusError struct {
	// Service is "token end point" or "Azure Resource Manager".
	Service string
	Status  int
}

func (e *StatusError) Error() string { return fmt.Sprintf("%s: status %d", e.Service, e.Status) }

// NotFoundError means that Azure Resource Manager has no such VM.
type NotFoundError struct{ Resource azure.ResourceID }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("Azure Resource Manager: there is no VM %s", e.Resource)
}

// Token exchanges the projected token for an access token (RFC 7523, section 2.2).
func (c *Client) Token(ctx context.Context) (Token, error) {
	const service = "token end point"
	assertion, err := bounded.ReadFile(c.tokenFile, maxAssertion)
	if err != nil {
		return Token{}, fmt.Errorf("projected token: %w", err)
	}
	form := url.Values{
		"grant_type": {"client_credentials"}, "client_id": {c.clientID}, "scope": {c.scope},
		"client_assertion_type": {"urn:ietf:params:oauth:client-assertion-type:jwt-bearer"},
		"client_assertion":      {strings.TrimSpace(string(assertion))},
	}
	asked := time.Now()
	data, err := c.call(ctx, service, http.MethodPost, c.tokenURL, form.Encode(), http.Header{"Content-Type": {"application/x-www-form-urlencoded"}})
	if err != nil {
		return Token{}, err
	}
	var answer struct {
		Type     string `json:"token_type"`
		Secret   string `json:"access_token"`
		Lifetime int64  `json:"expires_in"`
	}
	// The error of the parser may quote the token.
	if json.Unmarshal(data, &answer) != nil || !strings.EqualFold(answer.Type, "Bearer") || !isToken(answer.Secret) ||
		answer.Lifetime <= 0 || answer.Lifetime > maxLifetime {
		return Token{}, fmt.Errorf("%s: the answer has no bearer token with a lifetime", service)
	}
	return Token{answer.Secret, asked.Add(time.Duration(answer.Lifetime) * time.Second)}, nil
}

// isToken reports whether a text may be a bearer token, and nothing else fits in its header.
func isToken(text string) bool {
	return text != "" && len(text) <= maxToken && !strings.ContainsFunc(text, func(c rune) bool { return c <= ' ' || c > '~' })
}

// VMID returns the vmId of a resource. The error is a *NotFoundError if there is no such VM, and a
// *StatusError for any other status than 200, such as 401 for a token that has ended.
func (c *Client) VMID(ctx context.Context, token Token, resource azure.ResourceID) (string, error) {
	const service = "Azure Resource Manager"
	data, err := c.call(ctx, service, http.MethodGet, c.managementURL+resource.String()+"?api-version="+apiVersion, "",
		http.Header{"Authorization": {"Bearer " + token.secret}})
	if refused, ok := errors.AsType[*StatusError](err); ok && refused.Status == http.StatusNotFound {
		return "", &NotFoundError{resource}
	}
	if err != nil {
		return "", err
	}
	var vm struct {
		ID         string `json:"id"`
		Properties struct {
			VMID string `json:"vmId"`
		} `json:"properties"`
	}
	if err := json.Unmarshal(data, &vm); err != nil {
		return "", fmt.Errorf("%s: the answer is not the JSON of a VM", service)
	}
	if id, err := azure.ParseResourceID(vm.ID); err != nil || id != resource {
		return "", fmt.Errorf("%s: the answer is of another resource than %s", service, resource)
	}
	if !cloudname.IsGUID(vm.Properties.VMID) {
		return "", fmt.Errorf("%s: %s has no vmId", service, resource)
	}
	return vm.Properties.VMID, nil
}

// call sends one request, and returns the answer of a status 200. It follows no redirect: the
// request has a credential.
func (c *Client) call(ctx context.Context, service, method, to, body string, header http.Header) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, to, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	request.Header = header
	response, err := c.transport.RoundTrip(request) // follows no redirect
	if err != nil {
		return nil, fmt.Errorf("%s: %w", service, err)
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode != http.StatusOK {
		return nil, &StatusError{service, response.StatusCode}
	}
	data, err := bounded.ReadAll(response.Body, maxAnswer)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", service, err)
	}
	return data, nil
}
