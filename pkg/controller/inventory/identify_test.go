// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
)

// identify runs the command against a TPM and returns what it printed.
func identify(t *testing.T, chip *swtpm.TPM, arguments ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	program := command.Program{
		Name: "kubelet-authenticator", DefaultProvider: tpm.Name,
		Providers: []provider.Factory{tpm.Factory()},
	}
	process := command.Process{
		Args:   append([]string{"identify", "--tpm-device", chip.Socket(), "--runtime-dir", t.TempDir()}, arguments...),
		Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" },
	}
	if code := program.Run(t.Context(), process); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr.String())
	}
	return stdout.String()
}

// The output of the command is an inventory. So are several outputs joined by cat, in either
// format, with or without a list before or after them.
func TestIdentifyIsAnEntry(t *testing.T) {
	t.Parallel()
	one := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	two := swtpm.Start(t, swtpm.Options{}) // no certificate at all
	oneYAML := identify(t, one, "--node-name=one", "--provider-id=test://one")
	oneJSON := identify(t, one, "--node-name=one", "--provider-id=test://one", "--output=json")
	twoYAML := identify(t, two, "--node-name=two")
	twoJSON := identify(t, two, "--node-name=two", "--output=json")
	written := head + "- name: third\n  nodeName: three\n  eks: [{fingerprint: " + print('3') + "}]\n"

	want, err := Parse([]byte(oneYAML))
	if err != nil {
		t.Fatal(err)
	}
	first := want.All()[0]
	if first.Name != "one" || first.NodeName != "one" || first.ProviderID != "test://one" || len(first.EKs) != 2 || first.EKs[0].Template != "ecc-p256" ||
		first.EKs[1].Template != "rsa-2048" || !isFingerprint(first.EKs[0].CertificateFingerprint) || !strings.Contains(oneYAML, first.EKs[0].Fingerprint) {
		t.Errorf("got %+v of\n%s", first, oneYAML)
	}
	same, err := Parse([]byte(oneJSON))
	if err != nil || !reflect.DeepEqual(same.All(), want.All()) {
		t.Errorf("JSON: got %+v, %v", same.All(), err)
	}
	bare, err := Parse([]byte(twoYAML))
	if err != nil || len(bare.All()[0].EKs) != 1 || bare.All()[0].EKs[0].CertificateFingerprint != "" || bare.All()[0].ProviderID != "" {
		t.Fatalf("got %+v, %v", bare.All(), err)
	}
	second := bare.All()[0]
	compact := func(s string) string {
		var out bytes.Buffer
		if err := json.Compact(&out, []byte(s)); err != nil {
			t.Fatal(err)
		}
		return out.String() + "\n"
	}
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"YAML, YAML":                    {oneYAML + twoYAML, []string{"one", "two"}},
		"YAML with separators":          {"---\n" + oneYAML + "---\n" + twoYAML + "---\n", []string{"one", "two"}},
		"YAML with ends":                {oneYAML + "...\n" + twoYAML + "...\n", []string{"one", "two"}},
		"JSON, JSON":                    {oneJSON + twoJSON, []string{"one", "two"}},
		"JSON lines":                    {compact(oneJSON) + compact(twoJSON), []string{"one", "two"}},
		"JSON with separators":          {oneJSON + "---\n" + twoJSON, []string{"one", "two"}},
		"YAML, JSON":                    {oneYAML + twoJSON, []string{"one", "two"}},
		"JSON, YAML":                    {oneJSON + twoYAML, []string{"one", "two"}},
		"a list, YAML":                  {written + oneYAML, []string{"third", "one"}},
		"a list, JSON, YAML":            {written + oneJSON + twoYAML, []string{"third", "one", "two"}},
		"YAML, a list":                  {oneYAML + written, []string{"one", "third"}},
		"JSON, a list":                  {oneJSON + written, []string{"one", "third"}},
		"with remarks":                  {"# first\n" + oneYAML + "\n# second\n" + twoYAML, []string{"one", "two"}},
		"with a name and addresses":     {oneYAML + "name: rack 1\naddresses: [192.0.2.1]\n" + twoYAML, []string{"rack 1", "two"}},
		"in the order of the JSON":      {reorder(t, oneJSON) + "---\n" + reorder(t, twoJSON), []string{"one", "two"}},
		"in a list":                     {head + "- " + indent(oneYAML) + "- " + indent(twoYAML), []string{"one", "two"}},
		"in a list in JSON":             {`{"kind":"` + Kind + `","apiVersion":"` + APIVersion + `","machines":[` + oneJSON + "," + compact(twoJSON) + "]}", []string{"one", "two"}},
		"with the line ends of Windows": {strings.ReplaceAll(oneYAML+twoJSON, "\n", "\r\n"), []string{"one", "two"}},
	} {
		inventory, err := Parse([]byte(c.data))
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, c.data)
			continue
		}
		var names []string
		for _, m := range inventory.All() {
			names = append(names, m.Name)
		}
		if !reflect.DeepEqual(names, c.want) {
			t.Errorf("%s: machines %q", name, names)
		}
		for _, m := range []Machine{first, second} {
			if found := inventory.ByEK(m.EKs[0].Fingerprint); len(found) > 0 && (found[0].NodeName != m.NodeName || !reflect.DeepEqual(found[0].EKs, m.EKs)) {
				t.Errorf("%s: %+v", name, found)
			}
		}
	}
	if twice, err := Parse([]byte(oneYAML + oneJSON)); err != nil || twice.Len() != 1 || twice.Duplicates() != 1 || len(twice.Conflicts()) > 0 {
		t.Errorf("the same twice: %+v, %v", twice, err)
	}
}

