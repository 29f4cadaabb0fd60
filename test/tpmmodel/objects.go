// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"
	"crypto"

	"github.com/google/go-tpm/tpm2"
)

// object is a loaded key.
type object struct {
	*primary
	auth []byte
}

// The first handles of their kinds, and where the platform's persistent ones begin.
const (
	firstTransient  tpm2.TPMHandle = 0x80000000
	firstPersistent tpm2.TPMHandle = 0x81000000
	firstPlatform   tpm2.TPMHandle = 0x81800000
	lastPersistent  tpm2.TPMHandle = 0x81ffffff
)

// maxData is the size of the largest TPM2B_DATA, a TPMT_HA; maxSensitive that of the largest data
// in a sensitive area.
const (
	maxData      = 2 + maxDigest
	maxSensitive = 128
)

// createPrimary is TPM2_CreatePrimary.
func (t *TPM) createPrimary(c *call) ([]byte, tpm2.TPMRC) {
	var auth, data []byte
	c.in.parameter(1).inner(func(r *reader) { auth, data = r.sized(maxDigest), r.sized(maxSensitive) })
	var made *template
	c.in.parameter(2).inner(func(r *reader) { made = r.template() })
	outside := c.in.parameter(3).sized(maxData)
	selected := c.in.parameter(4).pcrSelection()
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	if len(t.objects) >= maxObjects {
		return nil, tpm2.TPMRCObjectMemory
	}
	p, rc := t.primary(c.handles[0], made)
	if rc != 0 {
		return nil, rc
	}
	h, _ := hashOf(made.nameAlg)
	switch {
	case len(trimmed(auth)) > h.Size():
		return nil, about(tpm2.TPMRCSize, ofParameter, 1)
	case len(data) > 0: // an asymmetric key has none
		return nil, about(tpm2.TPMRCValue, ofParameter, 1)
	}
	o := &object{primary: p, auth: bytes.Clone(trimmed(auth))}
	handle := firstTransient
	for t.objects[handle] != nil {
		handle++
	}
	t.objects[handle] = o
	c.made = &handle
	return t.creation(o, h, outside, selected), 0
}

// creation is the response of TPM2_CreatePrimary.
func (t *TPM) creation(o *object, h crypto.Hash, outside []byte, selected []bankSelection) []byte {
	parent := be32(uint32(o.hierarchy))
	data := tpm2.Marshal(tpm2.TPMSCreationData{
		PCRSelect:           selectionOf(selected),
		PCRDigest:           tpm2.TPM2BDigest{Buffer: t.pcrs.digest(h, selected)},
		Locality:            tpm2.TPMALocality{TPMLocZero: true},
		ParentNameAlg:       tpm2.TPMAlgNull,
		ParentName:          tpm2.TPM2BName{Buffer: parent},
		ParentQualifiedName: tpm2.TPM2BName{Buffer: parent},
		OutsideInfo:         tpm2.TPM2BData{Buffer: outside},
	})
	hash := digest(h, data)
	out := append(sized(o.area), sized(data)...)
	out = append(out, sized(hash)...)
	// part 3, "TPM2_CreatePrimary": HMAC(proof, TPM_ST_CREATION | Name | creationHash). That of the
	// null hierarchy is empty.
	proof := mac(crypto.SHA512, t.proofs[o.hierarchy], be16(int(tpm2.TPMSTCreation)), o.name, hash)
	out = append(out, ticket(tpm2.TPMSTCreation, o.hierarchy, proof)...)
	return append(out, sized(o.name)...)
}

// readPublic is TPM2_ReadPublic.
func (t *TPM) readPublic(c *call) ([]byte, tpm2.TPMRC) {
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	o := c.entities[0].object
	return append(append(sized(o.area), sized(o.name)...), sized(o.qualifiedName)...), 0
}

// flushContext is TPM2_FlushContext, whose handle is a parameter.
func (t *TPM) flushContext(c *call) ([]byte, tpm2.TPMRC) {
	h := tpm2.TPMHandle(c.in.parameter(1).u32())
	c.in.check(isSession(h) || isTransient(h), tpm2.TPMRCValue)
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	var isLoaded bool
	if isSession(h) {
		_, isLoaded = t.sessions[number(h)]
		delete(t.sessions, number(h))
	} else {
		_, isLoaded = t.objects[h]
		delete(t.objects, h)
	}
	if !isLoaded {
		return nil, about(tpm2.TPMRCHandle, ofParameter, 1)
	}
	return nil, 0
}

// evictControl is TPM2_EvictControl.
func (t *TPM) evictControl(c *call) ([]byte, tpm2.TPMRC) {
	at := tpm2.TPMHandle(c.in.parameter(1).u32())
	c.in.check(kind(at) == tpm2.TPMHTPersistent, tpm2.TPMRCValue)
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	o := c.entities[1].object
	byPlatform := c.handles[0] == tpm2.TPMRHPlatform
	if byPlatform != (o.hierarchy == tpm2.TPMRHPlatform) || o.hierarchy == tpm2.TPMRHNull {
		return nil, about(tpm2.TPMRCHierarchy, ofHandle, 2)
	}
	if kind(c.handles[1]) == tpm2.TPMHTPersistent {
		if c.handles[1] != at {
			return nil, about(tpm2.TPMRCHandle, ofHandle, 2)
		}
		delete(t.persistent, at)
		return nil, 0
	}
	switch {
	case byPlatform != (at >= firstPlatform):
		return nil, about(tpm2.TPMRCRange, ofParameter, 1)
	case t.persistent[at] != nil:
		return nil, tpm2.TPMRCNVDefined
	case len(t.persistent) >= maxPersistent:
		return nil, tpm2.TPMRCNVSpace
	}
	t.persistent[at] = o
	return nil, 0
}
