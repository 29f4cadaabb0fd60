// SPDX-License-Identifier: Apache-2.0

// Package compile compiles what demo, tests and benchmarks run: the product's programs, and real
// components from source, in the versions of test/components. It keeps them outside the tree, and
// says what it does, since a cold build takes minutes. It uses the standard library alone, so that
// its first line does not wait for a compiler.
package compile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// compilerGC is for the compiler: with a small heap it collects garbage for a tenth of its time.
const compilerGC = "GOGC=400"

// progressEvery is the time between two lines of progress.
const progressEvery = 10 * time.Second

// Flags returns the flags of all builds without the race detector. A package that is compiled with
// other flags is compiled once more: that is minutes for client-go. The Makefile and packaging/
// have the same flags. Programs are stripped, so the compiler need not write what a debugger reads:
// that is a fifth of its time.
func Flags() []string { return []string{"-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false"} }

// Program builds a package of the module in a folder as the product is shipped: static, stripped,
// without paths. flags are added to those of go build.
//
// The suites of one run build the same programs. go build does not link a program again that is up
// to date. So the program is built in the cache folder, and copied from there.
func Program(ctx context.Context, module, output, pkg string, flags ...string) error {
	args := append(append(Flags(), "-ldflags=-s -w"), flags...)
	// a program of another module, which is linked once
	if !strings.HasPrefix(pkg, "./") {
		return goBuild(ctx, module, append(args, "-o", output), []string{pkg}, nil, os.Stderr)
	}
	kept, err := keptProgram(module, pkg, flags)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	unlock, err := lockFile(ctx, kept+".lock", os.Stderr)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	defer unlock()
	if err := goBuild(ctx, module, append(args, "-o", kept), []string{pkg}, nil, os.Stderr); err != nil {
		return err
	}
	return copyProgram(ctx, kept, output)
}

// ProgramFor builds a package as Program does, for another architecture, such as arm64.
func ProgramFor(ctx context.Context, architecture, module, output, pkg string) error {
	return goBuild(ctx, module, append(Flags(), "-ldflags=-s -w", "-o", output), []string{pkg}, []string{"GOARCH=" + architecture}, os.Stderr)
}

// goBuild runs go build in a folder. While it takes long, it writes to progress what it compiles.
func goBuild(ctx context.Context, dir string, flags, packages, env []string, progress io.Writer) error {
	cmd := exec.CommandContext(ctx, "go", slices.Concat([]string{"build", "-v"}, flags, packages)...) //nolint:gosec // G204: running go is the purpose
	cmd.Dir, cmd.Env = dir, slices.Concat(os.Environ(), []string{"CGO_ENABLED=0", compilerGC}, env)
	// Interrupted, go stops the compilers, too.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	output := &buildOutput{}
	cmd.Stdout, cmd.Stderr = output, output
	began := time.Now()
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	done := make(chan error, 1)
	go func() { done <- cmd.Run() }()
	for {
		select {
		case <-tick.C:
			say(progress, "%3.0f s: %s", time.Since(began).Seconds(), output.last())
		case err := <-done:
			if err != nil {
				return fmt.Errorf("build %s: %w\n%s", strings.Join(packages, ", "), err, output.problems())
			}
			return nil
		}
	}
}

// buildOutput is the output of go build -v: a line for each package that it compiles, and problems.
type buildOutput struct {
	mu       sync.Mutex
	partial  []byte
	compiled int
	line     string // the last one
	problem  bytes.Buffer
}

func (o *buildOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.partial = append(o.partial, p...)
	for {
		line, rest, whole := bytes.Cut(o.partial, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		o.partial = rest
		o.line = string(line)
		switch {
		case !bytes.ContainsAny(line, " \t"):
			o.compiled++
		case !bytes.HasPrefix(line, []byte("go: downloading ")):
			o.problem.Write(append(line, '\n'))
		}
	}
}

func (o *buildOutput) last() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return fmt.Sprintf("%d packages compiled, now %s", o.compiled, o.line)
}

func (o *buildOutput) problems() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.problem.String() + string(o.partial)
}

// say writes a line of progress. A failed write of the progress must not fail a build.
func say(w io.Writer, format string, args ...any) {
	if w != nil {
		_, _ = fmt.Fprintf(w, format+"\n", args...)
	}
}

// keptProgram is where the cache folder has the program of a package, built with these flags. Each
// checkout has its own.
func keptProgram(module, pkg string, flags []string) (string, error) {
	path, err := filepath.Abs(filepath.Join(module, pkg))
	if err != nil {
		return "", err
	}
	base, err := cacheFolder()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(base, "programs")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{path}, flags...), "\x00")))
	return filepath.Join(dir, fmt.Sprintf("%s-%x", filepath.Base(path), sum)), nil
}

// copyProgram lets another process write. A child that this process starts meanwhile would inherit
// the open file, and a program that is open for writing cannot be started.
func copyProgram(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "--", from, to).CombinedOutput(); err != nil { //nolint:gosec // G204: paths of ours
		return fmt.Errorf("copy %s: %w\n%s", from, err, out)
	}
	return nil
}
