// SPDX-License-Identifier: Apache-2.0

// bench compares the plugin's valid path with a program that only reads and prints the file, and attestations with the kinds of
// EK, side by side in one run: machines are noisy, a ratio is not.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

func main() {
	pairs := flag.Int("pairs", 101, "interleaved pairs of runs")
	limit := flag.Float64("limit", 3.0, "fail if the ratio is above this")
	flag.Parse()
	if err := run(context.Background(), *pairs, *limit); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, pairs int, limit float64) error {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	plugin, floor, peak := filepath.Join(dir, "kubelet-authenticator"), filepath.Join(dir, "floor"), filepath.Join(dir, "peak")
	if err := errors.Join(
		testbed.GoBuild(ctx, "..", plugin, "./cmd/kubelet-authenticator"),
		testbed.GoBuild(ctx, ".", floor, "./bench/floor"),
		testbed.GoBuild(ctx, ".", peak, "./bench/peak"),
	); err != nil {
		return err
	}
	certDir := filepath.Join(dir, "certs")
	server, err := install(certDir)
	if err != nil {
		return err
	}
	env := append(os.Environ(), "KUBERNETES_EXEC_INFO="+server)
	config := filepath.Join(dir, "config.yaml")
	content := fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: insecure\nnodeName: bench\ncertDir: %s\nruntimeDir: %s\n", certDir, filepath.Join(dir, "run"))
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		return err
	}
	programs := []*program{
		{name: "floor: read and print the file", args: []string{floor, filepath.Join(certDir, cache.CurrentFile)}, env: os.Environ()},
		{name: "plugin, by flags", args: []string{plugin, "--provider=insecure", "--node-name=bench", "--cert-dir=" + certDir, "--runtime-dir=" + filepath.Join(dir, "run")}, env: env},
		{name: "plugin, by configuration file", args: []string{plugin, "--config=" + config}, env: env},
	}
	for i := range pairs + 5 {
		for _, p := range programs {
			if err := p.once(i >= 5); err != nil { // the first few warm the page cache
				return err
			}
		}
	}
	for _, p := range programs {
		if err := p.measureMemory(peak); err != nil {
			return err
		}
	}
	return errors.Join(report(programs, plugin, limit), benchTPM(ctx, pairs))
}

func report(programs []*program, plugin string, limit float64) error {
	info, err := os.Stat(plugin)
	if err != nil {
		return err
	}
	base := programs[0].median()
	fmt.Printf("%-32s %10s %8s %12s\n", "valid path", "median", "ratio", "peak memory")
	for _, p := range programs {
		fmt.Printf("%-32s %7.2f ms %8.2f %9.1f MB\n", p.name, milliseconds(p.median()), float64(p.median())/float64(base), float64(p.peak)/1024)
	}
	fmt.Printf("plugin, stripped: %.2f MB\n", float64(info.Size())/1e6)
	if ratio := float64(programs[1].median()) / float64(base); ratio > limit {
		return fmt.Errorf("the valid path takes %.2f times the floor, more than %.2f", ratio, limit)
	}
	return nil
}

// program is one side of the comparison.
type program struct {
	name      string
	args, env []string
	times     []time.Duration
	peak      int // KiB
}

func (p *program) once(count bool) error {
	cmd := exec.Command(p.args[0], p.args[1:]...) //nolint:gosec // G204: built above
	cmd.Env = p.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	took := time.Since(began)
	if err != nil || stdout.Len() == 0 {
		return fmt.Errorf("%s: %w: %s", strings.Join(p.args, " "), err, stderr.String())
	}
	if count {
		p.times = append(p.times, took)
	}
	return nil
}

// measureMemory takes the median of eleven runs below a small parent.
func (p *program) measureMemory(peak string) error {
	var kib []int
	for range 11 {
		cmd := exec.Command(peak, p.args...) //nolint:gosec // G204: built above
		cmd.Env = p.env
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		n, err := strconv.Atoi(string(out))
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		kib = append(kib, n)
	}
	slices.Sort(kib)
	p.peak = kib[len(kib)/2]
	return nil
}

func (p *program) median() time.Duration { return median(p.times) }
