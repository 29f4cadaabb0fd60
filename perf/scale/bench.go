// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// module is the product's, as seen from where this is run.
const module = ".."

// bench is what the measurements share.
type bench struct {
	size float64 // what numbers are multiplied by

	// plots is the folder for pictures of the results, empty for none.
	plots string

	// profiles is the folder for profiles, empty for none, and profileAddress where the controller
	// serves its own then.
	profiles, profileAddress string

	dir, binary string // made when first asked for
	failed      []error
}

// close removes all files.
func (b *bench) close() {
	if b.dir != "" {
		if err := os.RemoveAll(b.dir); err != nil {
			fmt.Fprintln(os.Stderr, "scale:", err)
		}
	}
}

// sized is a number of machines or of requests, as told by -size, and one at least.
func (b *bench) sized(n int) int { return max(1, int(math.Round(float64(n)*b.size))) }

// expect notes what does not hold that should. The measurement goes on, and its table is printed
// all the same.
func (b *bench) expect(holds bool, format string, args ...any) {
	if holds {
		return
	}
	err := brief(fmt.Errorf(format, args...))
	fmt.Println("DOES NOT HOLD:", err)
	b.failed = append(b.failed, err)
}

// briefLines is how much is said of what has gone wrong: a thousand machines may say the same.
const briefLines = 8

func brief(err error) error {
	lines := strings.Split(err.Error(), "\n")
	if len(lines) <= briefLines {
		return err
	}
	return fmt.Errorf("%s\n... and %d lines more", strings.Join(lines[:briefLines], "\n"), len(lines)-briefLines)
}

// say is for remarks below a table.
func (b *bench) say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// note is for what is going on meanwhile.
func (b *bench) note(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "scale: "+format+"\n", args...)
}

// folder returns a new one that goes with the bench.
func (b *bench) folder(name string) (string, error) {
	if b.dir == "" {
		dir, err := os.MkdirTemp("", "scale-")
		if err != nil {
			return "", err
		}
		b.dir = dir
	}
	return os.MkdirTemp(b.dir, name+"-")
}

// controllerBinary builds node-attestation-controller, once.
func (b *bench) controllerBinary(ctx context.Context) (string, error) {
	if b.binary == "" {
		dir, err := b.folder("bin")
		if err != nil {
			return "", err
		}
		binary := filepath.Join(dir, "node-attestation-controller")
		build := func() error { return controllerprocess.Build(ctx, module, binary) }
		if b.profiles != "" {
			build = func() error {
				return errors.Join(b.chooseProfileAddress(), compile.Program(ctx, ".", binary, "./scale/profiled"))
			}
		}
		if err := build(); err != nil {
			return "", err
		}
		b.binary = binary
	}
	return b.binary, nil
}

// withControlPlane has a function use a control plane with the manifests that are shipped, without
// a controller, and stops it.
func (b *bench) withControlPlane(ctx context.Context, options testbed.Options, use func(cp *testbed.ControlPlane) error) (err error) {
	if options.Progress == nil {
		options.Progress = os.Stderr
	}
	cp, err := testbed.Start(ctx, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.Stop()) }()
	if err := controllerprocess.Install(ctx, cp, module); err != nil {
		return err
	}
	return use(cp)
}

// draw puts a picture of a result into the folder for pictures. With other numbers than those of
// the documents it draws nothing.
func (b *bench) draw(name string, svg []byte) error {
	if b.size != 1 {
		return nil
	}
	return plot.Write(b.plots, name, svg)
}

// source says below a picture where its figures are from.
func (b *bench) source(measurement string) string {
	return plot.Source("make bench-scale ONLY=" + measurement)
}

// describe says on what this is measured, and how busy that is already.
func describe() {
	fmt.Printf("%d CPUs (%s), %s, load when started %s\n", runtime.NumCPU(), plot.CPUModel(), runtime.Version(), plot.Load())
}
