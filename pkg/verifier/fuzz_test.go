// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"crypto/x509"
	"slices"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// FuzzCertification: what passes is, written anew, the same, and crypto/x509 reads nothing else in it. Signing the fuzzed parts lets the
// fuzzer get past the signature.
func FuzzCertification(f *testing.F) {
	good := must(openCertification(goodPKCS10(key("p256"))))
	f.Add(good.subject, good.attributes, []byte(nil))
	f.Add(good.subject, []byte{tagAttributes, 0}, []byte(nil))
	f.Add(element(tagSequence, organization(), commonName(), commonName()), extensionRequest(extension(sanOID, nil), providerIDOfNode()), []byte(nil))
	f.Add([]byte(nil), []byte(nil), goodPKCS10(key("p256")))
	f.Add([]byte(nil), []byte(nil), goodPKCS10(key("rsa2048")))
	f.Fuzz(func(t *testing.T, subject, attributes, whole []byte) {
		if len(whole) == 0 {
			d := draftOf(key("p256"))
			d.subject, d.attributes = subject, attributes
			whole = d.sign()
		}
		var refusals Refusals
		asks := judgeCertification(&refusals, whole)
		if len(refusals) > 0 {
			if asks.key != nil && asks.nodeName != "" && slices.Equal(refusals.Reasons(), []Reason{ReasonUnsupportedKey}) {
				t.Fatal("a key that was refused is there")
			}
			return
		}
		request, err := x509.ParseCertificateRequest(whole)
		if err != nil || request.CheckSignature() != nil || request.Version != 0 {
			t.Fatalf("crypto/x509 does not take it: %v", err)
		}
		tags := [2]byte{request.RawSubject[bytes.Index(request.RawSubject, []byte(oidOrganization))+3], request.RawSubject[bytes.LastIndex(request.RawSubject, []byte(oidCommonName))+3]}
		if !bytes.Equal(request.RawSubject, subjectOf(tags, [2]string{groupNodes, userNode + asks.nodeName})) {
			t.Fatalf("another subject: %x", request.RawSubject)
		}
		name := request.Subject
		if name.CommonName != userNode+asks.nodeName || !slices.Equal(name.Organization, []string{groupNodes}) || len(name.Names) != 2 {
			t.Fatalf("crypto/x509 reads %s", name)
		}
		if len(request.DNSNames)+len(request.EmailAddresses)+len(request.IPAddresses)+len(request.URIs) > 0 {
			t.Fatal("an alternative name")
		}
		switch e := request.Extensions; {
		case asks.providerID == "" && len(e) == 0:
		case len(e) == 1 && !e[0].Critical && e[0].Id.Equal(csr.ProviderIDOID) && bytes.Equal(e[0].Value, element(tagUTF8, []byte(asks.providerID))) && csr.CheckProviderID(asks.providerID) == nil:
		default:
			t.Fatalf("extensions: %v", e)
		}
	})
}

// FuzzJudge: no request passes but one that says what the good one says, whatever stands in spec.request.
func FuzzJudge(f *testing.F) {
	w := good(First)
	request := w.in.Request.Spec.Request
	f.Add(request, tpmSigner)
	f.Add(request, sharedSigner)
	f.Add([]byte(block(attestation.BlockProvider, "tpm")), sharedSigner)
	f.Add(bytes.Repeat([]byte("-----BEGIN "+attestation.BlockProvider+"-----"), 100), sharedSigner)
	rules := must(New(w.policy))
	f.Fuzz(func(t *testing.T, data []byte, signer string) {
		in := w.in
		in.Request = w.in.Request.DeepCopy()
		in.Request.Spec.Request, in.Request.Spec.SignerName = data, signer
		rules.Look(in.Request)
		d := rules.Judge(in)
		if d.Outcome != Ignore && d.Outcome != Deny && d.Outcome != Approve {
			t.Fatalf("%s: %v", d.Outcome, d.Refusals)
		}
		if (d.Outcome == Deny) != (len(d.Refusals) > 0) || (d.Outcome == Approve) != (d.Grant != nil) {
			t.Fatalf("%s: %v, %+v", d.Outcome, d.Refusals, d.Grant)
		}
		// The document is for the provider's verifier to judge.
		content, err := attestation.Parse(data)
		if d.Outcome == Approve && (err != nil || content.Provider != "tpm" || !bytes.Equal(content.PKCS10, must(attestation.Parse(request)).PKCS10)) {
			t.Fatal("another request is approved")
		}
	})
}
