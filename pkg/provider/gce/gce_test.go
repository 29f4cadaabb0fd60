// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/google"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/metadata"
)

var theGoogle = sync.OnceValue(func() *google.Google { return google.New("test") })

func someVM() google.VM {
	return google.VM{
		Project: "some-project", ProjectNumber: 123456789012, Zone: "europe-west1-b", Name: "worker-0", ID: "2875949485074006138",
		Attributes: map[string]string{"provider-id": "gce://other/zone/name", "cluster-name": "other"},
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

func TestFactory(t *testing.T) {
	p, err := Factory().New(provider.Settings{ClusterUID: "c"})
	if err != nil || p.(Provider).ClusterUID != "c" || p.Name() != Factory().Name || p.SignerName() != SignerName || !p.Renews() {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := Factory().New(provider.Settings{ClusterUID: "two words"}); err == nil {
		t.Errorf("made %+v for a cluster that cannot be", p)
	}
	if s := p.Caution(); !strings.Contains(s, "169.254.169.254") || !strings.Contains(s, "pod") {
		t.Errorf("cautions: %s", s)
	}
	if v := Factory().Versions; len(v) != 1 || v[0] != attestation.VersionGCE {
		t.Errorf("versions %v", v)
	}
}

func TestProviderID(t *testing.T) {
	vm := someVM()
	if id, err := on(t, theGoogle().Metadata(vm)).ProviderID(t.Context()); err != nil || id != "gce://some-project/europe-west1-b/worker-0" {
		t.Errorf("%q, %v", id, err)
	}
	for what, bend := range map[string]func(*google.VM){
		"no project":        func(vm *google.VM) { vm.Project = "" },
		"no zone":           func(vm *google.VM) { vm.Zone = "" },
		"a zone with parts": func(vm *google.VM) { vm.Zone = "a/b" },
		"no name":           func(vm *google.VM) { vm.Name = "" },
		"a name of lines":   func(vm *google.VM) { vm.Name = "worker-0\n" },
		"not ASCII":         func(vm *google.VM) { vm.Name = "wörker" },
	} {
		vm := someVM()
		bend(&vm)
		if id, err := on(t, theGoogle().Metadata(vm)).ProviderID(t.Context()); err == nil {
			t.Errorf("%s: %q", what, id)
		}
	}
}

// The audience covers the request, and the document has the token as Google returned it.
func TestEvidence(t *testing.T) {
	var asked []*http.Request
	service := theGoogle().Metadata(someVM())
	p := on(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Clone(context.Background()))
		service.ServeHTTP(w, r)
	}))
	r := someRequest()
	document, err := p.Evidence(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	identity, err := attestation.ParseIdentity(attestation.VersionGCE, document)
	if err != nil || identity.ClusterUID != "some-cluster" || strings.Count(string(identity.Statement), ".") != 2 {
		t.Errorf("%+v, %v", identity, err)
	}
	audience := attestation.Binding{
		Version: attestation.VersionGCE, ClusterUID: "some-cluster", SignerName: r.SignerName, Name: r.Name,
		PKCS10: r.PKCS10, Usages: r.Usages, ExpirationSeconds: r.ExpirationSeconds,
	}.Audience()
	if len(asked) != 1 || asked[0].URL.Path != "/computeMetadata/v1/instance/service-accounts/default/identity" ||
		asked[0].URL.Query().Get("audience") != audience || asked[0].URL.Query().Get("format") != "full" {
		t.Errorf("asked %+v", asked)
	}
}

// answer is a metadata service with one answer.
func answer(flavor string, body func(audience string) string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if flavor != "" {
			w.Header().Set("Metadata-Flavor", flavor)
		}
		_, _ = w.Write([]byte(body(r.URL.Query().Get("audience"))))
	})
}

// A token that would be denied is not filed. The error says what the operator can do.
func TestNoEvidence(t *testing.T) {
	key := theGoogle().Key()
	full := func(audience string) string {
		return string(key.Sign(key.Header(), someVM().Claims(audience, true, time.Now())))
	}
	noAccount := someVM()
	noAccount.NoServiceAccount = true
	faulty := func(fault google.Fault) http.Handler {
		s := theGoogle().Metadata(someVM())
		s.Set(fault)
		return s
	}
	if _, err := on(t, answer("Google", full)).Evidence(t.Context(), someRequest()); err != nil {
		t.Fatalf("the answer without a fault: %v", err)
	}
	for what, c := range map[string]struct {
		service    http.Handler
		says, hint string
	}{
		"no service account": {theGoogle().Metadata(noAccount), "status 404", "service account"},
		"not Google's":       {answer("", full), "not Google's", "Google Compute Engine"},
		"another flavor":     {answer("google", full), "not Google's", "Google Compute Engine"},
		"another audience":   {answer("Google", func(a string) string { return full(a + "0") }), "another audience", "169.254.169.254"},
		"format=standard": {answer("Google", func(a string) string {
			return string(key.Sign(key.Header(), someVM().Claims(a, false, time.Now())))
		}), "no instance", "169.254.169.254"},
		"a page":      {answer("Google", func(string) string { return "<html>" }), "not a JWT", "169.254.169.254"},
		"four parts":  {answer("Google", func(a string) string { return full(a) + ".x" }), "not a JWT", "169.254.169.254"},
		"not base64":  {answer("Google", func(string) string { return "a.?.c" }), "base64", "169.254.169.254"},
		"not JSON":    {answer("Google", func(string) string { return "a.bm8.c" }), "not the JSON", "169.254.169.254"},
		"too long":    {answer("Google", func(a string) string { return full(a) + strings.Repeat("x", 64<<10) }), "more than 65536 bytes", ""},
		"down":        {faulty(google.Down), "metadata service", ""},
		"redirecting": {faulty(google.Redirecting), "status 302", ""},
		"failing":     {faulty(google.Failing), "status 500", ""},
	} {
		document, err := on(t, c.service).Evidence(t.Context(), someRequest())
		failed, ok := errors.AsType[*provider.Error](err)
		if !ok || failed.Class != provider.DeviceFailed || !strings.Contains(failed.Error(), c.says) || !strings.Contains(failed.Hint, c.hint) {
			t.Errorf("%s: %s, %+v", what, document, err)
		}
	}
}

// A slow service holds the worker no longer than its context.
func TestSlowService(t *testing.T) {
	s := theGoogle().Metadata(someVM())
	s.Set(google.Slow)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := on(t, s).Evidence(ctx, someRequest()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestNoService(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	p := Provider{Metadata: metadata.Client{Address: server.Listener.Addr().String()}}
	server.Close()
	_, err := p.Evidence(t.Context(), someRequest())
	if failed, ok := errors.AsType[*provider.Error](err); !ok || failed.Class != provider.NoDevice {
		t.Errorf("%v", err)
	}
}
