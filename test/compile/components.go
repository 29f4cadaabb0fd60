// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Components are the paths of the control plane's binaries.
type Components struct {
	Etcd              string
	APIServer         string
	ControllerManager string
	Kubectl           string

	// KubernetesVersion is what they were built from, for example "v1.37.2".
	KubernetesVersion string
}

// KubeletComponents are the paths of a kubelet, and of what it needs.
type KubeletComponents struct {
	Kubelet string
	// FakeCRI is a container runtime that runs no containers.
	FakeCRI string

	// KubernetesVersion is what the kubelet was built from.
	KubernetesVersion string
}

// ClusterAPIComponents are the paths of Cluster API's managers.
type ClusterAPIComponents struct {
	Core             string
	KubeadmBootstrap string
	// Source is the folder of Cluster API's module, which has the manifests.
	Source string

	// Version is what they were built from, for example "v1.14.2".
	Version string
}

// component is a program. pkg is its main package. One that begins with "./" is the components
// module's own.
type component struct{ name, pkg string }

// componentSet is a set of components that are built together. A test waits only for the sets that
// it uses.
type componentSet struct {
	name       string // of its folder, and in the progress
	module     string // folder below test/components, empty for the module there
	components []component
	release    release // Kubernetes' where it is not given
}

// release is the module whose version is the set's, and the package that has it stamped in.
type release struct {
	module, stamp string
}

const (
	kubernetesModule = "k8s.io/kubernetes"
	clusterAPIModule = "sigs.k8s.io/cluster-api"
	clusterAPIFolder = "cluster-api" // below test/components
)

