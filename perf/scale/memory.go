// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/perf/plot"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

const (
	// crowded is how many machines enrol at once.
	crowded = 20
	// idleBefore is how long after its start the memory of an idle process is read.
	idleBefore = 4 * time.Second
	// maxMemory is the limit in packaging/kubernetes, in MiB.
	maxMemory = 512
)

// memoryOf is the memory of a replica that leads, and of one that stands by.
func memoryOf(ctx context.Context, b *bench) error {
	c := newCurve("records and machines", "idle, MiB", "heap, MiB", "after enrolments", "most", "heap", "standby, MiB", "heap", "goroutines")
	err := b.withSite(ctx, siteOptions{machines: crowded}, func(s *site) error {
		records, err := controllerprocess.RecordClient(ctx, s.cp)
		if err != nil {
			return err
		}
		if _, err := s.enrol(ctx, 0); err != nil {
			return err
		}
		made := 0
		for _, count := range []int{0, 1_000, 5_000, 20_000} {
			if count > 0 {
				count = b.sized(count)
			}
			s.note("%d records", count)
			if err := s.fillRecords(ctx, records, made, count); err != nil {
				return err
			}
			made = count
			if err := s.replicas(ctx, count, c); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.finish()
	if most, ok := number(c.figures[len(c.figures)-1][3]); !ok || most > maxMemory {
		b.expect(false, "the controller had %.0f MiB at most", most)
	}
	return b.draw("controller-memory.svg", plot.Lines{
		Title: "Memory of the controller by machines", Source: b.source("memory"),
		X: "machines, each with a record and two certificates", Y: "resident memory, MiB",
		Series: []plot.Series{c.series("leader, 20 machines enrol", 3), c.series("leader, idle", 0), c.series("standby", 5)},
		Limit:  maxMemory, LimitLabel: "limit in packaging/kubernetes, 512 MiB",
	}.SVG())
}

// replicas measures two of them, with machines of so many in the inventory as there are records.
func (s *site) replicas(ctx context.Context, count int, c *curve) (err error) {
	content, err := s.inventoryOf(ctx, count)
	if err != nil {
		return err
	}
	file := filepath.Join(s.dir, fmt.Sprintf("inventory-%d.yaml", count))
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return err
	}
	configure := func(c *config.Config) {
		c.Inventory = config.Inventory{File: file}
		c.LeaderElection.Enabled = true
	}
	if err := s.restart(ctx, configure); err != nil {
		return err
	}
	if _, err := s.enrol(ctx, 0); err != nil { // it leads: the other one stands by
		return err
	}
	leader := s.controller
	if err := s.startController(ctx, configure); err != nil {
		return errors.Join(err, leader.Kill())
	}
	standby := s.controller
	s.controller = leader
	// so that the Lease is given back
	defer func() { err = errors.Join(err, standby.Kill(), leader.Stop()) }()
	if err := sleep(ctx, idleBefore); err != nil {
		return err
	}
	idle, err := memory(leader.Process(), "VmRSS")
	if err != nil {
		return err
	}
	before, err := readController(ctx, leader)
	if err != nil {
		return err
	}
	if err := s.enrolAtOnce(ctx); err != nil {
		return err
	}
	after, err := readController(ctx, leader)
	if err != nil {
		return err
	}
	used, err1 := memory(leader.Process(), "VmRSS")
	most, err2 := memory(leader.Process(), "VmHWM")
	other, err3 := memory(standby.Process(), "VmRSS")
	others, err4 := readController(ctx, standby)
	const heap = "go_memstats_heap_inuse_bytes"
	c.add(count, idle, mib(before, heap), used, most, mib(after, heap), other, mib(others, heap), after.sum("go_goroutines"))
	return errors.Join(err1, err2, err3, err4)
}

// enrolAtOnce has all machines enrol.
func (s *site) enrolAtOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, enrolTimeout)
	defer cancel()
	errs := make([]error, len(s.machines))
	var wait sync.WaitGroup
	for i := range s.machines {
		wait.Go(func() { _, errs[i] = s.enrol(ctx, i) })
	}
	wait.Wait()
	return errors.Join(errs...)
}
