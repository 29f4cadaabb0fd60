// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"cmp"
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/nodeaccess"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/authenticator/enrol"
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

// testAuthenticator is that of node "a" at noon, asked by nobody, with a provider that renews and
// nothing on disk.
func testAuthenticator(t testing.TB) *Authenticator {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	node := &nodestate.Node{
		Access: nodeaccess.Node{
			Dir: cache.At(certs), Bootstrap: filepath.Join(t.TempDir(), "none"), KubeletBootstrap: kubelet.BootstrapFile,
			AskedBy: ExecInfoVariable, UserAgent: "test/1",
		},
		Note: nodestate.NewNoteFile(filepath.Join(t.TempDir(), "run"), certs),
		Name: "a",
		Now:  func() time.Time { return plugintest.Noon },
	}
	a := &Authenticator{
		node: node,
		enroller: &enrol.Enroller{
			Node: node, SignerName: "example.com/signer", ReviewTimeout: time.Minute, Step: func(enrol.Step) {},
			// a run kills workers that outlive it, and here they are this very process
			Deadline: 24 * time.Hour,
		},
		waitTimeout: 10 * time.Second, renewalWait: 10 * time.Second,
		startWorker: func() (process.ID, error) {
			return process.ID{}, errors.New("no worker was to be started")
		},
	}
	a.use(plugintest.Provider{CanRenew: true, Signer: "example.com/signer"})
	return a
}

// use gives the node another provider, nil for none.
func (a *Authenticator) use(p provider.Provider) {
	if a.enroller.Provider = p; p == nil {
		a.node.Access.Provider, a.node.Access.Renews = "", false
		return
	}
	a.node.Access.Provider, a.node.Access.Renews = p.Name(), p.Renews()
}

// ask makes this client-go's request.
func (a *Authenticator) ask(exec ExecInfo) {
	a.exec, a.node.Access.Asked, a.node.Access.Insecure = exec, exec.origin(), exec.insecure()
	a.node.Access.AskedBy = cmp.Or(exec.Source, ExecInfoVariable)
}
