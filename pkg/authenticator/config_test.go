// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
)

const configHead = "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"

func TestParseConfigReadsEveryField(t *testing.T) {
	want := Config{
		TypeMeta: metav1.TypeMeta{APIVersion: configAPIVersion, Kind: configKind},
		Provider: "tpm", NodeName: "a", ProviderID: "x://y", ProviderIDScheme: "x", SystemUUIDFrom: "product_serial", CertDir: "/certs", RuntimeDir: "/run/x",
		BootstrapKubeconfig: "/b.conf", SignerName: "example.com/x", TPMDevice: "/dev/tpm0", EKTemplate: "rsa-2048", MetricsTextfile: "/m.prom", ClusterUID: "u",
		KeepBootstrapCredential: true, KubeletKubeconfig: "/etc/k.conf", KubeletBootstrapKubeconfig: "/etc/b.conf", PrepareWait: metav1.Duration{Duration: time.Minute},
		Expiration:  metav1.Duration{Duration: 36 * time.Hour},
		WaitTimeout: metav1.Duration{Duration: 90 * time.Second},
		RenewalWait: metav1.Duration{Duration: 1500 * time.Millisecond}, CheckInterval: metav1.Duration{Duration: time.Hour},
	}
	data, err := yaml.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	value := reflect.ValueOf(want)
	for i := range value.NumField() {
		if value.Field(i).IsZero() {
			t.Errorf("this test leaves out %s", value.Type().Field(i).Name)
		}
	}
	got := DefaultConfig()
	if err := ParseConfig(data, &got); err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if !strings.Contains(string(data), "expiration: 36h0m0s") {
		t.Errorf("durations are not written as people write them:\n%s", data)
	}
}

