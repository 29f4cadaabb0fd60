// SPDX-License-Identifier: Apache-2.0

package controllerprocess

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/attestation"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/csr"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/provider/tpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

// What the manifests and the default configuration name.
const (
	Namespace    = "node-attestation-system"
	Account      = "node-attestation-controller"
	CASecret     = "node-attestation-ca"
	Inventory    = "node-attestation-inventory"
	InventoryKey = "inventory.yaml"
	// ClusterUID is that of the cluster in the configuration that New writes.
	ClusterUID = "7f0c64de-5d1a-4b6e-9c53-30a1c1b1e9f4"
)

// Manifests are those of packaging/kubernetes that do without containers, in the order in which
// they are applied.
var Manifests = []string{"namespace.yaml", "crd.yaml", "policies.yaml", "rbac.yaml"}

const crd = "crd/nodeattestations.attestation.cluster.x-k8s.io"

// Install applies the manifests of the module in a folder. It makes the Secret with the cluster's
// client CA, and an inventory without machines. It returns when the policies are in effect.
func Install(ctx context.Context, cp *testbed.ControlPlane, module string) error {
	if err := Apply(ctx, cp, module); err != nil {
		return err
	}
	if err := Provide(ctx, cp); err != nil {
		return err
	}
	return AwaitPolicies(ctx, cp)
}

// Apply applies the manifests of the module in a folder, also over those of another release.
func Apply(ctx context.Context, cp *testbed.ControlPlane, module string) error {
	admin := filepath.Join(cp.Dir(), "install.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return err
	}
	apply := []string{"apply", "--server-side", "--validate=strict"}
	for _, name := range Manifests {
		apply = append(apply, "--filename="+filepath.Join(module, "packaging", "kubernetes", name))
	}
	for _, args := range [][]string{apply, {"wait", "--for=condition=Established", crd}} {
		if _, err := cp.RunKubectl(ctx, admin, args...); err != nil {
			return err
		}
	}
	return nil
}

// revocationFiles are those of packaging/kubernetes-revocation/component.
var revocationFiles = []string{"crd.yaml", "policies.yaml", "guards.yaml", "rbac.yaml", "announcement.yaml"}

// InstallRevocation applies what revocation adds to what Install installed.
func InstallRevocation(ctx context.Context, cp *testbed.ControlPlane, module string) error {
	admin := filepath.Join(cp.Dir(), "revocation.kubeconfig")
	if err := cp.WriteKubeconfig(admin, cp.AdminUser()); err != nil {
		return err
	}
	args := []string{"apply", "--server-side", "--force-conflicts", "--validate=strict"}
	for _, name := range revocationFiles {
		args = append(args, "--filename="+filepath.Join(module, "packaging", "kubernetes-revocation", "component", name))
	}
	_, err := cp.RunKubectl(ctx, admin, args...)
	return err
}

// Provide makes what an operator makes beside the manifests: the Secret with the cluster's client
// CA, and an inventory without machines.
func Provide(ctx context.Context, cp *testbed.ControlPlane) error {
	key, err := cp.ClientCA().KeyPEM()
	if err != nil {
		return err
	}
	ca := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: CASecret}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cp.ClientCA().CertPEM(), corev1.TLSPrivateKeyKey: key},
	}
	if _, err := cp.Client().CoreV1().Secrets(Namespace).Create(ctx, ca, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create secret %s: %w", CASecret, err)
	}
	return SetInventory(ctx, cp, []byte("apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines: []\n"))
}

// SetInventory replaces the inventory, such as by what identify prints. The controller reads it
// again within seconds, and until then the machines in it wait.
func SetInventory(ctx context.Context, cp *testbed.ControlPlane, content []byte) error {
	maps := cp.Client().CoreV1().ConfigMaps(Namespace)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: Inventory}, Data: map[string]string{InventoryKey: string(content)}}
	_, err := maps.Update(ctx, object, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(ctx, object, metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write config map %s: %w", Inventory, err)
	}
	return nil
}

// Kubeconfig returns one with a new token of the controller's service account, valid for an hour.
func Kubeconfig(ctx context.Context, cp *testbed.ControlPlane) ([]byte, error) {
	token, err := cp.Client().CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, Account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make a token for service account %s/%s: %w", Namespace, Account, err)
	}
	return cp.Kubeconfig(testbed.TokenUser(token.Status.Token)), nil
}

// RecordClient returns a client for records with the identity of the controller: nobody else may
// write them. Its rate is not limited.
func RecordClient(ctx context.Context, cp *testbed.ControlPlane) (client.Client, error) {
	kubeconfig, err := Kubeconfig(ctx, cp)
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}

const policyTimeout = 20 * time.Second

