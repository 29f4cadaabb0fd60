// SPDX-License-Identifier: Apache-2.0

// Package nspawn is a platform for package metal: its hosts are machines in systemd-nspawn on which the distribution's cloud-init runs user data as it
// is. A host has a software TPM with a certified EK, and what an image of image-builder has: kubeadm, the kubelet, and the plugin as the role bakes it in.
package nspawn

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// Programs are what an image is made of.
type Programs struct {
	module    string
	packages  string // the folder with the plugin's tarball
	cloudInit string // a layer
	kubeadm   string
	kubelet   testbed.KubeletComponents
}

// Build makes the plugin's tarball of the module in a folder. It is for the build step of testbed.MainIsolated.
func Build(ctx context.Context, module, dir string) error {
	return testbed.MakePackages(ctx, module, filepath.Join(dir, "packages"), "FORMATS=tar", "ARCHES="+runtime.GOARCH, "VERSION=v0.0.0-test")
}

// Find returns what Build has made in a folder, and finds or builds everything else. It is for the find step of testbed.MainIsolated.
func Find(ctx context.Context, module, dir string) (p Programs, err error) {
	p = Programs{module: module, packages: filepath.Join(dir, "packages")}
	if p.cloudInit, err = testbed.CloudInit(ctx, os.Stderr); err != nil {
		return p, err
	}
	if p.kubelet, err = testbed.BuildKubelet(ctx, os.Stderr); err != nil {
		return p, err
	}
	p.kubeadm, err = testbed.BuildKubeadm(ctx, os.Stderr)
	return p, err
}

// Kubeadm is the path of kubeadm.
func (p Programs) Kubeadm() string { return p.kubeadm }

// Image is what is on a host's disk before its first boot.
type Image struct {
	dir    string
	layers []string
}

// Remove deletes the image. No host may have it any more.
func (i *Image) Remove() error { return os.RemoveAll(i.dir) }

// bakeFolder has what Ansible needs while an image is made. It does not get into the image, whose only part is /usr.
const bakeFolder = "/opt/bake"

// bakeFiles are what image-builder's ansible.cfg and ansible/node.yml are to a role.
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

// Bake makes an image: it starts a machine with kubeadm and the kubelet, and has Ansible run the role of image-builder/ansible on it, as image-builder does.
func Bake(ctx context.Context, p Programs) (_ *Image, err error) {
	found, err := filepath.Glob(filepath.Join(p.packages, "*.tar.gz"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("bake an image: %d tarballs in %s: %w", len(found), p.packages, err)
	}
	tarball, err := os.ReadFile(found[0])
	if err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	options := testbed.KubeadmMachine("bake", p.kubeadm, p.kubelet, bakeFiles)
	options.Files[bakeFolder+"/tarball.tar.gz"] = string(tarball)
	options.Enabled, options.StartedWith = nil, "basic.target"
	if options.Files["/etc/os-release"], err = release(); err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	m, err := testbed.StartMachine(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	defer func() {
		if removeErr := m.Remove(); err == nil {
			err = removeErr
		}
	}()
	if err := os.CopyFS(m.Path(bakeFolder+"/roles"), os.DirFS(filepath.Join(p.module, "image-builder", "ansible", "roles"))); err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	sum := sha256.Sum256(tarball)
	if out, err := m.Run(ctx, "env", "ANSIBLE_CONFIG="+bakeFolder+"/ansible.cfg", "ansible-playbook", "--inventory=localhost,", "--connection=local",
		"--extra-vars", "kubelet_authenticator_file="+bakeFolder+"/tarball.tar.gz kubelet_authenticator_checksum=sha256:"+hex.EncodeToString(sum[:]),
		bakeFolder+"/node.yml"); err != nil {
		return nil, fmt.Errorf("bake an image: %w\n%s", err, out)
	}
	if err := m.PowerOff(ctx); err != nil {
		return nil, fmt.Errorf("bake an image: %w", err)
	}
	return newImage(p, m.Path("/usr/"))
}

// newImage takes over the /usr of a machine that is off.
func newImage(p Programs, usr string) (*Image, error) {
	dir, err := os.MkdirTemp("/tmp", "image-") // where machines' folders are: a rename has to do
	if err != nil {
		return nil, fmt.Errorf("keep the image: %w", err)
	}
	if err := os.Rename(usr, filepath.Join(dir, "usr")); err != nil {
		return nil, fmt.Errorf("keep the image: %w", err)
	}
	return &Image{dir: dir, layers: []string{p.cloudInit, dir}}, nil
}

// release is this machine's os-release, by which Ansible and cloud-init know the distribution. The testbed's own says too little.
func release() (string, error) {
	content, err := os.ReadFile("/etc/os-release")
	return string(content), err
}

// bootLimit is how long a host may take from power on to systemd's basic.target, with other machines starting beside it.
const bootLimit = 2 * time.Minute
