// SPDX-License-Identifier: Apache-2.0

package tpm

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
)

const reasonsPage = "../../../docs/reasons.md"

var update = flag.Bool("update", false, "write docs/reasons.md anew")

// docs/reasons.md is Reasons() of both packages for people. Write it anew with: go test ./pkg/verifier/tpm -run ReasonsAreDocumented -update.
func TestReasonsAreDocumented(t *testing.T) {
	data, err := os.ReadFile(reasonsPage)
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	for name, reasons := range map[string]map[verifier.Reason]string{"rules": verifier.Reasons(), "tpm": reasonMeanings()} {
		begin, end := "<!-- "+name+" -->\n", "<!-- /"+name+" -->\n"
		before, rest, ok := strings.Cut(page, begin)
		have, after, ok2 := strings.Cut(rest, end)
		if !ok || !ok2 || strings.Contains(after, begin) {
			t.Fatalf("%s: the table stands once between %q and %q", reasonsPage, begin, end)
		}
		table := tableOf(reasons)
		if have != table && !*update {
			t.Errorf("%s is not what the program does; have\n%s\nwant\n%s", reasonsPage, have, table)
		}
		page = before + begin + table + end + after
	}
	if *update && page != string(data) {
		if err := os.WriteFile(reasonsPage, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func tableOf(reasons map[verifier.Reason]string) string {
	var table strings.Builder
	table.WriteString("| reason | meaning |\n| --- | --- |\n")
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		_, _ = fmt.Fprintf(&table, "| %s | %s |\n", reason, reasons[reason])
	}
	return table.String()
}

// A reason has one meaning, whichever package gives it.
func TestReasonsAreApart(t *testing.T) {
	for reason := range reasonMeanings() {
		if _, twice := verifier.Reasons()[reason]; twice {
			t.Errorf("%s stands in both tables", reason)
		}
	}
}
