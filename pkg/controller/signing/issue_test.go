// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"math/big"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

func issue(t testing.TB, ca *CA, g Grant) (*x509.Certificate, []byte) {
	t.Helper()
	chain, err := Issue(ca, g, DefaultLimits(), now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return leafOf(t, chain), chain
}

// Each kind of CA signs each kind of node key. The test checks what the node checks, and what RFC
// 5280 requires.
func TestIssue(t *testing.T) {
	t.Parallel()
	for authorityKey, algorithm := range map[string]x509.SignatureAlgorithm{
		"rsa2048": x509.SHA256WithRSA, "rsa3072": x509.SHA256WithRSA, "ed25519": x509.PureEd25519,
		"p256": x509.ECDSAWithSHA256, "p384": x509.ECDSAWithSHA384, "p521": x509.ECDSAWithSHA512,
	} {
		root := newAuthority(t, "root", authorityKey, nil, nil)
		ca := root.parse(t)
		for key, usage := range map[string]x509.KeyUsage{
			"node p256": x509.KeyUsageDigitalSignature, "node p384": x509.KeyUsageDigitalSignature,
			"node rsa2048": x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		} {
			g := Grant{NodeName: "worker-1.example.com", PublicKey: nodeKey(key)}
			leaf, chain := issue(t, ca, g)
			if err := cache.CheckNodeCertificate(leaf, g.NodeName, now()); err != nil {
				t.Errorf("the node refuses it: %v", err)
			}
			if canonical, _, err := csr.ParseCertificates(chain); err != nil || !bytes.Equal(canonical, chain) {
				t.Errorf("the node reads it otherwise: %v\n%s", err, canonical)
			}
			if !cache.SameKey(leaf, g.PublicKey) {
				t.Error("another key")
			}
			if got := leaf.Subject.String(); got != "CN=system:node:worker-1.example.com,O=system:nodes" {
				t.Errorf("subject %s", got)
			}
			if leaf.SignatureAlgorithm != algorithm || leaf.KeyUsage != usage {
				t.Errorf("%s, %s: algorithm %s, key usage %b", authorityKey, key, leaf.SignatureAlgorithm, leaf.KeyUsage)
			}
			if !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) || len(leaf.UnknownExtKeyUsage) > 0 {
				t.Errorf("extended key usages %v", leaf.ExtKeyUsage)
			}
			if len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.URIs)+len(leaf.EmailAddresses) > 0 {
				t.Error("it has alternative names")
			}
			if !bytes.Equal(leaf.AuthorityKeyId, root.certificate.SubjectKeyId) || len(leaf.SubjectKeyId) != 20 || bytes.Equal(leaf.SubjectKeyId, leaf.AuthorityKeyId) {
				t.Errorf("key identifiers %x, %x", leaf.SubjectKeyId, leaf.AuthorityKeyId)
			}
			begin := time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC)
			if !leaf.NotBefore.Equal(begin.Add(-5*time.Minute)) || !leaf.NotAfter.Equal(begin.Add(168*time.Hour)) {
				t.Errorf("valid from %s to %s", leaf.NotBefore, leaf.NotAfter)
			}
			if len(chain) > csr.MaxCertificate || bytes.Count(chain, []byte("BEGIN")) != 1 {
				t.Errorf("a root is handed out:\n%s", chain)
			}
		}
	}
}

// criticalities reads the extensions independently of verify.
func TestIssueMarksWhatIsCritical(t *testing.T) {
	t.Parallel()
	leaf, _ := issue(t, newAuthority(t, "root", "p256", nil, nil).parse(t), grant())
	got := map[string]bool{}
	for _, e := range leaf.Extensions {
		got[e.Id.String()] = e.Critical
	}
	for id, critical := range map[string]bool{"2.5.29.15": true, "2.5.29.19": true, "2.5.29.37": false, "2.5.29.14": false, "2.5.29.35": false} {
		if is, there := got[id]; !there || is != critical {
			t.Errorf("extension %s: there %v, critical %v", id, there, is)
		}
	}
	if len(got) != 5 || len(leaf.Extensions) != 5 {
		t.Errorf("%d extensions", len(leaf.Extensions))
	}
}

