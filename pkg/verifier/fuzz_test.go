// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"bytes"
	"crypto/x509"
	"slices"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// FuzzCertification: a certification request that passes has the same bytes when it is marshalled
// again, and crypto/x509 reads nothing else in it. Signing the fuzzed parts lets the fuzzer get
// past the signature.
func FuzzCertification(f *testing.F) {
	good := must(splitPKCS10(goodPKCS10(key("p256"))))
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
		asks := parsePKCS10(&refusals, whole, false)
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

// FuzzJudge: for any bytes in spec.request, no request passes but one that says what the good one
// says.
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
		rules.ParseClaim(in.Request)
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

// FuzzServing: a request may ask for any alternative names. What is granted is what crypto/x509
// reads, and belongs to the machine.
func FuzzServing(f *testing.F) {
	dns := func(name string) []byte { return element(tagDNSName, []byte(name)) }
	sans := func(names ...[]byte) []byte {
		return requestOfExtension(oidSubjectAltName, element(tagSequence, names...))
	}
	f.Add(sans(dns(nodeName), element(tagIPAddress, []byte{192, 0, 2, 11})))
	f.Add(sans(dns("worker-2"), element(tagIPAddress, []byte{10, 96, 0, 1})))
	f.Add(sans(element(0x86, []byte("spiffe://x/y")), element(0x81, []byte("a@b")), element(0xa0, element(tagOID, []byte("\x2b\x06")))))
	f.Add(extensionRequest(providerIDOfNode(), extension(sanOID, element(tagSequence, dns(nodeName)))))
	w := servings()["ours, approved"]()
	rules := must(New(w.policy))
	f.Fuzz(func(t *testing.T, attributes []byte) {
		d := draftOf(key("p256"))
		d.attributes = attributes
		der := d.sign()
		in := w.in
		in.Request = w.in.Request.DeepCopy()
		in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(der)))
		decision := rules.JudgeSigning(in)
		if decision.Outcome != Fail && decision.Outcome != SignServing || (decision.Grant != nil) != (decision.Outcome == SignServing) {
			t.Fatalf("%s: %v", decision.Outcome, decision.Refusals)
		}
		if decision.Grant == nil {
			return
		}
		request, err := x509.ParseCertificateRequest(der)
		if err != nil || len(request.EmailAddresses)+len(request.URIs) > 0 || len(request.Extensions) != 1 || len(request.DNSNames)+len(request.IPAddresses) == 0 {
			t.Fatalf("crypto/x509 reads something else: %v", err)
		}
		granted, own := decision.Grant.Addresses, w.machine().Addresses
		if !slices.Equal(granted.DNSNames, request.DNSNames) || len(granted.IPs) != len(request.IPAddresses) {
			t.Fatalf("granted %v of %v, %v", granted, request.DNSNames, request.IPAddresses)
		}
		for _, name := range granted.DNSNames {
			if name != nodeName && !slices.Contains(own.DNSNames, name) {
				t.Fatalf("%s is granted", name)
			}
		}
		for i, ip := range granted.IPs {
			if !slices.Contains(own.IPs, ip) || ip.String() != request.IPAddresses[i].String() {
				t.Fatalf("%s is granted for %s", ip, request.IPAddresses[i])
			}
		}
	})
}

// FuzzTrust: for any claim and any machines, nothing is trusted on first use but a new machine, by
// its own token.
func FuzzTrust(f *testing.F) {
	f.Add(providerID, providerID, "acme://x", ek1, "", nodeName, nodeName, int64(600), false)
	f.Add(providerID, providerID, providerID, "e9", "e9", "worker-2", nodeName, int64(7200), true)
	f.Add("", "", "", "", "", "", "", int64(-600), false)
	f.Fuzz(func(t *testing.T, asked, id, other, ek, pinned, token, recorded string, age int64, joined bool) {
		w := goodTrust()
		if csr.CheckProviderID(asked) != nil {
			asked = ""
		}
		w.named(nodeName, asked)
		m := w.machine()
		m.ProviderID, m.Created = id, testNow.Add(-time.Duration(age%1e9)*time.Second)
		if joined {
			m.NodeRef = "a-node"
		}
		w.another().ProviderID = other
		w.in.Records[0].EK = pinned
		w.in.Records[0].Machine.Name = recorded
		w.in.Token.Machine.Name = token
		w.in.Evidence.EK = ek
		rules := must(New(w.policy))
		ref, proposes := rules.TrustsOnFirstUse(w.in, ek)
		d := rules.Judge(w.in)
		may := asked != "" && asked == id && other != id && ek != "" && ek != ek2 && ek != pinned && token == m.Ref.Name && recorded != m.Ref.Name &&
			!joined && age%1e9 < 7200 && age%1e9 >= -300
		if proposes != may || proposes != (ref == m.Ref) {
			t.Fatalf("proposes %t, want %t", proposes, may)
		}
		if d.Outcome == Approve && !may {
			t.Fatalf("approved: %+v", d.Grant)
		}
		if may && d.Outcome != Approve {
			t.Fatalf("%s: %v", d.Outcome, d.Refusals)
		}
	})
}
