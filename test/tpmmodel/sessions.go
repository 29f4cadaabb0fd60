// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"

	"github.com/google/go-tpm/tpm2"
)

// session is a loaded one (part 1, "Session-Based Authorizations").
type session struct {
	handle      tpm2.TPMHandle
	kind        tpm2.TPMSE
	hash        crypto.Hash
	hashAlg     tpm2.TPMAlgID
	key         []byte
	nonceTPM    []byte
	nonceCaller []byte
	// aesBits is 0 where the session encrypts nothing.
	aesBits int
	// bound is the Name and the authorisation value of the entity that it is bound to, nil if it is
	// to none.
	bound []byte

	// policy is the digest so far, cpHash what it restricts it to; nil for nothing.
	policy, cpHash []byte
}

// The attributes of a session in a command (part 2, "TPMA_SESSION").
const (
	attrContinue  = 0x01
	attrExclusive = 0x02
	attrReset     = 0x04
	attrReserved  = 0x18
	attrDecrypt   = 0x20
	attrEncrypt   = 0x40
	attrAudit     = 0x80
)

// minNonce is the size of the smallest nonce of a caller.
const minNonce = 16

// startAuthSession is TPM2_StartAuthSession.
func (t *TPM) startAuthSession(c *call) ([]byte, tpm2.TPMRC) {
	nonce := c.in.parameter(1).sized(maxDigest)
	secret := c.in.parameter(2).sized(maxSecret)
	kind := tpm2.TPMSE(c.in.parameter(3).u8())
	c.in.check(kind == tpm2.TPMSEHMAC || kind == tpm2.TPMSEPolicy || kind == tpm2.TPMSETrial, tpm2.TPMRCValue)
	symmetric := c.in.parameter(4).symmetric()
	alg := c.in.parameter(5).alg()
	h, ok := hashOf(alg)
	c.in.check(ok, tpm2.TPMRCHash)
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	if len(nonce) < minNonce || len(nonce) > h.Size() {
		return nil, about(tpm2.TPMRCSize, ofParameter, 1)
	}
	salt, rc := t.salt(c, secret)
	if rc != 0 {
		return nil, rc
	}
	if len(t.sessions) >= maxSessions {
		return nil, tpm2.TPMRCSessionMemory
	}
	s := &session{
		kind: kind, hash: h, hashAlg: alg, nonceCaller: bytes.Clone(nonce), nonceTPM: make([]byte, len(nonce)), aesBits: symmetric.aesBits,
		policy: make([]byte, h.Size()),
	}
	_, _ = rand.Read(s.nonceTPM) // never fails
	bind := c.entities[1]
	if c.handles[1] != tpm2.TPMRHNull && kind == tpm2.TPMSEHMAC {
		s.bound = bindingOf(bind)
	}
	if c.handles[1] != tpm2.TPMRHNull || len(salt) > 0 {
		s.key = tpm2.KDFa(h, append(bytes.Clone(bind.auth), salt...), "ATH", s.nonceTPM, s.nonceCaller, h.Size()*8)
	}
	first := tpm2.TPMHandle(tpm2.TPMHTHMACSession) << 24
	if kind != tpm2.TPMSEHMAC {
		first = tpm2.TPMHandle(tpm2.TPMHTPolicySession) << 24
	}
	s.handle = first + t.freeSession()
	t.sessions[number(s.handle)] = s
	c.made = &s.handle
	return sized(s.nonceTPM), 0
}

// number is what is a session's own in its handle; the rest is its kind.
func number(h tpm2.TPMHandle) tpm2.TPMHandle { return h & 0xffffff }

// freeSession returns the first number that no session has.
func (t *TPM) freeSession() (free tpm2.TPMHandle) {
	for t.sessions[free] != nil {
		free++
	}
	return free
}

// salt opens the secret that a session is salted with.
func (t *TPM) salt(c *call, secret []byte) ([]byte, tpm2.TPMRC) {
	switch {
	case c.handles[0] == tpm2.TPMRHNull && len(secret) > 0, c.handles[0] != tpm2.TPMRHNull && len(secret) == 0:
		return nil, about(tpm2.TPMRCValue, ofParameter, 2)
	case c.handles[0] == tpm2.TPMRHNull:
		return nil, 0
	}
	o := c.entities[0].object
	if !o.public.ObjectAttributes.Decrypt {
		return nil, about(tpm2.TPMRCAttributes, ofHandle, 1)
	}
	salt, rc := o.open(secret, "SECRET")
	return salt, about(rc, ofParameter, 2)
}

