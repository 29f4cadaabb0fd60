// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The reasons for which this package refuses. reasonMeanings explains each. Other packages need
// only those that are exported.
const (
	ReasonMalformed        verifier.Reason = "AttestationMalformed"
	reasonProvider         verifier.Reason = "AttestationProviderMismatch"
	ReasonVersion          verifier.Reason = attestation.ReasonVersion
	reasonVersionDowngrade verifier.Reason = "AttestationVersionDowngrade"
	ReasonKind             verifier.Reason = "AttestationKindMismatch"
	reasonSigner           verifier.Reason = "AttestationSignerMismatch"

	reasonEKTemplateUnknown   verifier.Reason = "AttestationEKTemplateUnknown"
	reasonEKPublicMismatch    verifier.Reason = "AttestationEKPublicMismatch"
	reasonEKPoint             verifier.Reason = "AttestationEKPoint"
	reasonEKWeak              verifier.Reason = "AttestationEKWeak"
	ReasonEKDenied            verifier.Reason = "AttestationEKDenied"
	reasonEKUntrusted         verifier.Reason = "AttestationEKUntrusted"
	reasonEKCertMalformed     verifier.Reason = "AttestationEKCertificateMalformed"
	reasonEKCertMismatch      verifier.Reason = "AttestationEKCertificateMismatch"
	reasonEKIsCA              verifier.Reason = "AttestationEKIsCA"
	reasonEKUsage             verifier.Reason = "AttestationEKUsage"
	reasonEKSubjectAltName    verifier.Reason = "AttestationEKSubjectAltName"
	reasonEKCriticalExtension verifier.Reason = "AttestationEKCriticalExtension"
	reasonEKChainExpired      verifier.Reason = "AttestationEKChainExpired"
	reasonEKChainUnknown      verifier.Reason = "AttestationEKChainUnknown"
	reasonEKChainDenied       verifier.Reason = "AttestationEKChainDenied"
	reasonEKChainSHA1         verifier.Reason = "AttestationEKChainSHA1"
	reasonAKTemplateMismatch  verifier.Reason = "AttestationAKTemplateMismatch"
	reasonAKPoint             verifier.Reason = "AttestationAKPoint"
	ReasonHelloMismatch       verifier.Reason = "AttestationHelloMismatch"
	reasonRequestMismatch     verifier.Reason = "AttestationRequestMismatch"
	reasonChallengeKeyUnknown verifier.Reason = "AttestationChallengeKeyUnknown"
	reasonChallengeExpired    verifier.Reason = attestation.ReasonExpired
	reasonChallengeAhead      verifier.Reason = "AttestationChallengeAhead"
	reasonQuoteMalformed      verifier.Reason = "AttestationQuoteMalformed"
	reasonQuoteMagic          verifier.Reason = "AttestationQuoteMagic"
	reasonQuoteType           verifier.Reason = "AttestationQuoteType"
	reasonQuoteSigner         verifier.Reason = "AttestationQuoteSigner"
	ReasonQuoteMAC            verifier.Reason = "AttestationQuoteMAC"
	reasonQuoteScheme         verifier.Reason = "AttestationQuoteScheme"
	reasonQuoteSignature      verifier.Reason = "AttestationQuoteSignature"
	reasonPCRSelection        verifier.Reason = "AttestationPCRSelection"
	reasonPCRDigest           verifier.Reason = "AttestationPCRDigest"
	ReasonPCRPolicy           verifier.Reason = "AttestationPCRPolicy"
	reasonFirmwareTooOld      verifier.Reason = "AttestationFirmwareTooOld"
	reasonFirmwareUnknown     verifier.Reason = "AttestationFirmwareUnknown"
	reasonEventLogMissing     verifier.Reason = "AttestationEventLogMissing"
	reasonEventLogMalformed   verifier.Reason = "AttestationEventLogMalformed"
	reasonEventLogMismatch    verifier.Reason = "AttestationEventLogMismatch"
)

