// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/cli"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

const good = "apiVersion: " + config.APIVersion + "\nkind: " + config.Kind + `
clusterUID: c
signing: {mode: Sign, secretName: ca}
inventory: {file: /inventory.yaml}
tpm: {pcrs: {bank: sha256, indexes: [7]}}
metricsBindAddress: "0"
healthBindAddress: "0"
`

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// inManagement is the least configuration of a management cluster.
var inManagement = strings.NewReplacer("clusterUID: c\n", "clusterAPI: {ekSources: [Annotation]}\n", "signing: {mode: Sign, secretName: ca}", "signing: {mode: Sign}",
	"inventory: {file: /inventory.yaml}\n", "").Replace(good)

// authorizerArgs are the required flags of the authorizer, with files that do not exist.
func authorizerArgs(t *testing.T) []string {
	t.Helper()
	missing := filepath.Join(t.TempDir(), "missing")
	return []string{
		"authorizer", "--listen=127.0.0.1:0", "--health-listen=127.0.0.1:0", "--kubeconfig=" + missing, "--state-file=" + missing,
		"--tls-cert-file=" + missing, "--tls-private-key-file=" + missing, "--client-ca-file=" + missing,
	}
}

func TestExitCodes(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "") // not in a pod
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"version":              {[]string{"version"}, 0, ""},
		"help":                 {[]string{"--help"}, 0, ""},
		"an argument":          {[]string{"start"}, cli.CodeUsage, `"start"`},
		"an unknown flag":      {[]string{"--confg=x"}, cli.CodeUsage, "--confg"},
		"an output":            {[]string{"version", "-o", "xml"}, cli.CodeUsage, "xml"},
		"no file":              {[]string{"--config=/nonexistent"}, CodeConfiguration, "/nonexistent"},
		"an empty name":        {[]string{"--config="}, CodeConfiguration, "none is named"},
		"a broken file":        {[]string{"--config", write(t, good+"adit: true\n")}, CodeConfiguration, "line 9: adit: unknown field; did you mean audit?"},
		"a file is checked":    {[]string{"config", "check", write(t, good)}, 0, ""},
		"a broken one is":      {[]string{"config", "check", write(t, good+"adit: true\n")}, CodeConfiguration, "line 9: adit: unknown field; did you mean audit?"},
		"a wrong one is":       {[]string{"config", "check", write(t, strings.Replace(good, "clusterUID: c\n", "", 1))}, CodeConfiguration, "clusterUID"},
		"two files are":        {[]string{"config", "check", "a", "b"}, cli.CodeUsage, "one file"},
		"nothing is":           {[]string{"config"}, cli.CodeUsage, "needs a command"},
		"a field that is left": {[]string{"--config", write(t, strings.Replace(good, "clusterUID: c\n", "", 1))}, CodeConfiguration, "clusterUID"},
		"no kubeconfig":        {[]string{"--config", write(t, good), "--kubeconfig=/nonexistent"}, CodeConfiguration, "/nonexistent"},
		"not in a pod":         {[]string{"--config", write(t, good)}, CodeConfiguration, ""},
		"software for a TPM":   {[]string{"--config", write(t, strings.Replace(inManagement, "ekSources: [Annotation]", "trustOnFirstUse: true", 1))}, CodeConfiguration, "clusterAPI.trustAnyTPM: true"},
		"a filter for nothing": {[]string{"--config", write(t, good), "--watch-filter=x"}, cli.CodeUsage, "--watch-filter"},
		"unexpanded variables": {[]string{"--config", write(t, good), "--leader-identity=$(POD_NAME)_$(POD_UID)"}, cli.CodeUsage, "--leader-identity"},
		"no file of a webhook": {[]string{"authorizer", "--kubeconfig=a"}, cli.CodeUsage, "--tls-cert-file is required"},
		"an unknown mode":      {append(authorizerArgs(t), "--strict=yes"), cli.CodeUsage, `--strict: "yes"`},
		"no serving key":       {authorizerArgs(t), CodeConfiguration, "serving certificate"},
		"no unattested nodes":  {append(authorizerArgs(t), "--unattested-nodes-from=/nonexistent"), CodeConfiguration, "/nonexistent"},
		"no Cluster API here":  {[]string{"--config", write(t, inManagement)}, CodeConfiguration, "clusterAPI"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := Program{Version: "1.2.3"}.Run(t.Context(), Process{Args: c.args, Stdout: &stdout, Stderr: &stderr})
			if code != c.code || !strings.Contains(stderr.String(), c.says) {
				t.Errorf("exit code %d, not %d: %s", code, c.code, stderr.String())
			}
			if code == 0 && (stdout.Len() == 0 || stderr.Len() > 0) || code != 0 && (stdout.Len() > 0 || strings.Count(stderr.String(), "\nhint: ") != 1) {
				t.Errorf("stdout %q, stderr %q", stdout.String(), stderr.String())
			}
		})
	}
}

