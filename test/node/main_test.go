// SPDX-License-Identifier: Apache-2.0

// Package node tests the product on real nodes. A kubelet's kubeconfig names the plugin, the TPM is
// a software TPM, the controller is a process, and the control plane has the packaged manifests.
// All of that runs in namespaces of its own.
package node

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	// releasesVariable asks for older releases of Kubernetes, too: folders of test/components, such
	// as "v1.33". A cold build takes minutes for each.
	releasesVariable = "KUBELET_AUTHENTICATOR_TEST_RELEASES"
	// arm64Variable asks for TestARM64.
	arm64Variable = "KUBELET_AUTHENTICATOR_TEST_ARM64"
)

// programs are the paths of what the tests start.
type programs struct {
	plugin, controller string
	packages           string // the folder with the artifacts of the plugin
	goss               string
	arm64              string // the folder with plugin and controller for arm64, if they are asked for
	control            compile.Components
	kubelet            compile.KubeletComponents
	older              []compile.Older
	kubeadm            string
}

var built programs

func TestMain(m *testing.M) {
	flag.Parse()
	build := func(ctx context.Context, dir string) error {
		made := programsIn(dir)
		if err := compile.Program(ctx, module, made.plugin, "./cmd/kubelet-authenticator"); err != nil {
			return err
		}
		if testing.Short() { // its tests install no package
			return controllerprocess.Build(ctx, module, made.controller)
		}
		if err := testbed.MakePackages(ctx, module, made.packages, "FORMATS=tar deb sysext", "ARCHES="+runtime.GOARCH, "VERSION=v0.0.0-test"); err != nil {
			return err
		}
		if err := compile.Program(ctx, module+"/tools/goss", made.goss, "github.com/goss-org/goss/cmd/goss"); err != nil {
			return err
		}
		if os.Getenv(arm64Variable) != "" {
			if err := buildARM64(ctx, dir); err != nil {
				return err
			}
		}
		return controllerprocess.Build(ctx, module, made.controller)
	}
	// As many tests at once as there are.
	os.Exit(testbed.MainIsolated(m, 16, build, func(ctx context.Context, dir string) error {
		built = programsIn(dir)
		return built.buildKubernetes(ctx)
	}))
}

func programsIn(dir string) programs {
	return programs{
		plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller"),
		packages: filepath.Join(dir, "packages"), goss: filepath.Join(dir, "goss"), arm64: filepath.Join(dir, "arm64"),
	}
}

// buildKubernetes builds what a node has of Kubernetes, or finds it where it was built before.
func (p *programs) buildKubernetes(ctx context.Context) (err error) {
	if p.kubelet, err = compile.Kubelet(ctx, os.Stderr); err != nil {
		return err
	}
	for minor := range strings.FieldsSeq(os.Getenv(releasesVariable)) {
		older, err := compile.OlderRelease(ctx, minor, os.Stderr)
		if err != nil {
			return err
		}
		p.older = append(p.older, older)
	}
	if p.control, err = compile.ControlPlane(ctx, os.Stderr); err != nil || testing.Short() {
		return err
	}
	p.kubeadm, err = compile.Kubeadm(ctx, os.Stderr)
	return err
}
