// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/machineentry"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/machinelist"
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
	return machinelist.Of(entries...)
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
			"broken: invalid", `broken:7: machine "alfa": rack: unknown field`, `broken:8: machine "B": its nodeName "B" is not`, "broken:10: ", "total: 2 machines",
		}},
		"a ConfigMap":         {[]string{"map"}, 0, []string{"map (m inventory.yaml): 1 machine, "}},
		"a broken ConfigMap":  {[]string{"badmap"}, 10, []string{"badmap (m inventory.yaml): invalid", `badmap:10: machine "emil": rack: unknown field`}},
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
	for name, args := range map[string][]string{"no file": {"check"}, "a file that is not there": {"check", "/nonexistent"}, "another format": {"check", "a", "-o", "xml"}, "no command": {}, "a removed command": {"merge", "a"}} {
		if code, stdout, stderr := run(args...); code != cli.CodeUsage || stdout != "" || stderr == "" {
			t.Errorf("%s: exit code %d, %s%s", name, code, stdout, stderr)
		}
	}
}
