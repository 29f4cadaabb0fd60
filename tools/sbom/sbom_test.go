// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"

	"github.com/kubelet-authenticator/kubelet-authenticator/tools/internal/plugin"
)

const epoch = "1700000000"

func environment(epoch string) func(string) string {
	return func(name string) string { return map[string]string{"SOURCE_DATE_EPOCH": epoch}[name] }
}

// describe runs the program for a file that is released with the binary.
func describe(t *testing.T, artifact, binary string) []byte {
	t.Helper()
	output := filepath.Join(t.TempDir(), "sbom")
	args := []string{"-artifact", artifact, "-binary", binary, "-name", "kubelet-authenticator", "-version", "0.1.0", "-output", output}
	if err := run(args, environment(epoch)); err != nil {
		t.Fatal(err)
	}
	document, err := os.ReadFile(output)
	if err != nil {
		t.Fatal(err)
	}
	return document
}

func released(t *testing.T) string {
	t.Helper()
	artifact := filepath.Join(t.TempDir(), "kubelet-authenticator_0.1.0_amd64.deb")
	if err := os.WriteFile(artifact, []byte("a package"), 0o600); err != nil {
		t.Fatal(err)
	}
	return artifact
}

func TestBillOfThePlugin(t *testing.T) {
	artifact, binary := released(t), plugin.Build(t, "../..")
	goVersion, modules := plugin.Modules(t, binary)
	document := describe(t, artifact, binary)
	if !bytes.Equal(describe(t, artifact, binary), document) {
		t.Error("the second time it is another document")
	}

	bill := decode(t, document)
	checkStructure(t, bill)
	if want := "2023-11-14T22:13:20Z"; bill.Metadata.Timestamp != want {
		t.Errorf("the timestamp is %s, not %s", bill.Metadata.Timestamp, want)
	}
	described := bill.Metadata.Component
	if described.Name != "kubelet-authenticator_0.1.0_amd64.deb" || described.Version != "0.1.0" || sumIn(described) != sum(t, artifact) {
		t.Errorf("the artifact is %+v", described)
	}
	if len(*bill.Components) != 1 {
		t.Fatalf("the artifact has %d components", len(*bill.Components))
	}
	program := (*bill.Components)[0]
	const purl = "pkg:golang/github.com/kubelet-authenticator/kubelet-authenticator@v0.1.0#cmd/kubelet-authenticator"
	if program.Type != cdx.ComponentTypeApplication || program.Name != "kubelet-authenticator" || program.Version != "0.1.0" ||
		program.PackageURL != purl || sumIn(&program) != sum(t, binary) {
		t.Errorf("the binary is %+v", program)
	}
	for name, want := range map[string]string{
		"cdx:gomod:build:env:GOOS":        runtime.GOOS,
		"cdx:gomod:build:env:GOARCH":      runtime.GOARCH,
		"cdx:gomod:build:env:CGO_ENABLED": "0",
		"cdx:gomod:build:env:GOVERSION":   goVersion,
		"go:build:-trimpath":              "true",
	} {
		if got := property(&program, name); got != want {
			t.Errorf("%s is %q, not %q", name, got, want)
		}
	}

	got := *program.Components
	if want := strings.TrimPrefix(goVersion, "go"); got[0].Name != "stdlib" || got[0].Version != want || got[0].PackageURL != "pkg:golang/stdlib@"+want {
		t.Errorf("the standard library is %+v", got[0])
	}
	var listed []plugin.Module
	for _, library := range got[1:] {
		listed = append(listed, plugin.Module{Path: library.Name, Version: library.Version, Sum: property(&library, "go:sum")})
	}
	if !slices.Equal(listed, modules) {
		t.Errorf("modules are\n%v, not\n%v", listed, modules)
	}

	// What needs what is known of the artifact and of the binary; for modules it would be invented.
	var all []string
	for _, library := range got {
		all = append(all, library.BOMRef)
	}
	want := []cdx.Dependency{{Ref: described.BOMRef, Dependencies: &[]string{program.BOMRef}}, {Ref: program.BOMRef, Dependencies: &all}}
	if got, want := asJSON(t, bill.Dependencies), asJSON(t, want); got != want {
		t.Errorf("dependencies are\n%s, not\n%s", got, want)
	}
}

