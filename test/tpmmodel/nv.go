// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"

	"github.com/google/go-tpm/tpm2"
)

// What NV has room for: an index, a read or write, and the whole.
const (
	maxIndex    = 2048
	maxNVBuffer = 1024
	maxNV       = 64 << 10
)

// nvIndex is an ordinary index.
type nvIndex struct {
	public tpm2.TPMSNVPublic
	// area is the marshalled public area, and name follows from it. The first write changes both.
	area, name []byte
	auth, data []byte
}

// describe sets what follows from the public area.
func (n *nvIndex) describe() {
	n.area = tpm2.Marshal(n.public)
	n.name = nameOf(n.public.NameAlg, n.area)
}

func (n *nvIndex) entity() *entity {
	a := n.public.Attributes
	return &entity{
		handle: n.public.NVIndex, name: n.name, auth: n.auth, policy: n.public.AuthPolicy.Buffer, policyAlg: n.public.NameAlg, counts: !a.NoDA, nv: n,
		byPassword: func(code tpm2.TPMCC) bool {
			if code == tpm2.TPMCCNVWrite {
				return a.AuthWrite
			}
			return a.AuthRead
		},
		byPolicy: func(code tpm2.TPMCC) bool {
			if code == tpm2.TPMCCNVWrite {
				return a.PolicyWrite
			}
			return a.PolicyRead
		},
	}
}

// Reserved bits of a TPMA_NV.
const reservedNV = uint32(0x01f00300)

// nvDefineSpace is TPM2_NV_DefineSpace.
func (t *TPM) nvDefineSpace(c *call) ([]byte, tpm2.TPMRC) {
	auth := c.in.parameter(1).sized(maxDigest)
	var area []byte
	c.in.parameter(2).inner(func(r *reader) {
		start := r.data
		h := tpm2.TPMHandle(r.u32())
		r.check(isNV(h), tpm2.TPMRCValue)
		_, ok := hashOf(r.alg())
		r.check(ok, tpm2.TPMRCHash)
		r.check(r.u32()&reservedNV == 0, tpm2.TPMRCReservedBits)
		r.sized(maxDigest)
		r.check(r.u16() <= maxIndex, tpm2.TPMRCSize)
		if r.rc == 0 {
			area = consumed(start, r.data)
		}
	})
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	public, err := tpm2.Unmarshal[tpm2.TPMSNVPublic](area)
	if err != nil {
		return nil, tpm2.TPMRCFailure // it has been read
	}
	h, _ := hashOf(public.NameAlg)
	if len(trimmed(auth)) > h.Size() {
		return nil, about(tpm2.TPMRCSize, ofParameter, 1)
	}
	if public.Attributes.PlatformCreate != (c.handles[0] == tpm2.TPMRHPlatform) {
		return nil, about(tpm2.TPMRCAttributes, ofHandle, 1)
	}
	if rc := checkNV(*public); rc != 0 {
		return nil, about(rc, ofParameter, 2)
	}
	if t.nv[public.NVIndex] != nil {
		return nil, tpm2.TPMRCNVDefined
	}
	used := int(public.DataSize)
	for _, n := range t.nv {
		used += len(n.data)
	}
	if used > maxNV {
		return nil, tpm2.TPMRCNVSpace
	}
	n := &nvIndex{public: *public, auth: bytes.Clone(trimmed(auth)), data: bytes.Repeat([]byte{0xff}, int(public.DataSize))}
	n.describe()
	t.nv[public.NVIndex] = n
	return nil, 0
}

// checkNV returns what makes a public area none that an index can have.
func checkNV(p tpm2.TPMSNVPublic) tpm2.TPMRC {
	a := p.Attributes
	h, _ := hashOf(p.NameAlg)
	policy := len(p.AuthPolicy.Buffer)
	switch {
	case policy != 0 && policy != h.Size():
		return tpm2.TPMRCSize
	case a.NT != tpm2.TPMNTOrdinary, // others are not modelled
		a.Written, a.ReadLocked, a.WriteLocked,
		a.PolicyDelete && !a.PlatformCreate,
		!a.PPWrite && !a.OwnerWrite && !a.AuthWrite && !a.PolicyWrite,
		!a.PPRead && !a.OwnerRead && !a.AuthRead && !a.PolicyRead:
		return tpm2.TPMRCAttributes
	}
	return 0
}

// nvUndefineSpace is TPM2_NV_UndefineSpace.
func (t *TPM) nvUndefineSpace(c *call) ([]byte, tpm2.TPMRC) {
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	n := c.entities[1].nv
	switch {
	case n.public.Attributes.PolicyDelete:
		return nil, about(tpm2.TPMRCAttributes, ofHandle, 2)
	case c.handles[0] == tpm2.TPMRHOwner && n.public.Attributes.PlatformCreate:
		return nil, tpm2.TPMRCNVAuthorization
	}
	delete(t.nv, n.public.NVIndex)
	return nil, 0
}

// mayNot is how an access by the first handle of a command is refused whose attribute is not set.
func (c *call) mayNot(platform, owner bool) tpm2.TPMRC {
	ok := c.handles[0] == c.handles[1] // by its own authorisation, which has been checked
	switch c.handles[0] {
	case tpm2.TPMRHPlatform:
		ok = platform
	case tpm2.TPMRHOwner:
		ok = owner
	}
	if !ok {
		return tpm2.TPMRCNVAuthorization
	}
	return 0
}

// nvWrite is TPM2_NV_Write.
func (t *TPM) nvWrite(c *call) ([]byte, tpm2.TPMRC) {
	data := c.in.parameter(1).sized(maxNVBuffer)
	offset := int(c.in.parameter(2).u16())
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	n := c.entities[1].nv
	a := &n.public.Attributes
	if rc := c.mayNot(a.PPWrite, a.OwnerWrite); rc != 0 {
		return nil, rc
	}
	switch {
	case a.WriteLocked:
		return nil, tpm2.TPMRCNVLocked
	case offset > len(n.data):
		return nil, about(tpm2.TPMRCValue, ofParameter, 2)
	case offset+len(data) > len(n.data), a.WriteAll && len(data) < len(n.data):
		return nil, tpm2.TPMRCNVRange
	}
	copy(n.data[offset:], data)
	if !a.Written {
		a.Written = true
		n.describe()
	}
	return nil, 0
}

// nvRead is TPM2_NV_Read.
func (t *TPM) nvRead(c *call) ([]byte, tpm2.TPMRC) {
	size := int(c.in.parameter(1).u16())
	offset := int(c.in.parameter(2).u16())
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	n := c.entities[1].nv
	a := n.public.Attributes
	if rc := c.mayNot(a.PPRead, a.OwnerRead); rc != 0 {
		return nil, rc
	}
	switch {
	case a.ReadLocked:
		return nil, tpm2.TPMRCNVLocked
	case !a.Written:
		return nil, tpm2.TPMRCNVUninitialized
	case size > maxNVBuffer:
		return nil, about(tpm2.TPMRCValue, ofParameter, 1)
	case offset > len(n.data):
		return nil, about(tpm2.TPMRCValue, ofParameter, 2)
	case offset+size > len(n.data):
		return nil, tpm2.TPMRCNVRange
	}
	return sized(n.data[offset : offset+size]), 0
}

// nvReadPublic is TPM2_NV_ReadPublic.
func (t *TPM) nvReadPublic(c *call) ([]byte, tpm2.TPMRC) {
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	n := c.entities[0].nv
	return append(sized(n.area), sized(n.name)...), 0
}
