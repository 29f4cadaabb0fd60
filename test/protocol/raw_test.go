// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// recorder keeps what a TPM answered: code by code.
type recorder struct {
	tpm   transport.TPM
	codes []string
	last  []byte
}

func (r *recorder) Send(command []byte) ([]byte, error) {
	response, err := r.tpm.Send(command)
	if err != nil {
		return nil, err
	}
	r.last = response
	r.codes = append(r.codes, fmt.Sprintf("%s: %#x", nameOf(command), uint32(codeOf(response))))
	return response, nil
}

func nameOf(command []byte) string {
	if len(command) < 10 {
		return "no command"
	}
	return fmt.Sprintf("%#x", binary.BigEndian.Uint32(command[6:]))
}

func codeOf(response []byte) tpm2.TPMRC {
	if len(response) < 10 {
		return tpm2.TPMRCFailure
	}
	return tpm2.TPMRC(binary.BigEndian.Uint32(response[6:]))
}

// raw is a command put together by hand. Without auths it has no authorisation area.
func raw(code tpm2.TPMCC, handles []tpm2.TPMHandle, auths [][]byte, parameters ...[]byte) []byte {
	tag := tpm2.TPMSTNoSessions
	var body []byte
	for _, h := range handles {
		body = binary.BigEndian.AppendUint32(body, uint32(h))
	}
	if auths != nil {
		tag = tpm2.TPMSTSessions
		area := slices.Concat(auths...)
		body = binary.BigEndian.AppendUint32(body, uint32(len(area)))
		body = append(body, area...)
	}
	return header(tag, code, append(body, slices.Concat(parameters...)...))
}

func header(tag tpm2.TPMST, code tpm2.TPMCC, body []byte) []byte {
	command := binary.BigEndian.AppendUint16(nil, uint16(tag))
	command = binary.BigEndian.AppendUint32(command, uint32(10+len(body)))
	command = binary.BigEndian.AppendUint32(command, uint32(code))
	return append(command, body...)
}

// resized makes the size in a command's header what it is.
func resized(command []byte) []byte {
	binary.BigEndian.PutUint32(command[2:], uint32(len(command)))
	return command
}

// password is an authorisation by one.
func password(word string) []byte {
	return slices.Concat(u32(uint32(tpm2.TPMRSPW)), u16(0), []byte{1}, sized([]byte(word)))
}

func u16(v int) []byte                        { return binary.BigEndian.AppendUint16(nil, uint16(v)) }
func u32(v uint32) []byte                     { return binary.BigEndian.AppendUint32(nil, v) }
func sized(b []byte) []byte                   { return append(u16(len(b)), b...) }
func on(h ...tpm2.TPMHandle) []tpm2.TPMHandle { return h }
func by(auths ...[]byte) [][]byte             { return auths }
