// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/inventory"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
)

// idleFor is how long is looked at what an idle controller costs.
const idleFor = 6 * time.Second

// growthNodes has a controller with inventories of several sizes, in a file: a ConfigMap holds 1
// MiB.
func growthNodes(ctx context.Context, b *bench) error {
	load := newCurve("machines in the inventory", "bytes each", "parsed in", "allocated, MiB", "ready after", "RSS, MiB", "heap, MiB", "idle CPU, 1/1000")
	use := newCurve("machines in the inventory", "enrolment, median", "slowest", "controller CPU", "API server CPU", "one judgement")
	printed := 0
	err := b.withSite(ctx, siteOptions{machines: 2}, func(s *site) error {
		own, err := fleet.Inventory(ctx, s.machines...)
		if err != nil {
			return err
		}
		printed = len(own) / len(s.machines)
		for _, count := range []int{1_000, 10_000, 100_000} {
			if err := s.withMachines(ctx, b.sized(count), load, use); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	load.finish()
	use.finish()
	shortest := len(listed(1000)) / 1000
	b.say("1 MiB, what a ConfigMap holds, is %d machines as short as they can be written (%d bytes), and %d as identify prints them (%d bytes); a file holds 16 MiB",
		(1<<20)/shortest, shortest, (1<<20)/printed, printed)
	return nil
}

func (s *site) withMachines(ctx context.Context, count int, load, use *curve) error {
	content, err := s.inventoryOf(ctx, count)
	if err != nil {
		return err
	}
	file := filepath.Join(s.dir, fmt.Sprintf("inventory-%d.yaml", count))
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return err
	}
	parsed, allocated, err := parse(content)
	if err != nil {
		return err
	}
	s.note("%d machines", count)
	began := time.Now()
	if err := s.restart(ctx, func(c *config.Config) { c.Inventory = config.Inventory{File: file} }); err != nil {
		return err
	}
	ready := time.Since(began)
	idle, _, err := s.idle(ctx, idleFor)
	if err != nil {
		return err
	}
	expense, err := s.expenseOf(ctx, 20)
	if err != nil {
		return err
	}
	rss, err := memory(s.controller.Process(), "VmRSS")
	if err != nil {
		return err
	}
	metrics, err := readController(ctx, s.controller)
	if err != nil {
		return err
	}
	load.add(count, len(content)/count, parsed, allocated, ready, rss, mib(metrics, "go_memstats_heap_inuse_bytes"), idle)
	use.add(count, quantile(expense.took, .5), slowest(expense.took), expense.controller, expense.apiServer, expense.judging)
	return nil
}

// parse returns how long it takes to parse an inventory here, and how many MiB that allocates.
func parse(content []byte) (took time.Duration, allocated float64, err error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	if _, err := inventory.Parse(content); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	runtime.ReadMemStats(&after)
	return took, float64(after.TotalAlloc-before.TotalAlloc) / (1 << 20), nil
}

// inventoryOf is one of so many machines, the site's among them.
func (s *site) inventoryOf(ctx context.Context, count int) ([]byte, error) {
	own, err := fleet.Inventory(ctx, s.machines...)
	if err != nil {
		return nil, err
	}
	return append(listed(max(count-len(s.machines), 1)), own...), nil
}

// listed is an inventory of machines that do not exist, in the shortest form: a name, a provider ID
// and a fingerprint of each.
func listed(count int) []byte {
	var out bytes.Buffer
	out.WriteString("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines:\n")
	for i := range count {
		fmt.Fprintf(&out, "- nodeName: %s\n  providerID: %s\n  eks:\n  - fingerprint: %q\n", absentName(i), absentProviderID(i), absentEK(i))
	}
	return out.Bytes()
}

func absentName(i int) string { return fmt.Sprintf("absent-%06d", i) }

func absentProviderID(i int) string { return fmt.Sprintf("test://absent-%06d", i) }

func absentEK(i int) string { return fmt.Sprintf("%x", sha256.Sum256(fmt.Append(nil, "EK ", i))) }