// The entry for a list has the fingerprints and no optional fields. It means the same as the full
// output.
func TestIdentifyPrintsAnEntry(t *testing.T) {
	t.Parallel()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256", "rsa-2048"}})
	arguments := []string{"--node-name=one", "--provider-id=test://one"}
	entry, whole := identify(t, chip, append(arguments, "--output=entry")...), identify(t, chip, arguments...)
	both, err := Parse([]byte(whole + "---\n" + head + entry))
	if err != nil {
		t.Fatalf("%v\n%s", err, entry)
	}
	if both.Len() != 1 || both.Duplicates() != 1 || len(both.Conflicts()) > 0 {
		t.Errorf("it differs: %v", both.Conflicts())
	}
	if strings.Contains(entry, "certificate") || strings.Contains(entry, "device") || len(entry) > 260 {
		t.Errorf("%d bytes:\n%s", len(entry), entry)
	}
}

// reorder writes YAML with nodeName first, as other tools do.
func reorder(t *testing.T, printed string) string {
	t.Helper()
	var fields struct {
		NodeName   string `json:"nodeName"`
		ProviderID string `json:"providerID"`
		Provider   string `json:"provider"`
		Device     any    `json:"device"`
	}
	if err := json.Unmarshal([]byte(printed), &fields); err != nil {
		t.Fatal(err)
	}
	device, err := yaml.Marshal(fields.Device)
	if err != nil {
		t.Fatal(err)
	}
	return "nodeName: " + fields.NodeName + "\nproviderID: \"" + fields.ProviderID + "\"\nprovider: " + fields.Provider + "\ndevice:\n  " + indent(string(device))
}

func indent(s string) string { return strings.TrimSuffix(strings.ReplaceAll(s, "\n", "\n  "), "  ") }

// This test knows each field that identify can print, and fails for a new one. Then the decoder
// must accept the field, and controllers must be upgraded before the plugins.
func TestEveryFieldOfIdentifyIsKnown(t *testing.T) {
	t.Parallel()
	device := &tpm.Identity{EKs: []tpm.EKIdentity{{Certificate: &tpm.CertificateIdentity{}}}}
	identity := &authenticator.Identity{Device: device}
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer, reflect.Interface:
			fill(v.Elem())
		case reflect.Slice:
			fill(v.Index(0))
		case reflect.Struct:
			for i := range v.NumField() {
				fill(v.Field(i))
			}
		case reflect.String:
			v.SetString("x")
		case reflect.Bool:
			v.SetBool(true)
		default:
			t.Fatalf("a field of kind %s", v.Kind())
		}
	}
	fill(reflect.ValueOf(identity))
	identity.NodeName, identity.Provider = "one", "tpm"
	ek := &device.EKs[0]
	ek.Fingerprint, ek.Certificate.Fingerprint = print('1'), print('2')
	// A manufacturer's texts that YAML could read as another type.
	for _, said := range []string{
		"x", "1", "0x1f", "0o17", "0b1", "1e3", "1_000", "1:30", "yes", "null", "~", "<<", "=", "!!int 5", "*x", "&x", "2026-11-03T12:00:00Z", "", " x ",
		"---", "device: x", "{", "a: b", "# x", "<&>", "\u2028", "\"", "'", "\\", "Ü", "\U0001f600", ".nan", "- x", "|", ">", "%", "@", "`", "\ttab", "x\n---\ndevice: y\n", "x\ndevice:\n",
	} {
		device.Vendor, ek.Certificate.Subject, ek.Certificate.Serial, device.Manufacturer = said, said, said, said
		asYAML, err := yaml.Marshal(identity)
		if err != nil {
			t.Fatal(err)
		}
		asJSON, err := json.MarshalIndent(identity, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range [][]byte{asYAML, asJSON} {
			inventory, err := Parse(data)
			if err != nil {
				t.Errorf("%q: %v\n%s", said, err, data)
				continue
			}
			want := []Machine{{Name: "one", NodeName: "one", ProviderID: "x", EKs: []EK{{print('1'), "x", print('2')}}}}
			if got := inventory.All(); !reflect.DeepEqual(got, want) {
				t.Errorf("%q: got %+v", said, got)
			}
		}
	}
}
