// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/util/certificate"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// A whole enrolment starts without files. It takes one POST and one WATCH, and the API server
// accepts the certificate. The next run uses the cache.
func TestFirstCertificate(t *testing.T) {
	n := newNode(t)
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	first := n.run(t)
	if first.Code != 0 {
		t.Fatalf("exit code %d: %s", first.Code, first.Stderr)
	}
	if got := n.whoami(t, first); got != "system:node:"+n.name {
		t.Errorf("the API server takes it for %q", got)
	}
	if !strings.Contains(first.Stderr, "provider insecure sends no evidence") {
		t.Errorf("the operator is not warned: %q", first.Stderr)
	}
	t.Logf("first certificate after %s", first.Took.Round(time.Millisecond))

	events, err := n.AwaitAudit(t.Context(), mark, func(events []testbed.AuditEvent) bool { return len(ofPlugin(events, "watch")) > 0 })
	if err != nil {
		t.Fatal(err)
	}
	for verb, want := range map[string]int{"create": 1, "watch": 1, "get": 0, "list": 0} {
		if got := len(ofPlugin(events, verb)); got != want {
			t.Errorf("%d requests %q, want %d", got, verb, want)
		}
	}

	requests := n.requests(t)
	if len(requests) != 1 {
		t.Fatalf("%d requests were filed", len(requests))
	}
	filed, err := attestation.Parse(requests[0].Spec.Request)
	if err != nil || filed.Provider != "insecure" || string(filed.Data) != `{"version":"insecure/v1"}` {
		t.Errorf("filed: %q %q, %v", filed.Provider, filed.Data, err)
	}

	harness.WorkerEnds(t, n.dir)
	before := n.snapshot(t)
	second := n.run(t)
	if second.Code != 0 || second.Stdout != first.Stdout || second.Stderr != "" {
		t.Errorf("the cached run differs: exit code %d, stderr %q", second.Code, second.Stderr)
	}
	if after := n.snapshot(t); after != before {
		t.Errorf("the cached run changed the directory:\n%s\nto\n%s", before, after)
	}
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests after the cached run", got)
	}
	t.Logf("cached run after %s", second.Took.Round(100*time.Microsecond))
}

// ofPlugin returns the requests for CertificateSigningRequests of the plugin with that verb, each
// once.
func ofPlugin(events []testbed.AuditEvent, verb string) []testbed.AuditEvent {
	seen := map[string]bool{}
	var found []testbed.AuditEvent
	for _, e := range events {
		ours := strings.HasPrefix(e.UserAgent, "kubelet-authenticator/") || strings.HasPrefix(e.UserAgent, "testplugin/")
		if ours && e.Resource == "certificatesigningrequests" && e.Verb == verb && !seen[e.ID] {
			seen[e.ID] = true
			found = append(found, e)
		}
	}
	return found
}

