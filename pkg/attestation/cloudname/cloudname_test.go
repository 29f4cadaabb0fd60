// SPDX-License-Identifier: Apache-2.0

package cloudname

import (
	"strings"
	"testing"
)

const id = "i-0123456789abcdef0"

func TestEC2ProviderID(t *testing.T) {
	for _, c := range []struct{ name, zone, instance, region string }{
		{"availability zone", "eu-west-1a", id, "eu-west-1"},
		{"region with two digits", "eu-west-10a", id, "eu-west-10"},
		{"local zone", "us-west-2-lax-1a", id, "us-west-2"},
		{"Wavelength zone", "us-east-1-wl1-bos-wlz-1", id, "us-east-1"},
		{"government", "us-gov-west-1b", id, "us-gov-west-1"},
		{"sovereign cloud", "eusc-de-east-1a", id, "eusc-de-east-1"},
		{"old ID", "eu-west-1a", "i-01234567", "eu-west-1"},
		{"longest zone", "eu-" + strings.Repeat("w", maxZone-6) + "-1a", id, "eu-" + strings.Repeat("w", maxZone-6) + "-1"},
		{"zone too long", "eu-" + strings.Repeat("w", maxZone-5) + "-1a", id, ""},
		{"no zone", "", id, ""},
		{"region without suffix", "eu-west-1", id, ""},
		{"two letters", "eu-west-1ab", id, ""},
		{"three digits", "eu-west-100a", id, ""},
		{"numbers for names", "zz-99-99", id, ""},
		{"upper case", "EU-WEST-1A", id, ""},
		{"slash in zone", "eu-west-1a/x", id, ""},
		{"slash before zone", "/eu-west-1a", id, ""},
		{"line end after zone", "eu-west-1a\n", id, ""},
		{"no instance", "eu-west-1a", "", ""},
		{"another name", "eu-west-1a", "worker", ""},
		{"ID with 9 digits", "eu-west-1a", "i-012345678", ""},
		{"ID in upper case", "eu-west-1a", "I-0123456789ABCDEF0", ""},
		{"slash after ID", "eu-west-1a", id + "/", ""},
		{"line end after ID", "eu-west-1a", id + "\n", ""},
	} {
		text := "aws:///" + c.zone + "/" + c.instance
		region, instance, ok := ParseEC2ProviderID(text)
		if region != c.region || ok != (c.region != "") || ok && instance != c.instance {
			t.Errorf("%s: %q, %q, %v", c.name, region, instance, ok)
		}
		if got := EC2ProviderID(c.zone, c.instance); ok && got != text || !ok && got != "" {
			t.Errorf("%s: provider ID %q", c.name, got)
		}
		if ok && !IsEC2Region(region) {
			t.Errorf("%s: %q is no region", c.name, region)
		}
	}
	for _, providerID := range []string{
		"", id, "eu-west-1a/" + id, "aws:///" + id, "aws://eu-west-1a/" + id, "aws://host/eu-west-1a/" + id,
		"AWS:///eu-west-1a/" + id, "gce:///eu-west-1a/" + id, " aws:///eu-west-1a/" + id,
	} {
		if region, instance, ok := ParseEC2ProviderID(providerID); ok {
			t.Errorf("%q: %q, %q", providerID, region, instance)
		}
	}
}

func TestForms(t *testing.T) {
	const guid = "01234567-89ab-cdef-0123-456789abcdef"
	for _, c := range []struct {
		name string
		is   func(string) bool
		text string
		want bool
	}{
		{"region", IsEC2Region, "eu-west-1", true},
		{"region of a sovereign cloud", IsEC2Region, "eusc-de-east-1", true},
		{"region", IsEC2Region, "eu-west-1a", false},
		{"region", IsEC2Region, "eu-west-1\n", false},
		{"region", IsEC2Region, "eu-1", false},
		{"region", IsEC2Region, "", false},
		{"account", IsAWSAccount, "123456789012", true},
		{"account", IsAWSAccount, "12345678901", false},
		{"account", IsAWSAccount, "1234567890123", false},
		{"account", IsAWSAccount, "12345678901a", false},
		{"account", IsAWSAccount, "123456789012\n", false},
		{"account", IsAWSAccount, "", false},
		{"GUID", IsGUID, guid, true},
		{"GUID", IsGUID, strings.ToUpper(guid), false},
		{"GUID", IsGUID, "{" + guid + "}", false},
		{"GUID", IsGUID, guid + "\n", false},
		{"GUID", IsGUID, guid[1:], false},
		{"GUID", IsGUID, guid + "0", false},
		{"GUID", IsGUID, strings.ReplaceAll(guid, "-", ""), false},
		{"GUID", IsGUID, "", false},
	} {
		if got := c.is(c.text); got != c.want {
			t.Errorf("%s %q: %v, want %v", c.name, c.text, got, c.want)
		}
	}
}

// A provider ID that is parsed has one spelling.
func FuzzParseEC2ProviderID(f *testing.F) {
	f.Add("aws:///eu-west-1a/" + id)
	f.Add("aws:///us-east-1-wl1-bos-wlz-1/i-01234567")
	f.Fuzz(func(t *testing.T, providerID string) {
		region, instance, ok := ParseEC2ProviderID(providerID)
		if !ok {
			return
		}
		zone, _ := strings.CutSuffix(strings.TrimPrefix(providerID, "aws:///"), "/"+instance)
		if !IsEC2Region(region) || !IsEC2Instance(instance) || !strings.HasPrefix(zone, region) || EC2ProviderID(zone, instance) != providerID {
			t.Errorf("%q: %q, %q", providerID, region, instance)
		}
	})
}
