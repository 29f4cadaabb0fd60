// SPDX-License-Identifier: Apache-2.0

package nodestatus

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// testNode is node "a" at noon, with a provider that renews and nothing on disk.
func testNode(t testing.TB) *Node {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	n := &Node{
		Node: &nodestate.Node{
			Access: nodeaccess.Node{Dir: cache.At(certs), Bootstrap: filepath.Join(t.TempDir(), "none"), KubeletBootstrap: kubelet.BootstrapFile},
			Note:   nodestate.NewNoteFile(filepath.Join(t.TempDir(), "run"), certs),
			Name:   "a",
			Now:    func() time.Time { return plugintest.Noon },
		},
		SignerName: "example.com/signer",
	}
	n.use(plugintest.Provider{CanRenew: true, Signer: "example.com/signer"})
	return n
}

// use gives the node another provider, nil for none.
func (n *Node) use(p provider.Provider) {
	if n.Provider = p; p == nil {
		n.Access.Provider, n.Access.Renews = "", false
		return
	}
	n.Access.Provider, n.Access.Renews = p.Name(), p.Renews()
}
