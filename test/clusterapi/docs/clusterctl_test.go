// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	// provider is what clusterctl calls the controller in labels, folders and the inventory.
	provider = "addon-node-attestation"
	// repository is where the image is said to be.
	repository = "registry.example/project"
	program    = "node-attestation-controller"
	oneRelease = "v1.2.3"
	another    = "v1.3.0"
)

// digestOf is a release's image in these tests: nothing is pulled.
func digestOf(release string) string {
	return "sha256:" + strings.Repeat(map[string]string{oneRelease: "1a", another: "2b"}[release], 32)
}

// makeComponents runs "make components" in a checkout, after what "make image" leaves of an image.
func makeComponents(t *testing.T, checkout, dist, release string, variables ...string) (string, error) {
	t.Helper()
	digest := filepath.Join(dist, program+"-"+strings.TrimPrefix(release, "v")+".digest")
	if err := errors.Join(os.MkdirAll(dist, 0o755), os.WriteFile(digest, []byte(digestOf(release)+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	return runMake(t, checkout, append([]string{"components", "DIST=" + dist, "VERSION=" + release}, variables...)...)
}

func runMake(t *testing.T, checkout string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "make", append([]string{"--no-print-directory", "-C", checkout}, args...)...)
	// a make above this one would pass its variables on
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// checkoutWith has what "make components" needs, and another changelog.
func checkoutWith(t *testing.T, changelog string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	copied := exec.CommandContext(t.Context(), "cp", "--recursive", "--parents", "go.mod", "go.sum", "Makefile", "packaging", "scripts", "tools/kustomize", dir)
	copied.Dir = module
	if out, err := copied.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "CHANGELOG.md"), []byte(changelog), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// operator has clusterctl, and local repositories with releases of the provider and of Cluster
// API's own.
type operator struct {
	clusterctl, dir string
	// changelog has the releases so far.
	changelog string
	// checkout is of the last one. edit changes it before the components are made.
	checkout string
	edit     func(checkout string)
}

func newOperator(t *testing.T) *operator {
	t.Helper()
	clusterctl, err := compile.Clusterctl(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return &operator{clusterctl: clusterctl, dir: t.TempDir()}
}

// has puts the next release of the provider into its repository.
func (o *operator) has(t *testing.T, release string) {
	t.Helper()
	o.changelog = "## " + release + " (2026-12-24)\n\n" + o.changelog
	o.checkout = checkoutWith(t, o.changelog)
	if o.edit != nil {
		o.edit(o.checkout)
	}
	if out, err := makeComponents(t, o.checkout, filepath.Join(o.dir, provider, release), release, "IMAGE_REPO="+repository); err != nil {
		t.Fatalf("make components: %v\n%s", err, out)
	}
}

// hasClusterAPI puts Cluster API's own providers there, as their kustomizations have them.
func (o *operator) hasClusterAPI(t *testing.T) (release string) {
	t.Helper()
	source, err := compile.ModuleDir(t.Context(), module, "sigs.k8s.io/cluster-api")
	if err != nil {
		t.Fatal(err)
	}
	_, release, _ = strings.Cut(filepath.Base(source), "@")
	for label, kustomization := range map[string]string{"cluster-api": "core", "bootstrap-kubeadm": "bootstrap/kubeadm"} {
		folder := filepath.Join(o.dir, label, release)
		if err := errors.Join(
			os.MkdirAll(folder, 0o755),
			os.WriteFile(filepath.Join(folder, "components.yaml"), []byte(management.mustKubectl(t, "kustomize", filepath.Join(source, kustomization, "config/default"))), 0o600),
			os.WriteFile(filepath.Join(folder, "metadata.yaml"), []byte(read(t, filepath.Join(source, "metadata.yaml"))), 0o600),
		); err != nil {
			t.Fatal(err)
		}
	}
	return release
}

// settings writes clusterctl.yaml: the repositories, and what else is given.
func (o *operator) settings(t *testing.T, more string) (path string) {
	t.Helper()
	return write(t, fmt.Sprintf(`providers:
- {name: node-attestation, type: AddonProvider, url: "file://%[1]s/addon-node-attestation/latest/components.yaml"}
- {name: cluster-api, type: CoreProvider, url: "file://%[1]s/cluster-api/latest/components.yaml"}
- {name: kubeadm, type: BootstrapProvider, url: "file://%[1]s/bootstrap-kubeadm/latest/components.yaml"}
cert-manager: {externallyProvisioned: "true"}
`, o.dir)+more)
}

// run runs clusterctl with a configuration.
func (o *operator) run(t *testing.T, settings string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), o.clusterctl, append(args, "--config="+settings)...)
	cmd.Env = append(os.Environ(), "CLUSTERCTL_DISABLE_VERSIONCHECK=true", "HOME="+o.dir, "XDG_CONFIG_HOME="+o.dir)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("clusterctl %q: %w\n%s", args, err, &stderr)
	}
	return stdout.String(), nil
}

func (o *operator) mustRun(t *testing.T, settings string, args ...string) string {
	t.Helper()
	out, err := o.run(t, settings, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// generate returns what clusterctl makes of a release.
func (o *operator) generate(t *testing.T, release, settings string) string {
	t.Helper()
	return o.mustRun(t, settings, "generate", "provider", "--addon=node-attestation:"+release)
}

// byName parses a stream of manifests.
func byName(t *testing.T, stream string) map[string]*unstructured.Unstructured {
	t.Helper()
	found := map[string]*unstructured.Unstructured{}
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(stream), 4096); ; {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(&object.Object); errors.Is(err, io.EOF) {
			return found
		} else if err != nil {
			t.Fatal(err)
		}
		name := object.GetKind() + "/" + object.GetName()
		if found[name] != nil {
			t.Errorf("%s is there twice", name)
		}
		found[name] = object
	}
}

// clusterctl renders each object as the kustomization has it: no pattern, expression or argument
// is changed. What is added are labels, the image, and the ConfigMap with the configuration.
func TestClusterctlRenders(t *testing.T) {
	o := newOperator(t)
	// Nothing has the form of a variable so far. A policy's expression may have it one day.
	o.edit = func(checkout string) {
		policy := filepath.Join(checkout, "packaging/cluster-api/management/policy.yaml")
		text := strings.Replace(read(t, policy), "message: node-", "message: $ $$ ${HOME} ${NONE} $${HOME} $(HOME) node-", 1)
		if err := os.WriteFile(policy, []byte(text), 0o600); err != nil || !strings.Contains(text, "${NONE}") {
			t.Fatal("policy.yaml has no such message", err)
		}
	}
	o.has(t, oneRelease)
	got := byName(t, o.generate(t, oneRelease, o.settings(t, "")))
	want := byName(t, strings.Replace(strings.Replace(management.mustKubectl(t, "kustomize", o.checkout+"/packaging/cluster-api/management-revocation"),
		"        - --revocation\n", "", 1), // it is in the configuration
		"registry.invalid/"+program+":devel", repository+"/"+program+"@"+digestOf(oneRelease), 1))

	const configMap = "ConfigMap/" + program
	if got[configMap] == nil {
		t.Fatalf("no configuration in %q", slices.Sorted(maps.Keys(got)))
	}
	shipped, _, _ := unstructured.NestedString(got[configMap].Object, "data", "config.yaml")
	if !reflect.DeepEqual(configurationOf(t, shipped), configurationOf(t, read(t, examples+"/management/config.yaml"))) || got[configMap].GetNamespace() != namespace {
		t.Errorf("shipped is another configuration than the example's:\n%s", shipped)
	}
	for name, object := range got {
		labels := object.GetLabels()
		if label, ok := labels["clusterctl.cluster.x-k8s.io"]; !ok || label != "" || labels["cluster.x-k8s.io/provider"] != provider {
			t.Errorf("%s has the labels %v", name, labels)
		}
	}
	delete(got, configMap)

	if a, b := slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)); !slices.Equal(a, b) {
		t.Fatalf("objects %q, not %q", a, b)
	}
	for name, object := range want {
		a, b := comparable(got[name]), comparable(object)
		if !reflect.DeepEqual(a, b) {
			rendered, _ := sigsyaml.Marshal(a)
			kustomized, _ := sigsyaml.Marshal(b)
			t.Errorf("%s is\n%s\nnot\n%s", name, rendered, kustomized)
		}
	}
}