// fipsChild has the test binary be the controller that TestFIPS starts.
const fipsChild = "COMMAND_TEST_FIPS_CHILD"

// Where FIPS 140-3 is enforced, the controller says at its start that it cannot work. In the mode
// that enforces nothing it starts: it comes as far as the missing file.
func TestFIPS(t *testing.T) {
	if os.Getenv(fipsChild) != "" {
		os.Exit(Program{}.Run(t.Context(), Process{Args: []string{"--config=/nonexistent"}, Stdout: os.Stdout, Stderr: os.Stderr}))
	}
	for mode, want := range map[string]int{"off": CodeConfiguration, "on": CodeConfiguration, "only": codeFIPS} {
		child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFIPS$")
		child.Env = append(os.Environ(), fipsChild+"=1", "GODEBUG=fips140="+mode)
		out, err := child.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != want {
			t.Errorf("%s: %v: %s", mode, err, out)
		}
		if named := strings.Contains(string(out), "AES-CFB") && strings.Contains(string(out), "hint: run it with GODEBUG=fips140=on"); named != (mode == "only") {
			t.Errorf("%s: %s", mode, out)
		}
	}
}

func TestVersionInJSON(t *testing.T) {
	var stdout bytes.Buffer
	if code := (Program{Version: "1.2.3", Commit: "abc"}).Run(t.Context(), Process{Args: []string{"version", "-o", "json"}, Stdout: &stdout}); code != 0 {
		t.Fatal(code)
	}
	var info cli.BuildInfo
	if err := json.Unmarshal(stdout.Bytes(), &info); err != nil || info.Version != "1.2.3" || info.Commit != "abc" || len(info.Protocols["tpm"]) != 1 {
		t.Errorf("%+v, %v", info, err)
	}
}

// The exit codes are those in the document.
func TestExitCodesAreDocumented(t *testing.T) {
	document, err := os.ReadFile("../../../docs/controller-configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(document), "## Exit codes")
	var got []int
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \|`).FindAllStringSubmatch(table, -1) {
		code, _ := strconv.Atoi(row[1])
		got = append(got, code)
	}
	for _, code := range []int{0, cli.CodeUnexpected, cli.CodeUsage, CodeConfiguration, codeRefused, codeFIPS} {
		found := false
		for _, documented := range got {
			found = found || documented == code
		}
		if !found {
			t.Errorf("%d is not documented", code)
		}
	}
}

// --audit switches audit mode on, and never off.
func TestAuditFlag(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		flag bool
		want bool
	}{
		"neither":          {good, false, false},
		"the flag":         {good, true, true},
		"the file":         {good + "audit: true\n", false, true},
		"the file says no": {good + "audit: false\n", true, true},
	} {
		i := invocation{file: write(t, c.file), audit: c.flag}
		settings, err := i.settings()
		if err != nil || settings.Config().Audit != c.want {
			t.Errorf("%s: %v, not %v: %v", name, settings.Config().Audit, c.want, err)
		}
	}
}
