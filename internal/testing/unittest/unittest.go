// SPDX-License-Identifier: Apache-2.0

// Package unittest is the TestMain of packages that start goroutines.
package unittest

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// parallel is how many tests of a package run at once. They wait for TPMs and time limits, so few
// processors are enough. -parallel wins.
const parallel = "8"

// Main runs the tests of a package, and fails if one of them leaves a goroutine behind: that
// goroutine would run beside later tests, and change what they see. leftOver are those that may be
// left. It does not return.
func Main(m *testing.M, leftOver ...goleak.Option) {
	flag.Parse()
	if flag.Lookup("test.fuzz").Value.String() != "" { // the fuzzer's own goroutines would be reported
		os.Exit(m.Run())
	}
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", parallel); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	// klog's own, which writes its buffer each few seconds.
	leftOver = append(leftOver, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
	if err := goleak.Find(leftOver...); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, "a test has left goroutines behind:", err)
		code = 1
	}
	os.Exit(code)
}
