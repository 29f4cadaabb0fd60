// SPDX-License-Identifier: Apache-2.0

package verifier

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// servingRequest is what a kubelet files.
func servingRequest(key crypto.Signer, bend func(*x509.CertificateRequest)) []byte {
	r := &x509.CertificateRequest{
		Subject:     pkix.Name{Organization: []string{groupNodes}, CommonName: userNode + nodeName},
		DNSNames:    []string{nodeName, "worker-1.example.com"},
		IPAddresses: []net.IP{net.ParseIP("192.0.2.11"), net.ParseIP("2001:db8::11")},
	}
	if bend != nil {
		bend(r)
	}
	return []byte(block(attestation.BlockRequest, string(must(x509.CreateCertificateRequest(rand.Reader, r, key)))))
}

// goodServing is a request for a serving certificate with which nothing is wrong.
func goodServing() *world {
	w := good(Renewal)
	w.in.Request = object(Renewal, servingSigner, "serving", "x", goodPKCS10(key("p256")))
	w.in.Request.Spec.Request = servingRequest(key("p256"), nil)
	w.in.Request.Spec.Usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	w.in.Hello, w.in.Evidence = nil, Evidence{}
	w.machine().Addresses = Addresses{
		DNSNames: []string{"worker-1.example.com"}, IPs: []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")},
	}
	w.in.Machines[0].Addresses = Addresses{DNSNames: []string{"worker-2.example.com"}, IPs: []netip.Addr{netip.MustParseAddr("192.0.2.12")}}
	return w
}

// asking puts another request in, bent.
func asking(bend func(*x509.CertificateRequest)) func(*world) {
	return func(w *world) { w.in.Request.Spec.Request = servingRequest(key("p256"), bend) }
}

func names(names ...string) func(*world) {
	return asking(func(r *x509.CertificateRequest) { r.DNSNames, r.IPAddresses = names, nil })
}

func ips(ips ...string) func(*world) {
	return asking(func(r *x509.CertificateRequest) {
		r.DNSNames, r.IPAddresses = nil, nil
		for _, ip := range ips {
			r.IPAddresses = append(r.IPAddresses, net.ParseIP(ip))
		}
	})
}

// rawNames puts GeneralNames in DER into the one extension.
func rawNames(generalNames ...[]byte) func(*world) {
	return func(w *world) {
		d := draftOf(key("p256"))
		d.attributes = requestOfExtension(oidSubjectAltName, element(tagSequence, generalNames...))
		w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(d.sign())))
	}
}

func TestServing(t *testing.T) {
	bends := map[string]func(*world){
		"as a kubelet asks":      func(*world) {},
		"the node name alone":    names(nodeName),
		"an IP alone":            ips("192.0.2.11"),
		"a machine of few words": func(w *world) { w.machine().Addresses = Addresses{}; names(nodeName)(w) },
		"another proof is open":  func(w *world) { w.record().ProofPending = true },
		"another certificate is revoked": func(w *world) {
			w.record().Certificates = append(w.record().Certificates, Certificate{SHA256: "c9", NotAfter: testNow.Add(time.Hour), Revoked: true})
		},
		"being deleted": func(w *world) { w.machine().Deleted = testNow.Add(-time.Minute) },
		"RSA": func(w *world) {
			w.in.Request.Spec.Request = servingRequest(key("rsa2048"), nil)
			w.in.Request.Spec.Usages = append(w.in.Request.Spec.Usages, certificatesv1.UsageKeyEncipherment)
		},
	}
	for who, start := range servings() {
		for name, bend := range bends {
			t.Run(who+", "+name, func(t *testing.T) {
				w := start()
				want := ApproveServing
				if w.signing {
					want = SignServing
				}
				bend(w)
				d := w.judge(t)
				if d.Outcome != want || d.Class != Serving || len(d.Warnings) > 0 || d.Grant == nil || !reflect.DeepEqual(d.Grant.Record, Record{}) {
					t.Fatalf("%s, %s: %v, %+v", d.Outcome, d.Class, d.Refusals, d.Grant)
				}
				asked := must(x509.ParseCertificateRequest(must1(pem.Decode(w.in.Request.Spec.Request)).Bytes))
				var ips []net.IP
				for _, ip := range d.Grant.Addresses.IPs {
					ips = append(ips, ip.AsSlice())
				}
				if !slices.Equal(d.Grant.Addresses.DNSNames, asked.DNSNames) || !slices.EqualFunc(ips, asked.IPAddresses, net.IP.Equal) {
					t.Errorf("addresses %v", d.Grant.Addresses)
				}
				if d.Grant.NodeName != nodeName || !reflect.DeepEqual(d.Grant.PublicKey, asked.PublicKey) {
					t.Errorf("granted: %+v", d.Grant)
				}
				if most := d.Grant.MaxLifetime; (most != 0) != !w.machine().Deleted.IsZero() || most != 0 && most != time.Hour {
					t.Errorf("lifetime %s", most)
				}
			})
		}
	}
}

