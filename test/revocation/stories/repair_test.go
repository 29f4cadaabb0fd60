// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/records"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/revocation"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
)

// condition returns the reason of a condition of the controller's Namespace.
func condition(t *testing.T, kind string) string {
	t.Helper()
	namespace := &corev1.Namespace{}
	if err := shared.client.Get(t.Context(), client.ObjectKey{Name: controllerprocess.Namespace}, namespace); err != nil {
		t.Fatal(err)
	}
	for _, c := range namespace.Status.Conditions {
		if string(c.Type) == kind {
			return c.Reason
		}
	}
	return ""
}

// A key is revoked while the controller is down, and the controller is killed again and again. The
// revocation holds as soon as it was written, also while the controller is down.
func TestControllerIsKilled(t *testing.T) {
	c := started(t, nil)
	nodes := newNodes(t, "killed", 1)
	nodes[0].joins(t)
	stolen := nodes[0].credential()
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	revoke(t, v1alpha1.RevokeImmediately, nil, nodes[0])
	stolen.MustWrite(t) // nobody has seen it
	for range 3 {
		if err := c.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		// somewhere between its start and the end of its first round
		time.Sleep(700 * time.Millisecond)
		if err := c.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	start(t, c)
	stolen.RefusedWithin(t, 30*time.Second, attestation.MessageRevoked) // it has to lead first
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	stolen.RefusedWithin(t, 0, attestation.MessageRevoked)
}

// A policy is altered: the controller repairs it. A policy is deleted: that is reported, and as
// soon as an operator has applied the manifests again, the policy is filled. The shipped manifests
// are applied over a filled policy: it is filled again.
func TestPoliciesAreRepaired(t *testing.T) {
	started(t, nil)
	nodes := newNodes(t, "repaired", 1)
	nodes[0].joins(t)
	stolen := nodes[0].credential()
	revoke(t, v1alpha1.RevokeImmediately, nil, nodes[0])
	stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	number := int32(0)
	for n := int32(1); n <= revocation.PolicyCount; n++ {
		policy := &admissionv1.ValidatingAdmissionPolicy{}
		if err := shared.client.Get(t.Context(), client.ObjectKey{Name: revocation.PolicyName(n)}, policy); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(policy.Spec.MatchConditions[0].Expression, "'system:node:"+nodes[0].Name+"'") {
			number = n
		}
	}
	if number == 0 {
		t.Fatal("no policy has the node")
	}
	key := client.ObjectKey{Name: revocation.PolicyName(number)}
	for name, alter := range map[string]func(*admissionv1.ValidatingAdmissionPolicy){
		"the condition is false": func(p *admissionv1.ValidatingAdmissionPolicy) { p.Spec.MatchConditions[0].Expression = "false" },
		"it ignores failures":    func(p *admissionv1.ValidatingAdmissionPolicy) { p.Spec.FailurePolicy = new(admissionv1.Ignore) },
		"it allows all":          func(p *admissionv1.ValidatingAdmissionPolicy) { p.Spec.Validations[1].Expression = "true" },
		"it matches leases only": func(p *admissionv1.ValidatingAdmissionPolicy) {
			p.Spec.MatchConstraints.ResourceRules[0].Resources = []string{"leases"}
		},
	} {
		policy := &admissionv1.ValidatingAdmissionPolicy{}
		if err := shared.client.Get(t.Context(), key, policy); err != nil {
			t.Fatal(err)
		}
		good := policy.Spec.DeepCopy()
		alter(policy)
		if err := shared.client.Update(t.Context(), policy); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		eventually(t, name+": it is repaired", func() bool {
			if err := shared.client.Get(t.Context(), key, policy); err != nil {
				t.Fatal(err)
			}
			return policy.Spec.MatchConditions[0].Expression == good.MatchConditions[0].Expression && *policy.Spec.FailurePolicy == admissionv1.Fail &&
				policy.Spec.Validations[1].Expression == good.Validations[1].Expression && policy.Spec.MatchConstraints.ResourceRules[0].Resources[0] == "*/*"
		})
		stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked)
	}

	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: key.Name}}
	if err := shared.client.Delete(t.Context(), policy); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the policy that is missing is reported", func() bool {
		return condition(t, "NodeAttestationRevocationInForce") == revocation.ReasonNotInForce && condition(t, "NodeAttestationPoliciesInForce") == "PoliciesNotInForce"
	})
	if err := controllerprocess.InstallRevocation(t.Context(), shared.ControlPlane, module); err != nil {
		t.Fatal(err)
	}
	stolen.RefusedWithin(t, 5*time.Second, attestation.MessageRevoked)
	eventually(t, "all is well again", func() bool {
		return condition(t, "NodeAttestationRevocationInForce") == revocation.ReasonInForce && condition(t, "NodeAttestationPoliciesInForce") == "PoliciesInForce"
	})
	if err := controllerprocess.InstallRevocation(t.Context(), shared.ControlPlane, module); err != nil {
		t.Fatal(err)
	}
	took := stolen.RefusedWithin(t, 5*time.Second, attestation.MessageRevoked)
	t.Logf("refused %s after the shipped manifests were applied over the filled policy", took)
}

