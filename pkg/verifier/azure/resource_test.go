// SPDX-License-Identifier: Apache-2.0

package azure

import (
	"strings"
	"testing"
)

func TestParseProviderID(t *testing.T) {
	const group = "azure:///subscriptions/" + theSubscription + "/resourceGroups/my-Group_1.(x)"
	const machines = group + "/providers/Microsoft.Compute/virtualMachines/"
	const sets = group + "/providers/Microsoft.Compute/virtualMachineScaleSets/"
	for providerID, want := range map[string]ResourceID{
		machines + "Worker-0":                       {theSubscription, "my-group_1.(x)", "", "worker-0"},
		machines + "w":                              {theSubscription, "my-group_1.(x)", "", "w"},
		sets + "Pool/virtualMachines/0":             {theSubscription, "my-group_1.(x)", "pool", "0"},
		sets + "Pool/virtualMachines/12":            {theSubscription, "my-group_1.(x)", "pool", "12"},
		machines[len("azure://"):] + "w":            {}, // no scheme
		"Azure" + machines[len("azure"):] + "w":     {},
		"azure:" + machines[len("azure://"):] + "w": {},
		machines:                           {},
		machines + "a/b":                   {},
		machines + "a/":                    {},
		machines + "a ":                    {},
		machines + "a?b":                   {},
		machines + "a%62":                  {},
		machines + "..":                    {},
		machines + "a.":                    {},
		machines + "\u212a":                {}, // KELVIN SIGN, whose lower case is k
		machines + strings.Repeat("a", 81): {},
		machines + strings.Repeat("a", maxResourceID): {},
		sets + "Pool":                    {},
		sets + "Pool/virtualMachines/":   {},
		sets + "Pool/virtualMachines/01": {},
		sets + "Pool/virtualMachines/a":  {},
		sets + "/virtualMachines/0":      {},
		sets + "Pool/machines/0":         {},
		strings.Replace(machines, theSubscription, "subscription", 1) + "w":          {},
		strings.Replace(machines, "/subscriptions", "/x/subscriptions", 1) + "w":     {},
		strings.Replace(machines, "subscriptions", "tenants", 1) + "w":               {},
		strings.Replace(machines, "resourceGroups", "groups", 1) + "w":               {},
		strings.Replace(machines, "Microsoft.Compute", "Microsoft.Storage", 1) + "w": {},
		strings.Replace(machines, "my-Group_1.(x)", "", 1) + "w":                     {},
		strings.Replace(machines, "my-Group_1.(x)", "..", 1) + "w":                   {},
		strings.Replace(machines, "my-Group_1.(x)", "a.", 1) + "w":                   {},
		strings.Replace(machines, "virtualMachines", "disks", 1) + "w":               {},
	} {
		id, err := ParseProviderID(providerID)
		if id != want || (err == nil) != (want != ResourceID{}) {
			t.Errorf("%s: %+v, %v", providerID, id, err)
		}
		if err != nil {
			continue
		}
		again, err := ParseProviderID(ProviderIDPrefix + id.String())
		if again != id || err != nil {
			t.Errorf("%s: %+v, %v", id, again, err)
		}
		if upper, err := ParseResourceID(strings.ToUpper(providerID[len(ProviderIDPrefix):])); upper != id || err != nil {
			t.Errorf("%s in upper case: %+v, %v", providerID, upper, err)
		}
	}
}

func FuzzParseProviderID(f *testing.F) {
	f.Add("azure://" + theResource)
	f.Add("azure:///subscriptions/" + theSubscription + "/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/s/virtualMachines/0")
	f.Fuzz(func(t *testing.T, providerID string) {
		id, err := ParseProviderID(providerID)
		if err != nil {
			return
		}
		if again, err := ParseProviderID(ProviderIDPrefix + id.String()); again != id || err != nil || !strings.EqualFold(ProviderIDPrefix+id.String(), providerID) {
			t.Errorf("%q: %+v, %v", providerID, again, err)
		}
	})
}
