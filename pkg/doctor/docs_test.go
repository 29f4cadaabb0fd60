// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write what is generated from this package's table into docs/")

const page = "../../docs/node.md"

// docs/node.md has a table of Checks(). To write it: go test ./pkg/doctor -run Documented -update.
func TestChecksAreDocumented(t *testing.T) {
	const begin, end = "<!-- checks -->\n", "<!-- /checks -->\n"
	var table strings.Builder
	table.WriteString("| check | looks at | what can be wrong | remedy |\n| --- | --- | --- | --- |\n")
	for _, c := range Checks() {
		_, _ = fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", c.Name, c.Examines, c.Problems, c.Remedy)
	}
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(content), begin)
	have, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 || strings.Contains(after, begin) {
		t.Fatalf("%s: the table must be once between %q and %q", page, begin, end)
	}
	if have == table.String() {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program does; have\n%s\nwant\n%s", page, have, table.String())
	}
	if err := os.WriteFile(page, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Monitoring depends on the names, so they never change. Each row is complete.
func TestNamesAreStable(t *testing.T) {
	published := []string{
		"configuration", "tpm", "ek-certificate", "ek-template", "metadata-service", "certificate-directory", "certificate", "bootstrap-kubeconfig", "clock", "api-server",
		"certificate-accepted", "certificate-writes", "bootstrap-credential", "csr-create", "csr-watch", "signer", "last-result", "kubelet", "kubelet-bootstrap",
		"kubelet-rotation", "kubelet-kubeconfig", "kubelet-exec", "auto-approve-bindings",
	}
	have := map[string]int{}
	for _, c := range Checks() {
		have[c.Name]++
		if !regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`).MatchString(c.Name) || c.run == nil {
			t.Errorf("%q: not a name of lower-case words, or no check", c.Name)
		}
		for _, cell := range []string{c.Examines, c.Problems, c.Remedy} {
			if cell == "" || strings.ContainsAny(cell, "|\n") {
				t.Errorf("%s: %q is not a cell for the table", c.Name, cell)
			}
		}
	}
	for _, name := range published {
		if have[name] != 1 {
			t.Errorf("%s is there %d times", name, have[name])
		}
	}
}

// Each "see <check>" names an existing check.
func TestChecksReferToChecksThatExist(t *testing.T) {
	names := map[string]bool{"identify": true, "configuration.md": true, "clouds.md": true}
	for _, c := range Checks() {
		names[c.Name] = true
	}
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, entry := range entries {
		if !strings.HasSuffix(entry.Name(), ".go") || strings.HasSuffix(entry.Name(), "_test.go") {
			continue
		}
		source, err := os.ReadFile(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?:"|: |; )see ([a-z-]+)["; ]`).FindAllStringSubmatch(string(source), -1) {
			if m[1] == "dmesg" {
				continue
			}
			found++
			if !names[m[1]] {
				t.Errorf("%s: there is no check %q", entry.Name(), m[1])
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d references were found", found)
	}
}
