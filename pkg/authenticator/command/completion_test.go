// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// completions asks as a shell does, and returns the words. Files are offered if it returns nil.
func completions(t *testing.T, p Program, args ...string) []string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := p.Run(t.Context(), Process{Args: append([]string{cobra.ShellCompNoDescRequestCmd}, args...), Stdout: &stdout, Stderr: &stderr, Getenv: func(string) string { return "" }})
	words, directive, ok := strings.Cut(stdout.String(), ":")
	if code != 0 || !ok {
		t.Fatalf("exit code %d: %q %q", code, stdout.String(), stderr.String())
	}
	if directive == "0\n" { // cobra.ShellCompDirectiveDefault
		return nil
	}
	return strings.Fields(words)
}

func TestCompletion(t *testing.T) {
	for line, want := range map[string][]string{
		"--provider ":           {"insecure", "auto"},
		"status --provider ":    {"insecure", "auto"},
		"--dry-run --output ":   {"json", "yaml"},
		"status -o ":            {"text", "json", "yaml"},
		"doctor --output=":      {"text", "json", "yaml"},
		"identify -o ":          {"yaml", "json", "entry"},
		"version -o ":           {"json", "yaml"},
		"sta":                   {"status"},
		"doctor ":               {},
		"--config ":             nil,
		"status --cert-dir ":    nil,
		"work":                  {}, // not for people
		"completion ba":         {"bash"},
		"status --ek-template ": nil, // this program does not know the values
	} {
		if got := completions(t, testProgram(), strings.Split(line, " ")...); !slices.Equal(got, want) || (got == nil) != (want == nil) {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
}

// The values of a provider's own flag come from the binary.
func TestCompletionOfAProvidersFlag(t *testing.T) {
	p := testProgram()
	p.FlagValues = func(flag string) []string { return []string{"a-" + flag, "b"} }
	i := &invocation{Program: p}
	i.root = i.rootCommand()
	i.addCommands()
	var out bytes.Buffer
	i.root.SetOut(&out)
	i.root.SetArgs([]string{cobra.ShellCompNoDescRequestCmd, "status", "--ek-template", ""})
	if err := i.root.ExecuteContext(t.Context()); err != nil || !strings.HasPrefix(out.String(), "a-ek-template\nb\n") {
		t.Errorf("%v: %q", err, out.String())
	}
}

// Each command for people has an example, and each line of it that names the program is one of its
// command lines.
func TestEachCommandHasExamples(t *testing.T) {
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		for _, below := range c.Commands() {
			check(below)
		}
		if c.Hidden || c.HasSubCommands() && c.HasParent() {
			return
		}
		typed := 0
		for line := range strings.Lines(strings.ReplaceAll(c.Example, "\\\n", "")) {
			line, _, _ = strings.Cut(line, "|")
			line, _, _ = strings.Cut(line, ">")
			words := strings.Fields(line)
			if len(words) == 0 || words[0] != c.Root().Name() {
				continue
			}
			typed++
			found, args, err := testTree().Find(words[1:])
			if err == nil {
				err = found.ParseFlags(args)
			}
			if err != nil || len(found.Flags().Args()) > 0 {
				t.Errorf("%q: %v", line, err)
			}
		}
		if typed == 0 {
			t.Errorf("%s has no example", c.CommandPath())
		}
	}
	check(testTree())
}

// testTree has a command of each kind.
func testTree() *cobra.Command {
	p := testProgram()
	p.Providers[0].Inspects = true
	return p.Command()
}

// What the kubelet calls builds no command but the root, and has no examples and completions.
func TestTheKubeletsCallBuildsNoCommands(t *testing.T) {
	for line, want := range map[string]bool{
		"":                                  true,
		"--provider=insecure --cert-dir=/x": true,
		"--provider insecure":               false,
		"--cert-dir=/x status":              false,
		"--cert-dir=/x --help":              false,
		"--cert-dir=/x --help=true":         false,
		"--cert-dir=/x -h":                  false,
		// a flag without a value: correct, only slower
		"--cert-dir=/x --keep-bootstrap-credential": false,
		"__complete --provider=":                    false,
	} {
		if got := settingsOnly(strings.Fields(line)); got != want {
			t.Errorf("%q: %v", line, got)
		}
	}
	if root := testProgram().invocation(Process{Args: newNode(t).flags}).root; root.HasSubCommands() || root.HasExample() {
		t.Error("it is more than the root command")
	}
	// Help lists all commands, however it is asked for.
	for _, flag := range []string{"--help", "-h", "--help=true"} {
		if got := call(t, "", flag); !strings.Contains(got.stdout, "\n  status ") || !strings.Contains(got.stdout, "\n  completion ") {
			t.Errorf("%s:\n%s", flag, got.stdout)
		}
	}
}
