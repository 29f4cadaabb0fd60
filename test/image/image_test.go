// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"debug/buildinfo"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

const entrypoint = "/ko-app/" + program

// who is what deployment.yaml has the image run as.
func who(t *testing.T) (uid, gid int64) {
	t.Helper()
	first, _, _ := strings.Cut(read(t, module+"/packaging/kubernetes/deployment.yaml"), "\n---\n")
	var deployment appsv1.Deployment
	if err := yaml.UnmarshalStrict([]byte(first), &deployment); err != nil {
		t.Fatal(err)
	}
	pod := deployment.Spec.Template.Spec.SecurityContext
	return *pod.RunAsUser, *pod.RunAsGroup
}

// The image is what was pushed. It runs the binary without an argument, as the user that the
// deployment names by number. Its labels and annotations say what it is made of.
func TestConfig(t *testing.T) {
	t.Parallel()
	img := pull(t, "project")
	if digest, err := img.Digest(); err != nil || digest.String() != shared.digest {
		t.Errorf("what was pushed is %s, not %s: %v", digest, shared.digest, err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	uid, gid := who(t)
	if want := fmt.Sprintf("%d:%d", uid, gid); uid == 0 || cf.Config.User != want {
		t.Errorf("user %q, not %q", cf.Config.User, want)
	}
	if c := cf.Config; !slices.Equal(c.Entrypoint, []string{entrypoint}) || len(c.Cmd) > 0 || c.Shell != nil || c.WorkingDir != "" || len(c.Volumes) > 0 {
		t.Errorf("config: %+v", c)
	}
	if cf.OS != "linux" || cf.Architecture != runtime.GOARCH {
		t.Errorf("for %s/%s", cf.OS, cf.Architecture)
	}
	if got := fmt.Sprint(cf.Created.Unix()); got != shared.epoch {
		t.Errorf("created at %s, not at the time of the commit, %s", got, shared.epoch)
	}
	manifest, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"source": "https://github.com/kubelet-authenticator/kubelet-authenticator", "version": version, "revision": shared.commit, "licenses": "Apache-2.0",
	} {
		key = "org.opencontainers.image." + key
		if label, annotation := cf.Config.Labels[key], manifest.Annotations[key]; label != want || annotation != want {
			t.Errorf("%s: label %q, annotation %q, not %q", key, label, annotation, want)
		}
	}
	if got := manifest.Annotations["org.opencontainers.image.base.name"]; got != shared.base.Name() {
		t.Errorf("it is on %s, not on %s", got, shared.base.Name())
	}
}

// Nothing is in the image but the binary: no shell, no key, no file of users.
func TestContents(t *testing.T) {
	t.Parallel()
	img := pull(t, "project")
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 2 { // the folder for ko's data, and the binary
		t.Errorf("%d layers", len(layers))
	}
	want := map[string]fs.FileMode{
		"var": fs.ModeDir | 0o555, "var/run": fs.ModeDir | 0o555, "var/run/ko": fs.ModeDir | 0o555,
		"ko-app": fs.ModeDir | 0o555, strings.TrimPrefix(entrypoint, "/"): 0o555,
	}
	if _, got := unpack(t); !maps.Equal(got, want) {
		t.Errorf("there is %v, not %v", got, want)
	}
}

// The binary is built as "make build" does it: static, stripped, without paths and what git says,
// with version and commit.
func TestBinary(t *testing.T) {
	t.Parallel()
	root, _ := unpack(t)
	path := filepath.Join(root, entrypoint)
	binary, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = binary.Close() }()
	if libraries, err := binary.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it needs %q, %v", libraries, err)
	}
	for _, section := range []string{".symtab", ".debug_info", ".zdebug_info", ".interp", ".note.gnu.build-id"} {
		if binary.Section(section) != nil {
			t.Errorf("it has a section %s", section)
		}
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if settings["-trimpath"] != "true" || settings["CGO_ENABLED"] != "0" || settings["vcs"] != "" {
		t.Errorf("built with %v", settings)
	}
	here, err := filepath.Abs(module)
	if err != nil {
		t.Fatal(err)
	}
	content := read(t, path)
	for _, text := range []string{here, "kubelet-authenticator/test/"} {
		if strings.Contains(content, text) {
			t.Errorf("it has %q in it", text)
		}
	}
	for _, text := range []string{version, shared.commit} {
		if !strings.Contains(content, text) {
			t.Errorf("it has no %q in it", text)
		}
	}
}

var unpacked struct {
	once  sync.Once
	found map[string]fs.FileMode
}

// unpack returns a folder with what the layers have, and a list of that. It is unpacked once, as
// that takes seconds under the race detector.
func unpack(t *testing.T) (root string, found map[string]fs.FileMode) {
	t.Helper()
	unpacked.once.Do(func() { unpacked.found = extract(t, pull(t, "project"), shared.root) })
	if unpacked.found == nil {
		t.Fatal("another test has failed to unpack it")
	}
	return shared.root, unpacked.found
}

// extract unpacks the layers into a folder, and returns what they have. What would take away or
// lead elsewhere fails the test.
func extract(t *testing.T, img v1.Image, root string) map[string]fs.FileMode {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]fs.FileMode{}
	for _, layer := range layers {
		unpacked, err := layer.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		entries := tar.NewReader(unpacked)
		for {
			header, err := entries.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			unpackEntry(t, root, header, entries, found)
		}
		if err := unpacked.Close(); err != nil {
			t.Error(err)
		}
	}
	return found
}

func unpackEntry(t *testing.T, root string, header *tar.Header, content io.Reader, found map[string]fs.FileMode) {
	t.Helper()
	path := strings.Trim(header.Name, "/")
	if !filepath.IsLocal(path) || strings.HasPrefix(filepath.Base(path), ".wh.") {
		t.Fatalf("entry %q", header.Name)
	}
	if header.Uid != 0 || header.Gid != 0 || len(header.PAXRecords) > 0 {
		t.Errorf("%s belongs to %d:%d and has %v", path, header.Uid, header.Gid, header.PAXRecords)
	}
	if created := fmt.Sprint(header.ModTime.Unix()); !header.ModTime.Equal(time.Unix(0, 0)) && created != shared.epoch {
		t.Errorf("%s is of %s", path, created)
	}
	found[path] = header.FileInfo().Mode()
	target := filepath.Join(root, path)
	switch header.Typeflag {
	case tar.TypeDir:
		if err := os.MkdirAll(target, 0o755); err != nil {
			t.Fatal(err)
		}
	case tar.TypeReg:
		file, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(file, content)
		if err := errors.Join(err, file.Close()); err != nil {
			t.Fatal(err)
		}
	default:
		t.Fatalf("%s is neither file nor folder", path)
	}
}
