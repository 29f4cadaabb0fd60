// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/attestctl"
	controllercommand "github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
)

// manDate is the date in the man pages. Change it with their content.
const manDate = "November 27, 2026"

// manPage is a man page in mdoc(7), made from a program's help. The exit codes are those of the
// section "Exit codes" of a page in docs.
type manPage struct {
	program *cobra.Command
	section int
	// runs says that the program does something without a command.
	runs bool
	// short says in half a line what the program is.
	short string
	// page has the exit codes. seeAlso are other man pages.
	page    string
	seeAlso []string
}

func manPages() map[string]manPage {
	return map[string]manPage{
		"kubectl-attest.1": {
			program: attestctl.Program{}.Command(), section: 1, short: "show, check and revoke the attestation of a cluster's nodes",
			page: "kubectl-attest.md", seeAlso: []string{"kubectl 1", "kubelet-authenticator 8", "node-attestation-controller 8"},
		},
		"node-attestation-controller.8": {
			program: controllercommand.Program{}.Command(), section: 8, runs: true, short: "challenge, approve and sign the certificate requests of nodes",
			page: "controller-configuration.md", seeAlso: []string{"kubectl-attest 1", "kubelet-authenticator 8"},
		},
	}
}

// makeManPages returns the man pages by file name.
func makeManPages(repository string) (map[string]string, error) {
	pages := map[string]string{}
	for name, page := range manPages() {
		content, err := page.render(repository)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		pages[name] = content
	}
	return pages, nil
}

func (p manPage) render(repository string) (string, error) {
	codes, err := exitCodes(filepath.Join(repository, "docs", p.page))
	if err != nil {
		return "", err
	}
	root := p.program
	root.InitDefaultHelpFlag()
	w := &mdoc{}
	w.line(`.\" SPDX-License-Identifier: Apache-2.0`)
	w.line(".\\\" Made by `make generate` from the program's help.")
	w.line(".Dd %s", manDate)
	w.line(".Dt %s %d", strings.ToUpper(root.Name()), p.section)
	w.line(".Os")
	w.line(".Sh NAME")
	w.line(".Nm %s", root.Name())
	w.line(".Nd %s", p.short)
	w.line(".Sh SYNOPSIS")
	w.line(".Nm %s", root.DisplayName())
	if p.runs {
		w.line(".Op Ar option ...")
		w.line(".Nm %s", root.DisplayName())
	}
	w.line(".Ar command")
	w.line(".Op Ar argument ...")
	w.line(".Op Ar option ...")
	w.line(".Sh DESCRIPTION")
	w.text(root.Long)
	w.line(".Sh COMMANDS")
	for _, c := range commandsOf(root) {
		w.command(root, c)
	}
	w.line(".Sh OPTIONS")
	w.flags(root.NonInheritedFlags())
	w.line(".Sh EXIT STATUS")
	w.line(".Bl -tag -width Ds")
	for _, code := range codes {
		w.line(".It %s", code[0])
		w.text(code[1])
	}
	w.line(".El")
	if root.Example != "" {
		w.line(".Sh EXAMPLES")
		w.literal(root.Example)
	}
	w.line(".Sh SEE ALSO")
	for i, page := range p.seeAlso {
		comma := " ,"
		if i == len(p.seeAlso)-1 {
			comma = ""
		}
		w.line(".Xr %s%s", page, comma)
	}
	w.line(".Pp")
	w.line(".Lk https://github.com/kubelet-authenticator/kubelet-authenticator The documentation")
	return w.String(), nil
}

// commandsOf returns the leaf commands below c that are not hidden, depth first.
func commandsOf(c *cobra.Command) (all []*cobra.Command) {
	for _, child := range c.Commands() {
		switch {
		case child.Hidden || child.Name() == "help" || child.Name() == "completion":
		case child.HasSubCommands():
			all = append(all, commandsOf(child)...)
		default:
			all = append(all, child)
		}
	}
	return all
}

// row is a row of a table with two columns. span is code in Markdown.
var (
	row  = regexp.MustCompile(`(?m)^\| (\d+) \| (.+) \|$`)
	span = regexp.MustCompile("`([^`]+)`")
	link = regexp.MustCompile(`\[([^]]+)\]\([^)]*\)`)
)

// exitCodes returns the codes and their meanings in the section "Exit codes" of a page.
func exitCodes(path string) (codes [][2]string, err error) {
	page, err := os.ReadFile(path) //nolint:gosec // G703: make generate names the repository
	if err != nil {
		return nil, err
	}
	_, section, ok := strings.Cut(string(page), "\n## Exit codes\n")
	if !ok {
		return nil, fmt.Errorf("%s has no section on exit codes", path)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for _, found := range row.FindAllStringSubmatch(section, -1) {
		meaning := link.ReplaceAllString(span.ReplaceAllString(found[2], "$1"), "$1")
		codes = append(codes, [2]string{found[1], strings.ToUpper(meaning[:1]) + meaning[1:] + "."})
	}
	if len(codes) == 0 {
		return nil, fmt.Errorf("%s lists no exit codes", path)
	}
	return codes, nil
}

// mdoc collects the lines of a man page.
type mdoc struct{ strings.Builder }

func (w *mdoc) line(format string, arguments ...any) {
	_, _ = fmt.Fprintf(w, format+"\n", arguments...)
}

// escaped makes a text safe in a line of mdoc: it is no request, and no escape.
func escaped(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "`", "\\`").Replace(line)
	if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
		line = `\&` + line
	}
	return line
}

// text writes paragraphs. Each sentence begins on a line of its own, as mandoc asks for.
func (w *mdoc) text(text string) {
	for i, paragraph := range strings.Split(strings.TrimSpace(text), "\n\n") {
		if i > 0 {
			w.line(".Pp")
		}
		words := strings.Join(strings.Fields(paragraph), " ")
		for _, sentence := range strings.Split(strings.ReplaceAll(words, ". ", ".\n"), "\n") {
			w.line("%s", escaped(sentence))
		}
	}
}

// literal writes lines as they are.
func (w *mdoc) literal(text string) {
	w.line(".Bd -literal -offset indent")
	for _, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		w.line("%s", escaped(strings.TrimPrefix(line, "  ")))
	}
	w.line(".Ed")
}

func (w *mdoc) command(root, c *cobra.Command) {
	w.line(".Ss %s", escaped(strings.TrimPrefix(strings.TrimSuffix(c.UseLine(), " [flags]"), root.DisplayName()+" ")))
	w.text(cmp.Or(c.Long, c.Short+"."))
	if c.Example != "" {
		w.literal(c.Example)
	}
	w.flags(c.NonInheritedFlags())
}

// flags writes a list of flags, with their defaults.
func (w *mdoc) flags(flags *pflag.FlagSet) {
	var items []string
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		item := ".It"
		if f.Shorthand != "" {
			item += " Fl " + f.Shorthand + " ,"
		}
		item += " Fl -" + f.Name
		if value != "" {
			item += " Ns = Ns Ar " + value
		}
		if d := f.DefValue; d != "" && d != "false" && d != "[]" && d != "0" && !strings.Contains(usage, "default") {
			usage += " (default " + d + ")"
		}
		about := &mdoc{}
		about.text(usage)
		items = append(items, item+"\n"+strings.TrimSpace(about.String()))
	})
	if len(items) == 0 {
		return
	}
	slices.Sort(items)
	w.line(".Bl -tag -width Ds\n%s\n.El", strings.Join(items, "\n"))
}
