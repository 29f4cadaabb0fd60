// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// EK is an endorsement key of this TPM.
type EK struct {
	// Template is its name in package template.
	Template string
	// Public is its marshalled TPMT_PUBLIC.
	Public []byte
	// Certificates are in DER: the EK's, then those of CAs in the TPM, in its order. They are
	// empty if the TPM has none for this very key. Nobody has verified them.
	Certificates [][]byte
	// Problem says why a certificate for this template in the TPM is ignored. It is empty if
	// there is no problem.
	Problem string
	// Slow is set if an RSA key has to be made for each use, which takes seconds.
	Slow bool
}

// EKs returns every EK that has a certificate in the TPM. If none has, it returns the one EK that
// the node would use.
func (t *TPM) EKs() ([]EK, error) {
	indices, err := t.certificateIndices()
	if err != nil {
		return nil, err
	}
	var eks []EK
	for _, e := range template.EKs() {
		if !slices.Contains(indices, e.Certificate) {
			continue
		}
		ek, err := t.ek(e)
		if isRefused(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("EK %s: %w", e.Name, err)
		}
		eks = append(eks, ek)
	}
	if len(eks) > 0 {
		return eks, nil
	}
	ek, err := t.ChooseEK("")
	if err != nil {
		return nil, err
	}
	return []EK{ek}, nil
}

// ChooseEK returns the EK of the remembered template if the TPM still makes it: a node keeps the EK
// that it enrolled with. Otherwise it returns the first with a certificate, ECC before RSA. Without
// any certificate it is the first that the TPM makes.
func (t *TPM) ChooseEK(remembered string) (EK, error) {
	indices, err := t.certificateIndices()
	if err != nil {
		return EK{}, err
	}
	type candidate struct {
		template.EK
		bare bool // will do without a certificate
	}
	var candidates []candidate
	if e, ok := template.EKByName(remembered); ok {
		candidates = append(candidates, candidate{e, true})
	}
	for _, e := range template.EKs() {
		if slices.Contains(indices, e.Certificate) {
			candidates = append(candidates, candidate{e, false})
		}
	}
	for _, e := range template.EKs() {
		candidates = append(candidates, candidate{e, true})
	}
	var refused []error
	for _, c := range candidates {
		ek, err := t.ek(c.EK)
		switch {
		case isRefused(err):
			refused = append(refused, fmt.Errorf("EK %s: %w", c.Name, err))
		case err != nil:
			return EK{}, fmt.Errorf("EK %s: %w", c.Name, err)
		case c.bare || len(ek.Certificates) > 0:
			return ek, nil
		}
	}
	return EK{}, errors.Join(refused...)
}

// isRefused reports whether the TPM does not support an algorithm, curve or size of a template.
// Chips use different codes for it, with or without the number of the parameter.
func isRefused(err error) bool {
	var command *commandError
	return errors.As(err, &command) && command.Command == "TPM2_CreatePrimary" && slices.ContainsFunc([]tpm2.TPMRC{
		tpm2.TPMRCAsymmetric, tpm2.TPMRCSymmetric, tpm2.TPMRCHash, tpm2.TPMRCKeySize, tpm2.TPMRCMode, tpm2.TPMRCType, tpm2.TPMRCKDF,
		tpm2.TPMRCScheme, tpm2.TPMRCCurve, tpm2.TPMRCValue, tpm2.TPMRCSize, tpm2.TPMRCAttributes,
	}, func(rc tpm2.TPMRC) bool { return errors.Is(err, rc) })
}

// AK returns the marshalled TPMT_PUBLIC of the attestation key.
func (t *TPM) AK() ([]byte, error) {
	var public []byte
	err := t.withAK(func(ak object) error {
		public = ak.bytes()
		_, err := template.CheckAK(public)
		return err
	})
	return public, err
}

// object is a key in the TPM, valid while the function runs that received it.
type object struct {
	handle tpm2.TPMHandle
	name   tpm2.TPM2BName
	public tpm2.TPMTPublic
}

func (o object) bytes() []byte { return tpm2.Marshal(o.public) }

// authorised returns the object with the authorisation for a command.
func (o object) authorised(by tpm2.Session) tpm2.AuthHandle {
	return tpm2.AuthHandle{Handle: o.handle, Name: o.name, Auth: by}
}

func (t *TPM) withAK(f func(object) error) error { return t.withPrimary(template.AK(), f) }

