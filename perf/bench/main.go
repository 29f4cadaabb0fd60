// SPDX-License-Identifier: Apache-2.0

// bench measures what the plugin costs. Each figure is compared with another one, and the same run
// measures both in turns: machines are noisy, and a ratio is not. It prints one table. It fails if
// a step did not happen, for example if a credential is missing. Of the figures, only the valid
// path's has a limit, which -limit sets.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// module is the folder of the product's module.
const module = ".."

func main() {
	b := &bench{}
	flag.IntVar(&b.pairs, "pairs", 201, "runs of each side of the valid path")
	flag.IntVar(&b.attestations, "attestations", 61, "attestations with each kind of EK")
	flag.IntVar(&b.enrolments, "enrolments", 25, "first certificates on each side")
	flag.DurationVar(&b.traffic, "traffic", time.Minute, "how long requests are sent while the signer is dead")
	flag.IntVar(&b.fleet, "fleet", 10_000, "nodes of the simulated fleet")
	flag.Float64Var(&b.limit, "limit", 4.5, "fail if the valid path takes more than this times the floor: more than on a machine that has ten other things to do")
	flag.IntVar(&b.clients, "clients", 5000, "nodes that ask an overloaded API server")
	flag.Float64Var(&b.capacity, "capacity", 100, "requests a second that it answers")
	flag.IntVar(&b.shedStatus, "status", 0, "overload: only the fleet, with 429 or 503 (default: both, and single nodes)")
	flag.StringVar(&b.plots, "plots", "", "folder for a picture of the valid path beside its layers; empty for none")
	only := flag.String("only", "", "comma-separated measurements, of "+strings.Join(names(), ", ")+" (default: all)")
	flag.Parse()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard) // what the libraries say of slow TPMs is in the table
	quiet := flag.NewFlagSet("", flag.PanicOnError)
	klog.InitFlags(quiet)
	// nor are calls that a busy server did not answer in time errors here
	_ = quiet.Set("stderrthreshold", "FATAL")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// bench is what the measurements share.
type bench struct {
	pairs, attestations, enrolments, fleet int
	clients, shedStatus                    int
	traffic                                time.Duration
	limit, capacity                        float64
	plots                                  string

	dir string
	// Programs, as they are shipped.
	plugin, controller string
	table              table
	// validBars are ratios of the valid path and of its layers to the floor.
	validBars []plot.Bar
}

// measurements are those of the table, in its order.
var measurements = []struct {
	name    string
	measure func(*bench, context.Context) error
}{
	{"valid", (*bench).validPath},
	{"layers", (*bench).validLayers},
	{"tpm", (*bench).tpm},
	{"enrolment", (*bench).enrolment},
	{"stall", (*bench).stall},
	{"jitter", (*bench).jitter},
	{"overload", (*bench).overload},
}

func names() (all []string) {
	for _, m := range measurements {
		all = append(all, m.name)
	}
	return all
}

func (b *bench) run(ctx context.Context, only string) (err error) {
	wanted := names()
	if only != "" {
		wanted = strings.Split(only, ",")
	}
	for _, name := range wanted {
		if !slices.Contains(names(), name) {
			return fmt.Errorf("-only: there is no measurement %q", name)
		}
	}
	if b.pairs < 1 || b.attestations < 1 || b.enrolments < 1 || b.fleet < 1 || b.clients < 1 || b.capacity < 1 || b.traffic < time.Second {
		return errors.New("each measurement needs one round at least, and the traffic a second")
	}
	if b.dir, err = os.MkdirTemp("", "bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	b.plugin, b.controller = filepath.Join(b.dir, "kubelet-authenticator"), filepath.Join(b.dir, "node-attestation-controller")
	if err := errors.Join(
		compile.Program(ctx, module, b.plugin, "./cmd/kubelet-authenticator"),
		controllerprocess.Build(ctx, module, b.controller),
	); err != nil {
		return err
	}
	for _, m := range measurements {
		if !slices.Contains(wanted, m.name) {
			continue
		}
		began := time.Now()
		if err := m.measure(b, ctx); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", m.name, err), b.table.print(os.Stdout))
		}
		fmt.Fprintf(os.Stderr, "measured: %s (%s)\n", m.name, time.Since(began).Round(time.Second))
	}
	return errors.Join(b.table.print(os.Stdout), b.drawValidPath())
}

// drawValidPath draws the layers and the valid path, if both were measured.
func (b *bench) drawValidPath() error {
	if len(b.validBars) != len(layers)+validRuns {
		return nil
	}
	bars := append([]plot.Bar{{Name: "floor: read the file, print it", Value: 1, Group: 1}}, b.validBars[validRuns:]...)
	return plot.Write(b.plots, "valid-path.svg", plot.Bars{
		Title: "A run of the plugin with a valid certificate", Source: plot.Source("make bench ONLY=valid,layers"),
		Value: "wall time, floor = 1 (median of the rounds' ratios)", Bars: append(bars, b.validBars[:validRuns]...),
	}.SVG())
}

// folder makes one below the bench's own.
func (b *bench) folder(name ...string) (string, error) {
	path := filepath.Join(append([]string{b.dir}, name...)...)
	return path, os.MkdirAll(path, 0o700)
}
