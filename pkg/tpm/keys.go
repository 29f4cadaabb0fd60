// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// EK is an endorsement key of this TPM.
type EK struct {
	// Template is its name in package template.
	Template string
	// Public is its marshalled TPMT_PUBLIC.
	Public []byte
	// Certificates are in DER: the EK's, then those of CAs in the TPM, in its order. They are empty
	// if the TPM has none for this very key. They are not verified.
	Certificates [][]byte
	// Problem says why a certificate for this template in the TPM is ignored. It is empty if
	// there is no problem.
	Problem string
	// Slow is set if an RSA key has to be made for each use, which takes seconds.
	Slow bool

	// stored is set if it is the key that the nonce and the template in NV make.
	stored bool
}

// storedMark follows the template's name in the remembered value of an EK that is made from NV.
// Without the mark, an upgrade to a release that reads the nonce would change the EK of an enrolled
// node.
const storedMark = "+nv"

// Remember returns what ChooseEK needs to choose this EK again.
func (k EK) Remember() string {
	if k.stored {
		return k.Template + storedMark
	}
	return k.Template
}

// RememberedTemplate returns the name of the template in what EK.Remember returned.
func RememberedTemplate(remembered string) string { return strings.TrimSuffix(remembered, storedMark) }

// TemplateError says that the TPM makes no EK of the template that was asked for.
type TemplateError struct {
	Template string
	// Makes has the names of the templates from which the TPM can make EKs. Certified has those
	// whose EK has a certificate.
	Makes, Certified []string
	Err              error
}

func (e *TemplateError) Error() string {
	list := func(names []string) string { return cmp.Or(strings.Join(names, ", "), "none") }
	return fmt.Sprintf("the TPM makes no EK of template %s, but of: %s; it has EK certificates for: %s: %v",
		e.Template, list(e.Makes), list(e.Certified), e.Err)
}
func (e *TemplateError) Unwrap() error { return e.Err }

