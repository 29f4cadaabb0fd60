// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// Challenge is what the controller wants proven, with what this node said in its hello. The
// controller is not trusted: the TPM reveals any secret that was made for these two keys, by
// anybody.
type Challenge struct {
	// EKTemplate, EKPublic and AKPublic are those of the hello.
	EKTemplate         string
	EKPublic, AKPublic []byte
	// CredentialBlob and EncryptedSecret are the results of TPM2_MakeCredential: a
	// TPM2B_ID_OBJECT and a TPM2B_ENCRYPTED_SECRET, each with its size before it.
	CredentialBlob, EncryptedSecret []byte
	// PCRBank is SHA-256, SHA-384 or SHA-512.
	PCRBank tpm2.TPMAlgID
	// PCRs are 1 to 24 numbers below 24, each once.
	PCRs []int
}

// Quote is what the TPM says of itself.
type Quote struct {
	// Attest is a TPMS_ATTEST. Signature is the AK's TPMT_SIGNATURE over it.
	Attest, Signature []byte
	// PCRs are the quoted values, in the order of Challenge.PCRs. Origin quotes none.
	PCRs [][]byte
}

// ErrOtherKeys says that the hello's keys are not this TPM's any more, or that the challenge is for
// other keys. The node must file another hello.
var ErrOtherKeys = errors.New("the challenge is not for the keys of this TPM")

// challengeError is the error of a malformed challenge.
type challengeError struct{ Problem string }

func (e *challengeError) Error() string { return "challenge: " + e.Problem }

// BankError says that the TPM does not keep a PCR in that bank.
type BankError struct {
	Bank tpm2.TPMAlgID
	PCR  int
}

func (e *BankError) Error() string {
	return fmt.Sprintf("the TPM has no PCR %d in the bank of algorithm %#04x", e.PCR, uint16(e.Bank))
}

const (
	pcrCount = 24 // TCG PC Client Platform TPM Profile
	// maxQuotes bounds how often a quote is repeated because a PCR was extended meanwhile.
	maxQuotes = 5
	// maxSized bounds a credential's two parts, in bytes. The largest, an RSA-2048 secret, has
	// 258.
	maxSized = 1024
)

// Prove makes the TPM reveal the challenge's secret and quote the PCRs, with mac(secret) as the
// quote's extraData.
//
// The secret crosses the bus encrypted. This process wipes its copy when mac returns. go-tpm's copy
// is left to the garbage collector. mac must not keep the slice.
func (t *TPM) Prove(c Challenge, mac func(secret []byte) []byte) (Quote, error) {
	e, ok := template.EKByName(c.EKTemplate)
	if !ok {
		return Quote{}, &challengeError{"no such EK template"}
	}
	blob, err := sized[tpm2.TPM2BIDObject](c.CredentialBlob)
	if err != nil {
		return Quote{}, err
	}
	encrypted, err := sized[tpm2.TPM2BEncryptedSecret](c.EncryptedSecret)
	if err != nil {
		return Quote{}, err
	}
	if err := checkPCRs(c.PCRBank, c.PCRs); err != nil {
		return Quote{}, err
	}
	var quote Quote
	err = t.withAK(func(ak object) error {
		if !bytes.Equal(ak.bytes(), c.AKPublic) {
			return fmt.Errorf("AK: %w", ErrOtherKeys)
		}
		var extraData []byte
		if err := t.withEK(e, c.EKPublic, func(ek object) error {
			secret, err := t.activate(e, ek, ak, *blob, *encrypted)
			if err != nil {
				return err
			}
			defer clear(secret)
			if len(secret) != sha256.Size {
				// A short secret, from the challenge of another service, could be
				// found by trying MACs.
				return fmt.Errorf("EK: %w", ErrOtherKeys)
			}
			extraData = mac(secret)
			return nil
		}); err != nil {
			return err
		}
		quote, err = t.quote(ak, extraData, c.PCRBank, c.PCRs)
		return err
	})
	return quote, err
}

// Origin returns a quote over no PCRs with this extraData, and the TPMT_PUBLIC of the AK that made
// it.
func (t *TPM) Origin(extraData []byte) (akPublic []byte, quote Quote, err error) {
	err = t.withAK(func(ak object) error {
		rsp, err := execute[tpm2.QuoteResponse](t, "TPM2_Quote", tpm2.Quote{
			SignHandle:     ak.authorised(tpm2.PasswordAuth(nil)),
			QualifyingData: tpm2.TPM2BData{Buffer: extraData}, // no scheme: the AK has a fixed one
		})
		if err == nil {
			akPublic, quote = ak.bytes(), Quote{Attest: rsp.Quoted.Bytes(), Signature: tpm2.Marshal(rsp.Signature)}
		}
		return err
	})
	return akPublic, quote, err
}