func bindingOf(e *entity) []byte { return append(bytes.Clone(e.name), e.auth...) }

// authorization is a session, or a password, in a command.
type authorization struct {
	handle     tpm2.TPMHandle
	session    *session // nil for a password
	nonce      []byte
	attributes byte
	value      []byte
	// entity is what it authorises, nil if it is there for another reason.
	entity *entity
}

// takeSessions reads the authorisation area, and checks that it authorises what the command does.
// Then it decrypts the first parameter, if it came encrypted.
func (t *TPM) takeSessions(c *call, known command, tag uint16) tpm2.TPMRC {
	if tag == withSessions {
		if rc := t.readAuths(c); rc != 0 {
			return rc
		}
	}
	c.raw = c.in.data
	c.in = &reader{data: bytes.Clone(c.raw)}
	wanted := 0
	for i, h := range known.handles {
		if h.role == nobody {
			continue
		}
		if wanted >= len(c.auths) {
			return tpm2.TPMRCAuthMissing
		}
		c.auths[wanted].entity = c.entities[i]
		wanted++
	}
	for i, a := range c.auths {
		if rc := t.checkAuth(c, known, i, a); rc != 0 {
			return about(rc, ofSession, i+1)
		}
	}
	return c.decrypt()
}

// leastAuth is the size of an authorisation that is empty.
const leastAuth = 9

func (t *TPM) readAuths(c *call) tpm2.TPMRC {
	if len(c.in.data) < 4 {
		return tpm2.TPMRCInsufficient
	}
	size := int(c.in.u32())
	if size < leastAuth || size > len(c.in.data) {
		// as the reference implementation; the specification has TPM_RC_AUTHSIZE, too
		return tpm2.TPMRCSize
	}
	area := &reader{data: c.in.data[:size:size]}
	c.in.data = c.in.data[size:]
	var decrypts, encrypts int
	for n := 1; len(area.data) > 0; n++ {
		if n > maxSessions {
			return tpm2.TPMRCAuthSize
		}
		a := &authorization{handle: tpm2.TPMHandle(area.begin(ofSession, n).u32())}
		area.check(isSession(a.handle) || a.handle == tpm2.TPMRSPW, tpm2.TPMRCValue)
		a.nonce = area.sized(maxDigest)
		a.attributes = area.u8()
		area.check(a.attributes&attrReserved == 0, tpm2.TPMRCReservedBits)
		a.value = area.sized(maxDigest)
		if area.rc != 0 {
			return area.rc
		}
		if a.handle == tpm2.TPMRSPW {
			area.check(a.attributes&^attrContinue == 0, tpm2.TPMRCAttributes)
			area.check(len(a.nonce) == 0, tpm2.TPMRCNonce)
		} else {
			s, ok := t.sessions[number(a.handle)]
			if !ok {
				return tpm2.TPMRCReferenceS0 + tpm2.TPMRC(n-1)
			}
			a.session = s
			area.check(kind(s.handle) == kind(a.handle), tpm2.TPMRCHandle)
			for _, other := range c.auths {
				area.check(other.handle != a.handle, tpm2.TPMRCHandle)
			}
			// Audit sessions are not modelled.
			area.check(s.kind != tpm2.TPMSETrial && a.attributes&(attrAudit|attrExclusive|attrReset) == 0, tpm2.TPMRCAttributes)
			area.check(a.attributes&(attrDecrypt|attrEncrypt) == 0 || s.aesBits > 0, tpm2.TPMRCSymmetric)
			decrypts += int(a.attributes & attrDecrypt / attrDecrypt)
			encrypts += int(a.attributes & attrEncrypt / attrEncrypt)
			area.check(decrypts < 2 && encrypts < 2, tpm2.TPMRCAttributes)
		}
		if area.rc != 0 {
			return area.rc
		}
		c.auths = append(c.auths, a)
	}
	return 0
}

// maxFailures is how many wrong authorisation values it takes until those that count are refused
// unseen.
const maxFailures = 3

