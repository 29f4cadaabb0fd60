// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/oddrequest"
)

// floodConnections is how many connections file a flood.
const floodConnections = 8

// flood uses the bootstrap token that all machines share, and files as much as it can. It files the
// largest requests that the API server accepts, odd ones, and hellos of TPMs that no inventory has.
func (c *campaign) flood() {
	c.t.Helper()
	api, err := csr.NewClient(c.asToken())
	harness.Must(c.t, err)
	victim := c.machines[0]
	largest, err := oddrequest.Largest(victim.Name, func(r *certificatesv1.CertificateSigningRequest) error {
		_, err := api.Create(c.ctx, r, true)
		return err
	})
	harness.Must(c.t, err)
	odd, err := oddrequest.All(victim.Name, victim.ProviderID())
	harness.Must(c.t, err)
	stranger, err := oddrequest.NewStranger()
	harness.Must(c.t, err)
	proof, err := oddrequest.Proof("node-csr-none")
	harness.Must(c.t, err)
	next := func(n int) (*certificatesv1.CertificateSigningRequest, error) {
		switch {
		case n%20 < 2:
			r := largest.DeepCopy()
			r.Name = csr.NewName()
			return r, nil
		case n%20 < 10:
			signer := attestation.HelloSignerName
			if n%2 == 0 {
				signer = tpm.SignerName
			}
			return odd[n%len(odd)].Object(signer, proof)
		case n%20 < 15:
			return stranger.Hello(victim.Name)
		default:
			return stranger.Hello(fmt.Sprintf("stranger-%06d", n))
		}
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.size.flood)
	defer cancel()
	c.log.say("a flood begins; the largest requests have %d bytes, and %d of metadata", len(largest.Spec.Request), len(largest.Annotations["a"]))
	c.log.flooded.from = time.Now()
	var numbers, filed, refused atomic.Int64
	var wait sync.WaitGroup
	for range floodConnections {
		config := c.asToken()
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil } // a connection of its own
		api, err := csr.NewClient(config)
		harness.Must(c.t, err)
		wait.Go(func() {
			for n := numbers.Add(1); n <= int64(c.size.floodMost) && ctx.Err() == nil; n = numbers.Add(1) {
				object, err := next(int(n))
				if err != nil {
					c.t.Error(err)
					return
				}
				if _, err := api.Create(ctx, object, false); err != nil {
					refused.Add(1)
					continue
				}
				filed.Add(1)
			}
		})
	}
	wait.Wait()
	took := time.Since(c.log.flooded.from)
	<-ctx.Done() // what was filed is still being decided on
	c.log.flooded.repaired = time.Now()
	c.log.say("the flood ends: %d requests were filed in %s, the API server refused %d", filed.Load(), round(took), refused.Load())
	c.await("all have a certificate that the flood held up", func() bool { return c.atIt(c.log.flooded.repaired) == 0 && c.isBacklogGone() })
	c.log.flooded.recovered = time.Now()
	c.log.say("the requests of the flood are deleted from now on: %d", c.oracle.deleteFlood())
	c.await("the requests of the flood are deleted", c.oracle.floodIsDeleted)
	c.log.floodDeleted = time.Now()
	c.log.say("they were deleted in %s", round(c.log.floodDeleted.Sub(c.log.flooded.recovered)))
}
