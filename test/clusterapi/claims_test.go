// SPDX-License-Identifier: Apache-2.0

package clusterapi

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/verifier"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// claimsNode registers a Node as the machine, with any provider ID: NodeRestriction lets a node
// choose its own.
func (m *machine) claimsNode(t *testing.T, providerID string) {
	t.Helper()
	client, err := kubernetes.NewForConfig(m.credential())
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.name}, Spec: corev1.NodeSpec{ProviderID: providerID}}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A node claims another machine's provider ID in its Node. Cluster API then sets that Machine's
// nodeRef to it. The node gains nothing.
func TestNodeClaimsAnotherProviderID(t *testing.T) {
	t.Parallel()
	w := newWorld(t, shared.management)
	c := w.newCluster(t, "workload", nil)
	w.start(t, nil)
	victim, thief := c.newMachine(t, "victim", nil), c.newMachine(t, "thief", nil)
	thief.attests(t)
	thief.claimsNode(t, victim.providerID)
	updateStatus(t, c.client, victim.object, func(object *clusterv1.Machine) { object.Status.NodeRef.Name = thief.name })

	for what, claim := range map[string]struct{ node, id, reason string }{
		"its name, the other's provider ID": {thief.name, victim.providerID, string(verifier.ReasonProviderIDMismatch)},
		"the other's name, its provider ID": {victim.name, thief.providerID, string(verifier.ReasonNodeNameMismatch)},
		"the other's name and provider ID":  {victim.name, victim.providerID, string(verifier.ReasonProviderIDMismatch)},
	} {
		t.Run(what, func(t *testing.T) {
			for _, token := range []string{thief.token, victim.token} {
				c.refusesTry(t, c.newPeer(t, thief.computer, c.asToken(token), claim.node, claim.id))
			}
			p := c.newPeer(t, thief.computer, thief.credential(), claim.node, claim.id)
			if reason := c.refusesTry(t, p); reason != claim.reason && reason != string(verifier.ReasonRequesterNotAllowed) {
				t.Errorf("its own certificate: refused for %s", reason)
			}
		})
	}
	// The node keeps its own identity, and the other machine gets its own.
	if before := thief.remembered(t); before.Spec.ProviderID != thief.providerID {
		t.Errorf("%+v", before.Spec)
	}
	thief.attests(t)
	thief.remembered(t)
	victim.attests(t)
	victim.remembered(t)
	if n := len(w.records(t)); n != 2 {
		t.Errorf("%d records", n)
	}
	// A Machine of the thief whose nodeRef is the other's Node does not help, either.
	updateStatus(t, c.client, thief.object, func(object *clusterv1.Machine) { object.Status.NodeRef.Name = victim.name })
	c.refusesTry(t, c.newPeer(t, thief.computer, thief.credential(), victim.name, victim.providerID))
	thief.attests(t)
}

// refusesTry files a peer's hello and proof, and returns why it is refused.
func (c *cluster) refusesTry(t *testing.T, p *peer) string {
	t.Helper()
	hello := p.hello(t)
	name := hello.Name
	reason := ""
	harness.Eventually(t, harness.Soon, fmt.Sprintf("%s is refused as %s", p.ask.ProviderID, p.ask.NodeName), func() bool {
		got := c.get(t, name)
		if len(got.Status.Certificate) > 0 {
			t.Fatalf("%s as %s: it has a certificate", p.ask.ProviderID, p.ask.NodeName)
		}
		if reason = reasonOf(got); reason == "" && name == hello.Name && got.Annotations[attestation.AnnotationChallenge] != "" {
			name = p.file(t, p.proof(t, got)).Name
		}
		return reason != ""
	})
	return reason
}
