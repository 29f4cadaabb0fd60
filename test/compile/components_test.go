// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestBuild builds components of a few lines each, in place of the real ones.
func TestBuild(t *testing.T) {
	root := fakeComponents(t)
	deep := filepath.Join(root, "test", "somewhere", "deep")
	mustMkdir(t, deep)
	t.Chdir(deep)
	cache := t.TempDir()
	t.Setenv(CacheVariable, cache)
	mustMkdir(t, filepath.Join(cache, "control-plane.partial", "left-by-a-killed-build"))

	// Two at once build once.
	var progress lockedBuilder
	var both sync.WaitGroup
	var components [2]Components
	for i := range components {
		both.Go(func() {
			var err error
			if components[i], err = ControlPlane(t.Context(), &progress); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	if t.Failed() {
		t.FailNow()
	}
	if components[0] != components[1] {
		t.Errorf("two builds at once differ: %+v", components)
	}
	if n := strings.Count(progress.String(), "built in "); n != 1 {
		t.Errorf("built %d times:\n%s", n, progress.String())
	}
	if left, _ := filepath.Glob(filepath.Join(cache, "*.partial")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	out, err := exec.Command(components[0].Kubectl).Output()
	if err != nil || string(out) != "kubectl v1.99.3 1 99" {
		t.Errorf("kubectl says %q, %v", out, err)
	}

	// A third finds what is there and says nothing.
	var quiet lockedBuilder
	again, err := ControlPlane(t.Context(), &quiet)
	if err != nil || again != components[0] || quiet.String() != "" {
		t.Errorf("built again: %+v, %v, %q", again, err, quiet.String())
	}

	// Who asks for more has only that built.
	kubelet, err := Kubelet(t.Context(), &quiet)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(kubelet.FakeCRI).Output(); err != nil || string(out) != "fakecri" {
		t.Errorf("fakecri says %q, %v", out, err)
	}
	if !strings.Contains(quiet.String(), "building kubelet, fakecri (v1.99.3)") || strings.Contains(quiet.String(), "kubectl") {
		t.Errorf("for the kubelet, something else was built:\n%s", quiet.String())
	}
	mustWrite(t, filepath.Join(root, "test", "components", "fakecri", "more.go"), "package main\n")
	if other, err := Kubelet(t.Context(), nil); err != nil || other == kubelet {
		t.Errorf("changed source: %+v, %v", other, err)
	}
	if older, err := OlderRelease(t.Context(), "v1.98", nil); err != nil {
		t.Error(err)
	} else if out, err := exec.Command(older.Kubelet).Output(); err != nil || string(out) != "kubelet v1.98.7 1 98" || older.KubernetesVersion != "v1.98.7" {
		t.Errorf("the kubelet of %s says %q, %v", older.KubernetesVersion, out, err)
	}
	if _, err := OlderRelease(t.Context(), "v1.97", nil); err == nil || !strings.Contains(err.Error(), "v1.97/go.mod") {
		t.Errorf("a version that no module is for: %v", err)
	}
	kubeadm, err := Kubeadm(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(kubeadm).Output(); err != nil || string(out) != "kubeadm v1.99.3 1 99" {
		t.Errorf("kubeadm says %q, %v", out, err)
	}
	clusterctl, err := Clusterctl(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(clusterctl).Output(); err != nil || string(out) != "clusterctl v1.97.5 1 97" {
		t.Errorf("clusterctl says %q, %v", out, err)
	}

	// Another go.sum is another set of components.
	mustWrite(t, filepath.Join(root, "test", "components", "go.sum"), "\n")
	other, err := ControlPlane(t.Context(), nil)
	if err != nil || other == components[0] {
		t.Errorf("changed go.sum: %+v, %v", other, err)
	}
}

func TestBuildReportsTheCompiler(t *testing.T) {
	root := fakeComponents(t)
	t.Chdir(root)
	cache := t.TempDir()
	t.Setenv(CacheVariable, cache)
	mustWrite(t, filepath.Join(root, "test", "components", "kubernetes", "cmd", "kubectl", "main.go"), "package main\nfunc main() { nonsense }\n")
	_, err := ControlPlane(t.Context(), nil)
	if err == nil || !strings.Contains(err.Error(), "kubernetes/cmd/kubectl/main.go") || !strings.Contains(err.Error(), "undefined: nonsense") {
		t.Errorf("ControlPlane: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(cache, "control-plane*"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != "control-plane.lock" {
		t.Errorf("left in the cache: %v, %v", left, err)
	}
}

func TestBuildOutsideTheRepository(t *testing.T) {
	t.Chdir(t.TempDir())
	if _, err := ControlPlane(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "test/components/go.mod") {
		t.Errorf("ControlPlane: %v", err)
	}
}

func TestLockFileWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := lockFile(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := lockFile(ctx, path, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("locked twice: %v", err)
	}
	unlock()
	unlock, err = lockFile(t.Context(), path, nil)
	if err != nil {
		t.Fatalf("after unlocking: %v", err)
	}
	unlock()
}

// fakeComponents makes a repository whose components module is replaced by
// programs that print what the linker stamped into them.
func fakeComponents(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	components := filepath.Join(root, "test", "components")
	const version = "package version\nvar gitVersion, gitMajor, gitMinor string\nfunc Get() string { return gitVersion + \" \" + gitMajor + \" \" + gitMinor }\n"
	files := map[string]string{
		"go.mod": `module example.test/components
go 1.26.0
require (
	go.etcd.io/etcd/server/v3 v3.99.1 // indirect
	k8s.io/component-base v0.99.3 // indirect
	k8s.io/kubernetes v1.99.3 // indirect
)
replace (
	go.etcd.io/etcd/server/v3 => ./etcd
	k8s.io/component-base => ./component-base
	k8s.io/kubernetes => ./kubernetes
)
`,
		"go.sum":                            "",
		"fakecri/main.go":                   "package main\nimport \"os\"\nfunc main() { os.Stdout.WriteString(\"fakecri\") }\n",
		"etcd/go.mod":                       "module go.etcd.io/etcd/server/v3\n",
		"etcd/main.go":                      "package main\nfunc main() {}\n",
		"component-base/go.mod":             "module k8s.io/component-base\n",
		"component-base/version/version.go": version,
		"kubernetes/go.mod":                 "module k8s.io/kubernetes\n",
	}
	files["v1.98/go.sum"] = ""
	files["v1.98/go.mod"] = "module example.test/components/v1.98\ngo 1.26.0\n" +
		"require (\nk8s.io/component-base v0.98.7 // indirect\nk8s.io/kubernetes v1.98.7 // indirect\n)\n" +
		"replace (\nk8s.io/component-base => ../component-base\nk8s.io/kubernetes => ../kubernetes\n)\n"
	files["cluster-api/go.sum"] = ""
	files["cluster-api/go.mod"] = "module example.test/components/cluster-api\ngo 1.26.0\n" +
		"require sigs.k8s.io/cluster-api v1.97.5 // indirect\nreplace sigs.k8s.io/cluster-api => ./source\n"
	files["cluster-api/source/go.mod"] = "module sigs.k8s.io/cluster-api\n"
	files["cluster-api/source/version/version.go"] = version
	files["cluster-api/source/cmd/clusterctl/main.go"] = "package main\nimport (\"os\"; \"sigs.k8s.io/cluster-api/version\")\n" +
		"func main() { os.Stdout.WriteString(\"clusterctl \" + version.Get()) }\n"
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kubectl", "kubelet", "kubeadm"} {
		files["kubernetes/cmd/"+name+"/main.go"] = "package main\nimport (\"os\"; \"k8s.io/component-base/version\")\n" +
			"func main() { os.Stdout.WriteString(\"" + name + " \" + version.Get()) }\n"
	}
	for name, content := range files {
		path := filepath.Join(components, name)
		mustMkdir(t, filepath.Dir(path))
		mustWrite(t, path, content)
	}
	return root
}

func mustMkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o700); err != nil {
		t.Fatal(err)
	}
}

func mustWrite(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// lockedBuilder is a strings.Builder for several writers.
type lockedBuilder struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
