// SPDX-License-Identifier: Apache-2.0

package authenticator

import (
	"errors"
	"io"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/process"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/plugintest"
	"github.com/kubelet-authenticator/kubelet-authenticator/internal/unittest"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
)

// TestMain keeps what workers log for operators out of the tests' output, and lets tests that wait
// do so together on machines with few CPUs.
func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	unittest.Main(m)
}

var asker = process.ID{PID: 4711, Start: 1234}

// testAuthenticator is that of node "a" at noon, asked by nobody, with a provider that renews and
// nothing on disk.
func testAuthenticator(t testing.TB) *Authenticator {
	t.Helper()
	certs := filepath.Join(t.TempDir(), "certs")
	return &Authenticator{
		provider: plugintest.Provider{CanRenew: true, Signer: "example.com/signer"}, signerName: "example.com/signer",
		nodeName: "a", dir: cache.At(certs),
		bootstrapKubeconfig: filepath.Join(t.TempDir(), "none"), kubeletBootstrap: kubelet.BootstrapFile,
		waitTimeout: 10 * time.Second, renewalWait: 10 * time.Second, reviewTimeout: time.Minute,
		note:      newNoteFile(filepath.Join(t.TempDir(), "run"), certs),
		now:       func() time.Time { return plugintest.Noon },
		step:      func(Step) {},
		userAgent: "test/1",
		// a run kills workers that outlive it, and here they are this very process
		workerDeadline: 24 * time.Hour,
		startWorker: func() (process.ID, error) {
			return process.ID{}, errors.New("no worker was to be started")
		},
	}
}
