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

// What the README says is shown by a test is shown by a test.
func TestReadmeNamesTestsThatExist(t *testing.T) {
	tests := map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(readFile(t, path), -1) {
			tests[m[1]] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(readFile(t, "../../README.md"), -1)
	if len(named) < 10 {
		t.Fatalf("only %d tests are named", len(named))
	}
	for _, m := range named {
		if !tests[m[1]] {
			t.Errorf("there is no %s", m[1])
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
