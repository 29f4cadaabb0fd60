// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	certificatesv1 "k8s.io/api/certificates/v1"
	clientauthentication "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
)

const configHead = "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"

func testProgram() Program {
	return Program{
		Name: "kubelet-authenticator-test", Version: "1.2.3", Commit: "abcdef0",
		Providers:      []provider.Factory{insecure.Factory()},
		Choose:         func(context.Context, provider.Settings) (string, string) { return insecure.Name, "there is no TPM" },
		WorkerDeadline: 20 * time.Second,
	}
}

// programVariable has this test be the program.
const programVariable = "KUBELET_AUTHENTICATOR_TEST_PROGRAM"

// TestMain is also the program: a run starts its worker from /proc/self/exe, which is this test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == workerName || os.Getenv(programVariable) != "" {
		os.Exit(testProgram().Main())
	}
	unittest.Main(m)
}

// callResult is what a call left behind.
type callResult struct {
	code           int
	stdout, stderr string
}

// call runs the command line as client-go would, with execInfo as KUBERNETES_EXEC_INFO.
func call(t testing.TB, execInfo string, args ...string) callResult {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := testProgram().Run(t.Context(), Process{Args: args, Stdout: &stdout, Stderr: &stderr, Getenv: func(name string) string {
		if name == "KUBERNETES_EXEC_INFO" {
			return execInfo
		}
		return ""
	}})
	return callResult{code, stdout.String(), stderr.String()}
}

// node is one machine: its directories, and the flags that lead to them and to no bootstrap
// credential.
type node struct {
	root, certs string
	flags       []string
}

func newNode(t testing.TB) node {
	t.Helper()
	root := t.TempDir()
	n := node{root: root, certs: filepath.Join(root, "certs")}
	// Where this machine has a configuration of its own, it must not count.
	config := n.write(t, "none.yaml", configHead)
	n.flags = []string{
		"--config=" + config, "--provider=insecure", "--node-name=a", "--cert-dir=" + n.certs, "--runtime-dir=" + filepath.Join(root, "run"),
		"--bootstrap-kubeconfig=" + filepath.Join(root, "bootstrap.conf"),
	}
	return n
}

func (n node) with(args ...string) []string { return append(append([]string{}, n.flags...), args...) }

