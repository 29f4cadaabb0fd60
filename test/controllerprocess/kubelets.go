// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// KubeletPrograms are the paths of what a suite with real kubelets starts.
type KubeletPrograms struct {
	Plugin, Controller string
	Commands           string // the folder with further commands, such as kubectl-attest
	Kubelet            compile.KubeletComponents
}

func kubeletProgramsIn(dir string) KubeletPrograms {
	return KubeletPrograms{
		Plugin: filepath.Join(dir, "kubelet-authenticator"), Controller: filepath.Join(dir, "node-attestation-controller"), Commands: filepath.Join(dir, "commands"),
	}
}

// MainWithKubelets is for the TestMain of a suite with real kubelets, as testbed.MainIsolated. It
// builds plugin, controller and the named commands of the module, and sets built to their paths
// before the tests run.
func MainWithKubelets(tests interface{ Run() int }, module string, built *KubeletPrograms, commands ...string) int {
	build := func(ctx context.Context, dir string) error {
		made := kubeletProgramsIn(dir)
		err := errors.Join(
			os.Mkdir(made.Commands, 0o700),
			compile.Program(ctx, module, made.Plugin, "./cmd/kubelet-authenticator"),
			Build(ctx, module, made.Controller))
		for _, name := range commands {
			err = errors.Join(err, compile.Program(ctx, module, filepath.Join(made.Commands, name), "./cmd/"+name))
		}
		return err
	}
	return testbed.MainIsolated(tests, 4, build, func(ctx context.Context, dir string) (err error) {
		*built = kubeletProgramsIn(dir)
		built.Kubelet, err = compile.Kubelet(ctx, os.Stderr)
		return err
	})
}

// Machines is the inventory of a cluster to which tests that run at once add machines.
type Machines struct {
	mu        sync.Mutex
	documents bytes.Buffer
}

// Add adds documents, and writes the whole inventory into the cluster.
func (m *Machines) Add(ctx context.Context, cp *testbed.ControlPlane, documents []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.documents.Write(documents)
	return SetInventory(ctx, cp, m.documents.Bytes())
}
