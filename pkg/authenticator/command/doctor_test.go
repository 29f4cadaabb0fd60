// SPDX-License-Identifier: Apache-2.0

package command

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/checkup"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/doctor"
)

func TestDoctorCommandLine(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"an output of another kind": {[]string{"doctor", "--output=xml"}, `"xml"`},
		"no time":                   {[]string{"doctor", "--timeout=0"}, "--timeout"},
		"an argument":               {[]string{"doctor", "now"}, `"now"`},
	} {
		t.Run(name, func(t *testing.T) { call(t, "", c.args...).failed(t, 3, c.says) })
	}
}

// doctorOf runs doctor for a node without a kubelet, and returns its results by name.
func doctorOf(t *testing.T, n node, args ...string) (callResult, map[string]checkup.Result) {
	t.Helper()
	before := tree(t, n.root)
	o := call(t, "", n.with(append([]string{"doctor", "--output=json", "--proc=" + filepath.Join(n.root, "proc"), "--kubelet-kubeconfig=/nowhere/kubelet.conf"}, args...)...)...)
	if after := tree(t, n.root); after != before {
		t.Errorf("it changed\n%s\nto\n%s", before, after)
	}
	var report doctor.Report
	decoder := json.NewDecoder(strings.NewReader(o.stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil || decoder.More() {
		t.Fatalf("standard output is not one report: %v: %s", err, o.stdout)
	}
	results := map[string]checkup.Result{}
	for _, r := range report.Checks {
		results[r.Name] = r
	}
	if len(results) != len(doctor.Checks()) {
		t.Errorf("%d results of %d", len(results), len(doctor.Checks()))
	}
	return o, results
}

// It exits with its own code, names what failed, and looks at where the flags lead.
func TestDoctorFails(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	o, results := doctorOf(t, n)
	if o.code != 31 || !strings.Contains(o.stderr, "failed: ") || !strings.Contains(o.stderr, "\nhint: ") || !strings.Contains(o.stderr, "kubelet-kubeconfig") {
		t.Errorf("exit code %d: %s", o.code, o.stderr)
	}
	for name, want := range map[string]checkup.Status{"configuration": checkup.OK, "certificate": checkup.OK, "tpm": checkup.Skipped, "kubelet-kubeconfig": checkup.Failure, "bootstrap-kubeconfig": checkup.Warning} {
		if got := results[name]; got.Status != want {
			t.Errorf("%s: %+v, want %s", name, got, want)
		}
	}
}

// A configuration that is wrong is one finding among the others.
func TestDoctorWithAWrongConfiguration(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	for name, args := range map[string][]string{
		"a file that does not parse": {"--config=" + n.write(t, "wrong.yaml", configHead+"nonsense: 1\n")},
		"a setting that cannot be":   {"--signer-name=nonsense"},
	} {
		t.Run(name, func(t *testing.T) {
			o, results := doctorOf(t, n, args...)
			if r := results["configuration"]; o.code != 31 || r.Status != checkup.Failure || !strings.Contains(r.Message, "nonsense") {
				t.Errorf("exit code %d: %+v", o.code, r)
			}
			if r := results["certificate"]; r.Status != checkup.OK {
				t.Errorf("the flags do not count any more: %+v", r)
			}
		})
	}
}

func TestDoctorForAPerson(t *testing.T) {
	n := newNode(t)
	o := call(t, "", n.with("doctor", "--proc="+filepath.Join(n.root, "proc"))...)
	lines := strings.Split(strings.TrimSuffix(o.stdout, "\n"), "\n")
	checks := 0
	for _, line := range lines {
		if !strings.HasPrefix(line, "        ") {
			checks++
		} else if !strings.Contains(line, "remedy: ") {
			t.Errorf("neither a check nor a remedy: %q", line)
		}
	}
	if checks != len(doctor.Checks()) || o.code != 31 {
		t.Errorf("%d lines for %d checks, exit code %d:\n%s", checks, len(doctor.Checks()), o.code, o.stdout)
	}
}

// The help is honest about the one thing that is written.
func TestDoctorHelp(t *testing.T) {
	o := call(t, "", "doctor", "--help")
	for _, says := range []string{"No request is filed", "TPM's lock file, and the runtime directory"} {
		if !strings.Contains(o.stdout, says) || o.code != 0 {
			t.Errorf("exit code %d, no %q in\n%s", o.code, says, o.stdout)
		}
	}
}
