// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// statusOf runs status, checks that it changed nothing, and returns its JSON.
func statusOf(t *testing.T, n node, args ...string) (callResult, nodestatus.Overview) {
	t.Helper()
	before := tree(t, n.root)
	o := call(t, "", append(args, "status", "--output=json")...)
	if after := tree(t, n.root); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	var overview nodestatus.Overview
	decoder := json.NewDecoder(strings.NewReader(o.stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&overview); err != nil || decoder.More() {
		t.Fatalf("standard output is not one overview: %v: %s", err, o.stdout)
	}
	return o, overview
}

func TestStatusOfACertificate(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	o, overview := statusOf(t, n, n.flags...)
	if o.code != 0 || o.stderr != "" || overview.State != nodestatus.StateOK || overview.Certificate.Subject != "CN=system:node:a,O=system:nodes" || overview.ExecFlags != nil {
		t.Errorf("%+v", o)
	}
	asYAML := call(t, "", n.with("status", "-o", "yaml")...)
	var again nodestatus.Overview
	if err := yaml.UnmarshalStrict([]byte(asYAML.stdout), &again); err != nil || again.Certificate.Fingerprint != overview.Certificate.Fingerprint {
		t.Errorf("%v: %s", err, asYAML.stdout)
	}
	text := call(t, "", n.with("status")...)
	rows := oneSpace(text.stdout)
	for _, says := range []string{"status: ok: valid to ", "subject: CN=system:node:a", "SHA-256: " + overview.Certificate.Fingerprint, "worker: none runs", "pending request: none", "next credential: none: no bootstrap kubeconfig", "because: provider insecure does not renew"} {
		if !strings.Contains(rows, says) {
			t.Errorf("no %q in\n%s", says, text.stdout)
		}
	}
	if all := o.stdout + asYAML.stdout + text.stdout; strings.Contains(all, "PRIVATE KEY") {
		t.Errorf("it shows the key:\n%s", all)
	}
}

// oneSpace removes the padding of a table.
func oneSpace(table string) string { return regexp.MustCompile(` +`).ReplaceAllString(table, " ") }

// A worker that has really run leaves what status shows: here, a request that the API server
// refuses. status itself asks no API server, and waits for no lock.
func TestStatusAfterAWorker(t *testing.T) {
	n := newNode(t)
	var calls atomic.Int32
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"apiVersion":"v1","kind":"Status","status":"Failure","code":403,"reason":"Forbidden","message":"RBAC says\u001b[2J no"}`))
	}))
	defer server.Close()
	n.write(t, "bootstrap.conf", bootstrap(server.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	if got := call(t, "", n.flags...); got.code != 20 {
		t.Fatalf("the run: %+v", got)
	}
	// The worker may still record its end.
	lock, err := cache.At(n.certs).WaitLock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	asked := calls.Load()
	o, overview := statusOf(t, n, n.flags...)
	if calls.Load() != asked {
		t.Error("it asked the API server")
	}
	last := overview.LastRun
	if o.code != 43 || overview.State != nodestatus.StateNone || last == nil || last.Reason != "APIRefused" || last.Hint == "" || len(last.Phases) < 3 || overview.Failures != 1 {
		t.Errorf("exit code %d: %s", o.code, o.stdout)
	}
	if c := overview.Credential; c.Kind != "bootstrap" || c.Server != server.URL || c.Why != "there is no usable certificate" {
		t.Errorf("next credential: %+v", c)
	}
	if o.stderr != "kubelet-authenticator-test: the node's certificate: none\n" {
		t.Errorf("standard error: %q", o.stderr)
	}
	text := call(t, "", n.with("status")...)
	rows := oneSpace(text.stdout)
	for _, says := range []string{"APIRefused, 1 in a row: ", "last run: failed: APIRefused, ended ", "failures: 1 in a row", "steps: lock ", "RBAC says\\u001b[2J no"} {
		if !strings.Contains(rows, says) {
			t.Errorf("no %q in\n%s", says, text.stdout)
		}
	}
	if all := o.stdout + text.stdout; strings.Contains(all, "hunter2") || strings.Contains(all, "\x1b") {
		t.Errorf("a secret, or an escape sequence:\n%q", all)
	}
}

// A run with the provider "auto" has its worker choose, and status says what and why. Before that
// nothing is chosen.
func TestStatusOfAChosenProvider(t *testing.T) {
	n := newNode(t)
	flags := append(n.flags, "--provider=auto")
	if _, overview := statusOf(t, n, flags...); overview.Provider != "auto" || overview.ProviderChosen != "" || overview.SignerName != "" {
		t.Errorf("before the first worker: %+v", overview)
	}
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	n.write(t, "bootstrap.conf", bootstrap(server.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	if got := call(t, "", flags...); got.code == 0 {
		t.Fatalf("the run: %+v", got)
	}
	lock, err := cache.At(n.certs).WaitLock(t.Context()) // the worker may still record its end
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if _, overview := statusOf(t, n, flags...); overview.Provider != "insecure" || overview.ProviderChosen != "there is no TPM" || !strings.HasSuffix(overview.SignerName, "-insecure") {
		t.Errorf("after the worker: %+v", overview)
	}
	if rows := oneSpace(call(t, "", append(flags, "status")...).stdout); !strings.Contains(rows, "node: a, provider insecure, signer ") || !strings.Contains(rows, " chosen: there is no TPM\n") {
		t.Errorf("status:\n%s", rows)
	}
	if _, overview := statusOf(t, n, n.flags...); overview.ProviderChosen != "" {
		t.Errorf("with a provider that the operator named: %+v", overview)
	}
	log, err := os.ReadFile(cache.At(n.certs).File(cache.LogFile))
	if err != nil || !strings.Contains(string(log), "there is no TPM") || !strings.Contains(string(log), "can become any node") {
		t.Errorf("the worker's log has neither reason nor caution: %v: %s", err, log)
	}
}

// kubeletConf writes a kubelet's kubeconfig whose user is command with args, and returns its path.
func (n node) kubeletConf(t *testing.T, command string, args ...string) string {
	t.Helper()
	content, err := kubelet.RenderKubeconfig(cache.Origin{Server: "https://cluster.example.com"}, kubelet.Exec{Command: command, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	return n.write(t, "kubelet.conf", string(content))
}

// The flags that the kubelet gives are taken, and a flag that is typed goes first.
func TestFlagsOfTheKubelet(t *testing.T) {
	const ours = "/usr/bin/kubelet-authenticator-test"
	n := newNode(t)
	enrolled(t, n.certs)
	other := filepath.Join(n.root, "other")
	enrolled(t, other)
	alias := filepath.Join(n.root, "kubelet-authenticator-alias")
	if err := os.Symlink(os.Args[0], alias); err != nil {
		t.Fatal(err)
	}
	taken := append([]string{"--wait-timeout=9s"}, n.flags...)
	for name, c := range map[string]struct {
		command string
		args    []string // of the kubelet
		typed   []string
		dir     string // of the certificate that is shown, empty for none
		flags   []string
		problem string
	}{
		"all":                       {ours, taken, nil, n.certs, taken, ""},
		"two words":                 {ours, append([]string{"--cert-dir", n.certs}, n.flags[4:]...), []string{"--provider=insecure", "--node-name=a"}, n.certs, append([]string{"--cert-dir=" + n.certs}, n.flags[4:]...), ""},
		"a typed one goes first":    {ours, taken, []string{"--cert-dir=" + other}, other, without(taken, "--cert-dir="+n.certs), ""},
		"another program":           {"/usr/bin/aws-iam-authenticator", taken, nil, "", nil, ""},
		"one with another provider": {"/usr/bin/kubelet-authenticator-acme", taken, nil, "", nil, ""},
		"this file by another name": {alias, taken, nil, n.certs, taken, ""},
		"no flags":                  {ours, nil, nil, "", []string{}, ""},
		"an unknown flag":           {ours, []string{"--nonsense"}, nil, "", []string{}, "unknown flag: --nonsense"},
		"an argument":               {ours, []string{"doctor"}, nil, "", []string{}, `"doctor" is not a flag`},
		"with --config":             {ours, taken, []string{"--config=" + n.write(t, "typed.yaml", configHead+"provider: insecure\nnodeName: a\ncertDir: "+other+"\n")}, other, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			conf := n.kubeletConf(t, c.command, c.args...)
			o, overview := statusOf(t, n, append([]string{"--kubelet-kubeconfig=" + conf}, c.typed...)...)
			if c.dir != "" && (overview.Certificate == nil || filepath.Dir(overview.Certificate.File) != c.dir) {
				t.Errorf("not that of %s: %s", c.dir, o.stdout)
			}
			if c.dir == "" && overview.Certificate != nil {
				t.Errorf("there is a certificate: %s", o.stdout)
			}
			switch got := overview.ExecFlags; {
			case c.flags == nil && got != nil:
				t.Errorf("taken: %+v", got)
			case c.flags != nil && (got == nil || !sameElements(got.Flags, c.flags) || got.Kubeconfig != conf || !strings.Contains(got.Problem, c.problem) || (got.Problem == "") != (c.problem == "")):
				t.Errorf("taken: %+v, want %q, %s", got, c.flags, c.problem)
			}
		})
	}
	// doctor takes them, too.
	conf := n.kubeletConf(t, ours, n.flags...)
	o := call(t, "", "doctor", "--kubelet-kubeconfig="+conf, "--proc="+filepath.Join(n.root, "proc"), "-o", "json")
	var report doctor.Report
	if err := json.Unmarshal([]byte(o.stdout), &report); err != nil || report.ExecFlags == nil || !sameElements(report.ExecFlags.Flags, n.flags) {
		t.Errorf("doctor: %v: %+v", err, report.ExecFlags)
	}
	if text := call(t, "", "status", "--kubelet-kubeconfig="+conf).stdout; !strings.Contains(text, "--cert-dir="+n.certs) || !strings.Contains(text, ", taken from "+conf+"\n") {
		t.Errorf("it does not say which were taken from where:\n%s", text)
	}
}

func without(all []string, one string) (rest []string) {
	for _, s := range all {
		if s != one {
			rest = append(rest, s)
		}
	}
	return rest
}

func sameElements(a, b []string) bool {
	count := func(all []string) map[string]int {
		m := map[string]int{}
		for _, s := range all {
			m[s]++
		}
		return m
	}
	return reflect.DeepEqual(count(a), count(b))
}

// The kubelet's cluster is the one that client-go would name: a certificate of another is replaced.
func TestStatusGoesByTheKubeletsCluster(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	dir := cache.At(n.certs)
	pair, err := dir.Current()
	if err != nil {
		t.Fatal(err)
	}
	pair.Origin = &cache.Origin{Server: "https://other.example.com"}
	lock, err := dir.WaitLock(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Install(pair); err != nil {
		t.Fatal(err)
	}
	lock.Unlock()
	conf := n.kubeletConf(t, "/usr/bin/kubelet-authenticator-test")
	o, overview := statusOf(t, n, n.with("--kubelet-kubeconfig="+conf)...)
	if o.code != 40 || !strings.Contains(overview.Message, "it came from the cluster at https://other.example.com") {
		t.Errorf("exit code %d: %s", o.code, overview.Message)
	}
}
