// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

// section returns what docs/spec.md has under a heading.
func section(t *testing.T, heading string) string {
	t.Helper()
	data, err := os.ReadFile("../../docs/spec.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(data), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("docs/spec.md has no section %q", heading)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// The tables of fields are those of the structures, in order.
func TestSpecHasTheFields(t *testing.T) {
	row := regexp.MustCompile("(?m)^\\| `([A-Za-z.\\[\\]]+)` \\|")
	var fields func(prefix string, of reflect.Type) []string
	fields = func(prefix string, of reflect.Type) []string {
		var names []string
		for i := range of.NumField() {
			field := of.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			names = append(names, prefix+name)
			switch {
			case field.Type.Kind() == reflect.Struct:
				names = append(names, fields(prefix+name+".", field.Type)...)
			case field.Type.Kind() == reflect.Slice && field.Type.Elem().Kind() == reflect.Struct:
				names = append(names, fields(prefix+name+"[].", field.Type.Elem())...)
			}
		}
		return names
	}
	for heading, of := range map[string]reflect.Type{
		"6. hello": reflect.TypeFor[Hello](), "7. challenge": reflect.TypeFor[Challenge](), "8. proof": reflect.TypeFor[Proof](),
		"18. Origin": reflect.TypeFor[Origin](),
	} {
		var got []string
		for _, match := range row.FindAllStringSubmatch(section(t, heading), -1) {
			got = append(got, match[1])
		}
		if want := fields("", of); !slices.Equal(got, want) {
			t.Errorf("%s: the page has %v, the code %v", heading, got, want)
		}
	}
}

// Names, labels and limits.
func TestSpecHasTheConstants(t *testing.T) {
	for heading, wanted := range map[string][]string{
		"1. Roles and objects": {HelloSignerName, AnnotationChallenge, AnnotationVersions, AnnotationEK, "A and B come from one requester", "itself only", "**Renewal**"},
		"3. `spec.request`":    {BlockRequest, BlockProvider, BlockData, strconv.Itoa(MaxRequestSize), fmt.Sprintf("1 to %d letters", MaxProviderName)},
		"5. Documents":         {VersionTPM, fmt.Sprintf("1 to %d |", MaxSignerName), fmt.Sprintf("1 to %d |", maxKeyID)},
		"6. hello":             {strconv.Itoa(MaxDocument), fmt.Sprintf("1 to %d |", MaxPublic), fmt.Sprintf("at most %d, each 1 to %d;", MaxCertificates, MaxCertificate), fmt.Sprintf("1 to %d versions", maxVersions)},
		"7. challenge":         {strconv.Itoa(MaxChallenge), fmt.Sprintf("1 to %d |", maxCredential), fmt.Sprintf("1 to %d |", maxSecret), fmt.Sprintf("0 to %d,", maxPCR)},
		"8. proof":             {strconv.Itoa(MaxDocument), fmt.Sprintf("1 to %d |", maxQuote), fmt.Sprintf("1 to %d;", MaxEventLog)},
		"9. Versions":          {AnnotationVersions, ReasonVersion},
		"10. Secret, transcript, MAC": {
			fmt.Sprintf("| label | %d | `%s` |", len(labelSecret), labelSecret), fmt.Sprintf("| label | %d | `%s` |", len(labelTranscript), labelTranscript),
			fmt.Sprintf("L = %d", SecretSize),
		},
		"18. Origin": {AnnotationOrigin, strconv.Itoa(MaxOrigin), fmt.Sprintf("| label | %d | `%s` |", len(labelOrigin), labelOrigin), fmt.Sprintf("1 to %d |", MaxPublic)},
		"15. Sizes": {strconv.Itoa(MaxRequestSize), strconv.Itoa(MaxDocument), strconv.Itoa(MaxChallenge), strconv.Itoa(MaxOrigin), strconv.Itoa(MaxProviderName), strconv.Itoa(MaxPublic),
			fmt.Sprintf("%d of %d each", MaxCertificates, MaxCertificate), strconv.Itoa(MaxEventLog)},
	} {
		text := section(t, heading)
		for _, want := range wanted {
			if !strings.Contains(text, want) {
				t.Errorf("%s: %q is missing", heading, want)
			}
		}
	}
}

// The templates in the page and in the vectors, and those that node and verifier use.
func TestSpecHasTheTemplates(t *testing.T) {
	text := section(t, "11. Keys of the TPM")
	want := map[string][]byte{"ak": tpm2.Marshal(template.AK())}
	for _, e := range template.EKs() {
		want[e.Name] = tpm2.Marshal(e.Public)
		if !strings.Contains(text, fmt.Sprintf("%#08x", e.Certificate)) {
			t.Errorf("the NV index of %s is missing", e.Name)
		}
	}
	v := loadVectors(t).Templates
	page := map[string][]byte{}
	zeros := regexp.MustCompile(`00\*([0-9]+)`)
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)` \\| `(00(?:01|23)00[0-9a-f* `]+)` \\|$").FindAllStringSubmatch(text, -1) {
		digits := zeros.ReplaceAllStringFunc(row[2], func(s string) string {
			n, err := strconv.Atoi(s[3:])
			if err != nil {
				t.Fatal(err)
			}
			return strings.Repeat("00", n)
		})
		raw, err := hex.DecodeString(strings.NewReplacer("`", "", " ", "").Replace(digits))
		if err != nil {
			t.Fatalf("%s: %v", row[1], err)
		}
		page[row[1]] = raw
	}
	if match := regexp.MustCompile("As a whole: `([0-9a-f]+)`").FindStringSubmatch(text); match != nil {
		page["ak"], _ = hex.DecodeString(match[1])
	}
	if len(v) != len(want) || len(page) != len(want) {
		t.Errorf("%d templates in the vectors, %d in the page, want %d", len(v), len(page), len(want))
	}
	for name, raw := range want {
		if !bytes.Equal(v[name], raw) {
			t.Errorf("%s: the vectors have %x, want %x", name, []byte(v[name]), raw)
		}
		if !bytes.Equal(page[name], raw) {
			t.Errorf("%s: the page has %x, want %x", name, page[name], raw)
		}
	}
}

// The branches for TPM2_PolicyOR are those that the node gives its TPM, and lead to the policies of
// the templates.
func TestSpecHasThePolicies(t *testing.T) {
	page := map[string][]byte{}
	for _, row := range regexp.MustCompile("(?m)^\\| (Policy[A-C], SHA-(?:256|384)) \\| `([0-9a-f]+)` \\|$").FindAllStringSubmatch(section(t, "11. Keys of the TPM"), -1) {
		value, err := hex.DecodeString(row[2])
		if err != nil || page[row[1]] != nil {
			t.Fatalf("%s: twice, or %v", row[1], err)
		}
		page[row[1]] = value
	}
	if len(page) != 6 {
		t.Errorf("%d policies", len(page))
	}
	seen := map[string]bool{}
	for _, e := range template.EKs() {
		bank, newHash := "SHA-256", sha256.New
		if e.Public.NameAlg == tpm2.TPMAlgSHA384 {
			bank, newHash = "SHA-384", sha512.New384
		}
		sum := func(parts ...[]byte) []byte {
			h := newHash()
			for _, part := range parts {
				h.Write(part)
			}
			return h.Sum(nil)
		}
		start := make([]byte, newHash().Size())
		a, b, c := page["PolicyA, "+bank], page["PolicyB, "+bank], page["PolicyC, "+bank]
		// TPM 2.0 Part 3, TPM2_PolicySecret: the handle's name, then an empty policyRef.
		// TPM2_PolicyOR: the branches as they are listed.
		secret := sum(sum(start, []byte{0, 0, 0x01, 0x51}, []byte{0x40, 0, 0, 0x0b}))
		if either := sum(start, []byte{0, 0, 0x01, 0x71}, a, c); !bytes.Equal(a, secret) || !bytes.Equal(b, either) {
			t.Errorf("%s: PolicyA is %x, not %x, or PolicyB %x, not %x", bank, a, secret, b, either)
		}
		branches, policy := e.PolicyOR(), a
		if branches != nil {
			policy = b
			if len(branches) != 2 || !bytes.Equal(branches[0].Buffer, a) || !bytes.Equal(branches[1].Buffer, c) {
				t.Errorf("%s: the branches are %x", e.Name, branches)
			}
			seen[bank] = true
		}
		if !bytes.Equal(e.Public.AuthPolicy.Buffer, policy) {
			t.Errorf("%s: the policy is %x", e.Name, e.Public.AuthPolicy.Buffer)
		}
	}
	if len(seen) != 2 {
		t.Errorf("templates with branches in %v", seen)
	}
}

// Each row of section 10 is one item in the vectors, and of the length that the row has.
func TestSpecRowsAreItems(t *testing.T) {
	text := section(t, "10. Secret, transcript, MAC")
	v := loadVectors(t)
	secrets, transcripts, found := strings.Cut(text, "`transcript` is `item(x)`")
	if !found || !strings.Contains(secrets, "`info` is `item(x)`") {
		t.Fatal("it is not said what rows are")
	}
	check := func(name, table string, data []byte) {
		rows := regexp.MustCompile(`(?m)^\| ([A-Za-z ]+) \| (any|\d+)(?: to (\d+))? \| `).FindAllStringSubmatch(table, -1)
		if len(rows) < 10 {
			t.Fatalf("%d rows", len(rows))
		}
		for _, row := range rows {
			if len(data) < 4 {
				t.Fatalf("%s: no item for the row %s", name, row[1])
			}
			size := int(binary.BigEndian.Uint32(data))
			least, _ := strconv.Atoi(row[2]) // any: 0
			most := least
			if row[2] == "any" {
				most = len(data)
			} else if row[3] != "" {
				most, _ = strconv.Atoi(row[3])
			}
			if size < least || size > most || size > len(data)-4 {
				t.Errorf("%s: the item of the row %s has %d bytes", name, row[1], size)
				return
			}
			data = data[4+size:]
		}
		if len(data) > 0 {
			t.Errorf("%s: %d bytes after the last row's item", name, len(data))
		}
	}
	if len(v.Secrets) == 0 || len(v.Transcripts) == 0 {
		t.Fatal("no vectors")
	}
	for _, s := range v.Secrets {
		if len(s.AKName) == 34 { // the name of an AK of this version
			check(s.Name, secrets, s.Info)
		}
	}
	for _, s := range v.Transcripts {
		check(s.Name, transcripts, s.Transcript)
	}
}

// The keys and the quote of the exchange are what this project's TPM code takes them for.
func TestExchangeVectorIsOfTheTemplates(t *testing.T) {
	x := loadVectors(t).Exchange
	hello, err := ParseHello([]byte(x.HelloDocument))
	if err != nil {
		t.Fatal(err)
	}
	if ek, _, err := template.CheckEK(hello.EKPublic); err != nil || ek.Name != hello.EKTemplate {
		t.Errorf("EK: %s, %v", ek.Name, err)
	}
	if _, err := template.CheckAK(hello.AKPublic); err != nil {
		t.Errorf("AK: %v", err)
	}
	if name, err := template.Name(hello.AKPublic); err != nil || !bytes.Equal(name, x.AKName) {
		t.Errorf("AK name: %x, %v", name, err)
	}
}