// snapshot describes the directory's files, with content and time of change, but for the worker's
// log.
func (n *node) snapshot(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	entries, err := os.ReadDir(n.dir.Path())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(n.dir.File(e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s %s %s %d bytes\n", e.Name(), info.Mode(), info.ModTime().Format(time.RFC3339Nano), len(data))
	}
	return out.String()
}

// client-go's own store reads the directory, and the certificate in it is the one that is printed.
func TestFileStoreReadsTheDirectory(t *testing.T) {
	n := newNode(t)
	r := n.enrol(t)
	store, err := certificate.NewFileStore("kubelet-authenticator", n.dir.Path(), n.dir.Path(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	current, err := store.Current()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(current.Leaf.Raw, r.Leaf.Raw) {
		t.Error("the store reads another certificate")
	}
	before, err := os.ReadFile(n.dir.File(cache.CurrentFile))
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		n.run(t)
	}
	after, err := os.ReadFile(n.dir.File(cache.CurrentFile))
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file changed though nothing was rotated: %v", err)
	}
}

// kubectl and a client-go program work through the exec stanza, in both versions of the exec API.
func TestThroughTheExecStanza(t *testing.T) {
	for _, version := range []string{"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"} {
		t.Run(strings.ReplaceAll(filepath.Base(version), "/", ""), func(t *testing.T) {
			n := newNode(t)
			kubeconfig := n.execKubeconfig(t, version)
			out, err := n.RunKubectl(t.Context(), kubeconfig, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
			if err != nil || out != "system:node:"+n.name {
				t.Fatalf("kubectl: %v: %s", err, out)
			}
			client := exec.CommandContext(t.Context(), n.client, kubeconfig, "100ms", "1s")
			lines, err := client.Output()
			if err != nil {
				t.Fatal(err)
			}
			if got := string(lines); strings.Contains(got, "failed") || !strings.Contains(got, "system:node:"+n.name) {
				t.Errorf("client-go program:\n%s", got)
			}
			if got := len(n.requests(t)); got != 1 {
				t.Errorf("%d requests were filed", got)
			}
		})
	}
}

// execKubeconfig returns a kubelet's kubeconfig that names the plugin.
func (n *node) execKubeconfig(t *testing.T, version string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubelet.conf")
	env := map[string]string{}
	for _, e := range n.env {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	harness.WriteFile(t, path, n.ExecKubeconfig(version, n.plugin, n.flags(), env, true, testbed.WithServer(n.server)))
	return path
}

func TestParallelFirstRunsFileOneRequest(t *testing.T) {
	const callers = 50
	n := newNode(t)
	mark, err := n.AuditMark()
	if err != nil {
		t.Fatal(err)
	}
	results := make([]harness.Result, callers)
	var wait sync.WaitGroup
	for i := range results {
		wait.Go(func() { results[i] = n.run(t) })
	}
	wait.Wait()
	for i, r := range results {
		if r.Code != 0 || r.Stdout != results[0].Stdout {
			t.Errorf("caller %d: exit code %d, or another certificate: %s", i, r.Code, r.Stderr)
		}
	}
	if got := len(n.requests(t)); got != 1 {
		t.Errorf("%d requests were filed", got)
	}
	events, err := n.AuditSince(mark)
	if err != nil {
		t.Fatal(err)
	}
	if got := len(ofPlugin(events, "create")); got != 1 {
		t.Errorf("%d POSTs", got)
	}
	if got := n.workers(t); len(got) != 1 {
		t.Errorf("%d workers ran: %v", len(got), got)
	}
}

// workers returns the process IDs that wrote to the worker's log.
func (n *node) workers(t *testing.T) map[string]bool {
	t.Helper()
	log, err := os.ReadFile(n.dir.File(cache.LogFile))
	if err != nil {
		t.Fatal(err)
	}
	pids := map[string]bool{}
	for line := range strings.Lines(string(log)) {
		// I1120 12:00:00.000000   12345 worker.go:1] ...
		if fields := strings.Fields(line); len(fields) > 3 && strings.HasSuffix(fields[3], "]") {
			pids[fields[2]] = true
		}
	}
	return pids
}

// A run that starts a worker and stops waiting ends at once, although the worker continues: the
// worker holds none of the caller's file descriptors.
func TestWorkerHoldsNoDescriptorOfTheCaller(t *testing.T) {
	n := newNode(t)
	n.signer = "example.com/nobody"
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, n.plugin, append(n.flags(), "--wait-timeout=1s")...)
	cmd.Env = append(os.Environ(), n.ask())
	cmd.ExtraFiles = []*os.File{write} // as a shell's descriptor 3
	began := time.Now()
	out, err := cmd.CombinedOutput() // returns when nobody holds its pipes
	if err == nil {
		t.Fatalf("a certificate out of nowhere: %s", out)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	if !n.dir.Worker().Alive() {
		t.Fatalf("the worker did not outlive the run: %s", out)
	}
	_ = write.Close()
	_ = read.SetReadDeadline(time.Now().Add(2 * time.Second))
	if _, err := read.Read(make([]byte, 1)); os.IsTimeout(err) {
		t.Error("the worker holds descriptor 3 of the caller")
	}
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/[012]", n.dir.Worker().PID))
	if err != nil || len(links) != 3 {
		t.Fatal(links, err)
	}
	for _, link := range links[:2] {
		if target, err := os.Readlink(link); err != nil || target != os.DevNull {
			t.Errorf("%s is %s, %v", link, target, err)
		}
	}
}

// The private key is only in its two files, and the token is in no file.
func TestNoSecretIsLeft(t *testing.T) {
	n := newNode(t)
	n.args = []string{"--v=10"} // the most that client-go logs
	r := n.enrol(t)
	token := strings.TrimSpace(tokenOf(t, n.bootstrap))
	block, _ := pem.Decode([]byte(r.Credential.Status.ClientKeyData))
	if _, err := tls.X509KeyPair([]byte(r.Credential.Status.ClientCertificateData), []byte(r.Credential.Status.ClientKeyData)); err != nil {
		t.Fatal(err)
	}
	keyLine := strings.Split(r.Credential.Status.ClientKeyData, "\n")[1]
	for _, name := range []string{cache.LogFile, cache.StateFile, cache.LockFile} {
		data, err := os.ReadFile(n.dir.File(name))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(data, []byte(keyLine)) || bytes.Contains(data, block.Bytes) {
			t.Errorf("%s holds the key", name)
		}
		if strings.Contains(string(data), token) {
			t.Errorf("%s holds the bootstrap token", name)
		}
	}
	if strings.Contains(r.Stderr, token) || strings.Contains(r.Stderr, keyLine) {
		t.Error("standard error holds a secret")
	}
}

func tokenOf(t *testing.T, kubeconfig string) string {
	t.Helper()
	data, err := os.ReadFile(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if _, token, ok := strings.Cut(line, "token: "); ok {
			return token
		}
	}
	t.Fatalf("no token in %s", kubeconfig)
	return ""
}

func runClient(t *testing.T, n *node, kubeconfig, interval, total string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), n.client, kubeconfig, interval, total).Output()
	return string(out), err
}
