// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// CacheVariable names the environment variable that says where the built
// components are kept. Without it they are in the user's cache folder.
const CacheVariable = "KUBELET_AUTHENTICATOR_TEST_CACHE"

const (
	stillBuildingEvery = 30 * time.Second
	// A half-made folder is only ever touched under the lock, so one that is
	// found there was left by a build that was killed.
	partialPrefix = "partial-"
)

// Components are the paths of the control plane's binaries.
type Components struct {
	Etcd              string
	APIServer         string
	ControllerManager string
	Kubectl           string

	// KubernetesVersion is what they were built from, for example "v1.36.3".
	KubernetesVersion string
}

// KubeletComponents are the paths of what StartKubelet runs.
type KubeletComponents struct {
	Kubelet string
	// FakeCRI is a container runtime that runs no containers.
	FakeCRI string

	// KubernetesVersion is what the kubelet was built from.
	KubernetesVersion string
}

// ClusterAPIComponents are the paths of the programs that StartClusterAPI runs.
type ClusterAPIComponents struct {
	Core             string
	KubeadmBootstrap string
	// Source is the folder of Cluster API's module, which has the manifests.
	Source string

	// Version is what they were built from, for example "v1.14.2".
	Version string
}

type component struct {
	name    string // of the binary
	pkg     string // its main package; one that begins with "./" is the components module's own
	version string // the module whose version the progress shows
}

