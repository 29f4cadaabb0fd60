// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"bytes"

	"github.com/google/go-tpm/tpm2"
)

// restart forgets what a policy session has been shown.
func (s *session) restart() { s.policy, s.cpHash = make([]byte, s.hash.Size()), nil }

// extend is how each policy command changes the digest: H(old | parts).
func (s *session) extend(parts ...[]byte) {
	s.policy = digest(s.hash, append([][]byte{s.policy}, parts...)...)
}

// policySecret is TPM2_PolicySecret. That the caller knows the secret has been checked.
func (t *TPM) policySecret(c *call) ([]byte, tpm2.TPMRC) {
	nonce := c.in.parameter(1).sized(maxDigest)
	cpHash := c.in.parameter(2).sized(maxDigest)
	reference := c.in.parameter(3).sized(maxDigest)
	expiration := c.in.parameter(4).u32()
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	s := c.entities[1].session
	switch {
	case expiration != 0: // not modelled
		return nil, about(tpm2.TPMRCValue, ofParameter, 4)
	case len(nonce) > 0 && !bytes.Equal(nonce, s.nonceTPM):
		return nil, about(tpm2.TPMRCNonce, ofParameter, 1)
	case len(cpHash) > 0 && len(cpHash) != s.hash.Size():
		return nil, about(tpm2.TPMRCSize, ofParameter, 2)
	case len(cpHash) > 0 && s.cpHash != nil && !bytes.Equal(cpHash, s.cpHash):
		return nil, tpm2.TPMRCCPHash
	}
	if len(cpHash) > 0 {
		s.cpHash = bytes.Clone(cpHash)
	}
	// PolicyUpdate (part 3, "Policy Digest Update Function")
	s.extend(be32(uint32(c.code)), c.entities[0].name)
	s.extend(reference)
	// no timeout, and a NULL ticket of type TPM_ST_AUTH_SECRET
	return append(sized(nil), ticket(tpm2.TPMSTAuthSecret, tpm2.TPMRHNull, nil)...), 0
}

func ticket(tag tpm2.TPMST, hierarchy tpm2.TPMHandle, digest []byte) []byte {
	return append(append(be16(int(tag)), be32(uint32(hierarchy))...), sized(digest)...)
}

// maxBranches is how many branches TPM2_PolicyOR takes.
const maxBranches = 8

// policyOR is TPM2_PolicyOR.
func (t *TPM) policyOR(c *call) ([]byte, tpm2.TPMRC) {
	c.in.parameter(1)
	count := c.in.u32()
	c.in.check(count >= 2 && count <= maxBranches, tpm2.TPMRCSize)
	s := c.entities[0].session
	satisfied := s.kind == tpm2.TPMSETrial
	var branches [][]byte
	for range count {
		if c.in.rc != 0 {
			break
		}
		branch := c.in.sized(maxDigest)
		branches = append(branches, branch)
		satisfied = satisfied || bytes.Equal(branch, s.policy)
	}
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	if !satisfied {
		return nil, about(tpm2.TPMRCValue, ofParameter, 1)
	}
	s.policy = make([]byte, s.hash.Size())
	s.extend(append([][]byte{be32(uint32(c.code))}, branches...)...)
	return nil, 0
}

// policyGetDigest is TPM2_PolicyGetDigest.
func (t *TPM) policyGetDigest(c *call) ([]byte, tpm2.TPMRC) {
	return sized(c.entities[0].session.policy), c.in.end()
}

// policyRestart is TPM2_PolicyRestart.
func (t *TPM) policyRestart(c *call) ([]byte, tpm2.TPMRC) {
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	c.entities[0].session.restart()
	return nil, 0
}
