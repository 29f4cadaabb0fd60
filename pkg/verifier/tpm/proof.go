// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"crypto/hmac"
	"errors"
	"slices"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

// VerifiedProof is the result of an accepted proof. The TPM with this EK made a quote with this AK,
// after the challenge and for this request. The zero value proves nothing.
type VerifiedProof struct {
	// EK is the proven key, with the sources that vouch for it.
	EK Endorsement
	// AKName is the Name of the AK, a key of the TPM with that EK.
	AKName []byte
	// keyID and expires are from the answered challenge.
	keyID   string
	expires time.Time
	// Boot and firmware are as the TPM reported them. The manufacturer defines the format of
	// firmware.
	Boot     verifier.Boot
	firmware uint64
	// PCRBank and PCRs are the quoted values.
	PCRBank string
	PCRs    []attestation.PCR
	// EventLogPCRs are the PCRs whose values the event log led to. Events of other PCRs prove
	// nothing. It is nil without Config.EventLog.
	EventLogPCRs []int
	// Warnings name the quoted PCRs that the log did not lead to, if the policy does not ask for
	// them.
	Warnings verifier.Refusals
}

// proofEvaluation is the state of a proof while it is judged.
type proofEvaluation struct {
	request  Request
	content  attestation.Request
	document *attestation.Proof
	quote    *parsedQuote
	// signed says that the AK, in the endorsement hierarchy, made the quote. bound says that the
	// quote is over the challenge and the request. measured says that the PCRs are the required
	// ones, and that the values match the quote.
	signed, bound, measured bool
}

// genuine reports whether the TPM quoted the values in the proof.
func (p *proofEvaluation) genuine() bool { return p.signed && p.bound && p.measured }

// VerifyProof verifies a proof, and again the whole hello that it refers to. namedEKs is as in
// VerifyHello. Its error is verifier.Refusals. ReasonChallengeExpired comes last, so it is the
// first reason only if nothing else failed.
func (v *Verifier) VerifyProof(request, helloRequest Request, namedEKs []Fingerprint, now time.Time) (*VerifiedProof, error) {
	return v.ParseHello(helloRequest).VerifyProof(request, namedEKs, now)
}

// VerifyProof is Verifier.VerifyProof, for a proof that refers to this hello.
func (parsed *ParsedHello) VerifyProof(request Request, namedEKs []Fingerprint, now time.Time) (*VerifiedProof, error) {
	if now.IsZero() {
		return nil, errNoTime
	}
	v := parsed.verifier
	if v == nil {
		return nil, verifier.Refusals{}
	}
	var refusals verifier.Refusals
	h := parsed.verify(&refusals, namedEKs, now)
	p := v.parseProof(&refusals, request)
	if p.document == nil {
		return nil, refusals
	}
	same := matchHello(&refusals, p, h)
	key, expired := v.matchChallenge(&refusals, p, now)
	p.quote = parseProofQuote(&refusals, p.document)
	p.measured = v.checkSelection(&refusals, p)
	if p.quote != nil && h.akKey != nil {
		p.signed = verifySignature(&refusals, p, h)
	}
	if p.quote != nil && same && key != nil && h.ek != nil && h.akKey != nil {
		p.bound = v.verifyMAC(&refusals, p, h, key)
	}
	pcrs, warnings := v.verifyEventLog(&refusals, p)
	if p.genuine() {
		v.checkPCRs(&refusals, p.document)
		if h.trusted {
			v.checkFirmware(&refusals, h.ek, p.quote.firmware)
		}
	}
	refusals = append(refusals, expired...)
	if err := refusals.Err(); err != nil {
		return nil, err
	}
	return verifiedProof(h, p, pcrs, warnings)
}

