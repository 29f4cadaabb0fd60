// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// ExecInfo returns the variable that client-go sets for the plugin, with provideClusterInfo.
func ExecInfo(server string, ca []byte) string {
	ask := clientauthentication.ExecCredential{Spec: clientauthentication.ExecCredentialSpec{
		Cluster: &clientauthentication.Cluster{Server: server, CertificateAuthorityData: ca},
	}}
	ask.APIVersion, ask.Kind = clientauthentication.SchemeGroupVersion.String(), "ExecCredential"
	data, err := json.Marshal(ask)
	if err != nil {
		panic(err) // it has neither channels nor functions
	}
	return "KUBERNETES_EXEC_INFO=" + string(data)
}

// ExecEnv returns the environment of a plugin that client-go runs for a cluster.
func ExecEnv(cluster *testbed.ControlPlane) []string {
	return append(os.Environ(), ExecInfo(cluster.ServerURL(), cluster.ServerCA()))
}

// Result is the result of one run of a program.
type Result struct {
	// Code is the exit code, -1 if a signal ended the program.
	Code           int
	Stdout, Stderr string
	Took           time.Duration
	// Credential and Leaf are the plugin's output, nil if it failed.
	Credential *clientauthentication.ExecCredential
	Leaf       *x509.Certificate
}

// holdLimit is how long a child of a program, such as the plugin's worker, may hold on to its
// output.
const holdLimit = 5 * time.Second

// Run runs a program to its end.
func Run(t testing.TB, cmd *exec.Cmd) Result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = holdLimit
	began := time.Now()
	err := cmd.Run()
	r := Result{Stdout: stdout.String(), Stderr: stderr.String(), Took: time.Since(began)}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		r.Code = exit.ExitCode()
	} else if err != nil {
		t.Fatalf("run %s: %v", cmd.Path, err)
	}
	return r
}

// RunPlugin runs the plugin as client-go does. It checks standard output: one credential, or
// nothing if the plugin fails.
func RunPlugin(t testing.TB, cmd *exec.Cmd) Result {
	t.Helper()
	r := Run(t, cmd)
	if r.Code == 0 {
		r.Credential, r.Leaf = ParseCredential(t, r.Stdout)
	} else if r.Stdout != "" {
		t.Errorf("exit code %d, and on standard output: %s", r.Code, r.Stdout)
	}
	return r
}

// Want checks the exit code and the output.
func (r Result) Want(t testing.TB, code int, says ...string) {
	t.Helper()
	if r.Code != code {
		t.Errorf("exit code %d, not %d: %s", r.Code, code, r.Stderr)
	}
	for _, text := range says {
		if !strings.Contains(r.Stderr, text) {
			t.Errorf("it does not say %q: %s", text, r.Stderr)
		}
	}
}

// ParseCredential checks that standard output is one ExecCredential with a timestamp in the future,
// and nothing else.
func ParseCredential(t testing.TB, stdout string) (*clientauthentication.ExecCredential, *x509.Certificate) {
	t.Helper()
	return ParseCredentialAt(t, stdout, time.Now())
}

// ParseCredentialAt is ParseCredential on a machine with another clock.
func ParseCredentialAt(t testing.TB, stdout string, now time.Time) (*clientauthentication.ExecCredential, *x509.Certificate) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(stdout))
	credential := &clientauthentication.ExecCredential{}
	if err := decoder.Decode(credential); err != nil || decoder.More() {
		t.Fatalf("standard output is not one JSON document: %v\n%s", err, stdout)
	}
	if credential.Status == nil || credential.Status.ExpirationTimestamp == nil || !credential.Status.ExpirationTimestamp.After(now) {
		t.Fatalf("no status, or no timestamp in the future: %s", stdout)
	}
	block, _ := pem.Decode([]byte(credential.Status.ClientCertificateData))
	if block == nil {
		t.Fatalf("no certificate: %s", stdout)
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	Must(t, err)
	return credential, leaf
}

const workerTimeout = 10 * time.Second

// WorkerEnds waits until the plugin's worker has ended. After the worker has installed a
// certificate, it still cleans up and writes how it ended.
func WorkerEnds(t testing.TB, certs cache.Dir) {
	t.Helper()
	Eventually(t, workerTimeout, "the worker ends", func() bool { return !certs.Worker().Alive() })
}

// KillWorker ends a worker that a test left behind, so that it does not write into a directory that
// is about to be removed.
func KillWorker(t testing.TB, certs cache.Dir) {
	t.Helper()
	Eventually(t, workerTimeout, "the worker ends", func() bool {
		worker := certs.Worker() // another one, where the plugin has just started it
		if !worker.Alive() {
			return true
		}
		if p, err := os.FindProcess(worker.PID); err == nil {
			_ = p.Kill()
		}
		return false
	})
}
