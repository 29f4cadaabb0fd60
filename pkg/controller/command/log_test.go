// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	standard "log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/hostiletext"
)

// Text of a peer neither ends an entry of the log nor begins one, in each form in which our code,
// client-go and controller-runtime log it. The klog state is global, so this test is not parallel.
func TestHostileTextInTheLog(t *testing.T) {
	defer klog.ClearLogger()
	defer standard.SetFlags(standard.Flags())
	defer standard.SetOutput(standard.Writer())
	object := &certificatesv1.CertificateSigningRequest{}
	hostiletext.Plant(object)
	name := hostiletext.For("name")
	for _, format := range []logFormat{logText, logJSON} {
		var out bytes.Buffer
		format.apply(&out, 0)
		log, entries := klog.Background(), 0
		for _, write := range []func(){
			func() { log.Info("decided", "request", name, "raw", []byte(name), "list", []string{name}) },
			func() { log.WithValues("request", name).WithName("queue").Error(errors.New(name), name) },
			func() { log.Info("event", "object", object, "map", map[string]string{name: name}) },
			func() { log.Info("written", "key", types.NamespacedName{Namespace: name, Name: name}) },
			func() { log.Error(fmt.Errorf("%w", os.ErrNotExist), "lines", "text", "one\ntwo\nthree") },
			func() { klog.Infof("unstructured %s", name) },
			func() { klog.ErrorS(errors.New(name), name, "request", name) },
			func() { standard.Printf("http: TLS handshake error: %s", name) },
		} {
			write()
			entries++
		}
		for _, problem := range hostiletext.FindUnquoted(out.String()) {
			t.Errorf("%s: %s", format, problem)
		}
		if lines := strings.Count(out.String(), "\n"); lines != entries {
			t.Errorf("%s: %d entries are %d lines:\n%s", format, entries, lines, out.String())
		}
		if format != logJSON {
			continue
		}
		for line := range strings.Lines(out.String()) {
			var entry map[string]any
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				t.Errorf("%v: %s", err, line)
			}
			if request, there := entry["request"]; there && request != name {
				t.Errorf("the request's name became %q", request)
			}
		}
	}
}

// A peer's text of any length makes a short entry: a workload cluster's API server answers Cluster
// API's ClusterCache, whose answers have no limit. Warnings of API servers are not logged at all.
func TestLongTextInTheLog(t *testing.T) {
	defer klog.ClearLogger()
	defer standard.SetFlags(standard.Flags())
	defer standard.SetOutput(standard.Writer())
	defer rest.SetDefaultWarningHandlerWithContext(rest.WarningLogger{})
	warning := `299 - "` + strings.Repeat("\u202e", 100) + `"`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Warning", warning) }))
	defer server.Close()
	client, err := rest.UnversionedRESTClientFor(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{
		GroupVersion: &certificatesv1.SchemeGroupVersion, NegotiatedSerializer: scheme.Codecs,
	}})
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat(hostiletext.For("answer"), 10_000)
	for _, format := range []logFormat{logText, logJSON} {
		var out bytes.Buffer
		format.apply(&out, 0)
		for name, write := range map[string]func(log klog.Logger){
			"error":        func(log klog.Logger) { log.Error(fmt.Errorf("connect: %w", errors.New(long)), "Connect failed") },
			"cause":        func(log klog.Logger) { log.Info("failed", "cause", errors.New(long)) },
			"value":        func(log klog.Logger) { log.Info("decided", "request", long) },
			"values":       func(log klog.Logger) { log.WithValues("request", long).Info("decided") },
			"name":         func(log klog.Logger) { log.Info("reconciled", "object", types.NamespacedName{Name: long}) },
			"message":      func(log klog.Logger) { log.Info(long) },
			"unstructured": func(klog.Logger) { klog.Error(long) },
			"standard":     func(klog.Logger) { standard.Print(long) },
			"warning": func(klog.Logger) {
				if err := client.Get().AbsPath("/").Do(t.Context()).Error(); err != nil {
					t.Error(err)
				}
				if out.Len() > 0 {
					t.Errorf("%s: a warning is logged: %s", format, &out)
				}
			},
		} {
			out.Reset()
			write(klog.Background())
			if out.Len() > 10*maxText || strings.Count(out.String(), "\n") > 1 || format == logJSON && out.Len() > 0 && !json.Valid(out.Bytes()) {
				t.Errorf("%s, %s: an entry of %d bytes: %.300s", format, name, out.Len(), &out)
			}
		}
	}
}

// Nor does text of a peer add a line to what verify and inventory print.
func TestHostileTextOfCommands(t *testing.T) {
	hostile, out := hostiletext.For("name"), &bytes.Buffer{}
	(&offlineJudge{out: out}).print("request %s", hostile)
	report := &inventoryReport{}
	hostiletext.Plant(report)
	report.print(out)
	if out.Len() < 1000 {
		t.Errorf("little was printed: %q", out)
	}
	for _, problem := range hostiletext.Find(out.String()) {
		t.Error(problem)
	}
}