// TestModules: what is linked in is what counts, and purls are escaped.
func TestModules(t *testing.T) {
	info := parse(t, "go1.26.3 X:nodwarf5", `path	example.org/program/cmd/it
mod	example.org/program	v1.2.3+build	h1:main=
dep	example.org/Old	v2.0.0+incompatible	h1:old=
dep	example.org/replaced	v1.0.0
=>	example.org/fork	v0.0.0-20260101000000-0123456789ab	h1:fork=
build	-ldflags=-L/home/somebody
build	GOARCH=arm64
`)
	libraries, err := librariesOf(info)
	if err != nil {
		t.Fatal(err)
	}
	const want = `[
{"bom-ref":"pkg:golang/stdlib@1.26.3","type":"library","name":"stdlib","version":"1.26.3","purl":"pkg:golang/stdlib@1.26.3"},
{"bom-ref":"pkg:golang/example.org/Old@v2.0.0%2Bincompatible","type":"library","name":"example.org/Old","version":"v2.0.0+incompatible",
"purl":"pkg:golang/example.org/Old@v2.0.0%2Bincompatible","properties":[{"name":"go:sum","value":"h1:old="}]},
{"bom-ref":"pkg:golang/example.org/fork@v0.0.0-20260101000000-0123456789ab","type":"library","name":"example.org/fork",
"version":"v0.0.0-20260101000000-0123456789ab","purl":"pkg:golang/example.org/fork@v0.0.0-20260101000000-0123456789ab",
"properties":[{"name":"go:sum","value":"h1:fork="},{"name":"go:replaces","value":"example.org/replaced@v1.0.0"}]}]`
	if got := asJSON(t, libraries); got != strings.ReplaceAll(want, "\n", "") {
		t.Errorf("modules are\n%s", got)
	}
	if got, want := purlOfProgram(info, "v9.9.9"), "pkg:golang/example.org/program@v1.2.3%2Bbuild#cmd/it"; got != want {
		t.Errorf("the program is %s, not %s", got, want)
	}
	properties := asJSON(t, buildProperties(info))
	if want := `[{"name":"cdx:gomod:build:env:GOVERSION","value":"go1.26.3 X:nodwarf5"},{"name":"cdx:gomod:build:env:GOARCH","value":"arm64"}]`; properties != want {
		t.Errorf("properties are %s", properties)
	}
}

func TestRefused(t *testing.T) {
	const program = "mod\texample.org/p\t(devel)\t\n"
	for _, test := range []struct{ goVersion, text, want string }{
		{"go1.26.3", "", "without modules"},
		{"devel go1.27-0123456789 Mon Jan 5 10:00:00 2026 +0000", program, "no release of Go"},
		{"go1.26.3", program + "dep\texample.org/a\tv1.0.0\n=>\t../a\t(devel)\t\n", "example.org/a comes from a folder, ../a"},
	} {
		if _, err := librariesOf(parse(t, test.goVersion, test.text)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, not %q", err, test.want)
		}
	}

	artifact := released(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	output := filepath.Join(t.TempDir(), "sbom")
	for _, test := range []struct{ artifact, binary, version, epoch, want string }{
		{artifact + "x", self, "0.1.0", epoch, "debx: no such file"},
		{artifact, artifact, "0.1.0", epoch, "could not read Go build info"},
		{artifact, self, "", epoch, "-version is missing"},
		{artifact, self, "0.1.0", "", "SOURCE_DATE_EPOCH"},
	} {
		args := []string{"-artifact", test.artifact, "-binary", test.binary, "-name", "p", "-version", test.version, "-output", output}
		if err := run(args, environment(test.epoch)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, not %q", err, test.want)
		}
	}
	if _, err := os.Stat(output); !os.IsNotExist(err) {
		t.Errorf("something was written: %v", err)
	}
}

func parse(t *testing.T, goVersion, text string) *debug.BuildInfo {
	t.Helper()
	info, err := debug.ParseBuildInfo(text)
	if err != nil {
		t.Fatal(err)
	}
	info.GoVersion = goVersion
	return info
}

// decode refuses fields that CycloneDX does not have.
func decode(t *testing.T, document []byte) *cdx.BOM {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(document))
	decoder.DisallowUnknownFields()
	var bill cdx.BOM
	if err := decoder.Decode(&bill); err != nil {
		t.Fatalf("%v:\n%s", err, document)
	}
	return &bill
}

