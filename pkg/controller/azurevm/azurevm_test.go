// SPDX-License-Identifier: Apache-2.0

package azurevm

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	imitation "github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier/azure"
)

const (
	subscription = "8a205152-b25a-417f-a676-80465535a6c9"
	vmID         = "b1310a36-d400-46f6-82cb-6217df846586"
	tenant       = "00000000-0000-4000-8000-000000000001"
	clientID     = "00000000-0000-4000-8000-000000000002"
	secret       = "access-token-that-is-secret"
	assertion    = "projected-token-that-is-secret"
	machine      = "/subscriptions/" + subscription + "/resourceGroups/MyGroup/providers/Microsoft.Compute/virtualMachines/Worker-0"
	instance     = "/subscriptions/" + subscription + "/resourceGroups/MyGroup/providers/Microsoft.Compute/virtualMachineScaleSets/Pool/virtualMachines/7"
)

func resource(t *testing.T, path string) azure.ResourceID {
	t.Helper()
	id, err := azure.ParseResourceID(path)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// start returns a client of an imitation of Azure, and the services.
func start(t *testing.T) (c *Client, login, management *imitation.Service) {
	t.Helper()
	identity := imitation.Identity{Tenant: tenant, Client: clientID, Assertion: assertion, Token: secret}
	login = imitation.Login(identity)
	management = imitation.Management(identity, imitation.VM{ID: vmID, ResourceID: machine}, imitation.VM{ID: clientID, ResourceID: instance},
		imitation.VM{ID: "no GUID", ResourceID: machine + "1"})
	pool := x509.NewCertPool()
	serve := func(service http.Handler) string {
		server := httptest.NewTLSServer(service)
		t.Cleanup(server.Close)
		pool.AddCert(server.Certificate())
		return server.URL
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(assertion+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{TenantID: tenant, ClientID: clientID, TokenFile: file, LoginURL: serve(login), ManagementURL: serve(management), RootCAs: pool})
	if err != nil {
		t.Fatal(err)
	}
	return c, login, management
}

func token(t *testing.T, c *Client) Token {
	t.Helper()
	token, err := c.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func TestVMID(t *testing.T) {
	c, _, _ := start(t)
	token := token(t, c)
	if left := time.Until(token.Expires); left < 58*time.Minute || left > time.Hour {
		t.Errorf("the token ends in %s", left)
	}
	for path, want := range map[string]string{machine: vmID, instance: clientID} {
		if id, err := c.VMID(t.Context(), token, resource(t, path)); id != want || err != nil {
			t.Errorf("%s: %s, %v", path, id, err)
		}
	}
	missing := resource(t, machine+"2")
	id, err := c.VMID(t.Context(), token, missing)
	if e, ok := errors.AsType[*NotFoundError](err); id != "" || !ok || e.Resource != missing {
		t.Errorf("missing VM: %s, %v", id, err)
	}
	if id, err := c.VMID(t.Context(), token, resource(t, machine+"1")); id != "" || err == nil || !strings.Contains(err.Error(), "no vmId") {
		t.Errorf("VM without a vmId: %s, %v", id, err)
	}
	token.secret = "other"
	if _, err := c.VMID(t.Context(), token, resource(t, machine)); status(err) != http.StatusUnauthorized {
		t.Errorf("another token: %v", err)
	}
}

func status(err error) int {
	if e, ok := errors.AsType[*StatusError](err); ok {
		return e.Status
	}
	return 0
}

func TestServicesFail(t *testing.T) {
	c, login, management := start(t)
	c.timeout = time.Second
	good := token(t, c)
	for name, row := range map[string]struct {
		fault  imitation.Fault
		status int
	}{
		"down": {imitation.Down, 0}, "slow": {imitation.Slow, 0}, "lying": {imitation.Lying, 0}, "flooding": {imitation.Flooding, 0},
		"redirecting": {imitation.Redirecting, http.StatusTemporaryRedirect}, "forbidding": {imitation.Forbidding, http.StatusForbidden},
		"missing": {imitation.Missing, http.StatusNotFound},
	} {
		login.Set(row.fault)
		management.Set(row.fault)
		token, err := c.Token(t.Context())
		if token != (Token{}) || err == nil || status(err) != row.status {
			t.Errorf("%s: %v, %v", name, token, err)
		}
		id, errVM := c.VMID(t.Context(), good, resource(t, machine))
		_, missing := errors.AsType[*NotFoundError](errVM)
		if id != "" || errVM == nil || missing != (row.fault == imitation.Missing) || !missing && status(errVM) != row.status {
			t.Errorf("%s: %s, %v", name, id, errVM)
		}
		for _, err := range []error{err, errVM} {
			if text := fmt.Sprintf("%v %+v %#v", err, err, err); strings.Contains(text, secret) || strings.Contains(text, assertion) {
				t.Errorf("%s: the error has a token: %s", name, text)
			}
		}
	}
}

func TestContextEnds(t *testing.T) {
	c, login, _ := start(t)
	login.Set(imitation.Slow)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := c.Token(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestTokenDoesNotPrint(t *testing.T) {
	c, _, _ := start(t)
	token := token(t, c)
	if text := fmt.Sprintf("%v %+v %#v %s %q", token, token, token, token, token) + fmt.Sprintf("%v %+v", &token, struct{ T Token }{token}); strings.Contains(text, secret) {
		t.Error(text)
	}
}

func TestProjectedToken(t *testing.T) {
	c, _, _ := start(t)
	for name, content := range map[string]string{"another": "other", "empty": "", "too long": strings.Repeat("a", maxAssertion+1)} {
		if err := os.WriteFile(c.tokenFile, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if token, err := c.Token(t.Context()); err == nil {
			t.Errorf("%s: %v", name, token)
		}
	}
	// It is read each time.
	if err := os.WriteFile(c.tokenFile, []byte(assertion), 0o600); err != nil {
		t.Fatal(err)
	}
	token(t, c)
	if err := os.Remove(c.tokenFile); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Token(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// A server whose certificate no configured CA has issued learns nothing.
func TestTLS(t *testing.T) {
	c, _, _ := start(t)
	asked := false
	stranger := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	stranger.StartTLS()
	defer stranger.Close()
	c.transport.TLSClientConfig.RootCAs = x509.NewCertPool()
	c.tokenURL, c.managementURL = stranger.URL, stranger.URL
	if _, err := c.Token(t.Context()); err == nil {
		t.Error("token from a stranger")
	}
	if _, err := c.VMID(t.Context(), Token{}, resource(t, machine)); err == nil || asked {
		t.Errorf("%v, asked: %t", err, asked)
	}
}

func TestAnswers(t *testing.T) {
	body := ""
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(body)) }))
	defer server.Close()
	c, _, _ := start(t)
	c.transport.TLSClientConfig.RootCAs.AddCert(server.Certificate())
	c.tokenURL, c.managementURL = server.URL, server.URL
	for body2, want := range map[string]bool{
		`{"token_type":"Bearer","expires_in":60,"access_token":"a"}`:                                       true,
		`{"token_type":"bearer","expires_in":86400,"access_token":"a"}`:                                    true,
		`{"token_type":"Bearer","expires_in":86401,"access_token":"a"}`:                                    false,
		`{"token_type":"Bearer","expires_in":0,"access_token":"a"}`:                                        false,
		`{"token_type":"Bearer","access_token":"a"}`:                                                       false,
		`{"token_type":"mac","expires_in":60,"access_token":"a"}`:                                          false,
		`{"token_type":"Bearer","expires_in":60,"access_token":""}`:                                        false,
		`{"token_type":"Bearer","expires_in":60,"access_token":"a b"}`:                                     false,
		`{"token_type":"Bearer","expires_in":60,"access_token":"a\n"}`:                                     false,
		`{"token_type":"Bearer","expires_in":60,"access_token":"` + strings.Repeat("a", maxToken+1) + `"}`: false,
		`<html>`: false, ``: false,
	} {
		body = body2
		if _, err := c.Token(t.Context()); (err == nil) != want {
			t.Errorf("%.80s: %v", body, err)
		}
	}
	for body2, want := range map[string]bool{
		`{"id":"` + machine + `","properties":{"vmId":"` + vmID + `"}}`:                  true,
		`{"id":"` + strings.ToUpper(machine) + `","properties":{"vmId":"` + vmID + `"}}`: true,
		`{"id":"` + machine + `1","properties":{"vmId":"` + vmID + `"}}`:                 false,
		`{"properties":{"vmId":"` + vmID + `"}}`:                                         false,
		`{"id":"` + machine + `","properties":{"vmId":"` + strings.ToUpper(vmID) + `"}}`: false,
		`{"id":"` + machine + `","vmId":"` + vmID + `"}`:                                 false,
		`<html>`: false,
	} {
		body = body2
		if id, err := c.VMID(t.Context(), Token{}, resource(t, machine)); (err == nil) != want || (id == vmID) != want {
			t.Errorf("%.80s: %s, %v", body, id, err)
		}
	}
}

func TestConfig(t *testing.T) {
	good := Config{TenantID: tenant, ClientID: clientID, TokenFile: "/token"}
	for name, change := range map[string]func(*Config){
		"unknown cloud":      func(c *Config) { c.Cloud = "Germany" },
		"tenant":             func(c *Config) { c.TenantID = "../common" },
		"client":             func(c *Config) { c.ClientID = "" },
		"no token file":      func(c *Config) { c.TokenFile = "" },
		"login http":         func(c *Config) { c.LoginURL = "http://login.example.com" },
		"login path":         func(c *Config) { c.LoginURL = "https://login.example.com/a" },
		"login user":         func(c *Config) { c.LoginURL = "https://a@login.example.com" },
		"management http":    func(c *Config) { c.ManagementURL = "http://management.example.com" },
		"management query":   func(c *Config) { c.ManagementURL = "https://management.example.com?a" },
		"management no host": func(c *Config) { c.ManagementURL = "https://" },
	} {
		c := good
		change(&c)
		if client, err := New(c); err == nil {
			t.Errorf("%s: made %+v", name, client)
		}
	}
	for cloud, want := range map[azure.Cloud][2]string{
		"":                 {"https://login.microsoftonline.com/", "https://management.azure.com"},
		azure.Public:       {"https://login.microsoftonline.com/", "https://management.azure.com"},
		azure.USGovernment: {"https://login.microsoftonline.us/", "https://management.usgovcloudapi.net"},
		azure.China:        {"https://login.partner.microsoftonline.cn/", "https://management.chinacloudapi.cn"},
	} {
		c := good
		c.Cloud = cloud
		client, err := New(c)
		if err != nil || client.tokenURL != want[0]+tenant+"/oauth2/v2.0/token" || client.managementURL != want[1] || client.scope != want[1]+"/.default" {
			t.Errorf("%s: %+v, %v", cloud, client, err)
		}
	}
}