// withEK calls f with the EK of that template. An RSA EK is slow to make, so the persistent one is
// used if there is one.
func (t *TPM) withEK(e template.EK, f func(object) error) error {
	if e.IsRSA() {
		ek, err := t.persistentEK(e)
		if err != nil {
			return err
		}
		if ek != nil {
			return f(*ek)
		}
	}
	return t.withPrimary(e.Public, f)
}

// withPrimary makes a primary key of the endorsement hierarchy and calls f with it. It assumes that
// the hierarchy's authorisation value is empty.
func (t *TPM) withPrimary(area tpm2.TPMTPublic, f func(object) error) error {
	rsp, err := execute[tpm2.CreatePrimaryResponse](t, "TPM2_CreatePrimary", tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.New2B(area),
	})
	if err != nil {
		return err
	}
	defer t.flush(rsp.ObjectHandle)
	public, err := rsp.OutPublic.Contents()
	if err != nil {
		return &commandError{"TPM2_CreatePrimary", err}
	}
	return f(object{rsp.ObjectHandle, rsp.Name, *public})
}

// flush unloads an object or session, also after the context has ended. Run repeats what fails
// here.
func (t *TPM) flush(handle tpm2.TPMHandle) {
	_, _ = execute[tpm2.FlushContextResponse](t, "TPM2_FlushContext", tpm2.FlushContext{FlushHandle: handle})
}

// maxPersistent bounds how many persistent keys are read.
const maxPersistent = 8

// persistentEK returns the EK of that template among the persistent keys in the range for EKs, nil
// if there is none.
func (t *TPM) persistentEK(e template.EK) (*object, error) {
	if t.persistent == nil {
		var err error
		if t.persistent, err = t.handles(firstPersistentEK, lastPersistentEK); err != nil {
			return nil, err
		}
	}
	for _, handle := range t.persistent[:min(len(t.persistent), maxPersistent)] {
		rsp, err := execute[tpm2.ReadPublicResponse](t, "TPM2_ReadPublic", tpm2.ReadPublic{ObjectHandle: tpm2.TPMHandle(handle)})
		if err != nil {
			return nil, err
		}
		if made, _, err := template.CheckEK(rsp.OutPublic.Bytes()); err != nil || made.Name != e.Name {
			continue // another kind of key
		}
		public, err := rsp.OutPublic.Contents()
		if err != nil {
			return nil, &commandError{"TPM2_ReadPublic", err}
		}
		if !bytes.Equal(rsp.QualifiedName.Buffer, qualifiedName(e.Public.NameAlg, rsp.Name.Buffer)) {
			continue // somebody else's key of that form, in another hierarchy
		}
		return &object{tpm2.TPMHandle(handle), rsp.Name, *public}, nil
	}
	return nil, nil
}

// qualifiedName is the qualified name of a primary key of the endorsement hierarchy (TPM 2.0
// Library, part 1, "Qualified Name").
func qualifiedName(nameAlg tpm2.TPMAlgID, name []byte) []byte {
	input := append(binary.BigEndian.AppendUint32(nil, uint32(tpm2.TPMRHEndorsement)), name...)
	qualified := binary.BigEndian.AppendUint16(nil, uint16(nameAlg))
	if nameAlg == tpm2.TPMAlgSHA384 {
		digest := sha512.Sum384(input)
		return append(qualified, digest[:]...)
	}
	digest := sha256.Sum256(input)
	return append(qualified, digest[:]...)
}

// ek returns the EK of a template, with its certificate if the TPM holds one for its current key.
func (t *TPM) ek(e template.EK) (EK, error) {
	ek := EK{Template: e.Name}
	if err := t.withEK(e, func(o object) error {
		ek.Public = o.bytes()
		ek.Slow = e.IsRSA() && o.handle < firstPersistentEK
		return nil
	}); err != nil {
		return EK{}, err
	}
	made, key, err := template.CheckEK(ek.Public)
	if err != nil {
		return EK{}, err
	}
	if made.Name != e.Name {
		return EK{}, fmt.Errorf("the TPM made a key of template %s", made.Name)
	}
	indices, err := t.certificateIndices()
	if err != nil {
		return EK{}, err
	}
	if !slices.Contains(indices, e.Certificate) {
		return ek, nil
	}
	leaf, err := t.certificate(e.Certificate, key)
	var problem *certificateProblem
	if errors.As(err, &problem) {
		ek.Problem = fmt.Sprintf("NV index %#08x: %v", e.Certificate, problem)
		return ek, nil
	}
	if err != nil {
		return EK{}, err
	}
	chain, err := t.chain(indices)
	if err != nil {
		return EK{}, err
	}
	ek.Certificates = append([][]byte{leaf}, chain...)
	return ek, nil
}