var (
	controlPlaneSet = componentSet{name: "control-plane", components: []component{
		{"etcd", "go.etcd.io/etcd/server/v3"},
		{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"},
		{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"},
		{"kubectl", "k8s.io/kubernetes/cmd/kubectl"},
	}}
	kubelet    = component{"kubelet", "k8s.io/kubernetes/cmd/kubelet"}
	kubeletSet = componentSet{name: "kubelet", components: []component{
		kubelet,
		{"fakecri", "./fakecri"}, // its modules are the kubelet's
	}}
	kubeadmSet = componentSet{name: "kubeadm", components: []component{
		{"kubeadm", "k8s.io/kubernetes/cmd/kubeadm"},
	}}
	kubernetesRelease = release{kubernetesModule, "k8s.io/component-base/version"}
	// A module of its own, since its requirements are others than Kubernetes'.
	clusterAPIRelease = release{clusterAPIModule, "sigs.k8s.io/cluster-api/version"}
	clusterctlSet     = componentSet{name: "clusterctl", module: clusterAPIFolder, components: []component{
		{"clusterctl", "sigs.k8s.io/cluster-api/cmd/clusterctl"},
	}, release: clusterAPIRelease}
	clusterAPISet = componentSet{name: "cluster-api", module: clusterAPIFolder, components: []component{
		{"core-manager", "sigs.k8s.io/cluster-api/core"},
		{"kubeadm-bootstrap-manager", "sigs.k8s.io/cluster-api/bootstrap/kubeadm"},
	}, release: clusterAPIRelease}
)

// recipe is all that decides what the binaries look like.
type recipe struct {
	set       componentSet
	source    string // folder of the components module
	goMod     []byte
	goSum     []byte
	own       []byte // sources of the set's packages that are the components module's own
	goVersion string
	flags     []string
	version   string // of the set's release
}

// ControlPlane returns the control plane's components. If those of this recipe were not built on
// this machine yet, it builds them first. This takes minutes, so it writes to progress. It may be
// called from several processes at once.
func ControlPlane(ctx context.Context, progress io.Writer) (Components, error) {
	r, folder, err := buildSet(ctx, controlPlaneSet, progress)
	if err != nil {
		return Components{}, err
	}
	return Components{
		Etcd:              filepath.Join(folder, "etcd"),
		APIServer:         filepath.Join(folder, "kube-apiserver"),
		ControllerManager: filepath.Join(folder, "kube-controller-manager"),
		Kubectl:           filepath.Join(folder, "kubectl"),
		KubernetesVersion: r.version,
	}, nil
}

// Kubelet is ControlPlane for the kubelet, of the same version.
func Kubelet(ctx context.Context, progress io.Writer) (KubeletComponents, error) {
	r, folder, err := buildSet(ctx, kubeletSet, progress)
	if err != nil {
		return KubeletComponents{}, err
	}
	return KubeletComponents{
		Kubelet: filepath.Join(folder, "kubelet"), FakeCRI: filepath.Join(folder, "fakecri"), KubernetesVersion: r.version,
	}, nil
}

// Older is what another release of Kubernetes has.
type Older struct {
	KubeletComponents
	APIServer string
}

// OlderRelease builds another minor version, such as "v1.33", which test/components has a folder
// with a module for.
func OlderRelease(ctx context.Context, minor string, progress io.Writer) (Older, error) {
	built, err := Kubelet(ctx, progress)
	if err != nil {
		return Older{}, err
	}
	r, folder, err := buildSet(ctx, componentSet{name: minor, module: minor, components: []component{
		kubelet, {"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"},
	}}, progress)
	if err != nil {
		return Older{}, err
	}
	built.Kubelet, built.KubernetesVersion = filepath.Join(folder, "kubelet"), r.version
	return Older{KubeletComponents: built, APIServer: filepath.Join(folder, "kube-apiserver")}, nil
}

// Kubeadm is ControlPlane for kubeadm, of the same version. It returns its path.
func Kubeadm(ctx context.Context, progress io.Writer) (string, error) {
	_, folder, err := buildSet(ctx, kubeadmSet, progress)
	if err != nil {
		return "", err
	}
	return filepath.Join(folder, "kubeadm"), nil
}

// Clusterctl builds clusterctl, of the version of test/components/cluster-api. It returns its path.
func Clusterctl(ctx context.Context, progress io.Writer) (string, error) {
	_, folder, err := buildSet(ctx, clusterctlSet, progress)
	if err != nil {
		return "", err
	}
	return filepath.Join(folder, "clusterctl"), nil
}

// ClusterAPI builds Cluster API's managers, of the same version as clusterctl. It also makes sure
// that their manifests are in the module cache.
func ClusterAPI(ctx context.Context, progress io.Writer) (ClusterAPIComponents, error) {
	r, folder, err := buildSet(ctx, clusterAPISet, progress)
	if err != nil {
		return ClusterAPIComponents{}, err
	}
	source, err := ModuleDir(ctx, r.source, clusterAPIModule)
	if err != nil {
		return ClusterAPIComponents{}, err
	}
	return ClusterAPIComponents{
		Core: filepath.Join(folder, "core-manager"), KubeadmBootstrap: filepath.Join(folder, "kubeadm-bootstrap-manager"),
		Source: source, Version: r.version,
	}, nil
}

// buildSet returns the folder with a set's binaries.
func buildSet(ctx context.Context, set componentSet, progress io.Writer) (*recipe, string, error) {
	r, err := readRecipe(ctx, set)
	if err != nil {
		return nil, "", err
	}
	folder, err := Cached(ctx, set.name, r.key(), progress, func(folder string) error { return r.build(ctx, folder, progress) })
	return r, folder, err
}

func readRecipe(ctx context.Context, set componentSet) (*recipe, error) {
	source, err := findComponents()
	if err != nil {
		return nil, err
	}
	source = filepath.Join(source, set.module)
	r := &recipe{set: set, source: source}
	if r.goMod, err = os.ReadFile(filepath.Join(source, "go.mod")); err != nil {
		return nil, fmt.Errorf("read the components' go.mod: %w", err)
	}
	if r.goSum, err = os.ReadFile(filepath.Join(source, "go.sum")); err != nil {
		return nil, fmt.Errorf("read the components' go.sum: %w", err)
	}
	if r.own, err = ownSources(source, set); err != nil {
		return nil, err
	}
	goVersion := exec.CommandContext(ctx, "go", "env", "GOVERSION")
	goVersion.Dir = source
	out, err := goVersion.Output()
	if err != nil {
		return nil, fmt.Errorf("ask go for its version: %w", err)
	}
	r.goVersion = strings.TrimSpace(string(out))
	of := set.release
	if of.module == "" {
		of = kubernetesRelease
	}
	if r.version, err = moduleVersion(r.goMod, of.module); err != nil {
		return nil, err
	}
	if r.flags, err = buildFlags(of, r.version); err != nil {
		return nil, err
	}
	return r, nil
}

// ownSources returns the Go files of the set's packages that are the components module's own.
func ownSources(source string, set componentSet) ([]byte, error) {
	var all []byte
	for _, item := range set.components {
		if !strings.HasPrefix(item.pkg, "./") {
			continue
		}
		files, err := filepath.Glob(filepath.Join(source, item.pkg, "*.go"))
		if err != nil {
			return nil, fmt.Errorf("look for the sources of %s: %w", item.name, err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				return nil, fmt.Errorf("read the sources of %s: %w", item.name, err)
			}
			all = append(all, content...)
		}
	}
	return all, nil
}

// findComponents walks up from the working directory, which `go test` sets to
// the package's folder. The paths compiled into the binary would not do: with
// -trimpath they are not paths of this machine.
func findComponents() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the working directory: %w", err)
	}
	for start := dir; ; dir = filepath.Dir(dir) {
		candidate := filepath.Join(dir, "test", "components")
		if _, err := os.Stat(filepath.Join(candidate, "go.mod")); err == nil {
			return candidate, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no test/components/go.mod above %s", start)
		}
	}
}

