// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// The reasons for which this package refuses. reasonMeanings explains each. Reasons that other
// packages need are exported.
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

// reasonMeanings returns every reason with its meaning, for documentation and for counters that
// start at zero.
func reasonMeanings() map[verifier.Reason]string {
	return map[verifier.Reason]string{
		ReasonMalformed:        "spec.request, or its document, is not in canonical encoding",
		reasonProvider:         "the request is another provider's",
		ReasonVersion:          "this controller does not serve the documents' version",
		reasonVersionDowngrade: "both sides know a newer version than the one used",
		ReasonKind:             "there is a hello instead of a proof, or the reverse",
		reasonSigner:           "the hello has another signer than that of hellos, or the proof has that signer",

		reasonEKTemplateUnknown:   "no EK template has this name",
		reasonEKPublicMismatch:    "the EK's public area differs from the template",
		reasonEKPoint:             "the EK's public key is not a point of its curve",
		reasonEKWeak:              "the EK is an RSA key of the wrong size, or its private key can be computed (CVE-2017-15361)",
		ReasonEKDenied:            "the EK is on the deny list",
		reasonEKUntrusted:         "nothing vouches for the EK: no verified certificate, and no authoritative source",
		reasonEKCertMalformed:     "the certificate does not parse, or has bytes after it",
		reasonEKCertMismatch:      "the certificate is for another key",
		reasonEKIsCA:              "the certificate is a CA's",
		reasonEKUsage:             "the certificate is not for an EK",
		reasonEKSubjectAltName:    "the certificate's subject alternative name is not a TPM's",
		reasonEKCriticalExtension: "the certificate has an unknown critical extension",
		reasonEKChainExpired:      "the certificate chains to a root, but is not valid at the required time",
		reasonEKChainUnknown:      "the certificate chains to no configured root",
		reasonEKChainDenied:       "the certificate chains to a root only through a CA on the deny list",
		reasonEKChainSHA1:         "the certificate chains to a root, but the chain has a SHA-1 signature, which is never accepted; an inventory can name the EK",

		reasonAKTemplateMismatch: "the AK's public area differs from the template",
		reasonAKPoint:            "the AK's public key is not a point of its curve",

		ReasonHelloMismatch:   "the proof does not belong to this hello",
		reasonRequestMismatch: "hello and proof differ in the certification request, the usages or expirationSeconds",

		reasonChallengeKeyUnknown: "no key of this controller has this key id",
		reasonChallengeExpired:    "the challenge expired, or the node was revoked since the hello; a new hello may follow at once",
		reasonChallengeAhead:      "the challenge's expiry is further ahead than this controller sets it",

		reasonQuoteMalformed: "the quote, or its signature, is not in canonical encoding",
		reasonQuoteMagic:     "no TPM created the signed structure",
		reasonQuoteType:      "the signed structure is not a quote",
		reasonQuoteSigner:    "the quote is not from this AK as a primary key of the endorsement hierarchy",
		ReasonQuoteMAC:       "the quote is not over this challenge and this request",
		reasonQuoteScheme:    "the signature is not ECDSA with SHA-256",
		reasonQuoteSignature: "the signature is not the AK's over this quote",

		reasonPCRSelection: "the PCRs are not exactly the wanted ones, each once, in one bank",
		reasonPCRDigest:    "the PCR values differ from the quoted digest",
		ReasonPCRPolicy:    "a PCR has a value that is not allowed",

		reasonFirmwareTooOld:  "the TPM's firmware is older than the minimum",
		reasonFirmwareUnknown: "a minimum firmware version is set, but no certificate proves the TPM's manufacturer",

		reasonEventLogMissing:   "the event log is missing",
		reasonEventLogMalformed: "the event log does not parse",
		reasonEventLogMismatch:  "the event log does not lead to the quoted values: a warning for PCRs that the policy does not ask for",
	}
}

// OnlyEKUntrusted reports whether VerifyHello would have passed if an authoritative source had
// named the EK: only trust in the EK is missing. A caller that expects such a source later may
// wait. Others should deny, above all without Config.NamedEKs.
func OnlyEKUntrusted(err error) bool {
	var refusals verifier.Refusals
	if !errors.As(err, &refusals) || len(refusals) == 0 {
		return false
	}
	for _, refusal := range refusals {
		switch refusal.Reason {
		case reasonEKUntrusted, reasonEKIsCA, reasonEKUsage, reasonEKSubjectAltName,
			reasonEKCriticalExtension, reasonEKChainExpired, reasonEKChainUnknown, reasonEKChainDenied, reasonEKChainSHA1:
		default:
			return false
		}
	}
	return true
}
