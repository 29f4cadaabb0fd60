// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
)

// Each failed check has its reason, and ends readiness by its kind: a source that has been usable
// once does not.
func TestReadyz(t *testing.T) {
	var cache, ca, trust error
	checks := readyz{
		newCheck("ca", once, func(context.Context) error { return ca }),
		newCheck("cache", always, func(context.Context) error { return cache }),
		newCheck("sources", never, func(context.Context) error { return trust }),
	}
	asks := func(query string, code int, want string) {
		t.Helper()
		answer := httptest.NewRecorder()
		checks.ServeHTTP(answer, httptest.NewRequest("GET", "/readyz"+query, nil))
		if answer.Code != code || answer.Body.String() != want {
			t.Errorf("%s: %d, %q", query, answer.Code, answer.Body)
		}
	}
	ca = errors.New("no\nSecret")
	asks("", 500, "[-]ca failed: no Secret\n[+]cache ok\n[+]sources ok\nreadyz check failed\n")
	asks("?exclude=ca&exclude=none", 200, "ok")
	asks("?exclude=ca&verbose", 200, "[+]ca excluded: ok\n[+]cache ok\n[+]sources ok\nreadyz check passed\n")
	trust = errors.New(strings.Repeat("x", 10_000))
	ca = nil
	asks("", 200, "[+]ca ok\n[+]cache ok\n[!]sources failed, which does not end readiness: "+strings.Repeat("x", maxReason)+" ...\nreadyz check passed\n")
	trust, ca = nil, errors.New("expired")
	asks("", 200, "[!]ca failed, which does not end readiness: expired\n[+]cache ok\n[+]sources ok\nreadyz check passed\n")
	ca, cache = nil, errors.New("not filled yet")
	asks("", 500, "[+]ca ok\n[-]cache failed: not filled yet\n[+]sources ok\nreadyz check failed\n")
	cache = nil
	asks("", 200, "ok")
	asks("?verbose", 200, "[+]ca ok\n[+]cache ok\n[+]sources ok\nreadyz check passed\n")
}

// A check that hangs fails in time for the probe.
func TestReadyzIsBounded(t *testing.T) {
	checks := readyz{newCheck("ca", once, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })}
	answer, began := httptest.NewRecorder(), time.Now()
	checks.ServeHTTP(answer, httptest.NewRequest("GET", "/readyz", nil))
	if answer.Code != 500 || time.Since(began) > checkTimeout+time.Second {
		t.Errorf("%d after %s", answer.Code, time.Since(began))
	}
}

// Each entry is a line of JSON, with one of three levels. What -v does not enable is left out.
func TestJSONLog(t *testing.T) {
	t.Cleanup(klog.ClearLogger)
	var out bytes.Buffer
	format := logJSON
	format.apply(&out, 1)
	log := klog.Background().WithName("sources")
	log.Info("plain", "after", 5*time.Second, "object", klog.KRef("n", "o"))
	log.V(1).Info("verbose")
	log.V(2).Info("too verbose")
	log.Error(errors.New("a\nproblem"), "bad")
	klog.Infof("without %s", "context")
	var lines []map[string]any
	for line := range bytes.Lines(out.Bytes()) {
		entry := map[string]any{}
		if err := json.Unmarshal(line, &entry); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		delete(entry, "time")
		lines = append(lines, entry)
	}
	got, err := json.Marshal(lines)
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"after":"5s","level":"INFO","logger":"sources","msg":"plain","object":{"name":"o","namespace":"n"}},` +
		`{"level":"DEBUG","logger":"sources","msg":"verbose"},` +
		`{"err":"a\nproblem","level":"ERROR","logger":"sources","msg":"bad"},` +
		`{"level":"INFO","msg":"without context"}]`
	if string(got) != want {
		t.Errorf("%s", got)
	}
	if err := format.Set("xml"); err == nil {
		t.Error("there is a format xml")
	}
}
