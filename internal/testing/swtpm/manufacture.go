// SPDX-License-Identifier: Apache-2.0

package swtpm

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// chainIndex is the first NV index for certificates of CAs (EK Credential Profile, 2.2.1.5.2).
const chainIndex = 0x01c00100

// Manufacture puts certificates and persistent keys into a new TPM with platform authorisation, as
// its maker does. The CA is the chip's.
func (t *Chip) Manufacture(o Options) error {
	for _, name := range o.Certified {
		if err := t.certify(name, o); err != nil {
			return fmt.Errorf("certify %s: %w", name, err)
		}
	}
	for i, name := range o.Persistent {
		if err := t.persist(name, tpm2.TPMHandle(0x81010001+i)); err != nil {
			return fmt.Errorf("persist %s: %w", name, err)
		}
	}
	if o.Chain {
		return t.WriteNV(chainIndex, t.CA.Intermediate.Raw)
	}
	return nil
}

func (t *Chip) certify(name string, o Options) error {
	e, ok := template.EKByName(name)
	if !ok {
		return fmt.Errorf("no such EK template")
	}
	return t.Certify(e, o)
}

// Certify makes the EK of a template, and puts its certificate into NV. The Unique field of the
// template may differ from the profile's.
func (t *Chip) Certify(e template.EK, o Options) error {
	return t.withEK(e, func(_ tpm2.TPMHandle, area tpm2.TPMTPublic) error {
		key, err := template.PublicKey(area)
		if err != nil {
			return err
		}
		der, err := t.CA.Issue(key, o.Issue)
		if err != nil {
			return err
		}
		if o.Compressed {
			if der, err = compress(der); err != nil {
				return err
			}
		}
		if o.Wrapped { // TCG_PCCLIENT_STORED_CERT with a full certificate
			der = append(binary.BigEndian.AppendUint16([]byte{0x10, 0x01, 0x00}, uint16(len(der))), der...) //nolint:gosec // about 600 bytes
		}
		return t.WriteNV(e.Certificate, append(der, o.Padding...))
	})
}

func compress(data []byte) ([]byte, error) {
	var compressed bytes.Buffer
	w := zlib.NewWriter(&compressed)
	_, err := w.Write(data)
	err = errors.Join(err, w.Close())
	return compressed.Bytes(), err
}

func (t *Chip) persist(name string, at tpm2.TPMHandle) error {
	e, ok := template.EKByName(name)
	if !ok {
		return fmt.Errorf("no such EK template")
	}
	return t.Persist(e, at)
}

// Persist makes the EK of a template persistent.
func (t *Chip) Persist(e template.EK, at tpm2.TPMHandle) error {
	return t.withEK(e, func(handle tpm2.TPMHandle, area tpm2.TPMTPublic) error {
		objectName, err := tpm2.ObjectName(&area)
		if err != nil {
			return err
		}
		_, err = tpm2.EvictControl{
			Auth:             tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
			ObjectHandle:     tpm2.NamedHandle{Handle: handle, Name: *objectName},
			PersistentHandle: at,
		}.Execute(t.Transport())
		return err
	})
}

func (t *Chip) withEK(e template.EK, f func(tpm2.TPMHandle, tpm2.TPMTPublic) error) error {
	rsp, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.New2B(e.Public),
	}.Execute(t.Transport())
	if err != nil {
		return err
	}
	defer func() { _, _ = tpm2.FlushContext{FlushHandle: rsp.ObjectHandle}.Execute(t.Transport()) }()
	area, err := rsp.OutPublic.Contents()
	if err != nil {
		return err
	}
	return f(rsp.ObjectHandle, *area)
}

// EK returns the public area of the EK of that template, as the TPM makes it.
func (t *Chip) EK(name string) (public tpm2.TPMTPublic, err error) {
	e, ok := template.EKByName(name)
	if !ok {
		return public, fmt.Errorf("no such EK template")
	}
	return t.MakeEK(e)
}

// MakeEK returns the public area of the EK of a template, as the TPM makes it.
func (t *Chip) MakeEK(e template.EK) (public tpm2.TPMTPublic, err error) {
	err = t.withEK(e, func(_ tpm2.TPMHandle, area tpm2.TPMTPublic) error { public = area; return nil })
	return public, err
}

// WriteNV replaces the content of an NV index, which everybody may read.
func (t *Chip) WriteNV(index uint32, data []byte) error {
	platform := tpm2.AuthHandle{Handle: tpm2.TPMRHPlatform, Auth: tpm2.PasswordAuth(nil)}
	if old, err := (tpm2.NVReadPublic{NVIndex: tpm2.TPMHandle(index)}).Execute(t.Transport()); err == nil {
		handle := tpm2.NamedHandle{Handle: tpm2.TPMHandle(index), Name: old.NVName}
		if _, err := (tpm2.NVUndefineSpace{AuthHandle: platform, NVIndex: handle}).Execute(t.Transport()); err != nil {
			return err
		}
	}
	if _, err := (tpm2.NVDefineSpace{
		AuthHandle: platform,
		PublicInfo: tpm2.New2B(tpm2.TPMSNVPublic{
			NVIndex: tpm2.TPMHandle(index),
			NameAlg: tpm2.TPMAlgSHA256,
			Attributes: tpm2.TPMANV{
				PPWrite: true, WriteDefine: true, PPRead: true, OwnerRead: true, AuthRead: true, NoDA: true, PlatformCreate: true,
			},
			DataSize: uint16(len(data)), //nolint:gosec // the TPM refuses more than 2048 bytes
		}),
	}).Execute(t.Transport()); err != nil {
		return err
	}
	const chunk = 1024 // TPM_PT_NV_BUFFER_MAX of swtpm
	for offset := 0; offset < len(data); offset += chunk {
		// the first write changes its name
		public, err := tpm2.NVReadPublic{NVIndex: tpm2.TPMHandle(index)}.Execute(t.Transport())
		if err != nil {
			return err
		}
		if _, err := (tpm2.NVWrite{
			AuthHandle: platform,
			NVIndex:    tpm2.NamedHandle{Handle: tpm2.TPMHandle(index), Name: public.NVName},
			Data:       tpm2.TPM2BMaxNVBuffer{Buffer: data[offset:min(offset+chunk, len(data))]},
			Offset:     uint16(offset),
		}).Execute(t.Transport()); err != nil {
			return err
		}
	}
	return nil
}
