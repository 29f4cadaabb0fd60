// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
)

// head begins a list.
const head = "apiVersion: " + APIVersion + "\nkind: " + Kind + "\nmachines:\n"

// print returns a fingerprint of this digit.
func print(digit rune) string { return strings.Repeat(string(digit), fingerprintSize) }

// machine returns a valid entry of a list, whose values come from the digit.
func machine(digit rune, more string) string {
	return fmt.Sprintf("- nodeName: node-%c\n  eks:\n  - fingerprint: %q\n%s", digit, print(digit), more)
}

func TestParse(t *testing.T) {
	t.Parallel()
	inventory, err := Parse([]byte(head + `
- name: Rack 1, unit 7
  nodeName: worker-7
  providerID: metal://rack1/7
  addresses: [worker-7.example.com, worker-7, 192.0.2.7, 10.0.0.7, "2001:db8::7", fd00::7]
  eks:
  - fingerprint: ` + print('a') + `
    template: ecc-p256
    certificate: {fingerprint: ` + print('b') + `, subject: CN=x, issuer: CN=y, serial: 1f, notAfter: "2030-01-01T00:00:00Z"}
  - fingerprint: ` + print('1') + ` # looks like a number
- {nodeName: yes, eks: [{fingerprint: ` + strings.Repeat("0", 62) + `e1}]}
- {nodeName: no-tpm, bootstrapTokenID: 012345}
`))
	if err != nil {
		t.Fatal(err)
	}
	address := netip.MustParseAddr
	want := []Machine{{
		Name: "Rack 1, unit 7", NodeName: "worker-7", ProviderID: "metal://rack1/7", DNSNames: []string{"worker-7.example.com", "worker-7"},
		IPs: []netip.Addr{address("192.0.2.7"), address("10.0.0.7"), address("2001:db8::7"), address("fd00::7")},
		EKs: []EK{{print('a'), "ecc-p256", print('b')}, {Fingerprint: print('1')}},
	}, {
		Name: "yes", NodeName: "yes", EKs: []EK{{Fingerprint: strings.Repeat("0", 62) + "e1"}},
	}, {
		Name: "no-tpm", NodeName: "no-tpm", TokenID: "012345",
	}}
	if got := inventory.All(); !reflect.DeepEqual(got, want) {
		t.Fatalf("got  %+v\nwant %+v", got, want)
	}
	for _, ek := range want[0].EKs {
		if got := inventory.ByEK(ek.Fingerprint); !reflect.DeepEqual(got, want[:1]) {
			t.Errorf("by EK: %+v", got)
		}
	}
	if got, ok := inventory.ByName("Rack 1, unit 7"); !ok || !reflect.DeepEqual(got, want[0]) {
		t.Errorf("by name: %+v", got)
	}
	if got, ok := inventory.ByNodeName("worker-7"); !ok || !reflect.DeepEqual(got, want[0]) {
		t.Errorf("by node name: %+v", got)
	}
	if got, ok := inventory.ByToken("012345"); !ok || !reflect.DeepEqual(got, want[2]) {
		t.Errorf("by token: %+v", got)
	}
	if _, ok := inventory.ByToken(""); ok {
		t.Error("found by no token")
	}
	for _, unknown := range []string{"", print('c'), print('b'), strings.ToUpper(print('a')), "worker-7"} {
		if got := inventory.ByEK(unknown); len(got) > 0 {
			t.Errorf("by EK %q: %+v", unknown, got)
		}
	}
	if _, ok := inventory.ByName("worker-7"); ok {
		t.Error("found by a name that is its node's")
	}
	if _, ok := inventory.ByNodeName(""); ok {
		t.Error("found by no name")
	}
}