// sized reads a TPM2B that must fill data.
func sized[T tpm2.Marshallable, P interface {
	*T
	tpm2.Unmarshallable
}](data []byte) (*T, error) {
	if len(data) > maxSized {
		return nil, &challengeError{fmt.Sprintf("a part has more than %d bytes", maxSized)}
	}
	v, err := tpm2.Unmarshal[T, P](data)
	if err != nil || !bytes.Equal(tpm2.Marshal(*v), data) {
		var wanted T
		return nil, &challengeError{fmt.Sprintf("holds no %T", wanted)}
	}
	return v, nil
}

func checkPCRs(bank tpm2.TPMAlgID, pcrs []int) error {
	// SHA-1 collisions are known: two logs could have one value.
	if !slices.Contains([]tpm2.TPMAlgID{tpm2.TPMAlgSHA256, tpm2.TPMAlgSHA384, tpm2.TPMAlgSHA512}, bank) {
		return &challengeError{fmt.Sprintf("PCR bank %#04x is not trusted", uint16(bank))}
	}
	if len(pcrs) == 0 {
		return &challengeError{"names no PCR"}
	}
	for i, pcr := range pcrs {
		if pcr < 0 || pcr >= pcrCount || slices.Contains(pcrs[:i], pcr) {
			return &challengeError{fmt.Sprintf("PCR %d does not exist, or is named twice", pcr)}
		}
	}
	return nil
}

// activate is TPM2_ActivateCredential. The session that authorises the EK is also salted with it,
// and encrypts the response. The controller knows the hello's EK, so an attacker between this
// process and the TPM cannot replace it.
func (t *TPM) activate(e template.EK, ek, ak object, blob tpm2.TPM2BIDObject, encrypted tpm2.TPM2BEncryptedSecret) ([]byte, error) {
	const nonceSize = 16 // the minimum; the session key depends on the salt, too
	start := t.begin("TPM2_StartAuthSession")
	session, _, err := tpm2.PolicySession(t.conn, e.Public.NameAlg, nonceSize,
		tpm2.Salted(ek.handle, ek.public), tpm2.AESEncryption(128, tpm2.EncryptOut))
	if err := t.done("TPM2_StartAuthSession", start, err); err != nil {
		return nil, err
	}
	defer t.flush(session.Handle())
	// Authorise by policy. EKs of the high range would also accept the empty password. But an
	// interrupted use by password counts towards lockout if dictionary attack protection covers the
	// key.
	if _, err := execute[tpm2.PolicySecretResponse](t, "TPM2_PolicySecret", tpm2.PolicySecret{
		AuthHandle:    tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		PolicySession: session.Handle(),
		NonceTPM:      session.NonceTPM(),
	}); err != nil {
		return nil, err
	}
	if branches := e.PolicyOR(); branches != nil {
		if _, err := execute[tpm2.PolicyOrResponse](t, "TPM2_PolicyOR", tpm2.PolicyOr{
			PolicySession: session.Handle(),
			PHashList:     tpm2.TPMLDigest{Digests: branches},
		}); err != nil {
			return nil, err
		}
	}
	rsp, err := execute[tpm2.ActivateCredentialResponse](t, "TPM2_ActivateCredential", tpm2.ActivateCredential{
		ActivateHandle: ak.authorised(tpm2.PasswordAuth(nil)),
		KeyHandle:      ek.authorised(session),
		CredentialBlob: blob,
		Secret:         encrypted,
	})
	// These are the TPM's errors for a blob that is malformed, or made for another AK or EK. The
	// MAC is wrong, the structure is wrong, or RSA decryption fails. If RSA decryption fails,
	// libtpms returns TPM_RC_FAILURE. A TPM that has really failed also fails at the next hello.
	if isForOthers(err) || e.IsRSA() && errors.Is(err, tpm2.TPMRCFailure) {
		return nil, fmt.Errorf("%w: %w", ErrOtherKeys, err)
	}
	if err != nil {
		return nil, err
	}
	return rsp.CertInfo.Buffer, nil
}

