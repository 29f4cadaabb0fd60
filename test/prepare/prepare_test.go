// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// The whole way of a join. The kubelet is held back until the signer has signed. Then it starts as
// an attested node, and the bootstrap credential is gone.
func TestSignerIsLate(t *testing.T) {
	m := newMachine(t, "prepareWait: 30s")
	const late = 2 * time.Second
	wait := meanwhile(func() {
		harness.Eventually(m.t, patience, "a request is filed", func() bool { return len(m.requests()) == 1 })
		time.Sleep(late) // it is held back for so long
		m.sign(m.cluster.ClientCA(), time.Hour)
	})
	first := m.prepare()
	wait()
	first.Want(t, 0, "copied "+m.bootstrap, "wrote "+m.kubeconfig, "wrote "+m.envFile, "waiting up to 30s", "system:node:"+m.name+" has a certificate", "insecure sends no evidence")
	if first.Took < late {
		t.Errorf("it did not wait: %s", first.Took)
	}
	t.Logf("prepare ended %s after it began, with a signer that was %s late", first.Took.Round(time.Millisecond), late)
	if got := m.whoami(); got != "system:node:"+m.name {
		t.Errorf("kubectl with kubelet.conf is %q", got)
	}
	if env, err := os.ReadFile(m.envFile); err != nil || string(env) != "KUBELET_KUBECONFIG_ARGS=--kubeconfig="+m.kubeconfig+" --rotate-certificates=false\n" {
		t.Errorf("%q %v", env, err)
	}
	if m.copied() {
		t.Error("the copy of the bootstrap credential is still there")
	}
	if _, err := os.Stat(m.bootstrap); err != nil {
		t.Errorf("kubeadm's own file was deleted: %v", err)
	}
	if m.certs.Worker().Alive() {
		t.Error("it left a worker behind, which systemd would kill")
	}

	// The kubelet restarts: kubeadm's file is still there, then deleted.
	for range 2 {
		before := m.tree()
		again := m.prepare()
		again.Want(t, 0)
		if again.Stderr != "" || again.Took > 5*time.Second {
			t.Errorf("after %s: %s", again.Took, again.Stderr)
		}
		if after := m.tree(); after != before {
			t.Errorf("the second one changed\n%s\nto\n%s", before, after)
		}
		m.must(os.RemoveAll(m.bootstrap))
	}
	if got := len(m.requests()); got != 1 {
		t.Errorf("%d requests were filed", got)
	}
}

// Without a signer the unit fails, with the reason. Once the same request is signed, the unit
// succeeds.
func TestHonestFailure(t *testing.T) {
	m := newMachine(t, "prepareWait: 5s")
	for range 2 { // systemd starts it again
		r := m.prepare()
		r.Want(t, 23, "waiting up to 5s", "signer "+m.signer+" has not issued a certificate", "hint: ")
		if r.Took < 5*time.Second || r.Took > 15*time.Second {
			t.Errorf("it took %s", r.Took)
		}
		harness.KillWorker(t, m.certs) // as systemd does
	}
	if !m.copied() {
		t.Error("there is no copy of the bootstrap credential")
	}
	m.must(os.Remove(m.bootstrap)) // kubeadm has given up, and been cleaned up after
	m.configure("prepareWait: 30s")
	wait := meanwhile(func() { m.sign(m.cluster.ClientCA(), time.Hour) })
	r := m.prepare()
	wait()
	r.Want(t, 0, "has a certificate")
	if got := m.whoami(); got != "system:node:"+m.name || len(m.requests()) != 1 || m.copied() {
		t.Errorf("%q, %d requests, copied %v", got, len(m.requests()), m.copied())
	}
}

func TestDenied(t *testing.T) {
	m := newMachine(t, "prepareWait: 4s")
	wait := meanwhile(func() {
		harness.Eventually(m.t, patience, "a request is filed", func() bool { return len(m.requests()) == 1 })
		m.must(m.cluster.Deny(t.Context(), m.requests()[0].Name, "NotOurs", "not in the inventory"))
	})
	r := m.prepare()
	wait()
	r.Want(t, 21, "not in the inventory")
	if !m.copied() || len(m.requests()) != 1 {
		t.Errorf("copied %v, %d requests", m.copied(), len(m.requests()))
	}
}

// A control plane's API server is one of the pods that its kubelet starts.
func TestControlPlaneIsNotHeldBack(t *testing.T) {
	m := newMachine(t)
	m.write(filepath.Join(m.manifests, kubelet.ServerManifest), nil)
	r := m.prepare()
	r.Want(t, 0, "wrote "+m.kubeconfig, "wrote "+m.envFile)
	if r.Took > 5*time.Second || strings.Contains(r.Stderr, "waiting") || len(m.requests()) != 0 {
		t.Errorf("after %s: %s", r.Took, r.Stderr)
	}
	// The kubelet's first run of the plugin gets the certificate.
	wait := meanwhile(func() { m.sign(m.cluster.ClientCA(), time.Hour) })
	got := m.whoami()
	wait()
	if got != "system:node:"+m.name {
		t.Errorf("%q", got)
	}
	harness.Eventually(m.t, patience, "the worker deletes the copy", func() bool { return !m.copied() })
}

