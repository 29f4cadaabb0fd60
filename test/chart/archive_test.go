// SPDX-License-Identifier: Apache-2.0

//go:build helm

package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The archive is the chart, with the image of its version. Made a second time, it has the same
// bytes. Other artifacts keep their lines in SHA256SUMS.
func TestArchive(t *testing.T) {
	t.Parallel()
	const name = "node-attestation-controller-1.2.3-rc.1.tgz"
	var archives [2]string
	for n := range archives {
		dist := t.TempDir()
		const other = "0000  node-attestation-controller-1.2.3-rc.1.digest\n"
		for file, content := range map[string]string{
			"SHA256SUMS": other + "0000  " + name + "\n1111  gone.digest\n", "node-attestation-controller-1.2.3-rc.1.digest": "x",
		} {
			if err := os.WriteFile(filepath.Join(dist, file), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", module, "chart-package", "DIST="+dist, "VERSION=v1.2.3-rc.1")
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		archives[n] = read(t, filepath.Join(dist, name))
		sums := read(t, filepath.Join(dist, "SHA256SUMS"))
		if !strings.HasPrefix(sums, other) || strings.Count(sums, name) != 1 || strings.Contains(sums, "0000  "+name) || strings.Contains(sums, "gone") {
			t.Errorf("SHA256SUMS is\n%s", sums)
		}
		if n > 0 {
			continue
		}
		values := write(t, "values.yaml", strings.Replace(standalone, ", tag: devel", "", 1)+"enforcement: Enforce\n")
		packed := objects(t, shared.mustRun(t, "template", release, filepath.Join(dist, name), "--values="+values))
		unpacked := objects(t, shared.mustRun(t, "template", release, source, "--values="+values))
		if len(packed) != len(unpacked) || len(packed) == 0 {
			t.Errorf("%d objects of the archive, and %d of the folder", len(packed), len(unpacked))
		}
		if text := comparableText(t, packed["Deployment/"+namespace+"/node-attestation-controller"]); !strings.Contains(text, `"registry.invalid/node-attestation-controller:v1.2.3-rc.1"`) {
			t.Errorf("another image:\n%s", text)
		}
	}
	if archives[0] != archives[1] {
		t.Error("made twice, the archive has other bytes")
	}
}
