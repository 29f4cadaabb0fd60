// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"bytes"
	"encoding/hex"
	"slices"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Handles that a TPM gives out first.
const (
	firstObject  tpm2.TPMHandle = 0x80000000
	secondObject tpm2.TPMHandle = 0x80000001
	hmacSession  tpm2.TPMHandle = 0x02000000
	firstPolicy  tpm2.TPMHandle = 0x03000000
	testIndex    tpm2.TPMHandle = 0x01c00042
)

// pair is swtpm and the model side by side.
type pair struct {
	swtpm, model chip
}

func newPair(t *testing.T) *pair {
	t.Helper()
	o := swtpm.Options{Certified: []string{"ecc-p256"}}
	p := &pair{swtpm: startSwtpm(t, o), model: startModel(t, o)}
	for _, c := range []chip{p.swtpm, p.model} {
		writer, ok := c.(interface{ WriteNV(uint32, []byte) error })
		if !ok {
			t.Fatal("no WriteNV")
		}
		if err := writer.WriteNV(uint32(testIndex), bytes.Repeat([]byte("0123456789"), 150)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// both runs the same story on each of the two. It compares the codes one by one, the results of the
// stories, and what is loaded afterwards. Then it flushes what is loaded.
func (p *pair) both(t *testing.T, story func(*testing.T, *recorder, chip) []byte) []string {
	t.Helper()
	var codes [2][]string
	var results [2][]byte
	var loaded [2][]tpm2.TPMHandle
	for i, c := range []chip{p.swtpm, p.model} {
		r := &recorder{tpm: c.Transport()}
		results[i] = story(t, r, c)
		codes[i] = r.codes
		var err error
		if loaded[i], err = c.Handles(); err != nil {
			t.Fatal(err)
		}
		for _, h := range loaded[i] {
			if _, err := (tpm2.FlushContext{FlushHandle: h}).Execute(c.Transport()); err != nil {
				t.Errorf("flush %#x: %v", uint32(h), err)
			}
		}
	}
	if !slices.Equal(codes[0], codes[1]) {
		t.Errorf("swtpm answers %q, the model %q", codes[0], codes[1])
	}
	if !bytes.Equal(results[0], results[1]) {
		t.Errorf("swtpm answers\n%s, the model\n%s", hex.Dump(results[0]), hex.Dump(results[1]))
	}
	if !slices.Equal(loaded[0], loaded[1]) {
		t.Errorf("in swtpm %x is loaded, in the model %x", loaded[0], loaded[1])
	}
	return codes[0]
}

func create(tpm transport.TPM, hierarchy tpm2.TPMHandle, public tpm2.TPMTPublic) (*tpm2.CreatePrimaryResponse, error) {
	return tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: hierarchy, Auth: tpm2.PasswordAuth(nil)}, InPublic: tpm2.New2B(public),
	}.Execute(tpm)
}

func ekTemplate(name string) template.EK {
	e, _ := template.EKByName(name)
	return e
}

// keys makes the AK, and then the EK of a template.
func keys(t *testing.T, tpm transport.TPM, e template.EK) (ak, ek *tpm2.CreatePrimaryResponse) {
	t.Helper()
	ak, err := create(tpm, tpm2.TPMRHEndorsement, template.AK())
	if err != nil {
		t.Fatal(err)
	}
	if ek, err = create(tpm, tpm2.TPMRHEndorsement, e.Public); err != nil {
		t.Fatal(err)
	}
	return ak, ek
}

// createRaw makes a primary key of the endorsement hierarchy.
func createRaw(public tpm2.TPMTPublic, word string) []byte {
	return raw(tpm2.TPMCCCreatePrimary, on(tpm2.TPMRHEndorsement), by(password(word)),
		sized(slices.Concat(sized(nil), sized(nil))), sized(tpm2.Marshal(public)), sized(nil), u32(0))
}

func quoteRaw(word string) []byte {
	return raw(tpm2.TPMCCQuote, on(firstObject), by(password(word)), sized([]byte("extra")), u16(int(tpm2.TPMAlgNull)), pcrsRaw(tpm2.TPMAlgSHA256))
}

func pcrsRaw(banks ...tpm2.TPMAlgID) []byte {
	list := u32(uint32(len(banks)))
	for _, bank := range banks {
		list = slices.Concat(list, u16(int(bank)), []byte{3, 0xff, 0x01, 0x80})
	}
	return list
}

func startRaw(kind tpm2.TPMSE, nonce int, hash tpm2.TPMAlgID) []byte {
	return raw(tpm2.TPMCCStartAuthSession, on(tpm2.TPMRHNull, tpm2.TPMRHNull), nil, sized(make([]byte, nonce)), sized(nil), []byte{byte(kind)},
		u16(int(tpm2.TPMAlgNull)), u16(int(hash)))
}

func secretRaw(word string, nonce []byte) []byte {
	return raw(tpm2.TPMCCPolicySecret, on(tpm2.TPMRHEndorsement, firstPolicy), by(password(word)), sized(nonce), sized(nil), sized(nil), u32(0))
}

func readNVRaw(by [][]byte, size, offset int) []byte {
	return raw(tpm2.TPMCCNVRead, on(testIndex, testIndex), by, u16(size), u16(offset))
}

func capabilityRaw(c tpm2.TPMCap, property, count uint32) []byte {
	return raw(tpm2.TPMCCGetCapability, nil, nil, u32(uint32(c)), u32(property), u32(count))
}

// What is right and what is wrong in commands, without anything secret in them: the same bytes go
// to both.
func TestModelAnswersAsSwtpm(t *testing.T) {
	p := newPair(t)
	ak, ek := createRaw(template.AK(), ""), createRaw(ekTemplate("ecc-p256").Public, "")
	start := startRaw(tpm2.TPMSEPolicy, 16, tpm2.TPMAlgSHA256)
	policyA := ekTemplate("ecc-p256").Public.AuthPolicy.Buffer
	high := ekTemplate("ecc-p256-high").PolicyOR()
	branches := slices.Concat(u32(2), sized(high[0].Buffer), sized(high[1].Buffer))
	digest := raw(tpm2.TPMCCPolicyGetDigest, on(firstPolicy), nil)
	nvPublic := func(size int, attributes uint32) []byte {
		return sized(slices.Concat(u32(0x01c00055), u16(int(tpm2.TPMAlgSHA256)), u32(attributes), sized(nil), u16(size)))
	}
	define := func(h tpm2.TPMHandle, size int, attributes uint32) []byte {
		return raw(tpm2.TPMCCNVDefineSpace, on(h), by(password("")), sized(nil), nvPublic(size, attributes))
	}
	undefine := func(h tpm2.TPMHandle) []byte {
		return raw(tpm2.TPMCCNVUndefineSpace, on(h, 0x01c00055), by(password("")))
	}
	// by platform, written and read by it and by the owner, no DA; and by the owner
	const platformNV, ownerNV = 0x42030003, 0x02060006
	evict := func(h, object, at tpm2.TPMHandle) []byte {
		return raw(tpm2.TPMCCEvictControl, on(h, object), by(password("")), u32(uint32(at)))
	}
	extend := func(pcr tpm2.TPMHandle, word string) []byte {
		return raw(tpm2.TPMCCPCRExtend, on(pcr), by(password(word)), u32(1), u16(int(tpm2.TPMAlgSHA256)), make([]byte, 32))
	}
	owner, platform := tpm2.TPMRHOwner, tpm2.TPMRHPlatform
	for name, commands := range map[string][][]byte{
		"no such command":              {raw(0x11e, nil, nil), raw(0x20000001, nil, nil), raw(0x2ff, nil, nil)},
		"no authorisation":             {raw(tpm2.TPMCCCreatePrimary, on(tpm2.TPMRHEndorsement), nil, ek[27:])},
		"one authorisation of two":     {ak, ek, raw(tpm2.TPMCCActivateCredential, on(firstObject, secondObject), by(password("")), sized(nil), sized(nil))},
		"an authorisation for nothing": {raw(tpm2.TPMCCPCRRead, nil, by(password("")), pcrsRaw(tpm2.TPMAlgSHA256)), raw(tpm2.TPMCCGetRandom, nil, by(password("")), u16(4))},
		"two where one is wanted":      {raw(tpm2.TPMCCNVRead, on(testIndex, testIndex), by(password(""), password("")), u16(8), u16(0))},
		"keys":                         {ak, ek, raw(tpm2.TPMCCReadPublic, on(firstObject), nil)},
		"no room for another object":   {ak, ek, ek, ek, ak, createRaw(template.AK(), "x")},
		"no room for another session":  {start, start, startRaw(tpm2.TPMSEHMAC, 16, tpm2.TPMAlgSHA256), start},
		"flushed": {
			ek, raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(firstObject))), raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(firstObject))),
			raw(tpm2.TPMCCReadPublic, on(firstObject), nil),
		},
		"flush what cannot be": {
			raw(tpm2.TPMCCFlushContext, nil, nil, u32(0x81010001)), raw(tpm2.TPMCCFlushContext, nil, nil, u32(0x03000009)),
			raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(owner))), raw(tpm2.TPMCCFlushContext, nil, nil, u32(0x80ffffff)),
		},
		"flushed as the other kind of session": {start, raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(hmacSession)))},
		"unknown handles": {
			raw(tpm2.TPMCCReadPublic, on(0x80000005), nil), raw(tpm2.TPMCCReadPublic, on(0x81000005), nil), raw(tpm2.TPMCCReadPublic, on(owner), nil),
			raw(tpm2.TPMCCNVReadPublic, on(0x01c09999), nil), raw(tpm2.TPMCCNVReadPublic, on(owner), nil), digest, quoteRaw(""),
			raw(tpm2.TPMCCPolicyGetDigest, on(hmacSession), nil), readNVRaw(by(slices.Concat(u32(uint32(hmacSession)), u16(0), []byte{1}, u16(0))), 8, 0),
		},
		"wrong password":               {createRaw(template.AK(), "x"), ak, quoteRaw("x"), quoteRaw(""), readNVRaw(by(password("x")), 8, 0), start, secretRaw("x", nil)},
		"a password with zeros behind": {createRaw(template.AK(), "\x00\x00"), quoteRaw("\x00")},
		"the EK by password": {
			ak, ek, raw(tpm2.TPMCCActivateCredential, on(firstObject, secondObject), by(password(""), password("")), sized(nil), sized(nil)),
		},
		"the EK where it is administered by policy": {
			ak, ek, raw(tpm2.TPMCCActivateCredential, on(secondObject, secondObject), by(password(""), password("")), sized(nil), sized(nil)),
		},
		"a session of another key's hash": {startRaw(tpm2.TPMSEPolicy, 16, tpm2.TPMAlgSHA384), secretRaw("", nil), digest},
		"nonces":                          {startRaw(tpm2.TPMSEPolicy, 15, tpm2.TPMAlgSHA256), startRaw(tpm2.TPMSEHMAC, 33, tpm2.TPMAlgSHA256), startRaw(tpm2.TPMSEHMAC, 32, tpm2.TPMAlgSHA256)},
		"no kind of session":              {startRaw(2, 16, tpm2.TPMAlgSHA256), startRaw(tpm2.TPMSEPolicy, 16, 0x7777), startRaw(tpm2.TPMSEPolicy, 16, tpm2.TPMAlgNull)},
		"a salt for no key":               {raw(tpm2.TPMCCStartAuthSession, on(tpm2.TPMRHNull, tpm2.TPMRHNull), nil, sized(make([]byte, 16)), sized([]byte("salt")), []byte{1}, u16(int(tpm2.TPMAlgNull)), u16(int(tpm2.TPMAlgSHA256)))},
		"no salt for a key":               {ek, raw(tpm2.TPMCCStartAuthSession, on(firstObject, tpm2.TPMRHNull), nil, sized(make([]byte, 16)), sized(nil), []byte{1}, u16(int(tpm2.TPMAlgNull)), u16(int(tpm2.TPMAlgSHA256)))},
		"a salt for a key that signs":     {ak, raw(tpm2.TPMCCStartAuthSession, on(firstObject, tpm2.TPMRHNull), nil, sized(make([]byte, 16)), sized(make([]byte, 68)), []byte{1}, u16(int(tpm2.TPMAlgNull)), u16(int(tpm2.TPMAlgSHA256)))},
		"a policy": {
			start, digest, secretRaw("", nil), digest, raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, branches), digest,
			raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, branches), raw(tpm2.TPMCCPolicyRestart, on(firstPolicy), nil), digest,
		},
		"a policy on trial": {startRaw(tpm2.TPMSETrial, 16, tpm2.TPMAlgSHA256), raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, branches), digest},
		"no branch of it":   {start, raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, branches)},
		"too few branches":  {start, secretRaw("", nil), raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, u32(1), sized(policyA)), raw(tpm2.TPMCCPolicyOR, on(firstPolicy), nil, u32(9))},
		"another nonce":     {start, secretRaw("", make([]byte, 16))},
		"a policy command in a session that is none": {
			startRaw(tpm2.TPMSEHMAC, 16, tpm2.TPMAlgSHA256), digest, raw(tpm2.TPMCCPolicyOR, on(hmacSession), nil, branches),
		},
		"NV": {
			readNVRaw(by(password("")), 100, 0), readNVRaw(by(password("")), 1024, 476), readNVRaw(by(password("")), 1024, 477),
			readNVRaw(by(password("")), 1025, 0), readNVRaw(by(password("")), 0, 1500), readNVRaw(by(password("")), 1, 1501), readNVRaw(by(password("")), 1, 1500),
			raw(tpm2.TPMCCNVReadPublic, on(testIndex), nil),
			raw(tpm2.TPMCCNVRead, on(owner, testIndex), by(password("")), u16(3), u16(1)),
			raw(tpm2.TPMCCNVRead, on(0x01c0000a, testIndex), by(password("")), u16(3), u16(1)),
			raw(tpm2.TPMCCNVWrite, on(owner, testIndex), by(password("")), sized([]byte("x")), u16(0)),
			raw(tpm2.TPMCCNVWrite, on(testIndex, testIndex), by(password("")), sized([]byte("x")), u16(0)),
			raw(tpm2.TPMCCNVWrite, on(platform, testIndex), by(password("")), sized([]byte("x")), u16(1500)),
			raw(tpm2.TPMCCNVWrite, on(platform, testIndex), by(password("")), sized(make([]byte, 1025)), u16(0)),
		},
		"NV made and gone": {
			define(platform, 16, platformNV), define(platform, 16, platformNV),
			raw(tpm2.TPMCCNVReadPublic, on(0x01c00055), nil),
			raw(tpm2.TPMCCNVRead, on(owner, 0x01c00055), by(password("")), u16(3), u16(1)),
			raw(tpm2.TPMCCNVWrite, on(owner, 0x01c00055), by(password("")), sized([]byte("x")), u16(3)),
			raw(tpm2.TPMCCNVRead, on(owner, 0x01c00055), by(password("")), u16(16), u16(0)),
			raw(tpm2.TPMCCNVReadPublic, on(0x01c00055), nil),
			undefine(owner), undefine(platform), undefine(platform),
			define(owner, 16, ownerNV), raw(tpm2.TPMCCNVRead, on(0x01c00055, 0x01c00055), by(password("")), u16(3), u16(1)), undefine(owner),
		},
		"NV that cannot be": {
			define(owner, 16, platformNV), define(platform, 16, ownerNV), define(platform, 2049, platformNV), define(tpm2.TPMRHEndorsement, 16, platformNV),
			define(owner, 16, ownerNV|0x100), define(owner, 16, ownerNV|1<<29), define(owner, 16, 0x02000006), define(owner, 16, 0x02060000),
		},
		"persistent": {
			ek, evict(owner, firstObject, 0x81010001), evict(owner, firstObject, 0x81010001), evict(owner, firstObject, 0x81800001),
			evict(platform, firstObject, 0x81800001), evict(owner, firstObject, 0x80000001), raw(tpm2.TPMCCReadPublic, on(0x81010001), nil),
			capabilityRaw(tpm2.TPMCapHandles, 0x81000000, 10), evict(owner, 0x81010001, 0x81010002), evict(owner, 0x81010001, 0x81010001),
			evict(owner, 0x81010001, 0x81010001), evict(tpm2.TPMRHEndorsement, firstObject, 0x81010001),
		},
		"persistent, and no room to use it": {
			ek, evict(owner, firstObject, 0x81010001), ek, ek, raw(tpm2.TPMCCReadPublic, on(0x81010001), nil),
			raw(tpm2.TPMCCFlushContext, nil, nil, u32(uint32(firstObject))), raw(tpm2.TPMCCReadPublic, on(0x81010001), nil), evict(owner, 0x81010001, 0x81010001),
		},
		"PCRs": {
			extend(4, "x"), extend(17, ""), extend(22, ""), extend(24, ""), extend(4, ""), extend(16, ""), extend(23, ""),
			raw(tpm2.TPMCCPCREvent, on(5), by(password("")), sized([]byte("event"))), raw(tpm2.TPMCCPCREvent, on(18), by(password("")), sized([]byte("event"))),
			raw(tpm2.TPMCCPCRExtend, on(4), by(password("")), u32(1), u16(0x7777), make([]byte, 32)),
			raw(tpm2.TPMCCPCRExtend, on(4), by(password("")), u32(0)), raw(tpm2.TPMCCPCRExtend, on(tpm2.TPMRHNull), by(password("")), u32(0)),
			raw(tpm2.TPMCCPCRRead, nil, nil, pcrsRaw(0x7777)), raw(tpm2.TPMCCPCRRead, nil, nil, u32(1), u16(int(tpm2.TPMAlgSHA256)), []byte{2, 0, 0}),
			raw(tpm2.TPMCCPCRRead, nil, nil, u32(1), u16(int(tpm2.TPMAlgSHA256)), []byte{4, 0, 0, 0, 0}),
		},
		"quotes": {
			ak, quoteRaw(""),
			raw(tpm2.TPMCCQuote, on(firstObject), by(password("")), sized(make([]byte, 67)), u16(int(tpm2.TPMAlgNull)), pcrsRaw(tpm2.TPMAlgSHA256)),
			raw(tpm2.TPMCCQuote, on(firstObject), by(password("")), sized(nil), u16(int(tpm2.TPMAlgECDSA)), u16(int(tpm2.TPMAlgSHA256)), pcrsRaw(tpm2.TPMAlgSHA384)),
			raw(tpm2.TPMCCQuote, on(firstObject), by(password("")), sized(nil), u16(int(tpm2.TPMAlgECDSA)), u16(int(tpm2.TPMAlgSHA384)), pcrsRaw(tpm2.TPMAlgSHA256)),
			raw(tpm2.TPMCCQuote, on(firstObject), by(password("")), sized(nil), u16(int(tpm2.TPMAlgNull)), pcrsRaw()),
		},
		"a quote by the EK": {ek, quoteRaw("")},
		"capabilities": {
			capabilityRaw(tpm2.TPMCapHandles, 0x12345678, 4), capabilityRaw(0x7777, 0, 1), capabilityRaw(tpm2.TPMCapHandles, 0x05000000, 4),
			capabilityRaw(tpm2.TPMCapPCRs, 1, 1), capabilityRaw(tpm2.TPMCapTPMProperties, 0x105, 40),
		},
		"the rest": {
			raw(tpm2.TPMCCStartup, nil, nil, u16(0)), raw(tpm2.TPMCCStartup, nil, nil, u16(7)), raw(tpm2.TPMCCSelfTest, nil, nil, []byte{1}),
			raw(tpm2.TPMCCSelfTest, nil, nil, []byte{7}), raw(tpm2.TPMCCGetRandom, nil, nil, u16(16)), raw(tpm2.TPMCCGetRandom, nil, nil, u16(1000)),
		},
	} {
		t.Run(name, func(t *testing.T) {
			codes := p.both(t, func(t *testing.T, r *recorder, _ chip) (sizes []byte) {
				for _, command := range commands {
					response, err := r.Send(command)
					if err != nil {
						r.codes = append(r.codes, "hangs up")
						continue
					}
					sizes = append(sizes, u16(len(response))...)
				}
				return sizes
			})
			t.Log(codes)
		})
	}
}
