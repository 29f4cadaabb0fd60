// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestatus"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// status runs the command under strace, typed with nothing but where the kubelet's kubeconfig is.
// It has to take all other flags from there. It may open no file for writing, no socket and no
// lock, and start no process.
func (n *node) status() (nodestatus.Overview, int) {
	n.t.Helper()
	trace := filepath.Join(n.t.TempDir(), "trace")
	const calls = "trace=open,openat,creat,socket,connect,flock,execve,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,chmod,fchmod,fchmodat"
	cmd := exec.CommandContext(n.t.Context(), "strace", "-f", "-qq", "-e", calls, "-o", trace, n.plugin, "status", "--output=json", "--kubelet-kubeconfig="+n.conf)
	cmd.Dir = "/"
	out, err := cmd.Output()
	if cmd.ProcessState == nil {
		n.t.Fatal(err)
	}
	var overview nodestatus.Overview
	if err := json.Unmarshal(out, &overview); err != nil {
		n.t.Fatalf("%v: %s", err, out)
	}
	seen, err := os.ReadFile(trace)
	if err != nil {
		n.t.Fatal(err)
	}
	opened := 0
	for line := range strings.Lines(string(seen)) {
		if regexp.MustCompile(`\b(open|openat)\(`).MatchString(line) {
			opened++
			if !regexp.MustCompile(`O_WRONLY|O_RDWR|O_CREAT|/dev/tpm`).MatchString(line) {
				continue
			}
		}
		if strings.Contains(line, "execve(") && strings.Contains(line, n.plugin) || strings.Contains(line, "+++") || strings.Contains(line, "SIGURG") {
			continue
		}
		if strings.Contains(line, " resumed>") {
			// the end of a call whose beginning, with all it was called with, has a line of its own
			continue
		}
		n.t.Errorf("status does more than read files: %s", line)
	}
	if opened < 5 {
		n.t.Errorf("strace saw too little: %s", seen)
	}
	if got := overview.ExecFlags; got == nil || len(got.Flags) != len(n.flags())-1 || got.Kubeconfig != n.conf {
		n.t.Errorf("flags of the kubelet: %+v", got)
	}
	return overview, cmd.ProcessState.ExitCode()
}

// status follows a node from nothing, through a hello that nobody answers, to a certificate by its
// TPM. Only the pending hello names the EK.
func TestStatus(t *testing.T) {
	n := newUnansweredNode(t)
	o, code := n.status()
	if code != 43 || o.State != nodestatus.StateNone || o.NodeName != n.name || o.Credential.Kind != "bootstrap" || o.EK == nil || *o.EK != (nodestatus.EKOverview{}) {
		t.Errorf("before: exit code %d: %+v", code, o)
	}

	run := exec.CommandContext(t.Context(), n.plugin, append(n.flags(), "--wait-timeout=1s")...)
	if out, err := run.CombinedOutput(); err == nil {
		t.Fatalf("there is a certificate already: %s", out)
	}
	harness.Eventually(t, time.Minute, "the hello is filed", func() bool {
		pending, err := n.dir.Pending()
		return err == nil && pending != nil && pending.Last().UID != ""
	})
	asked := n.chip.Count()
	o, code = n.status()
	if code != 43 || !o.Worker.Running || o.Worker.PID == 0 || o.Pending == nil || o.Pending.WaitsFor != "challenge" || o.Pending.Server != n.server.URL() {
		t.Errorf("pending: exit code %d: %+v %+v", code, o, o.Pending)
	}
	pending := o.EK
	if n.chip.Count() != asked {
		t.Error("status asked the TPM")
	}

	n.startAttestor()
	harness.Eventually(t, time.Minute, "there is a certificate", func() bool {
		_, err := os.Stat(n.dir.File(cache.CurrentFile))
		return err == nil
	})
	harness.WorkerEnds(t, n.dir)
	o, code = n.status()
	if code != 0 || o.State != nodestatus.StateOK || o.Certificate == nil || o.Certificate.Subject != "CN=system:node:"+n.name+",O=system:nodes" || o.Certificate.RenewAt.IsZero() {
		t.Errorf("after: exit code %d: %+v", code, o)
	}
	if o.EK == nil || o.EK.Template != "ecc-p256" || o.Credential.Kind != "node" || o.LastRun == nil || o.LastRun.Reason != "" || len(o.LastRun.Phases) < 5 || o.Pending != nil {
		t.Errorf("after: %+v %+v %+v %+v", o.EK, o.Credential, o.LastRun, o.Pending)
	}

	// The TPM itself says which key that was.
	out, err := exec.CommandContext(t.Context(), n.plugin, append([]string{"identify", "--output=json"}, n.flags()...)...).Output()
	var identity struct {
		Device struct {
			EKs []struct{ Template, Fingerprint string }
		}
	}
	if err != nil || json.Unmarshal(out, &identity) != nil || len(identity.Device.EKs) != 1 {
		t.Fatalf("identify: %v: %s", err, out)
	}
	if is := identity.Device.EKs[0]; pending == nil || pending.Template != is.Template || pending.Fingerprint != is.Fingerprint {
		t.Errorf("the pending hello has %+v, the TPM %+v", pending, is)
	}
}
