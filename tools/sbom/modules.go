// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	goversion "go/version"
	"net/url"
	"runtime/debug"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// standardLibrary is Go's, by the name under which its vulnerabilities are published
// (pkg:golang/stdlib).
const standardLibrary = "stdlib"

// librariesOf are the standard library, and the modules that the binary is linked from.
func librariesOf(info *debug.BuildInfo) ([]cdx.Component, error) {
	if info.Main.Path == "" {
		return nil, errors.New("it was built without modules")
	}
	release, _, _ := strings.Cut(info.GoVersion, " ") // what may follow are experiments
	if !goversion.IsValid(release) {
		return nil, fmt.Errorf("it was built by %q, which is no release of Go", info.GoVersion)
	}
	libraries := []cdx.Component{library(standardLibrary, strings.TrimPrefix(release, "go"))}
	for _, required := range info.Deps {
		linked := required
		if required.Replace != nil {
			linked = required.Replace
		}
		if linked.Version == "(devel)" {
			return nil, fmt.Errorf("%s comes from a folder, %s: a release has versions only", required.Path, linked.Path)
		}
		component := library(linked.Path, linked.Version)
		// The sum of go.sum is one over the list of the module's files. `hashes` are those of one
		// file, so it is not one of them.
		properties := []cdx.Property{{Name: "go:sum", Value: linked.Sum}}
		if required.Replace != nil {
			properties = append(properties, cdx.Property{Name: "go:replaces", Value: required.Path + "@" + required.Version})
		}
		component.Properties = &properties
		libraries = append(libraries, component)
	}
	return libraries, nil
}

func library(path, version string) cdx.Component {
	purl := purlOf(path, version)
	return cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: purl}
}

// purlOfProgram is the purl of the main package, in its module. A binary that was built in the
// module's own folder does not know the module's version. Then the version is the product's.
func purlOfProgram(info *debug.BuildInfo, version string) string {
	if info.Main.Version != "(devel)" {
		version = info.Main.Version
	}
	purl := purlOf(info.Main.Path, version)
	if folder, isBelow := strings.CutPrefix(info.Path, info.Main.Path+"/"); isBelow {
		purl += "#" + escape(folder)
	}
	return purl
}

// purlOf keeps capital letters. The purl type "golang" is older than modules and lowers them. But a
// lowered path names another module, and tools that look for vulnerabilities by purl do not lower
// it.
func purlOf(path, version string) string {
	purl := "pkg:golang/" + escape(path)
	if version != "" {
		purl += "@" + escape(version)
	}
	return purl
}

// escape escapes all but slashes: a purl's rules are those for a query, not those for a path. There
// + is to be escaped.
func escape(path string) string {
	segments := strings.Split(path, "/")
	for i := range segments {
		segments[i] = url.QueryEscape(segments[i])
	}
	return strings.Join(segments, "/")
}

// buildProperties are the settings that say what kind of binary it is, under the names that
// CycloneDX has registered, where it has. Flags of compilers and linkers are left out: they may
// name folders of the machine that built it.
func buildProperties(info *debug.BuildInfo) *[]cdx.Property {
	properties := []cdx.Property{{Name: "cdx:gomod:build:env:GOVERSION", Value: info.GoVersion}}
	for _, setting := range info.Settings {
		switch setting.Key {
		case "CGO_ENABLED", "GOARCH", "GOOS":
			properties = append(properties, cdx.Property{Name: "cdx:gomod:build:env:" + setting.Key, Value: setting.Value})
		case "-buildmode", "-compiler", "-tags", "-trimpath", "GOAMD64", "GOARM64", "GOEXPERIMENT", "GOFIPS140":
			properties = append(properties, cdx.Property{Name: "go:build:" + setting.Key, Value: setting.Value})
		}
	}
	return &properties
}
