// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// behindProxy puts a proxy that can break connections between the node and the API server.
func (n *node) behindProxy(t *testing.T) *testbed.Proxy {
	t.Helper()
	proxy, err := testbed.NewProxy(n.ServerURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = proxy.Close() })
	n.server = proxy.URL()
	token, err := n.CreateBootstrapToken(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	harness.WriteFile(t, n.bootstrap, n.BootstrapKubeconfig(token, testbed.WithServer(proxy.URL())))
	return proxy
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
