// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"crypto/ecdsa"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math/big"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// parsedQuote is a TPMS_ATTEST of type TPM_ST_ATTEST_QUOTE (TPM 2.0 Part 2, 10.12.12). Do not trust
// it before its signature is verified: a node may have written it.
type parsedQuote struct {
	qualifiedSigner []byte
	extraData       []byte
	boot            verifier.Boot
	firmware        uint64
	pcrs            attestation.PCRSelection
	pcrDigest       []byte
}

// Errors of parsing a quote.
var (
	errMagic     = errors.New("the signed structure does not begin with TPM_GENERATED_VALUE")
	errType      = errors.New("the signed structure is not of type TPM_ST_ATTEST_QUOTE")
	errQuote     = errors.New("the quote does not parse to its last byte")
	errSelection = errors.New("the quote is not over one or more PCRs in one bank")
	errScheme    = errors.New("the signature is not ECDSA with SHA-256")
	errSignature = errors.New("the signature does not parse to its last byte")
)

// reader reads structures of the TCG: numbers in one byte order, each variable part after its size.
// After the first failure it returns zeros.
type reader struct {
	order  binary.ByteOrder
	rest   []byte
	failed bool
}

func (r *reader) bytes(n int) []byte {
	if r.failed || n < 0 || n > len(r.rest) {
		r.failed = true
		return nil
	}
	b := r.rest[:n:n]
	r.rest = r.rest[n:]
	return b
}

// fixed reads the bytes of a number, zeros after a failure.
func (r *reader) fixed(n int) []byte {
	if b := r.bytes(n); b != nil {
		return b
	}
	return make([]byte, n)
}

func (r *reader) uint8() uint8   { return r.fixed(1)[0] }
func (r *reader) uint16() uint16 { return r.order.Uint16(r.fixed(2)) }
func (r *reader) uint32() uint32 { return r.order.Uint32(r.fixed(4)) }
func (r *reader) uint64() uint64 { return r.order.Uint64(r.fixed(8)) }

// sized reads a TPM2B of at most limit bytes.
func (r *reader) sized(limit int) []byte {
	n := int(r.uint16())
	if n > limit {
		r.failed = true
	}
	return r.bytes(n)
}

// tpmReader returns a reader of data from a TPM: always big endian.
func tpmReader(data []byte) *reader { return &reader{order: binary.BigEndian, rest: data} }

// parseQuote parses a TPMS_ATTEST by hand, and checks each tag before it reads a union. Each
// accepted quote has one encoding. With errSelection it returns the quote, too, since the rest can
// be judged.
func parseQuote(data []byte) (*parsedQuote, error) {
	r := tpmReader(data)
	if tpm2.TPMGenerated(r.uint32()) != tpm2.TPMGeneratedValue {
		return nil, errMagic
	}
	if tpm2.TPMST(r.uint16()) != tpm2.TPMSTAttestQuote {
		return nil, errType
	}
	q := &parsedQuote{}
	q.qualifiedSigner = r.sized(2 + 64) // TPM2B_NAME: an algorithm and its digest
	q.extraData = r.sized(2 + 64)       // TPM2B_DATA: as large as a TPMT_HA
	q.boot.Clock = r.uint64()
	q.boot.Resets = r.uint32()
	q.boot.Restarts = r.uint32()
	safe := r.uint8() // TPMI_YES_NO
	q.boot.Safe = safe == 1
	q.firmware = r.uint64()
	banks := r.uint32()
	if r.failed || safe > 1 || banks > 16 { // TPML_PCR_SELECTION: HASH_COUNT is less
		return nil, errQuote
	}
	var selectionErr error
	if banks != 1 {
		selectionErr = errSelection
	}
	for range banks {
		bank := bankOf(tpm2.TPMAlgID(r.uint16()))
		size := int(r.uint8()) // sizeofSelect: 3 for the 24 PCRs of a PC Client
		bits := r.bytes(size)
		if bank == "" || size != 3 {
			selectionErr = errSelection
		}
		var indexes []int
		for i := range len(bits) * 8 {
			if bits[i/8]&(1<<(i%8)) != 0 {
				indexes = append(indexes, i)
			}
		}
		q.pcrs = attestation.PCRSelection{Bank: bank, Indexes: indexes}
	}
	q.pcrDigest = r.sized(64)
	if r.failed || len(r.rest) > 0 {
		return nil, errQuote
	}
	if selectionErr == nil && q.pcrs.Check() != nil {
		selectionErr = errSelection
	}
	if selectionErr != nil {
		q.pcrs = attestation.PCRSelection{}
	}
	return q, selectionErr
}

// bankOf returns the name of a PCR bank, "" if the bank is not supported.
func bankOf(algorithm tpm2.TPMAlgID) string {
	switch algorithm {
	case tpm2.TPMAlgSHA256:
		return "sha256"
	case tpm2.TPMAlgSHA384:
		return "sha384"
	case tpm2.TPMAlgSHA512:
		return "sha512"
	}
	return ""
}

// ecdsaSignature is a TPMS_SIGNATURE_ECDSA.
type ecdsaSignature struct{ r, s *big.Int }

// parseSignature parses a TPMT_SIGNATURE (TPM 2.0 Part 2, 11.3.4) of the AK's only scheme. A TPM
// may omit leading zeros of r and s, so a signature may have several encodings. Nothing depends on
// its encoding.
func parseSignature(data []byte) (*ecdsaSignature, error) {
	r := tpmReader(data)
	scheme, hash := tpm2.TPMAlgID(r.uint16()), tpm2.TPMAlgID(r.uint16())
	if r.failed {
		return nil, errSignature
	}
	if scheme != tpm2.TPMAlgECDSA || hash != tpm2.TPMAlgSHA256 {
		return nil, errScheme
	}
	a, b := r.sized(32), r.sized(32) // P-256
	if r.failed || len(r.rest) > 0 {
		return nil, errSignature
	}
	return &ecdsaSignature{new(big.Int).SetBytes(a), new(big.Int).SetBytes(b)}, nil
}

// verify reports whether the signature over data was made by key.
func (s *ecdsaSignature) verify(key *ecdsa.PublicKey, data []byte) bool {
	digest := sha256.Sum256(data)
	return ecdsa.Verify(key, digest[:], s.r, s.s)
}

// qualifiedName returns the Qualified Name of a primary key of the endorsement hierarchy (TPM 2.0
// Part 1, "Qualified Name"). It is the hash of the hierarchy's handle and the key's Name. Other
// hierarchies have other keys, and quotes there obfuscate firmware version and boot counters.
func qualifiedName(name []byte) []byte {
	input := binary.BigEndian.AppendUint32(nil, uint32(tpm2.TPMRHEndorsement))
	digest := sha256.Sum256(append(input, name...)) // the AK's nameAlg
	return append(binary.BigEndian.AppendUint16(nil, uint16(tpm2.TPMAlgSHA256)), digest[:]...)
}

// digestOf returns the digest of PCR values in a quote with the AK's scheme (TPM 2.0 Part 3,
// TPM2_Quote): their SHA-256 for every bank.
func digestOf(pcrs []attestation.PCR) []byte {
	h := sha256.New()
	for _, pcr := range pcrs {
		h.Write(pcr.Value)
	}
	return h.Sum(nil)
}
