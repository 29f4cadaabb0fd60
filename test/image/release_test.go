// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"sigs.k8s.io/yaml"
)

const sbomFile = file + "-linux-" + runtime.GOARCH + ".cdx.json"

// Beside the image there are an archive of it, its digest and its SBOM, and SHA256SUMS has each.
func TestFiles(t *testing.T) {
	t.Parallel()
	want := []string{sums, sbomFile, file + ".digest", file + ".oci.tar"}
	slices.Sort(want)
	entries, err := os.ReadDir(shared.dist)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, entry := range entries {
		got = append(got, entry.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("there is %q, not %q", got, want)
	}
	commandIn(t, shared.dist, "sha256sum", "--check", "--strict", "--quiet", sums)
	if lines := strings.Count(read(t, filepath.Join(shared.dist, sums)), "\n"); lines != len(want)-1 {
		t.Errorf("%d sums", lines)
	}

	dir := t.TempDir()
	commandIn(t, dir, "tar", "--extract", "--file="+filepath.Join(shared.dist, file+".oci.tar"))
	var index struct{ Manifests []struct{ Digest string } }
	if err := json.Unmarshal([]byte(read(t, filepath.Join(dir, "index.json"))), &index); err != nil {
		t.Fatal(err)
	}
	if len(index.Manifests) != 1 || index.Manifests[0].Digest != shared.digest {
		t.Errorf("the archive has %v, not %s", index.Manifests, shared.digest)
	}
	blobs := filepath.Join(dir, "blobs/sha256")
	if err := filepath.WalkDir(blobs, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && !strings.HasPrefix(commandIn(t, blobs, "sha256sum", path), entry.Name()) {
			t.Errorf("blob %s is not what its name says", entry.Name())
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}

	var sbom struct {
		Metadata   struct{ Component struct{ Name string } }
		Components []struct {
			Name, Version string
			Components    []struct{ Name, Version string }
		}
	}
	if err := json.Unmarshal([]byte(read(t, filepath.Join(shared.dist, sbomFile))), &sbom); err != nil {
		t.Fatal(err)
	}
	if len(sbom.Components) != 1 || sbom.Components[0].Name != program {
		t.Fatalf("the SBOM is of %+v", sbom.Components)
	}
	versions := map[string]string{}
	for _, c := range sbom.Components[0].Components {
		versions[c.Name] = c.Version
	}
	if sbom.Metadata.Component.Name != file+".oci.tar" || versions["k8s.io/client-go"] == "" || versions["stdlib"] == "" {
		t.Errorf("the SBOM of %s has %v", sbom.Metadata.Component.Name, versions)
	}
}

// Other artifacts keep their lines in SHA256SUMS. Made again, in another folder, of files of other
// ages, with another umask and other settings, all is the same.
func TestReproducible(t *testing.T) {
	t.Parallel()
	elsewhere, again := filepath.Join(t.TempDir(), "a folder of another name"), t.TempDir()
	others := "0000  kubelet-authenticator-1.2.3\n"
	for path, content := range map[string]string{sums: others + "1111  " + program + "-1.0.0.digest\n", program + "-1.0.0.digest": "old", "kubelet-authenticator-1.2.3": "another"} {
		if err := os.WriteFile(filepath.Join(again, path), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// The repository comes along, without locks, which come and go: the time of its last commit is
	// that of the image.
	commandIn(t, module, "sh", "-ec", `
		mkdir "$1"
		git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents --target-directory="$1"
		mkdir "$1/.git"
		tar --create --exclude='*.lock' --directory="$(git rev-parse --path-format=absolute --git-common-dir)" . | tar --extract --no-same-owner --directory="$1/.git"
		cd "$1"
		find . -exec touch --no-dereference --date 2001-02-03 {} +
		chmod -R go-rwx .
		umask 077
		export TZ=Asia/Kathmandu LC_ALL=C.UTF-8 TAR_OPTIONS=--mode=0777 GOAMD64=v3 GOARM64=v9.0 GOARCH=s390x KO_DEFAULTLDFLAGS=-w KO_DEFAULTPLATFORMS=all
		export KO_DATA_DATE_EPOCH=1 KO_DEFAULTBASEIMAGE=another.example/base BASE_IMAGE="$2" MAKEFLAGS= MAKELEVEL=
		shift 2
		exec make --no-print-directory image "$@"
	`, "sh", elsewhere, shared.base.Name(), "DIST="+again, "VERSION="+version, "COMMIT="+shared.commit, "ARCHES="+runtime.GOARCH, "IMAGE_REPO="+shared.host+"/elsewhere")
	if digest, err := pull(t, "elsewhere").Digest(); err != nil || digest.String() != shared.digest {
		t.Errorf("the image is %s, not %s: %v", digest, shared.digest, err)
	}
	if got, want := read(t, filepath.Join(again, sums)), others+read(t, filepath.Join(shared.dist, sums)); got != want {
		t.Errorf("sums:\n%snot\n%s", got, want)
	}
	commandIn(t, again, "sh", "-ec", "! ls "+program+"-1.0.0*; tail -n +2 "+sums+" | sha256sum --check --strict --quiet")
}

// byDigest is the name of an image whose content is known.
var byDigest = regexp.MustCompile(`^[a-z0-9./:-]+@sha256:[0-9a-f]{64}$`)

// The configuration has one base, by digest, and a release has both architectures.
func TestBaseIsByDigest(t *testing.T) {
	t.Parallel()
	var config map[string]any
	if err := yaml.UnmarshalStrict([]byte(read(t, module+"/.ko.yaml")), &config); err != nil {
		t.Fatal(err)
	}
	base, _ := config["defaultBaseImage"].(string)
	if _, err := name.NewDigest(base); err != nil || !byDigest.MatchString(base) {
		t.Errorf("base %q: %v", base, err)
	}
	for key := range config {
		if key != "defaultBaseImage" && key != "builds" { // baseImageOverrides would have others
			t.Errorf("%s in .ko.yaml", key)
		}
	}
	plan := commandIn(t, module, "make", "--dry-run", "--always-make", "release", "VERSION="+version)
	if !regexp.MustCompile(`(?m)image ARCHES='amd64 arm64' `).MatchString(plan) {
		t.Errorf("a release is made so:\n%s", plan)
	}
}

// A base without a digest, a version that is none: nothing is made, and a hint says what to do.
func TestImageIsRefused(t *testing.T) {
	t.Parallel()
	tag := shared.host + "/base:nonroot"
	for _, c := range []struct{ base, version, want string }{
		{tag, version, "the base image " + tag + " has no digest\nhint: make image BASE_IMAGE=NAME@sha256:..."},
		{shared.host + "/base@sha256:0123", version, "has no digest\nhint: make image BASE_IMAGE="},
		{shared.base.Name(), "1.2", "is no version\nhint: "},
	} {
		dist := t.TempDir()
		cmd := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", module, "image", "DIST="+dist, "VERSION="+c.version, "BASE_IMAGE="+c.base)
		cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), c.want) {
			t.Errorf("%+v: %v: %s", c, err, out)
		}
		if entries, err := os.ReadDir(dist); err != nil || len(entries) > 0 {
			t.Errorf("%+v: made %v, %v", c, entries, err)
		}
	}
}

// "make help" and the page for operators say how to choose the base.
func TestBaseIsDocumented(t *testing.T) {
	t.Parallel()
	if help := commandIn(t, module, "make", "--no-print-directory", "help"); !regexp.MustCompile(`(?m)^  make image .*BASE_IMAGE`).MatchString(help) {
		t.Errorf("make help has no BASE_IMAGE:\n%s", help)
	}
	if !strings.Contains(read(t, module+"/docs/packages.md"), "\n    make image VERSION=v1.2.3 BASE_IMAGE=registry.example/mirror/static-debian13@sha256:") {
		t.Error("docs/packages.md has no BASE_IMAGE")
	}
}

// The pushed image is signed by its digest with the release's key. It verifies with the public key
// of that key and with no other. The documented command does that.
func TestSignature(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cosign := strings.TrimSpace(commandIn(t, module, "go", "tool", "-modfile=tools/cosign/go.mod", "-n", "cosign"))
	run := func(name string, args ...string) error {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "COSIGN_KEY="+filepath.Join(dir, "ours.key"), "COSIGN_PASSWORD=a password")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	for _, key := range []string{"ours", "another"} {
		if err := run(cosign, "generate-key-pair", "--output-key-prefix="+key); err != nil {
			t.Fatal(err)
		}
	}
	release, err := filepath.Abs(module + "/scripts/release")
	if err != nil {
		t.Fatal(err)
	}
	// In a repository of its own, since signing adds to it.
	to, err := name.ParseReference(shared.host + "/signed/" + program + ":" + version)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(to, pull(t, "project"), remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
	reference := shared.host + "/signed/" + program + "@" + shared.digest
	ours, another := filepath.Join(dir, "ours.pub"), filepath.Join(dir, "another.pub")
	if err := run(release, "verify-image", reference, ours); err == nil {
		t.Error("it verifies without a signature")
	}
	if err := run(release, "sign-image", to.Name(), ours); err == nil {
		t.Error("a tag is signed")
	}
	if err := run(release, "sign-image", reference, ours); err != nil {
		t.Fatal(err)
	}
	if err := run(release, "verify-image", reference, another); err == nil {
		t.Error("it verifies with another key")
	}
	const documented = "cosign verify --key cosign.pub --insecure-ignore-tlog registry.example/project/node-attestation-controller@sha256:..."
	if !strings.Contains(read(t, module+"/docs/packages.md"), "    "+documented+"\n") {
		t.Errorf("docs/packages.md has another command than %q", documented)
	}
	args := strings.Fields(strings.NewReplacer("cosign.pub", ours, "registry.example/project/node-attestation-controller@sha256:...", reference).Replace(documented))
	if err := run(cosign, args[1:]...); err != nil {
		t.Error(err)
	}
}

// commandIn runs a command in a folder, and returns its standard output.
func commandIn(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, &stdout, &stderr)
	}
	return stdout.String()
}
