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

// Outcome is what has become of a request.
type Outcome int

// The outcomes. The zero value is none of them.
const (
	// Pending: nobody has decided, or the certificate is not there yet.
	Pending Outcome = iota + 1
	// Issued: status.certificate is there. It has not been checked.
	Issued
	// Denied and Failed are final (KEP-1513).
	Denied
	Failed
	// Deleted: the object is gone; the garbage collector takes old ones.
	Deleted
	// Answered: a hello has its challenge.
	Answered
)

// Decision is an outcome with what the API server says of it.
type Decision struct {
	Outcome Outcome
	// Reason and Message are the approver's or signer's, shortened and made printable: a peer wrote them.
	Reason, Message string
	// Certificate is status.certificate, as it came.
	Certificate []byte
	// Challenge is the annotation that answers a hello, and Versions that which a denial for its version comes with, both as they
	// came.
	Challenge, Versions string
}

// ReasonUnknownCondition is Decision.Reason of a request that is closed (state.Closed).
const ReasonUnknownCondition = "UnknownCondition"

// Classify says what has become of a request, from its state. A request that is Closed has failed
// for the node: nobody ever signs it, so waiting would have no end.
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
	return Decision{Outcome: Failed, Reason: ReasonUnknownCondition, Message: message}
}

// ClassifyHello says what has become of a hello. It is answered with an annotation; a certificate is nothing that anybody asked for.
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

// ParseCertificates reads status.certificate: PEM blocks of type CERTIFICATE without headers (certificates.k8s.io/v1,
// CertificateSigningRequestStatus), leaf first, the rest intermediates. It returns the chain in canonical PEM.
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
