// SPDX-License-Identifier: Apache-2.0

package tpmmodel

import (
	"encoding/binary"

	"github.com/google/go-tpm/tpm2"
)

// What a response code is about (TPM 2.0 Library, part 2, "TPM_RC"): a parameter, a session, or a
// handle, by number. Codes of format 1 alone say it.
const (
	ofParameter = tpm2.TPMRC(0x040)
	ofSession   = tpm2.TPMRC(0x800)
	ofHandle    = tpm2.TPMRC(0x000)
	format1     = tpm2.TPMRC(0x080)
	// rcBadTag is TPM_RC_BAD_TAG, as a TPM 1.2 says it.
	rcBadTag = tpm2.TPMRC(0x01e)
)

// about adds to a code what it is about. number counts from 1.
func about(rc, kind tpm2.TPMRC, number int) tpm2.TPMRC {
	// of another format, or it says so already, or it is about nothing yet
	if rc&format1 == 0 || rc>>8 != 0 || number == 0 {
		return rc
	}
	return rc | kind | tpm2.TPMRC(number<<8) //nolint:gosec // at most 15
}

// reader takes a command apart. After the first thing that is wrong it only returns zeros.
type reader struct {
	data []byte
	rc   tpm2.TPMRC
	// kind and number are what is being read.
	kind   tpm2.TPMRC
	number int
}

// begin says that what follows is about the number-th of a kind.
func (r *reader) begin(kind tpm2.TPMRC, number int) *reader {
	if r.rc == 0 {
		r.kind, r.number = kind, number
	}
	return r
}

// parameter begins the number-th parameter.
func (r *reader) parameter(number int) *reader { return r.begin(ofParameter, number) }

// fail notes what is wrong, if nothing was before.
func (r *reader) fail(rc tpm2.TPMRC) {
	if r.rc == 0 {
		r.rc = about(rc, r.kind, r.number)
	}
	r.data = nil
}

// check fails unless ok.
func (r *reader) check(ok bool, rc tpm2.TPMRC) {
	if !ok {
		r.fail(rc)
	}
}

func (r *reader) bytes(n int) []byte {
	if n > len(r.data) || r.rc != 0 {
		r.fail(tpm2.TPMRCInsufficient)
		return make([]byte, min(n, 8)) // enough for a number
	}
	taken := r.data[:n:n]
	r.data = r.data[n:]
	return taken
}

func (r *reader) u8() uint8   { return r.bytes(1)[0] }
func (r *reader) u16() uint16 { return binary.BigEndian.Uint16(r.bytes(2)) }
func (r *reader) u32() uint32 { return binary.BigEndian.Uint32(r.bytes(4)) }

func (r *reader) alg() tpm2.TPMAlgID { return tpm2.TPMAlgID(r.u16()) }

// sized reads a TPM2B of at most limit bytes.
func (r *reader) sized(limit int) []byte {
	size := int(r.u16())
	if r.rc == 0 && size > limit {
		r.fail(tpm2.TPMRCSize)
	}
	if r.rc != 0 {
		return nil
	}
	return r.bytes(size)
}

// inner reads a TPM2B that holds a structure, which f reads and which fills it.
func (r *reader) inner(f func(*reader)) {
	size := int(r.u16())
	if r.rc != 0 {
		return
	}
	if size == 0 {
		r.fail(tpm2.TPMRCSize)
		return
	}
	before := len(r.data)
	f(r)
	if r.rc == 0 && before-len(r.data) != size {
		r.fail(tpm2.TPMRCSize)
	}
}

// end returns the first error. Bytes that are left over are an error, too.
func (r *reader) end() tpm2.TPMRC {
	if r.rc == 0 && len(r.data) > 0 {
		r.rc = tpm2.TPMRCSize
	}
	return r.rc
}

// Writing.

func be16(v int) []byte    { return binary.BigEndian.AppendUint16(nil, uint16(v)) } //nolint:gosec // sizes below 4096
func be32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

// sized is a TPM2B.
func sized(b []byte) []byte { return append(be16(len(b)), b...) }
