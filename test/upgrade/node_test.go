// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/cache"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/kubelet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/earlier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// node is a machine that runs the plugin, with every file in its usual place.
type node struct {
	harness.Places
	*cluster
	t    *testing.T
	name string
	bin  string // has its programs
	chip *swtpm.TPM
}

// newNode makes a machine with a release's plugin and with its configuration, which stays. It has
// no credential, and is not in the inventory.
func (c *cluster) newNode(t *testing.T, name string, r earlier.Release, settings string) *node {
	t.Helper()
	n := &node{
		Places: harness.NewPlaces(t), cluster: c, t: t, name: name, bin: t.TempDir(), chip: swtpm.Start(t, swtpm.Options{Certified: []string{"ecc-p256"}, CA: maker}),
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s\n%s", n.name, n.run("kubelet-authenticator version; tail -n 40 "+cache.At(cache.DefaultPath).File(cache.LogFile)).Stdout)
		}
		harness.KillWorker(t, n.kept())
	})
	n.Write(t, "/etc/kubernetes/.keep", "")
	n.configures(settings)
	n.installs(r)
	return n
}

// configures writes the plugin's configuration: the machine's own, and settings.
func (n *node) configures(settings string) {
	n.t.Helper()
	n.Write(n.t, "/etc/kubelet-authenticator/config.yaml", "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: KubeletAuthenticatorConfiguration\nprovider: tpm\nnodeName: "+n.name+
		"\nproviderID: metal://"+n.name+"\ntpmDevice: "+n.chip.Socket()+"\nprepareWait: 20s\nwaitTimeout: 20s\n"+settings)
}

// installs replaces the plugin.
func (n *node) installs(r earlier.Release) {
	n.t.Helper()
	replace(n.t, r.Plugin, filepath.Join(n.bin, "kubelet-authenticator"))
}

// commandLimit bounds a command. What waits in it is over within seconds.
const commandLimit = time.Minute

// run runs a command on the node.
func (n *node) run(script string) harness.Result {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.t.Context()), commandLimit)
	defer cancel()
	line := n.Command(script)
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+n.bin+":"+filepath.Dir(n.Kubectl())+":"+os.Getenv("PATH"), "HOME=/root")
	return harness.Run(n.t, cmd)
}

