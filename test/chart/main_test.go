// SPDX-License-Identifier: Apache-2.0

//go:build helm

// Package chart tests the Helm chart of node-attestation-controller with the real helm. The chart
// renders the same objects as kustomize. It is installed, upgraded, rolled back and uninstalled on
// a real API server.
package chart

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module    = "../.."
	source    = module + "/packaging/helm/node-attestation-controller"
	namespace = controllerprocess.Namespace
	release   = "node-attestation"
)

// bed is what all tests share.
type bed struct {
	*testbed.ControlPlane
	// helm is the program, and home its folder for everything that it stores.
	helm, home string
	// admin is an administrator's kubeconfig, as a file.
	admin string
}

var shared *bed

func TestMain(m *testing.M) {
	os.Exit(testbed.Main(m, func(ctx context.Context, cp *testbed.ControlPlane, dir string) error {
		shared = &bed{ControlPlane: cp, home: dir, admin: filepath.Join(dir, "admin.kubeconfig")}
		// -n builds it, and prints where it is.
		tool := exec.CommandContext(ctx, "go", "tool", "-modfile="+module+"/tools/helm/go.mod", "-n", "helm")
		tool.Stderr = os.Stderr
		path, err := tool.Output()
		if err != nil {
			return fmt.Errorf("build helm: %w", err)
		}
		shared.helm = strings.TrimSpace(string(path))
		return cp.WriteKubeconfig(shared.admin, cp.AdminUser())
	}))
}

// run runs helm, and returns what it printed. The error has what it said.
func (b *bed) run(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, b.helm, append(args, "--namespace="+namespace)...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = append(os.Environ(), "KUBECONFIG="+b.admin, "HELM_CACHE_HOME="+b.home, "HELM_CONFIG_HOME="+b.home, "HELM_DATA_HOME="+b.home)
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("helm %q: %w\n%s%s", args, err, &stdout, &stderr)
	}
	return stdout.String(), nil
}

func (b *bed) mustRun(t *testing.T, args ...string) string {
	t.Helper()
	out, err := b.run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (b *bed) mustKubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := b.RunKubectl(t.Context(), b.admin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// refused wants an error that says so.
func refused(t *testing.T, err error, says string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("not refused with %q: %v", says, err)
	}
}

// objects reads a stream of YAML documents, by kind, namespace and name.
func objects(t *testing.T, stream string) map[string]*unstructured.Unstructured {
	t.Helper()
	all := map[string]*unstructured.Unstructured{}
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(stream), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if object.Object == nil {
			continue
		}
		key := strings.Join([]string{object.GetKind(), object.GetNamespace(), object.GetName()}, "/")
		if all[key] != nil {
			t.Errorf("%s is there twice", key)
		}
		all[key] = object
	}
}

// write writes a file of the test's own, and returns its path.
func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