func TestSerialNumbers(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	seen := map[string]bool{}
	var union big.Int
	for range 64 {
		leaf, _ := issue(t, ca, grant())
		if seen[leaf.SerialNumber.String()] || leaf.SerialNumber.Sign() <= 0 || leaf.SerialNumber.BitLen() > 128 {
			t.Fatalf("serial number %x", leaf.SerialNumber)
		}
		seen[leaf.SerialNumber.String()] = true
		union.Or(&union, leaf.SerialNumber)
	}
	if union.BitLen() != 128 {
		t.Errorf("%d bits of randomness, not 128", union.BitLen())
	}
	// the largest: its first bit would make it negative
	all := bytes.NewReader(bytes.Repeat([]byte{0xff}, 4096))
	chain, err := Issue(ca, grant(), DefaultLimits(), now(), all)
	if err != nil {
		t.Fatal(err)
	}
	number := leafOf(t, chain).SerialNumber
	if der := must(asn1.Marshal(number)); number.Sign() <= 0 || len(der) > 2+20 {
		t.Errorf("serial number %x", der)
	}
}

func TestIssueNeedsRandomness(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	for name, random := range map[string]io.Reader{
		"none": nil, "empty": bytes.NewReader(nil), "short": bytes.NewReader(make([]byte, 15)), "zeros": bytes.NewReader(make([]byte, 4096)),
	} {
		if chain, err := Issue(ca, grant(), DefaultLimits(), now(), random); err == nil || chain != nil {
			t.Errorf("%s: was signed", name)
		}
	}
}

