// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// servingGrant returns a valid grant.
func servingGrant() ServingGrant {
	return ServingGrant{Grant: grant(), DNSNames: []string{"worker-1", "worker-1.example.com"}, IPs: addresses("192.0.2.11", "2001:db8::11", "10.0.0.11")}
}

func addresses(list ...string) []netip.Addr {
	var all []netip.Addr
	for _, a := range list {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

func issueServing(t testing.TB, ca *CA, g ServingGrant) (*x509.Certificate, []byte) {
	t.Helper()
	chain, err := IssueServing(ca, g, DefaultLimits(), now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return leafOf(t, chain), chain
}

// The test checks what a kubelet and the API server, its client, check, and what RFC 5280 requires.
func TestIssueServing(t *testing.T) {
	t.Parallel()
	for _, authorityKey := range []string{"rsa2048", "p256", "p384", "ed25519"} {
		root := newAuthority(t, "root", authorityKey, nil, nil)
		for key, usage := range map[string]x509.KeyUsage{
			"node p256": x509.KeyUsageDigitalSignature, "node p384": x509.KeyUsageDigitalSignature,
			"node rsa2048": x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		} {
			g := servingGrant()
			g.PublicKey = nodeKey(key)
			leaf, chain := issueServing(t, root.parse(t), g)
			if got := leaf.Subject.String(); got != "CN=system:node:worker-1.example.com,O=system:nodes" {
				t.Errorf("subject %s", got)
			}
			if !cache.SameKey(leaf, g.PublicKey) || leaf.IsCA || leaf.SerialNumber.BitLen() > 128 || leaf.SerialNumber.BitLen() < 64 {
				t.Errorf("another key, a CA, or serial number %x", leaf.SerialNumber)
			}
			if leaf.KeyUsage != usage || !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) || len(leaf.UnknownExtKeyUsage) > 0 {
				t.Errorf("%s: key usage %b, extended %v", key, leaf.KeyUsage, leaf.ExtKeyUsage)
			}
			if !slices.Equal(leaf.DNSNames, g.DNSNames) || fmt.Sprint(leaf.IPAddresses) != fmt.Sprint(g.IPs) || len(leaf.URIs)+len(leaf.EmailAddresses) > 0 {
				t.Errorf("alternative names %v, %v", leaf.DNSNames, leaf.IPAddresses)
			}
			begin := time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC)
			if !leaf.NotBefore.Equal(begin.Add(-5*time.Minute)) || !leaf.NotAfter.Equal(begin.Add(168*time.Hour)) {
				t.Errorf("valid from %s to %s", leaf.NotBefore, leaf.NotAfter)
			}
			if len(chain) > csr.MaxCertificate || cache.CheckNodeCertificate(leaf, g.NodeName, now()) == nil {
				t.Error("it is too long, or passes for a client's")
			}
			got := map[string]bool{}
			for _, e := range leaf.Extensions {
				got[e.Id.String()] = e.Critical
			}
			want := map[string]bool{"2.5.29.14": false, "2.5.29.15": true, "2.5.29.17": false, "2.5.29.19": true, "2.5.29.35": false, "2.5.29.37": false}
			if fmt.Sprint(got) != fmt.Sprint(want) || len(leaf.Extensions) != len(want) {
				t.Errorf("extensions %v", got)
			}
		}
	}
}

func TestIssueServingClamps(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		wish *int32
		ends time.Duration
		want time.Duration
	}{
		"none": {nil, 0, time.Hour}, "less": {seconds(600), 0, 10 * time.Minute}, "more": {seconds(86400), 0, 2 * time.Hour},
		"to the CA's end": {nil, 30 * time.Minute, 30 * time.Minute},
	} {
		ca := newAuthority(t, "root", "p256", nil, func(x *x509.Certificate) {
			if c.ends != 0 {
				x.NotAfter = begin.Add(c.ends)
			}
		}).parse(t)
		g := servingGrant()
		g.ExpirationSeconds = c.wish
		chain, err := IssueServing(ca, g, Limits{Default: time.Hour, Min: minLifetime, Max: 2 * time.Hour}, now(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if leaf := leafOf(t, chain); !leaf.NotAfter.Equal(begin.Add(c.want)) || !leaf.NotBefore.Equal(begin) {
			t.Errorf("%s: valid from %s to %s", name, leaf.NotBefore, leaf.NotAfter)
		}
	}
}

func TestIssueServingRefusesGrants(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	names := func(names ...string) func(*ServingGrant) { return func(g *ServingGrant) { g.DNSNames = names } }
	ips := func(ips ...netip.Addr) func(*ServingGrant) { return func(g *ServingGrant) { g.IPs = ips } }
	for name, bend := range map[string]func(*ServingGrant){
		"zero":                func(g *ServingGrant) { *g = ServingGrant{} },
		"neither name nor IP": func(g *ServingGrant) { g.DNSNames, g.IPs = nil, nil },
		"no node name":        func(g *ServingGrant) { g.NodeName = "" },
		"a group for a name":  func(g *ServingGrant) { g.NodeName = "a,O=system:masters" },
		"no key":              func(g *ServingGrant) { g.PublicKey = nil },
		"a weak key":          func(g *ServingGrant) { g.PublicKey = nodeKey("rsa1024") },
		"a second too few":    func(g *ServingGrant) { g.ExpirationSeconds = seconds(599) },
		"an empty name":       names(""),
		"a wildcard":          names("*.example.com"),
		"upper case":          names("Worker-1"),
		"a dot at the end":    names("worker-1."),
		"a NUL":               names("worker-1\x00.example.com"),
		"a URI":               names("spiffe://x/y"),
		"an email address":    names("a@example.com"),
		"two in one":          names("a,b"),
		"an IP as a name":     names("192.0.2.11"),
		"an IPv6 as a name":   names("2001:db8::11"),
		"a number at the end": names("a.1"),
		"a name twice":        names("worker-1", "worker-1"),
		"too long a name":     names(strings.Repeat("a.", 127)),
		"no IP":               ips(netip.Addr{}),
		"an IP twice":         ips(addresses("192.0.2.11", "192.0.2.11")...),
		"an IP in two forms":  ips(addresses("::ffff:192.0.2.11")...),
		"a zone":              ips(addresses("2001:db8::11%eth0")...),
		"loopback":            ips(addresses("127.0.0.1")...),
		"IPv6 loopback":       ips(addresses("::1")...),
		"link-local":          ips(addresses("169.254.169.254")...),
		"multicast":           ips(addresses("224.0.0.1")...),
		"any":                 ips(addresses("0.0.0.0")...),
		"any IPv6":            ips(addresses("::")...),
		"too many": func(g *ServingGrant) {
			for i := range maxAddresses {
				g.DNSNames = append(g.DNSNames, fmt.Sprintf("a%d", i))
			}
		},
	} {
		g := servingGrant()
		bend(&g)
		chain, err := IssueServing(ca, g, DefaultLimits(), now(), rand.Reader)
		var problem *grantError
		if chain != nil || !errors.As(err, &problem) || strings.ContainsAny(err.Error(), "\n\x00") {
			t.Errorf("%s: got %q, %v", name, chain, err)
		}
	}
	for name, g := range map[string]ServingGrant{
		"a name alone": {Grant: grant(), DNSNames: []string{"a"}},
		"an IP alone":  {Grant: grant(), IPs: addresses("10.0.0.1")},
	} {
		if leaf, _ := issueServing(t, ca, g); !slices.Equal(leaf.DNSNames, g.DNSNames) || len(leaf.IPAddresses) != len(g.IPs) {
			t.Errorf("%s: %v, %v", name, leaf.DNSNames, leaf.IPAddresses)
		}
	}
}

// A CA that may not sign serving certificates is a CAError. It may still sign client certificates.
func TestIssueServingUnderACAThatMayNot(t *testing.T) {
	t.Parallel()
	clientsOnly := func(x *x509.Certificate) { x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }
	root := newAuthority(t, "root", "p256", nil, nil)
	for name, c := range map[string]struct {
		ca *CA
		ok bool
	}{
		"for clients":           {newAuthority(t, "root", "p384", nil, clientsOnly).parse(t), false},
		"below one for clients": {newAuthority(t, "lower", "p384", newAuthority(t, "root", "p256", nil, clientsOnly), nil).parse(t, newAuthority(t, "root", "p256", nil, clientsOnly)), false},
		"an intermediate for both": {newAuthority(t, "lower", "p384", root, func(x *x509.Certificate) {
			x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
		}).parse(t, root), true},
		"for any use":         {newAuthority(t, "root", "p384", nil, func(x *x509.Certificate) { x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }).parse(t), true},
		"for others' names":   {newAuthority(t, "root", "p384", nil, func(x *x509.Certificate) { x.PermittedDNSDomains = []string{"example.org"} }).parse(t), false},
		"but for these names": {newAuthority(t, "root", "p384", nil, func(x *x509.Certificate) { x.ExcludedDNSDomains = []string{"example.com"} }).parse(t), false},
		"but for these IPs": {newAuthority(t, "root", "p384", nil, func(x *x509.Certificate) {
			x.ExcludedIPRanges = []*net.IPNet{{IP: net.IP{10, 0, 0, 0}, Mask: net.CIDRMask(8, 32)}}
		}).parse(t), false},
		"an intermediate, but for these names": {newAuthority(t, "lower", "p384", root, func(x *x509.Certificate) { x.ExcludedDNSDomains = []string{"example.com"} }).parse(t), false},
		"for these names, too":                 {newAuthority(t, "root", "p384", nil, func(x *x509.Certificate) { x.PermittedDNSDomains = []string{"worker-1", "example.com"} }).parse(t), true},
	} {
		if chain, err := Issue(c.ca, grant(), DefaultLimits(), now(), rand.Reader); err != nil || chain == nil {
			t.Errorf("%s: client: %v", name, err)
		}
		chain, err := IssueServing(c.ca, servingGrant(), DefaultLimits(), now(), rand.Reader)
		var problem *CAError
		if c.ok && err != nil || !c.ok && (chain != nil || !errors.As(err, &problem)) {
			t.Errorf("%s: got %q, %v", name, chain, err)
		}
	}
	var problem *CAError
	if chain, err := IssueServing(root.parse(t), servingGrant(), DefaultLimits(), root.certificate.NotAfter, rand.Reader); chain != nil || !errors.As(err, &problem) {
		t.Errorf("a CA that has expired: %q, %v", chain, err)
	}
	if chain, err := IssueServing(root.parse(t), servingGrant(), Limits{}, now(), rand.Reader); chain != nil || err == nil {
		t.Errorf("no limits: %q", chain)
	}
	ca := root.parse(t)
	ca.key = liar{ca.key}
	if chain, err := IssueServing(ca, servingGrant(), DefaultLimits(), now(), rand.Reader); chain != nil || err == nil {
		t.Errorf("a signature over something else: %q", chain)
	}
}

// verify refuses a serving certificate with a field of a client certificate.
func TestVerifyServing(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p256", nil, nil)
	ca := root.parse(t)
	use := purpose{x509.ExtKeyUsageServerAuth, []string{"worker-1", "worker-1.example.com"}, []net.IP{{192, 0, 2, 11}}}
	wanted := must(plan(ca, grant(), use, DefaultLimits(), now()))
	wanted.SerialNumber = big.NewInt(42)
	raw := func(der string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.DNSNames, c.IPAddresses = nil, nil
			c.ExtraExtensions = []pkix.Extension{{Id: []int{2, 5, 29, 17}, Value: []byte(der)}}
		}
	}
	const good = "\x82\x08worker-1\x82\x14worker-1.example.com\x87\x04\xc0\x00\x02\x0b"
	for name, change := range map[string]func(*x509.Certificate){
		"":       func(*x509.Certificate) {},
		"client": func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} },
		"client, too": func(c *x509.Certificate) {
			c.ExtKeyUsage = append(slices.Clone(c.ExtKeyUsage), x509.ExtKeyUsageClientAuth)
		},
		"no names":         func(c *x509.Certificate) { c.DNSNames, c.IPAddresses = nil, nil },
		"a name fewer":     func(c *x509.Certificate) { c.DNSNames = c.DNSNames[:1] },
		"a name more":      func(c *x509.Certificate) { c.DNSNames = append(slices.Clone(c.DNSNames), "worker-2") },
		"another order":    func(c *x509.Certificate) { c.DNSNames = []string{c.DNSNames[1], c.DNSNames[0]} },
		"another IP":       func(c *x509.Certificate) { c.IPAddresses = []net.IP{{192, 0, 2, 12}} },
		"an email address": func(c *x509.Certificate) { c.EmailAddresses = []string{"a@example.com"} },
		"an otherName":     raw("\x30\x2c" + good + "\xa0\x04\x06\x02\x2a\x03"),
		"critical":         func(c *x509.Certificate) { raw("\x30\x26" + good)(c); c.ExtraExtensions[0].Critical = true },
		"a CA":             func(c *x509.Certificate) { c.IsCA = true },
	} {
		other := *wanted
		change(&other)
		leaf := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, &other, root.certificate, grant().PublicKey, root.key))))
		if err := verify(leaf, wanted, ca, now()); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
	other := *wanted
	raw("\x30\x26" + good)(&other)
	leaf := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, &other, root.certificate, grant().PublicKey, root.key))))
	if err := verify(leaf, wanted, ca, now()); err != nil {
		t.Errorf("the names as RFC 5280 has them: %v", err)
	}
	clients := newAuthority(t, "root", "p256", nil, func(x *x509.Certificate) { x.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
	if err := verify(leaf, wanted, clients.parse(t), now()); err == nil {
		t.Error("was accepted under a CA whose certificates are not for servers")
	}
}

// An API server with only the root in its --kubelet-certificate-authority trusts the kubelet under
// each of its names and IPs, and under no others. It refuses a client certificate.
func TestClientAcceptsTheChain(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "rsa2048", nil, nil)
	ca := newAuthority(t, "lower", "p256", root, nil).parse(t)
	pool := x509.NewCertPool()
	pool.AddCert(root.certificate)
	_, serving := issueServing(t, ca, servingGrant())
	_, client := issue(t, ca, grant())
	for _, c := range []struct {
		chain []byte
		name  string
		ok    bool
	}{
		{serving, "worker-1", true}, {serving, "worker-1.example.com", true}, {serving, "192.0.2.11", true}, {serving, "2001:db8::11", true},
		{serving, "10.0.0.11", true}, {serving, "worker-2", false}, {serving, "192.0.2.12", false}, {serving, "system:node:worker-1.example.com", false},
		{client, "worker-1.example.com", false},
	} {
		pair := must(tls.X509KeyPair(c.chain, keyPEM(makeKeys()["node p256"])))
		inside, outside := net.Pipe()
		done := make(chan struct{})
		go func() {
			defer close(done)
			// the server's error has the cause
			_ = tls.Server(inside, &tls.Config{Certificates: []tls.Certificate{pair}}).Handshake()
		}()
		err := tls.Client(outside, &tls.Config{ServerName: c.name, RootCAs: pool, Time: now}).Handshake()
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
		_, _ = inside.Close(), outside.Close()
		<-done
	}
}
