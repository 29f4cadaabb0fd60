// SPDX-License-Identifier: Apache-2.0

package authorizer

import (
	"context"
	"encoding/pem"
	"path/filepath"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
)

// ask returns a function with which the victim's present certificate asks a signer, as a dry run.
func (v *victim) ask(t *testing.T) func(signer string) error {
	t.Helper()
	api := v.credential().Client(t)
	key, _, err := csr.NewKey()
	harness.Must(t, err)
	der, err := csr.PKCS10(csr.Identity{NodeName: v.Name, ProviderID: v.ProviderID()}, key)
	harness.Must(t, err)
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return func(signer string) error {
		request := csr.Object(csr.NewName(), signer, content, key.Public(), nil)
		_, err := api.CertificatesV1().CertificateSigningRequests().Create(t.Context(), request, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
}

// Without the policies for revoked certificates, a revoked certificate may ask every signer that
// nodes may ask. The policy of signers.yaml leaves only ours. It does not run beside the other
// tests, since it takes a policy away.
func TestRevokedKeyAsksNoOtherSigner(t *testing.T) {
	const serving = certificatesv1.KubeletServingSignerName
	ctx, bindings := t.Context(), shared.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	v := shared.newVictim(t, "asks", shared.servers[0])
	stolen := v.ask(t)
	harness.Must(t, stolen(serving))
	harness.NextSecond()
	revoke(t, v.Name)
	harness.Eventually(t, refusedIn, "the policies refuse the request", func() bool { return harness.IsRefused(stolen(serving), attestation.MessageRevoked) })

	binding, err := bindings.Get(ctx, revocation.PolicyName(1), metav1.GetOptions{})
	harness.Must(t, err)
	harness.Must(t, bindings.Delete(ctx, binding.Name, metav1.DeleteOptions{}))
	t.Cleanup(func() {
		binding.ResourceVersion, binding.UID = "", ""
		_, err := bindings.Create(context.WithoutCancel(t.Context()), binding, metav1.CreateOptions{})
		harness.Must(t, err)
	})
	harness.Eventually(t, harness.Soon, "without the policies, the authorizer lets the request pass", func() bool { return stolen(serving) == nil })

	admin := filepath.Join(t.TempDir(), "kubeconfig")
	harness.Must(t, shared.WriteKubeconfig(admin, shared.AdminUser()))
	_, err = shared.RunKubectl(ctx, admin, "apply", "--server-side", "--validate=strict", "--filename="+filepath.Join(module, "packaging/authorizer/signers.yaml"))
	harness.Must(t, err)
	harness.Eventually(t, harness.Soon, "signers.yaml refuses the request", func() bool { return harness.IsRefused(stolen(serving), attestation.MessageRevoked) })
	if err := stolen(attestation.HelloSignerName); err != nil {
		t.Errorf("the revoked certificate may not attest: %v", err)
	}
	v.attest(t)
	if err := v.ask(t)(serving); err != nil {
		t.Errorf("the certificate with which the node came back: %v", err)
	}
}