func TestLifetime(t *testing.T) {
	t.Parallel()
	begin := time.Date(2026, 11, 3, 12, 0, 0, 0, time.UTC)
	day := 24 * time.Hour
	for name, c := range map[string]struct {
		wish           *int32
		limits         Limits
		caFrom, caTo   time.Duration // from begin
		wantFrom, want time.Duration // want 0: refused for the CA's sake
	}{
		"none":                          {want: 7 * day},
		"the operator's default":        {limits: Limits{Default: day, Min: minLifetime, Max: maxLifetime}, want: day},
		"a wish":                        {wish: seconds(3600), want: time.Hour},
		"the least":                     {wish: seconds(600), want: 10 * time.Minute},
		"the most":                      {wish: seconds(7776000), limits: Limits{Default: day, Min: minLifetime, Max: maxLifetime}, want: 2160 * time.Hour},
		"too much":                      {wish: seconds(math.MaxInt32), want: 30 * day},
		"more than the operator allows": {wish: seconds(7 * 86400), limits: Limits{Default: time.Hour, Min: minLifetime, Max: day}, want: day},
		"less than the operator allows": {wish: seconds(600), limits: Limits{Default: time.Hour, Min: time.Hour, Max: day}, want: time.Hour},
		"to the CA's end":               {caTo: 3 * day, want: 3 * day},
		"a wish to the CA's end":        {wish: seconds(4 * 86400), caTo: 3 * day, want: 3 * day},
		"less than the operator's minimum to the CA's end": {wish: seconds(3600), limits: Limits{Default: 2 * time.Hour, Min: time.Hour, Max: day}, caTo: 30 * time.Minute, want: 30 * time.Minute},
		"ten minutes to the CA's end":                      {caTo: 10 * time.Minute, want: 10 * time.Minute},
		"almost ten minutes to the CA's end":               {caTo: 10*time.Minute - time.Second},
		"one second to the CA's end":                       {caTo: time.Second},
		"backdated by the operator":                        {limits: Limits{Default: day, Min: minLifetime, Max: maxLifetime, Backdate: time.Hour}, wantFrom: -time.Hour, want: day},
		"not backdated":                                    {limits: Limits{Default: day, Min: minLifetime, Max: maxLifetime}, want: day},
		"a CA of three minutes ago":                        {caFrom: -3 * time.Minute, wantFrom: -3 * time.Minute, want: 7 * day},
		// as good as 0, which is none
		"a CA of this second": {caFrom: time.Nanosecond, wantFrom: time.Nanosecond, want: 7 * day},
	} {
		t.Run(name, func(t *testing.T) {
			ca := newAuthority(t, "root", "p256", nil, func(x *x509.Certificate) {
				if c.caFrom != 0 {
					x.NotBefore = begin.Add(c.caFrom)
				}
				if c.caTo != 0 {
					x.NotAfter = begin.Add(c.caTo)
				}
			}).parse(t)
			g := grant()
			g.ExpirationSeconds = c.wish
			limits, from := c.limits, c.wantFrom
			if limits == (Limits{}) {
				limits = DefaultLimits()
				if from == 0 {
					from = -5 * time.Minute
				}
			}
			chain, err := Issue(ca, g, limits, now(), rand.Reader)
			if c.want == 0 {
				var problem *CAError
				if !errors.As(err, &problem) || chain != nil {
					t.Fatalf("got %q, %v", chain, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			leaf := leafOf(t, chain)
			if !leaf.NotBefore.Equal(begin.Add(from).Truncate(time.Second)) || !leaf.NotAfter.Equal(begin.Add(c.want)) {
				t.Errorf("valid from %s to %s", leaf.NotBefore, leaf.NotAfter)
			}
		})
	}
}

// The clock may use any time zone.
func TestIssueWritesUTC(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	chain, err := Issue(ca, grant(), DefaultLimits(), now().In(time.FixedZone("", 5*3600+1800)), rand.Reader)
	if err != nil || leafOf(t, chain).NotAfter.String() != "2026-11-10 12:00:00 +0000 UTC" {
		t.Errorf("%v: %s", err, chain)
	}
}

func TestIssueRefusesAtTheWrongTime(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p256", nil, nil)
	ca := root.parse(t)
	for name, at := range map[string]time.Time{
		"before": root.certificate.NotBefore.Add(-time.Second), "at the end": root.certificate.NotAfter, "zero": {},
		"after": root.certificate.NotAfter.Add(time.Hour),
	} {
		var problem *CAError
		if chain, err := Issue(ca, grant(), DefaultLimits(), at, rand.Reader); chain != nil || !errors.As(err, &problem) {
			t.Errorf("%s: got %q, %v", name, chain, err)
		}
	}
}

func TestIssueRefusesGrants(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	off := *nodeKey("node p256").(*ecdsa.PublicKey)
	off.X = new(big.Int).Add(off.X, big.NewInt(1)) //nolint:staticcheck // a point off the curve can only be made so
	modulus := nodeKey("node rsa2048").(*rsa.PublicKey).N
	huge := new(big.Int).SetBit(new(big.Int).Lsh(modulus, 2049), 0, 1)
	for name, g := range map[string]Grant{
		"zero":              {},
		"no name":           {PublicKey: nodeKey("node p256")},
		"no key":            {NodeName: "a"},
		"upper case":        {NodeName: "Worker", PublicKey: nodeKey("node p256")},
		"a prefix":          {NodeName: "system:node:a", PublicKey: nodeKey("node p256")},
		"two lines":         {NodeName: "a\n", PublicKey: nodeKey("node p256")},
		"a comma":           {NodeName: "a,O=system:masters", PublicKey: nodeKey("node p256")},
		"a NUL":             {NodeName: "a\x00b", PublicKey: nodeKey("node p256")},
		"too long a name":   {NodeName: strings.Repeat("a", 254), PublicKey: nodeKey("node p256")},
		"P-224":             {NodeName: "a", PublicKey: nodeKey("p224")},
		"P-521":             {NodeName: "a", PublicKey: nodeKey("p521")},
		"Ed25519":           {NodeName: "a", PublicKey: nodeKey("ed25519")},
		"RSA 1024":          {NodeName: "a", PublicKey: nodeKey("rsa1024")},
		"RSA 4097":          {NodeName: "a", PublicKey: &rsa.PublicKey{N: huge, E: 65537}},
		"RSA exponent 3":    {NodeName: "a", PublicKey: &rsa.PublicKey{N: modulus, E: 3}},
		"RSA nil":           {NodeName: "a", PublicKey: (*rsa.PublicKey)(nil)},
		"RSA empty":         {NodeName: "a", PublicKey: &rsa.PublicKey{}},
		"ECDSA nil":         {NodeName: "a", PublicKey: (*ecdsa.PublicKey)(nil)},
		"ECDSA empty":       {NodeName: "a", PublicKey: &ecdsa.PublicKey{}},
		"ECDSA no point":    {NodeName: "a", PublicKey: &ecdsa.PublicKey{Curve: elliptic.P256()}},
		"off the curve":     {NodeName: "a", PublicKey: &off},
		"a private key":     {NodeName: "a", PublicKey: makeKeys()["node p256"]},
		"a key by value":    {NodeName: "a", PublicKey: *nodeKey("node p256").(*ecdsa.PublicKey)},
		"a second too few":  {NodeName: "a", PublicKey: nodeKey("node p256"), ExpirationSeconds: seconds(599)},
		"no seconds":        {NodeName: "a", PublicKey: nodeKey("node p256"), ExpirationSeconds: seconds(0)},
		"negative":          {NodeName: "a", PublicKey: nodeKey("node p256"), ExpirationSeconds: seconds(-1)},
		"the most negative": {NodeName: "a", PublicKey: nodeKey("node p256"), ExpirationSeconds: seconds(math.MinInt32)},
	} {
		t.Run(name, func(t *testing.T) {
			chain, err := Issue(ca, g, DefaultLimits(), now(), rand.Reader)
			var problem *grantError
			if chain != nil || !errors.As(err, &problem) || strings.ContainsAny(err.Error(), "\n\x00") {
				t.Errorf("got %q, %v", chain, err)
			}
		})
	}
	if _, err := Issue(ca, Grant{NodeName: strings.Repeat("a.", 126) + "a", PublicKey: nodeKey("node p256")}, DefaultLimits(), now(), rand.Reader); err != nil {
		t.Errorf("the longest name: %v", err)
	}
}

func TestIssueRefusesLimits(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	for name, change := range map[string]func(*Limits){
		"zero":                  func(l *Limits) { *l = Limits{} },
		"no minimum":            func(l *Limits) { l.Min = 0 },
		"too small a minimum":   func(l *Limits) { l.Min = minLifetime - 1 },
		"too large a maximum":   func(l *Limits) { l.Max = maxLifetime + 1 },
		"no maximum":            func(l *Limits) { l.Max = 0 },
		"no default":            func(l *Limits) { l.Default = 0 },
		"default below minimum": func(l *Limits) { l.Min = l.Default + 1 },
		"default above maximum": func(l *Limits) { l.Max = l.Default - 1 },
		"begins in the future":  func(l *Limits) { l.Backdate = -1 },
		"begins long ago":       func(l *Limits) { l.Backdate = time.Hour + 1 },
	} {
		limits := DefaultLimits()
		change(&limits)
		if err := limits.Check(); err == nil {
			t.Errorf("%s: was accepted", name)
		}
		if chain, err := Issue(ca, grant(), limits, now(), rand.Reader); err == nil || chain != nil {
			t.Errorf("%s: was signed", name)
		}
	}
	if err := DefaultLimits().Check(); err != nil {
		t.Error(err)
	}
}

// A CA of long ago may have no key identifier; the certificate has the one that its key gives.
func TestIssueUnderACAWithoutKeyIdentifier(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p256", nil, nil)
	ca := root.parse(t)
	want := ca.chain[0].SubjectKeyId // Go makes it in the same way
	ca.chain[0].SubjectKeyId = nil
	if leaf, _ := issue(t, ca, grant()); !bytes.Equal(leaf.AuthorityKeyId, want) {
		t.Errorf("authority key identifier %x, not %x", leaf.AuthorityKeyId, want)
	}
}

// A key that does not belong to the CA is noticed before anything is returned.
func TestIssueVerifiesWhatItSigned(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	ca.key = makeKeys()["other p256"]
	if chain, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader); err == nil || chain != nil {
		t.Errorf("got %q, %v", chain, err)
	}
	ca = newAuthority(t, "root", "p256", nil, nil).parse(t)
	ca.key = liar{ca.key}
	if chain, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader); err == nil || chain != nil {
		t.Errorf("a signature over something else: got %q, %v", chain, err)
	}
}

// liar signs another digest.
type liar struct{ crypto.Signer }

func (l liar) Sign(random io.Reader, digest []byte, o crypto.SignerOpts) ([]byte, error) {
	return l.Signer.Sign(random, make([]byte, len(digest)), o)
}

// verify refuses each field that differs from the template.
func TestVerify(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p256", nil, nil)
	ca := root.parse(t)
	wanted := must(plan(ca, grant(), purpose{usage: x509.ExtKeyUsageClientAuth}, DefaultLimits(), now()))
	wanted.SerialNumber = big.NewInt(42)
	for name, change := range map[string]func(*x509.Certificate){
		"":              func(*x509.Certificate) {},
		"serial number": func(c *x509.Certificate) { c.SerialNumber = big.NewInt(43) },
		"subject":       func(c *x509.Certificate) { c.Subject.CommonName += "0" },
		"group":         func(c *x509.Certificate) { c.Subject.Organization = []string{"system:masters"} },
		"another group": func(c *x509.Certificate) { c.Subject.Organization = []string{nodesGroup, "system:masters"} },
		"unit":          func(c *x509.Certificate) { c.Subject.OrganizationalUnit = []string{"x"} },
		"begin":         func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(-time.Second) },
		"end":           func(c *x509.Certificate) { c.NotAfter = c.NotAfter.Add(time.Second) },
		"key usage":     func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign },
		"server":        func(c *x509.Certificate) { c.ExtKeyUsage = append(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth) },
		"any use":       func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} },
		"unknown use":   func(c *x509.Certificate) { c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{1, 2, 3}} },
		"a CA":          func(c *x509.Certificate) { c.IsCA = true },
		"no basic constraints": func(c *x509.Certificate) {
			c.BasicConstraintsValid = false
		},
		"a name": func(c *x509.Certificate) { c.DNSNames = []string{"x"} },
		"an IP":  func(c *x509.Certificate) { c.IPAddresses = []net.IP{{10, 0, 0, 1}} },
		"extension": func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: csr.ProviderIDOID, Value: []byte{5, 0}}}
		},
		"key ID":    func(c *x509.Certificate) { c.SubjectKeyId = []byte{1} },
		"no key ID": func(c *x509.Certificate) { c.SubjectKeyId = nil },
	} {
		other := *wanted
		change(&other)
		leaf := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, &other, root.certificate, grant().PublicKey, root.key))))
		if err := verify(leaf, wanted, ca, now()); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
	foreign := newAuthority(t, "root", "other p256", nil, nil)
	for name, der := range map[string][]byte{
		"another key":            must(x509.CreateCertificate(rand.Reader, wanted, root.certificate, nodeKey("node p384"), root.key)),
		"a CA of the same name":  must(x509.CreateCertificate(rand.Reader, wanted, foreign.certificate, grant().PublicKey, foreign.key)),
		"a CA above this one":    must(x509.CreateCertificate(rand.Reader, wanted, newAuthority(t, "x", "p256", nil, nil).certificate, grant().PublicKey, root.key)),
		"under the wrong parent": must(x509.CreateCertificate(rand.Reader, wanted, newAuthority(t, "x", "p384", nil, nil).certificate, grant().PublicKey, makeKeys()["p384"])),
	} {
		if err := verify(must(x509.ParseCertificate(der)), wanted, ca, now()); err == nil {
			t.Errorf("%s: was accepted", name)
		}
	}
	leaf := must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, wanted, root.certificate, grant().PublicKey, root.key))))
	if err := verify(leaf, wanted, ca, now().Add(-time.Hour)); err == nil {
		t.Error("was accepted before its time")
	}
}

