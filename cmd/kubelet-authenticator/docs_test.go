// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// What the documents say is shown by a test has such a test: `TestX`, or `TestX/row` where the row is named in the test files of a package
// that has TestX.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	packages := map[string]string{} // the test files of each
	err := filepath.WalkDir("../..", func(path string, _ os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			packages[filepath.Dir(path)] += readFile(t, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for document, least := range map[string]int{"README.md": 10, "docs/threat-model.md": 40} {
		named := regexp.MustCompile("`(Test\\w+)(?:/([^`]+))?`").FindAllStringSubmatch(readFile(t, "../../"+document), -1)
		if len(named) < least {
			t.Errorf("%s: only %d tests are named", document, len(named))
		}
		for _, m := range named {
			found := false
			for _, source := range packages {
				found = found || strings.Contains(source, "\nfunc "+m[1]+"(") && (m[2] == "" || strings.Contains(source, `"`+m[2]+`"`))
			}
			if !found {
				t.Errorf("%s: there is no %s", document, strings.Trim(m[0], "`"))
			}
		}
	}
}

// What the README says are the steps are functions of the library.
func TestReadmeNamesStepsThatExist(t *testing.T) {
	source := readFile(t, "../../pkg/authenticator/look.go") + readFile(t, "../../pkg/authenticator/run.go") + readFile(t, "../../pkg/authenticator/review.go") +
		readFile(t, "../../pkg/authenticator/worker.go") + readFile(t, "../../pkg/authenticator/enrol.go") +
		readFile(t, "../../pkg/authenticator/prepare.go") + readFile(t, "../../pkg/authenticator/conclude.go")
	named := regexp.MustCompile("\\*\\*`(\\w+)`\\*\\*").FindAllStringSubmatch(readFile(t, "../../README.md"), -1)
	if len(named) < 10 {
		t.Fatalf("only %d steps are named", len(named))
	}
	for _, m := range named {
		if !regexp.MustCompile(`(?m)^func \([^)]*\) ` + m[1] + `\(`).MatchString(source) {
			t.Errorf("there is no function %s", m[1])
		}
	}
}

// Each field of the configuration is documented with its flag and its default.
func TestConfigurationIsDocumented(t *testing.T) {
	table := readFile(t, "../../docs/configuration.md")
	_, table, _ = strings.Cut(table, "<!-- table -->")
	table, _, _ = strings.Cut(table, "<!-- /table -->")
	help := readFile(t, "../../pkg/authenticator/command/command.go")
	defaults := reflect.ValueOf(authenticator.DefaultConfig())
	rows := 0
	for i := range defaults.NumField() {
		name, _, _ := strings.Cut(defaults.Type().Field(i).Tag.Get("json"), ",")
		if name == "" {
			continue // kind and version
		}
		row := regexp.MustCompile("(?m)^\\| `" + name + "` \\| `--([a-z-]+)` \\| (.*?) \\|").FindStringSubmatch(table)
		if row == nil {
			t.Errorf("%s has no row", name)
			continue
		}
		rows++
		if !strings.Contains(help, `"`+row[1]+`"`) {
			t.Errorf("%s: there is no flag --%s", name, row[1])
		}
		value := defaults.Field(i)
		if value.Kind() == reflect.Struct {
			value = value.FieldByName("Duration")
		}
		if text := value.String(); value.Kind() == reflect.String && text != "" && !strings.Contains(row[2], text) {
			t.Errorf("%s: the default %q is not in %q", name, text, row[2])
		}
	}
	if got := strings.Count(table, "\n| `"); got != rows {
		t.Errorf("%d rows for %d fields", got, rows)
	}
}

// The example of a configuration file is one.
func TestConfigurationExampleIsAccepted(t *testing.T) {
	_, example, ok := strings.Cut(readFile(t, "../../docs/configuration.md"), "```yaml\n")
	example, _, _ = strings.Cut(example, "```")
	config := authenticator.DefaultConfig()
	if err := authenticator.ParseConfig([]byte(example), &config); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if _, err := authenticator.NewOptions(config, providers(), authenticator.ExecInfo{}); err != nil {
		t.Error(err)
	}
}
