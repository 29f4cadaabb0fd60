// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"
)

// A stranger who reaches the port gets no detail, and causes no work: all callers share one run of
// the checks, whatever they ask for and however early they leave.
func TestReadyzDoesNoWorkForStrangers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		ready := newReadyz(logr.Discard(), newCheck("ca", once, func(ctx context.Context) error {
			runs++
			return cmp.Or(ctx.Err(), errors.New("secret node-attestation-ca: not found"))
		}))
		gone, leave := context.WithCancel(t.Context())
		leave()
		for round := range 3 {
			var callers sync.WaitGroup
			for range 100 {
				for _, query := range []string{"", "?verbose", "?exclude=none", "/ca"} {
					callers.Go(func() {
						answer := httptest.NewRecorder()
						ready.ServeHTTP(answer, httptest.NewRequestWithContext(gone, "GET", "/readyz"+query, nil))
						if answer.Code != http.StatusInternalServerError || answer.Body.String() != "not ready\n" {
							t.Errorf("%q: %d, %q", query, answer.Code, answer.Body)
						}
					})
				}
			}
			callers.Wait()
			if runs != round+1 {
				t.Errorf("round %d: the checks ran %d times", round, runs)
			}
			time.Sleep(unreadyAge)
		}
	})
}

// A failed check ends readiness by its kind: a source that has been usable once does not. The log
// has the reasons, once for each change of the checks that fail.
func TestReadyz(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cache, ca error
		var log []string
		logger := funcr.New(func(_, line string) { log = append(log, line) }, funcr.Options{})
		ready := newReadyz(logger,
			newCheck("cache", always, func(context.Context) error { return cache }),
			newCheck("ca", once, func(context.Context) error { return ca }),
		)
		asks := func(code int, logged string) {
			t.Helper()
			time.Sleep(readinessAge)
			log = nil
			answer := httptest.NewRecorder()
			ready.ServeHTTP(answer, httptest.NewRequest("GET", "/readyz", nil))
			if answer.Code != code || strings.Join(log, "\n") != logged {
				t.Errorf("%d, %q", answer.Code, log)
			}
		}
		ca = errors.New("no\nSecret" + strings.Repeat("x", 10_000))
		asks(500, `"level"=0 "msg"="readiness" "ready"=false "blocking"=["ca"] "reasons"=["ca: no Secret`+strings.Repeat("x", maxReason-len("no Secret"))+` ..."]`)
		ca = errors.New("another")
		asks(500, "")
		ca = nil
		asks(200, `"level"=0 "msg"="readiness" "ready"=true "blocking"=[] "reasons"=[]`)
		ca = errors.New("expired")
		asks(200, "")
		cache = errors.New("not filled yet")
		asks(500, `"level"=0 "msg"="readiness" "ready"=false "blocking"=["cache"] "reasons"=["cache: not filled yet"]`)
	})
}

// A check that hangs fails in time for the probe, and no other check fails with it.
func TestReadyzIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ready := newReadyz(logr.Discard(),
			newCheck("ca", once, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }),
			newCheck("inventory", always, func(ctx context.Context) error { return ctx.Err() }),
		)
		if ready.ready() || time.Since(began) != checkTimeout || !slices.Equal(ready.blocking, []string{"ca"}) {
			t.Errorf("%q after %s", ready.blocking, time.Since(began))
		}
	})
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
