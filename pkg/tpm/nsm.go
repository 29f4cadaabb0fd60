// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/go-tpm/tpm2"
)

const (
	// nsmRequestCode is the vendor command of the NitroTPM. It takes a message from an NV index,
	// and puts the answer into the same index. AWS's tool (github.com/aws/NitroTPM-Tools) is its
	// only description.
	nsmRequestCode tpm2.TPMCC = 0x20000001
	// nsmIndex is the NV index of the messages. It is always the same one, so that the next run
	// finds what a crash left. It lies in the owner's range (TCG Registry of Reserved TPM 2.0
	// Handles, 0x01800000 to 0x01bfffff). It was drawn at random: other programs take the first
	// free index, or count up from the start of a range.
	nsmIndex tpm2.TPMHandle = 0x01b5a37e
	// maxNVChunk bounds one read or write in bytes, so that it fits into a command of any TPM.
	maxNVChunk, minNVChunk = 1024, 512
)

// ErrNoNSM says that the TPM does not have the vendor command of the NitroTPM, or that the kernel
// does not pass the command on.
var ErrNoNSM = errors.New("the TPM does not know the NitroTPM's vendor command")

// ForeignIndexError says that the NV index of the messages is another program's.
type ForeignIndexError struct{ Index uint32 }

func (e *ForeignIndexError) Error() string {
	return fmt.Sprintf("NV index %#08x is in use by another program", e.Index)
}

// NSMRequest sends a message to the Nitro Secure Module of an EC2 instance, through the vendor
// command of the instance's TPM. It returns the buffer of size bytes that begins with the answer.
//
// It defines an NV index for that time. Its password is random, so that no other process can
// replace the message. The owner's password must be empty.
func (t *TPM) NSMRequest(message []byte, size uint16) (answer []byte, err error) {
	if len(message) > int(size) {
		return nil, fmt.Errorf("a message of %d bytes in a buffer of %d", len(message), size)
	}
	properties, err := t.fixedProperties()
	if err != nil {
		return nil, err
	}
	chunk := int(min(max(properties[uint32(tpm2.TPMPTNVBufferMax)], minNVChunk), maxNVChunk))

	// 1. Remove the index that a killed run left. The lock excludes that it is in use.
	if err := t.removeNSMIndex(size); err != nil {
		return nil, err
	}

	// 2. Define the index. From here on, it is removed whatever happens, even if the context ends.
	// The password is text: go-tpm 0.9.8 computes a wrong HMAC for a password with a zero byte.
	password := []byte(rand.Text())
	public := nsmPublic(size)
	name, err := tpm2.NVName(&public)
	if err != nil {
		return nil, err
	}
	_, err = execute[tpm2.NVDefineSpaceResponse](t, "TPM2_NV_DefineSpace", tpm2.NVDefineSpace{
		AuthHandle: nsmOwner(), Auth: tpm2.TPM2BAuth{Buffer: password}, PublicInfo: tpm2.New2B(public),
	})
	switch {
	case errors.Is(err, tpm2.TPMRCNVDefined):
		return nil, &ForeignIndexError{uint32(nsmIndex)}
	case errors.Is(err, tpm2.TPMRCSize): // other TPMs have smaller indices
		return nil, fmt.Errorf("%w: %w", ErrNoNSM, err)
	}
	defer func() {
		if failed := t.undefineNSMIndex(*name); err == nil {
			err = failed
		}
	}()
	if err != nil {
		return nil, err
	}

	// 3. Write the message.
	access := func() tpm2.AuthHandle {
		return tpm2.AuthHandle{Handle: nsmIndex, Name: *name, Auth: tpm2.PasswordAuth(password)}
	}
	for offset := 0; offset < len(message); offset += chunk {
		if _, err := execute[tpm2.NVWriteResponse](t, "TPM2_NV_Write", tpm2.NVWrite{
			AuthHandle: access(), NVIndex: tpm2.NamedHandle{Handle: nsmIndex, Name: *name},
			Data:   tpm2.TPM2BMaxNVBuffer{Buffer: message[offset:min(offset+chunk, len(message))]},
			Offset: uint16(offset), // below size
		}); err != nil {
			return nil, err
		}
	}

	// 4. Send the command. The first write has set TPMA_NV_WRITTEN, and so changed the index's
	// name.
	public.Attributes.Written = true
	if name, err = tpm2.NVName(&public); err != nil {
		return nil, err
	}
	if err := t.sendNSMRequest(*name, password); err != nil {
		return nil, err
	}

	// 5. Read the answer.
	for len(answer) < int(size) {
		rsp, err := execute[tpm2.NVReadResponse](t, "TPM2_NV_Read", tpm2.NVRead{
			AuthHandle: access(), NVIndex: tpm2.NamedHandle{Handle: nsmIndex, Name: *name},
			Size: uint16(min(chunk, int(size)-len(answer))), Offset: uint16(len(answer)), //nolint:gosec // G115: below size
		})
		if err != nil {
			return nil, err
		}
		if len(rsp.Data.Buffer) == 0 {
			return nil, &commandError{"TPM2_NV_Read", errors.New("returns nothing")}
		}
		answer = append(answer, rsp.Data.Buffer...)
	}
	return answer, nil
}

