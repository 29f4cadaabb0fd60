// SPDX-License-Identifier: Apache-2.0

// Package storage tests what the plugin keeps on its disk, and how it uses its clock. The tests are
// power cuts, wrong clocks, and thousands of rotations, on a real control plane.
package storage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// bed is what all tests of the package share.
type bed struct {
	// A machine with any clock trusts the API server.
	*testbed.ControlPlane
	// testPlugin is built from the library with a provider that renews.
	testPlugin string
	// clockPlugin and clockTestPlugin build the product, and the test plugin once more, with clocks
	// that can be moved.
	clockPlugin, clockTestPlugin func() (string, error)
}

// built is the time of the commit that the program with another clock claims to be built from.
var built = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

var shared *bed

func TestMain(m *testing.M) {
	code, err := runAll(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "storage:", err)
		code = 1
	}
	os.Exit(code)
}

func runAll(m *testing.M) (code int, err error) {
	ctx := context.Background()
	testbed.Parallel(4) // they wait for each other's processes
	dir, err := os.MkdirTemp("", "storage-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	b := &bed{testPlugin: filepath.Join(dir, "testplugin")}
	b.clockPlugin = sync.OnceValues(func() (string, error) {
		program := filepath.Join(dir, "kubelet-authenticator-clock")
		return program, compile.ProgramWithClock(ctx, "../../..", program, "./cmd/kubelet-authenticator", fmt.Sprintf("-ldflags=-s -w -X main.commitTime=%d", built.Unix()))
	})
	b.clockTestPlugin = sync.OnceValues(func() (string, error) {
		program := filepath.Join(dir, "testplugin-clock")
		return program, compile.ProgramWithClock(ctx, "../..", program, "./testplugin")
	})
	if err := compile.Program(ctx, "../..", b.testPlugin, "./testplugin"); err != nil {
		return 0, err
	}
	if b.ControlPlane, err = testbed.Start(ctx, testbed.Options{Progress: os.Stderr, AnyTime: true}); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.Stop()) }()
	if err := b.BindKubeadmBootstrap(ctx); err != nil {
		return 0, err
	}
	shared = b
	return m.Run(), nil
}
