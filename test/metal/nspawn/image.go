// SPDX-License-Identifier: Apache-2.0

// Package nspawn is a platform for package metal. Its hosts are machines in systemd-nspawn. The
// distribution's cloud-init runs their user data unchanged. A host has a software TPM with a
// certified EK, and the content of an image of image-builder. That has kubeadm, the kubelet, and
// the plugin as the Ansible role installs it.
package nspawn

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Programs are what an image is made of.
type Programs struct {
	module    string
	packages  string // the folder with the plugin's tarball
	cloudInit string // a layer
	kubeadm   string
	kubelet   compile.KubeletComponents
}

// Build makes the plugin's tarball in a folder, for the build step of testbed.MainIsolated. Time
// and commit are always the same: the same code makes the same tarball, and the cached image is
// used.
func Build(ctx context.Context, module, dir string) error {
	return testbed.MakePackages(ctx, module, filepath.Join(dir, "packages"), "FORMATS=tar", "ARCHES="+runtime.GOARCH, "VERSION=v0.0.0-test",
		"COMMIT=unknown", "SOURCE_DATE_EPOCH=1750000000")
}

// Find returns the tarball that Build made in a folder, and finds or builds all other programs. It
// is for the find step of testbed.MainIsolated.
func Find(ctx context.Context, module, dir string) (p Programs, err error) {
	p = Programs{module: module, packages: filepath.Join(dir, "packages")}
	if p.cloudInit, err = testbed.CloudInit(ctx, os.Stderr); err != nil {
		return p, err
	}
	if p.kubelet, err = compile.Kubelet(ctx, os.Stderr); err != nil {
		return p, err
	}
	p.kubeadm, err = compile.Kubeadm(ctx, os.Stderr)
	return p, err
}

// Kubeadm is the path of kubeadm.
func (p Programs) Kubeadm() string { return p.kubeadm }

// Image is the content of a host's disk before its first boot. Hosts share it, read only.
type Image struct {
	layers   []string
	programs map[string]string // Kubernetes', path there to path here
}

// bakeFolder has the files that Ansible needs while an image is made. The image is /usr alone, so
// it does not have this folder.
const bakeFolder = "/opt/bake"

// bakeFiles run the role as image-builder does with its own ansible.cfg and ansible/node.yml.
var bakeFiles = map[string]string{
	bakeFolder + "/ansible.cfg": `[defaults]
inject_facts_as_vars = False
pipelining = True
interpreter_python = /usr/bin/python3
roles_path = ` + bakeFolder + `/roles
`,
	bakeFolder + "/node.yml": `- hosts: all
  gather_subset: ["!all", "!min", distribution]
  roles: [kubelet_authenticator]
`,
}

// Bake makes an image as image-builder does. It starts a machine with the units of kubeadm and the
// kubelet, and runs the role of image-builder/ansible on it. That takes seconds, so the image stays
// in the components' cache until the plugin, the role or the machine changes.
func Bake(ctx context.Context, p Programs) (*Image, error) {
	found, err := filepath.Glob(filepath.Join(p.packages, "*.tar.gz"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("bake an image: %d tarballs in %s: %w", len(found), p.packages, err)
	}
	tarball, err := os.ReadFile(found[0])
	if err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	options := testbed.KubeadmMachine("bake", p.kubeadm, p.kubelet, bakeFiles)
	options.ReadOnlyBinds, options.Programs = options.Programs, nil // too large for copies
	options.Enabled, options.StartedWith = nil, "basic.target"
	if options.Files["/etc/os-release"], err = release(); err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	roles := filepath.Join(p.module, "image-builder", "ansible", "roles")
	if err := addFolder(options.Files, bakeFolder+"/roles", roles); err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	key, err := json.Marshal(options.Files)
	if err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	sum := sha256.Sum256(tarball)
	checksum := hex.EncodeToString(sum[:])
	options.Files[bakeFolder+"/tarball.tar.gz"] = string(tarball)
	layer, err := compile.Cached(ctx, "image", append(key, checksum...), os.Stderr, func(folder string) error {
		return bake(ctx, options, checksum, folder)
	})
	if err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	return &Image{layers: []string{p.cloudInit, layer}, programs: options.ReadOnlyBinds}, nil
}

// bake leaves the machine's /usr in the folder.
func bake(ctx context.Context, options testbed.MachineOptions, checksum, folder string) (err error) {
	m, err := testbed.StartMachine(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Remove()) }()
	if _, err := m.Run(ctx, "env", "ANSIBLE_CONFIG="+bakeFolder+"/ansible.cfg", "ansible-playbook", "--inventory=localhost,", "--connection=local",
		"--extra-vars", "kubelet_authenticator_file="+bakeFolder+"/tarball.tar.gz kubelet_authenticator_checksum=sha256:"+checksum,
		bakeFolder+"/node.yml"); err != nil {
		return err
	}
	if err := m.PowerOff(ctx); err != nil {
		return err
	}
	// With attributes and special files: overlayfs marks deleted files of lower layers with them.
	if out, err := exec.CommandContext(ctx, "cp", "-a", m.Path("/usr/"), folder+"/").CombinedOutput(); err != nil { //nolint:gosec // G204: our own arguments
		return fmt.Errorf("keep the image: %w: %s", err, out)
	}
	return nil
}

// addFolder adds a folder's files, which are below path on the machine.
func addFolder(files map[string]string, path, folder string) error {
	return filepath.WalkDir(folder, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := os.ReadFile(name) //nolint:gosec // G122: a folder of the project
		if err != nil {
			return err
		}
		rest, err := filepath.Rel(folder, name)
		files[filepath.Join(path, rest)] = string(content)
		return err
	})
}

// release is this machine's os-release. Ansible and cloud-init need it to know the distribution.
// The testbed's own file has too few fields.
func release() (string, error) {
	content, err := os.ReadFile("/etc/os-release")
	return string(content), err
}

// bootLimit is how long a host may take from power on to systemd's basic.target, with other
// machines starting beside it.
const bootLimit = 2 * time.Minute
