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

// GoBuild builds a package of the module in a folder as the product is shipped: static, stripped, without paths.
//
// The suites of one run build the same programs. go build does not link again what is up to date, so
// the program is built in the cache folder, and copied from there.
func GoBuild(ctx context.Context, module, output, pkg string) error {
	if !strings.HasPrefix(pkg, "./") { // of a temporary folder: nobody builds it again
		return goBuild(ctx, module, output, pkg)
	}
	kept, err := keptProgram(module, pkg)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	unlock, err := lockFile(ctx, kept+".lock", io.Discard)
	if err != nil {
		return fmt.Errorf("build %s: %w", pkg, err)
	}
	defer unlock()
	if err := goBuild(ctx, module, kept, pkg); err != nil {
		return err
	}
	return copyProgram(ctx, kept, output)
}

func goBuild(ctx context.Context, module, output, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", output, pkg) //nolint:gosec // G204: running go is the purpose
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

// keptProgram is where the cache folder has the program of a package. Each checkout has its own.
func keptProgram(module, pkg string) (string, error) {
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
	return filepath.Join(dir, fmt.Sprintf("%s-%x", filepath.Base(path), sha256.Sum256([]byte(path)))), nil
}

// copyProgram has another process write: what this one starts meanwhile would inherit the open file,
// and a program that is open for writing cannot be started.
func copyProgram(ctx context.Context, from, to string) error {
	if out, err := exec.CommandContext(ctx, "cp", "--", from, to).CombinedOutput(); err != nil { //nolint:gosec // G204: paths of ours
		return fmt.Errorf("copy %s: %w\n%s", from, err, out)
	}
	return nil
}
