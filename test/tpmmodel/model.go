// SPDX-License-Identifier: Apache-2.0

// Package tpmmodel is a TPM 2.0 in Go, for the commands that this project uses. It takes the bytes
// of commands and returns the bytes of responses. It has real keys, policies, credentials, quotes,
// and the response codes of the specification. A thousand of them fit into one process. It is a
// test double, held to what swtpm does by the tests in test/protocol, and keeps no secret from
// anybody.
//
// A command that is not modelled is answered with TPM_RC_COMMAND_CODE: see commands.go for those
// that are. The model has no authorisation by audit sessions, and no policies that expire
// (TPM2_PolicySecret with expiration). It has keys for credentials and ECDSA only, ordinary NV
// indices only, no locality, and no state that survives the process.
package tpmmodel

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// What the model has room for: that of the least chip that the TCG's PC Client profile allows for
// objects, and of swtpm.
const (
	maxObjects    = 3
	maxSessions   = 3
	maxActive     = 64 // sessions with those that are saved
	maxPersistent = 16
	maxMessage    = 4096
)

// TPM is one chip. Its methods may be called by several goroutines at once.
type TPM struct {
	mu sync.Mutex
	// seeds are what primary keys are derived from, by hierarchy, and proofs what tickets are.
	seeds, proofs map[tpm2.TPMHandle][]byte
	// primaries are the keys that were derived, as that takes time.
	primaries map[[sha256.Size]byte]*primary

	objects    map[tpm2.TPMHandle]*object
	persistent map[tpm2.TPMHandle]*object
	sessions   map[tpm2.TPMHandle]*session // by number
	nv         map[tpm2.TPMHandle]*nvIndex
	pcrs       pcrs
	// failures count towards lockout.
	failures uint32
	// started is when the clock was zero.
	started time.Time
}

var _ transport.TPM = (*TPM)(nil)

// New returns a chip that has been started, with seeds derived from seed: the same seed makes the
// same keys.
func New(seed []byte) *TPM {
	t := &TPM{
		seeds: map[tpm2.TPMHandle][]byte{}, proofs: map[tpm2.TPMHandle][]byte{},
		primaries: map[[sha256.Size]byte]*primary{},
		objects:   map[tpm2.TPMHandle]*object{}, persistent: map[tpm2.TPMHandle]*object{},
		sessions: map[tpm2.TPMHandle]*session{}, nv: map[tpm2.TPMHandle]*nvIndex{},
		pcrs: newPCRs(), started: time.Now(),
	}
	for _, h := range []tpm2.TPMHandle{tpm2.TPMRHOwner, tpm2.TPMRHEndorsement, tpm2.TPMRHPlatform, tpm2.TPMRHNull} {
		t.seeds[h] = derive(seed, "seed", be32(uint32(h)))
		t.proofs[h] = derive(seed, "proof", be32(uint32(h)))
	}
	return t
}

// RandomSeed returns a seed for New that nobody else has.
func RandomSeed() []byte {
	seed := make([]byte, sha256.Size)
	_, _ = rand.Read(seed) // never fails
	return seed
}

// Send answers a command. Whatever is wrong with it is said in the response.
func (t *TPM) Send(command []byte) ([]byte, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.execute(command), nil
}

// Tags of commands and responses.
const (
	noSessions   = uint16(tpm2.TPMSTNoSessions)
	withSessions = uint16(tpm2.TPMSTSessions)
	// tagRspCommand is TPM_ST_RSP_COMMAND, of a response to what is no command of a TPM 2.0.
	tagRspCommand = uint16(0x00c4)
)

func failure(rc tpm2.TPMRC) []byte {
	tag := noSessions
	if rc == rcBadTag {
		tag = tagRspCommand
	}
	return message(tag, uint32(rc), nil)
}

// message is a header with what follows it.
func message(tag uint16, code uint32, body []byte) []byte {
	b := make([]byte, 0, headerSize+len(body))
	b = binary.BigEndian.AppendUint16(b, tag)
	b = binary.BigEndian.AppendUint32(b, uint32(headerSize+len(body))) //nolint:gosec // below 4096
	b = binary.BigEndian.AppendUint32(b, code)
	return append(b, body...)
}

// call is one command on its way.
type call struct {
	code     tpm2.TPMCC
	handles  []tpm2.TPMHandle
	entities []*entity
	auths    []*authorization
	// raw are the parameters as they came, and what is hashed; in the reader they are decrypted.
	raw []byte
	in  *reader
	// made is the handle in the response, if any.
	made *tpm2.TPMHandle
}

// execute goes through a command in the order of part 3, "Command Processing".
func (t *TPM) execute(data []byte) []byte {
	header := &reader{data: data}
	tag, size, code := header.u16(), header.u32(), header.u32()
	switch {
	case header.rc != 0:
		return failure(tpm2.TPMRCInsufficient)
	case tag != noSessions && tag != withSessions:
		return failure(rcBadTag)
	case int(size) != len(data):
		return failure(tpm2.TPMRCCommandSize)
	}
	known, ok := commands[tpm2.TPMCC(code)]
	if !ok {
		return failure(tpm2.TPMRCCommandCode)
	}
	c := &call{code: tpm2.TPMCC(code), in: &reader{data: header.data}}
	if rc := t.takeHandles(c, known); rc != 0 {
		return failure(rc)
	}
	if rc := t.takeSessions(c, known, tag); rc != 0 {
		return failure(rc)
	}
	out, rc := known.run(t, c)
	if rc != 0 {
		return failure(rc)
	}
	return t.respond(c, tag, out)
}

// takeHandles reads the handle area, and looks up what the handles are of.
func (t *TPM) takeHandles(c *call, known command) tpm2.TPMRC {
	for i, h := range known.handles {
		handle := tpm2.TPMHandle(c.in.begin(ofHandle, i+1).u32())
		c.in.check(h.takes(handle), tpm2.TPMRCValue)
		if c.in.rc != 0 {
			return c.in.rc
		}
		c.handles = append(c.handles, handle)
	}
	swapped := 0 // persistent objects take a place while they are used
	for i, handle := range c.handles {
		e, rc := t.entity(handle)
		if rc == tpm2.TPMRCReferenceH0 {
			return rc + tpm2.TPMRC(i)
		}
		if rc != 0 {
			return about(rc, ofHandle, i+1)
		}
		if _, ok := t.persistent[handle]; ok {
			if swapped++; len(t.objects)+swapped > maxObjects {
				return tpm2.TPMRCObjectMemory
			}
		}
		c.entities = append(c.entities, e)
	}
	return 0
}

// respond puts a response together: its parameters are encrypted, and then authorised.
func (t *TPM) respond(c *call, tag uint16, out []byte) []byte {
	var body []byte
	if c.made != nil {
		body = be32(uint32(*c.made))
	}
	if tag == noSessions {
		return message(tag, uint32(tpm2.TPMRCSuccess), append(body, out...))
	}
	body = append(body, be32(uint32(len(out)))...) //nolint:gosec // below 4096
	parameters, auths := t.authorizeResponse(c, out)
	return message(tag, uint32(tpm2.TPMRCSuccess), append(append(body, parameters...), auths...))
}
