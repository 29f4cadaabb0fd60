// SPDX-License-Identifier: Apache-2.0

package enrol

import (
	"io"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/nodestate"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider"
)

// TestMain keeps what workers log for operators out of the tests' output, and lets tests that wait
// do so together on machines with few CPUs.
func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	unittest.Main(m)
}

// testEnroller is that of node "a" at noon, with a provider that renews and nothing on disk.
func testEnroller(t testing.TB) *Enroller {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	e := &Enroller{
		Node: &nodestate.Node{
			Access: nodeaccess.Node{
				Dir: cache.At(certs), Bootstrap: filepath.Join(t.TempDir(), "none"), KubeletBootstrap: kubelet.BootstrapFile,
				AskedBy: "client-go", UserAgent: "test/1",
			},
			Note: nodestate.NewNoteFile(filepath.Join(t.TempDir(), "run"), certs),
			Name: "a",
			Now:  func() time.Time { return plugintest.Noon },
		},
		SignerName: "example.com/signer", ReviewTimeout: time.Minute, Deadline: 24 * time.Hour, Step: func(Step) {},
	}
	e.use(plugintest.Provider{CanRenew: true, Signer: "example.com/signer"})
	return e
}

// use gives the node another provider.
func (e *Enroller) use(p provider.Provider) {
	e.Provider, e.Node.Access.Provider, e.Node.Access.Renews = p, p.Name(), p.Renews()
}
