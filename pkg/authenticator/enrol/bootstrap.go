// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/reason"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// DiscardBootstrap deletes the copy of the bootstrap kubeconfig that "prepare" made, once the API
// server accepts the node's certificate. It does nothing if the settings keep the copy. A worker
// does the same, but may have been killed before. DiscardBootstrap reports whether the file was
// deleted.
func (e *Enroller) DiscardBootstrap(ctx context.Context) (bool, error) {
	if e.Node.Invalid != nil {
		return false, nil // the settings may keep the copy
	}
	if copied, err := e.readCopy(); err != nil || copied == nil {
		return false, err
	}
	status := e.Node.Load()
	if status.Pair == nil || status.Foreign || status.Rejected {
		return false, nil
	}
	lock, err := e.Node.Dir().TryLock()
	if errors.Is(err, cache.ErrLocked) {
		return false, nil // the worker deletes the copy
	}
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	return e.deleteBootstrap(ctx, lock, status.Pair)
}

// readCopy returns the copy that may be deleted, nil if there is none.
func (e *Enroller) readCopy() ([]byte, error) {
	if e.KeepBootstrap {
		return nil, nil
	}
	data, _, err := e.Node.Dir().Read(cache.BootstrapFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !kubelet.IsCopy(data):
		return nil, nil // the file belongs to the operator
	}
	return data, nil
}

// deleteBootstrap first checks that the API server accepts the certificate: otherwise the copy may
// be needed to get another one. Before it deletes the file, it records that this credential was
// used, so that "prepare" does not copy it again.
func (e *Enroller) deleteBootstrap(ctx context.Context, lock *cache.Lock, pair *cache.Pair) (bool, error) {
	copied, err := e.readCopy()
	if err != nil || copied == nil {
		return false, err
	}
	file := e.Node.Dir().File(cache.BootstrapFile)
	k := kubelet.ReadKubeconfig(file, "")
	if err := errors.Join(k.Problem, k.ClusterProblem); err != nil {
		return false, fmt.Errorf("%s is kept: %w", file, err)
	}
	to, err := e.Node.Access.OwnAccess(pair)
	if err != nil {
		return false, reason.AsFailure(fmt.Errorf("%s is kept: %w", file, err))
	}
	if !to.Cluster.SameCluster(k.Cluster) {
		return false, nil // the copy is for another cluster, which the node will join
	}
	ctx, cancel := context.WithTimeout(ctx, e.ReviewTimeout)
	defer cancel()
	review, err := to.Review(ctx)
	if err == nil && !review.Accepts(pair) {
		err = fmt.Errorf("the API server answers the node's certificate with status %d, user %.253q", review.Status, review.Username)
	}
	if err != nil {
		return false, fmt.Errorf("%s is kept for now: %w", file, reason.BareURL(err))
	}
	state, err := e.Node.Dir().State()
	if err != nil {
		return false, err
	}
	state.SpentBootstrap = kubelet.Fingerprint(copied)
	if err := lock.SetState(state); err != nil {
		return false, err
	}
	return true, lock.RemoveBootstrap()
}
