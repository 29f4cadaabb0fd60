// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// partOf returns a part with these entries of a list.
func partOf(t testing.TB, name string, entries ...string) *Part {
	t.Helper()
	part, err := ParsePart(name, []byte(head+strings.Join(entries, "")))
	if err != nil {
		t.Fatal(err)
	}
	return part
}

// A contradiction, in one part or in two, affects only the machines in it.
func TestConflicts(t *testing.T) {
	t.Parallel()
	one, bystander := machine('1', ""), machine('9', "  providerID: x://9\n  addresses: [nine.example.com, 192.0.2.9]\n")
	for name, c := range map[string]struct {
		first, second string
		// disputed are names, and says is the conflict in two parts.
		disputed []string
		says     []string
	}{
		"nothing":      {one, machine('2', ""), nil, nil},
		"one EK":       {one, "- nodeName: b\n  eks: [{fingerprint: " + print('1') + "}]\n", []string{"node-1", "b"}, []string{`the EK "` + print('1') + `" is claimed by machine "node-1" (a:4), machine "b" (b:4)`}},
		"one of 2 EKs": {one, "- nodeName: b\n  eks: [{fingerprint: " + print('2') + "}, {fingerprint: " + print('1') + "}]\n", []string{"node-1", "b"}, []string{`the EK "` + print('1')}},
		"one node name": {one, "- nodeName: node-1\n  name: other\n  eks: [{fingerprint: " + print('2') + "}]\n", []string{"node-1", "other"},
			[]string{`the DNS name or nodeName "node-1" is claimed by machine "node-1" (a:4), machine "other" (b:4)`}},
		"one name":                    {one, "- name: node-1\n  nodeName: b\n  eks: [{fingerprint: " + print('2') + "}]\n", []string{"node-1"}, []string{`machine "node-1" is listed differently: a:4, b:4`}},
		"one provider ID":             {machine('1', "  providerID: x://y\n"), machine('2', "  providerID: x://y\n"), []string{"node-1", "node-2"}, []string{`the providerID "x://y" is`}},
		"one token":                   {machine('1', "  bootstrapTokenID: abcdef\n"), machine('2', "  bootstrapTokenID: abcdef\n"), []string{"node-1", "node-2"}, []string{`the bootstrapTokenID "abcdef" is`}},
		"one IP":                      {machine('1', "  addresses: [192.0.2.1]\n"), machine('2', "  addresses: [192.0.2.1]\n"), []string{"node-1", "node-2"}, []string{`the IP "192.0.2.1" is`}},
		"one DNS name":                {machine('1', "  addresses: [b]\n"), machine('2', "  addresses: [b]\n"), []string{"node-1", "node-2"}, []string{`the DNS name or nodeName "b" is`}},
		"another's node name":         {one, machine('2', "  addresses: [node-1]\n"), []string{"node-1", "node-2"}, []string{`the DNS name or nodeName "node-1" is`}},
		"another's node name, before": {machine('2', "  addresses: [node-1]\n"), one, []string{"node-2", "node-1"}, []string{`the DNS name or nodeName "node-1" is`}},
		"two things":                  {machine('1', "  providerID: x://y\n"), "- nodeName: b\n  providerID: x://y\n  eks: [{fingerprint: " + print('1') + "}]\n", []string{"node-1", "b"}, []string{"the providerID", "the EK"}},
		"one name, and another's EK": {one + machine('2', ""), "- nodeName: node-1\n  eks: [{fingerprint: " + print('2') + "}]\n", []string{"node-1", "node-2"},
			[]string{`machine "node-1" is listed differently: a:4, b:4`, `the EK "` + print('2') + `" is claimed by machine "node-1" (b:4), machine "node-2" (a:7)`}},
		"two of one name, one claim": {machine('1', "  addresses: [b]\n"), machine('1', "  addresses: [b, c]\n"), []string{"node-1"}, []string{`machine "node-1" is listed differently`}},
		"three": {one, "- {nodeName: b, eks: [{fingerprint: " + print('1') + "}]}\n- {nodeName: c, eks: [{fingerprint: " + print('1') + "}]}\n", []string{"node-1", "b", "c"},
			[]string{`machine "node-1" (a:4), machine "b" (b:4), machine "c" (b:5)`}},
	} {
		for parts, inventory := range map[string]*Inventory{
			"two": Merge(partOf(t, "a", c.first, bystander), partOf(t, "b", c.second)),
			"one": Merge(partOf(t, "a", c.first, c.second, bystander)),
		} {
			var disputed, says []string
			for _, m := range inventory.All() {
				if m.Disputed {
					disputed = append(disputed, m.Name)
				}
			}
			for _, conflict := range inventory.Conflicts() {
				says = append(says, conflict.String())
			}
			checkIndexes(t, inventory)
			if !reflect.DeepEqual(disputed, c.disputed) || len(says) != len(c.says) {
				t.Errorf("%s, %s: disputed are %q, by %q", name, parts, disputed, says)
				continue
			}
			for _, want := range c.says {
				if parts == "two" && !slices.ContainsFunc(says, func(said string) bool { return strings.Contains(said, want) }) {
					t.Errorf("%s: %q does not say %q", name, says, want)
				}
			}
			if m := inventory.ByEK(print('9')); len(m) != 1 || m[0].Disputed || m[0].ProviderID != "x://9" {
				t.Errorf("%s, %s: the bystander is %+v", name, parts, m)
			}
		}
	}
}