// certificateProblem says why the content of an NV index is not this TPM's certificate. The TPM
// itself works.
type certificateProblem struct{ err error }

func (p *certificateProblem) Error() string { return p.err.Error() }
func (p *certificateProblem) Unwrap() error { return p.err }

// certificate returns the certificate at an NV index if it certifies key. Firmware updates and
// TPM2_ChangeEPS leave certificates of keys that no longer exist.
func (t *TPM) certificate(index uint32, key crypto.PublicKey) ([]byte, error) {
	data, err := t.readNV(index)
	if err != nil {
		return nil, err
	}
	der, err := trimCertificate(data)
	if err != nil {
		return nil, &certificateProblem{err}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, &certificateProblem{err}
	}
	certified, err := template.CertifiedKey(cert)
	if err != nil {
		return nil, &certificateProblem{err}
	}
	if own, ok := key.(interface{ Equal(crypto.PublicKey) bool }); !ok || !own.Equal(certified) {
		return nil, &certificateProblem{errors.New("certificate: for another key than the TPM has")}
	}
	return der, nil
}

// chain returns the certificates of CAs in the TPM. The verifier may have them itself, so one that
// cannot be read is ignored.
func (t *TPM) chain(indices []uint32) ([][]byte, error) {
	indices = slices.DeleteFunc(slices.Clone(indices), func(index uint32) bool { return index < uint32(firstChain) })
	var all []byte
	for _, index := range indices[:min(len(indices), maxChain)] {
		data, err := t.readNV(index)
		var problem *certificateProblem
		var refused tpm2.TPMRC
		if errors.As(err, &problem) || errors.As(err, &refused) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, data...)
	}
	return splitChain(all), nil
}

// certificateIndices returns the NV indices in use for EK certificates and their chain.
func (t *TPM) certificateIndices() ([]uint32, error) {
	if t.certificates == nil {
		var err error
		if t.certificates, err = t.handles(firstCertificate, lastChain); err != nil {
			return nil, err
		}
	}
	return t.certificates, nil
}

// readNV returns the content of an NV index, or a *certificateProblem if the TPM does not allow to
// read it. A TPM that is busy or broken is another error: the node must not choose another EK
// because of it.
func (t *TPM) readNV(index uint32) ([]byte, error) {
	properties, err := t.fixedProperties()
	if err != nil {
		return nil, err
	}
	// The size for a TPM that does not say how much it reads at a time, or says nonsense.
	chunk := uint16(64)
	if n := properties[uint32(tpm2.TPMPTNVBufferMax)]; n > uint32(chunk) && n <= maxCertificate {
		chunk = uint16(n)
	}
	data, err := t.tryReadNV(tpm2.TPMHandle(index), chunk)
	var rc tpm2.TPMRC
	if errors.As(err, &rc) && !rc.IsWarning() && rc != tpm2.TPMRCFailure {
		return nil, &certificateProblem{err}
	}
	return data, err
}

func (t *TPM) tryReadNV(index tpm2.TPMHandle, chunk uint16) ([]byte, error) {
	rsp, err := execute[tpm2.NVReadPublicResponse](t, "TPM2_NV_ReadPublic", tpm2.NVReadPublic{NVIndex: index})
	if err != nil {
		return nil, err
	}
	public, err := rsp.NVPublic.Contents()
	if err != nil {
		return nil, &commandError{"TPM2_NV_ReadPublic", err}
	}
	if public.DataSize > maxCertificate {
		return nil, &certificateProblem{fmt.Errorf("certificate: more than %d bytes", maxCertificate)}
	}
	named := tpm2.NamedHandle{Handle: index, Name: rsp.NVName}
	reader := tpm2.AuthHandle{Handle: index, Name: rsp.NVName, Auth: tpm2.PasswordAuth(nil)}
	// Never with an authorisation value that may not be empty: a wrong one counts towards
	// lockout.
	if !public.Attributes.AuthRead || !public.Attributes.NoDA {
		reader = tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)}
	}
	var data []byte
	for offset := uint16(0); offset < public.DataSize; {
		size := min(public.DataSize-offset, chunk)
		rsp, err := execute[tpm2.NVReadResponse](t, "TPM2_NV_Read", tpm2.NVRead{AuthHandle: reader, NVIndex: named, Size: size, Offset: offset})
		if err != nil {
			return nil, err
		}
		if len(rsp.Data.Buffer) != int(size) {
			return nil, &certificateProblem{errors.New("certificate: ends early")}
		}
		data = append(data, rsp.Data.Buffer...)
		offset += size
	}
	return data, nil
}
