// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// Every reason for which this package refuses. Reasons says what each means.
const (
	ReasonMalformed        verifier.Reason = "AttestationMalformed"
	ReasonProvider         verifier.Reason = "AttestationProviderMismatch"
	ReasonVersion          verifier.Reason = attestation.ReasonVersion
	ReasonVersionDowngrade verifier.Reason = "AttestationVersionDowngrade"
	ReasonKind             verifier.Reason = "AttestationKindMismatch"
	ReasonSigner           verifier.Reason = "AttestationSignerMismatch"

	ReasonEKTemplateUnknown   verifier.Reason = "AttestationEKTemplateUnknown"
	ReasonEKPublicMismatch    verifier.Reason = "AttestationEKPublicMismatch"
	ReasonEKPoint             verifier.Reason = "AttestationEKPoint"
	ReasonEKWeak              verifier.Reason = "AttestationEKWeak"
	ReasonEKDenied            verifier.Reason = "AttestationEKDenied"
	ReasonEKUntrusted         verifier.Reason = "AttestationEKUntrusted"
	ReasonEKCertMalformed     verifier.Reason = "AttestationEKCertificateMalformed"
	ReasonEKCertMismatch      verifier.Reason = "AttestationEKCertificateMismatch"
	ReasonEKIsCA              verifier.Reason = "AttestationEKIsCA"
	ReasonEKUsage             verifier.Reason = "AttestationEKUsage"
	ReasonEKSubjectAltName    verifier.Reason = "AttestationEKSubjectAltName"
	ReasonEKCriticalExtension verifier.Reason = "AttestationEKCriticalExtension"
	ReasonEKChainExpired      verifier.Reason = "AttestationEKChainExpired"
	ReasonEKChainUnknown      verifier.Reason = "AttestationEKChainUnknown"
	ReasonEKChainDenied       verifier.Reason = "AttestationEKChainDenied"
	ReasonEKChainSHA1         verifier.Reason = "AttestationEKChainSHA1"
	ReasonAKTemplateMismatch  verifier.Reason = "AttestationAKTemplateMismatch"
	ReasonAKPoint             verifier.Reason = "AttestationAKPoint"
	ReasonHelloMismatch       verifier.Reason = "AttestationHelloMismatch"
	ReasonRequestMismatch     verifier.Reason = "AttestationRequestMismatch"
	ReasonChallengeKeyUnknown verifier.Reason = "AttestationChallengeKeyUnknown"
	ReasonChallengeExpired    verifier.Reason = attestation.ReasonExpired
	ReasonChallengeAhead      verifier.Reason = "AttestationChallengeAhead"
	ReasonQuoteMalformed      verifier.Reason = "AttestationQuoteMalformed"
	ReasonQuoteMagic          verifier.Reason = "AttestationQuoteMagic"
	ReasonQuoteType           verifier.Reason = "AttestationQuoteType"
	ReasonQuoteSigner         verifier.Reason = "AttestationQuoteSigner"
	ReasonQuoteMAC            verifier.Reason = "AttestationQuoteMAC"
	ReasonQuoteScheme         verifier.Reason = "AttestationQuoteScheme"
	ReasonQuoteSignature      verifier.Reason = "AttestationQuoteSignature"
	ReasonPCRSelection        verifier.Reason = "AttestationPCRSelection"
	ReasonPCRDigest           verifier.Reason = "AttestationPCRDigest"
	ReasonPCRPolicy           verifier.Reason = "AttestationPCRPolicy"
	ReasonFirmwareTooOld      verifier.Reason = "AttestationFirmwareTooOld"
	ReasonFirmwareUnknown     verifier.Reason = "AttestationFirmwareUnknown"
	ReasonEventLogMissing     verifier.Reason = "AttestationEventLogMissing"
	ReasonEventLogMalformed   verifier.Reason = "AttestationEventLogMalformed"
	ReasonEventLogMismatch    verifier.Reason = "AttestationEventLogMismatch"
)