// An instance of a cloud counts like an endorsement key. A cloud's provider ID needs neither.
func TestInstances(t *testing.T) {
	t.Parallel()
	const guid = "0f8fad5b-d9cb-469f-a165-70867728950e"
	for _, i := range []attestation.Instance{
		{Platform: "ec2", ID: "i-0123456789abcdef0"}, {Platform: "ec2", ID: "i-01234567"}, {Platform: "gce", ID: "2875949485074006138"}, {Platform: "azure", ID: guid},
	} {
		inventory, err := Parse([]byte(head + machine('1', "  instance: {platform: "+i.Platform+", id: "+i.ID+"}\n") + "- {nodeName: a, instance: {platform: gce, id: 7}}\n"))
		if err != nil {
			t.Error(err)
			continue
		}
		if got := inventory.ByEK(i.Fingerprint()); len(got) != 1 || got[0].Name != "node-1" || len(got[0].EKs) != 2 {
			t.Errorf("%v: %+v", i, got)
		}
	}
	for _, id := range []string{"aws:///eu-west-1a/i-01234567", "gce://p/z/n", "azure:///subscriptions/s"} {
		if got, err := Parse([]byte(head + "- {nodeName: a, providerID: '" + id + "'}\n")); err != nil || got.Len() != 1 {
			t.Errorf("%s: %v", id, err)
		}
	}
	twice := head + "- {nodeName: a, instance: {platform: gce, id: 7}}\n- {nodeName: b, instance: {platform: gce, id: '7'}}\n"
	if got, err := Parse([]byte(twice)); err != nil || len(got.Conflicts()) != 1 {
		t.Errorf("two machines are one instance: %v", err)
	}
	for _, instance := range []string{
		"{}", "{platform: ec2}", "{id: 7}", "{platform: gcp, id: 7}", "{platform: gce, id: i-01234567}", "{platform: gce, id: 07}", "{platform: ec2, id: I-01234567}",
		"{platform: ec2, id: i-012345678}", "{platform: azure, id: " + strings.ToUpper(guid) + "}", "{platform: azure, id: '{" + guid + "}'}", "{platform: gce, id: 7, zone: z}",
	} {
		if got, err := Parse([]byte(head + "- {nodeName: a, instance: " + instance + "}\n")); err == nil {
			t.Errorf("%s: %+v", instance, got.All())
		}
	}
	eks := ""
	for i := range maxKeys {
		eks += fmt.Sprintf("  - fingerprint: \"%064d\"\n", 100+i)
	}
	if _, err := Parse([]byte(head + "- nodeName: a\n  eks:\n" + eks)); err != nil {
		t.Error(err)
	}
	if got, err := Parse([]byte(head + "- nodeName: a\n  instance: {platform: gce, id: 7}\n  eks:\n" + eks)); err == nil {
		t.Errorf("%d", len(got.All()[0].EKs))
	}
}

// The results are copies: a change of them does not change the inventory.
func TestInventoryDoesNotChange(t *testing.T) {
	t.Parallel()
	inventory, err := Parse([]byte(head + machine('1', "  addresses: [a.example.com, 192.0.2.1]\n")))
	if err != nil {
		t.Fatal(err)
	}
	spoil := func(m Machine) { m.EKs[0].Fingerprint, m.DNSNames[0], m.IPs[0] = "x", "x", netip.Addr{} }
	before := inventory.All()
	spoil(inventory.All()[0])
	spoil(inventory.ByEK(print('1'))[0])
	m, _ := inventory.ByName("node-1")
	spoil(m)
	m, _ = inventory.ByNodeName("node-1")
	spoil(m)
	if after := inventory.All(); !reflect.DeepEqual(after, before) {
		t.Errorf("got %+v", after)
	}
}

