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

var update = flag.Bool("update", false, "write docs/reasons.md")

// Two tables of docs/reasons.md are the reasons of both packages for people. To write them: go test
// ./pkg/verifier/tpm -run ReasonsAreDocumented -update. The last column, what to do, is written by
// hand and kept. In the row of a new reason it is empty: docs/reasons_test.go refuses that.
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
		table := tableOf(reasons, remediesIn(have))
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

// remediesIn returns the last cell of each row of a table, by its first.
func remediesIn(table string) map[string]string {
	remedies := map[string]string{}
	for row := range strings.Lines(table) {
		if cells := strings.Split(strings.TrimSpace(row), " | "); len(cells) == 3 {
			remedies[strings.TrimPrefix(cells[0], "| ")] = strings.TrimSuffix(cells[2], " |")
		}
	}
	return remedies
}

func tableOf(reasons map[verifier.Reason]string, remedies map[string]string) string {
	var table strings.Builder
	table.WriteString("| reason | meaning | what to do |\n| --- | --- | --- |\n")
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		_, _ = fmt.Fprintf(&table, "| %s | %s | %s |\n", reason, reasons[reason], remedies[string(reason)])
	}
	return table.String()
}

// A reason has one meaning, for every package that gives it.
func TestReasonsAreApart(t *testing.T) {
	for reason := range reasonMeanings() {
		if _, twice := verifier.Reasons()[reason]; twice {
			t.Errorf("%s stands in both tables", reason)
		}
	}
}
