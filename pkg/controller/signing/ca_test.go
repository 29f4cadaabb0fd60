// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"testing"
	"time"
)

func TestParseCATakesEachKindOfKey(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"p256", "p384", "p521", "rsa2048", "rsa3072", "ed25519"} {
		root := newAuthority(t, "root", name, nil, nil)
		forms := map[string][]byte{"PKCS #8": root.keyPEM()}
		switch key := root.key.(type) {
		case *ecdsa.PrivateKey:
			sec1 := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: must(x509.MarshalECPrivateKey(key))})
			forms["SEC 1"] = sec1
			// as openssl ecparam -genkey writes it
			parameters := pem.EncodeToMemory(&pem.Block{Type: "EC PARAMETERS", Bytes: must(asn1.Marshal(asn1.ObjectIdentifier{1, 2, 840, 10045, 3, 1, 7}))})
			forms["SEC 1 with parameters"] = append(parameters, sec1...)
		case *rsa.PrivateKey:
			forms["PKCS #1"] = pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
		}
		for form, data := range forms {
			ca, err := parseCA(root.certPEM(), data, now())
			if err != nil {
				t.Errorf("%s, %s: %v", name, form, err)
				continue
			}
			if _, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader); err != nil {
				t.Errorf("%s, %s: %v", name, form, err)
			}
			if !ca.NotAfter().Equal(root.certificate.NotAfter) || ca.Fingerprint() != fingerprint(root.certificate.Raw) {
				t.Errorf("%s: ends %s, is %s", name, ca.NotAfter(), ca.Fingerprint())
			}
		}
	}
}

func TestParseCATakesAChain(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p384", nil, func(c *x509.Certificate) { c.MaxPathLen = 2 })
	upper := newAuthority(t, "upper", "rsa2048", root, func(c *x509.Certificate) {
		c.MaxPathLen = 1
		c.NotAfter = now().Add(time.Hour)
	})
	lower := newAuthority(t, "lower", "p256", upper, func(c *x509.Certificate) {
		c.MaxPathLenZero = true
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	})
	for name, above := range map[string][]*authority{"alone": nil, "without the root": {upper}, "with the root": {upper, root}} {
		ca := lower.parse(t, above...)
		chain, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want := lower.certPEM()
		if len(above) > 0 {
			want = append(want, upper.certPEM()...)
		}
		_, rest := pem.Decode(chain)
		if !bytes.Equal(rest, want) {
			t.Errorf("%s: handed out with it:\n%s", name, rest)
		}
		// No certificate outlives any of those that are needed to verify it.
		if leaf := leafOf(t, chain); len(above) > 0 && !leaf.NotAfter.Equal(upper.certificate.NotAfter) {
			t.Errorf("%s: ends %s", name, leaf.NotAfter)
		}
	}
}

func TestParseCAAllowsWhiteSpaceAround(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "p256", nil, nil)
	windows := bytes.ReplaceAll(root.certPEM(), []byte("\n"), []byte("\r\n"))
	if _, err := parseCA(append([]byte("\n\n "), windows...), append(root.keyPEM(), "\r\n\n"...), now()); err != nil {
		t.Error(err)
	}
}

