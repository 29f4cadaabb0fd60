// SPDX-License-Identifier: Apache-2.0

package policies

import (
	"context"
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// forMachines are the signers that machines may ask, in the manifests as they are, forServing those
// of them that only nodes may ask.
var (
	rehearsals  = []string{attestation.RehearsalHelloSignerName, attestation.RehearsalSignerName}
	forMachines = slices.Concat([]string{helloSigner, kubeletServing}, rehearsals, guarded)
	forServing  = []string{kubeletServing, servingSigner}
)

// asking is a machine that may ask a signer.
func asking(signer string) kubernetes.Interface {
	if slices.Contains(forServing, signer) {
		return shared.node
	}
	return shared.bootstrapper
}

// credential is what a machine has, with the signers that it may ask.
type credential struct {
	kubernetes.Interface
	signers []string
}

func machines(t *testing.T) map[string]credential {
	t.Helper()
	first := slices.DeleteFunc(slices.Clone(forMachines), func(signer string) bool { return slices.Contains(forServing, signer) })
	return map[string]credential{
		"bootstrap token": {shared.bootstrapper, first}, "node": {shared.node, forMachines},
		"token of more groups": {as(t, "system:bootstrap:abcdef", "system:bootstrappers", "system:bootstrappers:workers", "system:masters"), first},
		"group of tokens":      {as(t, "anybody", "system:masters", "system:bootstrappers"), first},
		"group of nodes":       {as(t, "anybody", "system:masters", "system:nodes"), forMachines},
	}
}

// asks files a request for a signer as a user, and deletes it.
func asks(t *testing.T, client kubernetes.Interface, signer string) error {
	t.Helper()
	_, err := client.CertificatesV1().CertificateSigningRequests().Create(t.Context(), newRequest(signer), metav1.CreateOptions{DryRun: dryRun})
	return err
}

// The way round attestation is kube-controller-manager's signer for API clients. A bootstrap token
// and a node's credential ask it for the names of another node and of the controller. The
// controller may read the CA's key. An administrator approves all requests, and
// kube-controller-manager signs. Neither new requests nor those filed before the policies get a
// certificate, and an administrator's own request does.
func TestAnotherSignerIsNoWayRound(t *testing.T) {
	victims := map[string]edit{"a node": named("system:node:victim", "system:nodes"), "the controller": named(controllerUser, "system:serviceaccounts")}
	for who, client := range map[string]kubernetes.Interface{"bootstrap token": shared.bootstrapper, "node": shared.node} {
		for what, change := range victims {
			t.Run(who+" asks to be "+what, func(t *testing.T) {
				_, err := file(t.Context(), client, clientSigner, change)
				wantRefusedBy(t, err, signersPolicy)
			})
		}
	}
	early := []string{shared.earlyNode, shared.earlyController}
	honest, err := file(t.Context(), shared.admin, clientSigner, named("an-operators-program"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(slices.Clone(early), honest) {
		_, err := shared.RunKubectl(t.Context(), shared.adminKubeconfig, "certificate", "approve", name)
		if (err == nil) != (name == honest) {
			t.Errorf("kubectl certificate approve %s: %v", name, err)
		}
	}
	for _, name := range early {
		for _, client := range []kubernetes.Interface{shared.admin, as(t, controllerUser, "system:masters"), as(t, kcmApprover, "system:masters")} {
			wantRefusedBy(t, approve(t, client, name), signersPolicy)
		}
		// The policy matches /approval alone: what is below shows that no other path approves.
		approved := map[string]any{"status": map[string]any{"conditions": []any{condition(certificatesv1.CertificateApproved)}}}
		// accepted, and dropped
		want(t, patch(t, shared.admin, types.MergePatchType, name, approved))
		if err := patch(t, shared.admin, types.MergePatchType, name, approved, "status"); err == nil {
			t.Error("an approval passed through /status")
		}
	}
	harness.Eventually(t, patience, "kube-controller-manager signs the administrator's", func() bool { return len(get(t, honest).Status.Certificate) > 0 })
	for _, name := range early {
		if csr := get(t, name); len(csr.Status.Conditions)+len(csr.Status.Certificate) > 0 {
			t.Errorf("%s: %+v", name, csr.Status)
		}
		want(t, decide(t.Context(), shared.admin, name, certificatesv1.CertificateDenied, nil))
	}
}

// Nodes may ask the six signers, and other machines the four that are not for serving. Machines may
// ask no others. All other users may ask all signers.
func TestSignersForMachines(t *testing.T) {
	others := []string{clientSigner, "example.com/x", "cluster.x-k8s.io/other", "clusterissuers.cert-manager.io/node-ca", "issuers.cert-manager.io/kube-system.node-ca"}
	for who, machine := range machines(t) {
		t.Run(who, func(t *testing.T) {
			for _, signer := range slices.Concat(forMachines, others) {
				if err := asks(t, machine, signer); slices.Contains(machine.signers, signer) {
					want(t, err)
				} else {
					wantRefusedBy(t, err, signersPolicy)
				}
			}
		})
	}
	for who, client := range map[string]kubernetes.Interface{
		"administrator": shared.admin, "controller": as(t, controllerUser, "system:masters"),
		"groups of like names": as(t, "anybody", "system:masters", "system:bootstrappers:workers", "system:node", "system:nodes:x"),
	} {
		t.Run(who, func(t *testing.T) {
			for _, signer := range slices.Concat(forMachines, others) {
				want(t, asks(t, client, signer))
			}
		})
	}
}

// The overlay in docs/cluster-setup.md adds a network plugin's signer, and a user who files for
// machines.
func TestAddedSigner(t *testing.T) {
	const plugin, other, bootstrapper = "example.com/network-plugin", "example.com/x", "system:serviceaccount:machines:bootstrap"
	static := as(t, bootstrapper, "system:masters")
	wantRefusedBy(t, asks(t, shared.node, plugin), signersPolicy)
	want(t, asks(t, static, other))
	early, err := file(t.Context(), static, other)
	if err != nil {
		t.Fatal(err)
	}
	dir := documentedOverlay(t, "signers")
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := shared.apply(ctx, "-k", manifests); err != nil {
			t.Fatal(err)
		}
		harness.Eventually(t, patience, "the policy is in effect again", func() bool {
			_, err := shared.node.CertificatesV1().CertificateSigningRequests().Create(ctx, newRequest(plugin), metav1.CreateOptions{DryRun: dryRun})
			return refusedBy(err, signersPolicy)
		})
	})
	want(t, shared.apply(t.Context(), "-k", dir))
	harness.Eventually(t, patience, "a node asks the plugin's signer", func() bool { return asks(t, shared.node, plugin) == nil })
	name, err := file(t.Context(), shared.node, plugin)
	want(t, err)
	want(t, approve(t, shared.admin, name))
	want(t, issue(t, shared.admin, name))
	for _, signer := range forMachines {
		want(t, asks(t, shared.node, signer))
		if slices.Contains(forServing, signer) {
			wantRefusedBy(t, asks(t, static, signer), signersPolicy)
		} else {
			want(t, asks(t, static, signer))
		}
	}
	// The added signer and the added user have the same limits as the others.
	for signer, client := range map[string]kubernetes.Interface{plugin: shared.node, helloSigner: static} {
		_, err = file(t.Context(), client, signer, func(c *certificatesv1.CertificateSigningRequest) { c.Finalizers = finalizers(1) })
		wantRefusedBy(t, err, metadataPolicy)
		_, err = file(t.Context(), client, signer, func(c *certificatesv1.CertificateSigningRequest) { c.Spec.Request = padTo(c.Spec.Request, 131073) })
		wantRefusedBy(t, err, sizePolicy)
	}
	for _, client := range []kubernetes.Interface{shared.bootstrapper, shared.node, static} {
		wantRefusedBy(t, asks(t, client, other), signersPolicy)
	}
	wantRefusedBy(t, approve(t, shared.admin, early), signersPolicy)
	want(t, decide(t.Context(), shared.admin, early, certificatesv1.CertificateDenied, nil))
}
