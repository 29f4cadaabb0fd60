// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"strings"
	"testing"
)

func TestIsEC2ProviderID(t *testing.T) {
	const id = "i-0123456789abcdef0"
	for _, c := range []struct {
		name, providerID, instanceID string
		want                         bool
	}{
		{"availability zone", "aws:///eu-west-1a/" + id, id, true},
		{"local zone", "aws:///us-west-2-lax-1a/" + id, id, true},
		{"old ID", "aws:///eu-west-1a/i-01234567", "i-01234567", true},
		{"another instance", "aws:///eu-west-1a/i-0123456789abcdef1", id, false},
		{"no instance", "aws:///eu-west-1a/", "", false},
		{"both malformed", "aws:///eu-west-1a/x", "x", false},
		{"without zone", "aws:///" + id, id, false},
		{"empty zone", "aws:////" + id, id, false},
		{"zone too long", "aws:///eu-west-1" + strings.Repeat("a", maxZone) + "/" + id, id, false},
		{"zone malformed", "aws:///EU-WEST-1A/" + id, id, false},
		{"host", "aws://host/eu-west-1a/" + id, id, false},
		{"another scheme", "gce:///eu-west-1a/" + id, id, false},
		{"upper case", "aws:///eu-west-1a/I-0123456789ABCDEF0", "I-0123456789ABCDEF0", false},
		{"more", "aws:///eu-west-1a/" + id + "/x", id, false},
		{"line end", "aws:///eu-west-1a/" + id + "\n", id + "\n", false},
		{"empty", "", "", false},
	} {
		if got := IsEC2ProviderID(c.providerID, c.instanceID); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestIsAWSAccount(t *testing.T) {
	for account, want := range map[string]bool{"123456789012": true, "12345678901": false, "1234567890123": false, "12345678901a": false, "": false} {
		if got := IsAWSAccount(account); got != want {
			t.Errorf("%q: %v, want %v", account, got, want)
		}
	}
}