func (n node) write(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(n.root, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// enrolled puts a certificate of node "a" into a certificate directory and returns its PEM.
func enrolled(t testing.TB, dir string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{Organization: []string{"system:nodes"}, CommonName: "system:node:a"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(23 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	content := append(bytes.Clone(certificate), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, cache.CurrentFile), content, 0o600)); err != nil {
		t.Fatal(err)
	}
	return string(certificate)
}

// tree describes what is below root.
func tree(t testing.TB, root string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		_, _ = fmt.Fprintln(&out, path, info.Mode(), info.ModTime(), info.Size())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// credential checks that a call succeeded and that standard output is one ExecCredential and
// nothing else.
func (o callResult) credential(t testing.TB) clientauthentication.ExecCredential {
	t.Helper()
	if o.code != 0 {
		t.Fatalf("exit code %d: %s", o.code, o.stderr)
	}
	decoder := json.NewDecoder(strings.NewReader(o.stdout))
	var credential clientauthentication.ExecCredential
	if err := decoder.Decode(&credential); err != nil || credential.Status == nil {
		t.Fatalf("standard output is %q: %v", o.stdout, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) || !strings.HasSuffix(o.stdout, "}\n") || strings.Count(o.stdout, "\n") != 1 {
		t.Errorf("standard output is more than one document: %q", o.stdout)
	}
	return credential
}

// failed checks the exit code, that standard output is empty and that standard error is "<name>:
// message" and a hint.
func (o callResult) failed(t testing.TB, code int, says string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit code %d, want %d: %s", o.code, code, o.stderr)
	}
	if o.stdout != "" {
		t.Errorf("standard output: %q", o.stdout)
	}
	if !regexp.MustCompile(`^kubelet-authenticator-test: [^\n]+\nhint: [^\n]+\n$`).MatchString(o.stderr) {
		t.Errorf("standard error is not one message and one hint: %q", o.stderr)
	}
	if !strings.Contains(o.stderr, says) {
		t.Errorf("it does not say %q: %s", says, o.stderr)
	}
}

func TestCommandLineThatCannotBeParsed(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"unknown flag":                        {[]string{"--nonsense"}, "--nonsense"},
		"unknown flag of the version command": {[]string{"version", "--nonsense"}, "--nonsense"},
		"flag without a value":                {[]string{"--cert-dir"}, "--cert-dir"},
		"a duration that is none":             {[]string{"--wait-timeout=soon"}, "wait-timeout"},
		"a verbosity that is none":            {[]string{"-v=much"}, "v"},
		"an argument":                         {[]string{"now"}, `"now"`},
		"an empty argument":                   {[]string{""}, `""`},
		"an argument after flags":             {[]string{"--node-name", "a", "b"}, `"b"`},
		"an argument to version":              {[]string{"version", "now"}, `"now"`},
		"an argument to the worker":           {[]string{workerName, "now"}, `"now"`},
		"output without a dry run":            {[]string{"--output", "json"}, "--dry-run"},
		"output of an unknown kind":           {[]string{"--dry-run", "-o", "xml"}, `"xml"`},
		"version in an unknown kind":          {[]string{"version", "-o", "xml"}, `"xml"`},
		"--version in an unknown kind":        {[]string{"--version", "-o", "xml"}, `"xml"`},
		"status in an unknown kind":           {[]string{"status", "-o", "xml"}, `"xml"`},
		"identify in an unknown kind":         {[]string{"identify", "-o", "text"}, "must be one of yaml, json, entry"},
		"a mistyped command":                  {[]string{"statsu"}, "did you mean status?"},
		"the beginning of a command":          {[]string{"doc"}, "did you mean doctor?"},
		"a mistyped flag":                     {[]string{"--node-nam=a"}, "--node-nam; did you mean --node-name?"},
		"a mistyped flag of a command":        {[]string{"doctor", "--timout=1s"}, "--timout; did you mean --timeout?"},
		"a mistyped flag, two words":          {[]string{"--cert-dri", "/a"}, "did you mean --cert-dir?"},
	} {
		t.Run(name, func(t *testing.T) {
			call(t, "", c.args...).failed(t, 3, c.says)
		})
	}
}

// An invalid command line is refused even if there is a certificate. Such mistakes happen while a
// node is set up, and would not be noticed later.
func TestUsageIsCheckedBeforeAnythingIsPrinted(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	call(t, "", n.with("--nonsense")...).failed(t, 3, "--nonsense")
	call(t, "", n.with("-o", "json")...).failed(t, 3, "--dry-run")
}

func TestValidCertificateIsPrinted(t *testing.T) {
	n := newNode(t)
	certificate := enrolled(t, n.certs)
	before := tree(t, n.certs)
	first := call(t, "", n.flags...)
	if got := first.credential(t); got.Status.ClientCertificateData != certificate || got.APIVersion != "client.authentication.k8s.io/v1" {
		t.Errorf("%+v", got)
	}
	if first.stderr != "" {
		t.Errorf("standard error: %q", first.stderr)
	}
	if second := call(t, "", n.flags...); second != first {
		t.Errorf("the second call has another outcome: %+v", second)
	}
	if after := tree(t, n.certs); after != before {
		t.Errorf("it changed the directory:\n%s\nnow\n%s", before, after)
	}
}

func TestAnswerIsInTheVersionAskedFor(t *testing.T) {
	n := newNode(t)
	certificate := enrolled(t, n.certs)
	for _, version := range []string{"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"} {
		got := call(t, fmt.Sprintf(`{"apiVersion":%q,"kind":"ExecCredential","spec":{"interactive":false}}`, version), n.flags...).credential(t)
		if got.APIVersion != version || got.Kind != "ExecCredential" || got.Status.ClientCertificateData != certificate {
			t.Errorf("asked for %s, got %+v", version, got.TypeMeta)
		}
	}
}

// There is no answer that such a caller would understand, so it gets none, also if there is a
// certificate on disk.
func TestQuestionThatCannotBeRead(t *testing.T) {
	n := newNode(t)
	enrolled(t, n.certs)
	for name, info := range map[string]string{
		"garbage":  "garbage",
		"v1alpha1": `{"apiVersion":"client.authentication.k8s.io/v1alpha1","kind":"ExecCredential"}`,
		"null":     "null",
	} {
		for _, args := range [][]string{n.flags, n.with("--dry-run"), n.with("--config=" + n.write(t, "bad.yaml", "{"))} {
			t.Run(name, func(t *testing.T) { call(t, info, args...).failed(t, 11, "KUBERNETES_EXEC_INFO") })
		}
	}
}

func TestConfigurationThatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		config string // appended to the certificate directory
		args   []string
		says   string
	}{
		"no provider":             {"", nil, "provider"},
		"unknown provider":        {"provider: tpm-of-tomorrow\n", nil, "tpm-of-tomorrow"},
		"unknown field":           {"provider: insecure\nnonsense: 1\n", nil, "nonsense"},
		"wrong type":              {"provider: 1\n", nil, "provider"},
		"field twice":             {"provider: insecure\nprovider: insecure\n", nil, "provider: comes a second time"},
		"a duration that is none": {"provider: insecure\nwaitTimeout: soon\n", nil, "duration"},
		"a relative path":         {"provider: insecure\nruntimeDir: run\n", nil, "runtimeDir"},
		"a flag's value":          {"provider: insecure\n", []string{"--expiration=1m"}, "expiration"},
		"a node's name":           {"provider: insecure\n", []string{"--node-name=A B"}, "node name"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			args := append([]string{"--config=" + n.write(t, "config.yaml", configHead+"certDir: "+n.certs+"\nnodeName: a\n"+c.config), "--runtime-dir=" + filepath.Join(n.root, "run")}, c.args...)
			if strings.Contains(c.config, "runtimeDir") {
				args = append(args[:1], args[2:]...)
			}
			call(t, "", args...).failed(t, 10, c.says)
			dry := call(t, "", append(args, "--dry-run")...)
			if !strings.HasPrefix(dry.stdout, "a run would fail: ") || !strings.Contains(dry.stdout, c.says) {
				t.Errorf("a dry run says\n%s", dry.stdout)
			}
			dry.stdout = ""
			dry.failed(t, 10, c.says)
			if _, err := os.Lstat(n.certs); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the certificate directory was made: %v", err)
			}

			// The node that has a certificate lives on, and somebody is told.
			certificate := enrolled(t, n.certs)
			got := call(t, "", args...)
			if printed := got.credential(t); printed.Status.ClientCertificateData != certificate {
				t.Error("another certificate was printed")
			} else if until := time.Until(printed.Status.ExpirationTimestamp.Time); until > time.Minute {
				t.Errorf("it is looked at again in %v only, although the configuration may soon be mended", until)
			}
			got.code, got.stdout = 10, "" // what is said is the same
			got.failed(t, 10, c.says)
		})
	}
}