// servings are good requests: those that another signs, ours, and ours once approved.
func servings() map[string]func() *world {
	ours := func() *world {
		w := goodServing()
		w.in.Request.Spec.SignerName = oursToServe
		return w
	}
	return map[string]func() *world{
		"another's": goodServing, "ours": ours, "ours, approved": func() *world { return approvedToServe(ours()) },
	}
}

// approvedToServe has the request approved, by whomever.
func approvedToServe(w *world) *world {
	w.condition(certificatesv1.CertificateApproved)
	w.signing = true
	return w
}

func must1[A, B any](a A, _ B) A { return a }

func TestServingHostile(t *testing.T) {
	type reasons = []Reason
	dns := func(name string) []byte { return element(tagDNSName, []byte(name)) }
	for _, c := range []struct {
		name string
		bend func(*world)
		want Outcome
		why  reasons
	}{
		{"another node's DNS name", names("worker-2.example.com"), Deny, reasons{ReasonAddressMismatch}},
		{"another node's name", names("worker-2"), Deny, reasons{ReasonAddressMismatch}},
		{"another node's name beside its own", names(nodeName, "worker-2"), Deny, reasons{ReasonAddressMismatch}},
		{"another node's IP", ips("192.0.2.12"), Deny, reasons{ReasonAddressMismatch}},
		{"nobody's IP", ips("192.0.2.13"), Deny, reasons{ReasonAddressMismatch}},
		{"an IP that two machines are said to have", func(w *world) {
			w.in.Machines[0].Addresses.IPs = append(w.in.Machines[0].Addresses.IPs, netip.MustParseAddr("192.0.2.11"))
		}, Deny, reasons{ReasonAddressMismatch}},
		{"the API server's name", names("api.example.com"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"the API server's name, said to be the machine's", func(w *world) {
			w.machine().Addresses.DNSNames = []string{"api.example.com"}
			names("api.example.com")(w)
		}, Deny, reasons{ReasonAddressForbidden}},
		{"the API server's address, said to be the machine's", func(w *world) {
			w.machine().Addresses.IPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
			ips("192.0.2.1")(w)
		}, Deny, reasons{ReasonAddressForbidden}},
		{"a service's address, said to be the machine's", func(w *world) {
			w.machine().Addresses.IPs = []netip.Addr{netip.MustParseAddr("10.96.0.1")}
			ips("10.96.0.1")(w)
		}, Deny, reasons{ReasonAddressForbidden}},
		{"an IPv6 service's address", ips("2001:db8:ffff::1"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"kubernetes", names("kubernetes"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"kubernetes.default.svc", names("kubernetes.default.svc"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"a service's name", names("a.b.svc.cluster.local"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"localhost", names("localhost"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"x.localhost", names("x.localhost"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"loopback", ips("127.0.0.1"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"IPv6 loopback", ips("::1"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"link-local", ips("169.254.169.254"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"multicast", ips("224.0.0.1"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"any", ips("0.0.0.0"), Deny, reasons{ReasonAddressForbidden, ReasonAddressMismatch}},
		{"a wildcard", names("*.example.com"), Deny, reasons{ReasonForbiddenExtension}},
		{"capitals", names("Worker-1"), Deny, reasons{ReasonForbiddenExtension}},
		{"an IP as a DNS name", names("192.0.2.11"), Deny, reasons{ReasonForbiddenExtension}},
		{"a number as a DNS name", names("a.1"), Deny, reasons{ReasonForbiddenExtension}},
		{"a name with a zero byte", rawNames(dns("worker-1\x00.example.com")), Deny, reasons{ReasonForbiddenExtension}},
		{"a name twice", rawNames(dns(nodeName), dns(nodeName)), Deny, reasons{ReasonForbiddenExtension}},
		{"no names at all", names(), Deny, reasons{ReasonForbiddenExtension}},
		{"an empty extension", rawNames(), Deny, reasons{ReasonForbiddenExtension}},
		{"an IPv4 address in 16 bytes", rawNames(element(tagIPAddress, net.ParseIP("192.0.2.11").To16())), Deny, reasons{ReasonForbiddenExtension}},
		{"an address of 5 bytes", rawNames(element(tagIPAddress, []byte{192, 0, 2, 11, 0})), Deny, reasons{ReasonForbiddenExtension}},
		{"an address and mask", rawNames(element(tagIPAddress, []byte{192, 0, 2, 11, 255, 255, 255, 0})), Deny, reasons{ReasonForbiddenExtension}},
		{"an otherName", rawNames(dns(nodeName), element(0xa0, element(tagOID, []byte("\x2b\x06")), element(0xa0, element(tagUTF8, []byte("x"))))), Deny, reasons{ReasonForbiddenExtension}},
		{"a long form of length", rawNames(append([]byte{tagDNSName, 0x81, byte(len(nodeName))}, nodeName...)), Deny, reasons{ReasonForbiddenExtension}},
		{"too many", func(w *world) {
			var all [][]byte
			for i := range maxAddresses + 1 {
				all = append(all, element(tagIPAddress, []byte{192, 0, 2, byte(i)}))
			}
			rawNames(all...)(w)
		}, Deny, reasons{ReasonForbiddenExtension}},
		{"a URI", asking(func(r *x509.CertificateRequest) { r.URIs = []*url.URL{must(url.Parse("spiffe://x/y"))} }), Deny, reasons{ReasonForbiddenExtension}},
		{"an email address", asking(func(r *x509.CertificateRequest) { r.EmailAddresses = []string{"a@example.com"} }), Deny, reasons{ReasonForbiddenExtension}},
		{"another extension, too", asking(func(r *x509.CertificateRequest) {
			r.ExtraExtensions = []pkix.Extension{providerIDExtension(providerID)}
		}), Deny, reasons{ReasonForbiddenExtension}},
		{"critical", func(w *world) {
			d := draftOf(key("p256"))
			d.attributes = extensionRequest(element(tagSequence, element(tagOID, []byte(oidSubjectAltName)), []byte{1, 1, 0xff},
				element(tagOctetString, element(tagSequence, dns(nodeName)))))
			w.in.Request.Spec.Request = []byte(block(attestation.BlockRequest, string(d.sign())))
		}, Deny, reasons{ReasonForbiddenExtension}},

		{"another node's subject", asking(func(r *x509.CertificateRequest) { r.Subject.CommonName = userNode + "worker-2" }), Deny,
			reasons{ReasonRequesterNotAllowed, ReasonUnknownCredential, ReasonAddressMismatch}},
		{"an administrator's subject", asking(func(r *x509.CertificateRequest) { r.Subject.Organization = []string{groupMasters} }), Deny, reasons{ReasonSubjectMismatch}},
		{"client auth", usages("digital signature", "client auth"), Deny, reasons{ReasonUsageMismatch}},
		{"client auth, too", usages("digital signature", "client auth", "server auth"), Deny, reasons{ReasonUsageMismatch}},
		{"key encipherment without RSA", usages("digital signature", "key encipherment", "server auth"), Deny, reasons{ReasonUsageMismatch}},
		{"a weak key", func(w *world) { w.in.Request.Spec.Request = servingRequest(key("p224"), nil) }, Deny, reasons{ReasonUnsupportedKey}},
		{"bytes behind", func(w *world) { w.in.Request.Spec.Request = append(w.in.Request.Spec.Request, '\n') }, Deny, reasons{ReasonMalformedRequest}},
		{"a bootstrap identity", user("system:bootstrap:abc123", "system:bootstrappers"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"another node", user(userNode+"worker-2", groupNodes), Deny, reasons{ReasonRequesterNotAllowed}},
		{"not in the nodes' group", user(userNode+nodeName, "system:authenticated"), Deny, reasons{ReasonRequesterNotAllowed}},
		{"a certificate in no record", credential(x509Prefix + "ff"), Deny, reasons{ReasonUnknownCredential}},
		{"a recovered certificate", func(w *world) { w.record().Certificates[0].Recovered = true }, Deny, reasons{ReasonUnknownCredential}},
		{"no credential", func(w *world) { w.in.Request.Spec.Extra = nil }, Deny, reasons{ReasonUnknownCredential}},
		{"a revoked certificate", func(w *world) { w.record().Certificates[0].Revoked = true }, Deny, reasons{ReasonCertificateRevoked}},
		{"a revoked certificate, whatever the policy", func(w *world) {
			w.policy.Credential, w.record().Certificates[0].Revoked = Off, true
		}, Deny, reasons{ReasonCertificateRevoked}},
		{"T2: suspended", suspend(ek1), Deny, reasons{ReasonSuspended}},
		{"T2: suspended, and its machine is gone", func(w *world) { suspend(ek1)(w); w.in.Machines = w.in.Machines[:1] }, Deny, reasons{ReasonSuspended}},
		{"T2: suspended, and much else", func(w *world) {
			suspend(ek1)(w)
			w.record().Cluster, w.record().Certificates = "c2", nil
			names("worker-2")(w)
		}, Deny, reasons{ReasonSuspended, ReasonIdentityBound, ReasonAddressMismatch}},
		{"T2: suspended, and two records", func(w *world) {
			suspend(ek1)(w)
			w.in.Records, w.machine().EKs = append(w.in.Records, recordOf(nodeName, "e9")), nil
		}, Deny, reasons{ReasonSuspended, ReasonIdentityBound}},
		{"T2: not known", func(w *world) { w.in.SuspensionsUnknown = true }, Wait, reasons{ReasonSuspensionsUnknown}},
		{"the record is of another cluster", func(w *world) { w.record().Cluster = "c2" }, Deny, reasons{ReasonIdentityBound}},
		{"it never showed evidence", func(w *world) { w.record().Provider = InsecureProvider }, Deny, reasons{ReasonProviderMismatch}},
		{"two records", func(w *world) { w.in.Records = append(w.in.Records, recordOf(nodeName, "e9")) }, Deny, reasons{ReasonIdentityBound}},
		{"the machine has long been deleted", deleted(2 * time.Hour), Deny, reasons{ReasonMachineDeleting}},

		{"no record yet", func(w *world) { w.in.Records = w.in.Records[:1] }, Wait, reasons{ReasonMachineNotFound}},
		{"no record for long", func(w *world) { w.in.Records = w.in.Records[:1]; w.created(time.Hour) }, Deny, reasons{ReasonMachineNotFound}},
		{"the machine is not known", func(w *world) { w.in.Machines = w.in.Machines[:1] }, Wait, reasons{ReasonMachineNotFound}},
		{"the machine is not ready, or paused", func(w *world) { w.machine().Ready = false }, Wait, reasons{ReasonMachineNotReady}},
		{"the machine is not ready for long", func(w *world) { w.machine().Ready = false; w.created(time.Hour) }, Deny, reasons{ReasonMachineNotReady}},
		{"no addresses yet", func(w *world) { w.machine().Addresses = Addresses{} }, Wait, reasons{ReasonAddressUnknown}},
		{"names, and no IPs yet", func(w *world) { w.machine().Addresses.IPs = nil }, Wait, reasons{ReasonAddressUnknown}},
		{"IPs, and no names yet", func(w *world) { w.machine().Addresses.DNSNames = nil }, Wait, reasons{ReasonAddressUnknown}},
		{"no addresses yet, and one forbidden", func(w *world) { w.machine().Addresses = Addresses{}; ips("10.96.0.1")(w) }, Deny, reasons{ReasonAddressForbidden}},
		{"the certificate is yet to be noted", func(w *world) { w.record().Certificates = nil }, Wait, reasons{ReasonUnknownCredential}},
		{"over the rate", func(w *world) { w.rateLimited = true }, Wait, reasons{ReasonRateLimited}},
		{"no time", func(w *world) { w.in.Now = time.Time{} }, Deny, reasons{ReasonRefused}},
	} {
		for who, start := range servings() {
			t.Run(who+", "+c.name, func(t *testing.T) {
				w, want := start(), c.want
				if w.signing && want == Deny {
					want = Fail
				}
				c.bend(w)
				d := w.judge(t)
				if d.Outcome != want || !slices.Equal(d.Refusals.Reasons(), c.why) {
					t.Errorf("%s, %v, want %s, %v", d.Outcome, d.Refusals, want, c.why)
				}
				if d.Grant != nil {
					t.Errorf("granted: %+v", d.Grant)
				}
			})
		}
	}
}

// If the policy only warns, a node whose record has another EK than is named for its machine
// continues, and there is a warning: in serving, too.
func TestServingWithAnotherEK(t *testing.T) {
	for who, start := range servings() {
		w := start()
		w.policy.EKNotNamed, w.machine().EKs = Warn, []NamedEK{{EKInventory, "e9"}}
		if d := w.judge(t); d.Outcome != ApproveServing && d.Outcome != SignServing || !slices.Equal(d.Warnings.Reasons(), []Reason{ReasonEKNotNamed}) {
			t.Errorf("%s: %s, %v, warnings %v", who, d.Outcome, d.Refusals, d.Warnings)
		}
	}
}

// What is not for us to decide, or to sign.
func TestServingIgnored(t *testing.T) {
	for name, bend := range map[string]func(*world){
		"signer not served":         func(w *world) { w.policy.ServingSigners, w.policy.SignedServingSigners = nil, nil },
		"another signer":            func(w *world) { w.in.Request.Spec.SignerName = "example.com/serving" },
		"a node that is left alone": func(w *world) { w.policy.UnattestedNodes, w.in.Records = []string{nodeName}, nil },
		"denied":                    func(w *world) { w.condition(certificatesv1.CertificateDenied) },
		"failed":                    func(w *world) { w.condition(certificatesv1.CertificateFailed) },
		"issued":                    func(w *world) { w.in.Request.Status.Certificate = []byte("x") },
	} {
		for who, start := range servings() {
			w := start()
			bend(w)
			if d := w.judge(t); d.Outcome != Ignore || d.Grant != nil {
				t.Errorf("%s, %s: %s, %v", who, name, d.Outcome, d.Refusals)
			}
		}
	}
	for name, w := range map[string]*world{
		"another's, approved": approvedToServe(servings()["another's"]()),
		"ours, not approved":  func() *world { w := servings()["ours"](); w.signing = true; return w }(),
		"ours, approved, nothing to sign any more": func() *world {
			w := servings()["ours, approved"]()
			w.policy.SignedServingSigners = nil
			return w
		}(),
		"ours, approved, asked as if it were not": func() *world { w := servings()["ours, approved"](); w.signing = false; return w }(),
	} {
		if d := w.judge(t); d.Outcome != Ignore || d.Grant != nil {
			t.Errorf("%s: %s, %v", name, d.Outcome, d.Refusals)
		}
	}
}

// A node that is listed and has attested all the same is one like others.
func TestServingOfAListedNodeWithARecord(t *testing.T) {
	for who, start := range servings() {
		w := start()
		w.policy.UnattestedNodes = []string{nodeName}
		if d := w.judge(t); d.Outcome != ApproveServing && d.Outcome != SignServing {
			t.Errorf("%s: %s, %v", who, d.Outcome, d.Refusals)
		}
	}
}

// What is ours to sign waits for a CA. What another signs does not.
func TestServingWithoutCA(t *testing.T) {
	for who, want := range map[string][4]Outcome{ // soon, late, and hostile with and without a CA
		"another's": {ApproveServing, ApproveServing, Deny, Deny}, "ours": {Wait, Deny, Deny, Deny}, "ours, approved": {Wait, Fail, Fail, Fail},
	} {
		for i, bend := range []func(*world){
			func(w *world) { w.in.SignerUnavailable = true },
			func(w *world) { w.in.SignerUnavailable = true; w.created(time.Hour) },
			func(w *world) { w.in.SignerUnavailable = true; names("worker-2")(w) },
			names("worker-2"),
		} {
			w := servings()[who]()
			bend(w)
			d := w.judge(t)
			var why []Reason
			switch {
			case want[i] == Wait, want[i] != ApproveServing && i == 1:
				why = []Reason{ReasonSignerUnavailable}
			case i > 1:
				why = []Reason{ReasonAddressMismatch}
			}
			if d.Outcome != want[i] || !slices.Equal(d.Refusals.Reasons(), why) {
				t.Errorf("%s, %d: %s, %v, want %s, %v", who, i, d.Outcome, d.Refusals, want[i], why)
			}
		}
	}
	if rules := must(New(goodPolicy())); !rules.SignsServing(oursToServe) || rules.SignsServing(servingSigner) || rules.SignsServing("") || (*Rules)(nil).SignsServing(oursToServe) {
		t.Error("another signer is ours")
	}
}

// An approval is worth nothing by itself: what has changed since counts, and what never held.
func TestServingSignedAfterAChange(t *testing.T) {
	for name, c := range map[string]struct {
		bend func(*world)
		want Outcome
		why  []Reason
	}{
		"the address is gone":                           {func(w *world) { w.machine().Addresses.IPs = w.machine().Addresses.IPs[:1] }, Fail, []Reason{ReasonAddressMismatch}},
		"another has the address":                       {func(w *world) { w.in.Machines[0].Addresses = w.machine().Addresses }, Fail, []Reason{ReasonAddressMismatch}},
		"the address is forbidden":                      {func(w *world) { w.policy.ForbiddenAddresses = []string{"192.0.2.0/24"} }, Fail, []Reason{ReasonAddressForbidden}},
		"the addresses are unknown":                     {func(w *world) { w.machine().Addresses = Addresses{} }, Wait, []Reason{ReasonAddressUnknown}},
		"the record is gone":                            {func(w *world) { w.in.Records = w.in.Records[:1] }, Wait, []Reason{ReasonMachineNotFound}},
		"the certificate has ended":                     {func(w *world) { w.record().Certificates[0].SHA256 = "c9" }, Fail, []Reason{ReasonUnknownCredential}},
		"approved by somebody, of a bootstrap identity": {user("system:bootstrap:abc123", "system:bootstrappers"), Fail, []Reason{ReasonRequesterNotAllowed}},
		"approved by somebody, with evidence": {func(w *world) {
			w.in.Request.Spec.Request = good(Renewal).in.Request.Spec.Request
		}, Fail, []Reason{ReasonMalformedRequest}},
	} {
		w := servings()["ours, approved"]()
		c.bend(w)
		if d := w.judge(t); d.Outcome != c.want || !slices.Equal(d.Refusals.Reasons(), c.why) || d.Grant != nil {
			t.Errorf("%s: %s, %v, want %s, %v", name, d.Outcome, d.Refusals, c.want, c.why)
		}
	}
}