func TestParseConfigKeepsWhatTheFileDoesNotSay(t *testing.T) {
	got := DefaultConfig()
	if err := ParseConfig([]byte(configHead+"waitTimeout: 0s\nprovider: insecure\n"), &got); err != nil {
		t.Fatal(err)
	}
	want := DefaultConfig()
	want.APIVersion, want.Kind, want.Provider = configAPIVersion, configKind, "insecure"
	want.WaitTimeout = metav1.Duration{} // 0 is a value
	if got != want {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

func TestParseConfigIsStrict(t *testing.T) {
	for name, c := range map[string]struct{ data, says string }{
		"empty":                        {"", "KubeletAuthenticatorConfiguration"},
		"null":                         {"null", "KubeletAuthenticatorConfiguration"},
		"a list":                       {"- a\n- b\n", ""},
		"a word":                       {"insecure", ""},
		"binary":                       {"\x00\x01\x02", ""},
		"not YAML":                     {configHead + "certDir: [\n", "line"},
		"tabs":                         {configHead + "\tcertDir: /a\n", ""},
		"unknown field":                {configHead + "certdirectory: /a\n", "line 3: certdirectory: unknown field"},
		"field in another case":        {configHead + "certdir: /a\n", "line 3: certdir: unknown field; did you mean certDir?"},
		"field as flag":                {configHead + "cert-dir: /a\n", "line 3: cert-dir: unknown field; did you mean certDir?"},
		"field twice":                  {configHead + "certDir: /a\ncertDir: /b\n", "line 4: certDir: comes a second time"},
		"field twice, one way in JSON": {`{"apiVersion":"` + configAPIVersion + `","kind":"` + configKind + `","certDir":"/a","certDir":"/a"}`, "certDir: comes a second time"},
		"kind twice":                   {configHead + "kind: KubeletAuthenticatorConfiguration\n", "line 3: kind: comes a second time"},
		"no kind":                      {"apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\n", "KubeletAuthenticatorConfiguration"},
		"no version":                   {"kind: KubeletAuthenticatorConfiguration\n", "authenticator.cluster.x-k8s.io/v1alpha1"},
		"another kind":                 {strings.Replace(configHead, "KubeletAuth", "KubeletC", 1), "KubeletCenticatorConfiguration"},
		"another version":              {strings.Replace(configHead, "v1alpha1", "v1", 1), "authenticator.cluster.x-k8s.io/v1"},
		"a number of seconds":          {configHead + "waitTimeout: 30\n", "line 3: waitTimeout: must be a string, not the number 30"},
		"a number in quotes":           {configHead + "waitTimeout: \"30\"\n", "duration"},
		"days":                         {configHead + "expiration: 7d\n", "duration"},
		"an empty duration":            {configHead + "waitTimeout: \"\"\n", "duration"},
		"null for a duration":          {configHead + "waitTimeout: null\n", "duration"},
		"yes for a name":               {configHead + "nodeName: yes\n", "nodeName"},
		"a number for a name":          {configHead + "nodeName: 1e3\n", "nodeName"},
		"a second document after the end of the first":   {configHead + "...\nprovider: insecure\n", ""},
		"two documents of one line":                      {"--- {apiVersion: " + configAPIVersion + ", kind: " + configKind + "}\n--- {certDir: /a}\n", ""},
		"a second document on the line of its separator": {configHead + "---\t{certDir: /a}\n", ""},
		"a second document":                              {configHead + "---\ncertDir: /a\n", ""},
		"a second, bad document":                         {configHead + "---\nnonsense: [\n", ""},
		"several":                                        {configHead + "a: 1\nb: 2\nCertDir: /x\n", "line 4: b: unknown field; line 5: CertDir: unknown field; did you mean certDir?"},
	} {
		t.Run(name, func(t *testing.T) {
			config := DefaultConfig()
			err := ParseConfig([]byte(c.data), &config)
			if err == nil {
				t.Fatalf("was accepted: %+v", config)
			}
			if problem := plugintest.NotOneLine(err.Error()); problem != "" || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s, or does not say %q: %v", problem, c.says, err)
			}
		})
	}
}

func TestParseConfigTellsAllThatIsUnknown(t *testing.T) {
	config := DefaultConfig()
	err := ParseConfig([]byte(configHead+"first: 1\nsecond: 2\nthird: 3\n"), &config)
	if err == nil || !strings.Contains(err.Error(), "first") || !strings.Contains(err.Error(), "second") || !strings.Contains(err.Error(), "third") {
		t.Errorf("got %v", err)
	}
}

// FuzzParseConfig: what is accepted can be written and read again, and is the same then; what is
// not says why on one line.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(configHead))
	f.Add([]byte(configHead + "waitTimeout: 1m\nexpiration: 24h\ncertDir: /a\n"))
	f.Add([]byte(configHead + "certDir: &a /x\nruntimeDir: *a\n"))
	f.Add([]byte(configHead + "<<: {certDir: /a}\n"))
	f.Add([]byte(configHead + "certDir: /a\ncertdir: /b\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		var config Config
		if err := ParseConfig(data, &config); err != nil {
			if strings.ContainsAny(err.Error(), "\n\r") {
				t.Fatalf("%q", err)
			}
			return
		}
		written, err := yaml.Marshal(config)
		if err != nil {
			t.Fatal(err)
		}
		var again Config
		if err := ParseConfig(written, &again); err != nil || again != config {
			t.Fatalf("got %+v, then %+v, %v", config, again, err)
		}
	})
}