// VerifyWithoutHello judges a proof whose hello is not found. It returns verifier.Refusals if the
// proof does not parse, if its challenge ended maxSkew ago or earlier, or if no controller would
// have set the challenge's expiry. The result nil verifies nothing: the proof may wait for its
// hello.
//
// The expiry is a claim of the proof. So each such proof is refused at most
// Config.ChallengeLifetime and twice maxSkew after its creation. By then a controller that knows
// the hello has judged an honest proof. A deleted hello never comes back under its UID.
func (v *Verifier) VerifyWithoutHello(request Request, now time.Time) error {
	if now.IsZero() {
		return errNoTime
	}
	var refusals verifier.Refusals
	p := v.parseProof(&refusals, request)
	if p.document == nil {
		return refusals
	}
	expired := v.checkExpiry(&refusals, p, now)
	if ended := p.document.Expires; len(expired) == 0 && now.Add(-maxSkew).Unix() >= ended {
		expired.Add(reasonChallengeExpired, "proof: its hello is not found, and the challenge ran out at %s", time.Unix(ended, 0).UTC().Format(time.RFC3339))
	}
	return append(refusals, expired...).Err()
}

// verifiedProof makes each VerifiedProof. No other function accepts a proof.
func verifiedProof(h *helloEvaluation, p *proofEvaluation, eventLogPCRs []int, warnings verifier.Refusals) (*VerifiedProof, error) {
	if !h.trusted || !p.genuine() { // not reached: each failed rule adds a refusal
		return nil, verifier.Refusals{}
	}
	return &VerifiedProof{
		EK:           h.ek.Endorsement,
		AKName:       h.akName,
		keyID:        p.document.KeyID,
		expires:      time.Unix(p.document.Expires, 0),
		Boot:         p.quote.boot,
		firmware:     p.quote.firmware,
		PCRBank:      p.document.PCRBank,
		PCRs:         p.document.PCRs,
		EventLogPCRs: eventLogPCRs,
		Warnings:     warnings,
	}, nil
}

func (v *Verifier) parseProof(refusals *verifier.Refusals, request Request) *proofEvaluation {
	p := &proofEvaluation{request: request}
	if attestation.IsHelloSigner(request.SignerName) {
		refusals.Add(reasonSigner, "proof: filed under the signer of hellos, which never issues")
	}
	content, ok := v.parseRequest(refusals, request, attestation.KindProof)
	if !ok {
		return p
	}
	p.content = content
	document, err := attestation.ParseProof(content.Data)
	if err != nil {
		refusals.Add(ReasonMalformed, "%v", err)
		return p
	}
	p.document = document
	return p
}

// matchHello reports whether the proof refers to this hello. It also judges the fields that must be
// equal in both, since the challenge is valid only for the request that the hello announced.
func matchHello(refusals *verifier.Refusals, p *proofEvaluation, h *helloEvaluation) bool {
	same := true
	fail := func(what string) {
		refusals.Add(ReasonHelloMismatch, "proof: %s", what)
		same = false
	}
	if p.document.HelloName != h.request.Name {
		fail("refers to a hello of another name")
	}
	if p.document.HelloUID != h.request.UID {
		fail("refers to a hello with another UID")
	}
	if h.document == nil {
		return false // the hello has been refused
	}
	if p.document.Version != h.document.Version {
		fail("is in another version than the hello")
	}
	if p.request.SignerName != h.document.SignerName && !attestation.IsHelloSigner(p.request.SignerName) {
		fail("is under another signer than the hello says")
	}
	if !bytes.Equal(p.content.PKCS10, h.content.PKCS10) {
		refusals.Add(reasonRequestMismatch, "proof: its certification request is not the hello's")
	}
	if !slices.Equal(p.request.Usages, h.request.Usages) {
		refusals.Add(reasonRequestMismatch, "proof: its usages are not the hello's")
	}
	if a, b := p.request.ExpirationSeconds, h.request.ExpirationSeconds; (a == nil) != (b == nil) || a != nil && *a != *b {
		refusals.Add(reasonRequestMismatch, "proof: its expirationSeconds is not the hello's")
	}
	return same
}

// matchChallenge returns the controller's key that the proof names. It is nil if there is no such
// key, or if no controller would have set the challenge's expiry. The refusal of an expired
// challenge is returned separately.
func (v *Verifier) matchChallenge(refusals *verifier.Refusals, p *proofEvaluation, now time.Time) (key []byte, expired verifier.Refusals) {
	key = v.keys[p.document.KeyID]
	if key == nil {
		refusals.Add(reasonChallengeKeyUnknown, "proof: there is no key %.64q here", p.document.KeyID)
	}
	others := len(*refusals)
	expired = v.checkExpiry(refusals, p, now)
	if len(*refusals) > others {
		key = nil
	}
	return key, expired
}

