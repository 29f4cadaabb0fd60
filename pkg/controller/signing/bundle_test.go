// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"bytes"
	"crypto/x509"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// While a CA is rotated, the bundle has several CAs. The key decides which one signs.
func TestParseBundle(t *testing.T) {
	t.Parallel()
	ended := func(c *x509.Certificate) { c.NotAfter = now().Add(-time.Hour) }
	later := func(c *x509.Certificate) { c.NotAfter = now().Add(9 * 365 * 24 * time.Hour) }
	fromTomorrow := func(c *x509.Certificate) {
		later(c)
		c.NotBefore = now().Add(24 * time.Hour)
	}
	old, fresh := newAuthority(t, "old", "p256", nil, nil), newAuthority(t, "fresh", "rsa2048", nil, nil)
	below := newAuthority(t, "below", "p384", fresh, nil)
	renewed, early, expired := newAuthority(t, "fresh", "rsa2048", nil, later), newAuthority(t, "fresh", "rsa2048", nil, fromTomorrow), newAuthority(t, "old", "p256", nil, ended)
	namesake := newAuthority(t, "fresh", "p521", nil, nil)
	leaf := newAuthority(t, "no CA", "rsa3072", nil, func(c *x509.Certificate) { c.IsCA, c.KeyUsage = false, x509.KeyUsageDigitalSignature })
	for name, c := range map[string]struct {
		bundle []*authority
		key    *authority
		chain  []*authority
		says   string
	}{
		"one":                                 {[]*authority{old}, old, []*authority{old}, ""},
		"the old one still signs":             {[]*authority{old, fresh}, old, []*authority{old}, ""},
		"the new one signs":                   {[]*authority{old, fresh}, fresh, []*authority{fresh}, ""},
		"one below a root, in any order":      {[]*authority{fresh, old, below}, below, []*authority{below, fresh}, ""},
		"one below a root that is not there":  {[]*authority{below, old}, below, []*authority{below}, ""},
		"a namesake of its root":              {[]*authority{namesake, below, fresh}, below, []*authority{below, fresh}, ""},
		"two with one key: the later":         {[]*authority{fresh, renewed}, fresh, []*authority{renewed}, ""},
		"two with one key: the later not yet": {[]*authority{early, fresh}, fresh, []*authority{fresh}, ""},
		"the other has ended":                 {[]*authority{expired, fresh}, fresh, []*authority{fresh}, ""},
		"the key's has ended":                 {[]*authority{expired, fresh}, old, nil, "expired"},
		"the key of none":                     {[]*authority{old, fresh}, below, nil, "none of the 2"},
		"the key's is no CA":                  {[]*authority{fresh, leaf}, leaf, nil, "not a CA's"},
		"none":                                {nil, old, nil, "0 certificates"},
		"too many":                            {slices.Repeat([]*authority{old}, maxChain+1), old, nil, "9 certificates"},
	} {
		t.Run(name, func(t *testing.T) {
			var bundle []byte
			for _, a := range c.bundle {
				bundle = append(bundle, a.certPEM()...)
			}
			ca, err := parseBundle(bundle, c.key.keyPEM(), now())
			if c.says != "" {
				var problem *CAError
				if ca != nil || !errors.As(err, &problem) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("does not say %q: %v, %v", c.says, ca, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			same := func(got *x509.Certificate, want *authority) bool { return bytes.Equal(got.Raw, want.certificate.Raw) }
			if !slices.EqualFunc(ca.chain, c.chain, same) {
				t.Errorf("the chain has %d certificates, or others", len(ca.chain))
			}
		})
	}
}
