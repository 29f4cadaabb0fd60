// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

const (
	// firstPause is the time between two looks whether it is still too early for another worker.
	firstPause = 500 * time.Millisecond
	// workerEnd is how long a worker that has installed its certificate may take to write that down.
	workerEnd = 10 * time.Second
)

// AwaitFirst waits until the node has a certificate that can be used, having workers fetch it as a Run does, one after the other. After wait it
// gives up with the reason why there is none yet: a *Failure. Until then remark is told each reason as it comes up, and what else people should know.
func AwaitFirst(ctx context.Context, o Options, wait time.Duration, remark func(error)) (*x509.Certificate, error) {
	if o.invalid != nil {
		return nil, AsFailure(o.invalid)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	deadline := time.Now().Add(wait)
	answer := &Answer{}
	remarked := map[string]bool{}
	var last Reason
	for {
		s := o.look()
		if s.final {
			return nil, AsFailure(s.lack)
		}
		if s.pair != nil && !s.rejected && !s.foreign {
			o.awaitWorkerEnd()
			return s.pair.Leaf, nil
		}
		after, failure := o.awaitWorker(ctx, s, time.Until(deadline), answer)
		for _, r := range answer.Remarks {
			if !remarked[r.Error()] { // each worker that is started brings the provider's
				remarked[r.Error()] = true
				remark(r)
			}
		}
		answer.Remarks = nil
		if failure == nil && after.pair != nil {
			continue
		}
		if ctx.Err() != nil {
			return nil, o.whyNotYet(wait)
		}
		if reason := AsFailure(failure).Reason; reason != last {
			last = reason
			remark(failure)
		}
		select {
		case <-ctx.Done():
			return nil, failure
		case <-time.After(firstPause):
		}
	}
}

// awaitWorkerEnd lets a worker write down that it has succeeded: systemd kills what an ExecStartPre leaves running.
func (o *Options) awaitWorkerEnd() {
	for end := time.Now().Add(workerEnd); o.dir.Worker().Alive() && time.Now().Before(end); {
		time.Sleep(pollInterval)
	}
}

// DiscardBootstrap deletes the copy of the bootstrap kubeconfig that "prepare" made, unless it is to be kept, once the API server has taken the
// node's certificate: a worker does so itself, but may have been killed before. It reports whether the file was deleted.
func DiscardBootstrap(ctx context.Context, o Options) (bool, error) {
	if o.invalid != nil {
		return false, nil // it may be to be kept
	}
	if _, err := o.readCopy(); err != nil {
		return false, ignoreMissing(err)
	}
	s := o.look()
	if s.pair == nil || s.foreign || s.rejected {
		return false, nil
	}
	lock, err := o.dir.TryLock()
	if errors.Is(err, cache.ErrLocked) {
		return false, nil // a worker is at it
	}
	if err != nil {
		return false, err
	}
	defer lock.Unlock()
	return o.discardBootstrap(ctx, lock, s.pair)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readCopy returns the copy that may be deleted. The error is fs.ErrNotExist where there is none.
func (o *Options) readCopy() ([]byte, error) {
	if o.keepBootstrap {
		return nil, fs.ErrNotExist
	}
	data, _, err := o.dir.Read(cache.BootstrapFile)
	if err == nil && !kubelet.IsCopy(data) {
		err = fs.ErrNotExist // the operator's
	}
	return data, err
}

// discardBootstrap asks the API server first: a certificate that it rejects is no reason to throw away what could get another. That this very
// credential has served is written down before it is deleted, so that it is not copied again.
func (o *Options) discardBootstrap(ctx context.Context, lock *cache.Lock, pair *cache.Pair) (bool, error) {
	copied, err := o.readCopy()
	if err != nil {
		return false, ignoreMissing(err)
	}
	same, err := o.isForCluster(pair)
	if err != nil {
		return false, fmt.Errorf("%s is kept: %w", o.dir.File(cache.BootstrapFile), err)
	}
	if !same {
		return false, nil // the node is to join that one yet
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	review, err := o.review(ctx, pair)
	if err == nil && !accepts(review, pair) {
		err = fmt.Errorf("the API server answers the node's certificate with status %d, user %.253q", review.Status, review.Username)
	}
	if err != nil {
		return false, fmt.Errorf("%s is kept for now: %w", o.dir.File(cache.BootstrapFile), bareURL(err))
	}
	state, err := o.dir.State()
	if err != nil {
		return false, err
	}
	state.SpentBootstrap = kubelet.Fingerprint(copied)
	if err := lock.SetState(state); err != nil {
		return false, err
	}
	return true, lock.RemoveBootstrap()
}

// isForCluster reports whether the copy is for the cluster that is asked about the certificate.
func (o *Options) isForCluster(pair *cache.Pair) (bool, error) {
	k := kubelet.ReadKubeconfig(o.dir.File(cache.BootstrapFile), "")
	if err := errors.Join(k.Problem, k.ClusterProblem); err != nil {
		return false, err
	}
	asked, err := o.ownAccess(pair)
	return err == nil && asked.Cluster.SameCluster(k.Cluster), err
}
