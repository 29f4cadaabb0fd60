// SPDX-License-Identifier: Apache-2.0

// Package cli is the frame of a command line, for all programs: how it is run, what it prints about
// an error, and the flags and commands that all programs have.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/outputformat"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/text"
)

// Process has the parts of the process that main passes on.
type Process struct {
	Args []string
	// Stdin is where a person on a terminal confirms. If it is nil, nobody can.
	Stdin io.Reader
	// Stdout receives one JSON document, or what a person asked for.
	Stdout, Stderr io.Writer
	Getenv         func(string) string
}

// Exit codes that mean the same in all programs. docs/node.md has those of the plugin. The Go
// runtime uses 2 for a crash.
const (
	CodeUnexpected = 1
	CodeUsage      = 3
	// CodeConfiguration says that the configuration is wrong, in programs that have one.
	CodeConfiguration = 10
)

// Failure is an error with its exit code and a hint for a person.
type Failure struct {
	Code int
	// Hint says what can be done, "" if that is not known.
	Hint string
	Err  error
}

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// Fail returns a Failure with these fields.
func Fail(code int, hint string, err error) *Failure { return &Failure{code, hint, err} }

// AsFailure returns the Failure in err. Any other error is unexpected.
func AsFailure(err error) *Failure {
	if f, ok := errors.AsType[*Failure](err); ok {
		return f
	}
	return Fail(CodeUnexpected, "", err)
}

// Usage returns the Failure for a wrong command line.
func Usage(err error) error { return Fail(CodeUsage, "see --help", err) }

// Init completes the root command of a program, which takes no arguments. The process gives its
// command line and its output. A wrong command line is a Usage.
func (p Process) Init(root *cobra.Command) {
	root.Args = NoArgs
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetArgs(p.Args)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return Usage(withNearestFlag(c, err)) })
}

// Run executes a command line, and returns the exit code. It prints an error on stderr, once.
// classify gives an error its exit code and its hint.
func (p Process) Run(ctx context.Context, root *cobra.Command, classify func(error) *Failure) int {
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	f := classify(err)
	p.Report(root.Name(), f, f.Hint)
	return f.Code
}

// MaxLine bounds a line on standard error, in bytes: a peer may have written a part of it.
const MaxLine = 2048

// Report prints an error in one line, and its hint in another line.
func (p Process) Report(name string, err error, hint string) {
	_, _ = fmt.Fprintf(p.Stderr, "%s: %s\n", name, text.Line(err.Error(), MaxLine))
	if hint != "" {
		_, _ = fmt.Fprintf(p.Stderr, "hint: %s\n", text.Line(hint, MaxLine))
	}
}

// Print prints a value for programs, as JSON or YAML.
func (p Process) Print(format string, value any) error {
	out, err := outputformat.Encode(format, value)
	if err == nil {
		_, err = p.Stdout.Write(out)
	}
	return err
}

// Signalled returns a context that SIGTERM or SIGINT ends. A second signal ends the process at
// once.
func Signalled() (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	context.AfterFunc(ctx, cancel)
	return ctx, cancel
}

// NoArgs refuses arguments, and names the command that was probably meant.
func NoArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, below := range c.Commands() {
		if !below.Hidden {
			names = append(names, below.Name())
		}
	}
	return Usage(fmt.Errorf("unknown command or argument %q for %s%s", args[0], c.CommandPath(), text.DidYouMean(args[0], "", names)))
}

// withNearestFlag adds to an error about an unknown flag the one that was probably meant.
func withNearestFlag(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return fmt.Errorf("%w%s", err, text.DidYouMean(unknown.GetSpecifiedName(), "--", names))
}
