// SPDX-License-Identifier: Apache-2.0

// Package state says how far a CertificateSigningRequest has come. The controller, the rules and
// the node all decide with it, so that they cannot disagree.
package state

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
)

// State is how far a request has come.
type State int

// The states. The zero value is none of them, and counts as finished.
const (
	// Pending: the request has no condition and no certificate, so no decision was made.
	Pending State = iota + 1
	// Approved: each condition has the type Approved and the status True. There is no
	// certificate yet. A signer may sign in this state only.
	Approved
	// Issued: status.certificate is set, and the request is neither Denied nor Failed. The state
	// says nothing about what the certificate holds, or who put it there.
	Issued
	// Denied: a condition has the type Denied.
	Denied
	// Failed: a condition has the type Failed.
	Failed
	// Closed: a condition is none of those above. No signer signs such a request, and
	// kube-controller-manager does not clean it up.
	Closed
)

// Of returns the state of a request.
//
// A condition that is not exactly type Approved, status True, ends a request (docs/spec.md, "How a
// request ends"). The API server accepts any type, such as "approved" or "Approved " with a blank,
// also beside a true Approved. Its meaning is unknown, and a signature cannot be taken back.
//
// The API server allows only the status True for Approved, Denied and Failed
// (certificates.k8s.io/v1, CertificateSigningRequestCondition). Another status did not come from
// it, so each type is read in the safe way. Denied and Failed count with any status, and Approved
// only with True.
func Of(request *certificatesv1.CertificateSigningRequest) State {
	s, _ := Explain(request)
	return s
}

// Explain returns the state of a request, and the condition that made it Denied, Failed or Closed.
// In other states the condition is nil. The text is not trusted: any approver may have written it.
//
// The first condition of type Denied or Failed wins, even over a certificate: both together are a
// contradiction. A certificate wins over a condition of any other type.
func Explain(request *certificatesv1.CertificateSigningRequest) (State, *certificatesv1.CertificateSigningRequestCondition) {
	var odd *certificatesv1.CertificateSigningRequestCondition
	for i := range request.Status.Conditions {
		switch condition := &request.Status.Conditions[i]; {
		case condition.Type == certificatesv1.CertificateDenied:
			return Denied, condition
		case condition.Type == certificatesv1.CertificateFailed:
			return Failed, condition
		case condition.Type != certificatesv1.CertificateApproved || condition.Status != corev1.ConditionTrue:
			odd = condition
		}
	}
	switch {
	case len(request.Status.Certificate) > 0:
		return Issued, nil
	case odd != nil:
		return Closed, odd
	case len(request.Status.Conditions) > 0:
		return Approved, nil
	}
	return Pending, nil
}

// Finished reports whether nothing is left to decide or to sign.
func (s State) Finished() bool { return s != Pending && s != Approved }

// String returns the state's name.
func (s State) String() string {
	switch s {
	case Pending:
		return "Pending"
	case Approved:
		return "Approved"
	case Issued:
		return "Issued"
	case Denied:
		return "Denied"
	case Failed:
		return "Failed"
	case Closed:
		return "Closed"
	}
	return "invalid"
}
