// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"encoding/pem"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// Filed is one CertificateSigningRequest as the API server stores it. The API server sets UID and
// Created. The requester chose the rest.
type Filed struct {
	Name, UID, SignerName string
	// Request is spec.request.
	Request []byte
	// Usages and ExpirationSeconds are spec.usages in their order, and spec.expirationSeconds, nil
	// if unset.
	Usages            []string
	ExpirationSeconds *int32
	// Created is the time when the API server stored the request, by its clock. Evidence that came
	// in time stays in time, even if the request waits long for its machine or a CA.
	Created time.Time
}

// FiledOf returns the parts of an object that its evidence is verified with.
func FiledOf(object *certificatesv1.CertificateSigningRequest) Filed {
	usages := make([]string, 0, len(object.Spec.Usages))
	for _, usage := range object.Spec.Usages {
		usages = append(usages, string(usage))
	}
	return Filed{
		Name: object.Name, UID: string(object.UID), SignerName: object.Spec.SignerName,
		Request: object.Spec.Request, Usages: usages, ExpirationSeconds: object.Spec.ExpirationSeconds,
		Created: object.CreationTimestamp.Time,
	}
}

// kind says what a request is for. Its signer decides, and for an unattested node also the policy.
type kind struct {
	// hello, insecure and serving say which kind of signer the request is for. unattested says that
	// the policy lists the node as unattested. rehearsal says that nothing may be issued.
	hello, insecure, serving, unattested, rehearsal bool
}

// kindOf reports false if the request is not ours: it is for another signer, or for a shared signer
// without our evidence (S1). This is decided before any validation.
func (r *Rules) kindOf(object *certificatesv1.CertificateSigningRequest) (k kind, ours bool) {
	switch {
	case r == nil || object == nil:
		return kind{}, false
	case r.isUnattestedRenewal(object.Spec):
		return kind{unattested: true}, true
	case r.isForServing(object.Spec):
		return kind{serving: true}, true
	}
	signer, ours := r.signers[object.Spec.SignerName]
	if !ours || signer.Shared && !namesProvider(object.Spec.Request, signer) {
		return kind{}, false
	}
	return kind{
		hello:     attestation.IsHelloSigner(signer.Name),
		insecure:  signer.Name == InsecureSignerName,
		rehearsal: attestation.IsRehearsalSigner(signer.Name),
	}, true
}

// maySignFor reports whether this controller may sign requests of this kind for a signer.
func (r *Rules) maySignFor(signer string, k kind) bool {
	return !k.unattested && !k.rehearsal && (!k.serving || r.SignsServing(signer))
}

// request is a parsed request. A field is zero if its rule failed.
type request struct {
	object *certificatesv1.CertificateSigningRequest
	kind   kind
	// content is the parsed spec.request. It is zero if the request needs no evidence.
	content attestation.Request
	// readable says that spec.request parses, and has a provider that the signer accepts.
	readable bool
	// needsHello says that the request is a proof whose provider challenges.
	needsHello bool
	// cert has the content of the PKCS#10 request.
	cert requestedCertificate
}

// parseRequest applies S1 to S6. They depend on the request alone.
func (r *Rules) parseRequest(object *certificatesv1.CertificateSigningRequest, k kind) (request, findings) {
	q, spec := request{object: object, kind: k}, object.Spec
	var f findings
	var der []byte
	if k.serving || k.unattested {
		if der, q.readable = soleBlock(spec.Request); !q.readable {
			f.deny(ReasonMalformedRequest, "it is not one PEM block")
			return q, f
		}
	} else {
		content, err := attestation.Parse(spec.Request)
		if err != nil {
			f.deny(ReasonMalformedRequest, "%v", err)
			return q, f
		}
		q.content, der = content, content.PKCS10
		q.readable = r.signers[spec.SignerName].accepts(content.Provider)
		if !q.readable {
			f.deny(ReasonProviderMismatch, "the signer is not for the provider %.64q", content.Provider)
		}
		q.needsHello = !k.hello && r.challenges(content.Provider)
	}
	q.cert = parsePKCS10(&f.denied, der, k.serving)
	if k.unattested && q.cert.providerID != "" {
		f.deny(ReasonForbiddenExtension, "extensions: a node that is not attested has no provider ID to show")
	}
	auth := certificatesv1.UsageClientAuth
	if k.serving {
		auth = certificatesv1.UsageServerAuth
	}
	checkUsages(&f.denied, spec.Usages, q.cert.key, auth)
	return q, f
}

// soleBlock applies S2 to a request without evidence: exactly one PEM block, in its only encoding.
func soleBlock(request []byte) (der []byte, ok bool) {
	block, _ := pem.Decode(request)
	if len(request) > attestation.MaxRequestSize || block == nil || block.Type != attestation.BlockRequest || len(block.Headers) > 0 ||
		!bytes.Equal(pem.EncodeToMemory(block), request) {
		return nil, false
	}
	return block.Bytes, true
}

// accepts reports whether the signer is for this provider.
func (s Signer) accepts(provider string) bool { return slices.Contains(s.Providers, provider) }

// namesProvider reports whether a request has a PROVIDER block with a provider of the signer. The
// request may be malformed otherwise.
func namesProvider(request []byte, signer Signer) bool {
	begin := []byte("-----BEGIN " + attestation.BlockProvider + "-----")
	for {
		i := bytes.Index(request, begin)
		if i < 0 {
			return false
		}
		request = request[i:]
		end := bytes.Index(request[len(begin):], []byte("-----BEGIN "))
		block := request
		if end >= 0 {
			block = request[:len(begin)+end]
		}
		if p, _ := pem.Decode(block); p != nil && signer.accepts(string(bytes.TrimSpace(p.Bytes))) {
			return true
		}
		request = request[len(begin):]
	}
}