func TestConfigurationFileThatCannotBeRead(t *testing.T) {
	n := newNode(t)
	for name, path := range map[string]string{
		"named, but missing": filepath.Join(n.root, "missing.yaml"),
		"a directory":        n.root,
		"not YAML":           n.write(t, "bad.yaml", "certDir: [\n"),
		"empty":              n.write(t, "empty.yaml", ""),
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			args := n.with("--config=" + path)
			call(t, "", args...).failed(t, 10, path)
			certificate := enrolled(t, n.certs) // where the flags say
			got := call(t, "", args...)
			if got.credential(t).Status.ClientCertificateData != certificate || !strings.Contains(got.stderr, path) {
				t.Errorf("%+v", got)
			}
		})
	}
}

func TestFlagBeatsFile(t *testing.T) {
	n := newNode(t)
	inFile, inFlag := filepath.Join(n.root, "file"), filepath.Join(n.root, "flag")
	ofFile, ofFlag := enrolled(t, inFile), enrolled(t, inFlag)
	config := n.write(t, "config.yaml", configHead+"provider: insecure\nnodeName: a\ncertDir: "+inFile+"\nruntimeDir: "+n.root+"/run\nwaitTimeout: 0s\nbootstrapKubeconfig: "+n.root+"/none\n")
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"file alone":      {nil, ofFile},
		"flag":            {[]string{"--cert-dir=" + inFlag}, ofFlag},
		"flag, two words": {[]string{"--cert-dir", inFlag}, ofFlag},
	} {
		if got := call(t, "", append(c.args, "--config="+config)...).credential(t); got.Status.ClientCertificateData != c.want {
			t.Errorf("%s: the other certificate was printed", name)
		}
	}
	// Also where the flag says what is the default.
	if got := call(t, "", "--config="+n.write(t, "b.yaml", configHead+"provider: nonsense\ncertDir: "+inFile+"\n"), "--provider=insecure", "--node-name=a", "--runtime-dir="+n.root); got.code != 0 || got.stderr != "" {
		t.Errorf("%+v", got)
	}
	got := call(t, "", "--config="+config, "--dry-run", "--expiration=0", "--node-name=b")
	if got.code != 17 || !strings.Contains(got.stdout, "CN=system:node:b") {
		t.Errorf("%+v", got)
	}
	got = call(t, "", "--config="+n.write(t, "c.yaml", configHead+"provider: insecure\nexpiration: 1h\nnodeName: a\n"), "--cert-dir="+inFile, "--dry-run", "--expiration=0", "--runtime-dir="+n.root)
	if got.code != 0 || !strings.Contains(got.stdout, "left to the signer") {
		t.Errorf("%+v", got)
	}
}