// A machine that is listed with different values keeps only the values that all entries agree on,
// and the EKs of all entries.
func TestListedDifferently(t *testing.T) {
	t.Parallel()
	entry := func(nodeName, providerID, token, addresses string, ek rune) string {
		return fmt.Sprintf("- name: m\n  nodeName: %s\n  providerID: %s\n  bootstrapTokenID: %s\n  addresses: [%s]\n  eks: [{fingerprint: %s}]\n", nodeName, providerID, token, addresses, print(ek))
	}
	for name, c := range map[string]struct {
		entries []string
		want    string
	}{
		"EKs":       {[]string{entry("n", "x://1", "abcdef", "b, 192.0.2.1", '1'), entry("n", "x://1", "abcdef", "192.0.2.1, b", '2')}, "n x://1 abcdef [b] [192.0.2.1] 2"},
		"addresses": {[]string{entry("n", "x://1", "abcdef", "b, c, 192.0.2.1", '1'), entry("n", "x://1", "abcdef", "192.0.2.2, b", '1')}, "n x://1 abcdef [b] [] 1"},
		"all":       {[]string{entry("n", "x://1", "abcdef", "b", '1'), entry("o", "x://2", "abcdeg", "c", '2')}, "   [] [] 2"},
		"of three":  {[]string{entry("n", "x://1", "abcdef", "b", '1'), entry("n", "x://2", "abcdef", "b", '1'), entry("n", "x://1", "abcdef", "b", '1')}, "n  abcdef [b] [] 1"},
	} {
		inventory := Merge(partOf(t, "a", c.entries...))
		m, _ := inventory.ByName("m")
		if got := fmt.Sprint(m.NodeName, " ", m.ProviderID, " ", m.TokenID, " ", m.DNSNames, " ", m.IPs, " ", len(m.EKs)); got != c.want || !m.Disputed || len(inventory.Conflicts()) != 1 {
			t.Errorf("%s: %s, %v", name, got, inventory.Conflicts())
		}
	}
}

