// SPDX-License-Identifier: Apache-2.0

package signing

import (
	"crypto/x509"
	"testing"
	"time"
)

// The API server accepts a CA whose chain leads to a certificate of its bundle, and verifies all of
// the chain.
func TestCheckTrusted(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", "rsa2048", nil, nil)
	narrow := newAuthority(t, "narrow", "p384", nil, func(c *x509.Certificate) { c.MaxPathLenZero = true })
	expired := newAuthority(t, "root", "rsa2048", nil, func(c *x509.Certificate) { c.NotAfter = now().Add(-time.Hour) })
	serving := newAuthority(t, "root", "rsa2048", nil, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
	namesake := newAuthority(t, "root", "other p256", nil, nil)
	lower := newAuthority(t, "lower", "p256", root, nil)
	lowest := newAuthority(t, "lowest", "ed25519", lower, nil)
	belowNarrow := newAuthority(t, "below", "p256", narrow, nil)
	for title, c := range map[string]struct {
		ca      *CA
		trusted []*authority
		want    bool
	}{
		"the root":                           {root.parse(t), []*authority{root}, true},
		"one of several":                     {root.parse(t), []*authority{narrow, namesake, root}, true},
		"another":                            {root.parse(t), []*authority{narrow}, false},
		"another of the same name":           {root.parse(t), []*authority{namesake}, false},
		"none":                               {root.parse(t), nil, false},
		"an intermediate, by the root":       {lower.parse(t), []*authority{root}, true},
		"an intermediate, by itself":         {lower.parse(t), []*authority{lower}, true},
		"by the root, over what is given":    {lowest.parse(t, lower), []*authority{root}, true},
		"by the root, over what is not":      {lowest.parse(t), []*authority{root}, false},
		"by the one in the middle":           {lowest.parse(t), []*authority{lower}, true},
		"with the root, by another":          {lower.parse(t, root), []*authority{narrow}, false},
		"a root that allows no intermediate": {belowNarrow.parse(t), []*authority{narrow}, false},
		"an expired root":                    {lower.parse(t), []*authority{expired}, false},
		"a root for serving certificates":    {lower.parse(t), []*authority{serving}, false},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			var trusted []*x509.Certificate
			for _, a := range c.trusted {
				trusted = append(trusted, a.certificate)
			}
			if err := c.ca.CheckTrusted(trusted, now()); (err == nil) != c.want {
				t.Errorf("%v", err)
			}
		})
	}
	if err := (&CA{}).CheckTrusted([]*x509.Certificate{root.certificate}, now()); err == nil {
		t.Error("the zero value is trusted")
	}
}