// checkAuth checks one of the authorisations.
func (t *TPM) checkAuth(c *call, known command, index int, a *authorization) tpm2.TPMRC {
	if a.entity == nil {
		if a.session == nil {
			return tpm2.TPMRCHandle // a password for nothing
		}
		if a.attributes&(attrDecrypt|attrEncrypt) == 0 {
			return tpm2.TPMRCAttributes // it is there for nothing
		}
		return c.checkHMAC(index, a)
	}
	r := user
	for i, h := range known.handles {
		if c.entities[i] == a.entity && h.role != nobody {
			r = h.role
			break
		}
	}
	if a.session != nil && a.session.kind == tpm2.TPMSEPolicy {
		if !a.entity.byPolicy(c.code) {
			return tpm2.TPMRCAuthUnavailable
		}
		if rc := c.checkPolicy(a, r); rc != 0 {
			return rc
		}
		return c.checkHMAC(index, a)
	}
	if a.entity.counts && t.failures >= maxFailures {
		return tpm2.TPMRCLockout
	}
	if r == admin && a.entity.adminByPolicy {
		return tpm2.TPMRCAuthType
	}
	if !a.entity.byPassword(c.code) && r != admin {
		return tpm2.TPMRCAuthUnavailable
	}
	var rc tpm2.TPMRC
	if a.session == nil {
		if !hmac.Equal(trimmed(a.value), a.entity.auth) {
			rc = tpm2.TPMRCAuthFail
		}
	} else {
		rc = c.checkHMAC(index, a)
	}
	if rc != tpm2.TPMRCAuthFail {
		return rc
	}
	if !a.entity.counts {
		return tpm2.TPMRCBadAuth
	}
	t.failures++
	return tpm2.TPMRCAuthFail
}

// checkPolicy checks that the session's policy is the entity's.
func (c *call) checkPolicy(a *authorization, r role) tpm2.TPMRC {
	s := a.session
	if s.hashAlg != a.entity.policyAlg || !hmac.Equal(s.policy, a.entity.policy) {
		return tpm2.TPMRCPolicyFail
	}
	if s.cpHash != nil && !bytes.Equal(s.cpHash, c.cpHash(s.hash)) {
		return tpm2.TPMRCPolicyFail
	}
	if r == admin {
		return tpm2.TPMRCPolicyFail // that takes TPM2_PolicyCommandCode, which is not modelled
	}
	return 0
}

// cpHash is that of the command (part 1, "cpHash").
func (c *call) cpHash(h crypto.Hash) []byte {
	parts := [][]byte{be32(uint32(c.code))}
	for _, e := range c.entities {
		parts = append(parts, e.name)
	}
	return digest(h, append(parts, c.raw)...)
}

// hmacKey is the key of a session in a command. It has the authorisation value of the authorised
// object, unless the session is bound to that or is a policy session.
func (a *authorization) hmacKey() []byte {
	key := bytes.Clone(a.session.key)
	if a.entity != nil && a.session.kind == tpm2.TPMSEHMAC && !bytes.Equal(a.session.bound, bindingOf(a.entity)) {
		key = append(key, a.entity.auth...)
	}
	return key
}

// checkHMAC checks what a session says of the command.
func (c *call) checkHMAC(index int, a *authorization) tpm2.TPMRC {
	key := a.hmacKey()
	if len(key) == 0 && len(a.value) == 0 {
		return 0 // part 1: an empty key may have an empty HMAC
	}
	s := a.session
	parts := [][]byte{c.cpHash(s.hash), a.nonce, s.nonceTPM}
	if index == 0 {
		parts = append(parts, c.otherNonces()...)
	}
	want := mac(s.hash, key, append(parts, []byte{a.attributes})...)
	if hmac.Equal(want, a.value) {
		return 0
	}
	if s.kind == tpm2.TPMSEPolicy || a.entity == nil {
		return tpm2.TPMRCBadAuth
	}
	return tpm2.TPMRCAuthFail
}

// otherNonces are those of the sessions that decrypt and encrypt, if they are not the first: it
// vouches for them.
func (c *call) otherNonces() (nonces [][]byte) {
	decrypts, encrypts := c.with(attrDecrypt), c.with(attrEncrypt)
	if decrypts > 0 {
		nonces = append(nonces, c.auths[decrypts].session.nonceTPM)
	}
	if encrypts > 0 && encrypts != decrypts {
		nonces = append(nonces, c.auths[encrypts].session.nonceTPM)
	}
	return nonces
}

// with returns the index of the session with an attribute, -1 if none has it.
func (c *call) with(attribute byte) int {
	for i, a := range c.auths {
		if a.attributes&attribute != 0 {
			return i
		}
	}
	return -1
}

