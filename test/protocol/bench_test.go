// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
)

// One attestation against each kind of chip, side by side, with what each side takes of it.
func BenchmarkAttest(b *testing.B) {
	for _, name := range []string{"swtpm", "model"} {
		b.Run(name, func(b *testing.B) {
			chip := starters[name](b, swtpm.Options{Certified: []string{"ecc-p256"}})
			m := newMachine(b, chip.Socket(), trust(chip))
			var node, controller time.Duration
			for b.Loop() {
				a, err := m.Attest(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				node += a.Greet + a.Prove
				controller += a.Verify
			}
			b.ReportMetric(float64(node.Microseconds())/float64(b.N), "node-µs/op")
			b.ReportMetric(float64(controller.Microseconds())/float64(b.N), "controller-µs/op")
		})
	}
}
