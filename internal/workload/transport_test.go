// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

// What stands in the place of an API server can neither fill our memory nor send us elsewhere.
func TestAnswersAreBounded(t *testing.T) {
	t.Parallel()
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a redirect was followed") }))
	defer elsewhere.Close()
	endless := func(w http.ResponseWriter, status int, most int64) {
		w.WriteHeader(status)
		chunk := []byte(strings.Repeat("x", 1<<16))
		for sent := int64(0); sent <= most; sent += int64(len(chunk)) {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/redirect":
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		case "/endless":
			endless(w, http.StatusOK, 2*maxBody)
		case "/refused":
			endless(w, http.StatusForbidden, maxBody)
		default:
			_, _ = io.WriteString(w, "{}")
		}
	}))
	defer server.Close()
	config := WithBounds(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{GroupVersion: &corev1.SchemeGroupVersion, NegotiatedSerializer: scheme.Codecs}})
	c, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	for path, says := range map[string]string{"/": "", "/redirect": "redirects", "/endless": "too long", "/refused": ""} {
		body, err := c.Get().AbsPath(path).DoRaw(t.Context())
		switch {
		case path == "/refused" && (err == nil || len(err.Error()) > 2*maxErrorBody || len(body) > maxErrorBody):
			t.Errorf("%s: %d bytes, an error of %v", path, len(body), err == nil)
		case path == "/refused":
		case (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says):
			t.Errorf("%s: %d bytes, %v", path, len(body), err)
		}
	}
}
