// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"bytes"
	"context"
	"encoding/asn1"
	"encoding/base64"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/azure"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

var signer = sync.OnceValue(func() azure.Authority { return azure.NewRoot("Root").Signer(nil, "metadata.azure.com") })

const theSubscription = "8a205152-b25a-417f-a676-80465535a6c9"

func someVM() azure.VM {
	return azure.VM{
		ID: "b1310a36-d400-46f6-82cb-6217df846586", Subscription: theSubscription,
		ResourceID: "/subscriptions/" + theSubscription + "/resourceGroups/MyGroup/providers/Microsoft.Compute/virtualMachines/Worker-0",
	}
}

// on returns the provider on a machine with this metadata service.
func on(t *testing.T, service http.Handler) Provider {
	t.Helper()
	server := httptest.NewServer(service)
	t.Cleanup(server.Close)
	return Provider{Metadata: metadata.Client{Address: server.Listener.Addr().String()}, ClusterUID: "some-cluster"}
}

func someRequest() provider.Request {
	lifetime := int32(86400)
	return provider.Request{
		PKCS10: []byte("PKCS#10"), Name: "node-csr-a", SignerName: SignerName,
		Usages: []string{"client auth"}, ExpirationSeconds: &lifetime,
	}
}

func someNonce() string {
	r := someRequest()
	return attestation.Binding{
		Version: attestation.VersionAzure, ClusterUID: "some-cluster", SignerName: r.SignerName, Name: r.Name,
		PKCS10: r.PKCS10, Usages: r.Usages, ExpirationSeconds: r.ExpirationSeconds,
	}.Alphanumeric()
}

func TestFactory(t *testing.T) {
	p, err := Factory().New(provider.Settings{ClusterUID: "c"})
	if err != nil || p.(Provider).ClusterUID != "c" || p.Name() != Factory().Name || p.SignerName() != SignerName || !p.Renews() {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := Factory().New(provider.Settings{ClusterUID: "two words"}); err == nil {
		t.Errorf("made %+v for a cluster that cannot be", p)
	}
	if s := p.Caution(); !strings.Contains(s, "169.254.169.254") || !strings.Contains(s, "pod") {
		t.Errorf("caution %q", s)
	}
}

func TestEvidence(t *testing.T) {
	document, err := on(t, azure.Metadata(someVM(), signer())).Evidence(t.Context(), someRequest())
	if err != nil {
		t.Fatal(err)
	}
	identity, err := attestation.ParseIdentity(attestation.VersionAzure, document)
	if err != nil {
		t.Fatal(err)
	}
	if identity.ClusterUID != "some-cluster" || !bytes.Contains(identity.Statement, []byte(`"nonce":"`+someNonce()+`"`)) {
		t.Errorf("%s: %q", identity.ClusterUID, identity.Statement)
	}
}

// answers is a metadata service that answers with anything.
type answers func(nonce string) string

func (a answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = w.Write([]byte(a(r.URL.Query().Get("nonce")))) // the client may be gone
}

// attested returns an answer with a document.
func attested(der []byte) string {
	return `{"encoding":"pkcs7","signature":"` + base64.StdEncoding.EncodeToString(der) + `"}`
}

func TestEvidenceRefused(t *testing.T) {
	good := func(nonce string) azure.Document { return signer().Sign(someVM().Content(nonce, time.Now())) }
	for name, row := range map[string]struct {
		service http.Handler
		want    string
	}{
		"as it should be":  {answers(func(n string) string { return attested(good(n).DER()) }), ""},
		"no JSON":          {answers(func(string) string { return "document" }), "not the JSON"},
		"encoding":         {answers(func(n string) string { return strings.Replace(attested(good(n).DER()), "pkcs7", "pkcs12", 1) }), "pkcs12"},
		"no base64":        {answers(func(string) string { return `{"encoding":"pkcs7","signature":"%"}` }), "base64"},
		"no PKCS#7":        {answers(func(string) string { return attested([]byte("document")) }), "PKCS#7"},
		"bytes at the end": {answers(func(n string) string { return attested(append(good(n).DER(), 0)) }), "PKCS#7"},
		"detached":         {answers(func(n string) string { d := good(n); d.Detached = true; return attested(d.DER()) }), "PKCS#7"},
		"content":          {answers(func(string) string { return attested(signer().Sign("content").DER()) }), "content is not JSON"},
		"no nonce":         {answers(func(string) string { return attested(good("").DER()) }), "another nonce"},
		"no VM": {answers(func(n string) string {
			return attested(signer().Sign(strings.Replace(someVM().Content(n, time.Now()), "vmId", "id", 1)).DER())
		}), "names no VM"},
		"no such service": {http.NotFoundHandler(), "status 404"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			document, err := on(t, row.service).Evidence(t.Context(), someRequest())
			if row.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			failed, ok := errors.AsType[*provider.Error](err)
			if document != nil || !ok || failed.Class != provider.DeviceFailed || !strings.Contains(err.Error(), row.want) {
				t.Errorf("%q, %v, want %q", document, err, row.want)
			}
		})
	}
}

