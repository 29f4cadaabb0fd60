// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	standard "log"
	"os"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/hostiletext"
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
		for _, problem := range hostiletext.Find(out.String()) {
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

// Nor does text of a peer add a line to what verify and inventory print.
func TestHostileTextOfCommands(t *testing.T) {
	hostile, out := hostiletext.For("name"), &bytes.Buffer{}
	(&offlineJudge{out: out}).print("request %s", hostile)
	report := &inventoryReport{}
	hostiletext.Plant(report)
	report.print(out)
	diff := &inventoryDiff{}
	hostiletext.Plant(diff)
	diff.print(out)
	if out.Len() < 1000 {
		t.Errorf("little was printed: %q", out)
	}
	for line := range strings.Lines(out.String()) {
		for _, problem := range hostiletext.Find(line) {
			if !strings.HasPrefix(problem, "a forged field") { // only a log has fields
				t.Error(problem)
			}
		}
	}
}
