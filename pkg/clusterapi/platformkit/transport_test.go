// SPDX-License-Identifier: Apache-2.0

package platformkit

import (
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestReadBody(t *testing.T) {
	for _, c := range []struct {
		status, body, says string
		paused             bool
	}{
		{"200 OK", "12345", "", false},
		{"200 OK", "123456", "longer than 5 bytes", false},
		{"204 No Content", "", "204 No Content", false},
		{"301 Moved Permanently", "", "redirects are not followed", false},
		{"401 Unauthorized", "", "the credential is wrong", false},
		{"403 Forbidden", "", "lacks a right", false},
		{"404 Not Found", "secret", "404 Not Found", false},
		{"429 Too Many Requests", "", "too many calls", true},
		{"503 Service Unavailable", "", "503", false},
	} {
		code := 0
		for _, digit := range c.status[:3] {
			code = 10*code + int(digit-'0')
		}
		body, err := ReadBody(&http.Response{StatusCode: code, Status: c.status, Body: io.NopCloser(strings.NewReader(c.body))}, 5)
		switch {
		case c.says == "":
			if err != nil || string(body) != c.body {
				t.Errorf("%s: %s, %v", c.status, body, err)
			}
		case err == nil || !strings.Contains(err.Error(), c.says) || errors.Is(err, ErrPaused) != c.paused || strings.Contains(err.Error(), "secret"):
			t.Errorf("%s: %v", c.status, err)
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// After an answer 429, or 503 with a Retry-After, all calls pause.
func TestTransportPauses(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		after  string
		pause  time.Duration
	}{
		"no":               {200, "5", 0},
		"429":              {429, "", defaultPause},
		"429 with seconds": {429, "3", 3 * time.Second},
		"429 with a date":  {429, "Fri, 31 Dec 1999 23:59:59 GMT", defaultPause},
		"429 below 0":      {429, "-7", defaultPause},
		"429 for years":    {429, "99999999999", maxPause},
		"503":              {503, "", 0},
		"503 with seconds": {503, "4", 4 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := NewBudget(1000, 1000)
			transport := b.Transport(roundTrip(func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: c.status, Header: http.Header{"Retry-After": {c.after}}, Body: http.NoBody}, nil
			}))
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://example.com", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			response, err := transport.RoundTrip(request)
			if err != nil {
				t.Fatal(err)
			}
			_ = response.Body.Close()
			began := time.Now()
			if err := b.Wait(t.Context()); err != nil || time.Since(began) != c.pause {
				t.Errorf("%s: a pause of %s, %v", name, time.Since(began), err)
			}
		})
	}
}

func TestMatch(t *testing.T) {
	form := regexp.MustCompile(`^x://([a-z]+)/([0-9]+)$`)
	if parts, err := Match("x://ab/12", form); err != nil || len(parts) != 2 || parts[0] != "ab" || parts[1] != "12" {
		t.Errorf("got %q, %v", parts, err)
	}
	for _, id := range []string{"", "x://", "x://ab/12\n", " x://ab/12", "x://ab/12/", "X://ab/12", "x://" + strings.Repeat("a", maxProviderID) + "/1"} {
		if _, err := Match(id, form); err == nil {
			t.Errorf("%q has the form", id)
		}
	}
}

func TestParseEndpoint(t *testing.T) {
	if u, err := ParseEndpoint("https://example.com:8443/api"); err != nil || u.Host != "example.com:8443" || u.Path != "/api" {
		t.Errorf("got %v, %v", u, err)
	}
	for _, endpoint := range []string{"", "example.com", "http://example.com", "https://", "https://user:secret@example.com", "https://example.com?x", "https://example.com#x", "https://%"} {
		if _, err := ParseEndpoint(endpoint); err == nil {
			t.Errorf("%q is accepted", endpoint)
		}
	}
}

func TestRoots(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(file, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", "/nonexistent", file} {
		if _, err := Roots(path); err == nil {
			t.Errorf("%q is accepted", path)
		}
	}
}
