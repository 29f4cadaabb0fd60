// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
)

// fullVariable is the environment variable that switches on the tests with Full, by the value
// "full".
const fullVariable = "KUBELET_AUTHENTICATOR_TEST_CLUSTERAPI"

// IsFull reports whether make test-clusterapi runs the tests.
func IsFull() bool { return os.Getenv(fullVariable) == "full" }

// Full skips a test unless make test-clusterapi runs it. It is for tests with Cluster API's
// managers, or with machines that boot.
func Full(t testing.TB) {
	t.Helper()
	if !IsFull() {
		t.Skipf("make test-clusterapi runs it (%s=full)", fullVariable)
	}
}

// Main is for the TestMain of a package whose tests share one control plane. TestMain must exit
// with the returned code. It starts the control plane, calls setUp with a temporary directory, runs
// the tests, and stops the control plane.
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

// Parallel has a package run so many of its parallel tests at once. It is for suites whose tests
// wait more than they compute: Go's own default is the number of processors.
func Parallel(count int) {
	flag.Parse()
	if err := flag.Set("test.parallel", strconv.Itoa(count)); err != nil {
		panic(err) // testing has that flag
	}
}

// programsVariable has the folder with the built programs, for the tests in their namespaces.
const programsVariable = "KUBELET_AUTHENTICATOR_TEST_PROGRAMS"

// MainIsolated is for the TestMain of a package that starts real kubelets, which exits with the
// code that it returns. It runs the tests in namespaces of their own, parallel of them at once,
// since they mostly wait. The namespaces have no network, so everything is built before. build puts
// the product's programs into a folder. find is called before and inside. It builds or finds the
// Kubernetes programs of a node, and takes the product's programs from the folder. Without root it
// runs no test, and reports that.
func MainIsolated(tests interface{ Run() int }, parallel int, build, find func(ctx context.Context, dir string) error) int {
	code, err := runMainIsolated(tests, parallel, build, find)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbed:", err)
		return 1
	}
	return code
}

func runMainIsolated(tests interface{ Run() int }, parallel int, build, find func(context.Context, string) error) (code int, err error) {
	ctx := context.Background()
	switch {
	case os.Geteuid() != 0:
		fmt.Fprintf(os.Stderr, "%s: SKIPPED, NO TEST WITH A REAL KUBELET HAS RUN: a kubelet and its namespaces need root\n", os.Args[0])
		return 0, nil
	case Isolated():
		if err := EnterIsolation(); err != nil {
			return 0, err
		}
		if err := find(ctx, os.Getenv(programsVariable)); err != nil {
			return 0, err
		}
		Parallel(parallel)
		return tests.Run(), nil
	}
	dir, err := os.MkdirTemp("", "programs-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err := compile.ControlPlane(ctx, os.Stderr); err != nil {
		return 0, err
	}
	if err := find(ctx, dir); err != nil {
		return 0, err
	}
	if err := build(ctx, dir); err != nil {
		return 0, err
	}
	if err := os.Setenv(programsVariable, dir); err != nil {
		return 0, err
	}
	return Isolate()
}
