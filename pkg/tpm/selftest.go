// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// SelfTestResult is the result of one command, or of the check of the quote.
type SelfTestResult struct {
	// EK is the template of the current EK, empty before the first.
	EK string
	// Command is the command's name.
	Command string
	// Took is how long it took, repeats included.
	Took time.Duration
	// Err is nil if the command succeeded.
	Err error
}

// SelfTest plays both sides of the protocol with each EK that the TPM may have to use. That
// includes the EK of the template that the operator set, if any. SelfTest reports every command as
// it returns. Its error joins the failures.
func (t *TPM) SelfTest(set string, report func(SelfTestResult)) error {
	var ekInUse string
	t.observe = func(command string, took time.Duration, err error) {
		report(SelfTestResult{ekInUse, command, took, err})
	}
	defer func() { t.observe = nil }()
	if _, err := t.Info(); err != nil {
		return err
	}
	akPublic, err := t.AK()
	if err != nil {
		return err
	}
	eks, err := t.EKs(set)
	if err != nil {
		return err
	}
	var failed []error
	for _, ek := range eks {
		ekInUse = ek.Template
		if err := t.selfTest(ek, akPublic); err != nil {
			failed = append(failed, fmt.Errorf("EK %s: %w", ek.Template, err))
		}
	}
	return errors.Join(failed...)
}

// selfTest is one challenge and its proof.
func (t *TPM) selfTest(ek EK, akPublic []byte) error {
	secret := make([]byte, sha256.Size)
	_, _ = rand.Read(secret) // never fails
	blob, encrypted, err := makeCredential(ek.Public, akPublic, secret)
	if err != nil {
		return err
	}
	c := Challenge{
		EKTemplate: ek.Template, EKPublic: ek.Public, AKPublic: akPublic,
		CredentialBlob: blob, EncryptedSecret: encrypted,
		PCRBank: tpm2.TPMAlgSHA256,
	}
	for pcr := range pcrCount {
		c.PCRs = append(c.PCRs, pcr)
	}
	var activated bool
	quote, err := t.Prove(c, func(got []byte) []byte {
		activated = hmac.Equal(got, secret)
		return make([]byte, sha256.Size)
	})
	if err != nil {
		return err
	}
	if !activated {
		return &commandError{"TPM2_ActivateCredential", errors.New("revealed another secret")}
	}
	return verifyQuote(akPublic, quote, make([]byte, sha256.Size))
}

// makeCredential is TPM2_MakeCredential in software, since challenging a TPM needs no other TPM.
func makeCredential(ekPublic, akPublic, secret []byte) (blob, encrypted []byte, err error) {
	area, err := template.Parse(ekPublic)
	if err != nil {
		return nil, nil, err
	}
	key, err := tpm2.ImportEncapsulationKey(&area)
	if err != nil {
		return nil, nil, err
	}
	name, err := template.Name(akPublic)
	if err != nil {
		return nil, nil, err
	}
	blob, encrypted, err = tpm2.CreateCredential(rand.Reader, key, name, secret)
	if err != nil {
		return nil, nil, err
	}
	return tpm2.Marshal(tpm2.TPM2BIDObject{Buffer: blob}), tpm2.Marshal(tpm2.TPM2BEncryptedSecret{Buffer: encrypted}), nil
}

// verifyQuote checks that the AK signed the quote over extraData. Use it only for the self-test: a
// verifier checks more.
func verifyQuote(akPublic []byte, q Quote, extraData []byte) error {
	key, err := template.CheckAK(akPublic)
	if err != nil {
		return err
	}
	signature, err := tpm2.Unmarshal[tpm2.TPMTSignature](q.Signature)
	if err != nil {
		return &commandError{"TPM2_Quote", err}
	}
	ecc, err := signature.Signature.ECDSA()
	if err != nil {
		return &commandError{"TPM2_Quote", err}
	}
	attest, err := tpm2.Unmarshal[tpm2.TPMSAttest](q.Attest)
	if err != nil {
		return &commandError{"TPM2_Quote", err}
	}
	digest := sha256.Sum256(q.Attest)
	r, s := new(big.Int).SetBytes(ecc.SignatureR.Buffer), new(big.Int).SetBytes(ecc.SignatureS.Buffer)
	if !ecdsa.Verify(key, digest[:], r, s) || !bytes.Equal(attest.ExtraData.Buffer, extraData) {
		return &commandError{"TPM2_Quote", errors.New("the quote does not verify")}
	}
	return nil
}
