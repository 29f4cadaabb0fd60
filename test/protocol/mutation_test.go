// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Each correct command is cut off at every byte, extended by a byte, and has bits of every byte
// changed. Both TPMs give the same answer of the same length, and have the same objects loaded.
func TestModelRefusesAsSwtpm(t *testing.T) {
	p := newPair(t)
	high := ekTemplate("ecc-p256-high").PolicyOR()
	var expirations []string
	for n := 37; n <= 40; n++ {
		expirations = append(expirations, fmt.Sprintf("byte %d ^ 0x1", n), fmt.Sprintf("byte %d ^ 0x80", n))
	}
	for name, c := range map[string]struct {
		before  [][]byte
		command []byte
		// notModelled are mutations that make something else of the command that is right.
		notModelled []string
	}{
		// P-224
		"CreatePrimary AK": {command: createRaw(template.AK(), ""), notModelled: []string{"byte 52 ^ 0x1"}},
		// CBC, P-224
		"CreatePrimary EK": {command: createRaw(ekTemplate("ecc-p256").Public, ""), notModelled: []string{"byte 82 ^ 0x1", "byte 86 ^ 0x1"}},
		// CBC, P-521
		"CreatePrimary EK high": {command: createRaw(ekTemplate("ecc-p384-high").Public, ""), notModelled: []string{"byte 98 ^ 0x1", "byte 102 ^ 0x1"}},
		"ReadPublic":            {before: [][]byte{createRaw(template.AK(), "")}, command: raw(tpm2.TPMCCReadPublic, on(firstObject), nil)},
		"Quote":                 {before: [][]byte{createRaw(template.AK(), "")}, command: quoteRaw("")},
		"StartAuthSession":      {command: startRaw(tpm2.TPMSEPolicy, 16, tpm2.TPMAlgSHA256)},
		"PolicySecret":          {before: [][]byte{startRaw(tpm2.TPMSETrial, 16, tpm2.TPMAlgSHA256)}, command: secretRaw("", nil), notModelled: expirations},
		"PolicyOR":              {before: [][]byte{startRaw(tpm2.TPMSETrial, 16, tpm2.TPMAlgSHA256)}, command: raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, u32(2), sized(high[0].Buffer), sized(high[1].Buffer))},
		"PolicyGetDigest":       {before: [][]byte{startRaw(tpm2.TPMSETrial, 16, tpm2.TPMAlgSHA256)}, command: raw(tpm2.TPMCCPolicyGetDigest, on(firstPolicy), nil)},
		"PolicyRestart":         {before: [][]byte{startRaw(tpm2.TPMSETrial, 16, tpm2.TPMAlgSHA256)}, command: raw(tpm2.TPMCCPolicyRestart, on(firstPolicy), nil)},
		"FlushContext":          {before: [][]byte{createRaw(template.AK(), "")}, command: raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(firstObject)))},
		"PCR_Read":              {command: raw(tpm2.TPMCCPCRRead, nil, nil, pcrsRaw(tpm2.TPMAlgSHA256, tpm2.TPMAlgSHA1))},
		"PCR_Extend":            {command: raw(tpm2.TPMCCPCRExtend, on(4), by(password("")), u32(1), u16(int(tpm2.TPMAlgSHA256)), make([]byte, 32))},
		"PCR_Event":             {command: raw(tpm2.TPMCCPCREvent, on(5), by(password("")), sized([]byte("event")))},
		"NV_Read":               {command: readNVRaw(by(password("")), 100, 0)},
		"NV_Read by owner":      {command: raw(tpm2.TPMCCNVRead, on(tpm2.TPMRHOwner, testIndex), by(password("")), u16(3), u16(1))},
		"NV_ReadPublic":         {command: raw(tpm2.TPMCCNVReadPublic, on(testIndex), nil)},
		"NV_Write":              {command: raw(tpm2.TPMCCNVWrite, on(tpm2.TPMRHPlatform, testIndex), by(password("")), sized([]byte("0123456789")), u16(0))},
		// TPM_CAP_ALGS
		"GetCapability handles": {command: capabilityRaw(tpm2.TPMCapHandles, 0x40000000, 16), notModelled: []string{"byte 13 ^ 0x1"}},
		// TPM_CAP_AUDIT_COMMANDS
		"GetCapability PCRs": {command: capabilityRaw(tpm2.TPMCapPCRs, 0, 16), notModelled: []string{"byte 13 ^ 0x1"}},
		// TPM_CAP_PCR_PROPERTIES
		"GetCapability property": {command: capabilityRaw(tpm2.TPMCapTPMProperties, uint32(tpm2.TPMPTManufacturer), 1), notModelled: []string{"byte 13 ^ 0x1"}},
		"GetRandom":              {command: raw(tpm2.TPMCCGetRandom, nil, nil, u16(16))},
	} {
		t.Run(name, func(t *testing.T) {
			all := mutations(c.command)
			for _, m := range all {
				a, b := p.answer(t, p.swtpm, c.before, m.command), p.answer(t, p.model, c.before, m.command)
				switch {
				case slices.Contains(c.notModelled, m.what):
					if a == b {
						t.Errorf("%s: that is modelled", m.what)
					}
				case a != b:
					t.Errorf("%s: swtpm answers %s, the model %s: %x", m.what, a, b, m.command)
				}
			}
			t.Logf("%d commands", len(all))
		})
	}
}

// answer sends commands, of which the last counts, and flushes what is loaded then.
func (p *pair) answer(t *testing.T, c chip, before [][]byte, command []byte) string {
	t.Helper()
	for _, b := range before {
		if response, err := c.Transport().Send(b); err != nil || codeOf(response) != tpm2.TPMRCSuccess {
			t.Fatalf("%v, %#x", err, uint32(codeOf(response)))
		}
	}
	response, err := c.Transport().Send(command)
	if err != nil {
		t.Fatal(err)
	}
	if before == nil && codeOf(response) != tpm2.TPMRCSuccess {
		return fmt.Sprintf("%#x with %d bytes", uint32(codeOf(response)), len(response))
	}
	handles, err := c.Handles()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range handles {
		if _, err := (tpm2.FlushContext{FlushHandle: h}).Execute(c.Transport()); err != nil {
			t.Errorf("flush %#x: %v", uint32(h), err)
		}
	}
	return fmt.Sprintf("%#x with %d bytes, and has %x loaded", uint32(codeOf(response)), len(response), handles)
}

type mutation struct {
	what    string
	command []byte
}

// mutations are what can be made of a command without another header.
func mutations(command []byte) []mutation {
	all := []mutation{{"whole", command}, {"a byte more", resized(append(bytes.Clone(command), 0))}}
	for n := 10; n < len(command); n++ {
		all = append(all, mutation{fmt.Sprintf("%d bytes", n), resized(bytes.Clone(command[:n]))})
		for _, with := range []byte{0x01, 0x80} {
			changed := slices.Clone(command)
			changed[n] ^= with
			all = append(all, mutation{fmt.Sprintf("byte %d ^ %#x", n, with), changed})
		}
	}
	return all
}
