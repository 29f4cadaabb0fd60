// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// maxSize is what the stripped binary may have; the plugin's own tests hold it to that.
const maxSize = 18_000_000

// validRuns is how many ways to run the plugin are compared with the floor.
const validRuns = 2

// warmUps are the runs that are not counted: they fill the page cache.
const warmUps = 5

// program is one side of the valid path.
type program struct {
	args, env []string
	times     []time.Duration
	peaks     []int // KiB
}

// validPath compares the run of a plugin that has a certificate with the floor, a Go program that
// reads the same file and prints it.
func (b *bench) validPath(ctx context.Context) error {
	floor, peak := filepath.Join(b.dir, "floor"), filepath.Join(b.dir, "peak")
	if err := errors.Join(compile.Program(ctx, ".", floor, "./bench/floor"), compile.Program(ctx, ".", peak, "./bench/peak")); err != nil {
		return err
	}
	programs, err := b.validPrograms(floor)
	if err != nil {
		return err
	}
	if err := inTurns(ctx, programs, b.pairs); err != nil {
		return err
	}
	for range 11 {
		for _, p := range programs {
			if err := p.measureMemory(ctx, peak); err != nil {
				return err
			}
		}
	}
	info, err := os.Stat(b.plugin)
	if err != nil {
		return err
	}
	base, flags, file := programs[0], programs[1], programs[2]
	const against = "floor"
	b.table.add(
		compared("valid path, by flags", flags.times, against, base.times),
		compared("valid path, by configuration file", file.times, against, base.times),
		row{
			what: "valid path, peak memory", figure: megabytes(median(file.peaks)), against: against + ", " + megabytes(median(base.peaks)),
			ratio: fmt.Sprintf("%.2f", over(median(file.peaks), median(base.peaks))),
		},
		row{
			what: "stripped binary", figure: fmt.Sprintf("%.2f MB", float64(info.Size())/1e6), against: fmt.Sprintf("limit, %.2f MB", maxSize/1e6),
			ratio: fmt.Sprintf("%.2f", over(float64(info.Size()), maxSize)),
		},
	)
	b.validBars = append(b.validBars,
		plot.Bar{Name: "plugin, by flags", Value: median(rounds(flags.times, base.times))},
		plot.Bar{Name: "plugin, by configuration file", Value: median(rounds(file.times, base.times))})
	if ratio := median(rounds(flags.times, base.times)); ratio > b.limit {
		return fmt.Errorf("it takes %.2f times the floor, more than %.2f", ratio, b.limit)
	}
	return nil
}

// validPrograms are the floor, the plugin by flags and the plugin by a configuration file, with a
// certificate that is valid for a year.
func (b *bench) validPrograms(floor string) ([]*program, error) {
	ca, err := testbed.NewCA("bench")
	if err != nil {
		return nil, err
	}
	now := time.Now()
	client, err := ca.IssueClient("system:node:bench", []string{"system:nodes"}, now.Add(-time.Minute), now.AddDate(1, 0, 0))
	if err != nil {
		return nil, err
	}
	certs, run := filepath.Join(b.dir, "valid", "certs"), filepath.Join(b.dir, "valid", "run")
	cluster := cache.Origin{Server: "https://127.0.0.1:6443", CertificateAuthorityData: ca.CertPEM()}
	if err := install(certs, client, cluster); err != nil {
		return nil, err
	}
	config := filepath.Join(b.dir, "valid", "config.yaml")
	content := fmt.Sprintf("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: insecure\nnodeName: bench\ncertDir: %s\nruntimeDir: %s\n", certs, run)
	if err := os.WriteFile(config, []byte(content), 0o600); err != nil {
		return nil, err
	}
	ask, err := execInfo(cluster)
	if err != nil {
		return nil, err
	}
	env := append(os.Environ(), ask)
	return []*program{
		{args: []string{floor, filepath.Join(certs, cache.CurrentFile)}, env: env},
		{args: []string{b.plugin, "--provider=insecure", "--node-name=bench", "--cert-dir=" + certs, "--runtime-dir=" + run}, env: env},
		{args: []string{b.plugin, "--config=" + config}, env: env},
	}, nil
}

// inTurns runs each program so often.
func inTurns(ctx context.Context, programs []*program, often int) error {
	for i := range often + warmUps {
		for _, p := range programs {
			if err := p.once(ctx, i >= warmUps); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *program) once(ctx context.Context, count bool) error {
	cmd := exec.CommandContext(ctx, p.args[0], p.args[1:]...) //nolint:gosec // G204: built above
	cmd.Env = p.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	took := time.Since(began)
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(p.args, " "), err, stderr.String())
	}
	if !strings.Contains(stdout.String(), "-----BEGIN CERTIFICATE-----") {
		return fmt.Errorf("%s: it printed no certificate: %s", strings.Join(p.args, " "), stderr.String())
	}
	if count {
		p.times = append(p.times, took)
	}
	return nil
}

// measureMemory runs the program below a small parent.
func (p *program) measureMemory(ctx context.Context, peak string) error {
	cmd := exec.CommandContext(ctx, peak, p.args...) //nolint:gosec // G204: built above
	cmd.Env = p.env
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(p.args, " "), err)
	}
	kib, err := strconv.Atoi(string(out))
	p.peaks = append(p.peaks, kib)
	return err
}

func megabytes(kib int) string { return fmt.Sprintf("%.1f MB", float64(kib)/1024) }
