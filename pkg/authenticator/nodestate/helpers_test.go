// SPDX-License-Identifier: Apache-2.0

package nodestate

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
)

// testNode is node "a" at noon, with a provider that renews and nothing on disk.
func testNode(t testing.TB) *Node {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	return &Node{
		Access: nodeaccess.Node{Dir: cache.At(certs), Provider: "fake", Renews: true},
		Note:   NewNoteFile(filepath.Join(t.TempDir(), "run"), certs),
		Name:   "a",
		Now:    func() time.Time { return plugintest.Noon },
	}
}