func TestParseCARefuses(t *testing.T) {
	t.Parallel()
	good := newAuthority(t, "root", "p256", nil, nil)
	other := newAuthority(t, "other", "other p256", nil, nil)
	lower := newAuthority(t, "lower", "p384", good, nil)
	certificate, key := good.certPEM(), good.keyPEM()
	changed := func(change func(*x509.Certificate)) func() ([]byte, []byte) {
		return func() ([]byte, []byte) {
			a := newAuthority(t, "root", "p256", nil, change)
			return a.certPEM(), a.keyPEM()
		}
	}
	weak := func(name string) func() ([]byte, []byte) {
		return func() ([]byte, []byte) {
			a := newAuthority(t, "root", name, nil, nil)
			return a.certPEM(), a.keyPEM()
		}
	}
	pair := func(certificate, key []byte) func() ([]byte, []byte) {
		return func() ([]byte, []byte) { return certificate, key }
	}
	join := func(parts ...any) []byte {
		var out []byte
		for _, p := range parts {
			out = fmt.Appendf(out, "%s", p)
		}
		return out
	}
	block := func(kind string, headers map[string]string, content []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: kind, Headers: headers, Bytes: content})
	}
	raw := good.certificate.Raw
	for name, c := range map[string]struct {
		of   func() (certificate, key []byte)
		says string
	}{
		"nothing":                    {pair(nil, nil), "0 certificates"},
		"no certificate":             {pair([]byte("\n"), key), "0 certificates"},
		"no key":                     {pair(certificate, nil), "0 PEM blocks"},
		"files swapped":              {pair(key, certificate), `"PRIVATE KEY"`},
		"another's key":              {pair(certificate, other.keyPEM()), "not the certificate's"},
		"another kind of key":        {pair(certificate, keyPEM(makeKeys()["rsa2048"])), "not the certificate's"},
		"the key of the CA above":    {pair(lower.certPEM(good), key), "not the certificate's"},
		"DER":                        {pair(raw, key), "outside the PEM blocks"},
		"text before":                {pair(join("Certificate:\n    Data:\n", certificate), key), "outside the PEM blocks"},
		"text after":                 {pair(join(certificate, "x"), key), "outside the PEM blocks"},
		"text between":               {pair(join(lower.certPEM(), "# root\n", certificate), lower.keyPEM()), "outside the PEM blocks"},
		"text after the key":         {pair(certificate, join(key, "x")), "key: there is text outside"},
		"text before the key":        {pair(certificate, join("x\n", key)), "key: there is text outside"},
		"a broken block first":       {pair(join("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", certificate), key), "broken"},
		"a broken block last":        {pair(join(certificate, "-----BEGIN CERTIFICATE-----\nAAAA\n"), key), "broken"},
		"half a file":                {pair(certificate[:len(certificate)/2], key), "broken"},
		"half a key":                 {pair(certificate, key[:len(key)/2]), "key: there is a broken"},
		"garbage within":             {pair(block("CERTIFICATE", nil, append(bytes.Clone(raw), 0)), key), "certificate 1 does not parse"},
		"a header":                   {pair(block("CERTIFICATE", map[string]string{"a": "b"}, raw), key), "headers"},
		"a header on the key":        {pair(certificate, block("PRIVATE KEY", map[string]string{"a": "b"}, []byte{1})), "headers"},
		"an old encrypted key":       {pair(certificate, block("RSA PRIVATE KEY", map[string]string{"Proc-Type": "4,ENCRYPTED", "DEK-Info": "AES-256-CBC,00"}, []byte{1})), "encrypted"},
		"an encrypted key":           {pair(certificate, block("ENCRYPTED PRIVATE KEY", nil, []byte{1})), "encrypted"},
		"a trusted certificate":      {pair(block("TRUSTED CERTIFICATE", nil, raw), key), `"TRUSTED CERTIFICATE"`},
		"the key beside it":          {pair(join(certificate, key), key), "certificate 2 is a PEM block"},
		"a certificate beside a key": {pair(certificate, join(key, certificate)), "2 PEM blocks"},
		"two keys":                   {pair(certificate, join(key, key)), "2 PEM blocks"},
		"parameters without a key":   {pair(certificate, block("EC PARAMETERS", nil, []byte{6, 1, 1})), "not of type"},
		"parameters before PKCS #8":  {pair(certificate, join(block("EC PARAMETERS", nil, []byte{6, 1, 1}), key)), "2 PEM blocks"},
		"a public key":               {pair(certificate, block("PUBLIC KEY", nil, must(x509.MarshalPKIXPublicKey(good.key.Public())))), "not of type"},
		"a key that does not parse":  {pair(certificate, block("PRIVATE KEY", nil, []byte("secret"))), "does not parse"},
		"a key for agreement alone":  {pair(certificate, block("PRIVATE KEY", nil, must(x509.MarshalPKCS8PrivateKey(must(ecdh.X25519().GenerateKey(rand.Reader)))))), "does not parse"},
		"another label for the key":  {pair(certificate, block("RSA PRIVATE KEY", nil, must(x509.MarshalPKCS8PrivateKey(good.key)))), "does not parse"},
		"too long":                   {pair(join(certificate, strings.Repeat("\n", maxPEM)), key), "longer"},
		"too long a key":             {pair(certificate, join(key, strings.Repeat("\n", maxPEM))), "longer"},
		"too many":                   {pair(bytes.Repeat(lower.certPEM(), maxChain+1), lower.keyPEM()), "9 certificates"},

		"not a CA": {changed(func(c *x509.Certificate) { c.IsCA = false }), "not a CA's"},
		"no basic constraints": {changed(func(c *x509.Certificate) {
			c.IsCA, c.BasicConstraintsValid = false, false
		}), "not a CA's"},
		"no keyCertSign": {changed(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign }), "keyCertSign"},
		"no key usage":   {changed(func(c *x509.Certificate) { c.KeyUsage = 0 }), "keyCertSign"},
		"for servers only": {changed(func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}), "client authentication"},
		"for something unknown": {changed(func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = []asn1.ObjectIdentifier{{1, 2, 3}}
		}), "client authentication"},
		"a critical extension": {changed(func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
		}), "critical"},
		"no name":       {changed(func(c *x509.Certificate) { c.Subject = pkix.Name{} }), "no subject"},
		"expired":       {changed(func(c *x509.Certificate) { c.NotAfter = now().Add(-time.Second) }), "expired at 2026-11-03T11:59:59Z"},
		"not yet valid": {changed(func(c *x509.Certificate) { c.NotBefore = now().Add(2 * time.Second) }), "not valid before 2026-11-03T12:00:02Z"},
		"RSA 1024":      {weak("rsa1024"), "1024 bits"},
		"P-224":         {weak("p224"), "P-256"},

		"two roots": {pair(good.certPEM(other), key), "follows a self-signed one"},
		"not the issuer": {func() ([]byte, []byte) {
			return newAuthority(t, "lower", "p384", good, nil).certPEM(lower), lower.keyPEM()
		}, "not the issuer"},
		"a namesake of the issuer": {func() ([]byte, []byte) {
			return lower.certPEM(newAuthority(t, "root", "other p256", nil, nil)), lower.keyPEM()
		}, "not the issuer"},
		"the wrong order": {pair(good.certPEM(lower), key), "follows a self-signed one"},
		"a path too long": {func() ([]byte, []byte) {
			top := newAuthority(t, "top", "other p256", nil, func(c *x509.Certificate) { c.MaxPathLenZero = true })
			below := newAuthority(t, "below", "p256", top, nil)
			return below.certPEM(top), below.keyPEM()
		}, "allows 0 CAs below itself, and has 1"},
		"an expired one above": {func() ([]byte, []byte) {
			top := newAuthority(t, "top", "other p256", nil, func(c *x509.Certificate) { c.NotAfter = now().Add(-time.Hour) })
			below := newAuthority(t, "below", "p256", top, nil)
			return below.certPEM(top), below.keyPEM()
		}, "certificate 2 expired"},
		"a weak one above": {func() ([]byte, []byte) {
			top := newAuthority(t, "top", "rsa1024", nil, nil)
			below := newAuthority(t, "below", "p256", top, nil)
			return below.certPEM(top), below.keyPEM()
		}, "certificate 2 has a key"},
	} {
		t.Run(name, func(t *testing.T) {
			certificate, key := c.of()
			ca, err := parseCA(certificate, key, now())
			if err == nil || ca != nil {
				t.Fatalf("was accepted: %v, %v", ca, err)
			}
			var problem *CAError
			if !errors.As(err, &problem) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("does not say %q: %v", c.says, err)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("quotes the key: %v", err)
			}
		})
	}
}

