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

// IsHello reports whether a signer is that of hellos, or of a rehearsal's hellos.
func IsHello(signer string) bool {
	return signer == HelloSignerName || signer == RehearsalHelloSignerName
}

// IsRehearsal reports whether a signer is one of a rehearsal's two.
func IsRehearsal(signer string) bool {
	return signer == RehearsalHelloSignerName || signer == RehearsalSignerName
}

// HelloSigner returns the signer of the hello whose proof asks this signer.
func HelloSigner(signer string) string {
	if signer == RehearsalSignerName {
		return RehearsalHelloSignerName
	}
	return HelloSignerName
}