// nsmPublic is the public area of the index, with the hash and the attributes of AWS's tool.
func nsmPublic(size uint16) tpm2.TPMSNVPublic {
	return tpm2.TPMSNVPublic{
		NVIndex: nsmIndex, NameAlg: tpm2.TPMAlgSHA512, DataSize: size,
		Attributes: tpm2.TPMANV{AuthRead: true, AuthWrite: true},
	}
}

// removeNSMIndex removes the index, if there is one and it was made by NSMRequest.
func (t *TPM) removeNSMIndex(size uint16) error {
	rsp, err := execute[tpm2.NVReadPublicResponse](t, "TPM2_NV_ReadPublic", tpm2.NVReadPublic{NVIndex: nsmIndex})
	if errors.Is(err, tpm2.TPMRCHandle) {
		return nil // there is none
	}
	if err != nil {
		return err
	}
	found, err := rsp.NVPublic.Contents()
	if err != nil {
		return &commandError{"TPM2_NV_ReadPublic", err}
	}
	unwritten := *found
	unwritten.Attributes.Written = false
	if !bytes.Equal(tpm2.Marshal(unwritten), tpm2.Marshal(nsmPublic(size))) {
		return &ForeignIndexError{uint32(nsmIndex)}
	}
	return t.undefineNSMIndex(rsp.NVName)
}

// undefineNSMIndex removes the index, if it exists. The owner's password authorises that.
func (t *TPM) undefineNSMIndex(name tpm2.TPM2BName) error {
	_, err := execute[tpm2.NVUndefineSpaceResponse](t, "TPM2_NV_UndefineSpace", tpm2.NVUndefineSpace{
		AuthHandle: nsmOwner(), NVIndex: tpm2.NamedHandle{Handle: nsmIndex, Name: name},
	})
	if errors.Is(err, tpm2.TPMRCHandle) {
		return nil
	}
	return err
}

func nsmOwner() tpm2.AuthHandle {
	return tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
}

// sendNSMRequest sends the vendor command: the index's handle twice, as the object that authorises
// and as the buffer, and an HMAC session. AWS's tool salts its session with the EK. That hides the
// password from somebody between this process and the TPM, who could as well read the answer. So
// this session has no salt, and needs no key.
func (t *TPM) sendNSMRequest(name tpm2.TPM2BName, password []byte) error {
	const nonceSize = 64 // the size of the session's hash, as in AWS's tool
	start := t.begin("TPM2_StartAuthSession")
	session, flush, err := tpm2.HMACSession(t.conn, tpm2.TPMAlgSHA512, nonceSize, tpm2.Auth(password))
	if err := t.done("TPM2_StartAuthSession", start, err); err != nil {
		return err
	}
	defer func() { _ = flush() }() // conn flushes what is left
	if err := session.NewNonceCaller(); err != nil {
		return err
	}
	authorization, err := session.Authorize(nsmRequestCode, nil, nil, []tpm2.TPM2BName{name, name}, 0)
	if err != nil {
		return err
	}
	area := tpm2.Marshal(*authorization)
	b := binary.BigEndian.AppendUint16(nil, uint16(tpm2.TPMSTSessions))
	b = binary.BigEndian.AppendUint32(b, uint32(headerSize+4+4+4+len(area)))                                    //nolint:gosec // G115: about 200
	for _, v := range []uint32{uint32(nsmRequestCode), uint32(nsmIndex), uint32(nsmIndex), uint32(len(area))} { //nolint:gosec // G115: about 200
		b = binary.BigEndian.AppendUint32(b, v)
	}
	const command = "NSM request"
	start = t.begin(command)
	response, err := t.conn.Send(append(b, area...))
	if err == nil {
		// The response's HMAC is not checked: the answer itself is signed.
		err = nsmError(binary.BigEndian.Uint32(response[6:]))
	}
	return t.done(command, start, err)
}

// nsmError returns nil for success. The kernel's resource manager knows the commands that the TPM
// lists, and answers others itself, with a mark in the upper half of the code (TSS 2.0 Overview,
// "Response Code Format").
func nsmError(code uint32) error {
	switch rc := tpm2.TPMRC(code); {
	case rc == tpm2.TPMRCSuccess:
		return nil
	case rc&0xffff == tpm2.TPMRCCommandCode:
		return fmt.Errorf("%w: %w", ErrNoNSM, tpm2.TPMRCCommandCode)
	default:
		return rc
	}
}
