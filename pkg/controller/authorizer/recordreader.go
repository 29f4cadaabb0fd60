// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

const (
	// readTimeout bounds a live read, and readAge how long all requests of a node share its result.
	// readsPerSecond and readBurst limit the reads for all nodes together.
	readTimeout, readAge      = 500 * time.Millisecond, time.Second
	readsPerSecond, readBurst = 20, 50
)

// errTooMany says why there was no live read.
var errTooMany = errors.New("too many live reads of records")

// recordReader reads the records of one node live. Nodes whose certificate the lists do not know
// are rare, unless an attacker invents them. Then each node costs one read per second.
type recordReader struct {
	api    client.Reader
	config *Config
	rate   flowcontrol.RateLimiter

	mu     sync.Mutex
	byNode map[string]*recordRead
}

func newRecordReader(api client.Reader, config *Config) *recordReader {
	return &recordReader{api: api, config: config, rate: flowcontrol.NewTokenBucketRateLimiter(readsPerSecond, readBurst), byNode: map[string]*recordRead{}}
}

// recordRead is one live read.
type recordRead struct {
	began time.Time
	done  chan struct{} // closed when the fields below are set
	named map[string]Certificate
	err   error
}

// isNamed reports whether a record of the node names one of the credentials as not revoked.
func (r *recordReader) isNamed(ctx context.Context, node string, credentials []string) (bool, error) {
	read := r.shared(node)
	select {
	case <-read.done:
		return names(read.named, node, credentials), read.err
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// shared returns a read of the node's records that began less than readAge ago. It starts one if
// there is none.
func (r *recordReader) shared(node string) *recordRead {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if read, ok := r.byNode[node]; ok && now.Sub(read.began) < readAge {
		return read
	}
	read := &recordRead{began: now, done: make(chan struct{})}
	if !r.rate.TryAccept() {
		read.err = errTooMany
		close(read.done)
		return read
	}
	for other, old := range r.byNode {
		if now.Sub(old.began) >= readAge {
			delete(r.byNode, other)
		}
	}
	r.byNode[node] = read
	go r.read(read, node)
	return read
}

func (r *recordReader) read(read *recordRead, node string) {
	defer close(read.done)
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout) // the result is for all requests
	defer cancel()
	fields := client.MatchingFields{v1alpha1.FieldNodeName: node}
	if r.config.Cluster != "" {
		fields[v1alpha1.FieldCluster] = r.config.Cluster
	}
	found := &v1alpha1.NodeAttestationList{}
	if read.err = r.api.List(ctx, found, client.InNamespace(r.config.Namespace), fields); read.err != nil {
		return
	}
	read.named = map[string]Certificate{}
	for i := range found.Items {
		for _, c := range found.Items[i].Status.Certificates {
			if !c.Revoked {
				read.named[revocation.CredentialPrefix+c.SHA256] = Certificate{found.Items[i].Spec.NodeName, c.NotAfter.Time}
			}
		}
	}
}