func moduleVersion(goMod []byte, module string) (string, error) {
	line := regexp.MustCompile(`(?m)^\s*(?:require\s+)?` + regexp.QuoteMeta(module) + `\s+(v\S+)`)
	match := line.FindSubmatch(goMod)
	if match == nil {
		return "", fmt.Errorf("the components' go.mod requires no %s", module)
	}
	return string(match[1]), nil
}

// buildFlags stamps the version in, else kubectl cannot parse what the server
// says it is.
func buildFlags(of release, version string) ([]string, error) {
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) != 3 {
		return nil, fmt.Errorf("version %q of %s is not vX.Y.Z", version, of.module)
	}
	variable := " -X " + of.stamp + "."
	ldflags := "-s -w" + variable + "gitVersion=" + version +
		variable + "gitMajor=" + parts[0] + variable + "gitMinor=" + parts[1]
	return append(Flags(), "-ldflags="+ldflags), nil
}

func (r *recipe) key() []byte {
	var key []byte
	for _, part := range [][]byte{r.goMod, r.goSum, r.own, []byte(r.goVersion), []byte(strings.Join(r.flags, " "))} {
		// The length in front keeps two different splits from colliding.
		key = fmt.Appendf(key, "%d:%s", len(part), part)
	}
	return key
}

// build builds the set into a folder. One go build compiles what several programs have in common
// once, and links one program while it compiles another.
func (r *recipe) build(ctx context.Context, folder string, progress io.Writer) error {
	// One build at a time: two would compile the same packages twice.
	unlock, err := lockFile(ctx, filepath.Join(filepath.Dir(folder), "compiler.lock"), progress)
	if err != nil {
		return fmt.Errorf("lock the compiler: %w", err)
	}
	defer unlock()
	names, packages := make([]string, 0, len(r.set.components)), make([]string, 0, len(r.set.components))
	for _, item := range r.set.components {
		names, packages = append(names, item.name), append(packages, item.pkg)
	}
	began := time.Now()
	say(progress, "building %s (%s), minutes if nothing is cached", strings.Join(names, ", "), r.version)
	// The caller's own build settings are about the caller's own code.
	if err := goBuild(ctx, r.source, append(slices.Clone(r.flags), "-o", folder+"/"), packages, []string{"GOWORK=off", "GOFLAGS="}, progress); err != nil {
		return err
	}
	say(progress, "built in %.0f s", time.Since(began).Seconds())
	for _, item := range r.set.components {
		if built := executable(item.pkg); built != item.name {
			if err := os.Rename(filepath.Join(folder, built), filepath.Join(folder, item.name)); err != nil {
				return fmt.Errorf("name %s: %w", item.name, err)
			}
		}
	}
	return nil
}

var majorVersion = regexp.MustCompile(`^v[0-9]+$`)

// executable returns the name that go build gives a package's program.
func executable(pkg string) string {
	if name := path.Base(pkg); !majorVersion.MatchString(name) {
		return name
	}
	return path.Base(path.Dir(pkg))
}