func TestLoadConfig(t *testing.T) {
	file := func(t *testing.T, content string) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	missing := filepath.Join(t.TempDir(), "none")
	t.Run("none, and none is needed", func(t *testing.T) {
		if got, err := LoadConfig(missing, true); err != nil || got != DefaultConfig() {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("none, but one was named", func(t *testing.T) {
		got, err := LoadConfig(missing, false)
		if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), missing) || !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v", err)
		}
		if got != DefaultConfig() {
			t.Errorf("got %+v", got)
		}
	})
	// A valid certificate is still found: the folder that such a file names has its own check.
	t.Run("others may write it", func(t *testing.T) {
		path := file(t, "apiVersion: "+configAPIVersion+"\nkind: "+configKind+"\ncertDir: /srv/certs\nprovider: insecure\n")
		if err := os.Chmod(path, 0o666); err != nil {
			t.Fatal(err)
		}
		got, err := LoadConfig(path, true)
		if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), "others may write it") || !strings.Contains(failure.Hint, "chmod go-w "+path) {
			t.Errorf("got %v, hint %s", failure, failure.Hint)
		}
		want := DefaultConfig()
		want.CertDir = "/srv/certs"
		if got != want {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("cannot be read", func(t *testing.T) {
		for _, optional := range []bool{true, false} {
			dir := t.TempDir()
			_, err := LoadConfig(dir, optional)
			if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), dir) {
				t.Errorf("got %v", err)
			}
		}
	})
	// The certificate directory must be found under a configuration that is wrong elsewhere:
	// the node lives on with what is in it.
	for name, wrong := range map[string]string{
		"unknown field":       "nonsense: 1\n",
		"wrong type":          "provider: 1\n",
		"wrong duration":      "waitTimeout: soon\n",
		"duration of a kind":  "expiration: 7d\n",
		"field twice":         "provider: a\nprovider: b\n",
		"several of them":     "nonsense: 1\nprovider: 1\n",
		"another API version": "",
	} {
		t.Run("certificate directory despite: "+name, func(t *testing.T) {
			head := configHead
			if name == "another API version" {
				head = strings.Replace(head, "v1alpha1", "v1", 1)
			}
			path := file(t, head+"certDir: /elsewhere\n"+wrong)
			got, err := LoadConfig(path, true)
			if failure := plugintest.WantFailure(t, err, reason.Configuration); !strings.Contains(failure.Error(), path) {
				t.Errorf("it does not name the file: %v", err)
			}
			if got.CertDir != "/elsewhere" {
				t.Errorf("certDir %q", got.CertDir)
			}
		})
	}
}

// However broken the file, the certificate directory that it names is looked into: what is valid
// there is printed on.
func TestCertificateDirectoryIsFoundInABrokenFile(t *testing.T) {
	const header = "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"
	for name, c := range map[string]struct{ content, want string }{
		"unknown field": {header + "certDir: /x/certs\nnonesuch: 1\n", "/x/certs"},
		"doubled field": {header + "certDir: \"/x/certs\"\nprovider: a\nprovider: b\n", "/x/certs"},
		"not YAML":      {header + "certDir: /x/certs # here\n\tprovider: [\n", "/x/certs"},
		"JSON":          {`{"kind":"KubeletAuthenticatorConfiguration","certDir":"/x/certs","nonesuch":1}`, "/x/certs"},
		"block scalar":  {header + "certDir: >-\n  /x/certs\nnonesuch: 1\n", "/x/certs"},
		"tabs":          {header + "certDir:\t/x/certs\t# here\n\tprovider: [\n", "/x/certs"},
		"relative":      {header + "certDir: certs\nnonesuch: 1\n", DefaultConfig().CertDir},
		"none named":    {header + "nonesuch: 1\n", DefaultConfig().CertDir},
	} {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
			t.Fatal(err)
		}
		config, err := LoadConfig(path, false)
		_ = plugintest.WantFailure(t, err, reason.Configuration)
		if config.CertDir != c.want {
			t.Errorf("%s: %q, want %q", name, config.CertDir, c.want)
		}
	}
}

// What the parser takes for one document is one.
func TestOneDocumentHoweverMarked(t *testing.T) {
	const body = "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\n"
	for name, content := range map[string]string{
		"marked":            "---\n" + body,
		"with a directive":  "%YAML 1.1\n---\n" + body,
		"comments before":   "# a\n  # b\n---\n" + body,
		"ended":             body + "...\n",
		"a mark at the end": body + "---\n",
		"dots in a comment": body + "# and so on ...\n",
	} {
		config := DefaultConfig()
		if err := ParseConfig([]byte(content), &config); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
