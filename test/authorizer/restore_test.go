// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/fleet"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// strictFleet is the nodes of a cluster whose authorizer is in strict mode, and a thief of the CA's
// key.
type strictFleet struct {
	*bed
	admin  string // the operator's kubeconfig
	nodes  []*victim
	forged []harness.Credential
}

// Records are lost, and etcd is restored to a time before certificates were issued. In strict mode
// neither stops one of 1,000 nodes, since the authorizer's state file remembers the certificates.
// Without that file, nodes with later certificates are denied until they have attested again. A
// certificate that a thief of the CA's key issued is refused all along. Only without any record,
// and without the file, nothing is denied until the first node has attested.
func TestFleetOutlivesARestore(t *testing.T) {
	t.Parallel()
	f := newStrictFleet(t)
	backup, authorizer := filepath.Join(t.TempDir(), "etcd"), f.authorizers[0]
	unchanged, renewed, lost := f.enrols(t, "unchanged"), f.enrols(t, "renewed"), f.enrols(t, "lost")
	f.remembers(t, f.nodes...)
	f.allWork(t, "at first")
	f.thiefIsRefused(t, "at first")
	c := f.newCrowd(t, unchanged)
	c.grow(t, crowdSize/2)

	// 1. After the backup, two nodes renew, and one enrols. The record of one is lost. Half of the
	// crowd enrols, too, and loses some records.
	harness.Must(t, f.Backup(t.Context(), backup))
	c.grow(t, crowdSize)
	late := f.enrols(t, "late")
	renewed.attest(t)
	lost.attest(t)
	f.remembers(t, f.nodes...)
	f.deleteRecords(t, "?fieldSelector=spec.nodeName%3D"+lost.Name)
	f.deleteRecords(t, "?labelSelector="+willBeLost)
	renewed.attest(t)
	f.remembers(t, renewed) // so it has also seen that the records are lost
	f.allWork(t, "with lost records")
	c.works(t, "with lost records")
	f.thiefIsRefused(t, "with lost records")

	// 2. etcd is restored. Nobody has restarted anything yet.
	harness.Must(t, f.Restore(t.Context(), backup))
	f.allWork(t, "after the restore")
	c.works(t, "after the restore")
	f.thiefIsRefused(t, "after the restore")

	// 3. The operator follows docs/operations.md: a new challenge key, the present inventory, and
	// a restart of the controller and of the authorizer.
	harness.Must(t, f.controller.Stop())
	f.kubectl(t, "patch", "secret", "node-attestation-controller-key", "--type=merge", `--patch={"data":null}`)
	f.admit(t, nil)
	harness.Must(t, errors.Join(f.controller.Start(t.Context()), f.controller.Ready(t.Context())))
	f.restartAuthorizer(t)
	f.allWork(t, "after the restart of the authorizer")
	c.works(t, "after the restart of the authorizer")
	f.thiefIsRefused(t, "after the restart of the authorizer")

	// 4. The state file is lost, too. Who has a later certificate than the records is denied.
	harness.Must(t, authorizer.Kill())
	harness.Must(t, os.Remove(authorizer.StateFile()))
	f.restartAuthorizer(t)
	f.works(t, "without the state file", unchanged)
	for _, v := range []*victim{renewed, lost, late} {
		f.isRefused(t, "without the state file", v.credential())
	}
	f.thiefIsRefused(t, "without the state file")

	// 5. They attest again. The operator first deletes the records that are too old.
	for _, v := range []*victim{renewed, lost} {
		var refused *fleet.RefusedError
		if _, err := v.Attest(t.Context(), v.cluster); !errors.As(err, &refused) || refused.Decision.Reason != attestation.ReasonUnknownCredential {
			t.Errorf("%s attests, and its record is older than its certificate: %v", v.Name, err)
		}
		f.deleteRecords(t, "?fieldSelector=spec.nodeName%3D"+v.Name)
	}
	for _, v := range []*victim{renewed, lost, late} {
		v.attest(t)
		f.works(t, "having attested again", v)
	}
	f.allWork(t, "when all have attested again")
	f.thiefIsRefused(t, "when all have attested again")
	f.remembers(t, f.nodes...)

	// 6. All records and the state file are lost.
	harness.Must(t, authorizer.Kill())
	harness.Must(t, os.Remove(authorizer.StateFile()))
	f.deleteRecords(t, "")
	f.restartAuthorizer(t)
	f.logs(t, "there is no record: strict mode denies nothing")
	f.allWork(t, "without any record")
	for _, c := range f.forged {
		read, write := try(t, c)
		if err := errors.Join(read(), write()); err != nil {
			t.Errorf("without any record, strict mode has no ground to refuse a certificate of %s: %v", c.Node, err)
		}
	}

	// 7. With the first record, the others are denied, until they have attested, too.
	unchanged.attest(t)
	f.remembers(t, unchanged)
	f.works(t, "with the first record", unchanged)
	f.thiefIsRefused(t, "with the first record")
	for _, v := range []*victim{renewed, lost, late} {
		f.isRefused(t, "with the first record of another node", v.credential())
		v.attest(t)
	}
	f.allWork(t, "when all have attested once more")
	f.thiefIsRefused(t, "when all have attested once more")
}

