// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// licenceFile is a file with a licence, or with a notice that goes with one.
type licenceFile struct {
	module module
	name   string // within the module
	text   string
}

// isLicence and isNotice tell from a file's name what it is. What is written in Go is no text.
var (
	isLicence = regexp.MustCompile(`(?i)^(licen[sc]e|copying)`)
	isNotice  = regexp.MustCompile(`(?i)^(notice|patents)`)
)

// licencesOf finds each package's licences and notices, ordered by module, the main module first,
// and name.
func licencesOf(packages []linkedPackage) ([]licenceFile, error) {
	folders := map[string][]licenceFile{}
	for _, p := range packages {
		licensed := false
		for folder := p.folder; strings.HasPrefix(folder, p.module.folder); folder = filepath.Dir(folder) {
			files, wasRead := folders[folder]
			if !wasRead {
				var err error
				if files, err = readLicences(p.module, folder); err != nil {
					return nil, err
				}
				folders[folder] = files
			}
			licensed = licensed || slices.ContainsFunc(files, func(f licenceFile) bool { return isLicence.MatchString(path.Base(f.name)) })
		}
		if !licensed {
			return nil, fmt.Errorf("%s: no licence for what is in %s", p.module, p.folder)
		}
	}
	found := slices.Concat(slices.Collect(maps.Values(folders))...)
	slices.SortFunc(found, func(a, b licenceFile) int {
		return cmp.Or(cmp.Compare(a.module.order(), b.module.order()), cmp.Compare(a.name, b.name))
	})
	return found, nil
}

// readLicences reads a folder of a module. A text that is empty is none, and those that differ in
// how their lines end are the same.
func readLicences(m module, folder string) ([]licenceFile, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	var files []licenceFile
	for _, entry := range entries {
		name := entry.Name()
		if !entry.Type().IsRegular() || filepath.Ext(name) == ".go" || !isLicence.MatchString(name) && !isNotice.MatchString(name) {
			continue
		}
		name = filepath.Join(folder, name)
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if !utf8.Valid(data) {
			return nil, fmt.Errorf("%s is not UTF-8", name)
		}
		text := strings.Trim(strings.ReplaceAll(string(data), "\r\n", "\n"), "\n")
		if text == "" {
			continue
		}
		inModule, err := filepath.Rel(m.folder, name)
		if err != nil {
			return nil, err
		}
		files = append(files, licenceFile{m, filepath.ToSlash(inModule), text})
	}
	return files, nil
}