// comparable is an object without what clusterctl adds. It also lacks the empty fields that come
// and go as clusterctl converts objects to Go types and back.
func comparable(object *unstructured.Unstructured) map[string]any {
	o := object.DeepCopy()
	labels := o.GetLabels()
	delete(labels, "clusterctl.cluster.x-k8s.io")
	delete(labels, "cluster.x-k8s.io/provider")
	o.SetLabels(labels)
	if strings.HasPrefix(o.GetKind(), "ValidatingAdmissionPolicy") {
		// clusterctl does not know that the kind has no namespace; the API server does
		o.SetNamespace("")
	}
	delete(o.Object, "status")
	return withoutEmpty(o.Object).(map[string]any)
}

func withoutEmpty(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key, field := range v {
			if v[key] = withoutEmpty(field); v[key] == nil || reflect.DeepEqual(v[key], map[string]any{}) {
				delete(v, key)
			}
		}
	case []any:
		for i := range v {
			v[i] = withoutEmpty(v[i])
		}
	}
	return value
}

// configurationOf is a configuration that the controller takes.
func configurationOf(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Parse([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if _, err := config.New(c); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return &c
}

// What an operator can set: the three variables, and with clusterctl's own means the image.
func TestClusterctlVariables(t *testing.T) {
	o := newOperator(t)
	o.has(t, oneRelease)
	variables := o.mustRun(t, o.settings(t, ""), "generate", "provider", "--addon=node-attestation:"+oneRelease, "--describe")
	for _, name := range []string{"NODE_ATTESTATION_AUDIT", "NODE_ATTESTATION_CONFIG_MAP", "NODE_ATTESTATION_REVOCATION"} {
		if !strings.Contains(variables, "- "+name+"\n") || !strings.Contains(read(t, document), "`"+name+"`") {
			t.Errorf("%s is no variable, or not documented:\n%s", name, variables)
		}
	}
	if n := strings.Count(variables, "- NODE_ATTESTATION_"); n != 3 {
		t.Errorf("%d variables:\n%s", n, variables)
	}

	objects := byName(t, o.generate(t, oneRelease, o.settings(t, `NODE_ATTESTATION_AUDIT: "true"
NODE_ATTESTATION_REVOCATION: "true"
NODE_ATTESTATION_CONFIG_MAP: mine
images:
  addon-node-attestation: {repository: mirror.example/other}
`)))
	shipped, _, _ := unstructured.NestedString(objects["ConfigMap/"+program].Object, "data", "config.yaml")
	if c := configurationOf(t, shipped); !c.Audit || !c.Revocation.Enabled {
		t.Errorf("NODE_ATTESTATION_AUDIT or NODE_ATTESTATION_REVOCATION is not set in\n%s", shipped)
	}
	deployment, err := sigsyaml.Marshal(objects["Deployment/"+program])
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"image: mirror.example/other/" + program + "@" + digestOf(oneRelease) + "\n", "- configMap:\n          name: mine\n        name: config\n"} {
		if !strings.Contains(string(deployment), want) {
			t.Errorf("no %q in\n%s", want, deployment)
		}
	}
}

// clusterctl installs the provider beside Cluster API's own, upgrades and deletes it. In between
// the controller runs with what was installed. No pods run: cert-manager's CRDs are there, which
// clusterctl asks for, and none of its controllers.
func TestClusterctlInstalls(t *testing.T) {
	o := newOperator(t)
	clusterAPI := o.hasClusterAPI(t)
	o.has(t, oneRelease)
	s := startWorkload(t)
	source, err := compile.ModuleDir(t.Context(), module+"/test/components/cert-manager", "github.com/cert-manager/cert-manager")
	if err != nil {
		t.Fatal(err)
	}
	certManager, err := testbed.ReadCRDs(filepath.Join(source, "deploy/crds/cert-manager.io_*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.InstallCRDs(t.Context(), certManager...); err != nil {
		t.Fatal(err)
	}
	settings, kubeconfig := o.settings(t, ""), "--kubeconfig="+s.admin

	o.mustRun(t, settings, "init", kubeconfig, "--core=cluster-api:"+clusterAPI, "--bootstrap=kubeadm:"+clusterAPI, "--control-plane=-", "--addon=node-attestation:"+oneRelease)
	s.wantProvider(t, oneRelease)
	s.runsAsInstalled(t)
	// The rendered file is one that kubectl takes, too.
	s.mustKubectl(t, "apply", "--server-side", "--force-conflicts", "--validate=strict", "--filename="+write(t, o.generate(t, oneRelease, settings)))

	// A configuration of the operator's own outlives what clusterctl makes again.
	s.mustKubectl(t, "create", "configmap", "mine", "--namespace="+namespace, "--from-file="+examples+"/management/config.yaml")
	records := s.mustKubectl(t, "get", "crd/nodeattestations."+recordGroup, "--output=jsonpath={.metadata.uid}")
	o.has(t, another)
	if plan := o.mustRun(t, settings, "upgrade", "plan", kubeconfig); !strings.Contains(strings.Join(strings.Fields(plan), " "), provider+" "+namespace+" AddonProvider "+oneRelease+" "+another) {
		t.Errorf("the plan is\n%s", plan)
	}
	settings = o.settings(t, "NODE_ATTESTATION_CONFIG_MAP: mine\n")
	o.mustRun(t, settings, "upgrade", "apply", kubeconfig, "--addon="+namespace+"/node-attestation:"+another)
	s.wantProvider(t, another)
	if mounted := s.mustKubectl(t, "get", "deployment", program, "--namespace="+namespace, `--output=jsonpath={.spec.template.spec.volumes[?(@.name=="config")].configMap.name}`); mounted != "mine" {
		t.Errorf("mounted is %q", mounted)
	}
	s.mustKubectl(t, "get", "configmap", "mine", "--namespace="+namespace)
	if now := s.mustKubectl(t, "get", "crd/nodeattestations."+recordGroup, "--output=jsonpath={.metadata.uid}"); now != records {
		t.Error("the CRD was made anew, and all records are gone")
	}

	o.mustRun(t, settings, "delete", kubeconfig, "--addon=node-attestation")
	all := "--selector=cluster.x-k8s.io/provider=" + provider
	if left := s.mustKubectl(t, "get", "deployments,serviceaccounts,configmaps,roles,rolebindings,networkpolicies,poddisruptionbudgets", "--namespace="+namespace, all, "--output=name"); left != "" {
		t.Errorf("left are\n%s", left)
	}
	if left := s.mustKubectl(t, "get", "validatingadmissionpolicies,validatingadmissionpolicybindings", all, "--output=name"); left != "" {
		t.Errorf("left are\n%s", left)
	}
	s.mustKubectl(t, "get", "crd/nodeattestations."+recordGroup, "namespace/"+namespace, "configmap/mine", "--namespace="+namespace)
	if left := s.mustKubectl(t, "get", "clusterroles,clusterrolebindings", all, "--output=name"); left == "" {
		t.Error("clusterctl deletes the ClusterRoles as well: the guide's command is of no use any more")
	}
	s.mustKubectl(t, strings.Fields(command(t, "kubectl delete clusterrole,clusterrolebinding "))[1:]...)
	if left := s.mustKubectl(t, "get", "clusterroles,clusterrolebindings", all, "--output=name"); left != "" {
		t.Errorf("left are\n%s", left)
	}
}

// wantProvider checks which release is in clusterctl's inventory, and in the Deployment.
func (s *server) wantProvider(t *testing.T, release string) {
	t.Helper()
	if got := s.mustKubectl(t, "get", "providers.clusterctl.cluster.x-k8s.io", provider, "--namespace="+namespace, "--output=jsonpath={.version}"); got != release {
		t.Errorf("installed is %q, not %s", got, release)
	}
	image := s.mustKubectl(t, "get", "deployment", program, "--namespace="+namespace, "--output=jsonpath={.spec.template.spec.containers[*].image}")
	if want := repository + "/" + program + "@" + digestOf(release); image != want {
		t.Errorf("the image is %s, not %s", image, want)
	}
}

// runsAsInstalled has the controller become ready by the configuration that is installed, as the
// service account that is.
func (s *server) runsAsInstalled(t *testing.T) {
	t.Helper()
	var installed map[string]any
	text := s.mustKubectl(t, "get", "configmap", program, "--namespace="+namespace, `--output=jsonpath={.data.config\.yaml}`)
	if err := sigsyaml.Unmarshal([]byte(text), &installed); err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(t.TempDir(), program)
	if err := controllerprocess.Build(t.Context(), module, binary); err != nil {
		t.Fatal(err)
	}
	c, err := controllerprocess.New(controllerprocess.Options{
		ControlPlane: s.ControlPlane, Dir: t.TempDir(), Binary: binary,
		Edit: func(file map[string]any) { // all but the addresses, which are the test's
			maps.DeleteFunc(file, func(field string, _ any) bool { return !strings.HasSuffix(field, "BindAddress") })
			maps.Copy(file, installed)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Start(t.Context()), c.Ready(t.Context())); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(read(t, c.LogFile())) {
		if strings.Contains(line, "forbidden") {
			t.Errorf("the controller lacks a right: %s", line)
		}
	}
}

// The artifacts are the same whenever they are made, and SHA256SUMS has them beside what it had.
// Without the image they are of, nothing is made.
func TestComponentsOfARelease(t *testing.T) {
	dist := filepath.Join(t.TempDir(), "dist")
	const others = "0000  kubelet-authenticator-1.2.3\n"
	sums := filepath.Join(dist, "SHA256SUMS")
	if err := errors.Join(os.Mkdir(dist, 0o755), os.WriteFile(sums, []byte("1111  components.yaml\n"+others), 0o600),
		os.WriteFile(filepath.Join(dist, "kubelet-authenticator-1.2.3"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	var made []string
	for range 2 {
		if out, err := makeComponents(t, module, dist, oneRelease, "IMAGE_REPO="+repository); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		made = append(made, read(t, sums))
	}
	if made[0] != made[1] || !strings.Contains(made[0], others) || strings.Count(made[0], "\n") != 5 {
		t.Errorf("sums:\n%s\nand then\n%s", made[0], made[1])
	}
	check := exec.CommandContext(t.Context(), "sh", "-ec", "grep --invert-match 0000 SHA256SUMS | sha256sum --check --strict --quiet")
	check.Dir = dist
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	// as clusterctl's contract has it
	for name, object := range byName(t, read(t, filepath.Join(dist, "components.yaml"))) {
		if object.GetLabels()["cluster.x-k8s.io/provider"] != provider {
			t.Errorf("%s has the labels %v", name, object.GetLabels())
		}
	}

	for _, name := range []string{"workload", "workload-revocation"} {
		want := byName(t, management.mustKubectl(t, "kustomize", filepath.Join(module, "packaging", "cluster-api", name)))
		if workload := byName(t, read(t, filepath.Join(dist, name+".yaml"))); !reflect.DeepEqual(workload, want) {
			t.Errorf("%s.yaml is not packaging/cluster-api/%s", name, name)
		}
	}

	// Without a repository for the image, clusterctl's configuration has to name one.
	if out, err := makeComponents(t, module, dist, oneRelease); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if content := read(t, filepath.Join(dist, "components.yaml")); !strings.Contains(content, "image: registry.invalid/"+program+"@"+digestOf(oneRelease)+"\n") {
		t.Error("another image without IMAGE_REPO")
	}
	empty := t.TempDir()
	for want, args := range map[string][]string{
		"has no image of v1.2.3\nhint: make image": {"VERSION=" + oneRelease, "DIST=" + empty},
		"is no version\nhint: ":                    {"VERSION=1.2", "DIST=" + empty},
		"is no repository\nhint: ":                 {"VERSION=" + oneRelease, "DIST=" + dist, "IMAGE_REPO=a}b"},
	} {
		if out, err := runMake(t, module, append(args, "components")...); err == nil || !strings.Contains(out, want) {
			t.Errorf("%q: %v\n%s", args, err, out)
		}
	}
	if left, err := os.ReadDir(empty); err != nil || len(left) > 0 {
		t.Errorf("made %v, %v", left, err)
	}
}

// The metadata have the series of each release so far, in their order: clusterctl upgrade refuses
// to start from a release that is in none.
func TestComponentsHaveSeries(t *testing.T) {
	dist := t.TempDir()
	checkout := checkoutWith(t, `# Changelog

## Unreleased

## v1.2.3 (2026-12-24)

## v1.2.2 (2026-12-23)

### Not v1.1.0 (2026-12-22)

## v0.10.0-rc.1 (2026-12-21)

## v0.9.1 (2026-12-20)
`)
	if out, err := makeComponents(t, checkout, dist, another, "IMAGE_REPO="+repository); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const want = `apiVersion: clusterctl.cluster.x-k8s.io/v1alpha3
kind: Metadata
releaseSeries:
- {major: 0, minor: 9, contract: v1beta2}
- {major: 0, minor: 10, contract: v1beta2}
- {major: 1, minor: 2, contract: v1beta2}
- {major: 1, minor: 3, contract: v1beta2}
`
	if got := read(t, filepath.Join(dist, "metadata.yaml")); got != want {
		t.Errorf("metadata.yaml is\n%s", got)
	}
}