// isForOthers reports whether the TPM refused its input.
func isForOthers(err error) bool {
	return slices.ContainsFunc([]tpm2.TPMRC{tpm2.TPMRCIntegrity, tpm2.TPMRCValue, tpm2.TPMRCSize, tpm2.TPMRCInsufficient},
		func(rc tpm2.TPMRC) bool { return errors.Is(err, rc) })
}

// quote quotes the PCRs and reads them, until both agree.
func (t *TPM) quote(ak object, extraData []byte, bank tpm2.TPMAlgID, pcrs []int) (Quote, error) {
	for range maxQuotes {
		rsp, err := execute[tpm2.QuoteResponse](t, "TPM2_Quote", tpm2.Quote{
			SignHandle:     ak.authorised(tpm2.PasswordAuth(nil)),
			QualifyingData: tpm2.TPM2BData{Buffer: extraData},
			PCRSelect:      selection(bank, pcrs), // no scheme: the AK has a fixed one
		})
		if err != nil {
			return Quote{}, err
		}
		digest, err := quotedDigest(rsp.Quoted)
		if err != nil {
			return Quote{}, &commandError{"TPM2_Quote", err}
		}
		values, err := t.readPCRs(bank, pcrs)
		if err != nil {
			return Quote{}, err
		}
		if bytes.Equal(digest, digestOf(pcrs, values)) {
			return Quote{rsp.Quoted.Bytes(), tpm2.Marshal(rsp.Signature), values}, nil
		}
	}
	return Quote{}, fmt.Errorf("TPM2_Quote: the PCRs changed during each of %d quotes", maxQuotes)
}

func quotedDigest(attest tpm2.TPM2BAttest) ([]byte, error) {
	contents, err := attest.Contents()
	if err != nil {
		return nil, err
	}
	quote, err := contents.Attested.Quote() // refuses another type
	if err != nil {
		return nil, err
	}
	return quote.PCRDigest.Buffer, nil
}

// digestOf is the digest of PCR values in a quote: the hash of the AK's scheme over them, in the
// order of their numbers.
func digestOf(pcrs []int, values [][]byte) []byte {
	h := sha256.New()
	for _, pcr := range slices.Sorted(slices.Values(pcrs)) {
		h.Write(values[slices.Index(pcrs, pcr)])
	}
	return h.Sum(nil)
}

// readPCRs returns the values in the order of pcrs. The TPM returns at most eight at a time, and
// says which.
func (t *TPM) readPCRs(bank tpm2.TPMAlgID, pcrs []int) ([][]byte, error) {
	values := make([][]byte, len(pcrs))
	missing := slices.Sorted(slices.Values(pcrs))
	for len(missing) > 0 {
		rsp, err := execute[tpm2.PCRReadResponse](t, "TPM2_PCR_Read", tpm2.PCRRead{PCRSelectionIn: selection(bank, missing)})
		if err != nil {
			return nil, err
		}
		digests := rsp.PCRValues.Digests
		var given []int
		for _, s := range rsp.PCRSelectionOut.PCRSelections {
			for pcr := range pcrCount {
				if s.Hash == bank && pcr/8 < len(s.PCRSelect) && s.PCRSelect[pcr/8]>>(pcr%8)&1 == 1 {
					given = append(given, pcr)
				}
			}
		}
		if len(given) == 0 {
			return nil, &BankError{bank, missing[0]}
		}
		if len(given) != len(digests) {
			return nil, &commandError{"TPM2_PCR_Read", errors.New("as many values as PCRs were expected")}
		}
		for i, pcr := range given {
			at := slices.Index(pcrs, pcr)
			if at < 0 || values[at] != nil {
				return nil, &commandError{"TPM2_PCR_Read", errors.New("a PCR that was not asked for")}
			}
			values[at] = digests[i].Buffer
		}
		missing = slices.DeleteFunc(missing, func(pcr int) bool { return slices.Contains(given, pcr) })
	}
	return values, nil
}

func selection(bank tpm2.TPMAlgID, pcrs []int) tpm2.TPMLPCRSelection {
	bitmap := make([]byte, pcrCount/8)
	for _, pcr := range pcrs {
		bitmap[pcr/8] |= 1 << (pcr % 8)
	}
	return tpm2.TPMLPCRSelection{PCRSelections: []tpm2.TPMSPCRSelection{{Hash: bank, PCRSelect: bitmap}}}
}
