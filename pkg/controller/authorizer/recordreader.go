// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/util/flowcontrol"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
)

const (
	// readTimeout bounds a live read. The API server waits 200 ms longer for the answer
	// (packaging/authorizer/authorization.yaml). readAge is how long all requests with a
	// certificate share the result, and failedAge how long they share an error.
	readTimeout, readAge, failedAge = 300 * time.Millisecond, 10 * time.Second, time.Second
	// readsPerSecond and readBurst limit the reads for all nodes together. A read costs an API
	// server as much as a list of all records.
	readsPerSecond, readBurst = 20, 50
)

// errTooMany says why there was no live read.
var errTooMany = errors.New("too many live reads of records")

// recordReader reads the records of one node live. Certificates that the lists do not know are
// rare, unless an attacker makes them. Then each costs one read in readAge.
//
// Requests share a read only if they have the same certificate. The record has a new certificate
// before the node gets it, so each read for that certificate finds it. A read for another one may
// be older.
type recordReader struct {
	api    client.Reader
	config *Config
	rate   flowcontrol.RateLimiter

	mu    sync.Mutex
	reads map[string]*recordRead // by node and credentials
}

func newRecordReader(api client.Reader, config *Config) *recordReader {
	return &recordReader{api: api, config: config, rate: flowcontrol.NewTokenBucketRateLimiter(readsPerSecond, readBurst), reads: map[string]*recordRead{}}
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
	read := r.shared(node, credentials)
	select {
	case <-read.done:
		return names(read.named, node, credentials), read.err
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// isFresh reports whether requests may still share the read.
func (read *recordRead) isFresh(now time.Time) bool {
	age := readAge
	select {
	case <-read.done:
		if read.err != nil {
			age = failedAge
		}
	default:
	}
	return now.Sub(read.began) < age
}

// shared returns the read for these credentials of a node, if it is fresh. Otherwise it starts one.
func (r *recordReader) shared(node string, credentials []string) *recordRead {
	key, now := strings.Join(append([]string{node}, credentials...), " "), time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if read, ok := r.reads[key]; ok && read.isFresh(now) {
		return read
	}
	read := &recordRead{began: now, done: make(chan struct{})}
	if !r.rate.TryAccept() {
		read.err = errTooMany
		close(read.done)
		return read
	}
	for other, old := range r.reads {
		if !old.isFresh(now) {
			delete(r.reads, other)
		}
	}
	r.reads[key] = read
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
				read.named[revocation.X509Prefix+c.SHA256] = Certificate{found.Items[i].Spec.NodeName, c.NotAfter.Time}
			}
		}
	}
}