// componentSet is a set of components that are built together. A test waits only for the sets that
// it uses.
type componentSet struct {
	name       string // of its folder, after the key
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
	controlPlaneSet = componentSet{components: []component{
		{"etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"},
		{"kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", kubernetesModule},
		{"kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", kubernetesModule},
		{"kubectl", "k8s.io/kubernetes/cmd/kubectl", kubernetesModule},
	}}
	kubelet    = component{"kubelet", "k8s.io/kubernetes/cmd/kubelet", kubernetesModule}
	kubeletSet = componentSet{name: "-kubelet", components: []component{
		kubelet,
		{"fakecri", "./fakecri", kubernetesModule}, // its modules are the kubelet's
	}}
	kubeadmSet = componentSet{name: "-kubeadm", components: []component{
		{"kubeadm", "k8s.io/kubernetes/cmd/kubeadm", kubernetesModule},
	}}
	kubernetesRelease = release{kubernetesModule, "k8s.io/component-base/version"}
	// A module of its own, since its requirements are others than Kubernetes'.
	clusterAPIRelease = release{clusterAPIModule, "sigs.k8s.io/cluster-api/version"}
	clusterctlSet     = componentSet{name: "-clusterctl", module: clusterAPIFolder, components: []component{
		{"clusterctl", "sigs.k8s.io/cluster-api/cmd/clusterctl", clusterAPIModule},
	}, release: clusterAPIRelease}
	clusterAPISet = componentSet{name: "-cluster-api", module: clusterAPIFolder, components: []component{
		{"core-manager", "sigs.k8s.io/cluster-api/core", clusterAPIModule},
		{"kubeadm-bootstrap-manager", "sigs.k8s.io/cluster-api/bootstrap/kubeadm", clusterAPIModule},
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

// Build returns the control plane's components, and builds those of this recipe first if that
// has not happened on this machine yet. A cold build takes minutes, so what it
// does is written to progress. It may be called from several processes at once.
func Build(ctx context.Context, progress io.Writer) (Components, error) {
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

// BuildKubelet is Build for the kubelet, of the same version.
func BuildKubelet(ctx context.Context, progress io.Writer) (KubeletComponents, error) {
	r, folder, err := buildSet(ctx, kubeletSet, progress)
	if err != nil {
		return KubeletComponents{}, err
	}
	return KubeletComponents{
		Kubelet: filepath.Join(folder, "kubelet"), FakeCRI: filepath.Join(folder, "fakecri"), KubernetesVersion: r.version,
	}, nil
}

// BuildOtherKubelet is BuildKubelet for a kubelet of another minor version, such as "v1.33", which
// test/components has a folder with a module for.
func BuildOtherKubelet(ctx context.Context, minor string, progress io.Writer) (KubeletComponents, error) {
	built, err := BuildKubelet(ctx, progress)
	if err != nil {
		return KubeletComponents{}, err
	}
	r, folder, err := buildSet(ctx, componentSet{name: "-kubelet", module: minor, components: []component{kubelet}}, progress)
	if err != nil {
		return KubeletComponents{}, err
	}
	built.Kubelet, built.KubernetesVersion = filepath.Join(folder, "kubelet"), r.version
	return built, nil
}

// BuildKubeadm is Build for kubeadm, of the same version. It returns its path.
func BuildKubeadm(ctx context.Context, progress io.Writer) (string, error) {
	_, folder, err := buildSet(ctx, kubeadmSet, progress)
	if err != nil {
		return "", err
	}
	return filepath.Join(folder, "kubeadm"), nil
}

// BuildClusterctl builds clusterctl, of the version of test/components/cluster-api. It returns its
// path.
func BuildClusterctl(ctx context.Context, progress io.Writer) (string, error) {
	_, folder, err := buildSet(ctx, clusterctlSet, progress)
	if err != nil {
		return "", err
	}
	return filepath.Join(folder, "clusterctl"), nil
}

// BuildClusterAPI builds Cluster API's managers, of the same version as clusterctl. It also makes
// sure that their manifests are in the module cache.
func BuildClusterAPI(ctx context.Context, progress io.Writer) (ClusterAPIComponents, error) {
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
	base, err := cacheFolder()
	if err != nil {
		return nil, "", err
	}
	folder := filepath.Join(base, r.key()+set.name)
	if r.builtInto(folder) {
		return r, folder, nil
	}

	if err := os.MkdirAll(base, 0o700); err != nil {
		return nil, "", fmt.Errorf("make the components' cache: %w", err)
	}
	unlock, err := lockFile(ctx, filepath.Join(base, "lock"), progress)
	if err != nil {
		return nil, "", fmt.Errorf("lock the components' cache: %w", err)
	}
	defer unlock()
	// Another process may have built them while this one waited.
	if r.builtInto(folder) {
		return r, folder, nil
	}
	if err := r.buildInto(ctx, base, folder, progress); err != nil {
		return nil, "", err
	}
	if !r.builtInto(folder) {
		return nil, "", fmt.Errorf("components in %s are incomplete after the build", folder)
	}
	return r, folder, nil
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
	return []string{"-trimpath", "-buildvcs=false", "-ldflags", ldflags}, nil
}

func (r *recipe) key() string {
	h := sha256.New()
	for _, part := range [][]byte{r.goMod, r.goSum, r.own, []byte(r.goVersion), []byte(strings.Join(r.flags, " "))} {
		// The length in front keeps two different splits from colliding.
		_, _ = fmt.Fprintf(h, "%d:%s", len(part), part) // a hash does not fail
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

func cacheFolder() (string, error) {
	if dir := os.Getenv(CacheVariable); dir != "" {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return "", fmt.Errorf("%s: %w", CacheVariable, err)
		}
		return abs, nil
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache folder (set %s): %w", CacheVariable, err)
	}
	return filepath.Join(dir, "kubelet-authenticator-testbed"), nil
}

// builtInto reports whether all binaries are there.
func (r *recipe) builtInto(folder string) bool {
	for _, item := range r.set.components {
		if info, err := os.Stat(filepath.Join(folder, item.name)); err != nil || !info.Mode().IsRegular() {
			return false
		}
	}
	return true
}

// buildInto builds beside the target and renames, so that a folder with the
// right name is always complete.
func (r *recipe) buildInto(ctx context.Context, base, folder string, progress io.Writer) (err error) {
	if err := removePartial(base); err != nil {
		return err
	}
	partial, err := os.MkdirTemp(base, partialPrefix)
	if err != nil {
		return fmt.Errorf("make a folder to build in: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(partial))
		}
	}()

	say(progress, "building the components into %s, minutes if nothing is cached", folder)
	for _, item := range r.set.components {
		if err := r.buildOne(ctx, item, partial, progress); err != nil {
			return err
		}
	}
	// An incomplete folder can only be there if somebody deleted from it.
	if err := os.RemoveAll(folder); err != nil {
		return fmt.Errorf("clear %s: %w", folder, err)
	}
	if err := os.Rename(partial, folder); err != nil {
		return fmt.Errorf("move the components into place: %w", err)
	}
	return nil
}

func removePartial(base string) error {
	left, err := filepath.Glob(filepath.Join(base, partialPrefix+"*"))
	if err != nil {
		return fmt.Errorf("look for interrupted builds: %w", err)
	}
	for _, dir := range left {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove an interrupted build: %w", err)
		}
	}
	return nil
}

func (r *recipe) buildOne(ctx context.Context, item component, into string, progress io.Writer) error {
	version, err := moduleVersion(r.goMod, item.version)
	if err != nil {
		return err
	}
	begun := time.Now()
	say(progress, "building %s %s ...", item.name, version)
	args := append([]string{"build"}, r.flags...)
	args = append(args, "-o", filepath.Join(into, item.name), item.pkg)
	goBinary, err := exec.LookPath("go")
	if err != nil {
		return fmt.Errorf("find go: %w", err)
	}
	build, err := StartProcess(Command{
		Path: goBinary,
		Args: args,
		Dir:  r.source,
		// The caller's own build settings are about the caller's own code.
		Env:     []string{"CGO_ENABLED=0", "GOWORK=off", "GOFLAGS="},
		LogFile: filepath.Join(into, item.name+".log"),
	})
	if err != nil {
		return fmt.Errorf("build %s: %w", item.name, err)
	}

	tick := time.NewTicker(stillBuildingEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("build %s: %w", item.name, ctx.Err()), build.Stop(defaultGrace))
		case <-tick.C:
			say(progress, "still building %s ... %d s", item.name, int(time.Since(begun).Seconds()))
		case <-build.Done():
			if err := build.Err(); err != nil {
				return fmt.Errorf("build %s: %w", item.name, err)
			}
			say(progress, "built %s in %.0f s", item.name, time.Since(begun).Seconds())
			return nil
		}
	}
}

// say writes a line of progress. A failed write of the progress must not fail a build.
func say(w io.Writer, format string, args ...any) {
	if w == nil {
		return
	}
	_, _ = fmt.Fprintf(w, "testbed: "+format+"\n", args...)
}
