// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// Backup copies etcd's data directory to a path where there is nothing, for Restore. etcd is
// stopped by a signal meanwhile: the copy is what its disk has after a crash, from which it
// recovers.
func (cp *ControlPlane) Backup(ctx context.Context, path string) (err error) {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.etcd == nil {
		return errors.New("back up etcd: it is another control plane's")
	}
	if err := cp.etcd.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.etcd.Signal(syscall.SIGCONT)) }()
	return copyData(ctx, cp.path(etcdData), path)
}

// Restore replaces etcd's data by a backup, as an operator does. It stops the API servers and etcd,
// and starts them again with the same addresses. It returns when requests work. All writes since
// the backup are lost, and resource versions go back.
func (cp *ControlPlane) Restore(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cp.mu.Lock()
	defer cp.mu.Unlock()
	if cp.stopped || cp.etcd == nil {
		return errors.New("restore etcd: it is not running, or another control plane's")
	}
	for _, s := range cp.apiServers {
		if err := s.kill(); err != nil {
			return err
		}
	}
	if err := errors.Join(cp.etcd.Kill(), os.RemoveAll(cp.path(etcdData))); err != nil {
		return err
	}
	if err := copyData(ctx, path, cp.path(etcdData)); err != nil {
		return err
	}
	if err := cp.runEtcd(ctx); err != nil {
		return err
	}
	for _, s := range cp.apiServers {
		if err := s.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

func copyData(ctx context.Context, from, to string) error {
	// etcd allocates 64 MB for each log in advance.
	if out, err := exec.CommandContext(ctx, "cp", "--recursive", "--sparse=always", "--", from, to).CombinedOutput(); err != nil { //nolint:gosec // G204: paths of ours
		return fmt.Errorf("copy etcd's data: %w\n%s", err, out)
	}
	return nil
}