// checkExpiry refuses an expiry that no controller would have set. It returns the refusal of an
// expired challenge separately. A proof that arrived in time stays in time, however late it is
// judged.
func (v *Verifier) checkExpiry(refusals *verifier.Refusals, p *proofEvaluation, now time.Time) (expired verifier.Refusals) {
	expires, came := p.document.Expires, now
	if created := p.request.Created; !created.IsZero() && created.Before(now) {
		came = created
	}
	if came.Unix() >= expires {
		expired.Add(reasonChallengeExpired, "proof: the challenge ran out at %s", time.Unix(expires, 0).UTC().Format(time.RFC3339))
	}
	if expires > now.Add(v.lifetime+maxSkew).Unix() {
		refusals.Add(reasonChallengeAhead, "proof: the challenge is said to end later than any does")
	}
	return expired
}

func parseProofQuote(refusals *verifier.Refusals, document *attestation.Proof) *parsedQuote {
	q, err := parseQuote(document.Quote)
	switch {
	case errors.Is(err, errMagic):
		refusals.Add(reasonQuoteMagic, "quote: %v", err)
	case errors.Is(err, errType):
		refusals.Add(reasonQuoteType, "quote: %v", err)
	case errors.Is(err, errSelection):
		refusals.Add(reasonPCRSelection, "quote: %v", err)
	case err != nil:
		refusals.Add(reasonQuoteMalformed, "quote: %v", err)
	}
	return q
}

// checkSelection reports whether the quoted PCRs are the required ones, and the given values match
// the quote.
func (v *Verifier) checkSelection(refusals *verifier.Refusals, p *proofEvaluation) bool {
	given := p.document.Selection()
	if !sameSelection(given, v.pcrs) {
		refusals.Add(reasonPCRSelection, "proof: the PCRs are not those wanted, bank %s, %v", v.pcrs.Bank, v.pcrs.Indexes)
		return false
	}
	if p.quote == nil || p.quote.pcrs.Check() != nil {
		return false // parseProofQuote has refused it
	}
	if !sameSelection(p.quote.pcrs, given) {
		refusals.Add(reasonPCRSelection, "quote: the PCRs are not those of the proof")
		return false
	}
	if !bytes.Equal(p.quote.pcrDigest, digestOf(p.document.PCRs)) {
		refusals.Add(reasonPCRDigest, "quote: its digest is not that of the values given")
		return false
	}
	return true
}

func sameSelection(a, b attestation.PCRSelection) bool {
	return a.Bank == b.Bank && slices.Equal(a.Indexes, b.Indexes)
}

// verifySignature reports whether this AK, in the endorsement hierarchy, made the quote.
func verifySignature(refusals *verifier.Refusals, p *proofEvaluation, h *helloEvaluation) bool {
	here := bytes.Equal(p.quote.qualifiedSigner, qualifiedName(h.akName))
	if !here {
		refusals.Add(reasonQuoteSigner, "quote: made by another key, or in another hierarchy than the endorsement hierarchy")
	}
	s, err := parseSignature(p.document.Signature)
	switch {
	case errors.Is(err, errScheme):
		refusals.Add(reasonQuoteScheme, "quote: %v", err)
		return false
	case err != nil:
		refusals.Add(reasonQuoteMalformed, "quote: %v", err)
		return false
	case !s.verify(h.akKey, p.document.Quote):
		refusals.Add(reasonQuoteSignature, "quote: the signature is not the AK's")
		return false
	}
	return here
}