// An exponent of 3 is not made by Go any more, so the numbers are put together by hand.
func TestCheckKeyRefusesOddRSA(t *testing.T) {
	t.Parallel()
	n := makeKeys()["rsa2048"].Public().(*rsa.PublicKey).N
	even := new(big.Int).SetBit(n, 0, 0)
	for name, key := range map[string]*rsa.PublicKey{
		"exponent 3": {N: n, E: 3}, "exponent 1": {N: n, E: 1}, "even exponent": {N: n, E: 65538}, "even modulus": {N: even, E: 65537},
		"no modulus": {E: 65537}, "none": nil,
	} {
		if err := checkKey(key, maxCARSA); err == nil {
			t.Errorf("%s: was accepted", name)
		}
	}
	if err := checkKey(&rsa.PublicKey{N: n, E: 65537}, maxCARSA); err != nil {
		t.Error(err)
	}
}

func TestZeroCARefuses(t *testing.T) {
	t.Parallel()
	for name, ca := range map[string]*CA{"nil": nil, "zero": {}} {
		var problem *CAError
		if chain, err := Issue(ca, grant(), DefaultLimits(), now(), rand.Reader); chain != nil || !errors.As(err, &problem) {
			t.Errorf("%s: got %q, %v", name, chain, err)
		}
		if !ca.NotAfter().IsZero() || ca.Fingerprint() != "" {
			t.Errorf("%s: says something of itself", name)
		}
	}
}

func TestPrintingACAShowsNoKey(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "root", "p256", nil, nil).parse(t)
	want := "signing CA " + ca.Fingerprint()
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		if got := fmt.Sprintf(format, ca); got != want {
			t.Errorf("%s: %s", format, got)
		}
		if got := fmt.Sprintf(format, *ca); got != want {
			t.Errorf("%s of the value: %s", format, got)
		}
	}
}