func TestEmptyInventoryFindsNobody(t *testing.T) {
	t.Parallel()
	empty, err := Parse([]byte(strings.TrimSpace(head) + " []\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, inventory := range map[string]*Inventory{"empty": empty, "zero": {}, "nil": nil} {
		_, byName := inventory.ByName("")
		_, byNodeName := inventory.ByNodeName("")
		if byName || byNodeName || len(inventory.ByEK("")) > 0 || len(inventory.All()) > 0 {
			t.Errorf("%s: finds somebody", name)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	one := head + machine('1', "")
	entry := func(text string) string {
		return head + "- nodeName: a\n  eks: [{fingerprint: " + print('1') + "}]\n  " + text + "\n"
	}
	ek := func(text string) string { return head + "- nodeName: a\n  eks:\n  - " + text + "\n" }
	identity := "device:\n  eks:\n  - fingerprint: " + print('1') + "\n    template: x\n  manufacturer: X\n  firmware: x\n  akName: x\nnodeName: a\nprovider: tpm\n"
	for name, c := range map[string]struct{ data, says string }{
		"nothing":             {"", "it is empty"},
		"white space":         {"\n \n", "it is empty"},
		"a remark":            {"# nothing\n", "it is empty"},
		"separators":          {"---\n---\n...\n", "it is empty"},
		"null":                {"null\n", "line 1: has no value"},
		"a word":              {"machines", "line 1: must be an object, not a string"},
		"a list":              {"- nodeName: a\n", "line 1: must be an object, not a list"},
		"binary":              {"\x00\x01", ""},
		"not UTF-8":           {"nodeName: \xff\n", ""},
		"no YAML":             {one + "- [\n", "line"},
		"no YAML after JSON":  {"{\"nodeName\": \"a\",\n\"eks\": [{\"fingerprint\": \"" + print('1') + "\"}]}\n{\n\"a\": [\n", "line"},
		"tabs":                {"nodeName: a\n\teks: []\n", "line 2"},
		"too long":            {one + strings.Repeat("#", MaxSize), "longer than 16777216 bytes"},
		"a whole token":       {entry("bootstrapTokenID: abcdef.0123456789abcdef"), "bootstrapTokenID is not six"},
		"a token in capitals": {entry("bootstrapTokenID: ABCDEF"), "bootstrapTokenID is not six"},
		"no key, no token":    {head + "- {nodeName: a, bootstrapTokenID: ''}\n", "no endorsement keys"},
		"a directive":         {"%YAML 1.1\n%FOO\n", ""},

		"no kind":                        {"apiVersion: " + APIVersion + "\nmachines: []\n", `line 1: is "" of`},
		"no version":                     {"kind: " + Kind + "\nmachines: []\n", "is \"" + Kind + "\" of \"\""},
		"another kind":                   {strings.Replace(one, Kind, "Inventory", 1), `is "Inventory"`},
		"another version":                {strings.Replace(one, "v1alpha1", "v1", 1), "not MachineInventory of authenticator.cluster.x-k8s.io/v1alpha1"},
		"no machines":                    {"apiVersion: " + APIVersion + "\nkind: " + Kind + "\n", "no field machines"},
		"machines null":                  {strings.TrimSpace(head) + "\n", "line 3: machines: has no value"},
		"machines by name":               {head + "  a: {nodeName: a}\n", "machines: must be a list, not an object"},
		"a machine null":                 {head + "-\n", "line 4: has no value"},
		"a machine by name":              {head + "- a\n", "line 4: must be an object, not a string"},
		"unknown in the list":            {one + "extra: 1\n", "line 7: extra: unknown field"},
		"metadata":                       {"metadata: {name: x}\n" + one, "line 1: metadata: unknown field"},
		"another case":                   {strings.Replace(one, "machines", "Machines", 1), "line 3: Machines: unknown field; did you mean machines?"},
		"machines twice":                 {one + "machines: []\n", "line 7: machines: comes a second time, after line 3"},
		"a machine's fields in the list": {one + "nodeName: a\n", "nodeName: unknown field"},
		"kind in a machine":              {identity + "kind: " + Kind + "\n", "device: unknown field"},

		"unknown field":            {entry("rack: 1"), `line 6: machine "a": rack: unknown field`},
		"field in another case":    {entry("providerId: x"), "providerId: unknown field; did you mean providerID?"},
		"field twice":              {entry("nodeName: a"), `line 6: machine "a": nodeName: comes a second time, after line 4`},
		"field twice in JSON":      {`{"nodeName":"a","nodeName":"a","eks":[{"fingerprint":"` + print('1') + `"}]}`, "nodeName: comes a second time"},
		"field twice, escaped":     {`{"nodeName":"a","node\u004eame":"b","eks":[{"fingerprint":"` + print('1') + `"}]}`, "nodeName: comes a second time"},
		"a field without a value":  {entry("providerID:"), `line 6: machine "a": providerID: has no value`},
		"null for a text":          {entry("providerID: null"), "providerID: has no value"},
		"a list for a text":        {entry("providerID: [a]"), "providerID: must be a string, not a list"},
		"a text for a list":        {entry("addresses: 192.0.2.1"), "addresses: must be a list, not a string"},
		"null for a list":          {entry("addresses:"), "addresses: has no value"},
		"a list as a field's name": {entry("? [a]\n  : b"), `line 6: machine "a": the name of a field must be a string, not a list`},
		"null as a field's name":   {entry("? \n  : b"), "has no value"},
		"an alias":                 {head + "- nodeName: &a a\n  name: *a\n", "anchors"},
		"an anchor":                {entry("name: &a a"), "anchors"},
		"an alias to a machine":    {head + "- &a {nodeName: a}\n- *a\n", "anchors"},
		"an alias to itself":       {"&a [*a]\n", "anchors"},
		"merging":                  {entry("<<: {name: b}"), "<<: unknown field"},
		"merging an alias":         {"<<: *a\n", ""},
		"a tag":                    {entry("name: !!str x"), "tags"},
		"a tag of one's own":       {entry("name: !x x"), "tags"},
		"a tag on a mapping":       {"!!map {nodeName: a}\n", "tags"},
		"binary in a text":         {entry("name: !!binary YQ=="), "tags"},

		"no node name":               {head + "- name: x\n  eks: [{fingerprint: " + print('1') + "}]\n", `line 4: machine "x": it has no nodeName`},
		"node name empty":            {head + "- nodeName: \"\"\n", "it has no nodeName"},
		"node name in upper case":    {head + "- nodeName: Worker\n", `"Worker" is not a DNS-1123 subdomain`},
		"node name with a prefix":    {head + "- nodeName: system:node:a\n", "is not a DNS-1123 subdomain"},
		"node name too long":         {head + "- nodeName: " + strings.Repeat("a", 254) + "\n", "is not a DNS-1123 subdomain"},
		"node name with a dot":       {head + "- nodeName: a.\n", "is not a DNS-1123 subdomain"},
		"a name of two lines":        {entry(`name: "a\nb"`), "its name"},
		"a name with an escape":      {entry(`name: "a\e[2J"`), "its name"},
		"a name too long":            {entry("name: " + strings.Repeat("a", 254)), "its name"},
		"a provider ID with a space": {entry("providerID: a b"), "provider ID"},
		"a provider ID too long":     {entry("providerID: " + strings.Repeat("a", 1025)), "provider ID"},

		"no EKs":                         {head + "- nodeName: a\n", `line 4: machine "a": it has no endorsement keys`},
		"an empty list of EKs":           {head + "- nodeName: a\n  eks: []\n", "it has no endorsement keys"},
		"too many EKs":                   {head + "- nodeName: a\n  eks: [" + strings.Repeat("{fingerprint: x}, ", maxKeys+1) + "]\n", "more than 16"},
		"an EK by itself":                {ek(print('1')), "eks[0]: must be an object, not the number"},
		"an EK without a fingerprint":    {ek("template: ecc-p256"), `line 6: machine "a": the EK's fingerprint "" is not`},
		"a fingerprint in upper case":    {ek("fingerprint: " + print('A')), "lower-case hex"},
		"a fingerprint with colons":      {ek("fingerprint: " + strings.Repeat("aa:", 31) + "aa"), "lower-case hex"},
		"a fingerprint with its name":    {ek("fingerprint: sha256:" + print('a')), "lower-case hex"},
		"a fingerprint too short":        {ek("fingerprint: " + print('a')[1:]), "lower-case hex"},
		"a fingerprint too long":         {ek("fingerprint: " + print('a') + "aa"), "lower-case hex"},
		"a fingerprint with white space": {ek("fingerprint: \" " + print('a')[1:] + "\""), "lower-case hex"},
		"no hex":                         {ek("fingerprint: " + print('g')), "lower-case hex"},
		"unknown in an EK":               {ek("public: x"), "eks[0].public: unknown field"},
		"a template of many words":       {ek("fingerprint: " + print('1') + "\n    template: ECC P-256"), "the template"},
		"a certificate without a print":  {ek("fingerprint: " + print('1') + "\n    certificate: {subject: x}"), "the certificate's fingerprint"},
		"an empty certificate":           {ek("fingerprint: " + print('1') + "\n    certificate: {}"), "the certificate's fingerprint"},
		"a certificate null":             {ek("fingerprint: " + print('1') + "\n    certificate:"), "eks[0].certificate: has no value"},
		"unknown in a certificate":       {ek("fingerprint: " + print('1') + "\n    certificate: {sha1: x}"), "eks[0].certificate.sha1: unknown field"},

		"a provider without a device":  {entry("provider: tpm"), "but no device"},
		"another provider":             {strings.Replace(identity, "tpm", "acme", 1), `its provider is "acme"`},
		"a device without a provider":  {strings.Replace(identity, "provider: tpm\n", "", 1), `its provider is ""`},
		"a device and eks":             {identity + "eks: []\n", "not both"},
		"a device null":                {"device:\nnodeName: a\nprovider: tpm\n", "device: has no value"},
		"a device without EKs":         {"device: {}\nnodeName: a\nprovider: tpm\n", "it has no endorsement keys"},
		"unknown in a device":          {strings.Replace(identity, "akName", "AKName", 1), "device.AKName: unknown field; did you mean akName?"},
		"the device twice":             {identity + identity[:strings.Index(identity, "nodeName")], "line 10: it has no nodeName"},
		"the device twice, indented":   {head + "- " + indent(identity) + "  device: {}\n", "device: comes a second time"},
		"half a machine, and another":  {"nodeName: a\n---\n" + identity, `line 1: machine "a": it has no endorsement keys`},
		"a second document, all wrong": {identity + "---\nnonsense: [\n", "line"},
		"a second document, unknown":   {identity + "---\n\nnonsense: 1\n", "line 12: nonsense: unknown field"},
		"a second one without a line":  {strings.TrimSpace(identity) + " --- {}\n", ""},
		"a second after a return":      {strings.TrimSpace(identity) + "\r---\rnonsense: 1\r", "nonsense: unknown field"},

		"an address that is a network":  {entry("addresses: [192.0.2.0/24]"), `"192.0.2.0/24" is neither`},
		"an address with a port":        {entry("addresses: ['192.0.2.1:6443']"), "is neither"},
		"a mistyped address":            {entry("addresses: [192.0.2.300]"), "is neither"},
		"a short address":               {entry("addresses: [192.0.2]"), "is neither"},
		"a number":                      {entry("addresses: [1]"), "is neither"},
		"an address with leading zeros": {entry("addresses: [192.0.2.01]"), "is neither"},
		"an address written at length":  {entry("addresses: ['2001:db8:0::1']"), "shortest form"},
		"an address in upper case":      {entry("addresses: ['2001:DB8::1']"), "shortest form"},
		"IPv4 in IPv6":                  {entry("addresses: ['::ffff:192.0.2.1']"), "shortest form"},
		"an address with a zone":        {entry("addresses: ['2001:db8::1%eth0']"), "shortest form"},
		"loopback":                      {entry("addresses: [127.0.0.1]"), "loopback"},
		"loopback of IPv6":              {entry("addresses: ['::1']"), "loopback"},
		"link-local":                    {entry("addresses: [169.254.1.1]"), "link-local"},
		"link-local of IPv6":            {entry("addresses: ['fe80::1']"), "link-local"},
		"multicast":                     {entry("addresses: [224.0.0.1]"), "multicast"},
		"unspecified":                   {entry("addresses: [0.0.0.0]"), "loopback"},
		"broadcast":                     {entry("addresses: [255.255.255.255]"), "loopback"},
		"a wildcard":                    {entry("addresses: ['*.example.com']"), "is neither"},
		"a DNS name in upper case":      {entry("addresses: [A.example.com]"), "is neither"},
		"a DNS name with a dot":         {entry("addresses: [a.example.com.]"), "is neither"},
		"a URL":                         {entry("addresses: ['https://a']"), "is neither"},
		"localhost":                     {entry("addresses: [localhost]"), "every machine's own"},
		"below localhost":               {entry("addresses: [a.localhost]"), "every machine's own"},
		"localhost in the local domain": {entry("addresses: [localhost.localdomain]"), "every machine's own"},
		"an empty address":              {entry("addresses: ['']"), "is neither"},
		"an address that is none":       {entry("addresses: [{ip: 192.0.2.1}]"), "addresses[0]: must be a string"},
		"too many addresses":            {entry("addresses: [" + strings.Repeat("a, ", maxAddresses+1) + "]"), "more than 64"},
		"the line of a wrong address":   {entry("addresses:\n  - 192.0.2.1\n  - b_c"), `line 8: machine "a": the address "b_c"`},
		"an address twice":              {entry("addresses: [192.0.2.1, 192.0.2.1]"), `line 6: machine "a": it has the address "192.0.2.1" twice`},
		"a DNS name twice":              {entry("addresses: [b, b]"), "twice"},
		"one EK twice":                  {ek("fingerprint: " + print('1') + "\n  - fingerprint: " + print('1')), `it has the EK "` + print('1') + `" twice`},
		"the second list is wrong":      {one + one[:len(head)] + "- nodeName: B\n", `line 10: machine "B"`},
		// 10 or 11
		"the second list is no YAML": {one + one[:len(head)] + "- nodeName: [\n", "line 1"},
	} {
		t.Run(name, func(t *testing.T) {
			inventory, err := Parse([]byte(c.data))
			var problem *Error
			if inventory != nil || !errors.As(err, &problem) {
				t.Fatalf("was accepted: %+v, %v", inventory.All(), err)
			}
			if !strings.HasPrefix(err.Error(), "inventory: ") || !strings.Contains(err.Error(), c.says) || strings.ContainsAny(err.Error(), "\n\x1b") || len(err.Error()) > 700 {
				t.Errorf("does not say %q: %v", c.says, err)
			}
		})
	}
}

// An error in a later document has the line number of the whole file.
func TestSyntaxErrorsHaveTheRightLine(t *testing.T) {
	t.Parallel()
	good := func(digit rune) string {
		return fmt.Sprintf("device:\n  eks:\n  - fingerprint: %q\nnodeName: n%c\nprovider: tpm\n", print(digit), digit)
	}
	_, err := Parse([]byte(good('1') + good('2') + "device:\n  eks: ]\n"))
	// the YAML library's own count; it is 12
	if err == nil || !strings.Contains(err.Error(), "line 11:") {
		t.Errorf("got %v", err)
	}
}

// A small file must not expand to a large one.
func TestParseIsBounded(t *testing.T) {
	t.Parallel()
	var laughs strings.Builder
	laughs.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x]\n")
	for i := 1; i < 12; i++ {
		fmt.Fprintf(&laughs, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 9), ", "))
	}
	for name, data := range map[string]string{
		"a billion laughs":   laughs.String(),
		"deep in brackets":   strings.Repeat("[", 1<<17),
		"deep in JSON":       strings.Repeat(`{"a":`, 1<<17),
		"deep in dashes":     strings.Repeat("- ", 1<<17),
		"deep in questions":  strings.Repeat("? ", 1<<17),
		"many separators":    strings.Repeat("---\n", 1<<16),
		"many remarks":       strings.Repeat("# x\n", 1<<16),
		"many broken starts": strings.Repeat("{\n", 1<<16),
		"a long text":        "nodeName: a\nname: " + strings.Repeat("a", 4097),
		"a long line":        "nodeName: " + strings.Repeat("a", 1<<20),
		"many fields":        strings.Repeat("? a\n", 1<<15),
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			if _, err := Parse([]byte(data)); err == nil || len(err.Error()) > 700 {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

// The example in the documentation is valid.
func TestDocumentation(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile("../../../docs/inventory.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```(yaml|json)\n(.*?)^```$").FindAllSubmatch(document, -1)
	if len(blocks) < 2 {
		t.Fatalf("%d examples", len(blocks))
	}
	var all []byte
	for _, b := range blocks {
		if _, err := Parse(b[2]); err != nil {
			t.Errorf("%v\n%s", err, b[2])
		}
		all = append(all, b[2]...)
	}
	inventory, err := Parse(all) // as cat would leave them
	if err != nil {
		t.Fatal(err)
	}
	if got := inventory.All(); len(got) != len(blocks)+1 || got[0].Name != "rack1-07" {
		t.Errorf("got %+v", got)
	}
	for _, word := range []string{APIVersion, Kind, "name", "nodeName", "providerID", "addresses", "eks", "device", fmt.Sprint(maxKeys), fmt.Sprint(maxAddresses), fmt.Sprint(MaxSize >> 20)} {
		if !bytes.Contains(document, []byte(word)) {
			t.Errorf("it does not say %s", word)
		}
	}
}

// write returns the machines as a list in JSON.
func write(t testing.TB, machines []Machine) []byte {
	t.Helper()
	type ek map[string]any
	type document struct {
		APIVersion string           `json:"apiVersion"`
		Kind       string           `json:"kind"`
		Machines   []map[string]any `json:"machines"`
	}
	d := document{APIVersion: APIVersion, Kind: Kind, Machines: []map[string]any{}}
	for _, m := range machines {
		addresses := append([]string{}, m.DNSNames...)
		for _, ip := range m.IPs {
			addresses = append(addresses, ip.String())
		}
		var eks []ek
		for _, k := range m.EKs {
			e := ek{"fingerprint": k.Fingerprint, "template": k.Template}
			if k.CertificateFingerprint != "" {
				e["certificate"] = ek{"fingerprint": k.CertificateFingerprint}
			}
			eks = append(eks, e)
		}
		written := map[string]any{"name": m.Name, "nodeName": m.NodeName, "providerID": m.ProviderID, "addresses": addresses, "eks": eks}
		if eks == nil {
			delete(written, "eks")
		}
		if m.TokenID != "" {
			written["bootstrapTokenID"] = m.TokenID
		}
		d.Machines = append(d.Machines, written)
	}
	data, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// FuzzParse: an accepted inventory has each key, node name, provider ID and address once. It finds
// machines by them, and can be written and read again. An error has one line.
func FuzzParse(f *testing.F) {
	f.Add([]byte(head + machine('1', "  addresses: [a, 192.0.2.1]\n  providerID: x://y\n") + machine('2', "")))
	f.Add([]byte("device:\n  eks:\n  - fingerprint: \"" + print('1') + "\"\n    certificate: {fingerprint: " + print('a') + "}\nnodeName: a\nprovider: tpm\ndevice: {eks: [{fingerprint: " + print('b') + "}]}\nnodeName: b\nprovider: tpm\n"))
	f.Add([]byte(`{"nodeName":"a","eks":[{"fingerprint":"` + print('c') + `"}]}` + "\n" + `{"nodeName":"b","eks":[{"fingerprint":"` + print('d') + `"}]}`))
	f.Add([]byte(head + "- {nodeName: a, bootstrapTokenID: abc123}\n"))
	f.Add([]byte("nodeName: &a a\n<<: *a\n"))
	f.Add([]byte("--- {}\n...\n--- !!map {}\n"))
	f.Add([]byte(strings.TrimSpace(head) + " []\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		inventory, err := Parse(data)
		if err != nil {
			if inventory != nil || strings.ContainsAny(err.Error(), "\n\r\x1b") || len(err.Error()) > 1200 {
				t.Fatalf("%q", err)
			}
			return
		}
		checkIndexes(t, inventory)
		machines := inventory.All()
		if len(inventory.Conflicts()) > 0 {
			return
		}
		again, err := Parse(write(t, machines))
		if err != nil || !reflect.DeepEqual(again.All(), machines) {
			t.Fatalf("%+v, then %+v, %v", machines, again.All(), err)
		}
	})
}

// checkIndexes fails unless each machine is found by what it has, and those with a value that
// another has, too, are disputed.
func checkIndexes(t *testing.T, inventory *Inventory) {
	t.Helper()
	disputed := 0
	for _, m := range inventory.All() {
		if byName, ok := inventory.ByName(m.Name); !ok || !reflect.DeepEqual(byName, m) || len(m.EKs) == 0 && m.TokenID == "" && !m.Disputed {
			t.Fatalf("%+v", m)
		}
		for _, ek := range m.EKs {
			found := inventory.ByEK(ek.Fingerprint)
			if !slices.ContainsFunc(found, func(other Machine) bool { return reflect.DeepEqual(other, m) }) || len(found) > 1 && !m.Disputed {
				t.Fatalf("%+v has EK %s, which finds %+v", m, ek.Fingerprint, found)
			}
		}
		for what, by := range map[string]struct {
			value string
			find  func(string) (Machine, bool)
		}{
			"token": {m.TokenID, inventory.ByToken}, "provider ID": {m.ProviderID, inventory.ByProviderID}, "node name": {m.NodeName, inventory.ByNodeName},
		} {
			if found, ok := by.find(by.value); by.value != "" && (!ok || !reflect.DeepEqual(found, m) && (!m.Disputed || !found.Disputed)) {
				t.Fatalf("%+v: its %s finds %+v", m, what, found)
			}
		}
		if m.Disputed {
			disputed++
		}
	}
	if (disputed > 0) != (len(inventory.Conflicts()) > 0) {
		t.Fatalf("%d disputed machines, %d conflicts", disputed, len(inventory.Conflicts()))
	}
}

// large returns the inventory of a fleet, as identify prints it.
func large(machines int) []byte {
	var out bytes.Buffer
	for i := range machines {
		out.WriteString("device:\n  akName: 000b" + print('0') + "\n  eks:\n")
		for j := range 3 {
			fmt.Fprintf(&out, "  - certificate:\n      fingerprint: \"%064x\"\n      issuer: CN=Example TPM Manufacturing CA 013,O=Example\n      notAfter: \"2043-12-31T23:59:59Z\"\n      serial: 5f2a\n    fingerprint: \"%064x\"\n    template: ecc-p256\n", i, i<<2|j)
		}
		fmt.Fprintf(&out, "  firmware: \"7.2\"\n  manufacturer: IFX\nnodeName: worker-%d\nprovider: tpm\nproviderID: metal://rack/%d\n", i, i)
	}
	return out.Bytes()
}

func TestParseOfAFleet(t *testing.T) {
	t.Parallel()
	const machines = 500
	inventory, err := Parse(large(machines))
	if err != nil || len(inventory.All()) != machines {
		t.Fatal(err)
	}
	if got := inventory.ByEK(fmt.Sprintf("%064x", (machines-1)<<2)); len(got) != 1 || got[0].NodeName != fmt.Sprintf("worker-%d", machines-1) {
		t.Errorf("got %+v", got)
	}
}

// Ten thousand machines fit, and are parsed in a short time.
func BenchmarkParse(b *testing.B) {
	data := large(10_000)
	if len(data) > MaxSize {
		b.Fatalf("%d bytes", len(data))
	}
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(data); err != nil {
			b.Fatal(err)
		}
	}
}