var (
	validSerial = regexp.MustCompile(`^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	validSum    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	validPURL   = regexp.MustCompile(`^pkg:golang(/[A-Za-z0-9._~%-]+)+(@v?[0-9][A-Za-z0-9._~%-]*)?(#[A-Za-z0-9._~%/-]+)?$`)
)

// checkStructure has those of the specification's rules for a bill that concern what is used here.
func checkStructure(t *testing.T, bill *cdx.BOM) {
	t.Helper()
	if bill.BOMFormat != "CycloneDX" || bill.SpecVersion != cdx.SpecVersion1_6 || bill.Version != 1 || !validSerial.MatchString(bill.SerialNumber) {
		t.Errorf("it is %s %s %d %s", bill.BOMFormat, bill.SpecVersion, bill.Version, bill.SerialNumber)
	}
	if _, err := time.Parse(time.RFC3339, bill.Metadata.Timestamp); err != nil {
		t.Error(err)
	}
	refs := map[string]bool{}
	var check func(c *cdx.Component)
	check = func(c *cdx.Component) {
		if c.Type == "" || c.Name == "" || c.BOMRef == "" || refs[c.BOMRef] {
			t.Errorf("a component has no type, name or reference, or another's: %+v", c)
		}
		refs[c.BOMRef] = true
		if c.PackageURL != "" && !validPURL.MatchString(c.PackageURL) {
			t.Errorf("%s is no purl", c.PackageURL)
		}
		for _, hash := range at(c.Hashes) {
			if hash.Algorithm != cdx.HashAlgoSHA256 || !validSum.MatchString(hash.Value) {
				t.Errorf("%s %s is no hash", hash.Algorithm, hash.Value)
			}
		}
		for _, p := range at(c.Properties) {
			if p.Name == "" || p.Value == "" {
				t.Errorf("a property is %+v", p)
			}
		}
		for _, inner := range at(c.Components) {
			check(&inner)
		}
	}
	check(bill.Metadata.Component)
	for _, c := range at(bill.Components) {
		check(&c)
	}
	described := map[string]bool{}
	for _, d := range at(bill.Dependencies) {
		if !refs[d.Ref] || described[d.Ref] {
			t.Errorf("dependencies of %s are there twice, or it is no component", d.Ref)
		}
		described[d.Ref] = true
		needed := map[string]bool{}
		for _, ref := range at(d.Dependencies) {
			if !refs[ref] || needed[ref] {
				t.Errorf("%s needs %s twice, or it is no component", d.Ref, ref)
			}
			needed[ref] = true
		}
	}
}

// at is the list that a pointer points at, none if there is none.
func at[T any](list *[]T) []T {
	if list == nil {
		return nil
	}
	return *list
}

func property(c *cdx.Component, name string) string {
	for _, p := range at(c.Properties) {
		if p.Name == name {
			return p.Value
		}
	}
	return ""
}

func sumIn(c *cdx.Component) string {
	if hashes := at(c.Hashes); len(hashes) == 1 {
		return hashes[0].Value
	}
	return ""
}

func sum(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(data))
}

func asJSON(t *testing.T, value any) string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
