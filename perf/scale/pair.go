// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	leaseName = "node-attestation-controller"
	// deposed bounds the 24 s that a killed leader is missed for (DESIGN.md), on a busy machine.
	deposed      = 45 * time.Second
	pollInterval = 20 * time.Millisecond
)

// replica is one process of the controller.
type replica struct {
	*controllerprocess.Controller
	name string
}

// replicas starts processes of the controller as they are shipped, but for what configure changes,
// and returns when all could decide. stop ends them, and reports a right that they lacked.
func (b *bench) replicas(ctx context.Context, cp *testbed.ControlPlane, count int, configure func(*config.Config)) (all []*replica, stop func() error, err error) {
	stop = func() error {
		var wrong []error
		for _, r := range all {
			wrong = append(wrong, r.Kill(), r.complaint())
		}
		return errors.Join(wrong...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, stop())
		}
	}()
	binary, err := b.controllerBinary(ctx)
	if err != nil {
		return nil, stop, err
	}
	for i := range count {
		name := string(rune('a' + i))
		dir, err := b.folder("replica-" + name)
		if err != nil {
			return all, stop, err
		}
		c, err := controllerprocess.New(controllerprocess.Options{ControlPlane: cp, Dir: dir, Binary: binary, Configure: configure, Args: []string{"--leader-identity=" + name}})
		if err != nil {
			return all, stop, err
		}
		r := &replica{c, name}
		all = append(all, r)
		if err := r.Start(ctx); err != nil {
			return all, stop, err
		}
	}
	for _, r := range all {
		if err := r.Ready(ctx); err != nil {
			return all, stop, err
		}
	}
	return all, stop, nil
}

// complaint is what the log says of a right that is missing.
func (r *replica) complaint() error {
	log, err := os.ReadFile(r.LogFile())
	if err != nil {
		return fmt.Errorf("replica %s: %w", r.name, err)
	}
	if bytes.Contains(log, []byte("forbidden")) {
		return fmt.Errorf("replica %s lacks a right: %s", r.name, r.LogTail())
	}
	return nil
}

// leads reports whether it holds the Lease, as far as it knows.
func (r *replica) leads(ctx context.Context) bool {
	metrics, err := r.Metrics(ctx)
	return err == nil && strings.Contains(metrics, `leader_election_master_status{name="`+leaseName+`"} 1`)
}

// leader waits for the one that leads.
func leader(ctx context.Context, replicas []*replica) (*replica, error) {
	ctx, cancel := context.WithTimeout(ctx, deposed)
	defer cancel()
	for {
		for _, r := range replicas {
			if r.leads(ctx) {
				return r, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for a leader: %w", ctx.Err())
		case <-time.After(pollInterval):
		}
	}
}
