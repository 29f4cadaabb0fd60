// SPDX-License-Identifier: Apache-2.0

package attestation

// The signers of a rehearsal: a hello and a proof that end in a verdict (AnnotationVerdict), and
// never in a certificate. No signer issues for either. The evidence is bound to the signer's name,
// so it proves nothing to another signer.
const (
	RehearsalHelloSignerName = "cluster.x-k8s.io/attestation-rehearsal-hello"
	RehearsalSignerName      = "cluster.x-k8s.io/attestation-rehearsal"
)

// ReasonRehearsalPassed is the reason of the verdict that a real request would be approved.
const ReasonRehearsalPassed = "RehearsalPassed"

// IsHelloSigner reports whether a signer is that of hellos, or of a rehearsal's hellos.
func IsHelloSigner(signer string) bool {
	return signer == HelloSignerName || signer == RehearsalHelloSignerName
}

// IsRehearsalSigner reports whether a signer is one of a rehearsal's two.
func IsRehearsalSigner(signer string) bool {
	return signer == RehearsalHelloSignerName || signer == RehearsalSignerName
}

// HelloSignerFor returns the signer under which a hello is filed, before a proof under this signer.
func HelloSignerFor(signer string) string {
	if signer == RehearsalSignerName {
		return RehearsalHelloSignerName
	}
	return HelloSignerName
}

// ParseVerdict returns the verdict in the annotation of a request for this signer. It ignores
// ReasonRehearsalPassed on a hello, which proves nothing.
func ParseVerdict(signer, annotation string) (Statement, bool) {
	verdict, err := ParseStatement(annotation)
	if err != nil || !IsRehearsalSigner(signer) || IsHelloSigner(signer) && verdict.Reason == ReasonRehearsalPassed {
		return Statement{}, false
	}
	return verdict, true
}