// Reasons returns every reason and what it means, for documentation and for counters that start at zero.
func Reasons() map[verifier.Reason]string {
	return map[verifier.Reason]string{
		ReasonMalformed:        "spec.request, or the document in it, is not in its one encoding",
		ReasonProvider:         "the request is another provider's",
		ReasonVersion:          "the documents are in a version that this controller does not serve",
		ReasonVersionDowngrade: "both sides know a newer version than the one used",
		ReasonKind:             "a hello stands where a proof belongs, or the reverse",
		ReasonSigner:           "the hello is not under the signer of hellos, or the proof is",

		ReasonEKTemplateUnknown:   "no EK template has the name given",
		ReasonEKPublicMismatch:    "the EK's public area is not that template's",
		ReasonEKPoint:             "the EK's public key is no point of its curve",
		ReasonEKWeak:              "the EK is an RSA key of the wrong size, or one whose private half can be computed (CVE-2017-15361)",
		ReasonEKDenied:            "the EK is on the list of those denied",
		ReasonEKUntrusted:         "nothing vouches for the EK: no certificate that could be verified, and no authoritative source",
		ReasonEKCertMalformed:     "the certificate does not parse, or has bytes after it",
		ReasonEKCertMismatch:      "the certificate is another key's",
		ReasonEKIsCA:              "the certificate is a CA's",
		ReasonEKUsage:             "the certificate is not for an EK",
		ReasonEKSubjectAltName:    "the certificate's subject alternative name is not a TPM's",
		ReasonEKCriticalExtension: "the certificate has a critical extension that is not known here",
		ReasonEKChainExpired:      "the certificate leads to a root, but not at the time that counts",
		ReasonEKChainUnknown:      "the certificate leads to no root that is configured",
		ReasonEKChainDenied:       "the certificate leads to a root only through a CA on the list of those denied",
		ReasonEKChainSHA1:         "the certificate leads to a root, but it or a CA's above it is signed with SHA-1, which is never accepted; an inventory can name the EK",

		ReasonAKTemplateMismatch: "the AK's public area is not the template",
		ReasonAKPoint:            "the AK's public key is no point of its curve",

		ReasonHelloMismatch:   "the proof does not belong to this hello",
		ReasonRequestMismatch: "hello and proof differ in the certification request, the usages or expirationSeconds",

		ReasonChallengeKeyUnknown: "no key of this controller has the key id given",
		ReasonChallengeExpired:    "the challenge ran out; a new hello may follow at once",
		ReasonChallengeAhead:      "the challenge's expiry is further ahead than this controller ever sets it",

		ReasonQuoteMalformed: "the quote, or its signature, is not in its one encoding",
		ReasonQuoteMagic:     "the signed structure was not made by a TPM",
		ReasonQuoteType:      "the signed structure is not a quote",
		ReasonQuoteSigner:    "the quote was not made by this AK as a primary key of the endorsement hierarchy",
		ReasonQuoteMAC:       "the quote is not over this challenge and this request",
		ReasonQuoteScheme:    "the signature is not ECDSA with SHA-256",
		ReasonQuoteSignature: "the signature is not the AK's over this quote",

		ReasonPCRSelection: "the PCRs are not exactly those wanted, each once, in one bank",
		ReasonPCRDigest:    "the values given are not those quoted",
		ReasonPCRPolicy:    "a PCR has a value that is not allowed",

		ReasonFirmwareTooOld:  "the TPM's firmware is older than the least that is allowed",
		ReasonFirmwareUnknown: "there is a least firmware version, but nobody vouches for who made the TPM",

		ReasonEventLogMissing:   "the event log is missing",
		ReasonEventLogMalformed: "the event log does not parse",
		ReasonEventLogMismatch:  "the event log does not lead to the values quoted",
	}
}

// CuredByName reports whether an error of Hello would have been nil if an authoritative source had named the EK: nothing that was shown
// contradicts anything, only trust in the EK is missing. Whoever still waits for such a source waits; everybody else, without
// Config.NamedEKs above all, denies.
func CuredByName(err error) bool {
	var refusals verifier.Refusals
	if !errors.As(err, &refusals) || len(refusals) == 0 {
		return false
	}
	for _, refusal := range refusals {
		switch refusal.Reason {
		case ReasonEKUntrusted, ReasonEKCertMalformed, ReasonEKIsCA, ReasonEKUsage, ReasonEKSubjectAltName,
			ReasonEKCriticalExtension, ReasonEKChainExpired, ReasonEKChainUnknown, ReasonEKChainDenied, ReasonEKChainSHA1:
		default:
			return false
		}
	}
	return true
}
