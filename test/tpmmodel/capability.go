// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"cmp"
	"maps"
	"slices"

	"github.com/google/go-tpm/tpm2"
)

// How many values one response has room for.
const (
	maxHandles    = 254
	maxProperties = 127
)

// getCapability is TPM2_GetCapability, for handles, properties, PCR banks and commands.
func (t *TPM) getCapability(c *call) ([]byte, tpm2.TPMRC) {
	capability := tpm2.TPMCap(c.in.parameter(1).u32())
	c.in.check(capability <= tpm2.TPMCapECCCurves+1, tpm2.TPMRCValue)
	property := c.in.parameter(2).u32()
	count := int(c.in.parameter(3).u32())
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	var out []byte
	var more bool
	switch capability {
	case tpm2.TPMCapHandles:
		all, ok := t.handlesOf(tpm2.TPMHandle(property))
		if !ok {
			return nil, about(tpm2.TPMRCHandle, ofParameter, 2)
		}
		// all of one kind, or sessions
		slices.SortFunc(all, func(a, b tpm2.TPMHandle) int { return cmp.Compare(number(a), number(b)) })
		out, more = list(all, min(count, maxHandles), func(h tpm2.TPMHandle) []byte { return be32(uint32(h)) })
	case tpm2.TPMCapTPMProperties:
		out, more = list(t.properties(tpm2.TPMPT(property)), min(count, maxProperties), func(p tpm2.TPMSTaggedProperty) []byte { return tpm2.Marshal(p) })
	case tpm2.TPMCapCommands:
		all := slices.Sorted(maps.Keys(commands))
		all = slices.DeleteFunc(all, func(code tpm2.TPMCC) bool { return uint32(code) < property })
		out, more = list(all, min(count, maxHandles), attributesOf)
	case tpm2.TPMCapPCRs:
		if property != 0 {
			return nil, about(tpm2.TPMRCValue, ofParameter, 2)
		}
		var all []bankSelection
		for _, alg := range hashes {
			s := bankSelection{bank: alg}
			for i := range s.pcrs {
				s.pcrs[i] = true
			}
			all = append(all, s)
		}
		out = tpm2.Marshal(selectionOf(all))
	default: // not modelled
		return nil, about(tpm2.TPMRCValue, ofParameter, 1)
	}
	head := []byte{0}
	if more {
		head[0] = 1
	}
	return append(append(head, be32(uint32(capability))...), out...), 0
}

// list is a TPML of at most so many values, and whether there are more.
func list[T any](all []T, count int, marshal func(T) []byte) (out []byte, more bool) {
	more = len(all) > count
	all = all[:min(len(all), count)]
	out = be32(uint32(len(all))) //nolint:gosec // at most 254
	for _, v := range all {
		out = append(out, marshal(v)...)
	}
	return out, more
}

// attributesOf is a TPMA_CC.
func attributesOf(code tpm2.TPMCC) []byte {
	return be32(uint32(code) | uint32(len(commands[code].handles))<<25) //nolint:gosec // at most 2
}

// handlesOf returns the handles in use of the kind of one, from it on.
func (t *TPM) handlesOf(first tpm2.TPMHandle) (all []tpm2.TPMHandle, ok bool) {
	add := func(h tpm2.TPMHandle) {
		if h >= first {
			all = append(all, h)
		}
	}
	switch kind(first) {
	case tpm2.TPMHTPCR:
		for i := range pcrCount {
			add(tpm2.TPMHandle(i))
		}
	case tpm2.TPMHTNVIndex:
		for h := range t.nv {
			add(h)
		}
	case tpm2.TPMHTHMACSession:
		// of both kinds: TPM_HT_LOADED_SESSION. They are counted by what is the same in both.
		for h := range t.sessions {
			if h >= number(first) {
				all = append(all, t.sessions[h].handle)
			}
		}
	case tpm2.TPMHTPolicySession: // TPM_HT_SAVED_SESSION: saving contexts is not modelled
	case tpm2.TPMHTPermanent:
		for _, h := range []tpm2.TPMHandle{tpm2.TPMRHOwner, tpm2.TPMRHNull, tpm2.TPMRSPW, tpm2.TPMRHLockout, tpm2.TPMRHEndorsement, tpm2.TPMRHPlatform, platformNV} {
			add(h)
		}
	case tpm2.TPMHTTransient:
		for h := range t.objects {
			add(h)
		}
	case tpm2.TPMHTPersistent:
		for h := range t.persistent {
			add(h)
		}
	default:
		return nil, false
	}
	return all, true
}

