// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
)

// module is the main module, one that it requires, or Go.
type module struct {
	path, version string
	replacement   string // path and version of what is there instead, if anything
	folder        string
	main          bool
}

func (m module) String() string {
	name := strings.TrimSpace(m.path + " " + m.version)
	if m.replacement != "" {
		name += " => " + m.replacement
	}
	return name
}

// order is what modules are sorted by.
func (m module) order() string {
	if m.main {
		return ""
	}
	return m.path
}

// linkedPackage is a package of the binary.
type linkedPackage struct {
	module module
	folder string
}

// packagesOf asks the go command, in the folder source, for the packages of the binary, which knows
// only the modules that they are from. Those have to be the same: other versions may have other
// licences.
func packagesOf(info *debug.BuildInfo, source string) ([]linkedPackage, error) {
	args := []string{"list", "-mod=readonly", "-deps", "-json=Dir,Standard,Module"}
	env := os.Environ()
	for _, setting := range info.Settings {
		switch {
		case setting.Key == "-tags":
			args = append(args, "-tags="+setting.Value)
		case setting.Key == "CGO_ENABLED", strings.HasPrefix(setting.Key, "GO"):
			env = append(env, setting.Key+"="+setting.Value)
		}
	}
	root, err := goCommand(source, env, "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	golang := module{path: "Go", version: strings.TrimPrefix(info.GoVersion, "go"), folder: strings.TrimSpace(string(root))}
	list, err := goCommand(source, env, append(args, info.Path)...)
	if err != nil {
		return nil, err
	}

	var packages []linkedPackage
	here := map[string]bool{}
	for decoder := json.NewDecoder(bytes.NewReader(list)); ; {
		var listed listedPackage
		if err := decoder.Decode(&listed); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if listed.Standard {
			packages = append(packages, linkedPackage{golang, listed.Dir})
			continue
		}
		module := listed.module()
		packages = append(packages, linkedPackage{module, listed.Dir})
		if !module.main {
			here[module.String()] = true
		}
	}
	for _, dep := range info.Deps {
		module := module{path: dep.Path, version: dep.Version}
		if dep.Replace != nil {
			module.replacement = dep.Replace.Path + " " + dep.Replace.Version
		}
		if !here[module.String()] {
			return nil, fmt.Errorf("it was not built from what is in %s: it has %s", source, module)
		}
		delete(here, module.String())
	}
	for name := range here {
		return nil, fmt.Errorf("it was not built from what is in %s: it does not have %s", source, name)
	}
	return packages, nil
}

func goCommand(folder string, env []string, args ...string) ([]byte, error) {
	command := exec.Command("go", args...) //nolint:gosec // G204: the arguments are from a binary that we built
	command.Dir, command.Env = folder, env
	var problem bytes.Buffer
	command.Stderr = &problem
	output, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", command, err, problem.Bytes())
	}
	return output, nil
}

// listedPackage is what `go list` says of a package.
type listedPackage struct {
	Dir      string
	Standard bool
	Module   struct {
		Path, Version, Dir string
		Main               bool
		Replace            *struct{ Path, Version string }
	}
}

func (p listedPackage) module() module {
	m := module{path: p.Module.Path, version: p.Module.Version, folder: p.Module.Dir, main: p.Module.Main}
	if r := p.Module.Replace; r != nil {
		// as it is in binaries, of a folder
		m.replacement = r.Path + " " + cmp.Or(r.Version, "(devel)")
	}
	return m
}