// crypt returns the stream that a session's parameters are encrypted with (part 1, "CFB Mode
// Parameter Encryption").
func (a *authorization) crypt(newer, older []byte, stream func(cipher.Block, []byte) cipher.Stream) cipher.Stream {
	s := a.session
	key := bytes.Clone(s.key)
	if a.entity != nil {
		key = append(key, a.entity.auth...)
	}
	size := s.aesBits / 8
	material := tpm2.KDFa(s.hash, key, "CFB", newer, older, (size+aes.BlockSize)*8)
	block, err := aes.NewCipher(material[:size])
	if err != nil {
		panic(err) // the size was checked when the session was started
	}
	return stream(block, material[size:])
}

// encrypted returns what is encrypted of parameters: the content of the first, if that is a TPM2B.
func encrypted(parameters []byte) ([]byte, bool) {
	r := &reader{data: parameters}
	content := r.sized(len(parameters))
	return content, r.rc == 0
}

// firstIsSized are the commands whose first parameter may come encrypted, and the responses whose
// first may leave so.
var firstIsSized = map[tpm2.TPMCC]struct{ command, response bool }{
	tpm2.TPMCCCreatePrimary:      {true, true},
	tpm2.TPMCCReadPublic:         {false, true},
	tpm2.TPMCCGetRandom:          {false, true},
	tpm2.TPMCCStartAuthSession:   {true, true},
	tpm2.TPMCCPolicySecret:       {true, true},
	tpm2.TPMCCPolicyGetDigest:    {false, true},
	tpm2.TPMCCActivateCredential: {true, true},
	tpm2.TPMCCQuote:              {true, true},
	tpm2.TPMCCPCREvent:           {true, false},
	tpm2.TPMCCNVDefineSpace:      {true, false},
	tpm2.TPMCCNVWrite:            {true, false},
	tpm2.TPMCCNVRead:             {false, true},
	tpm2.TPMCCNVReadPublic:       {false, true},
}

// decrypt decrypts the first parameter where a session says that it is encrypted, after all of them
// were checked.
func (c *call) decrypt() tpm2.TPMRC {
	if i := c.with(attrEncrypt); i >= 0 && !firstIsSized[c.code].response {
		return about(tpm2.TPMRCAttributes, ofSession, i+1)
	}
	i := c.with(attrDecrypt)
	if i < 0 {
		return 0
	}
	if !firstIsSized[c.code].command {
		return about(tpm2.TPMRCAttributes, ofSession, i+1)
	}
	content, ok := encrypted(c.in.data)
	if !ok {
		return about(tpm2.TPMRCSize, ofParameter, 1)
	}
	a := c.auths[i]
	//nolint:staticcheck // the mode that the specification prescribes; the session authenticates
	a.crypt(a.nonce, a.session.nonceTPM, cipher.NewCFBDecrypter).XORKeyStream(content, content)
	return 0
}

// authorizeResponse encrypts the first parameter if a session says so, and returns the parameters
// with what the sessions say of them. Sessions that were not to continue are over.
func (t *TPM) authorizeResponse(c *call, out []byte) (parameters, auths []byte) {
	for _, a := range c.auths {
		if a.session != nil {
			a.session.nonceCaller = a.nonce
			_, _ = rand.Read(a.session.nonceTPM) // never fails
		}
	}
	if i := c.with(attrEncrypt); i >= 0 {
		if content, ok := encrypted(out); ok {
			a := c.auths[i]
			//nolint:staticcheck // as above
			a.crypt(a.session.nonceTPM, a.nonce, cipher.NewCFBEncrypter).XORKeyStream(content, content)
		}
	}
	for _, a := range c.auths {
		if a.session == nil {
			auths = append(auths, 0, 0, attrContinue, 0, 0)
			continue
		}
		s := a.session
		key := a.hmacKey()
		var value []byte
		if len(key) > 0 || len(a.value) > 0 {
			rpHash := digest(s.hash, be32(uint32(tpm2.TPMRCSuccess)), be32(uint32(c.code)), out)
			value = mac(s.hash, key, rpHash, s.nonceTPM, s.nonceCaller, []byte{a.attributes})
		}
		auths = append(auths, sized(s.nonceTPM)...)
		auths = append(auths, a.attributes)
		auths = append(auths, sized(value)...)
		if s.kind == tpm2.TPMSEPolicy && a.entity != nil {
			s.restart()
		}
		if a.attributes&attrContinue == 0 {
			delete(t.sessions, number(s.handle))
		}
	}
	return out, auths
}
