// SPDX-License-Identifier: Apache-2.0

package swtpm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// Chip is a TPM as its maker and a test see it: they can send commands past the code under test.
type Chip struct {
	// CA issued the EK certificates. With Options.Setup it has certificates but no keys.
	CA *CA
	// TPM receives its commands.
	TPM transport.TPM
}

// Transport sends commands to the TPM past the code under test.
func (t *Chip) Transport() transport.TPM { return t.TPM }

// Clear is TPM2_Clear. It removes the owner's keys and restarts the boot counters. EK and AK stay.
func (t *Chip) Clear() error {
	_, err := tpm2.Clear{AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)}}.Execute(t.Transport())
	return err
}

// ChangeEPS is TPM2_ChangeEPS. Every EK and AK changes. The certificates in NV stay, and match no
// key any more.
func (t *Chip) ChangeEPS() error {
	return t.sendByPlatform("TPM2_ChangeEPS", 0x0124)
}

// SetPassword is TPM2_HierarchyChangeAuth of a hierarchy without a password, as an administrator
// does it.
func (t *Chip) SetPassword(hierarchy tpm2.TPMHandle, password string) error {
	_, err := tpm2.HierarchyChangeAuth{
		AuthHandle: tpm2.AuthHandle{Handle: hierarchy, Auth: tpm2.PasswordAuth(nil)},
		NewAuth:    tpm2.TPM2BAuth{Buffer: []byte(password)},
	}.Execute(t.Transport())
	return err
}

// DisableEndorsement is TPM2_HierarchyControl: it switches the endorsement hierarchy off until the
// next reboot, as firmware settings do for good.
func (t *Chip) DisableEndorsement() error {
	return t.sendByPlatform("TPM2_HierarchyControl", 0x0121,
		0x40, 0, 0, 0x0b, 0) // TPM_RH_ENDORSEMENT: no
}

// sendByPlatform sends a command that go-tpm lacks. Its handle is TPM_RH_PLATFORM, authorised with
// the empty password. code is its TPM_CC.
func (t *Chip) sendByPlatform(name string, code uint32, parameters ...byte) error {
	body := append([]byte{
		0x40, 0, 0, 0x0c, // TPM_RH_PLATFORM
		0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0, // TPM_RS_PW, empty
	}, parameters...)
	command := binary.BigEndian.AppendUint16(nil, uint16(tpm2.TPMSTSessions))
	command = binary.BigEndian.AppendUint32(command, uint32(10+len(body))) //nolint:gosec // G115: some bytes
	command = binary.BigEndian.AppendUint32(command, code)
	response, err := t.Transport().Send(append(command, body...))
	if err != nil {
		return err
	}
	if code := responseCode(response); code != tpm2.TPMRCSuccess {
		return fmt.Errorf("%s: %w", name, code)
	}
	return nil
}

// Capability is one TPM2_GetCapability.
func (t *Chip) Capability(c tpm2.TPMCap, property, count uint32) (*tpm2.TPMUCapabilities, error) {
	rsp, err := tpm2.GetCapability{Capability: c, Property: property, PropertyCount: count}.Execute(t.Transport())
	if err != nil {
		return nil, err
	}
	return &rsp.CapabilityData.Data, nil
}

// Handles returns the transient objects, and the loaded and saved sessions. A program that has
// ended leaves none.
func (t *Chip) Handles() ([]tpm2.TPMHandle, error) {
	var all []tpm2.TPMHandle
	for _, first := range []uint32{0x80000000, 0x02000000, 0x03000000} {
		data, err := t.Capability(tpm2.TPMCapHandles, first, 64)
		if err != nil {
			return nil, err
		}
		handles, err := data.Handles()
		if err != nil {
			return nil, err
		}
		all = append(all, handles.Handle...)
	}
	return all, nil
}

// LockoutCounter returns how many failures count towards lockout.
func (t *Chip) LockoutCounter() (uint32, error) {
	data, err := t.Capability(tpm2.TPMCapTPMProperties, uint32(tpm2.TPMPTLockoutCounter), 1)
	if err != nil {
		return 0, err
	}
	properties, err := data.TPMProperties()
	if err != nil || len(properties.TPMProperty) != 1 {
		return 0, errors.Join(err, errors.New("no answer"))
	}
	return properties.TPMProperty[0].Value, nil
}

// LockOut has the TPM refuse all that dictionary attack protection covers, as after many wrong
// passwords. It returns how many wrong passwords were needed.
func (t *Chip) LockOut() (wrong int, err error) {
	const index = tpm2.TPMHandle(0x01800100) // the owner's, and no certificate's
	owner := tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: owner, Auth: tpm2.TPM2BAuth{Buffer: []byte("right")},
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: index, NameAlg: tpm2.TPMAlgSHA256, DataSize: 1, Attributes: tpm2.TPMANV{AuthRead: true, AuthWrite: true},
		}),
	}).Execute(t.Transport()); err != nil {
		return 0, err
	}
	public, err := tpm2.NVReadPublic{NVIndex: index}.Execute(t.Transport())
	if err != nil {
		return 0, err
	}
	named := tpm2.NamedHandle{Handle: index, Name: public.NVName}
	for wrong = range 100 {
		_, err = tpm2.NVWrite{
			AuthHandle: tpm2.AuthHandle{Handle: index, Name: public.NVName, Auth: tpm2.PasswordAuth([]byte("wrong"))},
			NVIndex:    named, Data: tpm2.TPM2BMaxNVBuffer{Buffer: []byte{0}},
		}.Execute(t.Transport())
		if !errors.Is(err, tpm2.TPMRCAuthFail) && !errors.Is(err, tpm2.TPMRCRetry) {
			break
		}
	}
	if !errors.Is(err, tpm2.TPMRCLockout) {
		return wrong, fmt.Errorf("no lockout after %d wrong passwords: %w", wrong, err)
	}
	_, err = tpm2.NVUndefineSpace{AuthHandle: owner, NVIndex: named}.Execute(t.Transport())
	return wrong, err
}

// Extend extends a PCR in all banks with the digests of data.
func (t *Chip) Extend(pcr int, data []byte) error {
	_, err := tpm2.PCREvent{
		PCRHandle: tpm2.AuthHandle{Handle: tpm2.TPMHandle(pcr), Auth: tpm2.PasswordAuth(nil)}, //nolint:gosec // PCR numbers are below 24
		EventData: tpm2.TPM2BEvent{Buffer: slices.Clone(data)},
	}.Execute(t.Transport())
	return err
}
