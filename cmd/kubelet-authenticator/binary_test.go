// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// forbidden are the packages that would slow down or fatten the plugin, or do not belong on a node (DESIGN.md, "Layout").
var forbidden = []string{
	"k8s.io/client-go/kubernetes",
	"k8s.io/client-go/informers",
	"k8s.io/client-go/discovery",
	"sigs.k8s.io/controller-runtime",
	"sigs.k8s.io/cluster-api",
	"github.com/prometheus/",
	"google.golang.org/grpc",
	"github.com/google/go-tpm-tools",
	"github.com/google/go-attestation",
	"github.com/google/go-tpm/tpm2/transport/simulator",
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/swtpm",
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier",
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller",
}

func TestPluginStaysLean(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if len(deps) < 100 {
		t.Fatalf("only %d dependencies: the list is wrong", len(deps))
	}
	for _, dep := range deps {
		for _, bad := range forbidden {
			if dep == strings.TrimSuffix(bad, "/") || strings.HasPrefix(dep, strings.TrimSuffix(bad, "/")+"/") {
				t.Errorf("the plugin depends on %s", dep)
			}
		}
	}
}

// arrows are the imports that a package may have of this module's others. What is not listed may have none.
var arrows = map[string][]string{
	"cmd/kubelet-authenticator":       {"pkg/authenticator/command", "pkg/provider", "pkg/provider/insecure", "pkg/provider/tpm"},
	"pkg/authenticator/command":       {"internal/buildinfo", "internal/process", "internal/text", "pkg/attestation", "pkg/authenticator", "pkg/provider"},
	"pkg/authenticator":               {"internal/process", "internal/strict", "internal/text", "pkg/attestation", "pkg/cache", "pkg/csr", "pkg/provider"},
	"internal/swtpm":                  {"pkg/tpm/template"}, // for tests
	"pkg/cache":                       {"internal/process"},
	"pkg/controller/inventory":        {"internal/text", "pkg/csr"},
	"cmd/node-attestation-controller": {"pkg/controller/command"},
	"pkg/controller":                  {"pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/inventory", "pkg/controller/signing", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/controller/command":          {"internal/buildinfo", "internal/text", "pkg/attestation", "pkg/controller", "pkg/controller/api/v1alpha1", "pkg/controller/config", "pkg/controller/inventory", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/controller/config":           {"internal/strict", "pkg/attestation", "pkg/controller", "pkg/controller/inventory", "pkg/controller/signing", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/csr":                         {"internal/text", "pkg/attestation"},
	"pkg/provider":                    {"pkg/attestation"},
	"pkg/provider/insecure":           {"pkg/provider"},
	"pkg/provider/tpm":                {"internal/text", "pkg/attestation", "pkg/provider", "pkg/tpm", "pkg/tpm/template"},
	"pkg/tpm":                         {"pkg/tpm/template"},
	"pkg/verifier":                    {"pkg/attestation"},
	"pkg/verifier/tpm":                {"pkg/attestation", "pkg/tpm/template", "pkg/verifier"},
}

func TestArrowsRunOneWay(t *testing.T) {
	const module = "github.com/kubelet-authenticator/kubelet-authenticator/"
	out, err := exec.Command("go", "list", "-f", "{{.ImportPath}} {{join .Imports \" \"}}", "../../cmd/...", "../../pkg/...", "../../internal/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		from := strings.TrimPrefix(fields[0], module)
		allowed := map[string]bool{}
		for _, to := range arrows[from] {
			allowed[to] = true
		}
		for _, to := range fields[1:] {
			if rest, ours := strings.CutPrefix(to, module); ours && !allowed[rest] {
				t.Errorf("%s must not import %s", from, rest)
			}
			if from == "pkg/cache" && strings.Contains(to, "k8s.io/") {
				t.Errorf("pkg/cache must not know Kubernetes, and imports %s", to)
			}
			if from == "pkg/attestation" && (to == "os" || to == "net" || to == "time" || strings.Contains(to, ".")) {
				t.Errorf("pkg/attestation is bytes only, and imports %s", to)
			}
		}
	}
}

// maxSize is what the stripped binary may have, in bytes.
const maxSize = 16_000_000

func TestBinaryIsStaticAndSmall(t *testing.T) {
	path := build(t, ".")
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", info.Size())
	if info.Size() > maxSize {
		t.Errorf("%d bytes, more than %d", info.Size(), maxSize)
	}
	binary, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = binary.Close() }()
	if libraries, err := binary.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it needs shared libraries: %v, %v", libraries, err)
	}
}

// An infrastructure provider's own plugin, as docs/ shows it, is built and answers.
func TestExampleProvider(t *testing.T) {
	out, err := exec.Command(build(t, "../../docs/examples/kubelet-authenticator-acme"), "version", "--output", "json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var version struct {
		ProtocolVersions map[string][]string `json:"protocolVersions"`
	}
	if err := json.Unmarshal(out, &version); err != nil || len(version.ProtocolVersions["acme"]) != 1 {
		t.Errorf("version: %s, %v", out, err)
	}
}

func build(t *testing.T, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plugin")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	return path
}
