// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"
	"crypto"

	"github.com/google/go-tpm/tpm2"
)

// pcrCount is that of the TCG's PC Client profile.
const pcrCount = 24

// pcrs are the platform configuration registers: a bank for each hash.
type pcrs struct {
	banks map[tpm2.TPMAlgID]*[pcrCount][]byte
	// updates counts what changed them.
	updates uint32
}

// newPCRs are as after a reset: those of the dynamic root of trust are all ones.
func newPCRs() pcrs {
	p := pcrs{banks: map[tpm2.TPMAlgID]*[pcrCount][]byte{}}
	for _, alg := range hashes {
		h, _ := hashOf(alg)
		bank := &[pcrCount][]byte{}
		for i := range bank {
			bank[i] = make([]byte, h.Size())
			if isDynamic(i) {
				bank[i] = bytes.Repeat([]byte{0xff}, h.Size())
			}
		}
		p.banks[alg] = bank
	}
	return p
}

// isDynamic reports whether only the localities of a dynamic root of trust may extend a PCR.
func isDynamic(pcr int) bool { return pcr >= 17 && pcr <= 22 }

// bankSelection is some PCRs of a bank.
type bankSelection struct {
	bank tpm2.TPMAlgID
	pcrs [pcrCount]bool
}

// selectionOf is a TPML_PCR_SELECTION.
func selectionOf(selected []bankSelection) tpm2.TPMLPCRSelection {
	var list tpm2.TPMLPCRSelection
	for _, s := range selected {
		bitmap := make([]byte, pcrCount/8)
		for i, is := range s.pcrs {
			if is {
				bitmap[i/8] |= 1 << (i % 8)
			}
		}
		list.PCRSelections = append(list.PCRSelections, tpm2.TPMSPCRSelection{Hash: s.bank, PCRSelect: bitmap})
	}
	return list
}

// digest is the hash over the PCRs selected.
func (p *pcrs) digest(h crypto.Hash, selected []bankSelection) []byte {
	var values [][]byte
	for _, s := range selected {
		for i, is := range s.pcrs {
			if is {
				values = append(values, p.banks[s.bank][i])
			}
		}
	}
	return digest(h, values...)
}

// maxRead is how many PCRs are read at a time.
const maxRead = 8

// pcrRead is TPM2_PCR_Read.
func (t *TPM) pcrRead(c *call) ([]byte, tpm2.TPMRC) {
	selected := c.in.parameter(1).pcrSelection()
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	var values []byte
	n := 0
	for s := range selected {
		for i := range selected[s].pcrs {
			if !selected[s].pcrs[i] {
				continue
			}
			if n == maxRead {
				selected[s].pcrs[i] = false
				continue
			}
			values = append(values, sized(t.pcrs.banks[selected[s].bank][i])...)
			n++
		}
	}
	out := append(be32(t.pcrs.updates), tpm2.Marshal(selectionOf(selected))...)
	return append(append(out, be32(uint32(n))...), values...), 0
}

// extend extends a PCR of a bank.
func (p *pcrs) extend(pcr int, alg tpm2.TPMAlgID, value []byte) {
	h, _ := hashOf(alg)
	p.banks[alg][pcr] = digest(h, p.banks[alg][pcr], value)
	p.updates++
}

// pcrExtend is TPM2_PCR_Extend.
func (t *TPM) pcrExtend(c *call) ([]byte, tpm2.TPMRC) {
	type value struct {
		alg    tpm2.TPMAlgID
		digest []byte
	}
	count := int(c.in.parameter(1).u32())
	c.in.check(count <= len(hashes)+1, tpm2.TPMRCSize)
	var values []value
	for range count {
		if c.in.rc != 0 {
			break
		}
		alg := c.in.alg()
		h, ok := hashOf(alg)
		c.in.check(ok, tpm2.TPMRCHash)
		if c.in.rc == 0 {
			values = append(values, value{alg, c.in.bytes(h.Size())})
		}
	}
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	pcr := c.handles[0]
	if pcr == tpm2.TPMRHNull {
		return nil, 0
	}
	if isDynamic(int(pcr)) {
		return nil, tpm2.TPMRCLocality
	}
	for _, v := range values {
		t.pcrs.extend(int(pcr), v.alg, v.digest)
	}
	return nil, 0
}

// maxEvent is the size of the largest TPM2B_EVENT.
const maxEvent = 1024

// pcrEvent is TPM2_PCR_Event.
func (t *TPM) pcrEvent(c *call) ([]byte, tpm2.TPMRC) {
	event := c.in.parameter(1).sized(maxEvent)
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	pcr := c.handles[0]
	if pcr != tpm2.TPMRHNull && isDynamic(int(pcr)) {
		return nil, tpm2.TPMRCLocality
	}
	out := be32(uint32(len(hashes))) //nolint:gosec // 4
	for _, alg := range hashes {
		h, _ := hashOf(alg)
		value := digest(h, event)
		if pcr != tpm2.TPMRHNull {
			t.pcrs.extend(int(pcr), alg, value)
		}
		out = append(appendAlg(out, alg), value...)
	}
	return out, 0
}
