// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
)

// inventoryFiles writes files into a directory of the test's, and returns what runs a command
// there: "DIR" in its output is that directory.
func inventoryFiles(t *testing.T, files map[string]string) func(args ...string) (code int, stdout, stderr string) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return func(args ...string) (int, string, string) {
		for i, arg := range args {
			if _, is := files[arg]; is {
				args[i] = filepath.Join(dir, arg)
			}
		}
		var stdout, stderr bytes.Buffer
		code := Program{}.Run(t.Context(), Process{Args: append([]string{"inventory"}, args...), Stdout: &stdout, Stderr: &stderr})
		return code, strings.ReplaceAll(stdout.String(), dir+"/", ""), strings.ReplaceAll(stderr.String(), dir+"/", "")
	}
}

func fingerprintOf(digit string) string { return strings.Repeat(digit, 64) }

// listOfMachines has a machine for each name and digit of its EK, such as "alfa=1".
func listOfMachines(machines ...string) string {
	var entries []machineentry.Machine
	for _, m := range machines {
		name, digit, _ := strings.Cut(m, "=")
		entries = append(entries, machineentry.Machine{NodeName: name, EKs: []string{fingerprintOf(digit)}})
	}
	return machineentry.Document(entries)
}

// configMap is a manifest as kubectl prints it.
func configMap(t *testing.T, name, content string) string {
	t.Helper()
	out, err := yaml.Marshal(corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"inventory.yaml": content},
	})
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestInventoryCheck(t *testing.T) {
	asJSON, err := json.Marshal(listOfMachines("x=e"))
	if err != nil {
		t.Fatal(err)
	}
	run := inventoryFiles(t, map[string]string{
		"a": listOfMachines("alfa=1", "bert=2"), "same": listOfMachines("bert=2", "carl=3"), "twice": listOfMachines("dora=1"), "differs": listOfMachines("alfa=4"),
		"broken":  listOfMachines("alfa=1") + "  rack: 1\n- {nodeName: B, eks: []}\n" + "---\nkind: [\n",
		"map":     configMap(t, "m", listOfMachines("emil=5")),
		"badmap":  configMap(t, "m", listOfMachines("emil=5")+"  rack: 1\n"),
		"twomaps": configMap(t, "m", listOfMachines("emil=5")) + "---\n" + configMap(t, "n", listOfMachines("fred=6")),
		"list":    `{"kind": "List", "items": [{"kind": "ConfigMap", "metadata": {"name": "j"}, "data": {"k": ` + string(asJSON) + `}}]}`,
		"badlist": `{"kind": "List", "items": [{"kind": "ConfigMap", "metadata": {"name": "j"}, "data": {"k": "nodeName: X"}}]}`,
		"large":   listOfMachines("alfa=1") + strings.Repeat("#\n", 150_000), "huge": listOfMachines("alfa=1") + strings.Repeat("#\n", 600_000),
	})
	for name, c := range map[string]struct {
		files []string
		code  int
		says  []string
	}{
		"good":        {[]string{"a"}, 0, []string{"a: 2 machines, 301 bytes\n", "total: 2 machines, 0 repeated, 0 conflicts\n"}},
		"two parts":   {[]string{"a", "same"}, 0, []string{"same: 2 machines", "total: 3 machines, 1 repeated, 0 conflicts\n"}},
		"an EK twice": {[]string{"a", "twice"}, 10, []string{`conflict: the EK "` + fingerprintOf("1") + `" is claimed by machine "alfa" (a:4), machine "dora" (twice:4)`, "3 machines"}},
		"differently": {[]string{"a", "differs"}, 10, []string{`conflict: machine "alfa" is listed differently: a:4, differs:4`, "1 conflict"}},
		"broken": {[]string{"broken", "same"}, 10, []string{
			"broken: invalid", `broken:7: machine "alfa": a machine has no field "rack"`, `broken:8: machine "B": its nodeName "B" is not`, "broken:10: ", "total: 2 machines",
		}},
		"a ConfigMap":         {[]string{"map"}, 0, []string{"map (m inventory.yaml): 1 machine, "}},
		"a broken ConfigMap":  {[]string{"badmap"}, 10, []string{"badmap (m inventory.yaml): invalid", `badmap:10: machine "emil": a machine has no field "rack"`}},
		"two ConfigMaps":      {[]string{"twomaps"}, 0, []string{"twomaps (m inventory.yaml): 1", "twomaps (n inventory.yaml): 1", "total: 2 machines"}},
		"a list in JSON":      {[]string{"list"}, 0, []string{"list (j k): 1 machine"}},
		"a bad one in JSON":   {[]string{"badlist"}, 10, []string{`badlist (j k):1: machine "X": its nodeName`}},
		"a large one":         {[]string{"large"}, 0, []string{"bytes, as a ConfigMap with: kubectl apply --server-side\n"}},
		"one that is too big": {[]string{"huge"}, 0, []string{"bytes, too long for a ConfigMap\n"}},
	} {
		code, stdout, stderr := run(append([]string{"check"}, c.files...)...)
		if code != c.code || (stderr == "") != (code == 0) {
			t.Errorf("%s: exit code %d, %s", name, code, stderr)
		}
		for _, want := range c.says {
			if !strings.Contains(stdout, want) {
				t.Errorf("%s: it does not say %q:\n%s", name, want, stdout)
			}
		}
	}
	code, stdout, _ := run("check", "-o", "json", "broken", "a", "twice")
	var report inventoryReport
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || code != 10 || len(report.Parts) != 3 || len(report.Parts[0].Problems) != 3 || report.Parts[0].Problems[1].Line != 8 ||
		!report.Parts[1].FitsClientSideApply || report.Machines != 3 || len(report.Conflicts) != 1 || report.Conflicts[0].Entries[1].Machine != "dora" {
		t.Errorf("%d, %v: %s", code, err, stdout)
	}
	for name, args := range map[string][]string{"no file": {"check"}, "a file that is not there": {"check", "/nonexistent"}, "another format": {"check", "a", "-o", "xml"}, "no command": {}, "one side": {"diff", "a"}} {
		if code, stdout, stderr := run(args...); code != cli.CodeUsage || stdout != "" || stderr == "" {
			t.Errorf("%s: exit code %d, %s%s", name, code, stdout, stderr)
		}
	}
}

