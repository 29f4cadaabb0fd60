// SPDX-License-Identifier: Apache-2.0

package ec2role

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/aws"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation/stscall"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

const (
	instanceID      = "i-0123456789abcdef0"
	sessionPath     = "/latest/api/token"
	credentialsPath = "/latest/meta-data/" + credentialsCategory
	regionPath      = "/latest/meta-data/" + regionCategory
)

func someInstance(t *testing.T) *aws.Instance {
	t.Helper()
	return &aws.Instance{AWS: aws.New(t), Partition: "aws", Account: "123456789012", Region: "eu-west-1", Zone: "eu-west-1a", ID: instanceID}
}

// providerOf returns the provider on an instance.
func providerOf(t *testing.T, metadataService http.Handler) Provider {
	t.Helper()
	server := httptest.NewServer(metadataService)
	t.Cleanup(server.Close)
	return Provider{Metadata: metadata.Client{Address: server.Listener.Addr().String()}, ClusterUID: "some-cluster"}
}

func someRequest() provider.Request {
	return provider.Request{PKCS10: []byte("PKCS#10"), Name: "node-csr-a", SignerName: SignerName, Usages: []string{"client auth"}}
}

// TestEvidence shows what is filed: the statement, without the secret key. That STS accepts it,
// verifier/ec2role tests.
func TestEvidence(t *testing.T) {
	instance := someInstance(t)
	credentials := instance.Credentials()
	instance.Override = map[string]string{credentialsPath: credentials.Metadata()}
	data, err := providerOf(t, instance).Evidence(t.Context(), someRequest())
	if err != nil {
		t.Fatal(err)
	}
	identity, err := attestation.ParseIdentity(attestation.VersionEC2Role, data)
	if err != nil || identity.ClusterUID != "some-cluster" {
		t.Fatalf("%+v, %v", identity, err)
	}
	if strings.Contains(string(identity.Statement), credentials.SecretAccessKey) {
		t.Error("the secret key is filed")
	}
	s, err := stscall.Parse(identity.Statement)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := s.Time()
	if age := time.Since(signed); err != nil || age < 0 || age > time.Minute {
		t.Errorf("signed %s ago, %v", age, err)
	}
	if s.Region != "eu-west-1" || s.AccessKeyID != credentials.AccessKeyID || s.SecurityToken != credentials.SessionToken {
		t.Errorf("%+v", s)
	}
}

func TestEvidenceFails(t *testing.T) {
	credentials := func(change func(map[string]any)) string {
		document := map[string]any{
			"Code": "Success", "AccessKeyId": "ASIAEXAMPLEEXAMPLE12", "SecretAccessKey": "a-secret", "Token": "dG9rZW4=",
			"Expiration": time.Now().Add(time.Hour).UTC().Format(time.RFC3339),
		}
		change(document)
		data, err := json.Marshal(document)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for _, c := range []struct {
		name, path, answer string
		fails              bool
	}{
		{"good", credentialsPath, credentials(func(map[string]any) {}), false},
		{"no JSON", credentialsPath, "a-secret", true},
		{"secret of another type", credentialsPath, credentials(func(d map[string]any) { d["SecretAccessKey"] = []string{"a-secret"} }), true},
		{"failed", credentialsPath, credentials(func(d map[string]any) { d["Code"] = "AssumeRoleUnauthorizedAccess" }), true},
		{"no secret key", credentialsPath, credentials(func(d map[string]any) { d["SecretAccessKey"] = "" }), true},
		{"expired", credentialsPath, credentials(func(d map[string]any) { d["Expiration"] = "2026-01-01T00:00:00Z" }), true},
		{"no expiration", credentialsPath, credentials(func(d map[string]any) { delete(d, "Expiration") }), true},
		{"long-lived key", credentialsPath, credentials(func(d map[string]any) { d["AccessKeyId"] = "AKIAEXAMPLEEXAMPLE12" }), true},
		{"no token", credentialsPath, credentials(func(d map[string]any) { d["Token"] = "" }), true},
		{"token with a line end", credentialsPath, credentials(func(d map[string]any) { d["Token"] = "dG9r\nZW4=" }), true},
		{"no region", regionPath, "", true},
		{"host as region", regionPath, "eu-west-1.example.com/", true},
	} {
		instance := someInstance(t)
		instance.Override = map[string]string{c.path: c.answer}
		data, err := providerOf(t, instance).Evidence(t.Context(), someRequest())
		if (err != nil) != c.fails || (err != nil && data != nil) {
			t.Errorf("%s: %q, %v", c.name, data, err)
		}
		if err == nil {
			continue
		}
		if _, ok := errors.AsType[*provider.Error](err); !ok || strings.Contains(err.Error(), "a-secret") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestNoRole is for an instance without the role, and for a metadata service that wants no session.
func TestNoRole(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"no session": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "", http.StatusForbidden) },
		"no role": func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != sessionPath {
				http.NotFound(w, r)
			}
		},
	} {
		p := providerOf(t, handler)
		_, err := p.Evidence(t.Context(), someRequest())
		if _, ok := errors.AsType[*metadata.StatusError](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
		if id, err := p.ProviderID(t.Context()); err == nil {
			t.Errorf("%s: provider ID %s", name, id)
		}
	}
}

func TestNoMetadataService(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := Provider{Metadata: metadata.Client{Address: listener.Addr().String()}}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = p.Evidence(t.Context(), someRequest())
	if failed, ok := errors.AsType[*provider.Error](err); !ok || failed.Class != provider.NoDevice {
		t.Errorf("%v", err)
	}
}

func TestProviderID(t *testing.T) {
	if id, err := providerOf(t, someInstance(t)).ProviderID(t.Context()); err != nil || id != "aws:///eu-west-1a/"+instanceID {
		t.Errorf("%s, %v", id, err)
	}
}

func TestFactory(t *testing.T) {
	f := Factory()
	p, err := f.New(provider.Settings{ClusterUID: "some-cluster"})
	if err != nil || p.Name() != f.Name || p.SignerName() != SignerName || !p.Renews() || !strings.Contains(p.Caution(), "hop limit") {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := f.New(provider.Settings{ClusterUID: "a b"}); err == nil {
		t.Error("a malformed cluster UID is accepted")
	}
}
