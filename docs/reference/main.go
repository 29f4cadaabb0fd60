// SPDX-License-Identifier: Apache-2.0

// Command reference writes generated files into a folder: the reference of the CRDs, the types in
// the tables of both configuration pages, two man pages, the schema of the Helm chart's values, the
// chart's README, and the admission policies that the controller fills. `make generate` runs it.
//
// Fields and types are those of the Go types, and descriptions their comments. The limits of
// records are the CRD's, which is made from the same types.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
)

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: reference REPOSITORY FOLDER CRDS...")
		os.Exit(2)
	}
	if err := write(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

// write writes the pages into a folder.
func write(repository, folder string, crds []string) error {
	pages, err := makePages(repository, crds...)
	if err != nil {
		return err
	}
	chart, err := makeChart(repository)
	if err != nil {
		return err
	}
	maps.Copy(pages, chart)
	man, err := makeManPages(repository)
	if err != nil {
		return err
	}
	maps.Copy(pages, man)
	policies, err := makePolicies()
	if err != nil {
		return err
	}
	maps.Copy(pages, policies)
	for name, content := range pages {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o644); err != nil { //nolint:gosec // documents
			return err
		}
	}
	return nil
}

// makePages returns the pages by file name.
func makePages(repository string, crds ...string) (map[string]string, error) {
	pages := map[string]string{}
	for name, page := range map[string]configPage{
		"controller-configuration.md": {guide: "docs/controller-configuration.md", folder: "pkg/controller/config", defaults: reflect.ValueOf(config.Default())},
		"configuration.md":            {guide: "docs/configuration.md", folder: "pkg/authenticator", defaults: reflect.ValueOf(authenticator.DefaultConfig())},
	} {
		content, err := page.render(repository)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		pages[name] = content
	}
	pages[objectsPage] = objectsBegin
	for _, crd := range crds {
		sections, err := renderCRDs(crd)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", crd, err)
		}
		pages[objectsPage] += sections
	}
	return pages, nil
}
