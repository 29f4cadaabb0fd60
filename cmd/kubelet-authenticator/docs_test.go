// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/tpm/template"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Each test that the documents name exists: `TestX`, or `TestX/row` if a test file of a package
// with TestX names the row.
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
	for document, least := range map[string]int{"docs/reliability.md": 40, "docs/threat-model.md": 40, "docs/permissions.md": 3} {
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

// What docs/architecture.md says are the steps are functions of the library.
func TestStepsExist(t *testing.T) {
	source := ""
	for _, name := range []string{"run", "nodestate/status", "rejection", "supervisor", "enrol/worker", "enrol/enrolment", "enrol/conclude"} {
		source += readFile(t, "../../pkg/authenticator/"+name+".go")
	}
	named := regexp.MustCompile("\\*\\*`(\\w+)`\\*\\*").FindAllStringSubmatch(readFile(t, "../../docs/architecture.md"), -1)
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
	help := readFile(t, "../../pkg/authenticator/command/invocation.go")
	defaults := reflect.ValueOf(authenticator.DefaultConfig())
	rows := 0
	for i := range defaults.NumField() {
		name, _, _ := strings.Cut(defaults.Type().Field(i).Tag.Get("json"), ",")
		if name == "" {
			continue // kind and version
		}
		row := regexp.MustCompile("(?m)^\\| `" + name + "`, `--([a-z-]+)` \\| [a-z ]+ \\| (.*?) \\|").FindStringSubmatch(table)
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

// The names of endorsement keys are those of the library, in the documents and in the Ansible role.
func TestEndorsementKeysAreNamed(t *testing.T) {
	var role struct {
		Templates []string `json:"__kubelet_authenticator_ek_templates"`
	}
	if err := yaml.Unmarshal([]byte(readFile(t, "../../image-builder/ansible/roles/kubelet_authenticator/vars/main.yml")), &role); err != nil {
		t.Fatal(err)
	}
	names := append([]string{authenticator.DefaultConfig().EKTemplate}, template.Names()...)
	if !slices.Equal(role.Templates, names) {
		t.Errorf("the role has %q, want %q", role.Templates, names)
	}
	for _, name := range names {
		if !strings.Contains(readFile(t, "../../docs/configuration.md"), "`"+name+"`") {
			t.Errorf("docs/configuration.md: %s is missing", name)
		}
		if !regexp.MustCompile(`(?m)^(\.Cm )?(.* )?` + name + `( .*)?$`).MatchString(section(t, readFile(t, configPage), "CONFIGURATION FIELDS")) {
			t.Errorf("%s: %s is missing", configPage, name)
		}
		if _, err := tpm.Factory().New(provider.Settings{EKTemplate: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// blocks returns the code blocks of a document that are in one language.
func blocks(document, language string) []string {
	var found []string
	for _, rest := range strings.Split(document, "```"+language+"\n")[1:] {
		block, _, _ := strings.Cut(rest, "```")
		found = append(found, block)
	}
	return found
}

// The examples of a configuration file are some.
func TestConfigurationExamplesAreAccepted(t *testing.T) {
	for name, example := range map[string]string{
		"configuration.md":    blocks(readFile(t, "../../docs/configuration.md"), "yaml")[0],
		"kubeadm.md":          blocks(readFile(t, "../../docs/integration/kubeadm.md"), "yaml")[0],
		"config.example.yaml": readFile(t, "../../packaging/config.example.yaml"),
	} {
		config := authenticator.DefaultConfig()
		if err := authenticator.ParseConfig([]byte(example), &config); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if _, err := authenticator.New(authenticator.Options{Config: config, Providers: providers()}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The examples for clouds have configuration files that the plugin accepts, and keep pods away from
// the metadata service.
func TestCloudExamples(t *testing.T) {
	examples, err := filepath.Glob("../../docs/examples/clouds/*.yaml")
	if err != nil || len(examples) != 6 {
		t.Fatalf("%q, %v", examples, err)
	}
	for _, path := range examples {
		text := readFile(t, path)
		files := map[string]string{}
		for _, document := range strings.Split(text, "\n---\n") {
			var content struct {
				Files []exampleFile `json:"write_files"`
				Spec  struct {
					Template struct {
						Spec struct {
							Files []exampleFile `json:"files"`
						} `json:"spec"`
					} `json:"template"`
				} `json:"spec"`
			}
			if err := yaml.Unmarshal([]byte(document), &content); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			for _, file := range append(content.Files, content.Spec.Template.Spec.Files...) {
				files[file.Path] = file.Content
			}
		}
		config := authenticator.DefaultConfig()
		if err := authenticator.ParseConfig([]byte(files[authenticator.DefaultConfigFile]), &config); err != nil {
			t.Errorf("%s: %v", path, err)
		} else if _, err := authenticator.New(authenticator.Options{Config: config, Providers: providers()}); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		rules, unit := files["/etc/metadata-guard.nft"], files["/etc/systemd/system/metadata-guard.service"]
		if !strings.Contains(rules, "hook prerouting") || !strings.Contains(rules, "ip daddr 169.254.169.254 drop") ||
			!strings.Contains(unit, "nft -f /etc/metadata-guard.nft") || !strings.Contains(text, "- systemctl enable --now metadata-guard.service") {
			t.Errorf("%s: pods reach the metadata service", path)
		}
		if config.Provider == "ec2-role" && !regexp.MustCompile(`(?s)[hH]ttpTokens[:=] ?required.*[hH]ttpPutResponseHopLimit[:=] ?1\b`).MatchString(text) {
			t.Errorf("%s: tokens are not required, or leave the node", path)
		}
	}
}

// exampleFile is a file that an example writes on the node.
type exampleFile struct {
	Path    string `json:"path"`
	Content string `json:"content"`
}

// What is commented out in the example is accepted, too, and is the default where it says so.
func TestCommentedExampleIsAccepted(t *testing.T) {
	example := readFile(t, "../../packaging/config.example.yaml")
	all := regexp.MustCompile(`(?m)^# (\w+: \S+)$`).ReplaceAllString(example, "$1")
	if strings.Count(example, "\n# ")-strings.Count(all, "\n# ") < 4 {
		t.Fatalf("nothing was commented in:\n%s", all)
	}
	want := authenticator.DefaultConfig()
	config := want
	if err := authenticator.ParseConfig([]byte(all), &config); err != nil {
		t.Fatal(err)
	}
	want.TypeMeta, want.Provider, want.ProviderIDScheme = config.TypeMeta, "tpm", "metal"
	want.MetricsTextfile = "/var/lib/node_exporter/textfile_collector/kubelet_authenticator.prom"
	if config != want {
		t.Errorf("got %+v\nwant %+v", config, want)
	}
}

// The drop-in is the one in the document, and leads to the files that prepare writes.
func TestDropIn(t *testing.T) {
	dropIn := readFile(t, "../../packaging/systemd/20-kubelet-authenticator.conf")
	if shown := blocks(readFile(t, "../../docs/integration/kubeadm.md"), "ini"); len(shown) != 1 || shown[0] != dropIn {
		t.Errorf("shown: %q", shown)
	}
	if !strings.Contains(dropIn, "\nEnvironmentFile=-"+kubelet.EnvFile+"\n") {
		t.Errorf("it does not name %s: %s", kubelet.EnvFile, dropIn)
	}
}

// The map of the suites has a row for each package of test/ with tests, and no other. Each named
// target of make exists.
func TestContributingNamesEachSuite(t *testing.T) {
	document := readFile(t, "../../CONTRIBUTING.md")
	_, table, _ := strings.Cut(document, "\n## The suites\n")
	var named, suites []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z0-9/]+)` \\|").FindAllStringSubmatch(table, -1) {
		named = append(named, row[1])
	}
	err := filepath.WalkDir("../../test", func(path string, entry fs.DirEntry, err error) error {
		// modules of their own, without tests
		if err != nil || entry.IsDir() && entry.Name() == "components" {
			return cmp.Or(err, fs.SkipDir)
		}
		if strings.HasSuffix(path, "_test.go") {
			suites = append(suites, strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../../test/"))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(named)
	slices.Sort(suites)
	if suites = slices.Compact(suites); !slices.Equal(named, suites) {
		t.Errorf("the map has %q, test/ has %q", named, suites)
	}
	makefile := readFile(t, "../../Makefile")
	for _, target := range regexp.MustCompile("`make ([a-z0-9-]+)").FindAllStringSubmatch(document, -1) {
		if !strings.Contains(makefile, "\n"+target[1]+": ") {
			t.Errorf("there is no target %s", target[1])
		}
	}
}