// must is run for what has to succeed.
func (n *node) must(script string) (stdout string) {
	n.t.Helper()
	r := n.run(script)
	if r.Code != 0 {
		n.t.Fatalf("%s: %s: exit code %d\n%s%s", n.name, script, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// kept is the certificate directory.
func (n *node) kept() cache.Dir { return cache.At(n.At(cache.DefaultPath)) }

// bootstraps puts a bootstrap credential in its place.
func (n *node) bootstraps() {
	n.t.Helper()
	token, err := n.CreateBootstrapToken(n.t.Context(), time.Hour)
	harness.Must(n.t, err)
	n.Write(n.t, kubelet.BootstrapFile, string(n.BootstrapKubeconfig(token)))
}

// joins gets the first certificate, as the kubelet's unit does. The bootstrap credential goes, as
// kubeadm has it.
func (n *node) joins() {
	n.t.Helper()
	n.must("kubelet-authenticator prepare")
	n.must("rm -f " + kubelet.BootstrapFile + " " + cache.At(cache.DefaultPath).File(cache.BootstrapFile))
}

// enrols is joins of a machine that is in the inventory from now on.
func (n *node) enrols() {
	n.t.Helper()
	n.lists(n.must("kubelet-authenticator identify"))
	n.bootstraps()
	n.joins()
}

// pair is what the node has on disk.
func (n *node) pair() *cache.Pair {
	n.t.Helper()
	pair, err := n.kept().Current()
	harness.Must(n.t, err)
	return pair
}

// uses calls the API server as the kubelet does, through the plugin, and returns which certificate
// it was with.
func (n *node) uses() (fingerprint string) {
	n.t.Helper()
	var review authenticationv1.SelfSubjectReview
	harness.Must(n.t, json.Unmarshal([]byte(n.must("kubectl --kubeconfig="+kubelet.KubeconfigFile+" auth whoami -o json")), &review))
	if user := review.Status.UserInfo.Username; user != "system:node:"+n.name {
		n.t.Fatalf("%s: it is %q to the API server", n.name, user)
	}
	id := review.Status.UserInfo.Extra["authentication.kubernetes.io/credential-id"]
	if len(id) != 1 {
		n.t.Fatalf("%s: credential %v", n.name, id)
	}
	return id[0]
}

// filed counts the node's requests.
func (n *node) filed() (hellos, proofs int) {
	n.t.Helper()
	h, p := harness.Requests(n.t, n.ControlPlane, n.name)
	return len(h), len(p)
}

// keeps checks that a certificate which is not due is used, and that nothing is asked for.
func (n *node) keeps() {
	n.t.Helper()
	hellos, proofs := n.filed()
	kept := n.pair().Fingerprint()
	if used := n.uses(); used != "X509SHA256="+kept {
		n.t.Errorf("%s: it uses %s, and has %s", n.name, used, kept)
	}
	harness.WorkerEnds(n.t, n.kept()) // this release's checks for announced renewals
	if h, p := n.filed(); h != hellos || p != proofs || n.pair().Fingerprint() != kept {
		n.t.Errorf("%s: %d hellos and %d proofs, were %d and %d", n.name, h, p, hellos, proofs)
	}
}

// becomesDue enrols the node again, with its present plugin and controller, until its certificate
// is due for renewal. The configured lifetime has to be short. All files on the node are then of
// this plugin. The renewal time is random, so several attempts may be needed.
func (n *node) becomesDue() {
	n.t.Helper()
	for range 30 {
		harness.WorkerEnds(n.t, n.kept())
		harness.Must(n.t, os.RemoveAll(n.kept().Path()))
		n.bootstraps()
		n.joins()
		if earlier.Due(n.pair().Leaf) {
			harness.WorkerEnds(n.t, n.kept())
			return
		}
	}
	n.t.Fatalf("%s: no certificate is due", n.name)
}

// renews uses a node's certificate that is due, and checks that the node gets the next one under
// its existing record.
func (n *node) renews() {
	n.t.Helper()
	due := n.pair()
	record := n.record(n.name)
	used := n.uses()
	harness.Eventually(n.t, patience, n.name+" has renewed", func() bool { return n.pair().Fingerprint() != due.Fingerprint() })
	harness.WorkerEnds(n.t, n.kept())
	// The earlier plugin waits a second for the new certificate.
	if next := n.pair().Fingerprint(); used != "X509SHA256="+due.Fingerprint() && used != "X509SHA256="+next {
		n.t.Errorf("%s: it used %s, and had %s and %s", n.name, used, due.Fingerprint(), next)
	}
	after := n.record(n.name)
	n.sameMachine(record, after)
	if !has(after, due.Fingerprint()) || !has(after, n.pair().Fingerprint()) {
		n.t.Errorf("%s: the record has %+v", n.name, after.Status.Certificates)
	}
}

// sameMachine checks that a record still describes the same machine, and has lost no certificate.
func (n *node) sameMachine(before, after *v1alpha1.NodeAttestation) {
	n.t.Helper()
	if before == nil || after == nil {
		n.t.Fatalf("%s: the record was %v, and is %v", n.name, before, after)
	}
	was, is := before.Spec, after.Spec
	if after.UID != before.UID || was.EK == nil || is.EK == nil || is.EK.Fingerprint != was.EK.Fingerprint {
		n.t.Errorf("%s: the record was %+v %+v, and is %+v %+v", n.name, was, was.EK, is, is.EK)
	}
	was.EK, is.EK = nil, nil
	if is != was {
		n.t.Errorf("%s: the record was %+v, and is %+v", n.name, was, is)
	}
	for _, c := range before.Status.Certificates {
		if !has(after, c.SHA256) && c.NotAfter.After(time.Now()) {
			n.t.Errorf("%s: the record has forgotten %s", n.name, c.SHA256)
		}
	}
}

func has(record *v1alpha1.NodeAttestation, fingerprint string) bool {
	return slices.ContainsFunc(record.Status.Certificates, func(c v1alpha1.IssuedCertificate) bool { return c.SHA256 == fingerprint })
}

// filesHello files a hello for a machine that is not in the inventory, and loses power while it
// waits. Then the controller answers.
func (n *node) filesHello() {
	n.t.Helper()
	n.bootstraps()
	if r := n.run("kubelet-authenticator prepare --prepare-wait=2s"); r.Code == 0 {
		n.t.Fatalf("%s: a machine that is in no inventory has joined", n.name)
	}
	harness.Eventually(n.t, patience, n.name+" has said hello", func() bool { hellos, _ := n.filed(); return hellos == 1 })
	harness.KillWorker(n.t, n.kept())
	n.lists(n.must("kubelet-authenticator identify"))
	harness.Eventually(n.t, patience, n.name+" is challenged", func() bool {
		hellos, _ := harness.Requests(n.t, n.ControlPlane, n.name)
		return hellos[0].Annotations[attestation.AnnotationChallenge] != ""
	})
}

// filesProof answers the challenge, and loses power while nobody judges that.
func (n *node) filesProof() {
	n.t.Helper()
	if r := n.run("kubelet-authenticator prepare --prepare-wait=2s"); r.Code == 0 {
		n.t.Fatalf("%s: it has joined without a controller", n.name)
	}
	harness.Eventually(n.t, patience, n.name+" has filed its proof", func() bool { _, proofs := n.filed(); return proofs == 1 })
	harness.KillWorker(n.t, n.kept())
}

// finishes gets the certificate for the request that there is.
func (n *node) finishes() {
	n.t.Helper()
	n.joins()
	if hellos, proofs := n.filed(); hellos != 1 || proofs != 1 {
		n.t.Errorf("%s: %d hellos and %d proofs", n.name, hellos, proofs)
	}
	n.keeps()
}
