// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/rest"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
)

// floodConnections is how many connections file a flood.
const floodConnections = 8

// Flood files requests with a credential, as fast as the API server takes them, until all of count
// are filed, or ctx ends. It returns the number of filed requests.
func Flood(ctx context.Context, t *testing.T, credential *rest.Config, count int, request func(i int) (*certificatesv1.CertificateSigningRequest, error)) int {
	t.Helper()
	var next, filed atomic.Int64
	var filing sync.WaitGroup
	for range floodConnections {
		config := rest.CopyConfig(credential)
		// Clients with one credential share a connection, unless each has a function of its own.
		config.Proxy = func(*http.Request) (*url.URL, error) { return nil, nil }
		api, err := csr.NewClient(config)
		if err != nil {
			t.Error(err)
			break
		}
		filing.Go(func() {
			for i := next.Add(1); i <= int64(count) && ctx.Err() == nil; i = next.Add(1) {
				object, err := request(int(i))
				if err == nil {
					_, err = api.Create(context.WithoutCancel(ctx), object, false)
				}
				if err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
				filed.Add(1)
			}
		})
	}
	filing.Wait()
	return int(filed.Load())
}