// What merge writes is stable, says the same, and is written only if nothing is wrong.
func TestInventoryMerge(t *testing.T) {
	run := inventoryFiles(t, map[string]string{
		"a": listOfMachines("carl=3", "alfa=1"), "b": listOfMachines("bert=2", "alfa=1"), "twice": listOfMachines("dora=1"), "broken": "nonsense: 1\n",
		"all": "apiVersion: " + inventory.APIVersion + "\nkind: " + inventory.Kind + "\nmachines:\n- name: Rack 1\n  nodeName: emil\n  providerID: metal://1\n  addresses: [emil.example.com, 192.0.2.5]\n" +
			"  bootstrapTokenID: \"012345\"\n  eks: [{fingerprint: " + fingerprintOf("a") + ", template: ecc-p256, certificate: {fingerprint: " + fingerprintOf("b") + "}}]\n",
		"none": machineentry.Document(nil),
	})
	for _, files := range [][]string{{"a", "b"}, {"b", "a"}, {"b", "a", "a", "none"}} {
		if code, stdout, stderr := run(append([]string{"merge"}, files...)...); code != 0 || stdout != listOfMachines("alfa=1", "bert=2", "carl=3") {
			t.Errorf("%v: exit code %d, %s\n%s", files, code, stderr, stdout)
		}
	}
	code, stdout, stderr := run("merge", "all")
	const want = "- name: \"Rack 1\"\n  nodeName: emil\n  providerID: metal://1\n  addresses: [emil.example.com, \"192.0.2.5\"]\n  bootstrapTokenID: \"012345\"\n  eks:\n  - fingerprint: "
	if code != 0 || !strings.HasSuffix(stdout, want+fingerprintOf("a")+"\n") {
		t.Errorf("exit code %d, %s\n%s", code, stderr, stdout)
	}
	if code, stdout, _ := run("merge", "none"); code != 0 || stdout != machineentry.Document(nil) {
		t.Errorf("none: exit code %d\n%s", code, stdout)
	}
	for _, files := range [][]string{{"a", "twice"}, {"a", "broken"}} {
		if code, stdout, stderr := run(append([]string{"merge"}, files...)...); code != 10 || stdout != "" || !strings.Contains(stderr, files[1]+":") {
			t.Errorf("%v: exit code %d, %s\n%s", files, code, stderr, stdout)
		}
	}
}

func TestInventoryDiff(t *testing.T) {
	more := strings.Replace(listOfMachines("alfa=1", "dora=4", "bert=5"), "  eks:", "  providerID: metal://1\n  eks:", 1)
	run := inventoryFiles(t, map[string]string{"old": listOfMachines("alfa=1", "bert=2", "carl=3"), "new": more, "broken": "nonsense: 1\n"})
	code, stdout, stderr := run("diff", "old", "new")
	want := fmt.Sprintf("- \"carl\"\n+ \"dora\"\n~ \"alfa\"\n    providerID: none -> metal://1\n~ \"bert\"  ADMITS OTHER HARDWARE\n    eks: %s -> %s\n"+
		"1 machine added, 1 removed, 2 changed, 1 of these with other hardware\n", fingerprintOf("2"), fingerprintOf("5"))
	if code != 0 || stdout != want || stderr != "" {
		t.Errorf("exit code %d, %s\n%s", code, stderr, stdout)
	}
	_, stdout, _ = run("diff", "-o", "yaml", "old", "new")
	var got inventoryDiff
	if err := yaml.UnmarshalStrict([]byte(stdout), &got); err != nil || !reflect.DeepEqual(got, inventoryDiff{[]string{"dora"}, []string{"carl"}, []changeEntry{
		{"alfa", []inventory.Difference{{Field: "providerID", New: []string{"metal://1"}}}, false},
		{"bert", []inventory.Difference{{Field: "eks", Old: []string{fingerprintOf("2")}, New: []string{fingerprintOf("5")}}}, true},
	}}) {
		t.Errorf("%v: %+v", err, got)
	}
	if code, stdout, _ := run("diff", "old", "old"); code != 0 || stdout != "0 machines added, 0 removed, 0 changed, 0 of these with other hardware\n" {
		t.Errorf("the same: exit code %d\n%s", code, stdout)
	}
	if code, stdout, stderr := run("diff", "old", "broken"); code != 10 || stdout != "" || !strings.Contains(stderr, "broken:1:") {
		t.Errorf("exit code %d, %s\n%s", code, stderr, stdout)
	}
}
