// SPDX-License-Identifier: Apache-2.0

package nodeaccess

import (
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// asking returns an Access to a fake API server with this answer, and the server's last request.
func asking(t *testing.T, status int, body string) (Access, *string) {
	t.Helper()
	asked := ""
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		content, _ := io.ReadAll(r.Body)
		asked = strings.TrimSpace(r.Method + " " + r.URL.RequestURI() + " " + r.Header.Get("Content-Type") + " " + string(content))
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	return Access{Config: &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}}, &asked
}

func TestAnnouncement(t *testing.T) {
	const entry = `{"kind":"ConfigMap","data":{"renewals.json":"{\"version\":1,\"renewals\":[{\"name\":\"x\",\"issuedBefore\":\"2026-11-20T12:00:00Z\",\"all\":true,\"start\":\"2026-11-20T12:00:00Z\"}]}"}}`
	for name, c := range map[string]struct {
		status   int
		body     string
		renewals int    // -1: no announcement
		says     string // empty: no error
	}{
		"one":         {200, entry, 1, ""},
		"none":        {200, `{"kind":"ConfigMap"}`, 0, ""},
		"404":         {404, `{}`, -1, ""},
		"403":         {403, `{}`, -1, ""},
		"500":         {500, `{"message":"no\nleader"}`, -1, "kube-public/node-attestation-renewal: 500: no leader"},
		"502":         {502, `<html>`, -1, "502 Bad Gateway"},
		"malformed":   {200, strings.Replace(entry, "version", "v", 1), -1, "version 0"},
		"of a proxy":  {200, `<html>`, -1, "not a ConfigMap"},
		"endless":     {200, `{"kind":"ConfigMap","x":"` + strings.Repeat("x", maxConfigMap) + `"}`, -1, "at most"},
		"the longest": {200, `{"kind":"ConfigMap","data":{"renewals.json":"` + strings.Repeat(`\u0020`, attestation.MaxAnnouncement-2) + `{}"}}`, -1, "version 0"},
	} {
		t.Run(name, func(t *testing.T) {
			to, asked := asking(t, c.status, c.body)
			announced, err := to.Announcement(t.Context())
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %q", err, c.says)
			}
			if err == nil && (announced == nil) != (c.renewals < 0) || announced != nil && err == nil && len(announced.Renewals) != c.renewals {
				t.Errorf("announced %+v", announced)
			}
			if *asked != "GET /api/v1/namespaces/kube-public/configmaps/node-attestation-renewal" {
				t.Errorf("asked %q", *asked)
			}
		})
	}
}

func TestWritesToTheNode(t *testing.T) {
	to, asked := asking(t, 200, `{"kind":"Node"}`)
	if err := to.Annotate(t.Context(), "a.example.com", "k", `v"`); err != nil || *asked != `PATCH /api/v1/nodes/a.example.com application/merge-patch+json {"metadata":{"annotations":{"k":"v\""}}}` {
		t.Errorf("%v, asked %q", err, *asked)
	}
	if err := to.TryWrite(t.Context(), "a"); err != nil || *asked != `PATCH /api/v1/nodes/a?dryRun=All application/merge-patch+json {}` {
		t.Errorf("%v, asked %q", err, *asked)
	}
	to, _ = asking(t, 403, `{"message":"this machine is \u001b[1msuspended"}`)
	for _, err := range []error{to.Annotate(t.Context(), "a", "k", "v"), to.TryWrite(t.Context(), "a")} {
		var refused *StatusError
		if !errors.As(err, &refused) || refused.Status != 403 || strings.Contains(refused.Message, "\x1b") || !strings.Contains(err.Error(), "suspended") {
			t.Errorf("%v", err)
		}
	}
}
