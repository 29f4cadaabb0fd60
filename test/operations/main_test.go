// SPDX-License-Identifier: Apache-2.0

// Package operations runs the recipes of docs/operations.md: each block as it is, on a real API
// server, with the shipped controller and plugin. Each test first shows the problem, then that the
// recipe solved it, and that another node renewed all the while.
package operations

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kubelet-authenticator/kubelet-authenticator/internal/testing/swtpm"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/api/v1alpha1"
	"github.com/kubelet-authenticator/kubelet-authenticator/pkg/controller/config"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/compile"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/controllerprocess"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/harness"
	"github.com/kubelet-authenticator/kubelet-authenticator/test/testbed"
)

const (
	module    = "../.."
	namespace = controllerprocess.Namespace
	// patience is the longest wait for a condition.
	patience = harness.Soon
	// overlay is the operator's kustomization, as docs/quickstart.md writes it.
	overlay = `apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../packaging/kubernetes]
generatorOptions: {disableNameSuffixHash: true}
configMapGenerator:
- {name: node-attestation-controller, namespace: node-attestation-system, files: [config.yaml]}
- {name: node-attestation-inventory, namespace: node-attestation-system, files: [inventory.yaml]}
`
)

// bed has what all recipes share: one cluster, and its operator's folder.
type bed struct {
	*testbed.ControlPlane
	client client.Client
	// dir is the operator's folder, admin the kubeconfig, bin the first folder in the shell's PATH.
	dir, admin, bin string
	// plugin and newer are the plugin of this release and of a later one.
	plugin, newer string
	maker         *swtpm.CA
	// issuer is the CA that the controller signs with, only for nodes.
	issuer     *x509.Certificate
	controller *controllerprocess.Controller
}

var shared *bed

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintf(os.Stderr, "%s: SKIPPED, NO RECIPE HAS RUN: the mount namespaces of nodes need root\n", os.Args[0])
		os.Exit(0)
	}
	testbed.Parallel(8) // they mostly wait
	os.Exit(testbed.Main(m, setUp))
}

func setUp(ctx context.Context, cp *testbed.ControlPlane, dir string) (err error) {
	b := &bed{
		ControlPlane: cp, dir: filepath.Join(dir, "operator"), admin: filepath.Join(dir, "admin.kubeconfig"), bin: filepath.Join(dir, "bin"),
		plugin: filepath.Join(dir, "kubelet-authenticator"), newer: filepath.Join(dir, "newerplugin"),
	}
	binary := filepath.Join(dir, "node-attestation-controller")
	scheme := runtime.NewScheme()
	for _, step := range []func() error{
		func() error { return os.MkdirAll(filepath.Join(b.dir, "cluster", "machines"), 0o700) },
		func() error { return os.MkdirAll(b.bin, 0o700) },
		func() error { return compile.Program(ctx, module, b.plugin, "./cmd/kubelet-authenticator") },
		func() error { return compile.Program(ctx, filepath.Join(module, "test"), b.newer, "./newerplugin") },
		func() error {
			return compile.Program(ctx, module, filepath.Join(b.bin, "kubectl-attest"), "./cmd/kubectl-attest")
		},
		func() error { return controllerprocess.Build(ctx, module, binary) },
		func() error { return b.BindKubeadmBootstrap(ctx) },
		func() error { return controllerprocess.Install(ctx, cp, module) },
		func() error { return b.writeAdmin(ctx) },
		func() error { return b.useNodesCA(ctx) },
		func() error { return errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)) },
		func() error { b.client, err = client.New(cp.AdminConfig(), client.Options{Scheme: scheme}); return err },
		func() error { b.maker, err = swtpm.NewCA(); return err },
		func() error { return b.writeCommands() },
		func() error { return b.deploy(ctx, dir, binary) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	shared = b
	return nil
}

// writeAdmin writes the operator's kubeconfig, with a token: a token outlives a rotation of the CA,
// and a restore.
func (b *bed) writeAdmin(ctx context.Context) error {
	const name, space = "operator", "kube-system"
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: name, Namespace: space}},
	}
	_, err := b.Client().CoreV1().ServiceAccounts(space).Create(ctx, account, metav1.CreateOptions{})
	_, problem := b.Client().RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
	if err := errors.Join(err, problem); err != nil {
		return err
	}
	token, err := b.Client().CoreV1().ServiceAccounts(space).CreateToken(ctx, name, tokenRequest, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	return b.WriteKubeconfig(b.admin, testbed.TokenUser(token.Status.Token))
}

// clientCAFile returns the path of the API server's --client-ca-file.
func (b *bed) clientCAFile() string { return filepath.Join(b.Dir(), "client-ca.crt") }

// useNodesCA gives nodes a CA of their own, beside that of the cluster.
func (b *bed) useNodesCA(ctx context.Context) error {
	ca, err := testbed.NewCA("nodes")
	if err != nil {
		return err
	}
	b.issuer = ca.Certificate()
	key, err := ca.KeyPEM()
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.clientCAFile(), append(b.ClientCA().CertPEM(), ca.CertPEM()...), 0o600); err != nil {
		return err
	}
	secrets := b.Client().CoreV1().Secrets(namespace)
	secret, err := secrets.Get(ctx, controllerprocess.CASecret, metav1.GetOptions{})
	if err != nil {
		return err
	}
	secret.Data = map[string][]byte{corev1.TLSCertKey: ca.CertPEM(), corev1.TLSPrivateKeyKey: key}
	_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	return err
}

// deploy puts the operator's files in place, and applies them. The controller runs until the
// process ends.
func (b *bed) deploy(ctx context.Context, dir, binary string) (err error) {
	own := filepath.Join(dir, "controller")
	if err := os.Mkdir(own, 0o700); err != nil {
		return err
	}
	b.controller, err = controllerprocess.New(controllerprocess.Options{
		ControlPlane: b.ControlPlane, Dir: own, Binary: binary,
		Configure: func(c *config.Config) {
			// the process that it starts again would wait for the Lease
			c.LeaderElection.Enabled = false
			c.Rates.PerMachine.Every.Duration = time.Millisecond // a node renews all the time
			// a certificate of 10 minutes is due at once
			c.Lifetimes.Backdate.Duration = time.Hour
		},
	})
	if err != nil {
		return err
	}
	settings, err := os.ReadFile(b.controller.ConfigFile())
	if err != nil {
		return err
	}
	for name, content := range map[string]string{
		"config.yaml":        string(settings),
		"inventory.yaml":     "apiVersion: authenticator.cluster.x-k8s.io/v1alpha1\nkind: MachineInventory\nmachines: []\n",
		"kustomization.yaml": overlay,
	} {
		if err := os.WriteFile(filepath.Join(b.dir, "cluster", name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	if err := os.CopyFS(filepath.Join(b.dir, "packaging", "kubernetes"), os.DirFS(filepath.Join(module, "packaging", "kubernetes"))); err != nil {
		return err
	}
	for _, args := range [][]string{
		// The apply below creates it again. Then it has no other field manager, so a recipe has no
		// conflict.
		{"delete", "configmap", "node-attestation-inventory", "--namespace=" + namespace},
		{"apply", "--server-side", "--force-conflicts", "--kustomize=" + filepath.Join(b.dir, "cluster")},
	} {
		if _, err := b.RunKubectl(ctx, b.admin, args...); err != nil {
			return err
		}
	}
	go b.playDeployment(ctx)
	return nil
}
