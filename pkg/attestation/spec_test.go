// SPDX-License-Identifier: Apache-2.0

package attestation

import (
	"bytes"
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
		"1. Roles and objects": {HelloSignerName, AnnotationChallenge, AnnotationVersions, AnnotationEK},
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
		"15. Sizes": {strconv.Itoa(MaxRequestSize), strconv.Itoa(MaxDocument), strconv.Itoa(MaxChallenge), strconv.Itoa(MaxProviderName), strconv.Itoa(MaxPublic),
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
