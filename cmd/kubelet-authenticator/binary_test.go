// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// forbidden are the packages that would slow down or fatten the plugin, or do not belong on a node
// (DESIGN.md, "Layout").
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
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing",
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier",
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller",
}

// example is an infrastructure provider's own plugin, as docs/ shows it.
const example = "../../docs/examples/kubelet-authenticator-acme"

func TestPluginStaysLean(t *testing.T) {
	for _, pkg := range []string{".", example} {
		out, err := exec.Command("go", "list", "-deps", pkg).Output()
		if err != nil {
			t.Fatal(err)
		}
		deps := strings.Fields(string(out))
		if len(deps) < 100 {
			t.Fatalf("%s: only %d dependencies: the list is wrong", pkg, len(deps))
		}
		for _, dep := range deps {
			for _, bad := range forbidden {
				if dep == strings.TrimSuffix(bad, "/") || strings.HasPrefix(dep, strings.TrimSuffix(bad, "/")+"/") {
					t.Errorf("%s: the plugin depends on %s", pkg, dep)
				}
			}
		}
	}
}

// arrows are the imports that a package may have of this module's others. What is not listed may
// have none.
var arrows = map[string][]string{
	"cmd/kubelet-authenticator":                  {"pkg/authenticator/command", "pkg/provider", "pkg/provider/auto", "pkg/provider/azure", "pkg/provider/ec2", "pkg/provider/ec2role", "pkg/provider/gce", "pkg/provider/insecure", "pkg/provider/tpm"},
	"pkg/authenticator/command":                  {"internal/cli", "internal/machineentry", "internal/oserror", "internal/outputformat", "internal/process", "internal/terminal", "internal/text", "pkg/attestation", "pkg/authenticator", "pkg/authenticator/enrol", "pkg/authenticator/nodestatus", "pkg/authenticator/reason", "pkg/cache", "pkg/doctor", "pkg/kubelet", "pkg/provider"},
	"pkg/authenticator":                          {"internal/nodeaccess", "internal/oserror", "internal/process", "internal/strict", "internal/trustedfile", "pkg/attestation", "pkg/authenticator/enrol", "pkg/authenticator/nodestate", "pkg/authenticator/nodestatus", "pkg/authenticator/reason", "pkg/cache", "pkg/csr", "pkg/kubelet", "pkg/provider"},
	"pkg/authenticator/nodestate":                {"internal/nodeaccess", "internal/process", "internal/trustedfile", "pkg/attestation", "pkg/authenticator/reason", "pkg/cache"},
	"pkg/authenticator/nodestatus":               {"internal/process", "internal/text", "pkg/attestation", "pkg/authenticator/nodestate", "pkg/authenticator/reason", "pkg/cache", "pkg/provider"},
	"pkg/authenticator/enrol":                    {"internal/nodeaccess", "internal/process", "internal/text", "pkg/attestation", "pkg/authenticator/nodestate", "pkg/authenticator/reason", "pkg/cache", "pkg/csr", "pkg/kubelet", "pkg/provider"},
	"pkg/authenticator/reason":                   {"internal/nodeaccess", "internal/oserror", "internal/text", "pkg/cache", "pkg/csr", "pkg/kubelet", "pkg/provider"},
	"internal/cli":                               {"internal/outputformat", "internal/text"},
	"internal/outputformat":                      {"internal/text"},
	"cmd/kubectl-attest":                         {"internal/attestctl", "internal/cli"},
	"internal/attestctl":                         {"docs", "internal/bounded", "internal/checkup", "internal/cli", "internal/machineentry", "internal/outputformat", "internal/terminal", "internal/text", "internal/workload", "pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/bindings", "pkg/controller/config", "pkg/controller/inventory", "pkg/controller/policyset", "pkg/controller/preflight", "pkg/controller/revocation", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/controller/tpmprovider", "pkg/csr", "pkg/csr/state", "pkg/verifier", "pkg/verifier/cloud", "pkg/verifier/tpm"},
	"internal/lastgood":                          {"internal/bounded"},
	"internal/trustedfile":                       {"internal/bounded"},
	"internal/checkup":                           {"internal/terminal", "internal/text"},
	"internal/nodeaccess":                        {"internal/text", "internal/trustedfile", "pkg/attestation", "pkg/cache", "pkg/csr", "pkg/kubelet"},
	"internal/strict":                            {"internal/text"},
	"internal/testing/plugintest":                {"internal/process", "pkg/attestation", "pkg/authenticator/reason", "pkg/cache", "pkg/csr", "pkg/provider"}, // for tests
	"internal/testing/hostiletext":               {"internal/text"},
	"internal/testing/machinelist":               {"internal/machineentry"},
	"internal/testing/statetest":                 {"pkg/csr/state"},
	"internal/testing/nitrotpm":                  {"pkg/attestation/nitrotpm"},
	"internal/testing/swtpm":                     {"pkg/tpm/template"},
	"pkg/attestation/cloudname":                  {"internal/form"},
	"pkg/attestation/stscall":                    {"internal/form"},
	"pkg/cache":                                  {"internal/process", "internal/trustedfile"},
	"pkg/doctor":                                 {"internal/checkup", "internal/nodeaccess", "internal/text", "internal/trustedfile", "pkg/attestation", "pkg/authenticator", "pkg/authenticator/enrol", "pkg/authenticator/nodestate", "pkg/authenticator/nodestatus", "pkg/authenticator/reason", "pkg/cache", "pkg/csr", "pkg/kubelet", "pkg/provider", "pkg/provider/metadata"},
	"pkg/kubelet":                                {"internal/trustedfile", "pkg/cache"},
	"pkg/controller/inventory":                   {"internal/machineentry", "internal/strict", "internal/text", "pkg/attestation", "pkg/attestation/cloudname", "pkg/csr"},
	"cmd/node-attestation-controller":            {"pkg/clusterapi", "pkg/clusterapi/metal3", "pkg/controller/command"},
	"pkg/clusterapi":                             {"internal/cli", "internal/text", "internal/workload", "pkg/attestation", "pkg/controller", "pkg/controller/api/v1alpha1", "pkg/controller/config", "pkg/controller/intake", "pkg/controller/preflight", "pkg/controller/records", "pkg/controller/signing", "pkg/controller/sources", "pkg/controller/telemetry", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/clusterapi/contract":                    {"pkg/csr"},
	"pkg/clusterapi/metal3":                      {"pkg/attestation", "pkg/clusterapi", "pkg/clusterapi/platformkit", "pkg/verifier/tpm"},
	"pkg/clusterapi/platformkit":                 {"internal/bounded", "internal/text", "pkg/clusterapi", "pkg/verifier/tpm"},
	"pkg/clusterapi/platformkit/platformkittest": {"pkg/clusterapi", "pkg/clusterapi/platformkit", "pkg/verifier/tpm"},
	"pkg/controller":                             {"pkg/attestation", "pkg/controller/act", "pkg/controller/api/v1alpha1", "pkg/controller/collect", "pkg/controller/decisionlog", "pkg/controller/evidence", "pkg/controller/fairqueue", "pkg/controller/intake", "pkg/controller/records", "pkg/controller/report", "pkg/controller/revocation", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/controller/watch", "pkg/csr/state", "pkg/verifier"},
	"pkg/controller/act":                         {"internal/text", "pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/collect", "pkg/controller/fairqueue", "pkg/controller/intake", "pkg/controller/internal/statuspatch", "pkg/controller/records", "pkg/controller/revocation", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/csr/state", "pkg/verifier"},
	"pkg/controller/collect":                     {"internal/text", "pkg/controller/api/v1alpha1", "pkg/controller/evidence", "pkg/controller/fairqueue", "pkg/controller/intake", "pkg/controller/records", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/csr/state", "pkg/verifier"},
	"pkg/controller/intake":                      {"pkg/attestation", "pkg/controller/evidence", "pkg/controller/fairqueue", "pkg/controller/signing", "pkg/csr/state", "pkg/verifier"},
	"pkg/controller/evidence":                    {"pkg/attestation", "pkg/verifier"},
	"pkg/controller/report":                      {"internal/text", "pkg/attestation", "pkg/controller/act", "pkg/controller/api/v1alpha1", "pkg/controller/collect", "pkg/controller/decisionlog", "pkg/controller/fairqueue", "pkg/controller/revocation", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/verifier"},
	"pkg/controller/watch":                       {"internal/text", "pkg/controller/act", "pkg/controller/api/v1alpha1", "pkg/controller/collect", "pkg/controller/evidence", "pkg/controller/fairqueue", "pkg/controller/intake", "pkg/controller/records", "pkg/controller/report", "pkg/controller/signing", "pkg/controller/sources", "pkg/controller/telemetry", "pkg/csr/state", "pkg/verifier"},
	"pkg/controller/authorizer":                  {"internal/atomicfile", "internal/bounded", "internal/lastgood", "internal/text", "pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/internal/listwatch", "pkg/controller/revocation", "pkg/controller/telemetry"},
	"pkg/controller/bindings":                    {"internal/text", "pkg/controller/telemetry"},
	"pkg/controller/decisionlog":                 {"internal/text", "pkg/controller/telemetry"},
	"pkg/controller/internal/statuspatch":        {"pkg/controller/telemetry"},
	"pkg/controller/policyset":                   {"packaging"},
	"pkg/controller/preflight":                   {"internal/bounded", "internal/text", "pkg/controller/policyset", "pkg/controller/api/v1alpha1", "pkg/controller/internal/listwatch", "pkg/controller/internal/statuspatch", "pkg/controller/sources", "pkg/controller/telemetry", "pkg/csr/state"},
	"pkg/controller/azurevm":                     {"internal/bounded", "pkg/attestation/cloudname", "pkg/verifier/azure"},
	"pkg/controller/googlekeys":                  {"internal/bounded"},
	"pkg/controller/sts":                         {"internal/bounded", "pkg/verifier/ec2role"},
	"pkg/controller/cloudprovider":               {"internal/lastgood", "pkg/controller/azurevm", "pkg/controller/evidence", "pkg/controller/googlekeys", "pkg/controller/lookup", "pkg/controller/telemetry", "pkg/verifier", "pkg/verifier/azure", "pkg/verifier/cloud", "pkg/verifier/ec2role", "pkg/verifier/gce"},
	"pkg/controller/lookup":                      {"pkg/controller/telemetry"},
	"pkg/controller/records":                     {"pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/verifier"},
	"pkg/controller/revocation":                  {"internal/text", "pkg/attestation", "pkg/controller/api/v1alpha1", "pkg/controller/internal/listwatch", "pkg/controller/records", "pkg/controller/telemetry"},
	"pkg/controller/signing":                     {"internal/bounded", "internal/lastgood"},
	"pkg/controller/sources":                     {"internal/lastgood", "internal/text", "pkg/attestation", "pkg/controller/inventory", "pkg/controller/signing", "pkg/controller/telemetry", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/controller/telemetry":                   {"internal/text", "pkg/verifier"},
	"pkg/controller/tpmprovider":                 {"pkg/attestation", "pkg/controller/evidence", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/controller/command":                     {"internal/atomicfile", "internal/bounded", "internal/cli", "internal/outputformat", "internal/text", "pkg/attestation", "pkg/controller", "pkg/controller/api/v1alpha1", "pkg/controller/authorizer", "pkg/controller/cloudprovider", "pkg/controller/collect", "pkg/controller/config", "pkg/controller/decisionlog", "pkg/controller/evidence", "pkg/controller/intake", "pkg/controller/inventory", "pkg/controller/policyset", "pkg/controller/preflight", "pkg/controller/report", "pkg/controller/sources", "pkg/controller/telemetry", "pkg/controller/tpmprovider", "pkg/verifier", "pkg/verifier/tpm"},
	"pkg/controller/config":                      {"internal/bounded", "internal/lastgood", "internal/strict", "internal/text", "pkg/attestation", "pkg/controller", "pkg/controller/azurevm", "pkg/controller/bindings", "pkg/controller/cloudprovider", "pkg/controller/decisionlog", "pkg/controller/evidence", "pkg/controller/fairqueue", "pkg/controller/googlekeys", "pkg/controller/policyset", "pkg/controller/preflight", "pkg/controller/revocation", "pkg/controller/signing", "pkg/controller/sources", "pkg/controller/sts", "pkg/controller/telemetry", "pkg/controller/tpmprovider", "pkg/verifier", "pkg/verifier/azure", "pkg/verifier/cloud", "pkg/verifier/ec2", "pkg/verifier/ec2role", "pkg/verifier/gce", "pkg/verifier/tpm"},
	"pkg/csr":                                    {"internal/text", "pkg/attestation", "pkg/csr/state"},
	"pkg/provider":                               {"pkg/attestation"},
	"pkg/provider/auto":                          {"internal/text", "pkg/provider", "pkg/provider/tpm"},
	"pkg/provider/azure":                         {"internal/form", "pkg/attestation", "pkg/provider", "pkg/provider/metadata"},
	"pkg/provider/ec2":                           {"pkg/attestation", "pkg/attestation/nitrotpm", "pkg/provider", "pkg/provider/metadata", "pkg/provider/tpm", "pkg/tpm"},
	"pkg/provider/ec2role":                       {"pkg/attestation", "pkg/attestation/stscall", "pkg/provider", "pkg/provider/metadata"},
	"pkg/provider/gce":                           {"pkg/attestation", "pkg/provider", "pkg/provider/metadata"},
	"pkg/provider/insecure":                      {"pkg/provider"},
	"pkg/provider/metadata":                      {"pkg/attestation/cloudname", "pkg/provider"},
	"pkg/provider/tpm":                           {"internal/oserror", "internal/text", "pkg/attestation", "pkg/provider", "pkg/tpm", "pkg/tpm/template"},
	"pkg/tpm":                                    {"internal/bounded", "internal/trustedfile", "pkg/tpm/template"},
	"pkg/verifier":                               {"pkg/attestation", "pkg/csr/state"},
	"pkg/verifier/cloud":                         {"pkg/attestation", "pkg/verifier"},
	"pkg/verifier/azure":                         {"pkg/attestation", "pkg/attestation/cloudname", "pkg/verifier", "pkg/verifier/cloud"},
	"pkg/verifier/ec2":                           {"pkg/attestation", "pkg/attestation/cloudname", "pkg/attestation/nitrotpm", "pkg/verifier", "pkg/verifier/cloud"},
	"pkg/verifier/ec2role":                       {"pkg/attestation", "pkg/attestation/cloudname", "pkg/attestation/stscall", "pkg/verifier", "pkg/verifier/cloud"},
	"pkg/verifier/gce":                           {"pkg/attestation", "pkg/verifier", "pkg/verifier/cloud"},
	"pkg/verifier/tpm":                           {"pkg/attestation", "pkg/tpm/template", "pkg/verifier"},
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
			if from == "pkg/attestation" && (to == "os" || to == "net" || strings.Contains(to, ".")) {
				t.Errorf("pkg/attestation is bytes and times only, and imports %s", to)
			}
		}
	}
}

// maxInit bounds the allocations of a package's variables and init functions. They run each time
// the kubelet needs its certificate. One compiled regular expression has 50 to 500.
const maxInit = 32

// The packages of a provider and its documents do their work when they are called.
func TestProvidersDoNothingAtInit(t *testing.T) {
	cmd := exec.Command(build(t, "."), "--version")
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?m)^init (\S+) @.* (\d+) allocs$`).FindAllStringSubmatch(string(out), -1)
	if len(found) < 100 {
		t.Fatalf("only %d packages: %s", len(found), out)
	}
	for _, m := range found {
		_, name, ours := strings.Cut(m[1], "kubelet-authenticator/kubelet-authenticator/")
		if allocations, err := strconv.Atoi(m[2]); err != nil || allocations > maxInit &&
			ours && (strings.HasPrefix(name, "pkg/provider/") || strings.HasPrefix(name, "pkg/attestation/")) {
			t.Errorf("%s: %s allocations (%v)", name, m[2], err)
		}
	}
}

// maxSize is what the stripped binary may have, in bytes. It has some 17 MB, and 8 of them are
// client-go's rest and what that needs. They stay: others test its TLS, proxies and token files.
// Less than 1 MB is left for new features. A new dependency that needs more has to show its worth.
const maxSize = 18_000_000

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

// The example is built and answers. Where there is no platform it says so, by the name of its
// service.
func TestExampleProvider(t *testing.T) {
	path := build(t, example)
	out, err := exec.Command(path, "version", "--output", "json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var version struct {
		ProtocolVersions map[string][]string `json:"protocolVersions"`
	}
	if err := json.Unmarshal(out, &version); err != nil || len(version.ProtocolVersions["acme"]) != 1 {
		t.Errorf("version: %s, %v", out, err)
	}
	dir := t.TempDir()
	bootstrap := filepath.Join(dir, "bootstrap.kubeconfig")
	kubeconfig := `{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
  clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}], users: [{name: a, user: {token: a.a}}]}`
	if err := os.WriteFile(bootstrap, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = exec.Command(path, "--dry-run", "--node-name=a", "--cert-dir="+dir, "--runtime-dir="+dir, "--bootstrap-kubeconfig="+bootstrap).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "/run/acme/identity.sock") || !strings.Contains(string(out), "hint: is this an instance of Acme") {
		t.Errorf("without a platform: %v, %s", err, out)
	}
}

func build(t *testing.T, pkg string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "plugin")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags=-s -w", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
	return path
}