// Each field of the configuration has a flag that sets it and nothing else.
func TestEveryFieldHasItsFlag(t *testing.T) {
	var names pflag.FlagSet
	bind(&names, &authenticator.Config{})
	set := map[int]string{}
	names.VisitAll(func(f *pflag.Flag) {
		var config authenticator.Config
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		bind(flags, &config)
		value := "x"
		switch f.Value.Type() {
		case "duration":
			value = "1h"
		case "bool":
			value = "true"
		}
		if err := flags.Set(f.Name, value); err != nil {
			t.Fatal(err)
		}
		if f.Usage == "" {
			t.Errorf("--%s says nothing in --help", f.Name)
		}
		fields := reflect.ValueOf(config)
		for i := range fields.NumField() {
			if fields.Field(i).IsZero() {
				continue
			}
			name, _, _ := strings.Cut(fields.Type().Field(i).Tag.Get("json"), ",")
			if got := strings.ReplaceAll(f.Name, "-", ""); !strings.EqualFold(got, name) {
				t.Errorf("--%s sets %s", f.Name, name)
			}
			if set[i] != "" {
				t.Errorf("--%s and --%s set the same", f.Name, set[i])
			}
			set[i] = f.Name
		}
	})
	// without kind and version
	if want := reflect.TypeFor[authenticator.Config]().NumField() - 1; len(set) != want {
		t.Errorf("%d fields have flags, %d have none", len(set), want-len(set))
	}
}

// A clock before the build's commit is wrong. The Makefile sets that time.
func TestTimeOfTheCommit(t *testing.T) {
	if got := (Program{CommitTime: "1795423813"}).built(); got.Unix() != 1795423813 {
		t.Errorf("%v", got)
	}
	for _, unknown := range []string{"", "yesterday"} {
		if got := (Program{CommitTime: unknown}).built(); !got.IsZero() {
			t.Errorf("%q: %v", unknown, got)
		}
	}
	makefile, err := os.ReadFile("../../../Makefile")
	if err != nil || !strings.Contains(string(makefile), "-X main.commitTime=$(SOURCE_DATE_EPOCH)") {
		t.Errorf("the Makefile does not set it: %v", err)
	}
}

