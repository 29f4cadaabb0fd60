// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/insecure"
)

// device is a provider whose device has answered so far.
type device struct {
	insecure.Provider
	checks []provider.Check
	err    error
}

func (d device) Identify(context.Context) (any, error) {
	return map[string]string{"serial": "4711"}, nil
}
func (d device) Explain([]byte) []provider.Fact { return nil }
func (d device) SelfTest(_ context.Context, report func(provider.Check)) error {
	for _, check := range d.checks {
		report(check)
	}
	return d.err
}

// callDevice runs a command line of a program with such a provider, named "fake".
func callDevice(t *testing.T, d device, args ...string) callResult {
	t.Helper()
	p := testProgram()
	p.Providers = append(p.Providers, provider.Factory{Name: "fake", Inspects: true, New: func(provider.Settings) (provider.Provider, error) { return d, nil }})
	var stdout, stderr bytes.Buffer
	code := p.Run(t.Context(), Process{Args: newNode(t).with(args...), Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }})
	return callResult{code, stdout.String(), stderr.String()}
}

func TestSelfTest(t *testing.T) {
	passed := provider.Check{Name: "TPM2_Quote", Took: 1500 * time.Microsecond}
	refused := provider.Check{Name: "TPM2_Load", Took: time.Millisecond, Err: errors.New("no\x1b[2J memory")}
	for name, c := range map[string]struct {
		device device
		code   int
		text   string
		want   SelfTest
	}{
		"passed": {device{checks: []provider.Check{passed}}, 0, "TPM2_Quote 1.5 ms ok\n", SelfTest{true, []SelfTestCheck{{"TPM2_Quote", 1.5, ""}}}},
		"refused": {
			device{checks: []provider.Check{passed, refused}, err: &provider.Error{Class: provider.DeviceFailed, Err: errors.New("one failed")}}, 15,
			"TPM2_Quote 1.5 ms ok\nTPM2_Load 1.0 ms FAILED: no\\u001b[2J memory\n",
			SelfTest{false, []SelfTestCheck{{"TPM2_Quote", 1.5, ""}, {"TPM2_Load", 1, `no\u001b[2J memory`}}},
		},
		"no device": {device{err: &provider.Error{Class: provider.NoDevice, Err: errors.New("none")}}, 14, "", SelfTest{false, []SelfTestCheck{}}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := callDevice(t, c.device, "fake", "selftest"); got.code != c.code || oneSpace(got.stdout) != c.text {
				t.Errorf("%+v", got)
			}
			for _, format := range []string{"json", "yaml"} {
				got := callDevice(t, c.device, "fake", "selftest", "--output="+format)
				data := []byte(got.stdout)
				if format == "yaml" {
					var err error
					if data, err = yaml.YAMLToJSONStrict(data); err != nil {
						t.Fatal(err)
					}
				}
				var report SelfTest
				if err := json.Unmarshal(data, &report); err != nil || got.code != c.code || !reflect.DeepEqual(report, c.want) || (got.stderr == "") != (c.code == 0) {
					t.Errorf("%s: %v: %+v", format, err, got)
				}
			}
		})
	}
	callDevice(t, device{}, "fake", "selftest", "-o", "xml").failed(t, 3, `"xml"`)
	callDevice(t, device{}, "fake", "selftst").failed(t, 3, "did you mean selftest?")
}

func TestIdentify(t *testing.T) {
	asYAML, asJSON := callDevice(t, device{}, "identify", "--provider=fake"), callDevice(t, device{}, "identify", "--provider=fake", "-o", "json")
	data, err := yaml.YAMLToJSONStrict([]byte(asYAML.stdout))
	if err != nil || asYAML.code != 0 || asJSON.code != 0 || !strings.HasPrefix(asJSON.stdout, "{\n") {
		t.Fatalf("%v: %+v %+v", err, asYAML, asJSON)
	}
	for _, out := range []string{string(data), asJSON.stdout} {
		var got map[string]any
		want := map[string]any{"nodeName": "a", "provider": "insecure", "device": map[string]any{"serial": "4711"}}
		if err := json.Unmarshal([]byte(out), &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%v: %s", err, out)
		}
	}
	callDevice(t, device{}, "identify", "--provider=fake", "-o", "entry").failed(t, 3, "has no endorsement keys")
}
