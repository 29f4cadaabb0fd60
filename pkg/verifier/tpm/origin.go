// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"bytes"
	"errors"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

var errOrigin = errors.New("origin: the AK has not quoted this name and request")

// Origin returns the Name of the AK (TPM 2.0 Part 1, "Names") whose TPM made the annotation
// attestation.AnnotationOrigin. It verifies that the annotation is for the object of this name with
// this spec.request. Nothing shows that the AK belongs to a genuine TPM: compare the Name with a
// proven one.
func Origin(annotation, name string, request []byte) ([]byte, error) {
	origin, err := attestation.ParseOrigin([]byte(annotation))
	if err != nil {
		return nil, err
	}
	key, err := template.CheckAK(origin.AKPublic)
	if err != nil {
		return nil, err
	}
	quote, err := parseQuote(origin.Quote)
	if err != nil && !errors.Is(err, errSelection) { // an origin is a quote over no PCRs
		return nil, err
	}
	signature, err := parseSignature(origin.Signature)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(quote.extraData, attestation.OriginData(name, request)) || !signature.verify(key, origin.Quote) {
		return nil, errOrigin
	}
	return template.Name(origin.AKPublic)
}
