// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"context"
	"crypto/elliptic"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/statetest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr/state"
)

type csrSpec = certificatesv1.CertificateSigningRequestSpec

func TestGood(t *testing.T) {
	for name, c := range map[string]struct {
		world *world
		want  Outcome
		class Class
	}{
		"first":          {good(First), Approve, First},
		"again":          {good(Again), Approve, Again},
		"renewal":        {good(Renewal), Approve, Renewal},
		"hello of first": {goodHello(First), Challenge, First},
		"hello of first, a Node exists": {func() *world { // M5 is judged by the proof
			w := goodHello(First)
			w.in.Node = Present
			return w
		}(), Challenge, First},
		"hello of again":              {goodHello(Again), Challenge, Again},
		"hello of renewal":            {goodHello(Renewal), Challenge, Renewal},
		"another provider's":          {goodAcme(First), Approve, First},
		"another provider's, again":   {goodAcme(Again), Approve, Again},
		"another provider's, renewal": {goodAcme(Renewal), Approve, Renewal},
		"a cloud's":                   {goodCloud(First), Approve, First},
		"a cloud's, again":            {goodCloud(Again), Approve, Again},
		"a cloud's, renewal":          {goodCloud(Renewal), Approve, Renewal},
		"insecure":                    {goodInsecure(), Approve, First},
		"left alone":                  {goodUnattested(), ApproveUnattested, Renewal},
		"signing of first":            {goodSigning(First), Sign, First},
		"signing of again":            {goodSigning(Again), Sign, Again},
		"signing of renewal":          {goodSigning(Renewal), Sign, Renewal},
		"signing of insecure": {func() *world {
			w := goodInsecure()
			w.approve()
			return w
		}(), Sign, First},
	} {
		t.Run(name, func(t *testing.T) {
			d := c.world.judge(t)
			if d.Outcome != c.want || d.Class != c.class || len(d.Refusals) != 0 || len(d.Warnings) != 0 || d.Grant == nil {
				t.Fatalf("%s, %s: %v, warnings %v", d.Outcome, d.Class, d.Refusals, d.Warnings)
			}
			if d.Grant.NodeName != nodeName || d.Grant.MaxLifetime != 0 || !reflect.DeepEqual(d.Grant.PublicKey, key("p256").Public()) {
				t.Errorf("granted: %+v", d.Grant)
			}
			if (d.Outcome == Challenge || d.Outcome == ApproveUnattested) != reflect.DeepEqual(d.Grant.Record, Record{}) {
				t.Errorf("record: %+v", d.Grant.Record)
			}
		})
	}
}

// What else passes, beside the requests of the node's half.
func TestAccepted(t *testing.T) {
	for name, c := range map[string]struct {
		world func() *world
		bend  func(*world)
	}{
		"S3: P-384":    {nil, func(w *world) { w.withKey(key("p384")) }},
		"S3: RSA-2048": {nil, func(w *world) { w.withKey(key("rsa2048")) }},
		"S3: RSA-4096": {nil, func(w *world) { w.withKey(key("rsa4096")) }},
		"S4: UTF8Strings": {nil, func(w *world) {
			w.pkcs10(withSubject(rdn(attribute(oidOrganization, tagUTF8, groupNodes)), rdn(attribute(oidCommonName, tagUTF8, userNode+nodeName))))
		}},
		"S5: none":         {nil, func(w *world) { w.named(nodeName, "") }},
		"S5: longest":      {nil, func(w *world) { w.longProviderID(maxProviderID) }},
		"S6: other order":  {nil, func(w *world) { w.both(func(s *csrSpec) { slices.Reverse(s.Usages) }) }},
		"S7: other groups": {nil, func(w *world) { slices.Reverse(w.in.Hello.Spec.Groups) }},
		"S7: same expirationSeconds": {nil, func(w *world) {
			w.both(func(s *csrSpec) { n := int32(600); s.ExpirationSeconds = &n })
		}},
		"I1: the operator's": {nil, func(w *world) {
			w.both(func(s *csrSpec) {
				s.Username, s.Groups = "system:serviceaccount:infra:joiner", []string{"system:serviceaccounts:infra"}
			})
		}},
		"I3: off":                                      {nil, func(w *world) { w.in.Token = Token{}; w.policy.Token = Off }},
		"T2: another machine is suspended":             {nil, suspend(ek2)},
		"T2: another one is suspended, again":          {again, suspend(ek2)},
		"T2: a former key of the machine is suspended": {again, func(w *world) { suspend("e0")(w); w.record().FormerEKs = []string{"e0"} }},
		"T2: a key that no source of the policy names": {nil, func(w *world) {
			suspend("e9")(w)
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKAnnotation, "e9"})
		}},
		"T2: the empty key":                             {func() *world { return goodCloud(Again) }, suspend("")},
		"T2: left alone, and not known":                 {goodUnattested, func(w *world) { w.in.SuspensionsUnknown = true }},
		"I4: a revoked certificate, hello":              {helloOf(Renewal), func(w *world) { w.record().Certificates[0].Revoked = true }},
		"I4: a revoked certificate, signing":            {signingOf(Renewal), func(w *world) { w.record().Certificates[0].Revoked = true }},
		"I4: a revoked certificate may attest":          {renewal, func(w *world) { w.record().Certificates[0].Revoked = true }},
		"I4: off":                                       {renewal, func(w *world) { w.in.Request.Spec.Extra = nil; w.policy.Credential = Off }},
		"M1: from the record, with the machine's token": {again, func(w *world) { w.machine().EKs, w.in.Token = nil, good(First).in.Token }},
		"M1: from the record, whatever the token":       {again, func(w *world) { w.machine().EKs, w.policy.Token = nil, Off }},
		"M1: second EK of a machine": {nil, func(w *world) {
			w.in.Evidence.EK = "e9"
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
		}},
		"M1: no provider ID there": {nil, func(w *world) { w.named(nodeName, ""); w.machine().ProviderID = "" }},
		"M3: renewal within the hour": {renewal, func(w *world) {
			w.machine().Deleted = testNow.Add(-time.Hour)
		}},
		"M4: first source decides": {nil, func(w *world) {
			w.machine().Names = []NodeName{{NameMachine, "other"}, {NameInventory, nodeName}}
		}},
		"M4: source not asked for": {nil, func(w *world) {
			w.machine().Names = append(w.machine().Names, NodeName{NameHostname, "other"})
			w.in.Machines[0].Names = append(w.in.Machines[0].Names, NodeName{NameHostname, nodeName})
		}},
		"M4: one name twice": {nil, func(w *world) { w.machine().Names = append(w.machine().Names, w.machine().Names[0]) }},
		"M4: of the record, whatever others claim": {again, func(w *world) {
			w.machine().Names = nil
			w.in.Machines[0].Names = []NodeName{{NameMachine, nodeName}}
		}},
		"T1: stronger provider than pinned, by the machine's name": {func() *world { return goodCloud(Again) }, func(w *world) {
			w.policy.Providers[0], w.policy.Providers[1] = w.policy.Providers[1], w.policy.Providers[0]
			w.record().Provider, w.record().EK = "tpm", ek1
		}},
		"S7: the hello's challenge has run out since": {nil, func(w *world) { w.closeHello(string(ReasonHelloExpired)) }},
		"insecure: it could not be published": {func() *world {
			w := goodInsecure()
			w.approve()
			w.in.Records[1].Certificates = []Certificate{{SHA256: "c9", ProofUID: w.in.Records[1].ProofUID, NotAfter: testNow.Add(time.Hour)}}
			return w
		}, func(*world) {}},
		"M1: a cloud's, whatever EKs are named": {func() *world { return goodCloud(First) }, func(w *world) { w.machine().EKs = nil }},
		"S7: the other proof was issued":        {again, func(w *world) { w.record().ProofPending = false }},
		"S7: a hello, while a proof is open":    {helloOf(Again), func(w *world) { w.record().ProofPending = true }},
		"S7: the proof that is open":            {func() *world { w := goodSigning(First); w.in.Records[1].ProofPending = true; return w }, func(*world) {}},
		"left alone: RSA": {goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = stockRequest(nodeName, "", key("rsa2048"))
			w.in.Request.Spec.Usages = csr.Usages(key("rsa2048").Public())
		}},
		"left alone: no CA here":             {goodUnattested, func(w *world) { w.in.SignerUnavailable = true }},
		"T1: stronger provider than pinned":  {again, func(w *world) { w.record().Provider = "acme" }},
		"T1: insecure before":                {again, func(w *world) { w.record().Provider, w.record().EK = InsecureProvider, "" }},
		"T1: another's record":               {nil, func(w *world) { w.in.Records = append(w.in.Records, recordOf("worker-3", "e3")) }},
		"T1: a record without a provider ID": {again, func(w *world) { w.record().ProviderID = "" }},
		"T1: a record without counters":      {again, func(w *world) { w.record().Boot = nil; w.policy.BootCounters = Required }},
		"T1: a record without an AK":         {again, func(w *world) { w.record().AK = "" }},
		"T1: counters, off":                  {again, func(w *world) { w.in.Evidence.Boot.Resets--; w.policy.BootCounters = Off }},
		"shared signer":                      {nil, func(w *world) { w.in.Request.Spec.SignerName = sharedSigner }},
		"not overdue":                        {nil, func(w *world) { w.in.Request.CreationTimestamp = metav1.NewTime(testNow.AddDate(0, 0, -1)) }},
	} {
		t.Run(name, func(t *testing.T) {
			w := good(First)
			if c.world != nil {
				w = c.world()
			}
			c.bend(w)
			want := Approve
			switch {
			case w.signing:
				want = Sign
			case w.in.Request.Spec.SignerName == attestation.HelloSignerName:
				want = Challenge
			case len(w.policy.UnattestedNodes) > 0:
				want = ApproveUnattested
			}
			if d := w.judge(t); d.Outcome != want || len(d.Warnings) > 0 {
				t.Errorf("%s: %v, warnings %v", d.Outcome, d.Refusals, d.Warnings)
			}
		})
	}
}

func cloud() *world   { return goodCloud(First) }
func first() *world   { return good(First) }
func again() *world   { return good(Again) }
func renewal() *world { return good(Renewal) }

func signingOf(class Class) func() *world { return func() *world { return goodSigning(class) } }
func helloOf(class Class) func() *world   { return func() *world { return goodHello(class) } }

// claimedTwice has a source name the machine's endorsement key for another machine, too.
func claimedTwice(w *world) {
	w.in.Machines[0].EKs = append(w.in.Machines[0].EKs, NamedEK{EKInventory, ek1})
}

// disputed has the machine's source contradict itself.
func disputed(w *world) { w.machine().Disputed = true }

// longProviderID makes all sides agree on a provider ID of n bytes.
func (w *world) longProviderID(n int) {
	id := "acme://" + strings.Repeat("x", n-7)
	w.pkcs10(template(func(r *x509.CertificateRequest) { r.ExtraExtensions = []pkix.Extension{providerIDExtension(id)} }))
	w.machine().ProviderID = id
}

func withSubject(rdns ...[]byte) []byte {
	d := draftOf(key("p256"))
	d.subject = element(tagSequence, rdns...)
	return d.sign()
}

func withAttributes(attributes []byte) []byte {
	d := draftOf(key("p256"))
	d.attributes = attributes
	return d.sign()
}

func organization() []byte { return rdn(attribute(oidOrganization, tagPrintable, groupNodes)) }
func commonName() []byte   { return rdn(attribute(oidCommonName, tagPrintable, userNode+nodeName)) }
func providerIDOfNode() []byte {
	return extension(oidProviderID, element(tagUTF8, []byte(providerID)))
}

const sanOID = oidSubjectAltName

