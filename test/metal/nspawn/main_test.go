// SPDX-License-Identifier: Apache-2.0

package nspawn

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const module = "../../.."

var (
	programs   Programs
	controller string // the path of its program
	// baked is the image, which takes seconds to make.
	baked = sync.OnceValues(func() (*Image, error) { return Bake(context.Background(), programs) })
)

func TestMain(m *testing.M) {
	if !testbed.IsFull() {
		os.Exit(m.Run()) // each test is skipped: nothing has to be built
	}
	build := func(ctx context.Context, dir string) error {
		if err := controllerprocess.Build(ctx, module, filepath.Join(dir, "node-attestation-controller")); err != nil {
			return err
		}
		return Build(ctx, module, dir)
	}
	os.Exit(testbed.MainIsolated(m, 4, build, func(ctx context.Context, dir string) (err error) {
		controller = filepath.Join(dir, "node-attestation-controller")
		programs, err = Find(ctx, module, dir)
		return err
	}))
}