// EKs returns the EK of the template that the operator set, if any, and every EK that has a
// certificate in the TPM. If there is neither, it returns the one EK that the node would use. The
// EK that the node would use is the first.
func (t *TPM) EKs(set string) ([]EK, error) {
	var eks []EK
	if set != "" {
		ek, err := t.ChooseEK(set, "")
		if err != nil {
			return nil, err
		}
		eks = append(eks, ek)
	}
	indices, err := t.ekIndices()
	if err != nil {
		return nil, err
	}
	for _, e := range template.EKs() {
		if !slices.Contains(indices, e.Certificate) || e.Name == set {
			continue
		}
		ek, err := t.ek(e, anyInput)
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
	ek, err := t.ChooseEK("", "")
	if err != nil {
		return nil, err
	}
	return []EK{ek}, nil
}

// ChooseEK returns the EK of the template that the operator set, and no other. If none is set, it
// returns the remembered EK if the TPM still makes it: a node keeps the EK that it enrolled with.
// Otherwise it returns the first with a certificate, ECC before RSA. If no EK has a certificate, it
// is the first that the TPM can make.
func (t *TPM) ChooseEK(set, remembered string) (EK, error) {
	if set != "" {
		return t.setEK(set, remembered)
	}
	indices, err := t.ekIndices()
	if err != nil {
		return EK{}, err
	}
	type candidate struct {
		template.EK
		input ekInput
		bare  bool // accepted without a certificate
	}
	var candidates []candidate
	if e, ok := template.EKByName(RememberedTemplate(remembered)); ok {
		candidates = append(candidates, candidate{e, inputOf(remembered), true})
	}
	for _, e := range template.EKs() {
		if slices.Contains(indices, e.Certificate) {
			candidates = append(candidates, candidate{e, anyInput, false})
		}
	}
	for _, e := range template.EKs() {
		candidates = append(candidates, candidate{e, anyInput, true})
	}
	var refused []error
	for _, c := range candidates {
		ek, err := t.ek(c.EK, c.input)
		switch {
		case isRefused(err), errors.Is(err, errNothingStored):
			refused = append(refused, fmt.Errorf("EK %s: %w", c.Name, err))
		case err != nil:
			return EK{}, fmt.Errorf("EK %s: %w", c.Name, err)
		case c.bare || len(ek.Certificates) > 0:
			return ek, nil
		}
	}
	return EK{}, errors.Join(refused...)
}

// setEK returns the EK of a template that the operator set. If the node enrolled with that
// template, this is the EK that it enrolled with.
func (t *TPM) setEK(set, remembered string) (EK, error) {
	e, ok := template.EKByName(set)
	if !ok {
		return EK{}, fmt.Errorf("EK template %.64q is not one of %q", set, template.Names())
	}
	input := anyInput
	if RememberedTemplate(remembered) == set {
		input = inputOf(remembered)
	}
	ek, err := t.ek(e, input)
	if errors.Is(err, errNothingStored) {
		ek, err = t.ek(e, anyInput)
	}
	if isRefused(err) {
		return EK{}, t.templateError(set, err)
	}
	if err != nil {
		return EK{}, fmt.Errorf("EK %s: %w", set, err)
	}
	return ek, nil
}

// templateError returns the TemplateError. It asks the TPM which EKs it makes: TPM2_TestParms makes
// no key, so it is fast.
func (t *TPM) templateError(set string, refused error) error {
	failure := &TemplateError{Template: set, Err: refused}
	indices, err := t.ekIndices()
	if err != nil {
		return err
	}
	for _, e := range template.EKs() {
		if slices.Contains(indices, e.Certificate) {
			failure.Certified = append(failure.Certified, e.Name)
		}
		if e.Name == set {
			continue
		}
		if _, err := execute[tpm2.TestParmsResponse](t, "TPM2_TestParms", tpm2.TestParms{
			Parameters: tpm2.TPMTPublicParms{Type: e.Public.Type, Parameters: e.Public.Parameters},
		}); err == nil {
			failure.Makes = append(failure.Makes, e.Name)
		}
	}
	return failure
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

// ekInput says which inputs an EK of a template may be made from.
type ekInput int

const (
	// anyInput allows an EK that is made with or without the nonce and the template in NV, and
	// prefers the one that has a certificate. A new node uses anyInput.
	anyInput ekInput = iota
	// plainInput allows only the EK that is made without the nonce and the template in NV.
	plainInput
	// storedInput allows only the EK that is made with the nonce and the template in NV.
	storedInput
)

// inputOf returns the input of an EK, given what EK.Remember returned for it.
func inputOf(remembered string) ekInput {
	if strings.HasSuffix(remembered, storedMark) {
		return storedInput
	}
	return plainInput
}

// errNothingStored says that neither nonce nor template is in NV any more, or that they cannot be
// used.
var errNothingStored = errors.New("the key was made from a nonce or template in NV, which cannot be used now")

// source is one source of an EK: a persistent key, or a template for TPM2_CreatePrimary.
type source struct {
	persistent *object
	public     tpm2.TPMTPublic
	// stored is set if the template is from NV.
	stored bool
}

// sources returns where an EK of that template may come from, the most likely first. An RSA key is
// slow to make, so the persistent one comes first if there is one. problem says why the nonce or
// the template in NV is not used.
func (t *TPM) sources(e template.EK, input ekInput) (all []*source, problem string, err error) {
	if e.IsRSA() {
		ek, err := t.persistentEK(e)
		if err != nil {
			return nil, "", err
		}
		if ek != nil {
			all = append(all, &source{persistent: ek})
		}
	}
	if input != plainInput {
		stored, err := t.storedTemplate(e)
		var invalid *nvProblem
		switch {
		case errors.As(err, &invalid):
			problem = invalid.Error()
		case err != nil:
			return nil, "", err
		case stored != nil:
			all = append(all, &source{public: stored.Public, stored: true})
			return append(all, &source{public: e.Public}), "", nil
		}
		if input == storedInput {
			return nil, "", fmt.Errorf("%w: %s", errNothingStored, cmp.Or(problem, "NV holds neither"))
		}
	}
	if len(all) == 0 {
		all = []*source{{public: e.Public}}
	}
	return all, problem, nil
}

// storedTemplate returns the template that the nonce and the template in NV make. It is nil if NV
// has neither, or if both agree with the profile. The error is an *nvProblem if they cannot be
// used. They may change the Unique field only: a verifier accepts no other EK.
func (t *TPM) storedTemplate(e template.EK) (*template.EK, error) {
	indices, err := t.ekIndices()
	if err != nil {
		return nil, err
	}
	made := e
	for _, part := range []struct {
		index uint32
		apply func(template.EK, []byte) (template.EK, error)
	}{{e.Template, template.EK.WithTemplate}, {e.Nonce, template.EK.WithNonce}} {
		if !slices.Contains(indices, part.index) {
			continue
		}
		data, err := t.readNV(part.index)
		if errors.Is(err, tpm2.TPMRCNVUninitialized) {
			continue // the index is defined, but was never written
		}
		if err != nil {
			return nil, err
		}
		if made, err = part.apply(made, data); err != nil {
			return nil, &nvProblem{part.index, err}
		}
	}
	if bytes.Equal(tpm2.Marshal(made.Public), tpm2.Marshal(e.Public)) {
		return nil, nil
	}
	return &made, nil
}

// withSource calls f with the EK of a source.
func (t *TPM) withSource(s *source, f func(object) error) error {
	if s.persistent != nil {
		return f(*s.persistent)
	}
	return t.withPrimary(s.public, f)
}

// withEK calls f with the EK of that template which has this public area.
func (t *TPM) withEK(e template.EK, public []byte, f func(object) error) error {
	sources, _, err := t.sources(e, anyInput)
	if err != nil {
		return err
	}
	for _, s := range sources {
		found := false
		err := t.withSource(s, func(ek object) error {
			if found = bytes.Equal(ek.bytes(), public); !found {
				return nil
			}
			return f(ek)
		})
		if !found && s.stored && isRefused(err) {
			continue
		}
		if found || err != nil {
			return err
		}
	}
	return fmt.Errorf("EK: %w", ErrOtherKeys)
}

// ErrReset says that the TPM was reset while it was in use. Its keys are the same afterwards, so
// another attempt can succeed.
var ErrReset = errors.New("the TPM was reset meanwhile: it returned a handle that is in use")

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
	if t.conn.reset {
		// The AK's handle may be the EK's now. TPM2_ActivateCredential would then use the EK
		// by password, which counts towards lockout if the power fails.
		return &commandError{"TPM2_CreatePrimary", ErrReset}
	}
	public, err := rsp.OutPublic.Contents()
	if err != nil {
		return &commandError{"TPM2_CreatePrimary", err}
	}
	return f(object{rsp.ObjectHandle, rsp.Name, *public})
}

// flush unloads an object or session, also after the context has ended. If it fails, Run tries
// again before it closes the TPM.
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

// ek returns the EK of a template: the key that the certificate in the TPM is for. Without such a
// certificate it is the most likely key.
func (t *TPM) ek(e template.EK, input ekInput) (EK, error) {
	sources, storedProblem, err := t.sources(e, input)
	if err != nil {
		return EK{}, err
	}
	cert, certProblem, err := t.ekCertificate(e)
	if err != nil {
		return EK{}, err
	}
	if cert == nil && input == storedInput {
		// Without a certificate, the remembered value decides.
		sources = slices.DeleteFunc(sources, func(s *source) bool { return !s.stored })
	}
	var uncertified *EK
	for _, s := range sources {
		ek, key, err := t.make(e, s)
		switch {
		case isRefused(err) && s.stored && input != storedInput:
			// The next source is the template without NV.
			storedProblem = fmt.Sprintf("nonce or template in NV: %v", err)
		case err != nil:
			return EK{}, err
		case cert == nil:
			ek.Problem = joinProblems(storedProblem, certProblem)
			return ek, nil
		case cert.isFor(key):
			// A persistent key that is certified may be the one that NV makes. If it is
			// evicted, the certificate decides among the sources.
			ek.stored = s.stored || s.persistent != nil && slices.ContainsFunc(sources, func(s *source) bool { return s.stored })
			ek.Certificates, err = t.withChain(cert)
			return ek, err
		case uncertified == nil, input == storedInput && s.stored:
			uncertified = &ek
		}
	}
	// Firmware updates and TPM2_ChangeEPS leave certificates of keys that no longer exist.
	stale := &nvProblem{e.Certificate, errors.New("certificate: for another key than the TPM has")}
	uncertified.Problem = joinProblems(storedProblem, stale.Error())
	return *uncertified, nil
}

// joinProblems returns the problems that are not empty, as one text.
func joinProblems(problems ...string) string {
	return strings.Join(slices.DeleteFunc(problems, func(problem string) bool { return problem == "" }), "; ")
}

// make returns the EK of a source, without its certificates.
func (t *TPM) make(e template.EK, s *source) (EK, crypto.PublicKey, error) {
	ek := EK{Template: e.Name, Slow: e.IsRSA() && s.persistent == nil, stored: s.stored}
	if err := t.withSource(s, func(o object) error {
		ek.Public = o.bytes()
		return nil
	}); err != nil {
		return EK{}, nil, err
	}
	made, key, err := template.CheckEK(ek.Public)
	if err != nil {
		return EK{}, nil, err
	}
	if made.Name != e.Name {
		return EK{}, nil, fmt.Errorf("the TPM made a key of template %s", made.Name)
	}
	return ek, key, nil
}

// nvProblem says why the content of an NV index cannot be used as this TPM's certificate, nonce or
// template. The TPM itself works.
type nvProblem struct {
	index uint32
	err   error
}

func (p *nvProblem) Error() string { return fmt.Sprintf("NV index %#08x: %v", p.index, p.err) }
func (p *nvProblem) Unwrap() error { return p.err }

// certificate is an EK certificate in NV. It is not verified.
type certificate struct {
	der []byte
	key crypto.PublicKey
}

// isFor reports whether the certificate is for this key.
func (c *certificate) isFor(key crypto.PublicKey) bool {
	own, ok := key.(interface{ Equal(crypto.PublicKey) bool })
	return ok && own.Equal(c.key)
}

// ekCertificate returns the certificate in the TPM for the EK of a template, nil if there is none.
// problem says why the one that is there cannot be used.
func (t *TPM) ekCertificate(e template.EK) (cert *certificate, problem string, err error) {
	indices, err := t.ekIndices()
	if err != nil || !slices.Contains(indices, e.Certificate) {
		return nil, "", err
	}
	cert, err = t.readCertificate(e.Certificate)
	var invalid *nvProblem
	if errors.As(err, &invalid) {
		return nil, invalid.Error(), nil
	}
	return cert, "", err
}

// readCertificate returns the certificate at an NV index. The error is an *nvProblem if there is no
// valid one.
func (t *TPM) readCertificate(index uint32) (*certificate, error) {
	data, err := t.readNV(index)
	if err != nil {
		return nil, err
	}
	der, err := trimCertificate(data)
	if err != nil {
		return nil, &nvProblem{index, err}
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, &nvProblem{index, err}
	}
	key, err := template.CertifiedKey(cert)
	if err != nil {
		return nil, &nvProblem{index, err}
	}
	return &certificate{der, key}, nil
}

// withChain returns an EK certificate and the certificates of CAs in the TPM. The verifier may have
// those itself, so one that the TPM does not allow to read is ignored. A busy TPM is an error:
// without the chain the verifier may deny the request.
func (t *TPM) withChain(cert *certificate) ([][]byte, error) {
	indices, err := t.ekIndices()
	if err != nil {
		return nil, err
	}
	indices = slices.DeleteFunc(slices.Clone(indices), func(index uint32) bool { return index < uint32(firstChain) })
	var chain []byte
	for _, index := range indices[:min(len(indices), maxChain)] {
		data, err := t.readNV(index)
		var problem *nvProblem
		if errors.As(err, &problem) {
			continue
		}
		if err != nil {
			return nil, err
		}
		chain = append(chain, data...)
	}
	return append([][]byte{cert.der}, splitChain(chain)...), nil
}

// ekIndices returns the NV indices in use for EK certificates, nonces, templates and the chain.
func (t *TPM) ekIndices() ([]uint32, error) {
	if t.indices == nil {
		var err error
		if t.indices, err = t.handles(firstCertificate, lastChain); err != nil {
			return nil, err
		}
	}
	return t.indices, nil
}

// readNV returns the content of an NV index, or an *nvProblem if the TPM does not allow to read it.
// A TPM that is busy or broken is another error: the node must not choose another EK because of it.
func (t *TPM) readNV(index uint32) ([]byte, error) {
	properties, err := t.fixedProperties()
	if err != nil {
		return nil, err
	}
	// This is the size for a TPM that reports no limit for one read, or an invalid one.
	chunk := uint16(64)
	if n := properties[uint32(tpm2.TPMPTNVBufferMax)]; n > uint32(chunk) && n <= maxCertificate {
		chunk = uint16(n)
	}
	data, err := t.tryReadNV(index, chunk)
	var rc tpm2.TPMRC
	switch {
	case errors.Is(err, tpm2.TPMRCBadAuth), errors.Is(err, tpm2.TPMRCAuthFail):
		return nil, &nvProblem{index, fmt.Errorf("only the owner hierarchy may read it, and that has a password: %w", err)}
	case errors.As(err, &rc) && !rc.IsWarning() && rc != tpm2.TPMRCFailure:
		return nil, &nvProblem{index, err}
	}
	return data, err
}

func (t *TPM) tryReadNV(index uint32, chunk uint16) ([]byte, error) {
	handle := tpm2.TPMHandle(index)
	rsp, err := execute[tpm2.NVReadPublicResponse](t, "TPM2_NV_ReadPublic", tpm2.NVReadPublic{NVIndex: handle})
	if err != nil {
		return nil, err
	}
	public, err := rsp.NVPublic.Contents()
	if err != nil {
		return nil, &commandError{"TPM2_NV_ReadPublic", err}
	}
	if public.DataSize > maxCertificate {
		return nil, &nvProblem{index, fmt.Errorf("content: more than %d bytes", maxCertificate)}
	}
	named := tpm2.NamedHandle{Handle: handle, Name: rsp.NVName}
	reader := tpm2.AuthHandle{Handle: handle, Name: rsp.NVName, Auth: tpm2.PasswordAuth(nil)}
	// Do not read an index whose authorisation value may not be empty: a wrong value counts towards
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
			return nil, &nvProblem{index, errors.New("content: ends early")}
		}
		data = append(data, rsp.Data.Buffer...)
		offset += size
	}
	return data, nil
}
