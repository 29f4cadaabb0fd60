// SPDX-License-Identifier: Apache-2.0

// Package statetest has the requests by which the controller, the rules and the node show in their
// tests that they agree on a request's state.
package statetest

import (
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// Case is a status and its state.
type Case struct {
	Title  string
	Status certificatesv1.CertificateSigningRequestStatus
	State  state.State
}

// Cases returns every kind of condition, with each status, alone and beside a true Approved, with
// and without a certificate.
func Cases() []Case {
	const approved, denied, failed = certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed
	yes := corev1.ConditionTrue
	cases := []Case{
		with("nothing", state.Pending),
		with("approved", state.Approved, condition(approved, yes)),
		with("approved twice", state.Approved, condition(approved, yes), condition(approved, yes)),
		with("approved, then denied", state.Denied, condition(approved, yes), condition(denied, yes)),
		with("denied, then approved", state.Denied, condition(denied, yes), condition(approved, yes)),
		with("denied, then failed", state.Denied, condition(denied, yes), condition(failed, yes)),
		with("failed, then denied", state.Failed, condition(failed, yes), condition(denied, yes)),
		with("failed, then closed", state.Failed, condition(failed, yes), condition("Acme", yes)),
		with("closed, then denied", state.Denied, condition("approved", yes), condition(denied, yes)),
	}
	for _, status := range []corev1.ConditionStatus{yes, corev1.ConditionFalse, corev1.ConditionUnknown, "", "true"} {
		said := string(status)
		for kind, s := range map[certificatesv1.RequestConditionType]state.State{
			denied: state.Denied, failed: state.Failed,
			"approved": state.Closed, "APPROVED": state.Closed, "Approved ": state.Closed, "denied": state.Closed, "Acme": state.Closed, "": state.Closed,
		} {
			cases = append(cases,
				with(string(kind)+"="+said, s, condition(kind, status)),
				with("approved, and "+string(kind)+"="+said, s, condition(approved, yes), condition(kind, status)),
				with(string(kind)+"="+said+", and approved", s, condition(kind, status), condition(approved, yes)))
		}
		if status != yes {
			cases = append(cases,
				with("Approved="+said, state.Closed, condition(approved, status)),
				with("approved, and Approved="+said, state.Closed, condition(approved, yes), condition(approved, status)),
				with("Approved="+said+", and approved", state.Closed, condition(approved, status), condition(approved, yes)))
		}
	}
	for _, c := range cases {
		c.Title += ", and a certificate"
		c.Status.Certificate = []byte("certificate")
		if c.State != state.Denied && c.State != state.Failed {
			c.State = state.Issued
		}
		cases = append(cases, c)
	}
	return cases
}

func with(title string, s state.State, conditions ...certificatesv1.CertificateSigningRequestCondition) Case {
	return Case{Title: title, Status: certificatesv1.CertificateSigningRequestStatus{Conditions: conditions}, State: s}
}

func condition(kind certificatesv1.RequestConditionType, status corev1.ConditionStatus) certificatesv1.CertificateSigningRequestCondition {
	return certificatesv1.CertificateSigningRequestCondition{Type: kind, Status: status, Reason: "Odd"}
}
