// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
)

// MakePackages runs "make packages" in the module's folder, with variables such as "FORMATS=deb";
// the artifacts are in the folder dist then.
func MakePackages(ctx context.Context, module, dist string, variables ...string) error {
	args := append([]string{"--no-print-directory", "-C", module, "packages", "DIST=" + dist}, variables...)
	cmd := exec.CommandContext(ctx, "make", args...) //nolint:gosec // G204: running make is the purpose
	// A make above this one would pass its variables on.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make packages: %w\n%s", err, out)
	}
	return nil
}