func TestVersion(t *testing.T) {
	got := call(t, "", "version", "--output", "json")
	asJSON := got
	var info map[string]any
	if err := json.Unmarshal([]byte(got.stdout), &info); err != nil || got.code != 0 || got.stderr != "" {
		t.Fatalf("%+v: %v", got, err)
	}
	want := map[string]any{
		"version": "1.2.3", "commit": "abcdef0", "goVersion": runtime.Version(),
		"execAPIVersions":  []any{"client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"},
		"protocolVersions": map[string]any{"insecure": []any{"insecure/v1"}},
	}
	if !reflect.DeepEqual(info, want) {
		t.Errorf("got %v\nwant %v", info, want)
	}
	if got = call(t, "", "version"); got.code != 0 || got.stdout != "kubelet-authenticator-test 1.2.3 (commit abcdef0, "+runtime.Version()+")\n" {
		t.Errorf("%+v", got)
	}
	if flag := call(t, "", "--version"); flag != got {
		t.Errorf("--version: %+v", flag)
	}
	if flag := call(t, "", "--version", "--output=json"); flag != asJSON {
		t.Errorf("--version in JSON: %+v", flag)
	}
	asYAML := call(t, "", "version", "-o", "yaml")
	if data, err := yaml.YAMLToJSONStrict([]byte(asYAML.stdout)); err != nil || json.Unmarshal(data, &info) != nil || !reflect.DeepEqual(info, want) {
		t.Errorf("in YAML: %+v, %v", asYAML, err)
	}
	// It is asked when all else is broken.
	if got = call(t, "garbage", "version", "--config=/nonsense", "--provider=nonsense"); got.code != 0 {
		t.Errorf("%+v", got)
	}
}

func TestHelpNamesEachFlag(t *testing.T) {
	got := call(t, "", "--help")
	if got.code != 0 || got.stderr != "" {
		t.Fatalf("%+v", got)
	}
	for _, word := range []string{"--provider", "--cert-dir", "--dry-run", "--output", "--config", "--v", "version", "--version", "completion", "kubelet-authenticator-test --dry-run"} {
		if !strings.Contains(got.stdout, word) {
			t.Errorf("it does not name %s", word)
		}
	}
	if strings.Contains(got.stdout, "\n  worker") {
		t.Error("it shows the worker, which is not for people")
	}
}

func TestDryRunWithoutAClusterWritesNothing(t *testing.T) {
	const prints = "a run would succeed: it prints the certificate on disk, valid to "
	for name, c := range map[string]struct {
		prepare func(t *testing.T, n *node)
		code    int
		verdict string // how the first line begins
	}{
		"a new node": {func(*testing.T, *node) {}, 17, "a run would fail: no bootstrap kubeconfig"},
		"enrolled":   {func(t *testing.T, n *node) { enrolled(t, n.certs) }, 0, prints},
		"enrolled, and nobody listens": {func(t *testing.T, n *node) {
			enrolled(t, n.certs)
			n.write(t, "bootstrap.conf", bootstrap("https://127.0.0.1:1", nil))
		}, 0, prints},
		"a damaged certificate": {func(t *testing.T, n *node) {
			enrolled(t, n.certs)
			if err := os.WriteFile(filepath.Join(n.certs, cache.CurrentFile), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, 17, "a run would fail: no bootstrap kubeconfig"},
		"nobody listens": {func(t *testing.T, n *node) {
			n.write(t, "bootstrap.conf", bootstrap("https://127.0.0.1:1", nil))
		}, 19, "a run would fail: https://127.0.0.1:1: "},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			c.prepare(t, &n)
			before := tree(t, n.root)
			text := call(t, "", n.with("--dry-run", "--provider-id=x://y", "--expiration=2h")...)
			asJSON := call(t, "", n.with("--dry-run", "--provider-id=x://y", "--expiration=2h", "-o", "json")...)
			asYAML := call(t, "", n.with("--dry-run", "--provider-id=x://y", "--expiration=2h", "--output=yaml")...)
			asKubelet := call(t, `{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","spec":{"interactive":false}}`, n.with("--dry-run")...)
			if after := tree(t, n.root); after != before {
				t.Errorf("something was written:\n%s\nwas\n%s", after, before)
			}
			for kind, got := range map[string]callResult{"text": text, "json": asJSON, "yaml": asYAML, "kubelet": asKubelet} {
				if got.code != c.code || (got.stderr == "") != (c.code == 0) {
					t.Errorf("%s: exit code %d, want %d: %q", kind, got.code, c.code, got.stderr)
				}
				if strings.Contains(got.stdout, "PRIVATE KEY") || strings.Contains(got.stdout, "hunter2") {
					t.Errorf("%s shows a secret:\n%s", kind, got.stdout)
				}
			}
			if !strings.HasPrefix(text.stdout, c.verdict) {
				t.Errorf("the first line is not %q:\n%s", c.verdict, text.stdout)
			}
			for _, says := range []string{"skipped", "CN=system:node:a", "O=system:nodes", "x://y", insecure.SignerName, "2h0m0s", `{"version":"insecure/v1"}`, "ECDSA", "digital signature, client auth"} {
				if !strings.Contains(text.stdout, says) {
					t.Errorf("the text does not say %q:\n%s", says, text.stdout)
				}
			}
			fromYAML, err := yaml.YAMLToJSONStrict([]byte(asYAML.stdout))
			if err != nil {
				t.Fatal(err)
			}
			for kind, data := range map[string][]byte{"json": []byte(asJSON.stdout), "yaml": fromYAML} {
				var object certificatesv1.CertificateSigningRequest
				if strict, err := kjson.UnmarshalStrict(data, &object); err != nil || len(strict) > 0 {
					t.Fatalf("%s: %v, %v", kind, strict, err)
				}
				if object.Kind != "CertificateSigningRequest" || object.APIVersion != "certificates.k8s.io/v1" || object.Spec.SignerName != insecure.SignerName ||
					object.Spec.ExpirationSeconds == nil || *object.Spec.ExpirationSeconds != 7200 {
					t.Errorf("%s: %+v", kind, object)
				}
				content, err := attestation.Parse(object.Spec.Request)
				if err != nil || content.Provider != "insecure" {
					t.Errorf("%s: %+v, %v", kind, content, err)
				}
			}
			if strings.Count(asJSON.stdout, "\n{") > 0 || !strings.HasPrefix(asJSON.stdout, "{") || !strings.HasSuffix(asJSON.stdout, "}\n") {
				t.Errorf("not one document: %s", asJSON.stdout)
			}
		})
	}
}

