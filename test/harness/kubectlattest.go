// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// stamped notes when a program first printed some text.
type stamped struct {
	out  bytes.Buffer
	text string
	at   time.Time
}

func (s *stamped) Write(p []byte) (int, error) {
	n, err := s.out.Write(p)
	if s.at.IsZero() && bytes.Contains(s.out.Bytes(), []byte(s.text)) {
		s.at = time.Now()
	}
	return n, err
}

// KubectlAttest runs kubectl as an administrator of a cluster. kubectl finds kubectl-attest in the
// folder commands. It returns when the command printed a text.
func KubectlAttest(t *testing.T, cluster *testbed.ControlPlane, commands, text string, args ...string) time.Time {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	Must(t, cluster.WriteKubeconfig(kubeconfig, cluster.AdminUser()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out := &stamped{text: text}
	cmd := exec.CommandContext(ctx, cluster.Kubectl(), append([]string{"attest"}, args...)...) //nolint:gosec // G204: the test bed built it
	cmd.Env = append(os.Environ(), "PATH="+commands+":"+os.Getenv("PATH"), "KUBECONFIG="+kubeconfig)
	cmd.Stdout, cmd.Stderr = out, out
	err := cmd.Run()
	t.Logf("kubectl attest %s\n%s", strings.Join(args, " "), &out.out)
	if err != nil || out.at.IsZero() {
		t.Fatalf("%v, or it did not print %q", err, text)
	}
	return out.at
}