// asController returns a client with the controller's own credential, which alone writes lists.
func asController(t *testing.T) client.Client {
	t.Helper()
	kubeconfig, err := controllerprocess.Kubeconfig(t.Context(), shared.ControlPlane)
	if err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	api, err := client.New(config, client.Options{Scheme: shared.scheme})
	if err != nil {
		t.Fatal(err)
	}
	return api
}

// The policies have 5,000 revoked certificates, and root on 157 nodes got 64 certificates for each,
// which are revoked, too. The key of one more node is refused as fast as the first: a node takes
// one place in the policies.
func TestFiveThousandRevoked(t *testing.T) {
	c := started(t, nil)
	nodes := newNodes(t, "many", 2)
	nodes[0].joins(t)
	nodes[1].joins(t)
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	api := asController(t)
	end := metav1.NewTime(time.Now().Add(time.Hour))
	for n := range int32(5) {
		list := &v1alpha1.RevocationSlice{}
		list.Namespace, list.Name = controllerprocess.Namespace, revocation.PolicyName(n+2)
		if err := client.IgnoreNotFound(shared.client.Delete(t.Context(), list.DeepCopy())); err != nil {
			t.Fatal(err)
		}
		list.Spec = v1alpha1.RevocationSliceSpec{Cluster: controllerprocess.ClusterUID, Number: n + 2}
		for i := range revocation.SliceCapacity {
			list.Spec.Certificates = append(list.Spec.Certificates, v1alpha1.RevokedCertificate{
				SHA256: fmt.Sprintf("%064x", int(n)*revocation.SliceCapacity+i), NotAfter: end, NodeName: fmt.Sprintf("gone-%d", i),
			})
		}
		if err := api.Create(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	hostile := client.MatchingLabels{"test": "hostile"}
	t.Cleanup(func() { // the slices would keep the certificates until they end
		in, ctx := client.InNamespace(controllerprocess.Namespace), context.WithoutCancel(t.Context())
		if err := errors.Join(shared.client.DeleteAllOf(ctx, &v1alpha1.NodeAttestation{}, in, hostile), shared.client.DeleteAllOf(ctx, &v1alpha1.RevocationSlice{}, in)); err != nil {
			t.Error(err)
		}
	})
	for i := range 157 {
		name := fmt.Sprintf("hostile-%03d", i)
		record := &v1alpha1.NodeAttestation{ObjectMeta: metav1.ObjectMeta{Namespace: controllerprocess.Namespace, Name: name, Labels: hostile}}
		record.Spec = v1alpha1.NodeAttestationSpec{
			Cluster: controllerprocess.ClusterUID, Provider: "tpm", NodeName: name, Machine: v1alpha1.MachineReference{Source: records.SourceInventory, Name: name},
		}
		for k := range records.MaxCertificates {
			serial := fmt.Sprint(100_000 + i*records.MaxCertificates + k)
			record.Status.Certificates = append(record.Status.Certificates, v1alpha1.IssuedCertificate{
				SHA256: fmt.Sprintf("%064s", serial), NotAfter: end, RequestUID: types.UID(serial), Revoked: true, Noted: true,
			})
		}
		if err := api.Create(t.Context(), record); err != nil {
			t.Fatal(err)
		}
	}
	start(t, c)
	eventually(t, "all are revoked", func() bool {
		metrics, err := c.Metrics(t.Context())
		return err == nil && strings.Contains(metrics, `node_attestation_revoked_certificates{cluster="`+controllerprocess.ClusterUID+`",state="revoked"} 15`)
	})
	stolen := nodes[0].credential()
	stolen.MustWrite(t)
	revoke(t, v1alpha1.RevokeImmediately, nil, nodes[0])
	t.Logf("refused after %s", stolen.RefusedWithin(t, refusedIn, attestation.MessageRevoked))
	nodes[1].credential().MustWrite(t)
	if err := nodes[0].attest(t.Context()); err != nil {
		t.Error(err)
	}
}