// newStrictFleet starts a cluster of its own: a restore stops every API server.
func newStrictFleet(t *testing.T) *strictFleet {
	t.Helper()
	b, err := newBed(t.Context(), t.TempDir(), 1, "--strict=on")
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(b.logTails())
		}
		harness.Must(t, b.end())
	})
	f := &strictFleet{bed: b, admin: filepath.Join(t.TempDir(), "kubeconfig")}
	harness.Must(t, b.WriteKubeconfig(f.admin, b.AdminUser()))
	for _, node := range []string{"renewed", "invented"} {
		f.forged = append(f.forged, b.forged(t, node, b.servers[0]))
	}
	return f
}

// enrols makes a node, which attests.
func (f *strictFleet) enrols(t *testing.T, name string) *victim {
	t.Helper()
	v := f.newVictim(t, name, f.servers[0])
	f.nodes = append(f.nodes, v)
	return v
}

// kubectl runs it as an administrator in the namespace of the controller.
func (f *strictFleet) kubectl(t *testing.T, args ...string) {
	t.Helper()
	_, err := f.RunKubectl(t.Context(), f.admin, append([]string{"--namespace=" + controllerprocess.Namespace}, args...)...)
	harness.Must(t, err)
}

// deleteRecords deletes those that a query selects, at once.
func (f *strictFleet) deleteRecords(t *testing.T, query string) {
	t.Helper()
	path := "/apis/" + v1alpha1.GroupVersion.String() + "/namespaces/" + controllerprocess.Namespace + "/nodeattestations"
	f.kubectl(t, "delete", "--raw="+path+query)
}

// restartAuthorizer ends the authorizer, if it runs, and starts it. It returns when the authorizer
// has read the lists from the API server.
func (f *strictFleet) restartAuthorizer(t *testing.T) {
	t.Helper()
	harness.Must(t, f.authorizers[0].Kill())
	harness.Must(t, f.startAuthorizer(t.Context(), 0))
	awaitLive(t, f.authorizers[0])
}

// remembers waits until the state file has the present certificates of nodes. The authorizer writes
// it a second after a change.
func (f *strictFleet) remembers(t *testing.T, nodes ...*victim) {
	t.Helper()
	for _, v := range nodes {
		_, leaf, err := csr.ParseCertificates(v.Certificate)
		harness.Must(t, err)
		sum := sha256.Sum256(leaf.Raw)
		id := []byte(revocation.X509Prefix + hex.EncodeToString(sum[:]))
		harness.Eventually(t, harness.Soon, "the state file has the certificate of "+v.Name, func() bool {
			content, err := os.ReadFile(f.authorizers[0].StateFile())
			return err == nil && bytes.Contains(content, id)
		})
	}
}

// logs waits until the authorizer has logged a text since its last start.
func (f *strictFleet) logs(t *testing.T, text string) {
	t.Helper()
	harness.Eventually(t, harness.Soon, "the authorizer logs: "+text, func() bool {
		log := f.authorizers[0].Process().LogTail()
		started := strings.LastIndex(log, "starting the authorizer")
		return started >= 0 && strings.Contains(log[started:], text)
	})
}

// works fails the test unless a node reads and writes at once.
func (f *strictFleet) works(t *testing.T, when string, v *victim) {
	t.Helper()
	read, write := v.try(t)
	if err := errors.Join(read(), write()); err != nil {
		t.Errorf("%s, %s is stopped: %v", when, v.Name, err)
	}
}

func (f *strictFleet) allWork(t *testing.T, when string) {
	t.Helper()
	for _, v := range f.nodes {
		f.works(t, when, v)
	}
}

// isRefused waits until a certificate neither reads nor writes. If the authorizer answers too late,
// an API server goes on without its answer, so on a busy machine a single request may pass.
func (f *strictFleet) isRefused(t *testing.T, when string, c harness.Credential) {
	t.Helper()
	read, write := try(t, c)
	harness.Eventually(t, refusedIn, when+", a certificate of "+c.Node+" that no record named is refused", func() bool {
		return harness.IsRefused(read(), attestation.MessageUnrecorded) && harness.IsRefused(write(), attestation.MessageUnrecorded)
	})
}

func (f *strictFleet) thiefIsRefused(t *testing.T, when string) {
	t.Helper()
	for _, c := range f.forged {
		f.isRefused(t, when, c)
	}
}