// Each rule, in the order of docs/rules.md. Nothing but the reasons named may be given.
func TestHostile(t *testing.T) {
	type reasons = []Reason
	const (
		oidUnit      = "\x55\x04\x0b"
		oidSerial    = "\x55\x04\x05"
		oidChallenge = "\x2a\x86\x48\x86\xf7\x0d\x01\x09\x07" // challengePassword
		oidKeyUsage  = "\x55\x1d\x0f"
		oidBasic     = "\x55\x1d\x13"
	)
	otherName := element(tagSequence, element(0xa0, element(tagOID, []byte("\x2b\x06\x01\x04\x01\x82\x37\x14\x02\x03")), element(0xa0, element(tagUTF8, []byte("admin")))))
	p256 := func() *draft { return draftOf(key("p256")) }
	der := func(b []byte) func(*world) { return func(w *world) { w.pkcs10(b) } }
	for _, c := range []struct {
		name  string
		world func() *world
		bend  func(*world)
		want  Outcome
		why   reasons
	}{
		{"S1: unknown signer", first, func(w *world) { w.in.Request.Spec.SignerName = "example.com/other" }, Ignore, nil},
		{"S1: no signer", first, func(w *world) { w.in.Request.Spec.SignerName = "" }, Ignore, nil},
		{"S1: serving certificates, not served", first, func(w *world) {
			w.policy.ServingSigners, w.policy.SignedServingSigners, w.in.Request.Spec.SignerName = nil, nil, servingSigner
		}, Ignore, nil},
		{"S1: evidence for a serving certificate of ours", first, func(w *world) { w.in.Request.Spec.SignerName = oursToServe }, Deny, reasons{ReasonMalformedRequest}},
		{"S1: evidence for a serving certificate", first, func(w *world) { w.in.Request.Spec.SignerName = servingSigner }, Deny, reasons{ReasonMalformedRequest}},
		{"S1: insecure, not switched on", goodInsecure, func(w *world) { w.policy.InsecureSigner = "" }, Ignore, nil},
		{"S1: shared signer, stock kubelet", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(goodPKCS10(key("p256")))))
		}, Ignore, nil},
		{"S1: shared signer, another's provider", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "acme"))
		}, Ignore, nil},
		{"S1: shared signer, a PROVIDER block that cannot be read", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.raw("-----END "+attestation.BlockProvider, "-----END")
		}, Ignore, nil},
		{"S1: shared hello, another's provider", helloOf(First), func(w *world) {
			w.policy.SharedHello = true
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "other"))
		}, Ignore, nil},
		{"S1: hello where no provider has any", helloOf(First), func(w *world) { w.policy.Providers[0].Challenges = false }, Ignore, nil},
		{"S1: decided: approved", first, func(w *world) { w.condition(certificatesv1.CertificateApproved) }, Ignore, nil},
		{"S1: decided: denied", first, func(w *world) { w.condition(certificatesv1.CertificateDenied) }, Ignore, nil},
		{"S1: decided: failed", first, func(w *world) { w.condition(certificatesv1.CertificateFailed) }, Ignore, nil},
		{"S1: decided: approved, in lower case", first, func(w *world) { w.condition("approved") }, Ignore, nil},
		{"S1: decided: approved, in capitals", first, func(w *world) { w.condition("APPROVED") }, Ignore, nil},
		{"S1: decided: approved, and a blank", first, func(w *world) { w.condition("Approved ") }, Ignore, nil},
		{"S1: decided: a condition of others", first, func(w *world) { w.condition("Acme") }, Ignore, nil},
		{"S1: decided: a hello, approved in lower case", helloOf(First), func(w *world) { w.condition("approved") }, Ignore, nil},
		{"S1: decided: a hello approved", helloOf(First), func(w *world) { w.condition(certificatesv1.CertificateApproved) }, Ignore, nil},
		{"S1: decided: issued", first, func(w *world) { w.in.Request.Status.Certificate = []byte("x") }, Ignore, nil},
		{"S1: decided, and malformed", first, func(w *world) {
			w.condition(certificatesv1.CertificateApproved)
			w.in.Request.Spec.Request = nil
		}, Ignore, nil},
		{"S1: no request", first, func(w *world) { w.in.Request = nil }, Ignore, nil},
		{"S1: another of our providers", first, func(w *world) {
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "acme"))
		}, Deny, reasons{ReasonProviderMismatch}},
		{"S1: insecure under the TPM's signer", first, func(w *world) {
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "insecure"))
		}, Deny, reasons{ReasonProviderMismatch}},
		{"S1: hello of a provider that has none", helloOf(First), func(w *world) {
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "acme"))
		}, Deny, reasons{ReasonProviderMismatch}},
		{"S1: hello for another provider's signer", helloOf(First), func(w *world) { w.in.Evidence.SignerName = acmeSigner }, Deny, reasons{ReasonProviderMismatch}},
		{"S1: hello for a signer that is not ours", helloOf(First), func(w *world) { w.in.Evidence.SignerName = "example.com/other" }, Deny, reasons{ReasonProviderMismatch}},
		{"S1: hello for the signer of hellos", helloOf(First), func(w *world) { w.in.Evidence.SignerName = attestation.HelloSignerName }, Deny, reasons{ReasonProviderMismatch}},
		{"S1: evidence of another provider", first, func(w *world) { w.in.Evidence.Provider = "acme" }, Deny, reasons{ReasonProviderMismatch}},

		{"S2: bytes after", first, func(w *world) { w.in.Request.Spec.Request = append(w.in.Request.Spec.Request, 'x') }, Deny, reasons{ReasonMalformedRequest}},
		{"S2: a fourth block", first, func(w *world) {
			w.in.Request.Spec.Request = append(w.in.Request.Spec.Request, block(attestation.BlockData, "x")...)
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: a header", first, func(w *world) {
			w.raw("-----BEGIN "+attestation.BlockProvider+"-----\n", "-----BEGIN "+attestation.BlockProvider+"-----\na: b\n\n")
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: no evidence", first, func(w *world) {
			w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(goodPKCS10(key("p256")))))
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: too large", first, func(w *world) {
			w.in.Request.Spec.Request = append(w.in.Request.Spec.Request, make([]byte, attestation.MaxRequestSize)...)
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: shared signer, our PROVIDER block in the wrong place", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.in.Request.Spec.Request = append([]byte("x\n"+block(attestation.BlockProvider, "acme")), w.in.Request.Spec.Request...)
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: shared signer, our PROVIDER block first", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.in.Request.Spec.Request = []byte(block(attestation.BlockProvider, "tpm"))
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: shared signer, our PROVIDER block spelt otherwise", first, func(w *world) {
			w.in.Request.Spec.SignerName = sharedSigner
			w.raw(block(attestation.BlockProvider, "tpm"), block(attestation.BlockProvider, "tpm\n"))
		}, Deny, reasons{ReasonMalformedRequest}},
		{"S2: malformed, by nobody", first, func(w *world) {
			w.in.Request.Spec.Request = nil
			w.in.Request.Spec.Username = "eve"
		}, Deny, reasons{ReasonMalformedRequest, ReasonRequesterNotAllowed}},
		{"S2: hello", helloOf(First), func(w *world) { w.in.Request.Spec.Request = []byte("x") }, Deny, reasons{ReasonMalformedRequest}},

		{"S3: RSA-1024", first, func(w *world) { w.withKey(key("rsa1024")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: RSA-2047", first, func(w *world) { w.withKey(key("rsa2047")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: RSA-4104", first, func(w *world) { w.withKey(key("rsa4104")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: RSA with exponent 3", first, func(w *world) { w.withKey(rsaWithExponent3()) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: P-224", first, func(w *world) { w.withKey(key("p224")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: P-521", first, func(w *world) { w.withKey(key("p521")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: Ed25519", first, der(ed25519Request()), Deny, reasons{ReasonUnsupportedKey}},
		{"S3: RSA, usages of ECDSA, too weak", first, func(w *world) { w.pkcs10(goodPKCS10(key("rsa1024"))) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: RSASSA-PSS", first, func(w *world) {
			w.withKey(key("rsa2048"))
			w.pkcs10(templateWith(key("rsa2048"), func(r *x509.CertificateRequest) { r.SignatureAlgorithm = x509.SHA256WithRSAPSS }))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: trailing garbage", first, der(append(p256().sign(), "garbage"...)), Deny, reasons{ReasonUnsupportedKey}},
		{"S3: trailing element", first, der(append(p256().sign(), 0x05, 0)), Deny, reasons{ReasonUnsupportedKey}},
		{"S3: garbage within, at the end", first, func(w *world) {
			parts := must(elements(p256().sign(), tagSequence))
			w.pkcs10(element(tagSequence, parts[0].Bytes, []byte{0x05, 0}))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: garbage within what is signed", first, func(w *world) {
			d := p256()
			w.pkcs10(d.signed(element(tagSequence, d.version, d.subject, d.publicKey, d.attributes, []byte{0x05, 0})))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: garbage within the key", first, func(w *world) {
			d := p256()
			parts := must(elements(d.publicKey, tagSequence))
			d.publicKey = element(tagSequence, parts[0].Bytes, []byte{0x05, 0})
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: compressed point", first, func(w *world) {
			d := p256()
			parts := must(elements(must(elements(d.publicKey, tagSequence))[0].Bytes, tagSequence, tagBitString))
			point := parts[1].Bytes[1:]
			x, y := elliptic.Unmarshal(elliptic.P256(), point) //nolint:staticcheck // SA1019: a point is all that is wanted
			d.publicKey = element(tagSequence, parts[0].FullBytes, element(tagBitString, []byte{0}, elliptic.MarshalCompressed(elliptic.P256(), x, y)))
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: version 1", first, func(w *world) {
			d := p256()
			d.version = []byte{tagInteger, 1, 1}
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: a length spelt at length", first, func(w *world) {
			d := p256()
			d.version = []byte{tagInteger, 0x81, 1, 0}
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: parameters beside ECDSA", first, func(w *world) {
			d := p256()
			parts := must(elements(d.algorithm, tagSequence))
			d.algorithm = element(tagSequence, parts[0].Bytes, []byte{0x05, 0})
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: SHA-1", first, func(w *world) {
			d := p256()
			d.algorithm = element(tagSequence, element(tagOID, []byte("\x2a\x86\x48\xce\x3d\x04\x01")))
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: signed with another key", first, func(w *world) {
			d := p256()
			d.publicKey = must(splitPKCS10(goodPKCS10(key("p384")))).publicKey
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: changed after it was signed", first, func(w *world) {
			d := p256()
			info := d.info()
			d.attributes = []byte{tagAttributes, 0}
			w.pkcs10(element(tagSequence, d.info(), d.algorithm, element(tagBitString, []byte{0}, d.signature(info))))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: no signature", first, func(w *world) {
			d := p256()
			w.pkcs10(element(tagSequence, d.info(), d.algorithm, element(tagBitString)))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: half a byte of a signature", first, func(w *world) {
			d := p256()
			w.pkcs10(element(tagSequence, d.info(), d.algorithm, element(tagBitString, []byte{4}, d.signature(d.info()))))
		}, Deny, reasons{ReasonUnsupportedKey}},
		{"S3: not DER", first, der([]byte("x")), Deny, reasons{ReasonUnsupportedKey}},
		{"S3: not a request", first, der(element(tagSequence)), Deny, reasons{ReasonUnsupportedKey}},
		{"S3: attributes left out", first, func(w *world) {
			d := p256()
			d.attributes = nil
			w.pkcs10(d.sign())
		}, Deny, reasons{ReasonUnsupportedKey}},

		{"S4: extra OU", first, der(template(func(r *x509.CertificateRequest) { r.Subject.OrganizationalUnit = []string{"x"} })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: two CNs, ours first", first, der(withSubject(organization(), commonName(), rdn(attribute(oidCommonName, tagPrintable, "system:node:victim")))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: two CNs, ours last", first, der(withSubject(organization(), rdn(attribute(oidCommonName, tagPrintable, "system:node:victim")), commonName())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: no O", first, der(withSubject(commonName())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: two Os", first, der(template(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{groupNodes, groupMasters} })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: O system:masters", first, der(template(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{groupMasters} })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: two Os in a set", first, der(withSubject(rdn(attribute(oidOrganization, tagPrintable, groupMasters), attribute(oidOrganization, tagPrintable, groupNodes)), commonName())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: O and CN in one set", first, der(withSubject(rdn(attribute(oidCommonName, tagPrintable, userNode+nodeName), attribute(oidOrganization, tagPrintable, groupNodes)))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: CN before O", first, der(withSubject(commonName(), organization())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: T61String", first, der(withSubject(organization(), rdn(attribute(oidCommonName, 0x14, userNode+nodeName)))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: BMPString", first, der(withSubject(rdn(attribute(oidOrganization, 0x1e, "\x00s")), commonName())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: serial number", first, der(withSubject(organization(), commonName(), rdn(attribute(oidSerial, tagPrintable, "1")))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: an OU for the O", first, der(withSubject(rdn(attribute(oidUnit, tagPrintable, groupNodes)), commonName())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: three fields in an attribute", first, der(withSubject(organization(), rdn(element(tagSequence, element(tagOID, []byte(oidCommonName)), element(tagPrintable, []byte(userNode+nodeName)), []byte{0x05, 0})))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: a sequence for a set", first, der(withSubject(organization(), element(tagSequence, attribute(oidCommonName, tagPrintable, userNode+nodeName)))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: one field in an attribute", first, der(withSubject(organization(), rdn(element(tagSequence, element(tagOID, []byte(oidCommonName)))))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: no field in an attribute", first, der(withSubject(organization(), rdn(element(tagSequence)))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: no attribute in a set", first, der(withSubject(organization(), rdn())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: two attributes in a set", first, der(withSubject(organization(), rdn(attribute(oidCommonName, tagPrintable, userNode+nodeName), attribute(oidUnit, tagPrintable, "x")))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: garbage in an attribute", first, der(withSubject(organization(), rdn(element(tagSequence, []byte{tagPrintable, 9})))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: garbage in a set", first, der(withSubject(organization(), rdn([]byte{tagSequence, 9}))), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: empty", first, der(withSubject()), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: empty node name", first, der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: no node's name", first, der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = "worker-1" })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: upper case", first, der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode + "Worker-1" })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: with a NUL", first, der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode + nodeName + "\x00x" })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: of 254 characters", first, der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode + strings.Repeat("a", 254) })), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: hello", helloOf(First), der(template(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode })), Deny, reasons{ReasonSubjectMismatch}},

		{"S4: of a machine with a record", again, der(withSubject(organization())), Deny, reasons{ReasonSubjectMismatch}},
		{"S4: renewal", renewal, der(withSubject(organization())), Deny, reasons{ReasonSubjectMismatch}},
		{"S5: otherName", first, der(withAttributes(extensionRequest(extension(sanOID, otherName)))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: otherName beside the provider ID", first, der(withAttributes(extensionRequest(providerIDOfNode(), extension(sanOID, otherName)))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: DNS name", first, der(template(func(r *x509.CertificateRequest) { r.DNSNames = []string{"kubernetes"} })), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: URI", first, der(template(func(r *x509.CertificateRequest) { r.URIs = []*url.URL{{Scheme: "spiffe", Host: "x"}} })), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: empty SAN", first, der(withAttributes(extensionRequest(extension(sanOID, element(tagSequence))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: CA", first, der(withAttributes(extensionRequest(providerIDOfNode(), extension(oidBasic, element(tagSequence, []byte{1, 1, 0xff}))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: key usage", first, der(withAttributes(extensionRequest(extension(oidKeyUsage, []byte{3, 2, 7, 0x80})))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: provider ID twice", first, der(withAttributes(extensionRequest(providerIDOfNode(), providerIDOfNode()))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: two extensionRequests", first, der(withAttributes(element(tagAttributes, extensionAttribute(providerIDOfNode()), extensionAttribute(providerIDOfNode())))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: two lists in an extensionRequest", first, der(withAttributes(element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidExtensionRequest)), element(tagSet, element(tagSequence, providerIDOfNode()), element(tagSequence, extension(sanOID, otherName))))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: empty extensionRequest", first, der(withAttributes(extensionRequest())), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: challengePassword", first, der(withAttributes(element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidChallenge)), element(tagSet, element(tagPrintable, []byte("x"))))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: challengePassword beside", first, der(withAttributes(element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidChallenge)), element(tagSet, element(tagPrintable, []byte("x")))), extensionAttribute(providerIDOfNode())))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: an attribute of another name", first, der(withAttributes(element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidChallenge)), element(tagSet, element(tagSequence, providerIDOfNode())))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: critical", first, der(template(func(r *x509.CertificateRequest) { r.ExtraExtensions[0].Critical = true })), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: critical FALSE spelt out", first, der(withAttributes(extensionRequest(element(tagSequence, element(tagOID, []byte(oidProviderID)), []byte{1, 1, 0}, element(tagOctetString, element(tagUTF8, []byte(providerID))))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: PrintableString", first, der(withAttributes(extensionRequest(extension(oidProviderID, element(tagPrintable, []byte(providerID)))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: bytes after the string", first, der(withAttributes(extensionRequest(extension(oidProviderID, append(element(tagUTF8, []byte(providerID)), 5, 0))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: a set for an extension", first, der(withAttributes(extensionRequest(element(tagSet, element(tagOID, []byte(oidProviderID)), element(tagOctetString, element(tagUTF8, []byte(providerID))))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: empty provider ID", first, der(withAttributes(attributesOf(""))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: white space", first, der(withAttributes(attributesOf("acme://zone/worker 1"))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: not UTF-8", first, der(withAttributes(attributesOf("acme://\xff"))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: too long", first, func(w *world) { w.longProviderID(maxProviderID + 1) }, Deny, reasons{ReasonForbiddenExtension}},
		{"S5: garbage for attributes", first, der(withAttributes(element(tagAttributes, []byte{tagSequence, 9}))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: garbage for an attribute", first, der(withAttributes(element(tagAttributes, element(tagSequence, []byte{tagOID, 9})))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: an attribute of no value", first, der(withAttributes(element(tagAttributes, element(tagSequence, element(tagOID, []byte(oidExtensionRequest)), element(tagSet))))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: garbage for extensions", first, der(withAttributes(extensionRequest([]byte{tagSequence, 9}))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: an extension of nothing", first, der(withAttributes(extensionRequest(element(tagSequence)))), Deny, reasons{ReasonForbiddenExtension}},
		{"S5: subject and key, too", first, func(w *world) {
			w.withKey(key("p224"))
			w.pkcs10(templateWith(key("p224"), func(r *x509.CertificateRequest) {
				r.Subject.OrganizationalUnit, r.DNSNames = []string{"x"}, []string{"x"}
			}))
		}, Deny, reasons{ReasonUnsupportedKey, ReasonSubjectMismatch, ReasonForbiddenExtension}},

		{"S6: server auth, too", first, usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth, certificatesv1.UsageServerAuth), Deny, reasons{ReasonUsageMismatch}},
		{"S6: server auth", first, usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth), Deny, reasons{ReasonUsageMismatch}},
		{"S6: key encipherment with ECDSA", first, usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment, certificatesv1.UsageClientAuth), Deny, reasons{ReasonUsageMismatch}},
		{"S6: twice", first, usages(certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth, certificatesv1.UsageClientAuth), Deny, reasons{ReasonUsageMismatch}},
		{"S6: none", first, usages(), Deny, reasons{ReasonUsageMismatch}},
		{"S6: cert sign", first, usages(certificatesv1.UsageCertSign, certificatesv1.UsageClientAuth), Deny, reasons{ReasonUsageMismatch}},
		{"S6: RSA without key encipherment", first, func(w *world) {
			w.pkcs10(goodPKCS10(key("rsa2048")))
		}, Deny, reasons{ReasonUsageMismatch}},
		{"S6: weak key, and usages of none", first, func(w *world) {
			w.pkcs10(goodPKCS10(key("p224")))
			usages(certificatesv1.UsageAny)(w)
		}, Deny, reasons{ReasonUnsupportedKey, ReasonUsageMismatch}},
		{"S6: hello", helloOf(First), usages(certificatesv1.UsageAny), Deny, reasons{ReasonUsageMismatch}},

		{"S7: another user", first, func(w *world) { w.in.Hello.Spec.Username = "system:bootstrap:zzzzzz" }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another uid", first, func(w *world) { w.in.Request.Spec.UID = "u" }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another group", first, func(w *world) { w.in.Hello.Spec.Groups = append(w.in.Hello.Spec.Groups, "more") }, Deny, reasons{ReasonProofMismatch}},
		{"S7: a group twice", first, func(w *world) { w.in.Hello.Spec.Groups[1] = w.in.Hello.Spec.Groups[0] }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another certification request", first, func(w *world) {
			w.in.Hello = object(First, attestation.HelloSignerName, "hello", "x", goodPKCS10(key("p256")))
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: other usages", first, func(w *world) { slices.Reverse(w.in.Request.Spec.Usages) }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another expirationSeconds", first, func(w *world) {
			a, b := int32(600), int32(601)
			w.in.Request.Spec.ExpirationSeconds, w.in.Hello.Spec.ExpirationSeconds = &a, &b
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: no expirationSeconds in the hello", first, func(w *world) { n := int32(600); w.in.Request.Spec.ExpirationSeconds = &n }, Deny, reasons{ReasonProofMismatch}},
		{"S7: a proof for a hello", first, func(w *world) { w.in.Hello = w.in.Request }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another provider", first, func(w *world) {
			content := must(attestation.Parse(w.in.Hello.Spec.Request))
			content.Provider = "acme"
			w.in.Hello.Spec.Request = must(content.Marshal())
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: malformed hello", first, func(w *world) { w.in.Hello.Spec.Request = append(w.in.Hello.Spec.Request, 'x') }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another proof has followed the hello", again, func(w *world) { w.in.Records[1].HelloUID = string(w.in.Hello.UID) }, Deny, reasons{ReasonProofMismatch}},
		{"S7: another machine's proof has followed it", again, func(w *world) { w.in.Records[0].HelloUID = string(w.in.Hello.UID) }, Deny, reasons{ReasonProofMismatch}},
		{"S7: the hello is closed", first, func(w *world) {
			w.in.Hello.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied}}
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: somebody approved the hello", first, func(w *world) {
			w.in.Hello.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved}}
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: no hello", first, func(w *world) { w.in.Hello, w.in.Evidence = nil, Evidence{} }, Wait, reasons{ReasonHelloNotFound}},
		{"S7: somebody approved the hello, in lower case", first, func(w *world) {
			w.in.Hello.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: "approved"}}
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: no hello, and the proof is refused", first, func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{Provider: "tpm", Err: Refusals{{"AttestationX", "x"}}}
		}, Deny, reasons{"AttestationX"}},
		{"S7: no hello, and the proof is refused, signing", signingOf(First), func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{Provider: "tpm", Err: Refusals{{"AttestationX", "x"}}}
		}, Fail, reasons{"AttestationX"}},
		{"S7: no hello, and the proof is refused without a reason", first, func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{Provider: "tpm", Err: Refusals{}}
		}, Deny, reasons{ReasonRefused}},
		{"S7: no hello, and no verdict", first, func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{Provider: "tpm", Err: context.DeadlineExceeded}
		}, Wait, reasons{ReasonHelloNotFound}},
		{"S7: no hello, and nothing vouches for the EK", first, func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{Provider: "tpm", Err: Refusals{{"AttestationX", "x"}}, EKUntrusted: true}
		}, Wait, reasons{ReasonHelloNotFound}},
		{"S7: no hello, and good evidence", first, func(w *world) { w.in.Hello = nil }, Wait, reasons{ReasonHelloNotFound}},
		{"S7: no hello, and something contradicts", first, func(w *world) {
			w.in.Hello, w.in.Evidence = nil, Evidence{}
			w.in.Request.Spec.Usages = nil
		}, Deny, reasons{ReasonUsageMismatch}},

		{"I1: nobody", first, user(""), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: anybody", first, user("eve", "system:bootstrappers"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: administrator", first, user("kubernetes-admin", groupMasters), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: a token's id too long", first, user("system:bootstrap:abc1234", "system:bootstrappers"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: a token's id with more", first, user("system:bootstrap:abc:12", "system:bootstrappers"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: no token's id", first, user("system:bootstrap:", "system:bootstrappers"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: no group", first, user("system:bootstrap:abc123", "system:authenticated"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: not the operator's group", first, func(w *world) { w.policy.TokenGroup = "system:bootstrappers:workers" }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: in system:nodes", first, user("system:bootstrap:abc123", "system:bootstrappers", groupNodes), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: in system:masters", first, user("system:bootstrap:abc123", "system:bootstrappers", groupMasters), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: the operator's, not in its group", first, func(w *world) {
			user("system:serviceaccount:infra:joiner", "system:bootstrappers")(w)
			w.policy.Token = Off
		}, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: the operator's, in system:masters", first, func(w *world) {
			user("system:serviceaccount:infra:joiner", "system:serviceaccounts:infra", groupMasters)(w)
			w.policy.Token = Off
		}, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: again", again, user("system:bootstrap:abc123"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"I1: hello", helloOf(First), user("eve"), Deny, reasons{ReasonRequesterNotAllowed}},

		{"I2: another node", renewal, func(w *world) { w.both(func(s *csrSpec) { s.Username = "system:node:worker-2" }) }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I2: another node for its own machine", renewal, func(w *world) {
			w.both(func(s *csrSpec) { s.Username = "system:node:worker-2" })
			w.in.Evidence.EK = ek2
		}, Deny, reasons{ReasonRequesterNotAllowed, ReasonUnknownCredential, ReasonProviderIDMismatch, ReasonAmbiguousName, ReasonNodeNameMismatch, ReasonIdentityBound}},
		{"I2: no node's name", renewal, func(w *world) { w.both(func(s *csrSpec) { s.Username = userNode }) }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I2: not in system:nodes", renewal, func(w *world) { w.both(func(s *csrSpec) { s.Groups = []string{"system:authenticated"} }) }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I2: in system:masters", renewal, func(w *world) { w.both(func(s *csrSpec) { s.Groups = append(s.Groups, groupMasters) }) }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"I2: hello", helloOf(Renewal), func(w *world) { w.in.Request.Spec.Username = "system:node:worker-2" }, Deny, reasons{ReasonRequesterNotAllowed}},

		{"I3: another machine's", first, func(w *world) { w.in.Token.Machine = machine("worker-2").Ref }, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: a machine of the same name", first, func(w *world) { w.in.Token.Machine.UID = "older" }, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: nobody's", first, func(w *world) { w.in.Token = Token{Known: true} }, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: nobody's, and no machine is known", first, func(w *world) {
			w.in.Token = Token{Known: true}
			w.in.Machines = nil
		}, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: not known yet", first, func(w *world) { w.in.Token = Token{} }, Wait, reasons{ReasonTokenNotForMachine}},
		{"I3: hello", helloOf(First), func(w *world) { w.in.Token.Machine = machine("worker-2").Ref }, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: signing", signingOf(First), func(w *world) { w.in.Token.Machine = machine("worker-2").Ref }, Fail, reasons{ReasonTokenNotForMachine}},

		{"T2: suspended, first", first, suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: suspended, again", again, suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: suspended, renewal", renewal, suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: suspended, hello", helloOf(First), suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: suspended, hello that nothing vouches for", helloOf(First), func(w *world) {
			suspend(ek1)(w)
			w.in.Evidence.Err, w.in.Evidence.EKUntrusted = Refusals{{Reason: ReasonRefused}}, true
		}, Deny, reasons{ReasonSuspended}},
		{"T2: suspended, and approved before", func() *world { return goodSigning(Again) }, suspend(ek1), Fail, reasons{ReasonSuspended}},
		{"T2: suspended, and a source names another key", again, func(w *world) {
			suspend(ek1)(w)
			w.in.Evidence.EK, w.machine().EKs = "e9", []NamedEK{{EKInventory, "e9"}}
			w.record().EKSource, w.record().EKReplacedBy = EKInventory, []string{"e9"}
		}, Deny, reasons{ReasonSuspended}},
		{"T2: evidence that is refused", helloOf(First), func(w *world) {
			suspend(ek1)(w)
			w.in.Evidence.Err = Refusals{{Reason: "AttestationX"}}
		}, Deny, reasons{ReasonSuspended, "AttestationX"}},
		{"T2: a proof whose hello is gone", first, func(w *world) { suspend(ek1)(w); w.in.Hello = nil }, Deny, reasons{ReasonSuspended}},
		{"T2: another key of the machine, after the record was deleted", first, func(w *world) {
			suspend("e9")(w)
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
		}, Deny, reasons{ReasonSuspended}},
		{"T2: a cloud's, by its record", func() *world { return goodCloud(Again) }, func(w *world) {
			suspend("e9")(w)
			w.record().EK = "e9"
		}, Deny, reasons{ReasonSuspended}},
		{"T2: a cloud's, by the key that a source names", func() *world { return goodCloud(First) }, suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: its certificate, with a key that nobody knows", renewal, func(w *world) {
			suspend(ek1)(w)
			w.in.Evidence.EK, w.in.Evidence.Err, w.in.Evidence.EKUntrusted = "e9", Refusals{{Reason: ReasonRefused}}, true
			w.machine().EKs = nil
		}, Deny, reasons{ReasonSuspended, ReasonIdentityBound}},
		{"T2: its certificate, with another machine's key", renewal, func(w *world) {
			suspend(ek1)(w)
			w.in.Evidence.EK = ek2
		}, Deny, reasons{ReasonSuspended, ReasonUnknownCredential, ReasonProviderIDMismatch, ReasonAmbiguousName, ReasonNodeNameMismatch, ReasonIdentityBound}},
		{"T2: another machine that wants the name of a suspended one", first, func(w *world) {
			suspend("e9")(w)
			w.in.Records[0].NodeName, w.in.Records[0].EK = nodeName, "e9"
		}, Deny, reasons{ReasonAmbiguousName, ReasonIdentityBound}},
		{"T2: left alone, with a record", goodUnattested, func(w *world) {
			suspend(ek1)(w)
			w.in.Records = append(w.in.Records, recordOf(nodeName, ek1))
		}, Deny, reasons{ReasonSuspended, ReasonIdentityBound}},
		{"T2: signing, and a source names another key since", signingOf(Again), func(w *world) {
			suspend(ek1)(w)
			w.machine().EKs = []NamedEK{{EKInventory, "e9"}}
		}, Fail, reasons{ReasonSuspended}},
		{"T2: signing, and the record is gone", signingOf(Again), func(w *world) {
			suspend(ek1)(w)
			w.in.Records = w.in.Records[:1]
		}, Fail, reasons{ReasonSuspended, ReasonApprovedWithoutAttestation, ReasonNodeAlreadyRegistered}},
		{"T2: not known", first, func(w *world) { w.in.SuspensionsUnknown = true }, Wait, reasons{ReasonSuspensionsUnknown}},
		{"T2: not known, hello", helloOf(Again), func(w *world) { w.in.SuspensionsUnknown = true }, Wait, reasons{ReasonSuspensionsUnknown}},
		{"T2: not known, signing", signingOf(Renewal), func(w *world) { w.in.SuspensionsUnknown = true }, Wait, reasons{ReasonSuspensionsUnknown}},
		{"T2: not known for long", first, func(w *world) { w.in.SuspensionsUnknown = true; w.created(time.Hour) }, Deny, reasons{ReasonSuspensionsUnknown}},
		{"I4: unknown", renewal, credential(x509Prefix + "00"), Deny, reasons{ReasonUnknownCredential}},
		{"I4: empty", renewal, credential(x509Prefix), Deny, reasons{ReasonUnknownCredential}},
		{"I4: of another kind", renewal, credential("JTI=" + certificate1), Deny, reasons{ReasonUnknownCredential}},
		{"I4: two", renewal, credential(x509Prefix+certificate1, x509Prefix+"00"), Deny, reasons{ReasonUnknownCredential}},
		{"I4: none", renewal, func(w *world) { w.in.Request.Spec.Extra = nil }, Deny, reasons{ReasonUnknownCredential}},
		{"I4: of another machine", renewal, func(w *world) {
			credential(x509Prefix + "22")(w)
			w.in.Records[0].Certificates[0].SHA256 = "22"
		}, Deny, reasons{ReasonUnknownCredential}},
		{"I4: no record", renewal, func(w *world) { w.in.Records = w.in.Records[:1] }, Deny, reasons{ReasonUnknownCredential}},
		{"I4: one is yet to be noted", renewal, func(w *world) {
			credential(x509Prefix + "00")(w)
			w.record().ProofUID = "newer"
		}, Wait, reasons{ReasonUnknownCredential}},
		{"I4: none is yet to be noted, as none was asked for", renewal, func(w *world) {
			w.record().ProofUID, w.record().Certificates = "", nil
		}, Deny, reasons{ReasonUnknownCredential}},
		{"I4: bare", renewal, credential(certificate1), Deny, reasons{ReasonUnknownCredential}},
		{"I4: empty on both sides", renewal, func(w *world) {
			credential(x509Prefix)(w)
			w.record().Certificates[0].SHA256 = ""
		}, Deny, reasons{ReasonUnknownCredential}},
		{"I4: of no machine known", renewal, func(w *world) { w.in.Records, w.in.Machines = nil, nil }, Wait, reasons{ReasonMachineNotFound}},
		{"I3: again, by the record alone, another machine's token", again, func(w *world) {
			w.machine().EKs, w.in.Token = nil, Token{true, machine("worker-2").Ref}
		}, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: again, by the record alone, a token of no machine", again, func(w *world) {
			w.machine().EKs, w.in.Token = nil, Token{Known: true}
		}, Deny, reasons{ReasonTokenNotForMachine}},
		{"I3: again, by the record alone, a token not known yet", helloOf(Again), func(w *world) { w.machine().EKs = nil }, Wait, reasons{ReasonTokenNotForMachine}},
		{"I4: hello", helloOf(Renewal), credential(x509Prefix + "00"), Deny, reasons{ReasonUnknownCredential}},

		{"A: refused", first, func(w *world) { w.in.Evidence = Evidence{Err: Refusals{{"AttestationX", "x"}, {"AttestationY", "y"}}} }, Deny, reasons{"AttestationX", "AttestationY"}},
		{"A: refused, wrapped", first, func(w *world) { w.in.Evidence.Err = fmt.Errorf("x: %w", Refusals{{"AttestationX", "x"}}.Err()) }, Deny, reasons{"AttestationX"}},
		{"A: refused without a reason", first, func(w *world) { w.in.Evidence.Err = Refusals{} }, Deny, reasons{ReasonRefused}},
		{"A: refused, of a machine with a record", again, func(w *world) {
			w.in.Evidence = Evidence{Err: Refusals{{"AttestationX", "x"}}}
		}, Deny, reasons{"AttestationX"}},
		{"A: refused, of a machine that has shown none before", again, func(w *world) {
			w.in.Evidence = Evidence{Err: Refusals{{"AttestationX", "x"}}}
			w.record().Provider, w.record().EK = InsecureProvider, ""
			w.machine().Deleted = testNow
		}, Deny, reasons{"AttestationX"}},
		{"A: refused, beside another machine that has shown none", first, func(w *world) {
			w.in.Evidence = Evidence{Err: Refusals{{"AttestationX", "x"}}}
			w.in.Records[0].Provider, w.in.Records[0].EK = InsecureProvider, ""
			w.in.Node = Present
		}, Deny, reasons{"AttestationX", ReasonNodeAlreadyRegistered}},
		{"A: nothing", first, func(w *world) { w.in.Evidence = Evidence{} }, Deny, reasons{ReasonRefused}},
		{"A: no EK", first, func(w *world) { w.in.Evidence.EK = "" }, Deny, reasons{ReasonRefused}},
		{"A: not for now", first, func(w *world) { w.in.Evidence = Evidence{Err: context.DeadlineExceeded} }, Wait, reasons{ReasonAttestationUnavailable}},
		{"A: expired, and more", first, func(w *world) {
			w.in.Evidence = Evidence{Err: Refusals{{attestation.ReasonExpired, "x"}}}
			w.in.Node = Present
		}, Deny, reasons{ReasonNodeAlreadyRegistered, attestation.ReasonExpired}},
		{"A: expired", first, func(w *world) { w.in.Evidence = Evidence{Err: Refusals{{attestation.ReasonExpired, "x"}}} }, Deny, reasons{attestation.ReasonExpired}},
		{"A: insecure, refused", goodInsecure, func(w *world) { w.in.Evidence.Err = Refusals{{"AttestationX", "x"}} }, Deny, reasons{"AttestationX"}},
		{"A: signing", signingOf(Renewal), func(w *world) { w.in.Evidence = Evidence{Err: Refusals{{"AttestationX", "x"}}} }, Fail, reasons{"AttestationX"}},

		{"M1: not known", first, func(w *world) { w.in.Machines = nil }, Wait, reasons{ReasonMachineNotFound}},
		{"M1: not vouched for yet", helloOf(First), unvouched(ek1, func(w *world) { w.machine().EKs = nil }), Wait, reasons{ReasonMachineNotFound}},
		{"M1: not vouched for yet, but known by now", helloOf(First), unvouched(ek1, nil), Wait, reasons{ReasonMachineNotFound}},
		{"M1: not vouched for, without an error", helloOf(First), func(w *world) { w.in.Evidence.EKUntrusted = true }, Wait, reasons{ReasonMachineNotFound}},
		{"M1: not vouched for, another machine's name", helloOf(First), unvouched("e9", nil), Deny, reasons{ReasonNodeNameMismatch}},
		{"M1: not vouched for, the name of a machine without an EK", helloOf(First), unvouched("e9", func(w *world) { w.machine().EKs[0].EK = "" }), Wait, reasons{ReasonMachineNotFound}},
		{"M1: not vouched for, a name with a record", helloOf(Again), unvouched("e9", func(w *world) { w.machine().EKs = nil }), Deny, reasons{ReasonIdentityBound}},
		{"M1: a source that does not count", first, func(w *world) { w.machine().EKs[0].Source = EKAnnotation }, Wait, reasons{ReasonMachineNotFound}},
		{"M1: a machine without a name", first, func(w *world) { w.machine().Ref = MachineRef{} }, Wait, reasons{ReasonMachineNotFound}},
		{"M1: two", first, func(w *world) { w.in.Machines[0].EKs = append(w.in.Machines[0].EKs, NamedEK{EKInventory, ek1}) }, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: two, hello", helloOf(First), claimedTwice, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: two, the record is lost", renewal, func(w *world) { claimedTwice(w); w.policy.Credential = Recover; w.in.Records = w.in.Records[:1] }, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: two since the first approval", signingOf(First), claimedTwice, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: two, and a contradiction", first, func(w *world) { claimedTwice(w); w.in.Request.Spec.Groups = nil; w.in.Hello.Spec.Groups = nil }, Deny, reasons{ReasonRequesterNotAllowed}},
		{"M1: disputed", first, disputed, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: disputed, hello", helloOf(First), disputed, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: disputed since the first approval", signingOf(First), disputed, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: disputed, the record is lost", renewal, func(w *world) { disputed(w); w.policy.Credential = Recover; w.in.Records = w.in.Records[:1] }, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: disputed, another key than the record's", again, func(w *world) {
			disputed(w)
			w.in.Evidence.EK, w.machine().EKs = "e9", []NamedEK{{EKInventory, "e9"}}
		}, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: disputed, another provider ID than the record's", renewal, func(w *world) { disputed(w); w.record().ProviderID = "acme://zone/worker-3" }, Deny, reasons{ReasonProviderIDMismatch, ReasonIdentityBound}},
		{"M1: disputed, a key that nobody names", first, func(w *world) { disputed(w); w.in.Evidence.EK = "e9" }, Wait, reasons{ReasonMachineNotFound, ReasonAmbiguousMachine}},
		{"M1: disputed, insecure", goodInsecure, func(w *world) { disputed(w); w.machine().EKs = nil }, Wait, reasons{ReasonAmbiguousMachine}},
		{"M1: another machine's EK, and its name", first, func(w *world) {
			w.in.Evidence.EK = ek2
			w.in.Records = nil
		}, Deny, reasons{ReasonTokenNotForMachine, ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonAmbiguousName}},
		{"M1: another genuine TPM", first, func(w *world) { w.in.Evidence.EK = "e9" }, Deny, reasons{ReasonNodeNameMismatch}},
		{"M1: the record's machine is gone", again, func(w *world) { w.in.Machines = w.in.Machines[:1] }, Wait, reasons{ReasonMachineNotFound}},
		{"M1: another provider ID", first, func(w *world) { w.named(nodeName, "acme://zone/worker-2") }, Deny, reasons{ReasonProviderIDMismatch}},
		{"M1: another provider ID, hello", helloOf(First), func(w *world) { w.named(nodeName, "acme://zone/worker-2") }, Deny, reasons{ReasonProviderIDMismatch}},
		{"M1: no provider ID yet", first, func(w *world) { w.machine().ProviderID = "" }, Wait, reasons{ReasonMachineNotReady}},

		{"M2: not ready", first, func(w *world) { w.machine().Ready = false }, Wait, reasons{ReasonMachineNotReady}},
		{"M2: not ready, renewal", renewal, func(w *world) { w.machine().Ready = false }, Wait, reasons{ReasonMachineNotReady}},
		{"M2: not ready, and a contradiction", first, func(w *world) { w.machine().Ready = false; w.in.Node = Present }, Deny, reasons{ReasonNodeAlreadyRegistered}},

		{"M3: first", first, deleted(time.Minute), Deny, reasons{ReasonMachineDeleting}},
		{"M3: again", again, deleted(time.Minute), Deny, reasons{ReasonMachineDeleting}},
		{"M3: renewal after an hour", renewal, deleted(time.Hour + time.Second), Deny, reasons{ReasonMachineDeleting}},
		{"M3: signing", signingOf(First), deleted(time.Minute), Fail, reasons{ReasonMachineDeleting}},

		{"M4: another name", first, func(w *world) { w.machine().Names[0].Value = "worker-9" }, Deny, reasons{ReasonNodeNameMismatch}},
		{"M4: an earlier source says otherwise", first, func(w *world) {
			w.machine().Names = append(w.machine().Names, NodeName{NameInventory, "worker-9"})
		}, Deny, reasons{ReasonNodeNameMismatch}},
		{"M4: a free name", first, func(w *world) { w.named("worker-9", providerID) }, Deny, reasons{ReasonNodeNameMismatch}},
		{"M4: two names", first, func(w *world) { w.machine().Names = append(w.machine().Names, NodeName{NameMachine, "worker-9"}) }, Deny, reasons{ReasonAmbiguousName}},
		{"M4: claimed by another machine", first, func(w *world) { w.in.Machines[0].Names[0].Value = nodeName }, Deny, reasons{ReasonAmbiguousName}},
		{"M4: claimed by another record", first, func(w *world) { w.in.Records[0].NodeName = nodeName }, Deny, reasons{ReasonAmbiguousName, ReasonIdentityBound}},
		{"M4: again, claimed by another record", again, func(w *world) { w.in.Records[0].NodeName = nodeName }, Deny, reasons{ReasonAmbiguousName, ReasonIdentityBound}},
		{"M4: no source says", first, func(w *world) { w.machine().Names = nil }, Wait, reasons{ReasonNodeNameUnknown}},
		{"M4: an empty name", first, func(w *world) { w.machine().Names[0].Value = "" }, Wait, reasons{ReasonNodeNameUnknown}},
		{"M4: a source not asked for", first, func(w *world) { w.machine().Names[0].Source = NameHostname }, Wait, reasons{ReasonNodeNameUnknown}},
		{"M4: another name before the first certificate", signingOf(First), func(w *world) { w.machine().Names[0].Value = "worker-9" }, Fail, reasons{ReasonNodeNameMismatch}},
		{"M4: again under another name", again, func(w *world) { w.named("worker-9", providerID) }, Deny, reasons{ReasonNodeNameMismatch, ReasonIdentityBound}},
		{"M4: hello", helloOf(First), func(w *world) { w.machine().Names[0].Value = "worker-9" }, Deny, reasons{ReasonNodeNameMismatch}},

		{"M5: a Node exists", first, func(w *world) { w.in.Node = Present }, Deny, reasons{ReasonNodeAlreadyRegistered}},
		{"M5: a Node has appeared before the first certificate", signingOf(First), func(w *world) { w.in.Node = Present }, Fail, reasons{ReasonNodeAlreadyRegistered}},
		{"M5: not known", first, func(w *world) { w.in.Node = 0 }, Wait, reasons{ReasonNodeAlreadyRegistered}},

		{"T1: EK pinned elsewhere", first, func(w *world) {
			w.in.Records[0].EK = ek1
			w.in.Machines[0] = machine("worker-7")
		}, Deny, reasons{ReasonIdentityBound}},
		{"T1: EK pinned to a machine that is still there", first, func(w *world) { w.in.Records[0].EK = ek1 }, Deny,
			reasons{ReasonTokenNotForMachine, ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonIdentityBound}},
		{"T1: another EK for this machine", again, func(w *world) {
			w.in.Evidence.EK = "e9"
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
		}, Deny, reasons{ReasonIdentityBound}},
		{"T1: another EK for this machine, renewal", renewal, func(w *world) {
			w.in.Evidence.EK = "e9"
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
		}, Deny, reasons{ReasonIdentityBound}},
		{"T1: another EK for this machine, hello", helloOf(Again), func(w *world) {
			w.in.Evidence.EK = "e9"
			w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
		}, Deny, reasons{ReasonIdentityBound}},
		{"T1: weaker provider", func() *world { return goodAcme(Again) }, func(w *world) { w.record().Provider = "tpm" }, Deny, reasons{ReasonIdentityBound}},
		{"T1: weaker provider, renewal", func() *world { return goodAcme(Renewal) }, func(w *world) { w.record().Provider = "tpm" }, Deny, reasons{ReasonIdentityBound}},
		{"T1: a provider that is none", again, func(w *world) { w.record().Provider = "" }, Deny, reasons{ReasonIdentityBound}},
		{"T1: another provider ID", again, func(w *world) { w.record().ProviderID = "acme://zone/worker-2" }, Deny, reasons{ReasonIdentityBound}},
		{"T1: another provider ID, none asked for", again, func(w *world) {
			w.named(nodeName, "")
			w.machine().ProviderID = "acme://zone/worker-9"
		}, Deny, reasons{ReasonIdentityBound}},
		{"T1: another cluster's record", again, func(w *world) { w.record().Cluster = "c2" }, Deny, reasons{ReasonIdentityBound}},
		{"T1: two records of a machine", again, func(w *world) { w.in.Records = append(w.in.Records, recordOf(nodeName, ek1)) }, Deny, reasons{ReasonIdentityBound}},
		{"T1: a record of the machine before", again, func(w *world) { w.record().Machine.UID = "older" }, Deny, reasons{ReasonAmbiguousName, ReasonNodeAlreadyRegistered, ReasonIdentityBound}},
		{"T1: resets went back", again, func(w *world) {
			w.policy.BootCounters = Required
			w.in.Evidence.Boot.Resets--
		}, Deny, reasons{ReasonBootCountersWentBack}},
		{"T1: clock went back", renewal, func(w *world) {
			w.policy.BootCounters = Required
			w.in.Evidence.Boot.Clock = 999
		}, Deny, reasons{ReasonBootCountersWentBack}},
		{"T1: restarts went back", renewal, func(w *world) {
			w.policy.BootCounters = Required
			w.in.Evidence.Boot = &Boot{7, 0, 5000, true}
		}, Deny, reasons{ReasonBootCountersWentBack}},
		{"T1: signing", signingOf(Again), func(w *world) { w.in.Records[1].EK = "e9" }, Fail, reasons{ReasonIdentityBound}},

		{"R1: over the rate", first, func(w *world) { w.rateLimited = true }, Wait, reasons{ReasonRateLimited}},
		{"R1: over the rate for long", first, func(w *world) {
			w.rateLimited = true
			w.created(24 * time.Hour)
		}, Wait, reasons{ReasonRateLimited}},
		{"R1: over the rate, and a contradiction", first, func(w *world) { w.rateLimited = true; w.in.Node = Present }, Deny, reasons{ReasonNodeAlreadyRegistered}},
		{"R1: over the rate, and something else is missing for long", first, func(w *world) {
			w.rateLimited, w.in.Machines = true, nil
			w.created(time.Hour)
		}, Deny, reasons{ReasonMachineNotFound}},

		{"wait: before the deadline", first, func(w *world) { w.in.Machines = nil; w.created(DefaultWaitDeadline - time.Second) }, Wait, reasons{ReasonMachineNotFound}},
		{"wait: at the deadline", first, func(w *world) { w.in.Machines = nil; w.created(DefaultWaitDeadline) }, Deny, reasons{ReasonMachineNotFound}},
		{"wait: at the operator's deadline", first, func(w *world) {
			w.policy.WaitDeadline = time.Minute
			w.in.Machines = nil
		}, Deny, reasons{ReasonMachineNotFound}},
		{"wait: from a file", first, func(w *world) { w.in.Machines = nil; w.in.Request.CreationTimestamp = metav1.Time{} }, Wait, reasons{ReasonMachineNotFound}},
		{"wait: for more than one thing", first, func(w *world) {
			w.machine().Ready, w.machine().Names, w.in.Node, w.in.Token = false, nil, 0, Token{}
		}, Wait, reasons{ReasonTokenNotForMachine, ReasonMachineNotReady, ReasonNodeNameUnknown, ReasonNodeAlreadyRegistered}},
		{"no time", first, func(w *world) { w.in.Now = time.Time{} }, Deny, reasons{ReasonRefused}},

		{"insecure: the machine has a record", goodInsecure, func(w *world) {
			r := recordOf("worker-9", "")
			r.Machine, r.Provider = machine(nodeName).Ref, InsecureProvider
			r.NodeName = nodeName
			w.in.Records = append(w.in.Records, r)
		}, Deny, reasons{ReasonIdentityBound}},
		{"insecure: the machine has shown a TPM", goodInsecure, func(w *world) { w.in.Records = append(w.in.Records, recordOf(nodeName, ek1)) }, Deny, reasons{ReasonIdentityBound}},
		{"insecure: the name has a record", goodInsecure, func(w *world) {
			w.in.Records[0].NodeName, w.in.Records[0].Provider, w.in.Records[0].EK = nodeName, InsecureProvider, ""
			w.in.Node = Present
		}, Deny, reasons{ReasonAmbiguousName, ReasonNodeAlreadyRegistered, ReasonIdentityBound}},
		{"insecure: the machine has an EK", goodInsecure, func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, ek1}} }, Deny, reasons{ReasonIdentityBound}},
		{"insecure: a Node exists", goodInsecure, func(w *world) { w.in.Node = Present }, Deny, reasons{ReasonNodeAlreadyRegistered}},
		{"insecure: renewal", goodInsecure, func(w *world) {
			w.in.Request = object(Renewal, InsecureSignerName, "insecure", "x", goodPKCS10(key("p256")))
			w.in.Records = append(w.in.Records, recordOf(nodeName, ""))
			w.record().Provider = InsecureProvider
		}, Deny, reasons{ReasonRequesterNotAllowed, ReasonIdentityBound}},
		{"insecure: the token is nobody's", goodInsecure, func(w *world) { w.in.Token = Token{Known: true} }, Deny, reasons{ReasonTokenNotForMachine}},
		{"insecure: the token is nobody's, and the policy does not care", goodInsecure, func(w *world) {
			w.policy.Token = Off
			w.in.Token = Token{Known: true}
		}, Deny, reasons{ReasonTokenNotForMachine}},
		{"insecure: the token is not known", goodInsecure, func(w *world) { w.in.Token = Token{} }, Wait, reasons{ReasonMachineNotFound, ReasonTokenNotForMachine}},
		{"insecure: the token is only guessed", goodInsecure, func(w *world) { w.in.Token.Known = false }, Wait, reasons{ReasonMachineNotFound, ReasonTokenNotForMachine}},
		{"insecure: the token is another machine's", goodInsecure, func(w *world) {
			w.in.Token.Machine = machine("worker-3").Ref
			w.in.Machines = append(w.in.Machines, machine("worker-3"))
		}, Deny, reasons{ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonAmbiguousName}},
		{"insecure: no token", goodInsecure, user("system:serviceaccount:infra:joiner", "system:serviceaccounts:infra"), Deny, reasons{ReasonTokenNotForMachine}},
		{"insecure: a DNS name", goodInsecure, der(template(func(r *x509.CertificateRequest) { r.DNSNames = []string{"x"} })), Deny, reasons{ReasonForbiddenExtension}},
		{"insecure: a TPM's document", goodInsecure, func(w *world) {
			w.raw(block(attestation.BlockProvider, "insecure"), block(attestation.BlockProvider, "tpm"))
		}, Deny, reasons{ReasonProviderMismatch}},
		{"insecure: another request was first", func() *world {
			w := goodInsecure()
			w.approve()
			return w
		}, func(w *world) {
			w.signing = false
			w.in.Request = object(First, InsecureSignerName, "second", "x", goodPKCS10(key("p256")))
		}, Deny, reasons{ReasonIdentityBound}},

		{"left alone: not listed", goodUnattested, func(w *world) { w.policy.UnattestedNodes = []string{"control-plane-0"} }, Ignore, nil},
		{"left alone: another signer", goodUnattested, func(w *world) { w.in.Request.Spec.SignerName = "kubernetes.io/kube-apiserver-client" }, Ignore, nil},
		{"left alone: our signer", goodUnattested, func(w *world) { w.in.Request.Spec.SignerName = tpmSigner }, Deny, reasons{ReasonMalformedRequest}},
		{"left alone: a bootstrap identity", goodUnattested, user("system:bootstrap:abc123", "system:bootstrappers"), Ignore, nil},
		{"left alone: one listed for another listed", goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = stockRequest("control-plane-0", "", key("p256"))
		}, Deny, reasons{ReasonRequesterNotAllowed}},
		{"left alone: one listed for one not listed", goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = stockRequest("worker-2", "", key("p256"))
		}, Deny, reasons{ReasonRequesterNotAllowed, ReasonIdentityBound}},
		{"left alone: one not listed for one listed", goodUnattested, user(userNode+"worker-2", groupNodes), Ignore, nil},
		{"left alone: not in the nodes' group", goodUnattested, user(userNode+nodeName, "system:authenticated"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"left alone: an administrator", goodUnattested, user(userNode+nodeName, groupNodes, groupMasters), Deny, reasons{ReasonRequesterNotAllowed}},
		{"left alone: it has a record", goodUnattested, func(w *world) { w.in.Records = append(w.in.Records, recordOf(nodeName, ek1)) }, Deny, reasons{ReasonIdentityBound}},
		{"left alone: a provider ID", goodUnattested, func(w *world) { w.in.Request.Spec.Request = stockRequest(nodeName, providerID, key("p256")) }, Deny, reasons{ReasonForbiddenExtension}},
		{"left alone: a DNS name", goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(template(func(r *x509.CertificateRequest) { r.DNSNames = []string{"x"} }))))
		}, Deny, reasons{ReasonForbiddenExtension}},
		{"left alone: another organization", goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(template(func(r *x509.CertificateRequest) {
				r.ExtraExtensions, r.Subject.Organization = nil, []string{groupMasters}
			}))))
		}, Deny, reasons{ReasonSubjectMismatch}},
		{"left alone: bytes behind", goodUnattested, func(w *world) { w.in.Request.Spec.Request = append(w.in.Request.Spec.Request, '\n') }, Deny, reasons{ReasonMalformedRequest}},
		{"left alone: two blocks", goodUnattested, func(w *world) {
			w.in.Request.Spec.Request = slices.Concat(w.in.Request.Spec.Request, w.in.Request.Spec.Request)
		}, Deny, reasons{ReasonMalformedRequest}},
		{"left alone: a server's certificate", goodUnattested, usages("digital signature", "server auth"), Deny, reasons{ReasonUsageMismatch}},
		{"left alone: a weak key", goodUnattested, func(w *world) { w.in.Request.Spec.Request = stockRequest(nodeName, "", key("p224")) }, Deny, reasons{ReasonUnsupportedKey}},
		{"left alone: decided", goodUnattested, func(w *world) { w.condition(certificatesv1.CertificateDenied) }, Ignore, nil},
		{"left alone: over the rate", goodUnattested, func(w *world) { w.rateLimited = true }, Wait, reasons{ReasonRateLimited}},
		{"left alone: no time", goodUnattested, func(w *world) { w.in.Now = time.Time{} }, Deny, reasons{ReasonRefused}},
		{"left alone: approved, for others to sign", goodUnattested, func(w *world) {
			w.signing = true
			w.condition(certificatesv1.CertificateApproved)
		}, Ignore, nil},

		{"a cloud's: nothing shown", cloud, func(w *world) { w.in.Evidence.Machine = "" }, Deny, reasons{ReasonRefused}},
		{"a cloud's: a source names another instance", cloud, func(w *world) { w.in.Evidence.EK = "c1c1" }, Deny, reasons{ReasonIdentityBound}},
		{"a cloud's: no such machine", cloud, func(w *world) { w.in.Evidence.Machine = "ns/worker-9" }, Wait, reasons{ReasonMachineNotFound}},
		{"a cloud's: another machine", cloud, func(w *world) { w.in.Evidence.Machine = "ns/worker-2" }, Deny,
			reasons{ReasonProviderIDMismatch, ReasonNodeNameMismatch, ReasonIdentityBound}},
		{"a cloud's: refused, with a machine's name", cloud, func(w *world) { w.in.Evidence.Err = Refusals{{"AttestationX", "x"}} }, Deny, reasons{"AttestationX"}},
		{"a cloud's: not judged, with a machine's name", cloud, func(w *world) { w.in.Evidence.Err = context.Canceled }, Wait, reasons{ReasonAttestationUnavailable}},
		{"a cloud's: filed again after its deletion", func() *world { return goodCloud(Again) }, func(w *world) {
			w.record().ProofUID, w.record().ProofSHA256 = "deleted", digest(w.in.Request.Spec.Request)
		}, Deny, reasons{ReasonIdentityBound}},
		{"a cloud's: a stronger provider is pinned", func() *world { return goodCloud(Again) }, func(w *world) { w.record().Provider, w.record().EK = "tpm", ek1 }, Deny, reasons{ReasonIdentityBound}},

		{"S3: longer than any", first, func(w *world) { w.pkcs10(make([]byte, maxPKCS10+1)) }, Deny, reasons{ReasonUnsupportedKey}},
		{"S7: the hello was closed by somebody", first, func(w *world) { w.closeHello("Admin") }, Deny, reasons{ReasonProofMismatch}},
		{"S7: the hello was approved, and says that it expired", first, func(w *world) {
			w.closeHello(string(ReasonHelloExpired))
			w.in.Hello.Status.Conditions[0].Type = certificatesv1.CertificateApproved
		}, Deny, reasons{ReasonProofMismatch}},
		{"S7: another proof is open", again, func(w *world) { w.record().ProofPending = true }, Wait, reasons{ReasonRequestPending}},
		{"S7: another proof is open for long", again, func(w *world) { w.record().ProofPending = true; w.created(time.Hour) }, Deny, reasons{ReasonRequestPending}},
		{"S7: another proof is open, renewal", renewal, func(w *world) { w.record().ProofPending = true }, Wait, reasons{ReasonRequestPending}},
		{"no CA", first, func(w *world) { w.in.SignerUnavailable = true }, Wait, reasons{ReasonSignerUnavailable}},
		{"no CA: a hello", helloOf(First), func(w *world) { w.in.SignerUnavailable = true }, Wait, reasons{ReasonSignerUnavailable}},
		{"no CA for long", first, func(w *world) { w.in.SignerUnavailable = true; w.created(time.Hour) }, Deny, reasons{ReasonSignerUnavailable}},
		{"no CA: hostile all the same", first, func(w *world) {
			w.in.SignerUnavailable = true
			w.in.Request.Spec.Usages, w.in.Hello.Spec.Usages = nil, nil
		}, Deny, reasons{ReasonUsageMismatch}},
		{"signing: no CA", signingOf(First), func(w *world) { w.in.SignerUnavailable = true }, Wait, reasons{ReasonSignerUnavailable}},
		{"signing: no CA for long", signingOf(First), func(w *world) { w.in.SignerUnavailable = true; w.created(time.Hour) }, Fail, reasons{ReasonSignerUnavailable}},
		{"signing: not approved", signingOf(First), func(w *world) { w.in.Request.Status.Conditions = nil }, Ignore, nil},
		{"signing: approved and denied", signingOf(First), func(w *world) { w.condition(certificatesv1.CertificateDenied) }, Ignore, nil},
		{"signing: approved and failed", signingOf(First), func(w *world) { w.condition(certificatesv1.CertificateFailed) }, Ignore, nil},
		{"signing: approved in lower case, too", signingOf(First), func(w *world) { w.condition("approved") }, Ignore, nil},
		{"signing: approved in capitals, too", signingOf(First), func(w *world) { w.condition("APPROVED") }, Ignore, nil},
		{"signing: approved and a blank, too", signingOf(First), func(w *world) { w.condition("Approved ") }, Ignore, nil},
		{"signing: approved, and a condition of others", signingOf(First), func(w *world) { w.condition("Acme") }, Ignore, nil},
		{"signing: approved in lower case alone", signingOf(First), func(w *world) { w.in.Request.Status.Conditions[0].Type = "approved" }, Ignore, nil},
		{"signing: approved and a blank alone", signingOf(First), func(w *world) { w.in.Request.Status.Conditions[0].Type = "Approved " }, Ignore, nil},
		{"signing: issued", signingOf(First), func(w *world) { w.in.Request.Status.Certificate = []byte("x") }, Ignore, nil},
		{"signing: another's signer", signingOf(First), func(w *world) { w.in.Request.Spec.SignerName = "example.com/other" }, Ignore, nil},
		{"signing: no record", signingOf(First), func(w *world) { w.in.Records = nil }, Fail, reasons{ReasonApprovedWithoutAttestation}},
		{"signing: the record names another", signingOf(Again), func(w *world) { w.in.Records[1].ProofUID = "newer" }, Fail, reasons{ReasonApprovedWithoutAttestation, ReasonProofMismatch}},
		{"signing: the record names none", signingOf(Again), func(w *world) { w.in.Records[1].ProofUID = ""; w.in.Request.UID = "" }, Fail, reasons{ReasonApprovedWithoutAttestation, ReasonProofMismatch}},
		{"signing: the record names other bytes", signingOf(Again), func(w *world) { w.in.Records[1].ProofSHA256 = digest([]byte("x")) }, Fail, reasons{ReasonApprovedWithoutAttestation, ReasonProofMismatch}},
		{"signing: another machine's record names it", signingOf(Again), func(w *world) {
			w.in.Records[0].ProofUID, w.in.Records[0].ProofSHA256 = w.in.Records[1].ProofUID, w.in.Records[1].ProofSHA256
			w.in.Records[1].ProofUID = "newer"
		}, Fail, reasons{ReasonProofMismatch}},
		{"signing: another machine's record names it, and this one has none", signingOf(First), func(w *world) {
			w.in.Records[0].ProofUID, w.in.Records[0].ProofSHA256 = w.in.Records[1].ProofUID, w.in.Records[1].ProofSHA256
			w.in.Records = w.in.Records[:1]
		}, Fail, reasons{ReasonApprovedWithoutAttestation}},
		{"signing: approved by others, and hostile", signingOf(First), func(w *world) {
			w.in.Records = nil
			w.in.Request.Spec.Usages, w.in.Hello.Spec.Usages = nil, nil
		}, Fail, reasons{ReasonApprovedWithoutAttestation, ReasonUsageMismatch}},
		{"signing: approved by others, and malformed", signingOf(First), func(w *world) {
			w.in.Request.Spec.Request = []byte("x")
		}, Fail, reasons{ReasonApprovedWithoutAttestation, ReasonMalformedRequest}},
		{"signing: something is missing", signingOf(First), func(w *world) { w.machine().Ready = false }, Wait, reasons{ReasonMachineNotReady}},
		{"signing: something is missing for long", signingOf(First), func(w *world) { w.machine().Ready = false; w.created(time.Hour) }, Fail, reasons{ReasonMachineNotReady}},
		{"signing: a hello", helloOf(First), func(w *world) {
			w.signing = true
			w.condition(certificatesv1.CertificateApproved)
		}, Fail, reasons{ReasonApprovedWithoutAttestation}},
		{"signing: a hello that a record names", helloOf(Again), func(w *world) {
			w.signing = true
			w.condition(certificatesv1.CertificateApproved)
			w.record().ProofUID, w.record().ProofSHA256 = string(w.in.Request.UID), digest(w.in.Request.Spec.Request)
		}, Fail, reasons{ReasonApprovedWithoutAttestation}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := c.world()
			c.bend(w)
			d := w.judge(t)
			if d.Outcome != c.want || !slices.Equal(d.Refusals.Reasons(), c.why) {
				t.Errorf("%s, %v, want %s, %v", d.Outcome, d.Refusals, c.want, c.why)
			}
			if d.Grant != nil {
				t.Errorf("granted: %+v", d.Grant)
			}
			// TestRehearsalBeforeTheFirstAttestation has the one rule that differs.
			if w.rehearse() && c.name != "I4: no record" {
				if d := w.judge(t); d.Outcome != c.want || !slices.Equal(d.Refusals.Reasons(), c.why) {
					t.Errorf("as a rehearsal: %s, %v, want %s, %v", d.Outcome, d.Refusals, c.want, c.why)
				}
			}
			for _, reason := range d.Refusals.Reasons() {
				if Reasons()[reason] == "" && !strings.HasPrefix(string(reason), "Attestation") {
					t.Errorf("%s is not in Reasons", reason)
				}
			}
		})
	}
}

func usages(u ...certificatesv1.KeyUsage) func(*world) {
	return func(w *world) { w.both(func(s *csrSpec) { s.Usages = u }) }
}

func user(name string, groups ...string) func(*world) {
	return func(w *world) { w.both(func(s *csrSpec) { s.Username, s.Groups = name, groups }) }
}

func credential(ids ...string) func(*world) {
	return func(w *world) { w.in.Request.Spec.Extra[ExtraCredentialID] = ids }
}

func deleted(ago time.Duration) func(*world) {
	return func(w *world) { w.machine().Deleted = testNow.Add(-ago) }
}

func (w *world) closeHello(reason string) {
	w.in.Hello.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Reason: reason}}
}

func (w *world) created(ago time.Duration) {
	w.in.Request.CreationTimestamp = metav1.NewTime(testNow.Add(-ago))
}

// unvouched is a hello of which nothing is wrong but that nobody vouches for its EK.
func unvouched(ek string, bend func(*world)) func(*world) {
	return func(w *world) {
		w.in.Evidence = Evidence{EK: ek, Err: Refusals{{"AttestationEKUntrusted", "x"}}, EKUntrusted: true}
		if bend != nil {
			bend(w)
		}
	}
}

func ed25519Request() []byte {
	// RFC 8410: a key of 32 bytes. It is refused before its signature is looked at.
	d := draftOf(key("p256"))
	d.publicKey = element(tagSequence, element(tagSequence, element(tagOID, []byte{0x2b, 0x65, 0x70})), element(tagBitString, []byte{0}, make([]byte, 32)))
	return d.sign()
}

func TestWarnings(t *testing.T) {
	for name, c := range map[string]struct {
		class Class
		bend  func(*world)
		want  Reason
	}{
		"I3: another machine's":  {First, func(w *world) { w.policy.Token = Warn; w.in.Token.Machine.UID = "x" }, ReasonTokenNotForMachine},
		"I3: not known":          {First, func(w *world) { w.policy.Token = Warn; w.in.Token = Token{} }, ReasonTokenNotForMachine},
		"I4: unknown":            {Renewal, func(w *world) { w.policy.Credential = Warn; w.in.Request.Spec.Extra = nil }, ReasonUnknownCredential},
		"I4: no record":          {Renewal, func(w *world) { w.policy.Credential = Warn; w.in.Records = nil }, ReasonUnknownCredential},
		"I4: yet to be noted":    {Renewal, func(w *world) { w.policy.Credential = Warn; w.record().Certificates = nil }, ReasonUnknownCredential},
		"A1: the provider warns": {Renewal, func(w *world) { w.in.Evidence.Warnings.Add("ProviderWarns", "x") }, "ProviderWarns"},
		"T1: counters went back": {Again, func(w *world) { w.in.Evidence.Boot.Resets = 0 }, ReasonBootCountersWentBack},
		"T1: another AK":         {Again, func(w *world) { w.in.Evidence.AK = "a2" }, ReasonAKChanged},

		"M1: two, renewal": {Renewal, claimedTwice, ReasonAmbiguousMachine},
		"M1: two, again":   {Again, claimedTwice, ReasonAmbiguousMachine},
		"M1: two, and the record's machine has none": {Renewal, func(w *world) { claimedTwice(w); w.machine().EKs = nil }, ReasonAmbiguousMachine},
		"M1: disputed, renewal":                      {Renewal, disputed, ReasonAmbiguousMachine},
		"M1: disputed, again":                        {Again, disputed, ReasonAmbiguousMachine},
		"M1: disputed, and two":                      {Renewal, func(w *world) { disputed(w); claimedTwice(w); w.in.Machines[0].Disputed = true }, ReasonAmbiguousMachine},
		"M1: disputed, nothing agreed on": {Renewal, func(w *world) {
			disputed(w)
			w.machine().ProviderID, w.machine().Names, w.machine().EKs = "", nil, []NamedEK{{EKInventory, "b"}, {EKInventory, "c"}}
		}, ReasonAmbiguousMachine},

		// The record decides, but a first use that was somebody else's must not stay unseen.
		"T1: another EK is named, comes again": {Again, func(w *world) {
			w.machine().EKs, w.in.Token = []NamedEK{{EKInventory, ek2 + "9"}}, good(First).in.Token
		}, ReasonEKChangePending},
		"T1: another EK is named, renews": {Renewal, func(w *world) { w.machine().EKs = []NamedEK{{EKInventory, ek2 + "9"}} }, ReasonEKChangePending},
		"T1: another EK is named, and the policy only warns": {Renewal, func(w *world) {
			w.policy.EKNotNamed, w.machine().EKs = Warn, []NamedEK{{EKInventory, ek2 + "9"}}
		}, ReasonEKNotNamed},
		"T1: two others are named": {Renewal, func(w *world) {
			w.machine().EKs = []NamedEK{{EKInventory, ek2 + "8"}, {EKInventory, ek2 + "9"}, {EKPlatform, ek1}}
		}, ReasonEKChangePending},
	} {
		t.Run(name, func(t *testing.T) {
			w := good(c.class)
			c.bend(w)
			if d := w.judge(t); d.Outcome != Approve || !slices.Equal(d.Warnings.Reasons(), []Reason{c.want}) {
				t.Errorf("%s: %v, warnings %v", d.Outcome, d.Refusals, d.Warnings)
			}
		})
	}
}

// What no source that counts says is no news, nor is one of several EKs that are the machine's.
func TestNoWarningOfEKs(t *testing.T) {
	for name, eks := range map[string][]NamedEK{
		"none is named":              nil,
		"one of several":             {{EKInventory, "e9"}, {EKInventory, ek1}},
		"a source that counts for 0": {{EKPlatform, "e9"}},
		"an empty one":               {{EKInventory, ""}},
	} {
		for _, class := range []Class{Again, Renewal} {
			w := good(class)
			w.machine().EKs, w.in.Token = eks, good(First).in.Token
			if d := w.judge(t); d.Outcome != Approve || len(d.Warnings) > 0 {
				t.Errorf("%s, %s: %s, %v, warnings %v", class, name, d.Outcome, d.Refusals, d.Warnings)
			}
		}
	}
	// Evidence that names the machine has no EK, and a machine need not have one.
	w := goodCloud(Renewal)
	w.machine().EKs = []NamedEK{{EKInventory, "e9"}}
	if d := w.judge(t); d.Outcome != Approve || len(d.Warnings) > 0 {
		t.Errorf("%s, %v, warnings %v", d.Outcome, d.Refusals, d.Warnings)
	}
}

// Each contradiction with a record is told once, and by its own words: the reason is one for all.
func TestContradictions(t *testing.T) {
	const machineEK, nameEK, name = "the machine has another endorsement key", "the node name is bound to another endorsement key", "the node name is another one"
	const otherMachine, id, stronger = "the endorsement key is another machine's", "the provider ID is another one", "the machine is held to a stronger provider"
	e9 := func(w *world) {
		w.in.Evidence.EK, w.in.Evidence.AK, w.in.Evidence.Boot = "e9", "a9", &Boot{}
		w.machine().EKs = append(w.machine().EKs, NamedEK{EKInventory, "e9"})
	}
	for about, c := range map[string]struct {
		world *world
		bend  func(*world)
		want  []string
	}{
		"the machine's": {good(Again), func(w *world) { e9(w); w.named("worker-9", providerID) }, []string{machineEK, name}},
		"the machine's, and another machine": {good(Again), func(w *world) {
			e9(w)
			w.record().ProviderID = "acme://x"
			w.machine().ProviderID = "acme://x"
		}, []string{machineEK, id}},
		"the platform says otherwise": {good(Again), func(w *world) { w.machine().ProviderID = "acme://x" }, []string{id}},
		"the node name's":             {good(First), func(w *world) { w.in.Records[0].NodeName = nodeName }, []string{nameEK}},
		"the node name's, of a machine without an EK": {good(First), func(w *world) {
			w.in.Records[0].NodeName, w.in.Records[0].EK = nodeName, ""
		}, nil},
		"the endorsement key's": {good(First), func(w *world) {
			w.in.Records[0].EK = ek1
			w.in.Machines[0] = machine("worker-7")
		}, []string{otherMachine, name, id}},
		"the endorsement key's, and the machine is gone": {good(Again), func(w *world) {
			w.named("worker-9", "acme://x")
			w.in.Machines = nil
		}, []string{name, id}},
		"the endorsement key's, and all is well": {good(Again), func(w *world) {
			w.named(nodeName, "")
			w.in.Machines = nil
		}, nil},
		"not yet vouched for": {goodHello(Again), func(w *world) {
			unvouched(ek1, nil)(w)
			w.in.Evidence.AK, w.in.Evidence.Boot = "a9", &Boot{}
		}, nil},
		"insecure": {goodInsecure(), func(w *world) { w.in.Records = append(w.in.Records, recordOf(nodeName, ek1)) },
			[]string{stronger, "this signer is not for a machine or a node name that has one"}},
	} {
		t.Run(about, func(t *testing.T) {
			c.bend(c.world)
			d := c.world.judge(t)
			var got []string
			for _, refusal := range d.Refusals {
				if refusal.Reason == ReasonIdentityBound {
					got = append(got, strings.TrimPrefix(refusal.Message, "record: "))
				}
			}
			if !slices.Equal(got, c.want) || len(d.Warnings) > 0 || d.Grant != nil {
				t.Errorf("%q, want %q; warnings %v", got, c.want, d.Warnings)
			}
		})
	}
}

// A renewal without a record, where the policy allows it, takes its name from the sources.
func TestRenewalWithoutRecordTakesItsNameFromTheSources(t *testing.T) {
	w := good(Renewal)
	w.policy.Credential, w.in.Records = Off, nil
	w.machine().Names[0].Value = "worker-9"
	if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonNodeNameMismatch {
		t.Errorf("%s: %v", d.Outcome, d.Refusals)
	}
}

func TestLifetimeOfAMachineBeingDeleted(t *testing.T) {
	w := good(Renewal)
	w.machine().Deleted = testNow.Add(-time.Minute)
	if d := w.judge(t); d.Outcome != Approve || d.Grant.MaxLifetime != time.Hour {
		t.Errorf("%s: %v, %+v", d.Outcome, d.Refusals, d.Grant)
	}
}

func TestRecordThatIsWritten(t *testing.T) {
	w := good(First)
	d := w.judge(t)
	want := Record{
		Cluster: "c1", Machine: machine(nodeName).Ref, Provider: "tpm", EK: ek1, AK: "a1", EKSource: EKInventory, ProviderID: providerID, NodeName: nodeName,
		Boot: &Boot{7, 1, 2000, true}, HelloUID: "uid-hello", ProofUID: "uid-proof", ProofSHA256: digest(w.in.Request.Spec.Request), FirstProofUID: "uid-proof",
	}
	if d.Outcome != Approve || !reflect.DeepEqual(d.Grant.Record, want) {
		t.Errorf("first: %+v", d.Grant)
	}
	if w.in.Evidence.Boot.Clock++; d.Grant.Record.Boot.Clock != 2000 {
		t.Error("the record changes with the input")
	}

	// A provider without counters, a machine whose provider ID is gone for a moment, a certificate
	// that has ended.
	w = goodAcme(Again)
	w.named(nodeName, "")
	w.machine().ProviderID = ""
	ended := Certificate{SHA256: "c0", ProofUID: "uid-old", NotAfter: testNow.Add(-time.Second)}
	// nobody knows when c3 ends
	w.record().Certificates = append(w.record().Certificates, Certificate{SHA256: "c3"}, ended)
	before := slices.Clone(w.record().Certificates)
	d = w.judge(t)
	want = Record{
		Cluster: "c1", Machine: machine(nodeName).Ref, Provider: "acme", EK: ek1, EKSource: EKInventory, ProviderID: providerID, NodeName: nodeName,
		Boot: &Boot{7, 1, 1000, true}, ProofUID: "uid-acme", ProofSHA256: digest(w.in.Request.Spec.Request), FirstProofUID: "uid-older",
		Certificates: before[:2],
	}
	if d.Outcome != Approve || !reflect.DeepEqual(d.Grant.Record, want) {
		t.Errorf("again: %v, %+v", d.Refusals, d.Grant)
	}
	if !slices.Equal(w.record().Certificates, before) {
		t.Error("the input was changed")
	}
}

// The controller may be killed between any two of its steps: what it was about to do is still
// right.
func TestStepsCanBeRepeated(t *testing.T) {
	for _, class := range []Class{First, Again, Renewal} {
		w := goodSigning(class)
		written := w.in.Records[len(w.in.Records)-1]

		// the record is written, nobody has approved
		w.signing, w.in.Request.Status.Conditions = false, nil
		if d := w.judge(t); d.Outcome != Approve || d.Class != class || !reflect.DeepEqual(d.Grant.Record, written) {
			t.Errorf("%s, after the record: %s, %v, %+v", class, d.Outcome, d.Refusals, d.Grant)
		}

		w.signing = true // the certificate is noted, and was not published
		w.condition(certificatesv1.CertificateApproved)
		w.in.Records[len(w.in.Records)-1].Certificates = append(written.Certificates, Certificate{SHA256: "c2", ProofUID: written.ProofUID, NotAfter: testNow.Add(time.Hour)})
		later := class
		if class == First { // the rules of a first request held when the certificate was made
			later = Again
		}
		if d := w.judge(t); d.Outcome != Sign || d.Class != later {
			t.Errorf("%s, after the note: %s, %v", class, d.Outcome, d.Refusals)
		}
	}
}

// A node comes again after all its certificates have ended: its Node and its record are there, no
// certificate is.
func TestAgainAfterEverythingEnded(t *testing.T) {
	w := good(Again)
	w.record().Certificates = nil
	w.approve()
	if d := w.judge(t); d.Outcome != Sign || d.Class != Again {
		t.Errorf("%s, %s: %v", d.Outcome, d.Class, d.Refusals)
	}
}

// A rehearsal passes if a real request would. Nothing signs it, even if it was approved and a
// record names it.
func TestRehearsal(t *testing.T) {
	for _, class := range []Class{First, Again, Renewal} {
		w, hello := good(class), goodHello(class)
		if !w.rehearse() || !hello.rehearse() {
			t.Fatal("no rehearsal")
		}
		if d := w.judge(t); d.Outcome != Rehearsed || d.Class != class || d.Grant == nil || !reflect.DeepEqual(d.Grant.Record, Record{}) {
			t.Errorf("%s: %+v", class, d)
		}
		if d := hello.judge(t); d.Outcome != Challenge {
			t.Errorf("%s, hello: %+v", class, d)
		}
		approved := goodSigning(class)
		approved.in.Request.Spec.SignerName, approved.in.Hello.Spec.SignerName = attestation.RehearsalSignerName, attestation.RehearsalHelloSignerName
		if d := approved.judge(t); d.Outcome != Ignore || d.Grant != nil {
			t.Errorf("%s, approved: %+v", class, d)
		}
		real := good(class) // a real proof of a rehearsal's hello, and the reverse
		real.in.Hello.Spec.SignerName = attestation.RehearsalHelloSignerName
		mixed := good(class)
		mixed.in.Request.Spec.SignerName = attestation.RehearsalSignerName
		for _, w := range []*world{real, mixed} {
			if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonProofMismatch {
				t.Errorf("%s: %+v", class, d)
			}
		}
	}
	for _, target := range []string{attestation.HelloSignerName, attestation.RehearsalHelloSignerName, tpmSigner, acmeSigner} {
		w := goodHello(First)
		w.rehearse()
		w.in.Evidence.SignerName = target
		if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonProviderMismatch {
			t.Errorf("its hello is for %s: %+v", target, d)
		}
	}
	w := goodHello(First)
	w.in.Evidence.SignerName = attestation.RehearsalSignerName
	if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonProviderMismatch {
		t.Errorf("a real hello for a rehearsal: %+v", d)
	}
	for _, signer := range must(New(goodPolicy())).AttestingSigners() {
		if attestation.IsRehearsalSigner(signer) {
			t.Errorf("%s leads to certificates", signer)
		}
	}
}

// A node that has no record may rehearse with the credential that it has from elsewhere, although
// its Node exists.
func TestRehearsalBeforeTheFirstAttestation(t *testing.T) {
	w := good(Renewal)
	w.in.Records, w.policy.Credential = w.in.Records[:1], Required
	w.in.Request.Spec.Extra[ExtraCredentialID] = certificatesv1.ExtraValue{x509Prefix + "unknown"}
	if d := w.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonUnknownCredential {
		t.Errorf("a real request: %+v", d)
	}
	w.rehearse()
	if d := w.judge(t); d.Outcome != Rehearsed {
		t.Errorf("a rehearsal: %+v", d)
	}
	w.in.Request.Spec.Extra = nil // API servers before 1.32
	if d := w.judge(t); d.Outcome != Rehearsed {
		t.Errorf("without the credential's ID: %+v", d)
	}
}

func TestParseClaim(t *testing.T) {
	rules := must(New(goodPolicy()))
	w := good(First)
	w.condition(certificatesv1.CertificateApproved)
	if claim, ours := rules.ParseClaim(w.in.Request); !ours || claim != (Claim{"tpm", false, false, false, nodeName, providerID}) {
		t.Errorf("a proof: %+v, %t", claim, ours)
	}
	if claim, ours := rules.ParseClaim(w.in.Hello); !ours || claim != (Claim{"tpm", true, false, false, nodeName, providerID}) {
		t.Errorf("a hello: %+v, %t", claim, ours)
	}
	w.in.Request.Spec.SignerName = "example.com/other"
	if _, ours := rules.ParseClaim(w.in.Request); ours {
		t.Error("another's signer is ours")
	}
	w = good(First)
	w.in.Request.Spec.Request = nil
	if claim, ours := rules.ParseClaim(w.in.Request); !ours || claim != (Claim{}) {
		t.Errorf("malformed: %+v, %t", claim, ours)
	}
	if _, ours := rules.ParseClaim(nil); ours {
		t.Error("no request is ours")
	}
}

// A request that was approved for another signer does not block others once the deadline has
// passed.
func TestJudgeUnsigned(t *testing.T) {
	w := goodSigning(First)
	rules := must(New(w.policy))
	if d := rules.JudgeUnsigned(w.in); d.Outcome != Ignore {
		t.Errorf("before the deadline: %s", d.Outcome)
	}
	w.created(DefaultWaitDeadline)
	if d := rules.JudgeUnsigned(w.in); d.Outcome != Fail || d.Refusals.Reason() != ReasonSignerUnavailable {
		t.Errorf("at the deadline: %s, %v", d.Outcome, d.Refusals)
	}
	for name, bend := range map[string]func(){
		"issued":           func() { w.in.Request.Status.Certificate = []byte("x") },
		"not approved":     func() { w.in.Request.Status.Conditions = nil },
		"another's signer": func() { w.in.Request.Spec.SignerName = "example.com/other" },
	} {
		saved := w.in.Request.DeepCopy()
		bend()
		if d := rules.JudgeUnsigned(w.in); d.Outcome != Ignore {
			t.Errorf("%s: %s", name, d.Outcome)
		}
		w.in.Request = saved
	}
}

func TestZeroValuesDecideNothing(t *testing.T) {
	w := good(First)
	var none *Rules
	for _, rules := range []*Rules{none, {}} {
		if d := rules.Judge(w.in); d.Outcome != Ignore {
			t.Errorf("no policy: %s", d.Outcome)
		}
		if d := rules.JudgeSigning(goodSigning(First).in); d.Outcome != Ignore {
			t.Errorf("no policy, signing: %s", d.Outcome)
		}
	}
	rules := must(New(w.policy))
	if d := rules.Judge(Input{}); d.Outcome != Ignore {
		t.Errorf("no input: %s", d.Outcome)
	}
	if d := rules.Judge(Input{Request: w.in.Request, Hello: w.in.Hello}); d.Outcome != Deny {
		t.Errorf("a request alone: %s, %v", d.Outcome, d.Refusals)
	}
	if (Decision{}).Outcome == Ignore {
		t.Error("the zero decision is one")
	}
}

// They are labels of counters.
func TestNames(t *testing.T) {
	var names []string
	for o := Outcome(0); o <= SignServing; o++ {
		names = append(names, o.String())
	}
	for c := Class(0); c <= Serving; c++ {
		names = append(names, c.String())
	}
	want := "Outcome(0) Ignore Wait Deny Challenge Approve Fail Sign ApproveUnattested ApproveServing SignServing unknown first again renewal serving"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// What the node is told holds nothing of what the other side knows.
func TestMessagesHoldNoPolicy(t *testing.T) {
	w := good(First)
	w.in.Evidence.EK = ek2
	w.in.Machines[0].Names[0].Value = "secret-name"
	w.in.Machines[0].ProviderID = "secret://id"
	w.in.Records[0].NodeName = "secret-name"
	d := w.judge(t)
	if message := d.Refusals.Error(); d.Outcome != Deny || strings.Contains(message, "secret") || strings.Contains(message, ek1) {
		t.Errorf("%s: %s", d.Outcome, message)
	}
}

// The two halves have their own code for the same rules.
func TestSameRulesAsTheNode(t *testing.T) {
	for _, id := range []string{"", "x", providerID, strings.Repeat("x", maxProviderID), strings.Repeat("x", maxProviderID+1), "a b", "a\u00a0b", "a\u200bb", "a\x00", "\xff", "ü://x", "a\n"} {
		if got, want := isProviderID(id), csr.CheckProviderID(id) == nil; got != want {
			t.Errorf("%q: %t, the node says %t", id, got, want)
		}
	}
	if string(must(asn1.Marshal(csr.ProviderIDOID))) != string(element(tagOID, []byte(oidProviderID))) {
		t.Error("another OID")
	}
	for _, kind := range []string{"p256", "p384", "rsa2048"} {
		var refusals Refusals
		public := key(kind).Public()
		if checkUsages(&refusals, csr.Usages(public), public, certificatesv1.UsageClientAuth); refusals != nil {
			t.Errorf("%s: %v", kind, refusals)
		}
	}
	if InsecureSignerName != "cluster.x-k8s.io/kube-apiserver-client-kubelet-insecure" {
		t.Error("another signer")
	}
}

func TestElementIsDER(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 255, 256, 65535, 65536, 100000} {
		content := make([]byte, n)
		if got, want := element(tagOctetString, content), must(asn1.Marshal(content)); string(got) != string(want) {
			t.Errorf("%d bytes: % x..., want % x...", n, got[:2], want[:2])
		}
	}
}

// Only a request that is Pending is decided on, and only one that is Approved is signed.
func TestState(t *testing.T) {
	for _, c := range statetest.Cases() {
		w := first()
		w.in.Request.Status = c.Status
		if d := w.judge(t); (d.Outcome == Approve) != (c.State == state.Pending) || d.Outcome != Approve && d.Outcome != Ignore {
			t.Errorf("%s: %s, %v", c.Title, d.Outcome, d.Refusals)
		}
		w = signingOf(First)()
		w.in.Request.Status = c.Status
		if d := w.judge(t); (d.Outcome == Sign) != (c.State == state.Approved) || d.Outcome != Sign && d.Outcome != Ignore {
			t.Errorf("signing: %s: %s, %v", c.Title, d.Outcome, d.Refusals)
		}
	}
}

func suspend(ek string) func(*world) {
	return func(w *world) { w.in.SuspendedEKs = map[string]bool{ek: true} }
}

// Neither another record, nor another name, nor another machine in the inventory lets a suspended
// machine in. It learns this reason before any other.
func TestSuspendedMachine(t *testing.T) {
	t.Parallel()
	for name, bend := range map[string]func(*world){
		"as it was":             func(*world) {},
		"the record is deleted": func(w *world) { w.in.Records = w.in.Records[:1] },
		"entered under another name": func(w *world) {
			w.in.Records = w.in.Records[:1]
			w.machine().Ref.Name, w.machine().Names = "other", []NodeName{{NameMachine, nodeName}}
		},
		"no machine has it":                  func(w *world) { w.machine().EKs = nil; w.in.Records = w.in.Records[:1] },
		"the node name is another machine's": func(w *world) { w.in.Records[0].NodeName = nodeName },
		"another token":                      func(w *world) { w.in.Token = Token{Known: true} },
		"much else is wrong":                 func(w *world) { w.in.Evidence.AK = "a9"; w.in.Request.Spec.Usages = nil; w.in.Node = 0 },
	} {
		for class, world := range map[Class]func() *world{First: func() *world { return good(First) }, Again: func() *world { return good(Again) }, Renewal: func() *world { return good(Renewal) }} {
			w := world()
			suspend(ek1)(w)
			bend(w)
			d := w.judge(t)
			if d.Outcome != Deny || d.Refusals.Reason() != ReasonSuspended {
				t.Errorf("%s, %s: %v, %v", name, class, d.Outcome, d.Refusals)
			}
			hello := goodHello(class)
			suspend(ek1)(hello)
			hello.in.Records, hello.in.Machines = w.in.Records, w.in.Machines
			if d := hello.judge(t); d.Outcome != Deny || d.Refusals.Reason() != ReasonSuspended {
				t.Errorf("%s, hello of %s: %v, %v", name, class, d.Outcome, d.Refusals)
			}
		}
	}
}