// platformNV is TPM_RH_PLATFORM_NV.
const platformNV = tpm2.TPMHandle(0x4000000d)

// text is four characters of a property.
func text(s string) uint32 {
	var v uint32
	for i := range 4 {
		v <<= 8
		if i < len(s) {
			v |= uint32(s[i])
		}
	}
	return v
}

// unassigned is between TPM_PT_CONTEXT_GAP_MAX and TPM_PT_NV_COUNTERS_MAX.
const unassigned = tpm2.TPMPT(0x115)

// properties returns the TPM's, from one on to the last of its group: PT_FIXED or PT_VAR.
func (t *TPM) properties(first tpm2.TPMPT) []tpm2.TPMSTaggedProperty {
	loaded, sessions := uint32(len(t.objects)), uint32(len(t.sessions)) //nolint:gosec // at most 3
	values := map[tpm2.TPMPT]uint32{
		tpm2.TPMPTFamilyIndicator:  text("2.0"),
		tpm2.TPMPTLevel:            0,
		tpm2.TPMPTRevision:         159,
		tpm2.TPMPTManufacturer:     text("IBM"), // whom its certificate names, too
		tpm2.TPMPTVendorString1:    text("MODE"),
		tpm2.TPMPTVendorString2:    text("L"),
		tpm2.TPMPTVendorString3:    0,
		tpm2.TPMPTVendorString4:    0,
		tpm2.TPMPTVendorTPMType:    1,
		tpm2.TPMPTFirmwareVersion1: uint32(firmware >> 32),
		tpm2.TPMPTFirmwareVersion2: uint32(firmware & 0xffffffff),
		tpm2.TPMPTInputBuffer:      maxNVBuffer,
		tpm2.TPMPTHRTransientMin:   maxObjects,
		tpm2.TPMPTHRPersistentMin:  maxPersistent,
		tpm2.TPMPTHRLoadedMin:      maxSessions,
		tpm2.TPMPTPCRCount:         pcrCount,
		tpm2.TPMPTPCRSelectMin:     pcrCount / 8,
		tpm2.TPMPTNVIndexMax:       maxIndex,
		tpm2.TPMPTMaxCommandSize:   maxMessage,
		tpm2.TPMPTMaxResponseSize:  maxMessage,
		tpm2.TPMPTMaxDigest:        maxDigest,
		tpm2.TPMPTNVBufferMax:      maxNVBuffer,

		tpm2.TPMPTHRLoaded:          sessions,
		tpm2.TPMPTHRLoadedAvail:     maxSessions - sessions,
		tpm2.TPMPTHRTransientAvail:  maxObjects - loaded,
		tpm2.TPMPTHRPersistent:      uint32(len(t.persistent)),                 //nolint:gosec // at most 16
		tpm2.TPMPTHRPersistentAvail: maxPersistent - uint32(len(t.persistent)), //nolint:gosec // at most 16
		tpm2.TPMPTLockoutCounter:    t.failures,
		tpm2.TPMPTMaxAuthFail:       maxFailures,
	}
	// Every one of both groups is there, but for a number that the specification leaves out.
	for p := tpm2.TPMPTFamilyIndicator; p <= tpm2.TPMPTMaxCapBuffer; p++ {
		if p != unassigned {
			values[p] += 0
		}
	}
	for p := tpm2.TPMPTPermanent; p <= tpm2.TPMPTAuditCounter1; p++ {
		values[p] += 0
	}
	first = max(first, tpm2.TPMPTFamilyIndicator)
	var all []tpm2.TPMSTaggedProperty
	for _, p := range slices.Sorted(maps.Keys(values)) {
		if p >= first && p>>8 == first>>8 {
			all = append(all, tpm2.TPMSTaggedProperty{Property: p, Value: values[p]})
		}
	}
	return all
}
