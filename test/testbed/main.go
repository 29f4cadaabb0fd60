// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Main is for the TestMain of a package whose tests share one control plane, which exits with the code that it returns. It starts the control plane,
// has setUp use it, with a directory that goes when the tests have ended, runs the tests, and stops it.
func Main(tests interface{ Run() int }, setUp func(ctx context.Context, cp *ControlPlane, dir string) error) int {
	code, err := runMain(tests, setUp)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbed:", err)
		return 1
	}
	return code
}

func runMain(tests interface{ Run() int }, setUp func(context.Context, *ControlPlane, string) error) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "tests-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cp, err := Start(ctx, Options{Progress: os.Stderr})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, cp.Stop()) }()
	if err := setUp(ctx, cp, dir); err != nil {
		return 0, err
	}
	return tests.Run(), nil
}
