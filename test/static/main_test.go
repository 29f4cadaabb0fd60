// SPDX-License-Identifier: Apache-2.0

// Package static tests the admission policies that an API server reads from its own disk, on real
// API servers: what nobody can undo, at the start of a server, while the files change, and beside
// the same policies in the API.
package static

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/command"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/policyset"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	packaging      = "../../packaging/"
	namespace      = "node-attestation-system"
	controllerUser = "system:serviceaccount:" + namespace + ":node-attestation-controller"
	tpmSigner      = "cluster.x-k8s.io/kube-apiserver-client-kubelet-tpm"
	approvalPolicy = "node-attestation-approval"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard()) // what a client has to say, such as that a kind is deprecated
	testbed.Parallel(3)
	os.Exit(m.Run())
}

// cluster is a control plane whose API servers may read policies from a folder.
type cluster struct {
	*testbed.ControlPlane
	// dir is the folder of the static form, admin is a member of system:masters.
	dir, kubeconfig string
	admin           kubernetes.Interface
}

// newCluster starts a control plane. Its API server reads the static form if options has flags for
// it.
func newCluster(t *testing.T, dir string, options testbed.Options) *cluster {
	t.Helper()
	options.Progress = os.Stderr
	cp, err := testbed.Start(t.Context(), options)
	harness.Must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(cp.Logs())
		}
		harness.Must(t, cp.Stop())
	})
	c := &cluster{ControlPlane: cp, dir: dir, kubeconfig: filepath.Join(t.TempDir(), "admin.kubeconfig"), admin: cp.Client()}
	harness.Must(t, cp.WriteKubeconfig(c.kubeconfig, cp.AdminUser()))
	return c
}

// newFolder returns a folder for the static form. Its path is short and plain, as on a control
// plane.
func newFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "static-")
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, os.RemoveAll(dir)) })
	return dir
}

// policies runs the controller's command for a folder, with more arguments.
func policies(t *testing.T, dir string, args ...string) {
	t.Helper()
	var out bytes.Buffer
	args = append([]string{"policies", "--static", dir, "--path", dir, "--kubernetes-version=v1.37.0"}, args...)
	if code := (command.Program{}).Run(t.Context(), command.Process{Args: args, Stdout: &out, Stderr: &out}); code != 0 {
		t.Fatal(out.String())
	}
}

// readsFrom returns the flag by which an API server reads the static form.
func readsFrom(dir string) string {
	return "--admission-control-config-file=" + filepath.Join(dir, policyset.AdmissionFile)
}

// apply applies manifests below packaging.
func (c *cluster) apply(t *testing.T, files ...string) {
	t.Helper()
	args := []string{"apply", "--server-side", "--validate=strict", "--force-conflicts"}
	for _, file := range files {
		args = append(args, "--filename="+packaging+file)
	}
	_, err := c.RunKubectl(t.Context(), c.kubeconfig, args...)
	harness.Must(t, err)
}

// as returns a client of another user, by impersonation. RBAC lets it do everything.
func as(t *testing.T, config *rest.Config, user string, groups ...string) kubernetes.Interface {
	t.Helper()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:masters", "system:authenticated")}
	client, err := kubernetes.NewForConfig(config)
	harness.Must(t, err)
	return client
}

// newRequest files a request as a kubelet does, and returns its name.
func newRequest(t *testing.T, api kubernetes.Interface) string {
	t.Helper()
	name := "node-csr-" + strings.ToLower(rand.Text())
	_, err := api.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pkcs10(t), SignerName: tpmSigner,
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	harness.Must(t, err)
	return name
}

// pkcs10 returns a node's PKCS#10 request in PEM, of a new key.
func pkcs10(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:node-1", Organization: []string{"system:nodes"}}}, key)
	harness.Must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// approve tries to approve a request, in a dry run.
func approve(ctx context.Context, api kubernetes.Interface, name string) error {
	content, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{
		map[string]any{"type": certificatesv1.CertificateApproved, "status": corev1.ConditionTrue, "reason": "Test"},
	}}})
	if err != nil {
		return err
	}
	_, err = api.CertificatesV1().CertificateSigningRequests().Patch(ctx, name, types.MergePatchType, content, metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, "approval")
	return err
}

// refusedBy reports whether this policy has refused.
func refusedBy(err error, policy string) bool {
	return (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsRequestEntityTooLargeError(err)) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+policy+"'")
}

func isStatic(policy string) string { return policy + policyset.Suffix }

// askIdentity asks an API server for its static form.
func askIdentity(ctx context.Context, api kubernetes.Interface) (policyset.Identity, error) {
	content := fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"Unknown","reason":"DryRun","message":"","lastTransitionTime":null}]}}`, policyset.ConditionStatic)
	_, err := api.CoreV1().Namespaces().Patch(ctx, metav1.NamespaceDefault, types.StrategicMergePatchType, []byte(content), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, "status")
	identity, ok := policyset.ParseRefusal(err)
	if !ok {
		return identity, errors.Join(errors.New("there is no identity"), err)
	}
	return identity, nil
}
