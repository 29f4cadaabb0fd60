// SPDX-License-Identifier: Apache-2.0

// Package docs tests docs/integration/cluster-api.md, docs/examples/cluster-api and
// packaging/cluster-api with real API servers. One is a management cluster's with Cluster API's own
// CustomResourceDefinitions, one is a workload cluster's.
package docs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/metal"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module   = "../../.."
	document = module + "/docs/integration/cluster-api.md"
	examples = module + "/docs/examples/cluster-api"

	namespace      = "node-attestation-system"
	controllerUser = "system:serviceaccount:node-attestation-system:node-attestation-controller"
)

// server is an API server, and an administrator's kubectl.
type server struct {
	*testbed.ControlPlane
	admin string
}

// management is what all tests share.
var management *server

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		management = &server{cp, filepath.Join(dir, "management.kubeconfig")}
		return management.setUp(ctx)
	}))
}

func (s *server) setUp(ctx context.Context) error {
	source, err := compile.ModuleDir(ctx, module, "sigs.k8s.io/cluster-api")
	if err != nil {
		return err
	}
	crds, err := testbed.ReadCRDs(
		filepath.Join(source, "core/config/crd/bases/*.yaml"),
		filepath.Join(source, "bootstrap/kubeadm/config/crd/bases/*.yaml"),
		filepath.Join(source, "controlplane/kubeadm/config/crd/bases/*.yaml"),
	)
	if err != nil {
		return err
	}
	provider, err := metal.CRDs()
	if err != nil {
		return err
	}
	return errors.Join(s.InstallCRDs(ctx, append(crds, provider...)...), s.WriteKubeconfig(s.admin, s.AdminUser()))
}

// kubectl runs kubectl as an administrator.
func (s *server) kubectl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return s.RunKubectl(t.Context(), s.admin, args...)
}

func (s *server) mustKubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.kubectl(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// try creates a manifest's object strictly, as a dry run.
func (s *server) try(t *testing.T, manifest string) error {
	t.Helper()
	_, err := s.kubectl(t, "create", "--dry-run=server", "--validate=strict", "--filename="+write(t, manifest))
	return err
}

// startWorkload starts the other API server. It stops with the test.
func startWorkload(t *testing.T) *server {
	t.Helper()
	cp, err := testbed.Start(t.Context(), testbed.Options{Etcd: management.ControlPlane})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Error(err)
		}
	})
	s := &server{cp, filepath.Join(t.TempDir(), "workload.kubeconfig")}
	if err := cp.WriteKubeconfig(s.admin, cp.AdminUser()); err != nil {
		t.Fatal(err)
	}
	return s
}

func write(t *testing.T, content string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// blocks returns the fenced blocks of a language in a document.
func blocks(document, language string) (found []string) {
	for _, rest := range strings.Split(document, "```"+language+"\n")[1:] {
		block, _, _ := strings.Cut(rest, "```")
		found = append(found, block)
	}
	return found
}

// objects splits a stream of YAML documents.
func objects(stream string) (found []string) {
	for _, one := range strings.Split("\n"+stream, "\n---\n") {
		if strings.Contains("\n"+one, "\nkind: ") {
			found = append(found, strings.TrimPrefix(one, "\n"))
		}
	}
	return found
}

// kindOf returns what a manifest says that it is.
func kindOf(manifest string) (apiVersion, kind string) {
	for line := range strings.Lines(manifest) {
		if version, ok := strings.CutPrefix(line, "apiVersion: "); ok && apiVersion == "" {
			apiVersion = strings.TrimSpace(version)
		}
		if k, ok := strings.CutPrefix(line, "kind: "); ok && kind == "" {
			kind = strings.TrimSpace(k)
		}
	}
	return apiVersion, kind
}

// manifest is one of a document or an example, and where it is.
type manifest struct{ where, apiVersion, kind, text string }

func (m manifest) String() string { return fmt.Sprintf("%s: %s %s", m.where, m.apiVersion, m.kind) }

// manifests are all YAML documents of the guides and the examples that have a kind.
func manifests(t *testing.T) (all []manifest) {
	t.Helper()
	add := func(where, stream string) {
		for _, text := range objects(stream) {
			apiVersion, kind := kindOf(text)
			all = append(all, manifest{filepath.Base(where), apiVersion, kind, text})
		}
	}
	guides, err := filepath.Glob(filepath.Dir(document) + "/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, guide := range guides {
		for _, block := range blocks(read(t, guide), "yaml") {
			add(guide, block)
		}
	}
	for _, pattern := range []string{"/*.yaml", "/*/*.yaml"} {
		files, err := filepath.Glob(examples + pattern)
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, file := range files {
			add(file, read(t, file))
		}
	}
	return all
}