// Equal entries count once, whatever their syntax.
func TestDuplicates(t *testing.T) {
	t.Parallel()
	first := partOf(t, "a", "- {nodeName: m, addresses: [b, c, 192.0.2.1], eks: [{fingerprint: "+print('1')+"}, {fingerprint: "+print('2')+"}]}\n")
	for name, entry := range map[string]string{
		"the same":               "- {nodeName: m, addresses: [b, c, 192.0.2.1], eks: [{fingerprint: " + print('1') + "}, {fingerprint: " + print('2') + "}]}\n",
		"with its name":          "- {name: m, nodeName: m, addresses: [b, c, 192.0.2.1], eks: [{fingerprint: " + print('1') + "}, {fingerprint: " + print('2') + "}]}\n",
		"in another order":       "- {nodeName: m, addresses: [192.0.2.1, c, b], eks: [{fingerprint: " + print('2') + "}, {fingerprint: " + print('1') + "}]}\n",
		"with certificates":      "- {nodeName: m, addresses: [b, c, 192.0.2.1], eks: [{fingerprint: " + print('1') + ", template: ecc-p256, certificate: {fingerprint: " + print('3') + "}}, {fingerprint: " + print('2') + "}]}\n",
		"as identify prints EKs": "- {nodeName: m, addresses: [b, c, 192.0.2.1], provider: tpm, device: {manufacturer: X, eks: [{fingerprint: " + print('1') + "}, {fingerprint: " + print('2') + "}]}}\n",
	} {
		both := Merge(first, partOf(t, "b", entry, machine('9', "")))
		if both.Len() != 2 || both.Duplicates() != 1 || len(both.Conflicts()) > 0 || !both.Complete() {
			t.Errorf("%s: %d machines, %d duplicates, %v", name, both.Len(), both.Duplicates(), both.Conflicts())
		}
		if m, _ := both.ByName("m"); m.Disputed || len(m.EKs) != 2 {
			t.Errorf("%s: %+v", name, m)
		}
	}
	if partial := Merge(nil, first); partial.Len() != 1 || partial.Complete() {
		t.Errorf("a part is missing: %d machines", partial.Len())
	}
}

// All problems of a part are reported, not only the first.
func TestProblems(t *testing.T) {
	t.Parallel()
	data := head + "- nodeName: A\n  eks: [{fingerprint: x}]\n" + machine('1', "") + "- {nodeName: b, rack: 1}\n- {nodeName: c}\n" +
		"---\nkind: X\nmachines: []\n---\nnodeName: [\n"
	var got []string
	for _, problem := range Problems("a", []byte(data)) {
		got = append(got, fmt.Sprintf("%s:%d", problem.Part, problem.Line))
	}
	if want := []string{"a:4", "a:5", "a:9", "a:10", "a:12", "a:15"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", Problems("a", []byte(data)))
	}
	if got := Problems("a", []byte(head+machine('1', ""))); len(got) > 0 {
		t.Errorf("of a good one: %v", got)
	}
	if got := Problems("a", []byte(head+strings.Repeat("- {}\n", 10*maxProblems))); len(got) != maxProblems {
		t.Errorf("%d problems", len(got))
	}
}

// A contested address belongs to no machine, also if a claimant has lost it because another part
// lists that machine differently. Otherwise the writer of one part could get serving certificates
// for addresses that another part gives to another machine.
func TestContestedAddressIsNobodys(t *testing.T) {
	t.Parallel()
	const addresses = "  addresses: [web.example.com, 192.0.2.1]\n"
	victim := partOf(t, "a", machine('1', addresses))
	for name, hostile := range map[string]*Part{
		"another machine has it":                         partOf(t, "b", machine('2', addresses)),
		"and the victim is listed without it":            partOf(t, "b", machine('1', ""), machine('2', addresses)),
		"and the victim is listed under another node":    partOf(t, "b", "- {name: node-1, nodeName: x, eks: [{fingerprint: "+print('1')+"}]}\n", machine('2', "  addresses: [node-1, web.example.com, 192.0.2.1]\n")),
		"and the victim is listed after, with other IPs": partOf(t, "b", machine('2', addresses), machine('1', "  addresses: [192.0.2.7]\n")),
	} {
		for order, inventory := range map[string]*Inventory{"victim first": Merge(victim, hostile), "victim last": Merge(hostile, victim)} {
			for _, m := range inventory.All() {
				if !m.Disputed || len(m.DNSNames) > 0 || len(m.IPs) > 0 {
					t.Errorf("%s, %s: %s has %v and %v", name, order, m.Name, m.DNSNames, m.IPs)
				}
			}
		}
	}
	if own, _ := Merge(victim).ByName("node-1"); len(own.DNSNames) != 1 || len(own.IPs) != 1 {
		t.Errorf("without a conflict: %+v", own)
	}
}
