// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// logOf returns an event log of about that size, with events of typical length, and the values that
// it leads to.
func logOf(size int) ([]byte, []attestation.PCR) {
	values := map[uint32][]byte{0: append(make([]byte, 31), 3), 4: make([]byte, 32), 7: make([]byte, 32)}
	log := eventLog(locality(3))
	for i := 0; ; i++ {
		e := logEvent{[]uint32{0, 4, 7}[i%3], 8, bytes.Repeat([]byte{byte(i)}, 120)}
		next := append(bytes.Clone(log), e.marshal(testAlgorithms())...)
		if len(next) > size {
			break
		}
		log = next
		digest := sha256.Sum256(e.data)
		value := sha256.Sum256(append(values[e.pcr], digest[:]...))
		values[e.pcr] = value[:]
	}
	var pcrs []attestation.PCR
	for _, i := range []int{0, 4, 7} {
		pcrs = append(pcrs, attestation.PCR{Index: i, Value: values[uint32(i)]})
	}
	return log, pcrs
}

// What a firmware's event log adds to a proof: none, one of a virtual machine, and the largest that
// is taken.
func BenchmarkProofWithEventLog(b *testing.B) {
	for _, size := range []int{0, 16 << 10, attestation.MaxEventLog} {
		bent := bend{ek: "ecc-p256"}
		if size > 0 {
			bent.policy = wanted
			bent.eventLog, bent.pcrs = logOf(size)
		}
		p := theKit().play(b, bent)
		b.Run(fmt.Sprintf("%d KiB", size>>10), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := p.verifier.VerifyProof(p.proof, p.hello, nil, p.now); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(p.proof.Request)), "request-bytes")
		})
	}
}
