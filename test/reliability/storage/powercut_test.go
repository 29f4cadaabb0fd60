// SPDX-License-Identifier: Apache-2.0

package storage

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/reliability"
)

const (
	storageSigner = "example.com/storage"
	// mostCalls is more than a run and its worker make.
	mostCalls = 200
)

// powerCut is one power cut, before a call from 1, with one of the losses that may follow.
type powerCut struct {
	t          *testing.T
	call, loss int
	// one is set if only one loss is tried: what POSIX promises, if the power is cut after the last
	// call.
	one bool
	// late is set if there were fewer calls. Then the power was cut after the last one. losses is
	// how many losses there are.
	late   bool
	losses int
	// gap is the time from the boot to the first credential.
	gap time.Duration
	// when describes it.
	when string
}

// cutEachCall tries a power cut before each call with each loss, and one after the last call. The
// short form has some of the calls, each with another loss.
func cutEachCall(t *testing.T, try func(*powerCut)) {
	t.Helper()
	stride := reliability.Size(t, "power-cut", 7, 1)
	cuts, worst := 0, time.Duration(0)
	for call, late := 1, false; !late; call += stride {
		if call > mostCalls {
			t.Fatalf("more than %d calls", mostCalls)
		}
		for loss, losses := 0, 1; loss < losses; loss++ {
			c := &powerCut{t: t, call: call, loss: loss, one: stride > 1}
			if c.one {
				c.loss = call / stride
			}
			try(c)
			cuts++
			late, worst = c.late, max(worst, c.gap)
			if !c.one {
				losses = c.losses
			}
		}
	}
	t.Logf("%d power cuts; at most %s from a boot to a credential", cuts, worst.Round(time.Millisecond))
	if cuts < 2 {
		t.Errorf("only %d power cuts", cuts)
	}
}

// cut cuts the power of a node that has done what it could until then, and chooses what is left.
func (c *powerCut) cut(b *boot) image {
	c.t.Helper()
	losses := b.powerOff(c.t)
	calls := b.disk.changes()
	c.late, c.losses = len(calls) < c.call-1, len(losses)
	if c.one && c.late {
		c.loss = 0
	}
	left := losses[c.loss%len(losses)]
	c.when = fmt.Sprintf("power cut before call %d, after %q, %s", c.call, slices.Concat([]string{"boot"}, calls)[len(calls)], left.name)
	return left.left
}

func (c *powerCut) errorf(format string, args ...any) {
	c.t.Helper()
	c.t.Errorf("%s: %s", c.when, fmt.Sprintf(format, args...))
}

func needsRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a file system and namespaces need root")
	}
}

// The power is cut before each call of run and worker that writes, and the disk keeps what it may
// keep. After the next boot a node that had a certificate prints one at once. The others get
// theirs, from the one request that was filed before. No file is set aside, even if a write was
// torn.
func TestPowerIsCutBeforeEachCall(t *testing.T) {
	needsRoot(t)
	startSigner(t, storageSigner, anHour)
	for _, kind := range []string{"enrolment", "renewal"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			cutEachCall(t, func(c *powerCut) {
				n := newDiskNode(t, fmt.Sprintf("%d-%d", c.call, c.loss))
				holds := image{}
				var old *cache.Pair
				if kind == "renewal" {
					old = n.duePair()
					holds["certs"], holds["certs/"+cache.CurrentFile] = nil, marshal(t, old)
				}
				c.tryPlugin(n, holds, old)
			})
		})
	}
}

func marshal(t testing.TB, pair *cache.Pair) []byte {
	t.Helper()
	content, err := pair.Marshal()
	harness.Must(t, err)
	return content
}

