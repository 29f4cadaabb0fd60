// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

// longestBackOff is the longest back-off after a failure for which nothing was filed: 15 s, and
// half of that as jitter. slack is for a busy machine.
const longestBackOff, slack = 22500 * time.Millisecond, 20 * time.Second

// The TPM appears some time after the machine has booted. Until then the plugin says that there is
// none, or prints the certificate that it holds. Then the node enrols within the back-off.
func TestTPMAppearsAfterBoot(t *testing.T) {
	t.Parallel()
	absent := reliability.Size(t, "tpm-renewals", 2*time.Second, time.Minute)
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n, old := begin(t, kind)
			n.Device = n.Chip.Socket()
			n.Chip.Crash() // its socket is gone
			runs := 0
			for appears := time.Now().Add(absent); time.Now().Before(appears); runs++ {
				r := n.Run(t, cluster)
				switch {
				case old == nil:
					wantReason(t, r, 14, n.Device, "switch the TPM on")
				case r.Code != 0 || r.Leaf.SerialNumber.Cmp(old.Leaf.SerialNumber) != 0:
					t.Errorf("exit code %d, or another certificate: %s", r.Code, r.Stderr)
				}
				if r.Took > slack {
					t.Errorf("a run took %v", r.Took)
				}
				time.Sleep(100 * time.Millisecond) // client-go asks for each request of the kubelet
			}
			harness.Must(t, n.Chip.Boot())
			took := n.settles(t, old, longestBackOff+slack)
			t.Logf("absent for %v, %d runs: new certificate %v after the TPM was there", absent, runs, took)
			n.filed(t, 1, 1)
			n.nothingLeft(t)
		})
	}
}
