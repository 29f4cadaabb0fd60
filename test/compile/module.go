// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
)

// ModuleDir returns the source folder of a module that the module in a folder requires. It
// downloads the source first if that is not in the module cache.
func ModuleDir(ctx context.Context, from, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module) //nolint:gosec // G204: running go is the purpose
	cmd.Dir = from
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("look for module %s: %w\n%s%s", module, err, out, stderr.String())
	}
	var downloaded struct{ Dir string }
	if err := json.Unmarshal(out, &downloaded); err != nil {
		return "", fmt.Errorf("look for module %s: %w", module, err)
	}
	return downloaded.Dir, nil
}
