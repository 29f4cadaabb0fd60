// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	guides = module + "/docs/integration/"

	staticFile = "/etc/kubelet-authenticator/bootstrap.kubeconfig"
	// confinement begins the part of without-kubeadm.md about proxies and sandboxes.
	confinement = "\n## Confinement and proxies\n"
)

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// newUnjoined returns a machine on which there is nothing of kubeadm's, with a configuration that
// names the static credential, and its name.
func newUnjoined(t *testing.T, config, name string) usualPlaces {
	t.Helper()
	chip := swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}})
	d := newUsualPlaces(t, strings.Replace(config, "providerIDScheme: metal", "nodeName: "+name+"\nproviderID: metal://"+name, 1), chip.Socket(), name)
	if err := os.Rename(d.At(kubelet.BootstrapFile), d.At(staticFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(d.At("/var/lib/kubelet")); err != nil {
		t.Fatal(err)
	}
	answer(t, chip, name)
	return d
}

func (d usualPlaces) has(path string) bool {
	_, err := os.Lstat(d.At(path))
	return err == nil
}

// What docs/integration/without-kubeadm.md has a person type is typed. test/prepare/join starts a
// kubelet with its configuration.
func TestWithoutKubeadmDocument(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("a mount namespace needs root")
	}
	document, _, _ := strings.Cut(read(t, guides+"without-kubeadm.md"), confinement)
	config, commands := blocks(document, "yaml"), blocks(document, "sh")
	if len(config) != 2 || len(commands) != 6 {
		t.Fatalf("%d configurations, commands %q", len(config), commands)
	}
	byBootstrap, byServer, dryRun, whoami, prepare, reset := commands[0], commands[1], commands[2], commands[3], commands[4], commands[5]

	t.Run("without the drop-in", func(t *testing.T) {
		const name = "self-made"
		d := newUnjoined(t, config[1], name)
		d.write("/etc/kubelet-authenticator/ca.crt", string(shared.ServerCA()))
		d.write("/etc/kubernetes/.keep", "")
		d.run(byBootstrap).Want(t, 0, "wrote "+kubelet.KubeconfigFile)
		d.run(strings.Replace(byServer, "https://cluster.example.com:6443", shared.ServerURL(), 1)).Want(t, 0, "is as it should be")
		if r := d.run(dryRun); r.Code != 0 || !strings.Contains(r.Stdout+r.Stderr, "system:node:"+name) {
			t.Errorf("%+v", r)
		}
		if r := d.run(whoami); r.Code != 0 || !strings.Contains(r.Stdout, "system:node:"+name) {
			t.Errorf("%+v", r)
		}
		d.run(reset).Want(t, 0, "removed "+kubelet.KubeconfigFile, "removed "+cache.DefaultPath)
		if !d.has(staticFile) {
			t.Error("the static credential is gone")
		}
	})
	t.Run("with the drop-in", func(t *testing.T) {
		const name = "self-made-held-back"
		d := newUnjoined(t, config[1], name)
		d.write("/etc/kubernetes/.keep", "")
		d.run(prepare).Want(t, 0, "there is no "+kubelet.ConfigFile+" yet", "the kubelet starts without kubelet-authenticator")
		const own = "/etc/kubernetes/kubelet.yaml"
		d.write(own, config[0])
		d.run(strings.TrimSpace(prepare)+" --kubelet-config="+own).Want(t, 0, "wrote "+kubelet.KubeconfigFile, "wrote "+kubelet.EnvFile, "system:node:"+name+" has a certificate")
		if !d.has(staticFile) || d.has(filepath.Join(cache.DefaultPath, cache.BootstrapFile)) {
			t.Error("the static credential is gone, or was copied")
		}
	})
	t.Run("what must not be there", func(t *testing.T) {
		d := newUnjoined(t, config[1], "refused")
		d.write(kubelet.KubeconfigFile, string(shared.AdminKubeconfig()))
		d.run(byBootstrap).Want(t, 29, "client certificate")
		d.run(prepare).Want(t, 0, "the kubelet starts without kubelet-authenticator")
		for name, bootstrap := range map[string][]byte{
			"an exec user": shared.ExecKubeconfig("client.authentication.k8s.io/v1", shared.plugin, nil, nil, true),
			"plain HTTP":   shared.BootstrapKubeconfig("a.b", testbed.WithServer("http://127.0.0.1:1")),
		} {
			d.write(staticFile, string(bootstrap))
			if r := d.run("kubelet-authenticator"); r.Code != 10 {
				t.Errorf("%s: %+v", name, r)
			}
		}
	})
}

// Each test that the guides name is there.
func TestDocumentedTestsExist(t *testing.T) {
	var source strings.Builder
	err := filepath.WalkDir(module, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		data, err := os.ReadFile(path)
		source.Write(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, least := range map[string]int{"kubeadm.md": 1, "without-kubeadm.md": 8} {
		named := regexp.MustCompile("`(Test\\w+)(?:/([^`]+))?`").FindAllStringSubmatch(read(t, guides+name), -1)
		if len(named) < least {
			t.Errorf("%s: only %d tests are named", name, len(named))
		}
		for _, m := range named {
			if !strings.Contains(source.String(), "\nfunc "+m[1]+"(") || m[2] != "" && !strings.Contains(source.String(), `"`+m[2]+`"`) {
				t.Errorf("%s: there is no %s", name, m[0])
			}
		}
	}
}

// Each link of README.md and the documents leads to a file, and the guides have some.
func TestLinksLeadSomewhere(t *testing.T) {
	paths, err := filepath.Glob(guides + "*.md")
	if err != nil || len(paths) < 3 {
		t.Fatal(paths, err)
	}
	others, err := filepath.Glob(module + "/docs/*.md")
	if err != nil || len(others) < 10 {
		t.Fatal(others, err)
	}
	for _, path := range slices.Concat(paths, others, []string{module + "/README.md"}) {
		links := regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(read(t, path), -1)
		if len(links) == 0 && slices.Contains(paths, path) {
			t.Errorf("%s: no links", path)
		}
		for _, link := range links {
			target, _, _ := strings.Cut(link[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), target)); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
	}
}
