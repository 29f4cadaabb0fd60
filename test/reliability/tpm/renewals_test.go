// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

// mostGrowth is how much the memory of swtpm may grow from the first tenth of the renewals to the
// end, in kB. A session that is left takes 1 kB of it or more, each time.
const mostGrowth = 512

// Renewals without end, each by the plugin's worker with a hello and a proof that the verifier
// judges. Nothing stays behind in the TPM, and its memory does not grow. 1,440 renewals are a month
// with one each half hour.
func TestManyRenewals(t *testing.T) {
	count := reliability.Size(t, "tpm-renewals", 20, 1440)
	n := newNode(t)
	n.settles(t, nil, time.Minute)
	var first, slowest time.Duration
	memory, commands := 0, 0
	began := time.Now()
	for i := range count {
		if i == count/10 {
			memory = resident(t, n.Chip.PID())
		}
		n.proxy.Reset()
		old := n.due(t)
		took := n.settles(t, old, time.Minute)
		if slowest = max(slowest, took); i == 0 {
			first, commands = took, n.proxy.Count()
		}
		if c := n.proxy.Count(); c != commands {
			t.Errorf("renewal %d: %d TPM commands, and %d the first time", i, c, commands)
		}
		n.nothingLeft(t)
		if i%100 == 99 {
			t.Logf("%d renewals, swtpm has %d kB", i+1, resident(t, n.Chip.PID()))
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	took, after := time.Since(began), resident(t, n.Chip.PID())
	t.Logf("%d renewals in %v: the first took %v, the slowest %v; %d TPM commands each; swtpm had %d kB after a tenth of them, %d kB at the end",
		count, took.Round(time.Second), first, slowest, commands, memory, after)
	if after > memory+mostGrowth {
		t.Errorf("swtpm has grown from %d to %d kB", memory, after)
	}
	if failed, err := n.Chip.LockoutCounter(); err != nil || failed != 0 {
		t.Errorf("lockout counter %d, %v", failed, err)
	}
	n.filed(t, count+1, count+1)
	// The tests after this one list what there is.
	harness.Must(t, cluster.Client().CertificatesV1().CertificateSigningRequests().DeleteCollection(context.WithoutCancel(t.Context()),
		metav1.DeleteOptions{}, metav1.ListOptions{}))
}

// resident is the memory of a process that is in use, in kB.
func resident(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	harness.Must(t, err)
	for line := range strings.Lines(string(status)) {
		var kB int
		if _, err := fmt.Sscanf(line, "VmRSS: %d kB", &kB); err == nil {
			return kB
		}
	}
	t.Fatalf("no VmRSS in %s", status)
	return 0
}
