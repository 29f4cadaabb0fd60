// SPDX-License-Identifier: Apache-2.0

// notices prints the licences and notices of all that a Go binary is linked from, the program's own
// first: the copyright file of a package. They are taken from the folders of linked packages, and
// from the folders above, up to the module's. Parts of a module may have another author, and
// another licence. A package without a licence is an error, and nothing is printed.
package main

import (
	"debug/buildinfo"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"runtime/debug"
	"strings"
)

func main() {
	source := flag.String("source", "..", "the `folder` of the module that the binary was built from")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: notices [-source FOLDER] BINARY")
		os.Exit(2)
	}
	if err := run(os.Stdout, flag.Arg(0), *source); err != nil {
		fmt.Fprintln(os.Stderr, "notices:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, binary, source string) error {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return err
	}
	packages, err := packagesOf(info, source)
	if err != nil {
		return fmt.Errorf("%s: %w", binary, err)
	}
	files, err := licencesOf(packages)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, statement(info)+texts(files))
	return err
}

// statement is what the program's own licence is.
func statement(info *debug.BuildInfo) string {
	return fmt.Sprintf(`%[1]s
https://%[2]s

This program is licensed under the Apache License, Version 2.0: the first text
below, which on Debian systems is in /usr/share/common-licenses/Apache-2.0, too.

It is linked from parts of other modules, whose licences and notices follow.
Above each text are the modules that it is from, and its file there.
`, path.Base(info.Path), info.Main.Path)
}

// texts has each text once, under all files that have it, in the order of the first.
func texts(files []licenceFile) string {
	var inOrder []string
	headings := map[string]string{}
	for _, file := range files {
		if headings[file.text] == "" {
			inOrder = append(inOrder, file.text)
		}
		headings[file.text] += fmt.Sprintf("%s: %s\n", file.module, file.name)
	}
	line := strings.Repeat("=", 80) + "\n"
	var b strings.Builder
	for _, text := range inOrder {
		b.WriteString("\n" + line + headings[text] + line + "\n" + text + "\n")
	}
	return b.String()
}
