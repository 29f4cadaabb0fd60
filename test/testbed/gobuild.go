// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// GoBuild builds a package of the module in a folder as the product is shipped: static, stripped,
// without paths. flags are added to those of go build.
//
// The suites of one run build the same programs. go build does not link a program again that is up
// to date. So the program is built in the cache folder, and copied from there.
func GoBuild(ctx context.Context, module, output, pkg string, flags ...string) error {
	// the module is in a temporary folder, so the program is never built again
	if !strings.HasPrefix(pkg, "./") {
		return goBuild(ctx, module, output, pkg, flags)
	}
	kept, err := keptProgram(module, pkg, flags)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	unlock, err := lockFile(ctx, kept+".lock", io.Discard)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	defer unlock()
	if err := goBuild(ctx, module, kept, pkg, flags); err != nil {
		return err
	}
	return copyProgram(ctx, kept, output)
}

// GoBuildFor builds a package as GoBuild does, for another architecture, such as arm64.
func GoBuildFor(ctx context.Context, architecture, module, output, pkg string) error {
	return goBuild(ctx, module, output, pkg, nil, "GOARCH="+architecture)
}

func goBuild(ctx context.Context, module, output, pkg string, flags []string, env ...string) error {
	args := append(append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", output}, flags...), pkg)
	cmd := exec.CommandContext(ctx, "go", args...) //nolint:gosec // G204: running go is the purpose
	cmd.Dir = module
	cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
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
