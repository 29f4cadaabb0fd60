// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const sums = "SHA256SUMS"

// SHA256SUMS has each file, and each artifact an SBOM that is its own.
func TestSumsAndSBOMs(t *testing.T) {
	t.Parallel()
	commandIn(t, dist, "sha256sum", "--check", "--strict", "--quiet", sums)
	var named []string
	for line := range strings.Lines(read(t, filepath.Join(dist, sums))) {
		named = append(named, strings.Fields(line)[1])
	}
	var want []string
	for _, a := range artifacts {
		want = append(want, a.file, a.file+".cdx.json")
	}
	slices.Sort(named)
	slices.Sort(want)
	present := slices.DeleteFunc(slices.Sorted(maps.Keys(files(t, dist))), func(name string) bool { return name == sums })
	if !slices.Equal(named, want) || !slices.Equal(present, want) {
		t.Errorf("sums of %q, files %q, not %q", named, present, want)
	}
	for _, a := range artifacts {
		var sbom struct {
			Metadata struct {
				Component struct {
					Name   string
					Hashes []struct{ Alg, Content string }
				}
			}
		}
		if err := json.Unmarshal([]byte(read(t, a.path()+".cdx.json")), &sbom); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256([]byte(read(t, a.path())))
		if c := sbom.Metadata.Component; c.Name != a.file || len(c.Hashes) != 1 || c.Hashes[0].Alg != "SHA-256" || c.Hashes[0].Content != hex.EncodeToString(sum[:]) {
			t.Errorf("%s has the SBOM of %+v", a.file, c)
		}
	}
}

// What is signed with a local key verifies with its public key, and nothing else does: no other
// content, no other key.
func TestSignature(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cosign := strings.TrimSpace(commandIn(t, module, "go", "tool", "-modfile=tools/cosign/go.mod", "-n", "cosign"))
	for _, name := range []string{"ours", "another"} {
		cmd := exec.CommandContext(t.Context(), cosign, "generate-key-pair", "--output-key-prefix="+name)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "COSIGN_PASSWORD=a password")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	release := func(args ...string) error {
		cmd := exec.CommandContext(t.Context(), module+"/scripts/release", args...)
		cmd.Env = append(os.Environ(), "COSIGN_KEY="+filepath.Join(dir, "ours.key"), "COSIGN_PASSWORD=a password")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	write := func(name, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	content := read(t, filepath.Join(dist, sums))
	file := write(sums, content)
	ours := filepath.Join(dir, "ours.pub")
	if err := release("sign", file, filepath.Join(dir, "another.pub")); err == nil {
		t.Error("it is signed with a key that is not the expected one")
	}
	if err := release("sign", file, ours); err != nil {
		t.Fatal(err)
	}
	if err := release("verify", file, ours); err != nil {
		t.Error(err)
	}
	if err := release("verify", file, filepath.Join(dir, "another.pub")); err == nil {
		t.Error("it verifies with another key")
	}
	bundle := read(t, file+".sigstore.json")
	other := write("other", strings.Replace(content, "0", "1", 1))
	write("other.sigstore.json", bundle)
	if err := release("verify", other, ours); err == nil {
		t.Error("other content verifies")
	}
}

// What a release is not made of.
func TestReleaseIsRefused(t *testing.T) {
	t.Parallel()
	tree := t.TempDir()
	for name, content := range map[string]string{
		"scripts/release": read(t, module+"/scripts/release"), "scripts/version": read(t, module+"/scripts/version"),
		"CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## v1.2.3 (2026-12-24)\n\n## v1.2.2 (2026-12-23)\n",
		"cosign.pub":   "a public key",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(tree, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tree, name), []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	commandIn(t, tree, "sh", "-ec", "git init -q; git add .; git -c user.name=test -c user.email=test@example.com commit -qm test; git tag v1.2.3; git config status.showUntrackedFiles no")
	check := func(version, key string) string {
		cmd := exec.CommandContext(t.Context(), filepath.Join(tree, "scripts/release"), "check", version, filepath.Join(tree, "dist"))
		cmd.Env = append(os.Environ(), "COSIGN_KEY="+key)
		out, err := cmd.CombinedOutput()
		if (err == nil) != (len(out) == 0) || err != nil && !strings.Contains(string(out), "\nhint: ") {
			t.Errorf("version %q, key %q: %v: %s", version, key, err, out)
		}
		return string(out)
	}
	if out := check("v1.2.3", "key"); out != "" {
		t.Error(out)
	}
	for _, version := range []string{"", "v0.0.0-devel", "1.2.3", "v1.2", "v1.2.3 v4", "v1.2.3\n", "v1.2.3-", "v1.2.3-rc..1", "v1.2.3';id;'"} {
		if out := check(version, "key"); !strings.Contains(out, "is no version to release") {
			t.Errorf("version %q: %s", version, out)
		}
	}
	for _, version := range []string{"v1.2.4", "v1.2.3-rc.1", "v1.2.30", "v1x2.3"} {
		if out := check(version, "key"); !strings.Contains(out, "CHANGELOG.md has no section on") && !strings.Contains(out, "is no version to release") {
			t.Errorf("version %q: %s", version, out)
		}
	}
	if out := check("v1.2.2", "key"); !strings.Contains(out, "the commit is not tagged v1.2.2") {
		t.Errorf("without a tag: %s", out)
	}
	if out := check("v1.2.3", ""); !strings.Contains(out, "COSIGN_KEY is not set") {
		t.Errorf("without a key: %s", out)
	}
	commandIn(t, tree, "sh", "-ec", "echo dist >.git/info/exclude; mkdir dist; touch dist/old")
	if out := check("v1.2.3", "key"); !strings.Contains(out, "dist is not empty") {
		t.Errorf("with artifacts of another release: %s", out)
	}
	if err := errors.Join(os.Remove(filepath.Join(tree, "dist/old")), os.WriteFile(filepath.Join(tree, "new"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if out := check("v1.2.3", "key"); !strings.Contains(out, "changes that are not committed") {
		t.Errorf("with changes: %s", out)
	}
	commandIn(t, tree, "sh", "-ec", "rm new; git rm -q --cached cosign.pub; git -c user.name=test -c user.email=test@example.com commit -qm test; git tag --force v1.2.3; rm cosign.pub")
	if out := check("v1.2.3", "key"); !strings.Contains(out, "cosign.pub is not in the repository") {
		t.Errorf("without the public key: %s", out)
	}
}
