// SPDX-License-Identifier: Apache-2.0

package operations

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/watch"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// Recipes for one node run in parallel, the others one after the other. The last one removes
// everything.
func TestRecipes(t *testing.T) {
	t.Run("one node", func(t *testing.T) {
		t.Cleanup(newBystander(t, "bystander").keepsRenewing())
		for name, test := range map[string]func(*testing.T){
			"records lost": testRecordsLost, "TPM": testTPMReplaced, "mainboard": testMainboardReplaced, "renamed": testNodeRenamed, "stolen": testMachineStolen,
			"plugin": testPlugin,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t)
			})
		}
	})
	t.Run("challenge key", testChallengeKey)
	t.Run("controller", testController)
	t.Run("etcd restored", testEtcdRestored)
	t.Run("CA rotation", testCARotation)
	t.Run("uninstall", testUninstall)
	if !t.Failed() {
		allAreTried(t)
	}
}

// A record is lost, and comes back. Then both record and certificate are lost, and there is no
// credential.
func testRecordsLost(t *testing.T) {
	n := newNode(t, "lost")
	n.joinsDue()
	r := newRecipe(t, "Records lost", map[string]string{"NODE": n.name})
	reset := func() {
		r.Shell("kubectl -n $NAMESPACE delete nodeattestation --field-selector spec.nodeName=$NODE\n")
	}
	reset()
	if !strings.Contains(r.step("comm -23"), n.name+"\n") {
		t.Error("the Node without a record is not listed")
	}
	n.user()
	hasEvent(t, n.name, string(verifier.ReasonRecordRecovered))
	if !strings.Contains(r.step(string(verifier.ReasonRecordRecovered)), n.name) {
		t.Error("it is not listed")
	}
	n.hasRecord()

	n.removeState()
	reset()
	n.run("kubelet-authenticator").Want(t, 17)
	b := newRecipe(t, "Bootstrap credential", map[string]string{"NODE": n.name, "SERVER": shared.ServerURL()})
	b.step("create secret generic")
	b.step("current-context")
	b.step("bootstrap-kubelet.conf")
	n.goesOn()
	n.run("kubelet-authenticator").Want(t, 21, string(verifier.ReasonNodeAlreadyRegistered))
	r.step("kubectl delete node")
	n.goesOn()
	if !strings.Contains(b.step("auth whoami"), "system:node:"+n.name) {
		t.Error("the node has no certificate")
	}
	r.step("auth whoami")
}

// The machine keeps its disk with the certificate, whose renewal is due.
func testTPMReplaced(t *testing.T) {
	n := newNode(t, "other-tpm")
	n.joinsDue()
	before := records(t, n.name)[0].Spec.EK.Fingerprint
	n.chip = n.newChip()
	n.configure("")
	n.user()
	waitsFor(t, n.name, string(verifier.ReasonNodeNameMismatch))

	r := newRecipe(t, "TPM replaced", map[string]string{"NODE": n.name})
	r.step("identify")
	r.step(watch.ReasonEKChangeAccepted)
	n.goesOn()
	if !strings.Contains(r.step("--dry-run"), "system:node:"+n.name) {
		t.Error("the node has no certificate")
	}
	harness.Eventually(t, patience, "the record has the new EK", func() bool {
		record := records(t, n.name)[0]
		return record.Spec.EK.Fingerprint != before && record.Status.EKReplaced == nil
	})
}

// With the board, the provider ID is another one.
func testMainboardReplaced(t *testing.T) {
	n := newNode(t, "other-board")
	n.joins()
	n.chip = n.newChip()
	n.providerID += "-2"
	n.configure("")
	n.removeState()
	n.bootstrap()
	inventory.Lock()
	n.listed(n.must("kubelet-authenticator identify"))
	inventory.Unlock()
	n.run("kubelet-authenticator").Want(t, 21, string(verifier.ReasonIdentityBound))

	r := newRecipe(t, "Mainboard replaced", map[string]string{"NODE": n.name})
	r.step("kubelet-authenticator reset")
	r.step("identify")
	r.step("kubectl attest reset")
	r.step("systemctl start kubelet")
	if all := records(t, n.name); len(all) != 1 || all[0].Spec.ProviderID != n.providerID {
		t.Errorf("%+v", all)
	}
}

func testNodeRenamed(t *testing.T) {
	const renamed = "new-name"
	n := newNode(t, "old-name")
	n.joins()
	n.bootstrap()
	n.name = renamed
	n.configure("")
	n.run("kubelet-authenticator").Want(t, 21, string(verifier.ReasonNodeNameMismatch))
	n.name = n.host
	n.configure("")
	n.goesOn()
	t.Cleanup(func() { forget(t, renamed) })

	r := newRecipe(t, "Node renamed", map[string]string{"NODE": n.name, "NEW": renamed})
	r.step("systemctl stop kubelet")
	r.step("machines/$NEW.yaml")
	r.step("kubectl attest reset")
	r.step("nodeName: $NEW")
	n.bootstrap()
	r.step("systemctl start kubelet")
	if user := n.user(); user != "system:node:"+renamed || len(records(t, renamed)) != 1 || len(records(t, n.name)) != 0 {
		t.Errorf("it is %s", user)
	}
}

// A stolen machine keeps its certificate until it expires. It can no longer read the Secret of a
// pod, and gets no other certificate.
func testMachineStolen(t *testing.T) {
	n := newNode(t, "stolen")
	n.joins()
	const space = "stolen-from"
	meta := metav1.ObjectMeta{Namespace: space, Name: "default"}
	harness.Must(t, shared.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: space}}))
	harness.Must(t, shared.client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta}))
	harness.Must(t, shared.client.Create(t.Context(), &corev1.Secret{ObjectMeta: meta}))
	no := false
	harness.Must(t, shared.client.Create(t.Context(), &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
		NodeName: n.name, AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "none"}},
		Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: meta.Name}}}},
	}}))
	const reads = "kubectl --kubeconfig=/etc/kubernetes/kubelet.conf -n " + space + " get secret default"
	harness.Eventually(t, patience, "the node reads the Secret of its pod", func() bool { return n.run(reads).Code == 0 })

	r := newRecipe(t, "Machine stolen", map[string]string{"NODE": n.name})
	if !strings.Contains(r.step("stolen-$NODE.yaml"), "notAfter") {
		t.Error("it is not said when its certificate ends")
	}
	r.step("kubectl taint")
	harness.Eventually(t, patience, "it reads the Secret no more", func() bool { return strings.Contains(n.run(reads).Stderr, "forbidden") })
	if r := n.run("kubectl --kubeconfig=/etc/kubernetes/kubelet.conf taint node " + n.name + " attestation.cluster.x-k8s.io/stolen-"); r.Code == 0 || !strings.Contains(r.Stderr, "not allowed to modify taints") {
		t.Errorf("it takes the taint away: %+v", r)
	}
	r.step("delete nodeattestation")
	r.step("bootstrap.kubernetes.io/token")
	if user := n.user(); user != "system:node:"+n.name {
		t.Errorf("the recipe says that the certificate is valid: %q", user)
	}
	n.removeState()
	n.bootstrap()
	n.run("kubelet-authenticator --wait-timeout=2s").Want(t, 23)
	waitsFor(t, n.name, string(verifier.ReasonMachineNotFound))
	if len(records(t, n.name)) != 0 {
		t.Error("it has a record")
	}
}
