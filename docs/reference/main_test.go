// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

const root = "../.."

// manifests are the CRDs.
var manifests = []string{filepath.Join(root, "packaging/kubernetes/crd.yaml"), filepath.Join(root, "packaging/kubernetes-revocation/component/crd.yaml")}

// The pages are those that `make generate` makes.
func TestPagesAreCurrent(t *testing.T) {
	pages, err := makePages(root, manifests...)
	if err != nil {
		t.Fatal(err)
	}
	committed, err := filepath.Glob("*.md")
	if err != nil || !slices.Equal(committed, []string{objectsPage}) || len(pages) != 3 {
		t.Errorf("%d pages are made, and these are here: %q, %v", len(pages), committed, err)
	}
	for name, made := range pages {
		path := name
		if name != objectsPage {
			path = filepath.Join("..", name)
		}
		data, err := os.ReadFile(path)
		if err != nil || string(data) != made {
			t.Errorf("%s is not what is made, %v: run make generate", name, err)
		}
	}
}

// So are the man pages, which have each command and flag that is not hidden.
func TestManPagesAreCurrent(t *testing.T) {
	made, err := makeManPages(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, page := range manPages() {
		data, err := os.ReadFile(filepath.Join(root, "docs/man", name))
		if err != nil || string(data) != made[name] {
			t.Errorf("%s is not what is made, %v: run make generate", name, err)
		}
		for _, c := range commandsOf(page.program) {
			if !strings.Contains(made[name], "\n.Ss "+strings.TrimPrefix(c.CommandPath(), page.program.CommandPath()+" ")) {
				t.Errorf("%s: no command %s", name, c.CommandPath())
			}
			c.Flags().VisitAll(func(f *pflag.Flag) {
				if !f.Hidden && f.Name != "help" && !strings.Contains(made[name], "Fl -"+f.Name) {
					t.Errorf("%s: no flag --%s", name, f.Name)
				}
			})
		}
		if strings.Count(made[name], "\n.It 1\n") != 1 || strings.Count(made[name], "\n.It 3\n") != 1 {
			t.Errorf("%s has no exit codes", name)
		}
	}
}

// Text of help is text in mdoc, whatever it begins with.
func TestTextIsEscaped(t *testing.T) {
	w := &mdoc{}
	w.text(".Sh NOT A HEADING. 'Nor this. A \\fB is no escape.")
	w.literal("  .Ed\n  `x`")
	want := "\\&.Sh NOT A HEADING.\n\\&'Nor this.\nA \\efB is no escape.\n.Bd -literal -offset indent\n\\&.Ed\n\\`x\\`\n.Ed\n"
	if w.String() != want {
		t.Errorf("%q, want %q", w.String(), want)
	}
}

// So are the policies that the controller fills.
func TestPoliciesAreCurrent(t *testing.T) {
	made, err := makePolicies()
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{"revoked-policies.yaml": "component/policies.yaml", "suspended-tokens.yaml": "optional/suspended-tokens.yaml"} {
		data, err := os.ReadFile(filepath.Join(root, "packaging/kubernetes-revocation", file))
		if err != nil || made[name] == "" || string(data) != made[name] {
			t.Errorf("%s is not what is made, %v: run make generate", file, err)
		}
	}
}

// So are the schema and the README of the Helm chart.
func TestChartIsCurrent(t *testing.T) {
	made, err := makeChart(root)
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string]string{"values.schema.json": "values.schema.json", "chart-README.md": "README.md"} {
		data, err := os.ReadFile(filepath.Join(root, chartFolder, file))
		if err != nil || made[name] == "" || string(data) != made[name] {
			t.Errorf("%s is not what is made, %v: run make generate", file, err)
		}
	}
	for _, want := range []string{
		`"pattern": "^([0-9]+(\\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"`, `"description": "WaitDeadline is the age`, `"enum": [
                "Sign",
                "ApproveOnly"
              ]`,
	} {
		if !strings.Contains(made["values.schema.json"], want) {
			t.Errorf("the schema lacks %s", want)
		}
	}
}

// A value without a description is an error, and so is one that the schema does not know.
func TestEachValueHasADescription(t *testing.T) {
	described := node{"properties": node{"a": node{"description": "what it is"}}}
	for name, c := range map[string]struct {
		of, values node
		says       string
	}{
		"described":      {described, node{"a": 1}, ""},
		"no description": {node{"properties": node{"a": node{}}}, node{"a": 1}, "a has no description"},
		"no default":     {described, node{}, "is not in values.yaml"},
		"unknown":        {described, node{"a": 1, "b": 2}, "values.yaml has b"},
	} {
		if err := valueRows(&page{}, c.of, "", c.of, c.values); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What a page has to say of some fields: name, type, default or limits, description.
func TestRows(t *testing.T) {
	pages, err := makePages(root, manifests...)
	if err != nil {
		t.Fatal(err)
	}
	for page, rows := range map[string][]string{
		objectsPage: {
			"| **`spec.machine.source`** | string | 1 to 63 characters, `^[a-z0-9]([-a-z0-9]*[a-z0-9])?$` | the source of machines that knows it, such as inventory. |",
			"| `status.expires` | time |  | the end",
			"| **`status.ekReplaced.eks`** | list of string | 1 to 16 items, each 64 characters, `^[0-9a-f]{64}$` | the fingerprints",
			"| `status.conditions` | list of Kubernetes' Condition | at most 8 items | Attested",
			"| `spec.akName` | string | 68 to 100 characters, `^(000b[0-9a-f]{64}\\|000c[0-9a-f]{96})$` | the TPM name",
			"| **`spec.mode`** | string | `Immediately`, `AfterRenewal` | Immediately or",
			"| **`spec.ek`** | string | 64 characters, `^[0-9a-f]{64}$` | the fingerprint",
		},
		"controller-configuration.md": {
			"| `rates.perMachine.every` | duration | `10s` | ",
			"| `leaderElection.enabled` | bool | `true` | ",
			"| `clusterAPI.ekSources` | list of string | ",
			"| `signers[].name` | string | ",
			"| `tpm.pcrs.values` | map of list of string | ",
		},
		"configuration.md": {
			"| `prepareWait`, `--prepare-wait` | duration | `3m30s` | ",
		},
	} {
		lines := strings.Split(pages[page], "\n")
		for _, row := range rows {
			if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, row) }) {
				t.Errorf("%s lacks %s", page, row)
			}
		}
	}
}

// A field without a comment is an error, and no empty cell.
func TestEachFieldHasAComment(t *testing.T) {
	type bare struct {
		Field string `json:"field"`
	}
	page := configPage{folder: "docs/reference", defaults: reflect.ValueOf(bare{})}
	if _, err := page.render(root); err == nil || !strings.Contains(err.Error(), "bare.Field has no comment") {
		t.Error(err)
	}
	page.folder = "docs/reference/none"
	if _, err := page.render(root); err == nil {
		t.Error("a folder without types has a page")
	}
}