// tryPlugin boots a node that holds a certificate which is due, or none. It cuts the power, and
// boots the node again.
func (c *powerCut) tryPlugin(n *diskNode, holds image, old *cache.Pair) {
	t := c.t
	n.powerOn(holds)
	n.disk.cutPowerBefore(c.call)
	n.runUntilCut(n.plugin())
	left, calls := c.cut(n.boot), n.disk.changes()

	n.powerOn(left)
	defer n.powerOff(t)
	began := time.Now()
	r := n.run()
	if r.Code != 0 && (old != nil || isInstalled(calls)) {
		c.errorf("the certificate is lost: exit code %d: %s", r.Code, r.Stderr)
	}
	harness.Eventually(t, time.Minute, c.when+": a new certificate is printed", func() bool {
		if r.Code != 0 {
			r = n.run()
			return false
		}
		checkCredential(t, n.name, r, time.Now())
		if c.gap == 0 {
			c.gap = time.Since(began)
		}
		if old == nil || !bytes.Equal(r.Leaf.Raw, old.Leaf.Raw) {
			return true
		}
		r = n.run()
		return false
	})
	harness.Eventually(t, harness.Soon, "the worker ends", func() bool { return !n.busy(t) })
	if filed := forget(t, n.name); filed != 1 {
		c.errorf("%d requests were filed", filed)
	}
	names, err := filepath.Glob(n.certs().Path() + "/*set-aside*")
	if err != nil || len(names) > 0 {
		c.errorf("set aside: %s, %v", names, err)
	}
}

// isInstalled reports whether the worker has gone on after it had made the new certificate durable.
func isInstalled(calls []string) bool {
	renamed := slices.Index(calls, "rename to "+cache.CurrentFile)
	return renamed >= 0 && slices.ContainsFunc(calls[renamed+1:], func(call string) bool { return !strings.HasPrefix(call, "fsync ") })
}

// The power is cut before each call of "prepare" that writes. After the next boot it sets all
// right. Once it has succeeded, the copy of the bootstrap kubeconfig is kept, and kubeadm may
// delete its own.
func TestPowerIsCutInPrepare(t *testing.T) {
	needsRoot(t)
	cutEachCall(t, func(c *powerCut) {
		n := newDiskNode(t, fmt.Sprintf("%d-%d", c.call, c.loss))
		bootstrap, err := os.ReadFile(n.bootstrap)
		harness.Must(t, err)
		n.powerOn(image{"etc": nil, "etc/bootstrap-kubelet.conf": bootstrap, "etc/manifests": nil, "etc/manifests/" + kubelet.ServerManifest: {}})
		n.disk.cutPowerBefore(c.call)
		n.runUntilCut(n.prepare())
		left := c.cut(n.boot)
		if c.late {
			delete(left, "etc/bootstrap-kubelet.conf") // as kubeadm does when the kubelet is healthy
		}
		n.powerOn(left)
		defer n.powerOff(t)
		if r := harness.Run(t, n.prepare()); r.Code != 0 {
			c.errorf("exit code %d: %s", r.Code, r.Stderr)
		}
		if k := kubelet.ReadKubeconfig(filepath.Join(n.disk.path, "etc/kubelet.conf"), shared.testPlugin); k.Kind != kubelet.Ours {
			c.errorf("kubelet.conf: %v", k.Problem)
		}
		if data, err := os.ReadFile(n.certs().File(cache.BootstrapFile)); err != nil || !kubelet.IsCopy(data) {
			c.errorf("there is no copy: %v", err)
		}
	})
}

// The power is cut before each call of "reset" that writes. Once it has said that it removed the
// keys, they are gone. If it was cut short, the next one removes the rest.
func TestPowerIsCutInReset(t *testing.T) {
	needsRoot(t)
	cutEachCall(t, func(c *powerCut) {
		n := newDiskNode(t, fmt.Sprintf("%d-%d", c.call, c.loss))
		n.powerOn(image{
			"certs": nil, "certs/" + cache.CurrentFile: marshal(t, n.duePair()), "certs/" + cache.PendingFile: []byte("{}"),
			"certs/" + cache.StateFile: []byte("{}"), "certs/" + cache.LogFile: []byte("x"), "certs/" + cache.LockFile: []byte("x"),
		})
		n.disk.cutPowerBefore(c.call)
		n.runUntilCut(n.reset())
		left := c.cut(n.boot)
		if c.late && len(left) > 0 {
			c.errorf("these are back: %q", left)
		}
		n.powerOn(left)
		defer n.powerOff(t)
		if r := harness.Run(t, n.reset()); r.Code != 0 {
			c.errorf("exit code %d: %s", r.Code, r.Stderr)
		}
		if names, err := filepath.Glob(n.disk.path + "/*"); err != nil || len(names) > 0 {
			c.errorf("left: %s, %v", names, err)
		}
	})
}