// An API server with only the root in its --client-ca-file accepts the node, and sees its user
// name.
func TestServerAcceptsTheChain(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "rsa2048", nil, nil)
	lower := newAuthority(t, "lower", "p256", root, nil)
	for name, ca := range map[string]*CA{"root": root.parse(t), "intermediate": lower.parse(t), "intermediate with the root": lower.parse(t, root)} {
		for _, key := range []string{"node p256", "node p384", "node rsa2048"} {
			chain, err := Issue(ca, Grant{NodeName: "a", PublicKey: nodeKey(key)}, DefaultLimits(), now(), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			pair, err := tls.X509KeyPair(chain, keyPEM(makeKeys()[key]))
			if err != nil {
				t.Fatal(err)
			}
			server, err := tls.X509KeyPair(root.certPEM(), root.keyPEM())
			if err != nil {
				t.Fatal(err)
			}
			pool := x509.NewCertPool()
			pool.AddCert(root.certificate)
			inside, outside := net.Pipe()
			client := tls.Client(outside, &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true})
			done := make(chan error, 1)
			go func() {
				err := client.Handshake()
				if err == nil {
					_, err = client.Write([]byte("x"))
				}
				done <- err
			}()
			conn := tls.Server(inside, &tls.Config{Certificates: []tls.Certificate{server}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool, Time: now})
			if _, err := conn.Read(make([]byte, 1)); err != nil {
				t.Errorf("%s, %s: %v", name, key, err)
			} else if peer := conn.ConnectionState().VerifiedChains[0][0]; peer.Subject.CommonName != "system:node:a" {
				t.Errorf("%s, %s: it is %s", name, key, peer.Subject)
			}
			if err := <-done; err != nil {
				t.Errorf("%s, %s: %v", name, key, err)
			}
			_, _ = inside.Close(), outside.Close()
		}
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	leaf, chain := issue(t, newAuthority(t, "root", "p256", nil, nil).parse(t), grant())
	got, err := Fingerprint(chain)
	if err != nil || got != fingerprint(leaf.Raw) || len(got) != hex.EncodedLen(32) {
		t.Errorf("got %s, %v", got, err)
	}
	if commented, err := Fingerprint(append([]byte("subject=CN = x\n"), chain...)); err != nil || commented != got {
		t.Errorf("got %s, %v", commented, err)
	}
	for name, data := range map[string][]byte{
		"nothing": nil, "no PEM": leaf.Raw, "a key": keyPEM(makeKeys()["p256"]),
		"garbage": []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
	} {
		if got, err := Fingerprint(data); err == nil || got != "" {
			t.Errorf("%s: got %s", name, got)
		}
	}
}

func BenchmarkIssue(b *testing.B) {
	for _, key := range []string{"p256", "rsa2048"} {
		ca := newAuthority(b, "root", key, nil, nil).parse(b)
		b.Run(key, func(b *testing.B) {
			for b.Loop() {
				if _, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
