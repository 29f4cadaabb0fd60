// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import "github.com/google/go-tpm/tpm2"

// entity is what a handle stands for, as far as authorisation goes.
type entity struct {
	handle tpm2.TPMHandle
	name   []byte
	// auth is the authorisation value, without trailing zeros; policy the digest, with the
	// algorithm that it is by. Without a policy that is nil.
	auth, policy []byte
	policyAlg    tpm2.TPMAlgID
	// byPassword says for what the authorisation value is good, byPolicy the same for the policy.
	byPassword, byPolicy func(tpm2.TPMCC) bool
	// adminByPolicy is set if what takes the role of an administrator takes the policy.
	adminByPolicy bool
	// counts is set if a wrong authorisation value counts towards lockout.
	counts bool

	object  *object
	session *session
	nv      *nvIndex
}

func always(tpm2.TPMCC) bool { return true }
func never(tpm2.TPMCC) bool  { return false }

// entity looks a handle up. TPM_RC_REFERENCE_H0 is for what was not loaded.
func (t *TPM) entity(h tpm2.TPMHandle) (*entity, tpm2.TPMRC) {
	bare := &entity{handle: h, name: be32(uint32(h)), byPassword: always, byPolicy: never}
	switch kind(h) {
	case tpm2.TPMHTPermanent:
		bare.counts = h == tpm2.TPMRHLockout
		return bare, 0
	case tpm2.TPMHTPCR:
		return bare, 0
	case tpm2.TPMHTHMACSession, tpm2.TPMHTPolicySession:
		s, ok := t.sessions[number(h)]
		if !ok {
			return nil, tpm2.TPMRCReferenceH0
		}
		if kind(h) == tpm2.TPMHTPolicySession && s.kind == tpm2.TPMSEHMAC {
			return nil, tpm2.TPMRCHandle
		}
		bare.session, bare.byPassword = s, never
		return bare, 0
	case tpm2.TPMHTNVIndex:
		index, ok := t.nv[h]
		if !ok {
			return nil, tpm2.TPMRCHandle
		}
		return index.entity(), 0
	case tpm2.TPMHTTransient:
		o, ok := t.objects[h]
		if !ok {
			return nil, tpm2.TPMRCReferenceH0
		}
		return o.entity(h), 0
	case tpm2.TPMHTPersistent:
		o, ok := t.persistent[h]
		if !ok {
			return nil, tpm2.TPMRCHandle
		}
		return o.entity(h), 0
	}
	return nil, tpm2.TPMRCHandle
}

func (o *object) entity(h tpm2.TPMHandle) *entity {
	a := o.public.ObjectAttributes
	return &entity{
		handle: h, name: o.name, auth: o.auth, policy: o.public.AuthPolicy.Buffer, policyAlg: o.public.NameAlg, counts: !a.NoDA, object: o,
		byPassword:    func(tpm2.TPMCC) bool { return a.UserWithAuth },
		byPolicy:      func(tpm2.TPMCC) bool { return len(o.public.AuthPolicy.Buffer) > 0 },
		adminByPolicy: a.AdminWithPolicy,
	}
}

func trimmed(auth []byte) []byte {
	for len(auth) > 0 && auth[len(auth)-1] == 0 {
		auth = auth[:len(auth)-1]
	}
	return auth
}