// verifyMAC reports whether the quote is over this challenge and this request. Only the TPM with
// the EK could learn the secret. verifyMAC derives the secret again from the objects and the proof.
func (v *Verifier) verifyMAC(refusals *verifier.Refusals, p *proofEvaluation, h *helloEvaluation, key []byte) bool {
	secret, err := v.secret(key, h, p.request.SignerName, p.document.Expires, p.document.Selection())
	if err != nil {
		refusals.Add(ReasonQuoteMAC, "quote: the secret cannot be derived")
		return false
	}
	want := attestation.Transcript{
		Version:           p.document.Version,
		SignerName:        p.request.SignerName,
		HelloName:         h.request.Name,
		HelloUID:          h.request.UID,
		HelloRequest:      h.request.Request,
		ProofName:         p.request.Name,
		PKCS10:            p.content.PKCS10,
		Usages:            p.request.Usages,
		ExpirationSeconds: p.request.ExpirationSeconds,
		KeyID:             p.document.KeyID,
		PCRs:              p.document.Selection(),
	}.MAC(secret)
	if !hmac.Equal(p.quote.extraData, want) {
		refusals.Add(ReasonQuoteMAC, "quote: not over this challenge and this request")
		return false
	}
	return true
}

// checkPCRs judges the values of a genuine quote.
func (v *Verifier) checkPCRs(refusals *verifier.Refusals, document *attestation.Proof) {
	var bad []int
	for _, pcr := range document.PCRs {
		allowed, listed := v.values[pcr.Index]
		if listed && !slices.ContainsFunc(allowed, func(value []byte) bool { return bytes.Equal(value, pcr.Value) }) {
			bad = append(bad, pcr.Index)
		}
	}
	if len(bad) > 0 {
		refusals.Add(ReasonPCRPolicy, "PCRs %v have values that are not allowed", bad)
	}
}

// checkFirmware judges the version that a genuine quote reports. Only a verified certificate shows
// the TPM's manufacturer, and so which minimum applies.
func (v *Verifier) checkFirmware(refusals *verifier.Refusals, ek *candidateEK, version uint64) {
	if len(v.firmware) == 0 {
		return
	}
	if ek.certificate == nil || ek.certificate.manufacturer == "" {
		refusals.Add(reasonFirmwareUnknown, "firmware: no verified certificate says who made the TPM")
		return
	}
	if least := v.firmware[ek.certificate.manufacturer]; version < least {
		refusals.Add(reasonFirmwareTooOld, "firmware: %016x is older than %016x", version, least)
	}
}

// verifyEventLog judges the event log if the policy requires one. Otherwise it does not read the
// log. It returns the PCRs to whose values the log leads. A PCR to whose value the log does not
// lead is refused if it is in Config.EventLogPCRs. Otherwise it is a warning. A log that leads to
// the value of no PCR is refused, because it is from another boot.
func (v *Verifier) verifyEventLog(refusals *verifier.Refusals, p *proofEvaluation) (good []int, warnings verifier.Refusals) {
	document := p.document
	if !v.eventLog {
		return nil, nil
	}
	if len(document.EventLog) == 0 {
		refusals.Add(reasonEventLogMissing, "event log: missing")
		return nil, nil
	}
	if document.PCRBank != v.pcrs.Bank {
		return nil, nil // has been refused
	}
	replayed, err := replay(document.EventLog, document.PCRBank)
	if err != nil {
		refusals.Add(reasonEventLogMalformed, "event log: %v", err)
		return nil, nil
	}
	if !p.genuine() {
		return nil, nil // already refused: there are no values to compare with
	}
	var bad, unrequired []int
	for _, pcr := range document.PCRs {
		switch {
		case !isFirmwarePCR(pcr.Index):
		case bytes.Equal(replayed[pcr.Index], pcr.Value):
			good = append(good, pcr.Index)
		case slices.Contains(v.eventLogPCRs, pcr.Index):
			bad = append(bad, pcr.Index)
		default:
			unrequired = append(unrequired, pcr.Index)
		}
	}
	if len(good) == 0 {
		bad = append(bad, unrequired...)
	}
	if len(bad) > 0 {
		refusals.Add(reasonEventLogMismatch, "event log: does not lead to the values of PCRs %v", bad)
		return nil, nil
	}
	if len(unrequired) > 0 {
		warnings.Add(reasonEventLogMismatch, "event log: does not lead to the values of PCRs %v, whose events prove nothing", unrequired)
	}
	return good, warnings
}