// bootstrap is a kubeconfig with a token for that server.
func bootstrap(server string, ca []byte) string {
	config := map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x", "user": "x"}}},
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": server, "certificate-authority-data": ca}}},
		"users":    []any{map[string]any{"name": "x", "user": map[string]any{"token": "hunter2"}}},
	}
	data, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return string(data)
}

// A dry run also is a test for scripts: it shows all it has, and its exit code is the API server's
// verdict.
func TestDryRunShowsTheVerdict(t *testing.T) {
	accepts := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_, _ = io.Copy(w, r.Body)
	}
	refuses := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","code":403,"reason":"Forbidden","message":"RBAC says no"}`)
	}
	noisy := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, "\x1b]0;owned\a<html>\n\x1b[2JRBAC says no\r\n</html>")
	}
	for name, c := range map[string]struct {
		answer   http.HandlerFunc
		enrolled bool
		code     int
		says     string
		verdict  string
	}{
		"accepted":                 {accepts, false, 0, "accepted", "a run would succeed: the API server accepts the request, which signer " + insecure.SignerName + " then decides\n"},
		"refused":                  {refuses, false, 20, "RBAC says no", "a run would fail: "},
		"refused by who knows who": {noisy, false, 20, "RBAC says no", "a run would fail: "},
		"enrolled, accepted":       {accepts, true, 0, "accepted", "a run would succeed: it prints the certificate on disk, valid to "},
		"enrolled, refused":        {refuses, true, 20, "RBAC says no", "a run would succeed: it prints the certificate on disk, valid to "},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			if c.enrolled {
				enrolled(t, n.certs)
			}
			var query, agent, token string
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				query, agent, token = r.Method+" "+r.URL.RequestURI(), r.UserAgent(), r.Header.Get("Authorization")
				c.answer(w, r)
			}))
			server.Config.ErrorLog = log.New(io.Discard, "", 0)
			server.StartTLS()
			defer server.Close()
			n.write(t, "bootstrap.conf", bootstrap(server.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
			got := call(t, "", n.with("--dry-run")...)
			if !strings.HasPrefix(got.stdout, c.verdict) {
				t.Errorf("the first line is not %q:\n%s", c.verdict, got.stdout)
			}
			if first, _, _ := strings.Cut(got.stdout, "\n"); strings.Contains(first, "RBAC says no") != (c.code != 0) || c.enrolled && c.code != 0 && !strings.Contains(first, "; the next one cannot be requested: ") {
				t.Errorf("the first line does not say what the API server says: %s", first)
			}
			if got.code != c.code || !strings.Contains(got.stdout, c.says) || !strings.Contains(got.stdout, server.URL) || strings.Contains(got.stdout, "skipped") {
				t.Errorf("%d: %s%s", got.code, got.stdout, got.stderr)
			}
			if strings.ContainsAny(got.stdout+got.stderr, "\x1b\a\r") {
				t.Errorf("a peer writes to the terminal: %q", got.stdout+got.stderr)
			}
			if (c.code != 0) != regexp.MustCompile(`^kubelet-authenticator-test: [^\n]*RBAC says no[^\n]*\nhint: [^\n]+\n$`).MatchString(got.stderr) {
				t.Errorf("standard error: %q", got.stderr)
			}
			if query != "POST /apis/certificates.k8s.io/v1/certificatesigningrequests?dryRun=All" || agent != "kubelet-authenticator-test/1.2.3" || token != "Bearer hunter2" {
				t.Errorf("the API server saw %s of %q with %q", query, agent, token)
			}
		})
	}
}

