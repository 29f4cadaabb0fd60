// SPDX-License-Identifier: Apache-2.0

package csr

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

// MaxCertificate bounds status.certificate, in bytes.
const MaxCertificate = 256 << 10

// Outcome is how far a request has come for the node.
type Outcome int

// The outcomes. The zero value is none of them.
const (
	// Pending: no decision was made, or no certificate was issued yet.
	Pending Outcome = iota + 1
	// Issued: status.certificate is set. It was not checked.
	Issued
	// Denied and Failed are final (KEP-1513).
	Denied
	Failed
	// Deleted: the object is gone. kube-controller-manager deletes old ones.
	Deleted
	// Answered: a hello has its challenge.
	Answered
	// Judged: a rehearsal has its verdict.
	Judged
)

// Decision is an outcome with what the API server says about it.
type Decision struct {
	Outcome Outcome
	// Reason and Message are the approver's or signer's, or those of the verdict. A peer wrote
	// them, so they are shortened and made printable.
	Reason, Message string
	// Certificate is status.certificate, unchecked.
	Certificate []byte
	// Challenge is the annotation that answers a hello. Versions is the annotation of a hello that
	// is denied for its version. Both are unchecked.
	Challenge, Versions string
}

// reasonUnknownCondition is Decision.Reason of a request that is closed (state.Closed).
const reasonUnknownCondition = "UnknownCondition"

// Classify returns the decision on a request, from its state. For the node, a Closed request has
// failed: no signer ever signs it, so waiting would never end.
func Classify(object *certificatesv1.CertificateSigningRequest) Decision {
	reached, cause := state.Explain(object)
	switch reached {
	case state.Pending, state.Approved:
		return Decision{Outcome: Pending}
	case state.Issued:
		return Decision{Outcome: Issued, Certificate: object.Status.Certificate}
	case state.Denied:
		return Decision{Outcome: Denied, Reason: text.Line(cause.Reason, 64), Message: text.Line(cause.Message, 512)}
	case state.Failed:
		return Decision{Outcome: Failed, Reason: text.Line(cause.Reason, 64), Message: text.Line(cause.Message, 512)}
	}
	message := fmt.Sprintf("it has a condition of type %+.64q", cause.Type)
	if cause.Type == certificatesv1.CertificateApproved {
		message += fmt.Sprintf(" and status %+.64q", cause.Status)
	}
	return Decision{Outcome: Failed, Reason: reasonUnknownCondition, Message: message}
}

// ClassifyHello returns the decision on a hello. An annotation answers it. A certificate is
// ignored, since a hello requests none.
func ClassifyHello(object *certificatesv1.CertificateSigningRequest) Decision {
	decision := Classify(object)
	switch challenge := object.Annotations[attestation.AnnotationChallenge]; {
	case decision.Outcome == Denied:
		decision.Versions = object.Annotations[attestation.AnnotationVersions]
		return decision
	case decision.Outcome == Failed:
		return decision
	case challenge != "":
		return Decision{Outcome: Answered, Challenge: challenge}
	}
	return Decision{Outcome: Pending}
}

// ClassifyRehearsal returns the decision on a hello or a proof of a rehearsal: a verdict ends both.
func ClassifyRehearsal(object *certificatesv1.CertificateSigningRequest) Decision {
	if verdict, ok := attestation.ParseVerdict(object.Spec.SignerName, object.Annotations[attestation.AnnotationVerdict]); ok {
		return Decision{Outcome: Judged, Reason: verdict.Reason, Message: verdict.Text}
	}
	if attestation.IsHelloSigner(object.Spec.SignerName) {
		return ClassifyHello(object)
	}
	return Classify(object)
}

// ParseCertificates reads status.certificate: PEM blocks of type CERTIFICATE without headers, leaf
// first, the rest intermediates (certificates.k8s.io/v1, CertificateSigningRequestStatus). It
// returns the chain in canonical PEM.
func ParseCertificates(data []byte) (chain []byte, leaf *x509.Certificate, err error) {
	if len(data) > MaxCertificate {
		return nil, nil, fmt.Errorf("longer than %d bytes", MaxCertificate)
	}
	var out bytes.Buffer
	rest := data
	for {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			break
		}
		if block.Type != "CERTIFICATE" || len(block.Headers) > 0 {
			return nil, nil, errors.New("it holds a PEM block that is not a certificate without headers")
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, nil, errors.New("it holds a certificate that does not parse")
		}
		if leaf == nil {
			leaf = certificate
		}
		if err := pem.Encode(&out, &pem.Block{Type: block.Type, Bytes: block.Bytes}); err != nil {
			return nil, nil, err
		}
	}
	if leaf == nil {
		return nil, nil, errors.New("it is not a certificate in PEM")
	}
	return out.Bytes(), leaf, nil
}