// reasonMeanings returns every reason and what it means, for documentation and for counters that
// start at zero.
func reasonMeanings() map[verifier.Reason]string {
	return map[verifier.Reason]string{
		ReasonMalformed:        "spec.request, or the document in it, is not in its one encoding",
		reasonProvider:         "the request is another provider's",
		ReasonVersion:          "the documents are in a version that this controller does not serve",
		reasonVersionDowngrade: "both sides know a newer version than the one used",
		ReasonKind:             "a hello stands where a proof belongs, or the reverse",
		reasonSigner:           "the hello is not under the signer of hellos, or the proof is",

		reasonEKTemplateUnknown:   "no EK template has the name given",
		reasonEKPublicMismatch:    "the EK's public area is not that template's",
		reasonEKPoint:             "the EK's public key is no point of its curve",
		reasonEKWeak:              "the EK is an RSA key of the wrong size, or one whose private half can be computed (CVE-2017-15361)",
		ReasonEKDenied:            "the EK is on the list of those denied",
		reasonEKUntrusted:         "nothing vouches for the EK: no certificate that could be verified, and no authoritative source",
		reasonEKCertMalformed:     "the certificate does not parse, or has bytes after it",
		reasonEKCertMismatch:      "the certificate is another key's",
		reasonEKIsCA:              "the certificate is a CA's",
		reasonEKUsage:             "the certificate is not for an EK",
		reasonEKSubjectAltName:    "the certificate's subject alternative name is not a TPM's",
		reasonEKCriticalExtension: "the certificate has a critical extension that is not known here",
		reasonEKChainExpired:      "the certificate leads to a root, but not at the time that counts",
		reasonEKChainUnknown:      "the certificate leads to no root that is configured",
		reasonEKChainDenied:       "the certificate leads to a root only through a CA on the list of those denied",
		reasonEKChainSHA1:         "the certificate leads to a root, but it or a CA's above it is signed with SHA-1, which is never accepted; an inventory can name the EK",

		reasonAKTemplateMismatch: "the AK's public area is not the template",
		reasonAKPoint:            "the AK's public key is no point of its curve",

		ReasonHelloMismatch:   "the proof does not belong to this hello",
		reasonRequestMismatch: "hello and proof differ in the certification request, the usages or expirationSeconds",

		reasonChallengeKeyUnknown: "no key of this controller has the key id given",
		reasonChallengeExpired:    "the challenge ran out; a new hello may follow at once",
		reasonChallengeAhead:      "the challenge's expiry is further ahead than this controller ever sets it",

		reasonQuoteMalformed: "the quote, or its signature, is not in its one encoding",
		reasonQuoteMagic:     "the signed structure was not made by a TPM",
		reasonQuoteType:      "the signed structure is not a quote",
		reasonQuoteSigner:    "the quote was not made by this AK as a primary key of the endorsement hierarchy",
		ReasonQuoteMAC:       "the quote is not over this challenge and this request",
		reasonQuoteScheme:    "the signature is not ECDSA with SHA-256",
		reasonQuoteSignature: "the signature is not the AK's over this quote",

		reasonPCRSelection: "the PCRs are not exactly those wanted, each once, in one bank",
		reasonPCRDigest:    "the values given are not those quoted",
		ReasonPCRPolicy:    "a PCR has a value that is not allowed",

		reasonFirmwareTooOld:  "the TPM's firmware is older than the least that is allowed",
		reasonFirmwareUnknown: "there is a least firmware version, but nobody vouches for who made the TPM",

		reasonEventLogMissing:   "the event log is missing",
		reasonEventLogMalformed: "the event log does not parse",
		reasonEventLogMismatch:  "the event log does not lead to the values quoted",
	}
}

// OnlyEKUntrusted reports whether VerifyHello would have passed if an authoritative source had
// named the EK: nothing contradicts, and only trust in the EK is missing. A caller that expects
// such a source may wait. Others deny, above all without Config.NamedEKs.
func OnlyEKUntrusted(err error) bool {
	var refusals verifier.Refusals
	if !errors.As(err, &refusals) || len(refusals) == 0 {
		return false
	}
	for _, refusal := range refusals {
		switch refusal.Reason {
		case reasonEKUntrusted, reasonEKCertMalformed, reasonEKIsCA, reasonEKUsage, reasonEKSubjectAltName,
			reasonEKCriticalExtension, reasonEKChainExpired, reasonEKChainUnknown, reasonEKChainDenied, reasonEKChainSHA1:
		default:
			return false
		}
	}
	return true
}