func enrolled(t *testing.T, settings ...string) *machine {
	t.Helper()
	m := newMachine(t, append(settings, "prepareWait: 30s")...)
	wait := meanwhile(func() { m.sign(m.cluster.ClientCA(), time.Hour) })
	m.prepare().Want(t, 0, "has a certificate")
	wait()
	m.must(os.Remove(m.bootstrap))
	return m
}

// expire replaces the certificate by one that has run out, as that of a machine that was off.
func (m *machine) expire() {
	m.t.Helper()
	m.install(m.cluster.ClientCA(), -time.Minute)
}

func (m *machine) install(ca *testbed.CA, lifetime time.Duration) {
	m.t.Helper()
	issued, err := ca.IssueClient("system:node:"+m.name, []string{"system:nodes"}, time.Now().Add(-time.Hour), time.Now().Add(lifetime))
	m.must(err)
	pair, err := cache.ParsePair(append(append([]byte{}, issued.CertPEM...), issued.KeyPEM...))
	m.must(err)
	pair.Origin = &cache.Origin{Server: m.cluster.ServerURL(), CertificateAuthorityData: m.cluster.ServerCA()}
	lock, err := m.certs.TryLock()
	m.must(err)
	defer lock.Unlock()
	m.must(lock.Install(pair))
}

// The machine was off for too long. Without a credential that says so; with the one that was kept
// it comes back. The unit fails in neither case.
func TestCertificateHasRunOut(t *testing.T) {
	t.Run("the copy was deleted", func(t *testing.T) {
		m := enrolled(t)
		m.expire()
		m.prepare().Want(t, 0)
		m.run().Want(t, 17, "no bootstrap kubeconfig", "hint: ")
	})
	t.Run("the copy was kept", func(t *testing.T) {
		m := enrolled(t, "keepBootstrapCredential: true")
		if !m.copied() {
			t.Fatal("the copy was deleted")
		}
		m.expire()
		before := time.Now()
		m.prepare().Want(t, 0)
		if took := time.Since(before); took > 5*time.Second {
			t.Errorf("it blocked for %s", took)
		}
		wait := meanwhile(func() { m.sign(m.cluster.ClientCA(), time.Hour) })
		got := m.whoami()
		wait()
		if got != "system:node:"+m.name || !m.copied() {
			t.Errorf("%q, copied %v", got, m.copied())
		}
	})
}

// A worker that was killed after it had installed the certificate leaves the copy to the next
// prepare; so does a change of mind.
func TestCopyIsDeletedLater(t *testing.T) {
	m := enrolled(t, "keepBootstrapCredential: true")
	m.configure()
	m.prepare().Want(t, 0, "deleted bootstrap.kubeconfig")
	if m.copied() {
		t.Error("it is still there")
	}
}

// A certificate that the API server rejects has not served: what could get another is kept.
func TestCopyOutlivesARejectedCertificate(t *testing.T) {
	m := enrolled(t, "keepBootstrapCredential: true")
	m.configure()
	stranger, err := testbed.NewCA("stranger")
	m.must(err)
	m.install(stranger, time.Hour)
	m.prepare().Want(t, 0, "is kept for now", "401")
	if !m.copied() {
		t.Error("it is gone")
	}
}

// An API server that is away holds nothing up once the node has had a certificate.
func TestAPIServerIsAwayLater(t *testing.T) {
	m := enrolled(t, "keepBootstrapCredential: true")
	m.configure()
	proxy, err := testbed.NewProxy(strings.TrimPrefix(m.cluster.ServerURL(), "https://"))
	m.must(err)
	config, err := clientcmd.LoadFromFile(m.kubeconfig)
	m.must(err)
	for _, cluster := range config.Clusters {
		cluster.Server = proxy.URL()
	}
	m.must(clientcmd.WriteToFile(*config, m.kubeconfig))
	m.must(proxy.Close())
	r := m.prepare()
	r.Want(t, 0, "is kept for now")
	if r.Took > 5*time.Second || !m.copied() {
		t.Errorf("after %s, copied %v", r.Took, m.copied())
	}
}

// A broken configuration file stops a join at once; it stops no node that has a certificate.
func TestConfigurationIsBroken(t *testing.T) {
	m := newMachine(t)
	broken := func() { m.configure("nonsense: 1") }
	broken()
	r := m.prepare()
	r.Want(t, 10, "nonsense")
	if r.Took > 5*time.Second {
		t.Errorf("it waited for %s", r.Took)
	}
	if _, err := os.Stat(m.envFile); err != nil {
		t.Errorf("the kubelet could join without attestation: %v", err)
	}
	m.configure("prepareWait: 30s")
	wait := meanwhile(func() { m.sign(m.cluster.ClientCA(), time.Hour) })
	m.prepare().Want(t, 0, "has a certificate")
	wait()
	broken()
	m.must(os.RemoveAll(filepath.Dir(m.envFile))) // after a boot
	m.prepare().Want(t, 0, "nonsense", "wrote "+m.envFile)
	m.expire()
	m.prepare().Want(t, 0, "nonsense")
}

