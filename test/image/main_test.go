// SPDX-License-Identifier: Apache-2.0

// Package image tests the controller's image from "make image". It builds the image on an empty
// base from a registry of its own, pushes it there, pulls it, inspects it, and runs it.
package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/container"
)

const (
	module  = "../.."
	version = "v1.2.3-rc.1"
	program = "node-attestation-controller"
	file    = program + "-1.2.3-rc.1"
	sums    = "SHA256SUMS"
)

// built is what TestMain has made.
type built struct {
	// host is the registry's address.
	host string
	// base is the empty base: an index of two architectures, by digest.
	base name.Digest
	// dist has what "make image" leaves beside the image.
	dist string
	// root is for unpack.
	root string
	// commit and epoch are what the image was told.
	commit, epoch string
	// digest is the image's.
	digest string
}

var shared built

func TestMain(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	ctx := context.Background()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithReferrersSupport(true)))
	defer server.Close()
	shared.host = strings.TrimPrefix(server.URL, "http://")
	if shared.base, err = container.PushBase(ctx, shared.host+"/base:nonroot"); err != nil {
		return 0, err
	}
	if shared.dist, err = os.MkdirTemp("", "dist-"); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shared.dist)) }()
	if shared.root, err = os.MkdirTemp("", "root-"); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shared.root)) }()
	if shared.commit, err = git(ctx, "rev-parse", "--short=12", "HEAD"); err != nil {
		return 0, err
	}
	if shared.epoch, err = git(ctx, "log", "-1", "--format=%ct"); err != nil {
		return 0, err
	}
	if err := makeImage(ctx, module, shared.dist, "project"); err != nil {
		return 0, err
	}
	digest, err := os.ReadFile(filepath.Join(shared.dist, file+".digest"))
	if err != nil {
		return 0, err
	}
	shared.digest = strings.TrimSpace(string(digest))
	return m.Run(), nil
}

// makeImage runs "make image" in a folder with the module, for this machine's architecture. For
// another one, all that the controller imports would have to be compiled once more.
func makeImage(ctx context.Context, folder, dist, project string, variables ...string) error {
	args := append([]string{
		"--no-print-directory", "-C", folder, "image", "DIST=" + dist, "VERSION=" + version, "COMMIT=" + shared.commit, "ARCHES=" + runtime.GOARCH,
		"IMAGE_REPO=" + shared.host + "/" + project, "BASE_IMAGE=" + shared.base.Name(),
	}, variables...)
	cmd := exec.CommandContext(ctx, "make", args...)
	// A make above this one would pass its variables on.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make image: %w\n%s", err, out)
	}
	return nil
}

func git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = module
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %q: %w", args, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// pull gets the image that was pushed, by its tag.
func pull(t *testing.T, project string) v1.Image {
	t.Helper()
	ref, err := name.ParseReference(shared.host + "/" + project + "/" + program + ":" + version)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(ref, remote.WithContext(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
