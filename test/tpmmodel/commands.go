// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"crypto/rand"

	"github.com/google/go-tpm/tpm2"
)

const headerSize = 10

// role is the authorization that a command needs for a handle (part 1, "Authorization Roles").
type role int

const (
	nobody role = iota
	user
	admin
)

// handleOf is a handle in a command: which it may be, and the role.
type handleOf struct {
	takes func(tpm2.TPMHandle) bool
	role  role
}

// command is one that is modelled.
type command struct {
	handles []handleOf
	run     func(*TPM, *call) ([]byte, tpm2.TPMRC)
}

var commands map[tpm2.TPMCC]command

func init() { //nolint:gochecknoinits // a table whose functions refer to it
	commands = map[tpm2.TPMCC]command{
		tpm2.TPMCCStartup:            {nil, (*TPM).startup},
		tpm2.TPMCCShutdown:           {nil, (*TPM).shutdown},
		tpm2.TPMCCSelfTest:           {nil, (*TPM).selfTest},
		tpm2.TPMCCGetCapability:      {nil, (*TPM).getCapability},
		tpm2.TPMCCGetRandom:          {nil, (*TPM).getRandom},
		tpm2.TPMCCCreatePrimary:      {[]handleOf{{isHierarchy, user}}, (*TPM).createPrimary},
		tpm2.TPMCCReadPublic:         {[]handleOf{{isObject, nobody}}, (*TPM).readPublic},
		tpm2.TPMCCFlushContext:       {nil, (*TPM).flushContext},
		tpm2.TPMCCEvictControl:       {[]handleOf{{isProvision, user}, {isObject, nobody}}, (*TPM).evictControl},
		tpm2.TPMCCStartAuthSession:   {[]handleOf{{orNull(isObject), nobody}, {orNull(isEntity), nobody}}, (*TPM).startAuthSession},
		tpm2.TPMCCPolicySecret:       {[]handleOf{{isEntity, user}, {isPolicy, nobody}}, (*TPM).policySecret},
		tpm2.TPMCCPolicyOR:           {[]handleOf{{isPolicy, nobody}}, (*TPM).policyOR},
		tpm2.TPMCCPolicyGetDigest:    {[]handleOf{{isPolicy, nobody}}, (*TPM).policyGetDigest},
		tpm2.TPMCCPolicyRestart:      {[]handleOf{{isPolicy, nobody}}, (*TPM).policyRestart},
		tpm2.TPMCCActivateCredential: {[]handleOf{{isObject, admin}, {isObject, user}}, (*TPM).activateCredential},
		tpm2.TPMCCQuote:              {[]handleOf{{isObject, user}}, (*TPM).quote},
		tpm2.TPMCCPCRRead:            {nil, (*TPM).pcrRead},
		tpm2.TPMCCPCRExtend:          {[]handleOf{{orNull(isPCR), user}}, (*TPM).pcrExtend},
		tpm2.TPMCCPCREvent:           {[]handleOf{{orNull(isPCR), user}}, (*TPM).pcrEvent},
		tpm2.TPMCCNVDefineSpace:      {[]handleOf{{isProvision, user}}, (*TPM).nvDefineSpace},
		tpm2.TPMCCNVUndefineSpace:    {[]handleOf{{isProvision, user}, {isNV, nobody}}, (*TPM).nvUndefineSpace},
		tpm2.TPMCCNVWrite:            {[]handleOf{{isNVAuth, user}, {isNV, nobody}}, (*TPM).nvWrite},
		tpm2.TPMCCNVRead:             {[]handleOf{{isNVAuth, user}, {isNV, nobody}}, (*TPM).nvRead},
		tpm2.TPMCCNVReadPublic:       {[]handleOf{{isNV, nobody}}, (*TPM).nvReadPublic},
	}
}

// The types of handles (part 2, "TPMI_DH_*" and "TPMI_RH_*").

func kind(h tpm2.TPMHandle) tpm2.TPMHT { return tpm2.TPMHT(h >> 24) }

func isPCR(h tpm2.TPMHandle) bool    { return kind(h) == tpm2.TPMHTPCR && h < pcrCount }
func isNV(h tpm2.TPMHandle) bool     { return kind(h) == tpm2.TPMHTNVIndex }
func isPolicy(h tpm2.TPMHandle) bool { return isSession(h) && kind(h) == tpm2.TPMHTPolicySession }
func isTransient(h tpm2.TPMHandle) bool {
	return h >= firstTransient && h < firstTransient+maxObjects
}
func isObject(h tpm2.TPMHandle) bool { return isTransient(h) || kind(h) == tpm2.TPMHTPersistent }
func isSession(h tpm2.TPMHandle) bool {
	return (kind(h) == tpm2.TPMHTHMACSession || kind(h) == tpm2.TPMHTPolicySession) && number(h) < maxActive
}
func isProvision(h tpm2.TPMHandle) bool { return h == tpm2.TPMRHOwner || h == tpm2.TPMRHPlatform }
func isHierarchy(h tpm2.TPMHandle) bool {
	return isProvision(h) || h == tpm2.TPMRHEndorsement || h == tpm2.TPMRHNull
}
func isNVAuth(h tpm2.TPMHandle) bool { return isProvision(h) || isNV(h) }
func isEntity(h tpm2.TPMHandle) bool {
	return isProvision(h) || h == tpm2.TPMRHEndorsement || h == tpm2.TPMRHLockout || isObject(h) || isNV(h) || isPCR(h)
}

func orNull(f func(tpm2.TPMHandle) bool) func(tpm2.TPMHandle) bool {
	return func(h tpm2.TPMHandle) bool { return h == tpm2.TPMRHNull || f(h) }
}

// The commands that need no file of their own.

// startup finds the TPM started, for any parameter.
func (t *TPM) startup(*call) ([]byte, tpm2.TPMRC) { return nil, tpm2.TPMRCInitialize }

// shutdown has nothing to save.
func (t *TPM) shutdown(c *call) ([]byte, tpm2.TPMRC) {
	su := c.in.parameter(1).u16()
	c.in.check(su <= uint16(tpm2.TPMSUState), tpm2.TPMRCValue)
	return nil, c.in.end()
}

// selfTest finds nothing wrong.
func (t *TPM) selfTest(c *call) ([]byte, tpm2.TPMRC) {
	full := c.in.parameter(1).u8()
	c.in.check(full <= 1, tpm2.TPMRCValue)
	return nil, c.in.end()
}

func (t *TPM) getRandom(c *call) ([]byte, tpm2.TPMRC) {
	wanted := int(c.in.parameter(1).u16())
	if rc := c.in.end(); rc != 0 {
		return nil, rc
	}
	b := make([]byte, min(wanted, maxDigest))
	_, _ = rand.Read(b) // never fails
	return sized(b), 0
}