// AwaitPolicies waits until our policies in the cluster refuse the controller's work to others. A
// policy reaches the API server's admission through an informer, up to seconds after it was stored.
// The probes leave nothing behind.
func AwaitPolicies(ctx context.Context, cp *testbed.ControlPlane) (err error) {
	ctx, cancel := context.WithTimeout(ctx, policyTimeout)
	defer cancel()
	bindings, err := cp.Client().AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the policies' bindings: %w", err)
	}
	requests := cp.Client().CertificatesV1().CertificateSigningRequests()
	filed := map[string]*certificatesv1.CertificateSigningRequest{tpm.SignerName: nil, certificatesv1.KubeletServingSignerName: nil}
	for signer := range filed {
		object, err := probe(signer)
		if err != nil {
			return err
		}
		if filed[signer], err = requests.Create(ctx, object, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("file a request to try the policies on: %w", err)
		}
		defer func() {
			err = errors.Join(err, requests.Delete(context.WithoutCancel(ctx), object.Name, metav1.DeleteOptions{}))
		}()
	}
	dryRun := metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}}
	approve := func(signer string) error {
		r := filed[signer].DeepCopy()
		r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{
			Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Probe",
		}}
		_, err := requests.UpdateApproval(ctx, r.Name, r, dryRun)
		return err
	}
	tries := map[string]func() error{
		"node-attestation-approval": func() error { return approve(tpm.SignerName) },
		"node-attestation-serving":  func() error { return approve(certificatesv1.KubeletServingSignerName) },
		"node-attestation-annotations": func() error {
			r := filed[tpm.SignerName].DeepCopy()
			r.Annotations = map[string]string{attestation.AnnotationChallenge: "probe"}
			_, err := requests.Update(ctx, r, dryRun)
			return err
		},
		"node-attestation-certificates": func() error {
			r := filed[tpm.SignerName].DeepCopy()
			r.Status.Certificate = cp.ClientCA().CertPEM()
			_, err := requests.UpdateStatus(ctx, r, dryRun)
			return err
		},
		"node-attestation-size": func() error {
			long := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: csr.NewName()}, Spec: filed[tpm.SignerName].Spec}
			long.Spec.Request = append(slices.Clone(long.Spec.Request), strings.Repeat("\n", 200_000)...)
			_, err := requests.Create(ctx, long, metav1.CreateOptions{DryRun: dryRun.DryRun})
			return err
		},
	}
	// The Helm chart's alone.
	tries["node-attestation-uninstall"] = func() error {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "node-attestation-uninstall"}}
		_, err := cp.Client().CoreV1().ConfigMaps(Namespace).Create(ctx, object, metav1.CreateOptions{DryRun: dryRun.DryRun})
		return err
	}
	// may all that an administrator may, and belongs to the groups of machines besides
	masked := cp.AdminConfig()
	masked.Impersonate = rest.ImpersonationConfig{UserName: "system:bootstrap:probe1", Groups: []string{"system:masters", "system:bootstrappers", "system:authenticated"}}
	machine, err := kubernetes.NewForConfig(masked)
	if err != nil {
		return err
	}
	objects, err := dynamic.NewForConfig(cp.AdminConfig())
	if err != nil {
		return err
	}
	tries["node-attestation-metadata"] = func() error {
		labelled := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: csr.NewName()}, Spec: filed[tpm.SignerName].Spec}
		labelled.Finalizers = []string{"probe.invalid/1", "probe.invalid/2", "probe.invalid/3", "probe.invalid/4", "probe.invalid/5"}
		_, err := requests.Create(ctx, labelled, metav1.CreateOptions{DryRun: dryRun.DryRun})
		return err
	}
	tries["node-attestation-signers"] = func() error {
		other := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: csr.NewName()}, Spec: filed[tpm.SignerName].Spec}
		other.Spec.SignerName = "probe.invalid/signer"
		_, err := machine.CertificatesV1().CertificateSigningRequests().Create(ctx, other, metav1.CreateOptions{DryRun: dryRun.DryRun})
		return err
	}
	tries["node-attestation-records"] = func() error {
		record := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v1alpha1.GroupVersion.String(), "kind": "NodeAttestation", "metadata": map[string]any{"name": "probe"},
			"spec": map[string]any{"cluster": "probe", "machine": map[string]any{"source": "probe", "name": "probe"}, "provider": "probe", "nodeName": "probe"},
		}}
		_, err := objects.Resource(v1alpha1.Resource).Namespace(Namespace).Create(ctx, record, metav1.CreateOptions{DryRun: dryRun.DryRun})
		return err
	}
	// Those of packaging/kubernetes-revocation.
	tries["node-attestation-revocation-slices"] = func() error {
		list := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v1alpha1.GroupVersion.String(), "kind": "RevocationSlice", "metadata": map[string]any{"name": "probe"},
			"spec": map[string]any{"cluster": "probe", "number": int64(1)},
		}}
		_, err := objects.Resource(v1alpha1.GroupVersion.WithResource("revocationslices")).Namespace(Namespace).Create(ctx, list, metav1.CreateOptions{DryRun: dryRun.DryRun})
		return err
	}
	tries["node-attestation-announcement"] = func() error {
		patch := []byte(`{"data": {"probe": "x"}}`)
		_, err := cp.Client().CoreV1().ConfigMaps(attestation.AnnouncementNamespace).Patch(ctx, attestation.AnnouncementName, types.MergePatchType, patch, metav1.PatchOptions{DryRun: dryRun.DryRun})
		return err
	}
	for _, binding := range bindings.Items {
		policy := binding.Spec.PolicyName
		// it refuses nothing until it is filled
		if binding.Labels["attestation.cluster.x-k8s.io/filled-by"] != "" {
			continue
		}
		try, ok := tries[policy]
		if !ok {
			if strings.HasPrefix(policy, "node-attestation-") {
				return fmt.Errorf("nothing tries whether policy %s is in effect", policy)
			}
			continue
		}
		for {
			err := try()
			if err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'") {
				break
			}
			select {
			case <-ctx.Done():
				return errors.Join(fmt.Errorf("policy %s takes no effect: %w", policy, ctx.Err()), err)
			case <-time.After(pollInterval):
			}
		}
	}
	return nil
}

// probe is a request that nobody is going to decide on, as there is no controller yet.
func probe(signer string) (*certificatesv1.CertificateSigningRequest, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	return csr.Object(csr.NewName(), signer, content, key.Public(), nil), nil
}