func TestServiceFails(t *testing.T) {
	for name, fault := range map[string]azure.Fault{
		"down": azure.Down, "lying": azure.Lying, "redirecting": azure.Redirecting, "forbidding": azure.Forbidding,
		"missing": azure.Missing, "flooding": azure.Flooding,
	} {
		service := azure.Metadata(someVM(), signer())
		service.Set(fault)
		p := on(t, service)
		document, err := p.Evidence(t.Context(), someRequest())
		if failed, ok := errors.AsType[*provider.Error](err); document != nil || !ok || failed.Class != provider.DeviceFailed {
			t.Errorf("%s: %q, %v", name, document, err)
		}
		if fault == azure.Lying { // only about the nonce
			continue
		}
		if id, err := p.ProviderID(t.Context()); id != "" || err == nil {
			t.Errorf("%s: %q, %v", name, id, err)
		}
	}
	service := azure.Metadata(someVM(), signer())
	service.Set(azure.Slow)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := on(t, service).Evidence(ctx, someRequest()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("slow: %v", err)
	}
	nobody := Provider{Metadata: metadata.Client{Address: "127.0.0.1:1"}}
	if _, err := nobody.Evidence(t.Context(), someRequest()); err == nil || errorClass(err) != provider.NoDevice {
		t.Errorf("nobody listens: %v", err)
	}
}

func errorClass(err error) provider.Class {
	if failed, ok := errors.AsType[*provider.Error](err); ok {
		return failed.Class
	}
	return 0
}

func TestProviderID(t *testing.T) {
	const subscription = "/subscriptions/" + theSubscription
	for resource, want := range map[string]string{
		subscription + "/resourceGroups/MyGroup/providers/Microsoft.Compute/virtualMachines/Worker-0":                 "azure://" + subscription + "/resourceGroups/mygroup/providers/Microsoft.Compute/virtualMachines/Worker-0",
		subscription + "/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/Pool/virtualMachines/0": "azure://" + subscription + "/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/Pool/virtualMachines/0",
		subscription + "/resourcegroups/G/providers/microsoft.compute/virtualMachines/w":                              "azure://" + subscription + "/resourcegroups/g/providers/microsoft.compute/virtualMachines/w",
		"": "",
		subscription + "/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/":    "",
		subscription + "/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a b": "",
		subscription + "/resourceGroups/g/providers/Microsoft.Storage/virtualMachines/w":   "",
		subscription + "/resourceGroups//providers/Microsoft.Compute/virtualMachines/w":    "",
	} {
		vm := someVM()
		vm.ResourceID = resource
		id, err := on(t, azure.Metadata(vm, signer())).ProviderID(t.Context())
		if id != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", resource, id, err, want)
		}
	}
	if id, err := on(t, answers(func(string) string { return "<html>" })).ProviderID(t.Context()); err == nil {
		t.Errorf("accepted HTML: %s", id)
	}
}

// Whatever the service writes, what is filed is one value of ASN.1.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(attested(signer().Sign(someVM().Content(someNonce(), time.Now())).DER())))
	f.Fuzz(func(t *testing.T, answer []byte) {
		document, err := decode(answer)
		if err != nil || check(document, someNonce()) != nil {
			return
		}
		var raw asn1.RawValue
		if rest, err := asn1.Unmarshal(document, &raw); err != nil || len(rest) > 0 {
			t.Errorf("accepted %x", document)
		}
	})
}
