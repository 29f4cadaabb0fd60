// SPDX-License-Identifier: Apache-2.0

// Package node tests the product on real nodes: a kubelet whose kubeconfig names the plugin, a software TPM, the controller as a process, and
// a control plane with the packaged manifests. All of that runs in namespaces of its own.
package node

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module = "../.."
	// programsVariable names the folder with what was built, for the tests in their namespaces.
	programsVariable = "KUBELET_AUTHENTICATOR_TEST_PROGRAMS"
	// kubeletsVariable asks for kubelets of other versions, too: folders of test/components, such as "v1.34". A cold build takes minutes.
	kubeletsVariable = "KUBELET_AUTHENTICATOR_TEST_KUBELETS"
)

// programs are the paths of what the tests start.
type programs struct {
	plugin, controller string
	kubelet            testbed.KubeletComponents
	others             []testbed.KubeletComponents
	kubeadm            string
}

var built programs

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	switch {
	case os.Geteuid() != 0:
		fmt.Fprintln(os.Stderr, "node: SKIPPED, NO TEST WITH A REAL KUBELET HAS RUN: a kubelet and its namespaces need root")
		return 0, nil
	case testbed.Isolated():
		return runIsolated(m)
	}
	// In its namespaces nothing can be downloaded, so all is built before.
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "node-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err := testbed.Build(ctx, os.Stderr); err != nil {
		return 0, err
	}
	made := programsIn(dir)
	if err := made.buildKubernetes(ctx); err != nil {
		return 0, err
	}
	if err := testbed.GoBuild(ctx, module, made.plugin, "./cmd/kubelet-authenticator"); err != nil {
		return 0, err
	}
	if err := controllerprocess.Build(ctx, module, made.controller); err != nil {
		return 0, err
	}
	if err := os.Setenv(programsVariable, dir); err != nil {
		return 0, err
	}
	return testbed.Isolate()
}

func programsIn(dir string) programs {
	return programs{plugin: filepath.Join(dir, "kubelet-authenticator"), controller: filepath.Join(dir, "node-attestation-controller")}
}

// buildKubernetes builds what a node has of Kubernetes, or finds it where it was built before.
func (p *programs) buildKubernetes(ctx context.Context) (err error) {
	if p.kubelet, err = testbed.BuildKubelet(ctx, os.Stderr); err != nil {
		return err
	}
	for minor := range strings.FieldsSeq(os.Getenv(kubeletsVariable)) {
		other, err := testbed.BuildOtherKubelet(ctx, minor, os.Stderr)
		if err != nil {
			return err
		}
		p.others = append(p.others, other)
	}
	p.kubeadm, err = testbed.BuildKubeadm(ctx, os.Stderr)
	return err
}

func runIsolated(m *testing.M) (code int, err error) {
	if err := testbed.EnterIsolation(); err != nil {
		return 0, err
	}
	built = programsIn(os.Getenv(programsVariable))
	if err := built.buildKubernetes(context.Background()); err != nil {
		return 0, err
	}
	// The tests mostly wait: as many at once as there are, whatever the number of processors.
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil {
		return 0, err
	}
	return m.Run(), nil
}