// An API server that sheds load has not refused the request. It fails a run that has no
// certificate.
func TestDryRunAtABusyServer(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = io.WriteString(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","code":429,"reason":"TooManyRequests","message":"too busy"}`)
	}))
	defer server.Close()
	n := newNode(t)
	n.write(t, "bootstrap.conf", bootstrap(server.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	if got := call(t, "", n.with("--dry-run")...); got.code != 32 || !strings.HasPrefix(got.stdout, "a run would fail: ") {
		t.Errorf("%+v", got)
	}
	enrolled(t, n.certs)
	if got := call(t, "", n.with("--dry-run")...); got.code != 0 || !strings.Contains(got.stdout, "; whether the next one can be requested is not known: ") {
		t.Errorf("%+v", got)
	}
}

// The worker is a process of its own: what it could not do reaches the one who asked, with its code
// and its hint.
func TestWorkersFailureReachesTheCaller(t *testing.T) {
	n := newNode(t)
	got := call(t, "", n.flags...)
	caution, rest, _ := strings.Cut(got.stderr, "\n")
	if !strings.Contains(caution, "sends no evidence") {
		t.Errorf("nothing is said of what this provider is worth: %q", got.stderr)
	}
	callResult{got.code, got.stdout, rest}.failed(t, 17, "no bootstrap kubeconfig")
	entries, err := os.ReadDir(n.certs)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", entry.Name(), info, err)
		}
	}
	state, err := cache.At(n.certs).State()
	if err != nil || state.Last == nil || state.Last.Reason != "NoBootstrapCredential" || state.Last.Worker.PID == os.Getpid() {
		t.Errorf("state %+v, %v", state, err)
	}
}

// An error is printed once, in two lines, for any text.
func TestSay(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"with a hint":       {&reason.Failure{Reason: reason.TPMError, Hint: "turn it on", Err: errors.New("no TPM")}, "x: no TPM\nhint: turn it on\n"},
		"without":           {&reason.Failure{Reason: reason.TPMError, Err: errors.New("no TPM")}, "x: no TPM\n"},
		"of several lines":  {errors.New("first\n\tsecond\r\nthird "), "x: first second third\n"},
		"of others":         {errors.New("no TPM"), "x: no TPM\n"},
		"a hint inside":     {fmt.Errorf("still served: %w", &reason.Failure{Hint: "wait", Err: errors.New("late")}), "x: still served: late\nhint: wait\n"},
		"several, one hint": {errors.Join(errors.New("a"), &reason.Failure{Hint: "wait", Err: errors.New("b")}), "x: a b\nhint: wait\n"},
	} {
		var stderr bytes.Buffer
		(&invocation{Program: Program{Name: "x"}, Process: Process{Stderr: &stderr}}).say(c.err)
		if got := stderr.String(); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