// kubeadm reset and a join to another cluster: the node is held back until that one has admitted
// it.
func TestJoinsAnotherCluster(t *testing.T) {
	m := enrolled(t)
	other, err := startCluster(t.Context())
	m.must(err)
	t.Cleanup(func() {
		if err := other.Stop(); err != nil {
			t.Error(err)
		}
	})
	m.must(os.Remove(m.kubeconfig)) // kubeadm reset
	m.join(other)
	m.configure("prepareWait: 5s")
	m.prepare().Want(t, 23, "copied "+m.bootstrap, "wrote "+m.kubeconfig+", for the cluster at "+other.ServerURL())
	harness.KillWorker(t, m.certs)
	m.configure("prepareWait: 30s")
	wait := meanwhile(func() { m.sign(other.ClientCA(), time.Hour) })
	m.prepare().Want(t, 0, "has a certificate")
	wait()
	if got := m.whoami(); got != "system:node:"+m.name || m.copied() {
		t.Errorf("%q, copied %v", got, m.copied())
	}
	before := m.tree()
	m.prepare().Want(t, 0)
	if after := m.tree(); after != before {
		t.Errorf("the next one changed\n%s\nto\n%s", before, after)
	}
}

// A reset ends the worker, takes what is ours, and leaves what is not.
func TestReset(t *testing.T) {
	m := newMachine(t, "prepareWait: 5s")
	m.prepare().Want(t, 23)
	worker := m.certs.Worker()
	if !worker.Alive() {
		t.Fatal("there is no worker to be ended")
	}
	stranger := m.certs.File("stranger")
	m.write(stranger, []byte("precious"))
	m.must(os.Symlink(stranger, m.certs.File(cache.CurrentFile)))
	reset := func(args ...string) harness.Result {
		return m.run(append([]string{"reset", "--yes", "--env-file=" + m.envFile}, args...)...)
	}

	r := reset()
	r.Want(t, 0, "removed "+m.envFile, "removed "+m.certs.File(cache.PendingFile), "removed "+m.certs.File(cache.BootstrapFile), "removed "+m.certs.File(cache.LockFile),
		"kept: "+m.certs.File(cache.CurrentFile)+": is a symbolic link")
	if worker.Alive() {
		t.Error("the worker lives")
	}
	if data, err := os.ReadFile(stranger); err != nil || string(data) != "precious" {
		t.Errorf("%q %v", data, err)
	}
	if kubelet.ReadKubeconfig(m.kubeconfig, "").Kind != kubelet.Ours {
		t.Error("kubelet.conf is gone, and nobody asked for that")
	}
	m.must(os.Remove(m.certs.File(cache.CurrentFile)))
	m.must(os.Remove(stranger))

	reset("--kubeconfig").Want(t, 0, "removed "+m.kubeconfig, "removed "+m.certs.Path())
	before := m.tree()
	reset("--kubeconfig").Want(t, 0, "nothing to remove")
	if after := m.tree(); after != before {
		t.Errorf("the second one changed\n%s\nto\n%s", before, after)
	}
	m.write(m.kubeconfig, m.cluster.AdminKubeconfig())
	reset("--kubeconfig").Want(t, 0, "kept", "client certificate")
	if _, err := os.Stat(m.kubeconfig); err != nil {
		t.Error(err)
	}
}

// A kubeconfig that is written by hand works with client-go, whether its cluster comes from a
// bootstrap kubeconfig or from flags.
func TestKubeconfigByHand(t *testing.T) {
	m := enrolled(t)
	m.join(m.cluster)
	ca := filepath.Join(m.root, "ca.crt")
	m.write(ca, m.cluster.ServerCA())
	for name, args := range map[string][]string{
		"from the bootstrap kubeconfig": nil,
		"from flags":                    {"--server=" + m.cluster.ServerURL(), "--certificate-authority=" + ca},
	} {
		t.Run(name, func(t *testing.T) {
			m.must(os.Remove(m.kubeconfig))
			printed := m.run(append([]string{"kubeconfig"}, args...)...)
			printed.Want(t, 0)
			m.run(append([]string{"kubeconfig", "--write=" + m.kubeconfig}, args...)...).Want(t, 0, "wrote "+m.kubeconfig)
			if data, err := os.ReadFile(m.kubeconfig); err != nil || string(data) != printed.Stdout {
				t.Errorf("%v: written and printed differ", err)
			}
			if got := m.whoami(); got != "system:node:"+m.name {
				t.Errorf("%q", got)
			}
			before := m.tree()
			m.run(append([]string{"kubeconfig", "--write=" + m.kubeconfig}, args...)...).Want(t, 0, "is as it should be")
			if after := m.tree(); after != before {
				t.Error("it was touched")
			}
		})
	}
	m.write(m.kubeconfig, m.cluster.AdminKubeconfig())
	m.run("kubeconfig", "--write="+m.kubeconfig).Want(t, 29, "client certificate", "hint: ")
}
